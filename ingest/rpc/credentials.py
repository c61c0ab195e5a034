"""Credentials for connections to daemons: the token, and the CA that clients trust.

`Access` holds references to both. It is sent to Spark tasks and child processes and resolved where the connection is
made, so an executor needs the same environment variables or files, and no pickle holds a secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from memwal.ingest.errors import Invalid
from memwal.ingest.rpc.guard import is_loopback
from memwal.ingest.secret_refs import resolve_one
from memwal.ingest.settings.endpoints import TLS

if TYPE_CHECKING:
    from memwal.ingest.settings.load import Settings


_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def bearer(endpoint: str, token: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers with the token for a Flight call to `endpoint`.

    Raises: Invalid if the token would cross a network unencrypted.
    """
    if token is None:
        return []
    if not endpoint.startswith(TLS) and not is_loopback(_host(endpoint)):
        raise Invalid(f"{endpoint}: the token would be sent unencrypted; give the daemon TLS, and write {TLS}host:port")
    return [(b"authorization", f"Bearer {token}".encode())]


def authority(given: str | Path | bytes, name: str = "tls_ca") -> bytes:
    """Return the certificates of a PEM file, or those given as bytes. Raises: Invalid, naming `name`."""
    try:
        pem = given if isinstance(given, bytes) else Path(given).read_bytes()
    except TypeError:
        raise Invalid(f"{name} = {given!r}: give the path of a PEM file, or its bytes") from None
    except OSError as error:
        raise Invalid(f"{name}: {given!s}: {error.strerror}; give the path of a PEM file") from None
    if _CERTIFICATE not in pem:
        what = "it" if isinstance(given, bytes) else str(given)
        raise Invalid(f"{name}: {what} has no certificate in PEM; give that of the CA, or of the daemon itself")
    return pem


@dataclass(frozen=True, slots=True)
class Access:
    """References to the token for a daemon and to the CA that signed its certificate.

    Thread safety. Immutable. Pickles; holds no secret.
    """

    token: str = ""
    """env:NAME or file:PATH; empty: no token."""
    tls_ca: str = ""
    """PEM file of the CA that signed the daemon's certificate; empty: the system's CAs."""

    @classmethod
    def of(cls, settings: Settings) -> Access:
        """Return the access that [daemon] configures."""
        return cls(settings.daemon.token.get_secret_value(), settings.daemon.tls_ca)

    def options(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Return `token` and `tls_ca` for `memwal.connect`. Raises: Invalid for references that cannot be resolved."""
        token = resolve_one("daemon.token", SecretStr(self.token), environ)
        return {"token": token or None, "tls_ca": self._authority()}

    def _authority(self) -> bytes | None:
        return authority(self.tls_ca, "daemon.tls_ca") if self.tls_ca else None


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0]
