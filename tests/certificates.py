"""Certificates of authorities, servers and clients for tests of TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme

Pair = tuple[str, str]
"""The paths of a certificate and of its key."""


@dataclass(frozen=True)
class Certificates:
    """PEM files: the server's authority, a separate authority for clients, and the certificates that they signed."""

    place: Path
    server_ca: Path
    client_ca: Path
    server: Pair
    client: Pair
    expired: Pair
    stranger: Pair
    """A certificate signed by another authority."""

    @property
    def server_only(self) -> dict[str, str]:
        """Return the settings of [daemon] without certificates of clients."""
        return {"tls_cert": self.server[0], "tls_key": self.server[1], "tls_ca": str(self.server_ca)}

    @property
    def daemon(self) -> dict[str, str]:
        """Return the settings of [daemon]."""
        names = ("tls_cert", "tls_key", "tls_client_cert", "tls_client_key", "tls_ca", "tls_client_ca")
        return dict(zip(names, (*self.server, *self.client, str(self.server_ca), str(self.client_ca)), strict=True))

    def context(self, presented: Pair | None = None) -> ssl.SSLContext:
        """Return the TLS context of an HTTP client."""
        context = ssl.create_default_context(cafile=str(self.server_ca))
        if presented is not None:
            context.load_cert_chain(*presented)
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Return new certificates for loopback."""
    servers, clients, retired, strangers = (trustme.CA() for _ in range(4))

    def issued(authority: trustme.CA, name: str, **options: Any) -> Pair:
        signed = authority.issue_cert("127.0.0.1", "localhost", **options)
        paths = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        paths[0].write_bytes(b"".join(pem.bytes() for pem in signed.cert_chain_pems))
        signed.private_key_pem.write_to_path(str(paths[1]))
        return str(paths[0]), str(paths[1])

    past = {"not_before": datetime(2020, 1, 1, tzinfo=UTC), "not_after": datetime(2020, 2, 1, tzinfo=UTC)}
    servers.cert_pem.write_to_path(str(tmp_path / "server_ca.pem"))
    # Two authorities in one file, as while the clients' authority is replaced.
    (tmp_path / "client_ca.pem").write_bytes(retired.cert_pem.bytes() + clients.cert_pem.bytes())
    return Certificates(
        tmp_path,
        tmp_path / "server_ca.pem",
        tmp_path / "client_ca.pem",
        issued(servers, "server"),
        issued(clients, "client"),
        issued(clients, "expired", **past),
        issued(strangers, "stranger"),
    )
