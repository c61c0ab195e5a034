"""Roles of callers, by the token that they send, and tokens that are read again when their files change.

- `read`: every read, the status, the changes, the page and the metrics.
- `write`: puts, deletes and everything that belongs to them, and reads.
- `admin`: everything. Daemons of one table are admins to one another.

The tokens of readers and writers in a file (`file:PATH`) are looked at again once a second. After a change the token
before is still taken for `GRACE` seconds, so that callers have time to notice. A file that cannot be read, is empty, or
holds the token of another role changes nothing but the log, and is tried again. The token of admins is read once:
daemons send it to one another, and one that had a new one while others had the old would be alone.
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
from memwal.ingest.settings.load import DaemonSettings
from memwal.wal import Clock, SystemClock

Role = Literal["read", "write", "admin"]
Stamp = tuple[int, ...]
_RANKS: Mapping[Role, int] = {"read": 1, "write": 2, "admin": 3}
SETTINGS: Mapping[str, Role] = {"token": "admin", "write_token": "write", "read_token": "read"}
"""Settings of [daemon] with a token, and the role of who sends it."""
LOOK_EVERY = 1.0
"""Seconds between two looks at a file."""
GRACE = 300.0
"""Seconds for which a token that was replaced in its file is still taken."""
_LOG = logging.getLogger("memwal.access")


def permits(role: Role, wanted: Role) -> bool:
    """Whether a caller with `role` may do what needs `wanted`."""
    return _RANKS[role] >= _RANKS[wanted]


@dataclass(frozen=True, slots=True)
class _Held:
    """One token. `stamp`: what tells its file apart from earlier ones, None if it is not looked at again. `before`: the
    token that it replaced, which is taken until `until`, in monotonic seconds.
    """

    setting: str
    role: Role
    reference: SecretStr
    stamp: Stamp | None
    value: bytes = field(repr=False)
    before: bytes = field(default=b"", repr=False)
    until: float = 0.0


class Tokens:
    """The tokens that a listening process takes, with their roles.

    Thread safety. Any thread. Secrets are in no repr.
    """

    def __init__(self, daemon: DaemonSettings, environ: Mapping[str, str], clock: Clock | None = None) -> None:
        """Raises: Invalid for a token that cannot be resolved, and if two roles have the same token."""
        self._environ, self._clock = environ, clock or SystemClock()
        self._looking, self._looked = threading.Lock(), self._clock.monotonic()
        self._held = [self._first(name, role, each) for name, role, each in _configured(daemon)]
        self._told: Mapping[str, Stamp | None] = {}
        """The files that could not be used, as they were told of in the log."""
        _check_different({held.setting: held.value for held in self._held})

    def role(self, given: bytes) -> Role | None:
        """Return the role of who sends `given`, None for a wrong token. As slow for every wrong token."""
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
        """Take the tokens of changed files; all that fit together, in one step."""
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
        if problems and self._told != stamps:  # once for each state of the files, not every second
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
        stamp = None if role == "admin" else _stamp(reference)  # before the value: a change between them is seen
        return _Held(setting, role, reference, stamp, self._resolved(setting, reference))

    def _resolved(self, setting: str, reference: SecretStr) -> bytes:
        return resolve_one(f"daemon.{setting}", reference, self._environ).encode()


def _configured(daemon: DaemonSettings) -> Iterator[tuple[str, Role, SecretStr]]:
    for name, role in SETTINGS.items():
        reference: SecretStr = getattr(daemon, name)
        if reference.get_secret_value():
            yield name, role, reference


def _check_different(tokens: Mapping[str, bytes]) -> None:
    """Raises: Invalid if two settings have the same token: its role would not be clear."""
    seen: dict[bytes, str] = {}
    for setting, value in tokens.items():
        if value in seen:
            raise Invalid(f"daemon.{setting} and daemon.{seen[value]} are the same token; give each role its own")
        seen[value] = setting


def _stamp(reference: SecretStr) -> Stamp | None:
    """Return what tells a file and its content apart from an earlier one; None if the token is not in a file."""
    text = reference.get_secret_value()
    if not text.startswith(FROM_FILE):
        return None
    try:
        found = Path(text.removeprefix(FROM_FILE)).stat()
    except OSError:
        return (0,)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
