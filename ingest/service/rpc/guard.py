"""Authenticate callers, count rejected requests, and check listening addresses.

Bearer tokens with roles, TLS and client certificates apply to Flight and HTTP alike. Settings hold tokens as
references, `env:NAME` or `file:PATH`. A `Guard` holds the resolved tokens; the listening process creates it and never
sends it to another process. Roles:

- `read`: every read, the status, the changes, the page and the metrics.
- `write`: puts and deletes with the calls that they need, and reads.
- `admin`: everything. Daemons of one table act as admins on each other.

An entry of `daemon.tokens` may limit its token to some tables of a fleet. Its callers use no other table, see the names
of no others, and ask nothing that concerns the whole daemon.

A process checks the token files (`file:PATH`), except that of `daemon.token`, once a second. After a change the
previous token stays valid for `GRACE` seconds, so that callers have time to switch. A file that cannot be read, is
empty, or holds the token of another role only causes a log entry, and is tried again. `daemon.token` is read once:
daemons send it to each other, so a daemon that switched alone would be isolated.
"""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow.flight as flight
from pydantic import SecretStr

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import FROM_FILE, resolve_one
from memwal.ingest.service.rpc.tls import authority, load_pair, read_pem
from memwal.ingest.settings.endpoints import is_loopback
from memwal.ingest.settings.sections import DaemonSettings, Role
from memwal.wal import Clock, SystemClock

REFUSED = "missing or wrong token"
Way = Literal["flight", "http"]
Why = Literal["token", "certificate", "role", "site", "invalid", "size", "busy", "time", "memory"]
WAYS: tuple[Way, ...] = get_args(Way)
WHYS: tuple[Why, ...] = get_args(Why)
_BEARER = "bearer"
_CLIENT_CA = "daemon.tls_client_ca"
Stamp = tuple[int, ...]
_RANKS: Mapping[Role, int] = {"read": 1, "write": 2, "admin": 3}
SETTINGS: Mapping[str, Role] = {"token": "admin", "write_token": "write", "read_token": "read"}
"""Settings of [daemon] with a token, and the role that the token grants."""
LOOK_EVERY = 1.0
"""Seconds between two checks of a file."""
GRACE = 300.0
"""Seconds that a replaced token remains valid."""
_LOG = logging.getLogger("memwal.access")


