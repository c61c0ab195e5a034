"""Pauses: an operator stops a table's ingestion, or its automatic commits, until they are resumed.

    ingestion   `memwal run`, in every pipeline that writes to the table, starts no new micro-batch. It finishes the
                current one and stores its offsets. Puts by other callers, reads, flushes and commits continue.
    commits     No process commits automatically, and none maintains the base table after commits. Requested commits
                continue, and so do flushes: rows stay in SSTs, where reads find them. Once `commit.pending_max` SSTs
                of a region wait, puts block too.

A pause is one object beside the table, `_mem_wal/paused/{what}_{n}.json`: `{"since", "by", "reason", "id"}`. The
first one has no number. It is created only if absent, so the second of two operators learns of the first. It applies
to every process of the table and survives restarts. An object that cannot be read counts as a pause, because a
mistaken stop loses nothing.

A resume creates a second object, `{what}_{n}_ended.json`, and the next pause has the next number. Nothing is deleted:
storage deletes by name, so a delayed delete would remove the pause of another operator.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from memwal.ingest.log_limit import log_of
from memwal.wal import Clock, Ids, ObjectStore, SystemIds, WalOptions
from memwal.wal.layout import PAUSED_PREFIX, parse_resumed_key, paused_key, resumed_key
from memwal.wal.retries import with_retried_reads
from memwal.wal.slot import put_until_known

_LOG = logging.getLogger("memwal.pauses")
What = Literal["ingestion", "commits"]
WHATS: tuple[What, ...] = get_args(What)
Paused = Mapping[str, Mapping[str, Any]]
"""By what is paused: `since` (unix time in seconds), `by` and `reason`, as a status reports them."""
LOOK_EVERY, LOOK_EVERY_REMOTE = 1.0, 5.0
"""Seconds for which the last read counts as current: of a local disk, and of an object store."""
_LONGEST = 500
"""Maximum characters of a reason and of a name."""


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause. `since`: unix time in seconds; `by`: who paused it, as far as is known."""

    since: float
    by: str
    reason: str
    id: str

    def told(self) -> dict[str, Any]:
        """Return the pause as a status reports it."""
        return {"since": self.since, "by": self.by, "reason": self.reason}


class Pauses:
    """The pauses of one table, on storage.

    Thread safety. Any thread. Errors. wal errors.
    """

    def __init__(
        self, store: ObjectStore, clock: Clock, ids: Ids | None = None, options: WalOptions | None = None
    ) -> None:
        """Open the pauses in `store`. `options`: time limits of storage requests."""
        self._store, self._clock, self._ids = store, clock, ids or SystemIds()
        self._options = options or WalOptions()
        self._reads = with_retried_reads(store, clock, self._options)
        self._numbers: dict[str, int] = {}  # by what is paused: all pauses with lower numbers have ended

    def now(self, *, patient: bool = True) -> dict[str, Any]:
        """Return what is paused, as `Paused`. Reads at least one small object for each of the two kinds.

        `patient`: retry failed reads.
        """
        found = {what: self._current(what, patient=patient)[1] for what in WHATS}
        return {what: pause.told() for what, pause in found.items() if pause is not None}

    def pause(self, what: What, by: str, reason: str = "") -> tuple[Pause, bool]:
        """Pause `what`. Return the pause in force, and whether this call created it."""
        ours = Pause(self._clock.now(), by, _line(reason), self._ids.entry_id())
        while True:
            number, found = self._current(what)
            if found is not None:
                return found, False
            if self._put(paused_key(what, number), asdict(ours)):
                return ours, True

    def resume(self, what: What) -> Pause | None:
        """End the pause of `what` and return it. Return None if it was not paused, or if another operator has just
        ended it."""
        number, found = self._current(what)
        ended = {"at": self._clock.now(), "id": self._ids.entry_id()}
        return found if found is not None and self._put(resumed_key(what, number), ended) else None

    def _put(self, key: str, note: Mapping[str, Any]) -> bool:
        """Create a note; return False if another process has created it."""
        data = json.dumps(note).encode()
        return put_until_known(self._store, key, data, clock=self._clock, options=self._options) is None

    def _current(self, what: What, *, patient: bool = True) -> tuple[int, Pause | None]:
        """Return the lowest number whose pause has not ended, and that pause; None if no pause has the number."""
        reads = self._reads if patient else self._store
        if what not in self._numbers:
            ended = [key for key in map(parse_resumed_key, reads.list(PAUSED_PREFIX)) if key is not None]
            self._numbers[what] = max((number + 1 for of, number in ended if of == what), default=0)
        number = self._numbers[what]
        while (data := reads.get(paused_key(what, number))) is not None and reads.exists(resumed_key(what, number)):
            number += 1
        self._numbers[what] = number
        return number, None if data is None else _parsed(data)


