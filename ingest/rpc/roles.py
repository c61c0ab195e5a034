"""Roles of callers, by the token that they send, and tokens that are read again when their files change.

- `read`: every read, the status, the changes, the page and the metrics.
- `write`: puts, deletes and everything that belongs to them, and reads.
- `admin`: everything. Daemons of one table are admins to one another.

A token in a file (`file:PATH`) is looked at again once a second. After a change the token before is still taken for
`GRACE` seconds, so that callers and daemons, which notice the change at different moments, go on meanwhile. A file that
cannot be read, or is empty, changes nothing but the log.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import FROM_FILE, resolve_one
from memwal.ingest.settings.load import DaemonSettings
from memwal.wal import Clock, SystemClock

Role = Literal["read", "write", "admin"]
_RANKS: Mapping[Role, int] = {"read": 1, "write": 2, "admin": 3}
SETTINGS: Mapping[str, Role] = {"token": "admin", "write_token": "write", "read_token": "read"}
"""Settings of [daemon] with a token, and the role of who sends it."""
LOOK_EVERY = 1.0
"""Seconds between two looks at a file."""
GRACE = 60.0
"""Seconds for which a token that was replaced in its file is still taken."""
_LOG = logging.getLogger("memwal.access")


def permits(role: Role, wanted: Role) -> bool:
    """Whether a caller with `role` may do what needs `wanted`."""
    return _RANKS[role] >= _RANKS[wanted]


@dataclass(slots=True)
class _Held:
    """One token. `stamp`: what told its file apart from earlier ones. `before`: the token that it replaced, which is
    taken until `until`, in monotonic seconds.
    """

    setting: str
    role: Role
    reference: SecretStr
    value: bytes
    stamp: tuple[int, ...] | None
    before: bytes = b""
    until: float = 0.0


class Tokens:
    """The tokens that a listening process takes, with their roles.

    Thread safety. Any thread. Secrets are in no repr.
    """

    def __init__(self, daemon: DaemonSettings, environ: Mapping[str, str], clock: Clock | None = None) -> None:
        """Raises: Invalid for a token that cannot be resolved, and if two roles have the same token."""
        self._environ, self._clock = environ, clock or SystemClock()
        self._looking, self._looked = threading.Lock(), self._clock.monotonic()
        self._held = [
            _Held(name, role, reference, self._resolved(name, reference), _stamp(reference))
            for name, role in SETTINGS.items()
            if (reference := getattr(daemon, name)).get_secret_value()
        ]
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
            for at, held in enumerate(self._held):
                if (stamp := _stamp(held.reference)) != held.stamp:
                    self._held[at] = self._read_again(held, stamp, now)
        finally:
            self._looking.release()

    def _read_again(self, held: _Held, stamp: tuple[int, ...] | None, now: float) -> _Held:
        kept = _Held(held.setting, held.role, held.reference, held.value, stamp, held.before, held.until)
        try:
            value = self._resolved(held.setting, held.reference)
            _check_different(
                {held.setting: value} | {each.setting: each.value for each in self._held if each is not held}
            )
        except Invalid as error:
            _LOG.warning("%s; the token before stays in force", error)
            return kept
        if value != held.value:
            kept.value, kept.before, kept.until = value, held.value, now + GRACE
            _LOG.info("daemon.%s was changed; the token before is taken for %d s more", held.setting, GRACE)
        return kept

    def _resolved(self, setting: str, reference: SecretStr) -> bytes:
        return resolve_one(f"daemon.{setting}", reference, self._environ).encode()


def _check_different(tokens: Mapping[str, bytes]) -> None:
    """Raises: Invalid if two settings have the same token: its role would not be clear."""
    seen: dict[bytes, str] = {}
    for setting, value in tokens.items():
        if value in seen:
            raise Invalid(f"daemon.{setting} and daemon.{seen[value]} are the same token; give each role its own")
        seen[value] = setting


def _stamp(reference: SecretStr) -> tuple[int, ...] | None:
    """Return what tells a file's content apart from an earlier one; None if there is no file."""
    text = reference.get_secret_value()
    if not text.startswith(FROM_FILE):
        return None
    try:
        found = Path(text.removeprefix(FROM_FILE)).stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