def permits(role: Role, wanted: Role) -> bool:
    """Return whether a caller with `role` may make a call that needs `wanted`."""
    return _RANKS[role] >= _RANKS[wanted]


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a token: a role, for the tables that one of the patterns `tables` matches; for all if empty."""

    role: Role
    tables: tuple[str, ...] = ()

    def covers(self, table: str | None) -> bool:
        """Return whether the token is for the table of a name. None: for the whole daemon, or a table without one."""
        return not self.tables or (table is not None and any(fnmatchcase(table, each) for each in self.tables))


_EVERYTHING = Grant("admin")


@dataclass(frozen=True, slots=True)
class _Held:
    """One token. `stamp`: identifies the version of its file; None if the file is not checked again. `before`: the
    replaced token, valid until `until` in monotonic seconds."""

    setting: str
    grant: Grant
    reference: SecretStr
    stamp: Stamp | None
    value: bytes = field(repr=False)
    before: bytes = field(default=b"", repr=False)
    until: float = 0.0


class Tokens:
    """The tokens that a listening process accepts, with their roles.

    Thread safety. Any thread. No repr contains secrets.
    """

    def __init__(self, daemon: DaemonSettings, environ: Mapping[str, str], clock: Clock | None = None) -> None:
        """Resolve the tokens of [daemon]. Raises: Invalid for a token that cannot be resolved, and if two settings
        share a token."""
        self._environ, self._clock = environ, clock or SystemClock()
        self._looking, self._looked = threading.Lock(), self._clock.monotonic()
        references: Mapping[str, SecretStr] = {name: getattr(daemon, name) for name in SETTINGS}
        given = [(name, Grant(SETTINGS[name]), each) for name, each in references.items() if each.get_secret_value()]
        given += [
            (f"tokens[{at}]", Grant(each.role, tuple(each.tables)), each.token) for at, each in enumerate(daemon.tokens)
        ]
        self._held = [self._first(*each) for each in given]
        self._told: Mapping[str, Stamp | None] = {}
        """The stamps of the files when a problem was last logged."""
        _check_different({held.setting: held.value for held in self._held})

    def grant(self, given: bytes) -> Grant | None:
        """Return the rights of the token `given`; None for a wrong token. Every wrong token takes the same time.

        A token that was moved from one setting to another has the higher of the two roles, until the change before
        runs out.
        """
        self._look_again()
        now, found = self._clock.monotonic(), list[tuple[int, bool, Grant]]()
        for held in list(self._held):
            right = hmac.compare_digest(given, held.value)
            before = bool(held.before) and now < held.until and hmac.compare_digest(given, held.before)
            found += [(_RANKS[held.grant.role], right, held.grant)] * (right | before)
        return max(found, key=lambda each: each[:2])[2] if found else None

    def _look_again(self) -> None:
        now = self._clock.monotonic()
        if now - self._looked < LOOK_EVERY or not self._looking.acquire(blocking=False):
            return
        try:
            self._looked = now
            stamps = {held.setting: held.stamp and _stamp(held.reference) for held in self._held}
            changed = [held for held in self._held if stamps[held.setting] != held.stamp]
            if changed:
                self._take_over(changed, stamps, now)
        finally:
            self._looking.release()

    def _take_over(self, changed: Sequence[_Held], stamps: Mapping[str, Stamp | None], now: float) -> None:
        """Apply the tokens of changed files in one step: all valid ones, or none if two roles would share a token."""
        values, problems = dict[str, bytes](), list[Invalid]()
        for held in changed:
            try:
                values[held.setting] = self._resolved(held.setting, held.reference)
            except Invalid as error:
                problems.append(error)
        try:
            _check_different({held.setting: values.get(held.setting, held.value) for held in self._held})
        except Invalid as error:
            problems.append(error)
            values = {}
        if problems and self._told != stamps:  # log once for each state of the files, not every second
            self._told = stamps
            for problem in problems:
                _LOG.warning("%s; the token before stays in force", problem)
        self._held = [self._replaced(held, values.get(held.setting), stamps[held.setting], now) for held in self._held]

    def _replaced(self, held: _Held, value: bytes | None, stamp: Stamp | None, now: float) -> _Held:
        if value is None:
            return held
        if value == held.value:
            return replace(held, stamp=stamp)
        _LOG.info("daemon.%s was changed; the token before is taken for %d s more", held.setting, GRACE)
        return replace(held, stamp=stamp, value=value, before=held.value, until=now + GRACE)

    def _first(self, setting: str, grant: Grant, reference: SecretStr) -> _Held:
        # read before the value, so a change in between is detected
        stamp = None if setting == "token" else _stamp(reference)
        return _Held(setting, grant, reference, stamp, self._resolved(setting, reference))

    def _resolved(self, setting: str, reference: SecretStr) -> bytes:
        return resolve_one(f"daemon.{setting}", reference, self._environ).encode()


def _check_different(tokens: Mapping[str, bytes]) -> None:
    """Check that all tokens differ. Raises: Invalid if two settings have the same token, because its role is
    ambiguous."""
    seen: dict[bytes, str] = {}
    for setting, value in tokens.items():
        if value in seen:
            raise Invalid(f"daemon.{setting} and daemon.{seen[value]} are the same token; give each role its own")
        seen[value] = setting


def _stamp(reference: SecretStr) -> Stamp | None:
    """Return a value that changes whenever the file of a token changes; None if the token is not in a file."""
    text = reference.get_secret_value()
    if not text.startswith(FROM_FILE):
        return None
    try:
        found = Path(text.removeprefix(FROM_FILE)).stat()
    except OSError:
        return (0,)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class AccessLog:
    """Writes the log `memwal.access`: actions of admins, and calls that a caller's role does not permit.

    Thread safety. Any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._refused = clock, float("-inf")

    def admin(self, call: str, peer: str) -> None:
        """Log an action of an admin. `peer`: the caller's address."""
        _LOG.info("admin: %s by %s", call, peer, extra={"event": "admin", "call": call, "peer": peer})

    def refusal(
        self,
        grant: Grant | None,
        wanted: Role,
        call: str,
        peer: str,
        table: str | None = None,
        *,
        any_table: bool = False,
    ) -> str | None:
        """Return why `grant` does not permit `call`, which needs the role `wanted` for `table`; None if it does.

        `table`: see `Grant.covers`. `any_table`: the call returns only what concerns the tables of the grant.
        Logs a rejection at most once a second, so that callers cannot fill the log.
        """
        if grant is not None and permits(grant.role, wanted) and (any_table or grant.covers(table)):
            return None
        role, tables = (None, ()) if grant is None else (grant.role, grant.tables)
        now = self._clock.monotonic()
        if now - self._refused >= 1.0:
            self._refused = now
            fields = {"event": "refused", "call": call, "role": role, "peer": peer, "table": table}
            _LOG.warning("refused: %s by %s, whose token has the role %s", call, peer, role, extra=fields)
        if role is not None and permits(role, wanted):
            what = f"the table {table!r:.120}" if table else "no table, or for all"
            return f"the token is for the tables {', '.join(tables)}, and {call} is for {what}; use another token"
        return f"the token has the role {role!r}, and {call} needs {wanted!r}; use a token with that role"


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

    tokens: Tokens | None = field(default=None, repr=False)
    """The valid tokens. None: no token is required, and every caller is an admin."""
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False)
    refused: Refused = field(default_factory=Refused, repr=False, compare=False)
    """Counts the rejected requests."""
    client_ca: bytes = field(default=b"", repr=False)
    """Certificates of the CAs that sign client certificates. Empty: clients need no certificate."""

    @classmethod
    def of(cls, daemon: DaemonSettings, environ: Mapping[str, str]) -> Guard:
        """Return the guard that [daemon] configures.

        Raises: Invalid for a token that cannot be resolved, and for files that are not a certificate and its key.
        """
        tokens = Tokens(daemon, environ) if daemon.token.get_secret_value() else None
        if not daemon.tls_cert:
            return cls(tokens)
        certificate, key = read_pem(daemon.tls_cert, "daemon.tls_cert"), read_pem(daemon.tls_key, "daemon.tls_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_pair(context, daemon.tls_cert, daemon.tls_key, "daemon.tls_cert")
        client_ca = authority(daemon.tls_client_ca, _CLIENT_CA) if daemon.tls_client_ca else b""
        if client_ca:
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))
            except (ssl.SSLError, ValueError) as error:
                text = f"{_CLIENT_CA}: {daemon.tls_client_ca} is not the certificate of a CA in PEM form"
                raise Invalid(f"{text} ({getattr(error, 'reason', None) or error})") from None
            # Kubernetes probes cannot present a certificate; the pages decide what a client without one may read
            context.verify_mode = ssl.CERT_OPTIONAL
        return cls(tokens, certificate, key, context, client_ca=client_ca)

    @property
    def complete(self) -> bool:
        """Whether token and TLS are set, as required to listen on an address that other machines can reach."""
        return bool(self.tokens and self.context)

    def grant(self, header: str | None) -> Grant | None:
        """Return the rights of an Authorization header; None for a wrong token.

        Every wrong token takes the same time. Without a configured token every caller is an admin.
        """
        if self.tokens is None:
            return _EVERYTHING
        kind, _, given = (header or "").partition(" ")
        sent = given.strip().encode("utf-8", "surrogateescape")
        grant = self.tokens.grant(sent)
        return grant if kind.lower() == "bearer" else None

    def flight_options(self) -> dict[str, Any]:
        """Return the arguments for a Flight server."""
        options: dict[str, Any] = {}
        if self.tokens:
            options["middleware"] = {_BEARER: _BearerFactory(self)}
        if self.context:
            options["tls_certificates"] = [(self.certificate, self.key)]
        if self.client_ca:
            options |= {"verify_client": True, "root_certificates": self.client_ca}
        return options


