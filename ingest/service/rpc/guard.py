"""Authenticate callers, count rejected requests, and check listening addresses.

Bearer tokens with roles, TLS and client certificates apply to Flight and HTTP alike. Settings hold tokens as
references, `env:NAME` or `file:PATH`. A `Guard` holds the resolved tokens; the listening process creates it and never
sends it to another process.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pyarrow.flight as flight

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve_one
from memwal.ingest.service.rpc.roles import Role, Tokens
from memwal.ingest.service.rpc.tls import authority, load_pair, read_pem
from memwal.ingest.settings.endpoints import is_loopback
from memwal.ingest.settings.sections import DaemonSettings

REFUSED = "missing or wrong token"
Way = Literal["flight", "http"]
Why = Literal["token", "certificate", "role", "site", "invalid", "size", "busy", "time", "memory"]
WAYS: tuple[Way, ...] = get_args(Way)
WHYS: tuple[Why, ...] = get_args(Why)
_BEARER = "bearer"
_CLIENT_CA = "daemon.tls_client_ca"


class Refused:
    """The number of rejected requests since the start of the process.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[tuple[Way, Why]]()

    def add(self, way: Way, why: Why) -> None:
        """Count one request."""
        with self._lock:
            self._counts[way, why] += 1

    def counts(self, way: Way) -> Mapping[Why, int]:
        """Return the rejected requests of one interface by reason, with 0 for reasons without any."""
        with self._lock:
            return {why: self._counts[way, why] for why in WHYS}


@dataclass(frozen=True, slots=True)
class Guard:
    """Credentials that a listening process requires of its callers. An empty guard requires nothing.

    Thread safety. Immutable. No repr contains secrets.
    """

    token: bytes = field(default=b"", repr=False)
    """A token that never changes, with the role admin. If `tokens` is set: empty exactly if no token is required."""
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False)
    tokens: Tokens | None = field(default=None, repr=False)
    refused: Refused = field(default_factory=Refused, repr=False, compare=False)
    """Counts the rejected requests."""
    client_ca: bytes = field(default=b"", repr=False)
    """Certificates of the CAs that sign client certificates. Empty: clients need no certificate."""

    @classmethod
    def of(cls, daemon: DaemonSettings, environ: Mapping[str, str]) -> Guard:
        """Return the guard that [daemon] configures.

        Raises: Invalid for a token that cannot be resolved, and for files that are not a certificate and its key.
        """
        token = resolve_one("daemon.token", daemon.token, environ).encode()
        tokens = Tokens(daemon, environ) if token else None
        if not daemon.tls_cert:
            return cls(token, tokens=tokens)
        certificate, key = read_pem(daemon.tls_cert, "daemon.tls_cert"), read_pem(daemon.tls_key, "daemon.tls_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_pair(context, daemon.tls_cert, daemon.tls_key, "daemon.tls_cert")
        client_ca = authority(daemon.tls_client_ca, _CLIENT_CA) if daemon.tls_client_ca else b""
        if client_ca:
            _demand(context, client_ca, daemon.tls_client_ca)
        return cls(token, certificate, key, context, tokens, client_ca=client_ca)

    @property
    def complete(self) -> bool:
        """Whether token and TLS are set, as required to listen on an address that other machines can reach."""
        return bool(self.token and self.context)

    def role(self, header: str | None) -> Role | None:
        """Return the role of an Authorization header; None for a wrong token.

        Every wrong token takes the same time. Without a configured token every caller is an admin.
        """
        if not self.token:
            return "admin"
        kind, _, given = (header or "").partition(" ")
        sent = given.strip().encode("utf-8", "surrogateescape")
        if self.tokens is not None:
            role = self.tokens.role(sent)
        else:
            role = "admin" if hmac.compare_digest(sent, self.token) else None
        return role if kind.lower() == "bearer" else None

    def admits(self, header: str | None) -> bool:
        """Return whether an Authorization header has a valid token, which permits reads."""
        return self.role(header) is not None

    def flight_options(self) -> dict[str, Any]:
        """Return the arguments for a Flight server."""
        options: dict[str, Any] = {}
        if self.token:
            options["middleware"] = {_BEARER: _BearerFactory(self)}
        if self.context:
            options["tls_certificates"] = [(self.certificate, self.key)]
        if self.client_ca:
            options |= {"verify_client": True, "root_certificates": self.client_ca}
        return options

    def scheme(self, plain: str, secured: str) -> str:
        """Return the URL scheme `secured` with TLS, else `plain`."""
        return secured if self.context else plain


def role_of(context: flight.ServerCallContext, guard: Guard) -> Role:
    """Return the role of the caller of a Flight call that `guard` has admitted."""
    found = context.get_middleware(_BEARER)
    if found is None and guard.token:
        raise flight.FlightUnauthenticatedError(REFUSED)
    return "admin" if found is None else found.role


class _Bearer(flight.ServerMiddleware):  # type: ignore[misc]
    """Holds the role of the caller of one call."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role: Role = role


class _BearerFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Rejects a call without a valid token before its handler runs."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def start_call(self, _info: flight.CallInfo, headers: Mapping[str, list[str | bytes]]) -> _Bearer:
        given = next((values for name, values in headers.items() if name.lower() == "authorization"), None) or [""]
        role = self._guard.role(given[0].decode("utf-8", "replace") if isinstance(given[0], bytes) else given[0])
        if role is None:
            self._guard.refused.add("flight", "token")
            raise flight.FlightUnauthenticatedError(REFUSED)
        return _Bearer(role)


def _demand(context: ssl.SSLContext, client_ca: bytes, path: str) -> None:
    """Configure `context` to verify client certificates.

    A client without a certificate may connect, because Kubernetes probes cannot present one; the pages decide what it
    may read.
    """
    try:
        context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Invalid(f"{_CLIENT_CA}: {path} is not the certificate of a CA in PEM form ({reason})") from None
    context.verify_mode = ssl.CERT_OPTIONAL


def check_address(setting: str, host: str, port: int, guard: Guard | None = None, *, free: bool = True) -> None:
    """Check, before regions are claimed, that this process can and may listen on an address.

    `setting`: name of the port's setting, for example daemon.http_port. `free`: check that the port is free; pass
    False if this process may already listen on it.
    Raises: Invalid if the address is unknown, in use, or reachable from other machines without a token and TLS.
    """
    section = setting.partition(".")[0]
    host_setting = "sink.http_host" if section == "sink" else "daemon.host"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Invalid(f"{host_setting}: '{host}' is not an address ({error.strerror}); write 127.0.0.1") from None
    if not is_loopback(str(address[0])) and not (guard is not None and guard.complete):
        raise Invalid(
            f"{host_setting}: {host} is not a loopback address, other machines can reach it: set daemon.token, "
            "daemon.tls_cert and daemon.tls_key, or write 127.0.0.1"
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
