"""Credentials for connections to daemons: the token, the trusted CA and the client certificate.

`Access` holds references to them. Spark tasks and child processes receive the references and resolve them when they
connect, so an executor needs the same environment variables or files, and no pickle contains a secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve_one
from memwal.ingest.service.rpc.tls import ClientTls, authority, client_certificate
from memwal.ingest.settings.endpoints import TLS, is_loopback

if TYPE_CHECKING:
    from memwal.ingest.settings.load import Settings


def bearer(endpoint: str, token: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers with the token for a Flight call to `endpoint`.

    Raises: Invalid if the token would cross a network unencrypted.
    """
    if token is None:
        return []
    host = endpoint.partition("://")[2].rpartition(":")[0]
    if not endpoint.startswith(TLS) and not is_loopback(host):
        raise Invalid(f"{endpoint}: the token would be sent unencrypted; give the daemon TLS, and write {TLS}host:port")
    return [(b"authorization", f"Bearer {token}".encode())]


@dataclass(frozen=True, slots=True)
class Access:
    """References to the token of a daemon, to the CA that signed its certificate, and to the client's own
    certificate.

    Thread safety. Immutable. Pickles; holds no secret.
    """

    token: str = ""
    """env:NAME or file:PATH; empty: no token."""
    tls_ca: str = ""
    """PEM file of the CA that signed the daemon's certificate; empty: the system's CAs."""

    tls_cert: str = ""
    """PEM file of the certificate that this process presents; empty: none."""
    tls_key: str = ""
    """PEM file of its private key."""

    @classmethod
    def of(cls, settings: Settings) -> Access:
        """Return the access that [daemon] configures."""
        daemon = settings.daemon
        certificate, key = daemon.tls_client_cert, daemon.tls_client_key
        if daemon.tls_client_ca and not certificate:  # daemons present their server certificate to each other
            certificate, key = daemon.tls_cert, daemon.tls_key
        return cls(daemon.token.get_secret_value(), daemon.tls_ca, certificate, key)

    def options(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Return `token` and `tls` for a `Connection`.

        Raises: Invalid for references that cannot be resolved, and for files with unexpected content.
        """
        token = resolve_one("daemon.token", SecretStr(self.token), environ)
        trusted = authority(self.tls_ca, "daemon.tls_ca") if self.tls_ca else None
        names = "daemon.tls_client_cert", "daemon.tls_client_key"
        own = client_certificate(self.tls_cert, self.tls_key, names) if self.tls_cert else (None, None)
        return {"token": token or None, "tls": ClientTls(trusted, *own)}