class PauseWatch:
    """What is paused, as of a recent read of storage.

    Thread safety. Any thread.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        ids: Ids | None = None,
        options: WalOptions | None = None,
        name: str = "",
    ) -> None:
        """Watch the pauses of the table in `store`; arguments as for `Pauses`. `name`: of the table in a fleet."""
        self._log = log_of(_LOG, name)
        self.pauses, self._clock = Pauses(store, clock, ids, options), clock
        self._every = LOOK_EVERY_REMOTE if store.remote else LOOK_EVERY
        self._looking = threading.Lock()
        self._looked = float("-inf")
        self._last: Paused | None = None

    @property
    def last(self) -> Paused:
        """What was paused at the last successful read; empty before the first."""
        return self._last or {}

    def recent(self) -> Paused:
        """Return what is paused; read storage unless the last read is recent. Raises: wal errors.

        Until a read has succeeded, the state is unknown: the first read is retried, and raises if it fails. Later
        reads are not retried. After a failed one the last known state remains in force for the same interval as after
        a successful one.
        """
        if self._last is None:
            return self.look()
        if self._clock.monotonic() - self._looked >= self._every:
            return self.look(patient=False)
        return self._last

    def look(self, *, patient: bool = True) -> Paused:
        """Read storage now and return what is paused. `patient`: retry failed reads. Raises: wal errors."""
        with self._looking:
            self._looked, before = self._clock.monotonic(), self.last
            self._last = now = self.pauses.now(patient=patient)
        for what in now.keys() - before.keys():
            self._log.info("%s", text_of(what, now[what]), extra={"event": "paused"})
        for what in before.keys() - now.keys():
            self._log.info("%s: the pause has ended", what, extra={"event": "resumed"})
        return now


def text_of(what: str, told: Mapping[str, Any]) -> str:
    """Return one line: what is paused, since when, by whom and why."""
    since = _date(told["since"])
    at = f" since {since:%Y-%m-%d %H:%M:%S} UTC" if since is not None else ""
    by = f" by {told['by']}" if told["by"] else ""
    reason = f": {told['reason']}" if told["reason"] else ""
    return f"{what} {'are' if what == 'commits' else 'is'} paused{at}{by}{reason}"


def merged(found: list[Paused]) -> dict[str, Any]:
    """Merge the pauses that several processes report. A pause counts if one process reports it; their reads differ by
    seconds."""
    return {what: told for each in found for what, told in each.items()}


def _parsed(data: bytes) -> Pause:
    try:
        found = json.loads(data)
        since = 0.0 if _date(found["since"]) is None else float(found["since"])
        return Pause(since, _line(str(found["by"])), _line(str(found["reason"])), str(found["id"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Pause(0.0, "", "its note beside the table cannot be read", "")


def _line(text: str) -> str:
    """Return `text` as one line of printable characters: any writer to the bucket can write a note."""
    return "".join(filter(str.isprintable, " ".join(text.split())))[:_LONGEST]


def _date(since: Any) -> datetime | None:
    """Return the date of a unix time in seconds; None for 0 and for invalid values, since other programs can write
    notes."""
    try:
        return datetime.fromtimestamp(float(since), UTC) if since else None
    except (ValueError, TypeError, OverflowError, OSError):
        return None
