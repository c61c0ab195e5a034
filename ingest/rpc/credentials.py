"""How to reach a daemon: references to the token and to the authority that vouches for its certificate.

It travels with Spark tasks and to child processes; what it refers to is looked up where the connection is made, so an
executor needs the same environment variable or files, and no pickle ever holds a secret.
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
    """The headers of a Flight call to `endpoint` that show a token.

    Raises: Invalid where it would cross a network in clear.
    """
    if token is None:
        return []
    if not endpoint.startswith(TLS) and not is_loopback(_host(endpoint)):
        raise Invalid(f"{endpoint}: the token would travel in clear; write {TLS}host:port, where the daemon has TLS")
    return [(b"authorization", f"Bearer {token}".encode())]


def authority(given: str | Path | bytes, name: str = "tls_ca") -> bytes:
    """The certificates of a PEM file, or those given as they are. Raises: Invalid, which begins with `name`."""
    try:
        pem = given if isinstance(given, bytes) else Path(given).read_bytes()
    except TypeError:
        raise Invalid(f"{name} = {given!r}: give the path of a PEM file, or its bytes") from None
    except OSError as error:
        raise Invalid(f"{name}: {given!s}: {error.strerror}; give the path of a PEM file") from None
    if _CERTIFICATE not in pem:
        what = "it" if isinstance(given, bytes) else str(given)
        raise Invalid(
            f"{name}: {what} holds no certificate in PEM; give that of the authority, or of the daemon itself"
        )
    return pem


@dataclass(frozen=True, slots=True)
class Access:
    """What to show to a daemon and how to know it.

    Thread safety. Immutable. Pickles; holds no secret.
    """

    token: str = ""
    """env:NAME or file:PATH; empty: none."""
    tls_ca: str = ""
    """PEM file of the authority that signed the daemon's certificate; empty: the system's."""

    @classmethod
    def of(cls, settings: Settings) -> Access:
        """As [daemon] says."""
        return cls(settings.daemon.token.get_secret_value(), settings.daemon.tls_ca)

    def options(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """`token` and `tls_ca` for `memwal.connect`. Raises: Invalid for what points nowhere."""
        token = resolve_one("daemon.token", SecretStr(self.token), environ)
        return {"token": token or None, "tls_ca": self._authority()}

    def _authority(self) -> bytes | None:
        return authority(self.tls_ca, "daemon.tls_ca") if self.tls_ca else None


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0]