def grant_of(context: flight.ServerCallContext, guard: Guard) -> Grant:
    """Return the rights of the caller of a Flight call that `guard` has admitted."""
    found = context.get_middleware(_BEARER)
    if found is None and guard.tokens:
        raise flight.FlightUnauthenticatedError(REFUSED)
    return _EVERYTHING if found is None else found.grant


class _Bearer(flight.ServerMiddleware):  # type: ignore[misc]
    """Holds the rights of the caller of one call."""

    def __init__(self, grant: Grant) -> None:
        super().__init__()
        self.grant = grant


class _BearerFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Rejects a call without a valid token before its handler runs."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def start_call(self, _info: flight.CallInfo, headers: Mapping[str, list[str | bytes]]) -> _Bearer:
        given = next((values for name, values in headers.items() if name.lower() == "authorization"), None) or [""]
        grant = self._guard.grant(given[0].decode("utf-8", "replace") if isinstance(given[0], bytes) else given[0])
        if grant is None:
            self._guard.refused.add("flight", "token")
            raise flight.FlightUnauthenticatedError(REFUSED)
        return _Bearer(grant)


def check_address(setting: str, host: str, port: int, guard: Guard, *, free: bool) -> None:
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
    if not is_loopback(str(address[0])) and not guard.complete:
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
