"""Who may talk to a process of ours: a bearer token and TLS, for Flight and for HTTP alike.

A token is kept as the reference that the configuration holds, `env:NAME` or `file:PATH`, and resolved where it is used;
the object that holds it in clear (`Guard`) is made in the listening process and never leaves it.

Addresses that processes of ours listen on: free, and on loopback unless callers must show who they are.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve_one
from memwal.ingest.settings.load import DaemonSettings

REFUSED = "missing or wrong token"


@dataclass(frozen=True, slots=True)
class Guard:
    """What a listening process asks of its callers; nothing, when it is empty.

    Thread safety. Immutable. Secrets are in no repr.
    """

    token: bytes = field(default=b"", repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def of(cls, daemon: DaemonSettings, environ: Mapping[str, str]) -> Guard:
        """As [daemon] says. Raises: Invalid for a reference that points nowhere, files that are no certificate and
        key."""
        token = resolve_one("daemon.token", daemon.token, environ).encode()
        if not daemon.tls_cert:
            return cls(token)
        certificate, key = _pem("tls_cert", daemon.tls_cert), _pem("tls_key", daemon.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(daemon.tls_cert, daemon.tls_key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise Invalid(
                f"daemon.tls_cert: {daemon.tls_cert} and {daemon.tls_key} are no certificate and its key, in PEM and "
                f"without a password ({getattr(error, 'reason', None) or error})"
            ) from None
        return cls(token, certificate, key, context)

    @property
    def complete(self) -> bool:
        """Whether a process may listen where others reach it."""
        return bool(self.token and self.context)

    def admits(self, header: str | None) -> bool:
        """Whether an Authorization header carries the token; takes as long whatever is wrong with it."""
        if not self.token:
            return True
        kind, _, given = (header or "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self.token)
        return right and kind.lower() == "bearer"

    def flight_options(self) -> dict[str, Any]:
        """What a Flight server is made with."""
        options: dict[str, Any] = {}
        if self.token:
            options["middleware"] = {"bearer": _BearerFactory(self)}
        if self.context:
            options["tls_certificates"] = [(self.certificate, self.key)]
        return options

    def scheme(self, plain: str, secured: str) -> str:
        """The one that fits."""
        return secured if self.context else plain


class _BearerFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without the token before its handler sees it."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def start_call(self, _info: flight.CallInfo, headers: Mapping[str, list[str | bytes]]) -> None:
        given = next((values for name, values in headers.items() if name.lower() == "authorization"), None) or [""]
        if not self._guard.admits(given[0].decode("utf-8", "replace") if isinstance(given[0], bytes) else given[0]):
            raise flight.FlightUnauthenticatedError(REFUSED)


def _pem(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Invalid(f"daemon.{setting}: {path}: {error.strerror}; give the path of a PEM file") from None


def _no_password() -> str:
    """In place of a question on the terminal, which a daemon has nobody to answer."""
    raise ValueError("it has a password")


def check_address(setting: str, host: str, port: int, guard: Guard | None = None, *, free: bool = True) -> None:
    """Refuse an address that nobody can or may listen on, before anything is claimed.

    `setting` names the port, such as daemon.http_port. `free` False: it may be taken, maybe by the very process.
    Raises: Invalid when the address is unknown, taken, or reachable from elsewhere while `guard` does not ask for a
    token and TLS.
    """
    section = setting.partition(".")[0]
    host_setting = "sink.http_host" if section == "sink" else "daemon.host"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Invalid(f"{host_setting}: '{host}' is no address ({error.strerror}); write 127.0.0.1") from None
    if not is_loopback(str(address[0])) and not (guard is not None and guard.complete):
        raise Invalid(
            f"{host_setting}: {host} is not a loopback address, others can reach it: set daemon.token, daemon.tls_cert "
            "and daemon.tls_key, or write 127.0.0.1"
        )
    if not free:
        return
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Invalid(
                f"{setting}: {port} on {host} is in use or not allowed ({error.strerror}); "
                "choose another port, or 0 for any free one"
            ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names localhost alone, the others are not asked for."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
