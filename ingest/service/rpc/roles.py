"""Roles of callers by their tokens, and tokens that are reread when their files change.

- `read`: every read, the status, the changes, the page and the metrics.
- `write`: puts and deletes with the calls that they need, and reads.
- `admin`: everything. Daemons of one table act as admins on each other.

A process checks the token files of readers and writers (`file:PATH`) once a second. After a change the previous token
stays valid for `GRACE` seconds, so that callers have time to switch. A file that cannot be read, is empty, or holds
the token of another role only causes a log entry, and is tried again. The admin token is read once: daemons send it
to each other, so a daemon that switched alone would be isolated.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import FROM_FILE, resolve_one
from memwal.ingest.settings.sections import DaemonSettings
from memwal.wal import Clock, SystemClock

Role = Literal["read", "write", "admin"]
Stamp = tuple[int, ...]
_RANKS: Mapping[Role, int] = {"read": 1, "write": 2, "admin": 3}
SETTINGS: Mapping[str, Role] = {"token": "admin", "write_token": "write", "read_token": "read"}
"""Settings of [daemon] with a token, and the role that the token grants."""
LOOK_EVERY = 1.0
"""Seconds between two checks of a file."""
GRACE = 300.0
"""Seconds for which a token that was replaced in its file remains valid."""
_LOG = logging.getLogger("memwal.access")


def permits(role: Role, wanted: Role) -> bool:
    """Return whether a caller with `role` may make a call that needs `wanted`."""
    return _RANKS[role] >= _RANKS[wanted]


@dataclass(frozen=True, slots=True)
class _Held:
    """One token. `stamp`: identifies the version of its file; None if the file is not checked again. `before`: the
    replaced token, valid until `until` in monotonic seconds."""

    setting: str
    role: Role
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
        """Resolve the tokens of [daemon]. Raises: Invalid for a token that cannot be resolved, and if two roles share
        a token."""
        self._environ, self._clock = environ, clock or SystemClock()
        self._looking, self._looked = threading.Lock(), self._clock.monotonic()
        self._held = [self._first(name, role, each) for name, role, each in _configured(daemon)]
        self._told: Mapping[str, Stamp | None] = {}
        """The stamps of the files when a problem was last logged."""
        _check_different({held.setting: held.value for held in self._held})

    def role(self, given: bytes) -> Role | None:
        """Return the role of the token `given`; None for a wrong token. Every wrong token takes the same time."""
        self._look_again()
        now, found = self._clock.monotonic(), list[Role]()
        for held in list(self._held):
            right = hmac.compare_digest(given, held.value)
            right |= bool(held.before) and now < held.until and hmac.compare_digest(given, held.before)
            found += [held.role] * right
        return max(found, key=lambda role: _RANKS[role], default=None)

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

    def _first(self, setting: str, role: Role, reference: SecretStr) -> _Held:
        # read before the value, so a change in between is detected
        stamp = None if role == "admin" else _stamp(reference)
        return _Held(setting, role, reference, stamp, self._resolved(setting, reference))

    def _resolved(self, setting: str, reference: SecretStr) -> bytes:
        return resolve_one(f"daemon.{setting}", reference, self._environ).encode()


def _configured(daemon: DaemonSettings) -> Iterator[tuple[str, Role, SecretStr]]:
    for name, role in SETTINGS.items():
        reference: SecretStr = getattr(daemon, name)
        if reference.get_secret_value():
            yield name, role, reference


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

    def refusal(self, role: Role | None, wanted: Role, call: str, peer: str) -> str | None:
        """Return why `role` does not permit `call`, which needs `wanted`; None if it does.

        Logs a rejection at most once a second, so that callers cannot fill the log.
        """
        if role is not None and permits(role, wanted):
            return None
        now = self._clock.monotonic()
        if now - self._refused >= 1.0:
            self._refused = now
            fields = {"event": "refused", "call": call, "role": role, "peer": peer}
            _LOG.warning("refused: %s by %s, whose token has the role %s", call, peer, role, extra=fields)
        return f"the token has the role {role!r}, and {call} needs {wanted!r}; use a token with that role"
