"""Pauses: an operator holds a table's ingestion, or its automatic commits, until they are resumed.

    ingestion   `memwal run`, of every pipeline into the table, begins no new micro-batch; the one under way is finished
                and its offsets are noted. Puts by others, reads, flushes and commits go on.
    commits     no process commits by itself, and so does no maintenance of the base table after commits. Commits that
                somebody asks for go on, and so do flushes: rows stay in SSTs, where reads find them, and once
                `commit.pending_max` SSTs of a region wait, puts wait too.

A pause is one object beside the table, `_mem_wal/paused/{what}_{n}.json`: `{"since", "by", "reason", "id"}`, the first
one without a number. It is created only if it is absent, so that of two operators one is told of the other; so it holds
for every process of the table, and survives the restart of each. An object that cannot be read counts as a pause: what
stands still by mistake loses nothing.

A resume creates a second object, `{what}_{n}_ended.json`, and the next pause has the next number. Nothing is deleted:
storage deletes by name, whatever is there by then, so a slow resume would delete the pause of another operator.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from memwal.wal import Clock, Ids, ObjectStore, SystemIds, WalOptions
from memwal.wal.layout import PAUSED_PREFIX, parse_resumed_key, paused_key, resumed_key
from memwal.wal.retries import with_retried_reads
from memwal.wal.slot import put_until_known

_LOG = logging.getLogger("memwal.pauses")
What = Literal["ingestion", "commits"]
WHATS: tuple[What, ...] = get_args(What)
Paused = Mapping[str, Mapping[str, Any]]
"""By what is paused: `since` (unix time in seconds), `by` and `reason`, as a status tells them."""
LOOK_EVERY, LOOK_EVERY_REMOTE = 1.0, 5.0
"""Seconds for which the last look at a local disk, or at an object store, is taken for the state of now."""
_LONGEST = 500
"""Most characters of a reason, and of a name."""


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause. `since`: unix time in seconds; `by`: who paused it, as far as is known."""

    since: float
    by: str
    reason: str
    id: str

    def told(self) -> dict[str, Any]:
        """Return the pause as a status tells it."""
        return {"since": self.since, "by": self.by, "reason": self.reason}


class Pauses:
    """The pauses of one table, on storage.

    Thread safety. Any thread. Errors. wal errors.
    """

    def __init__(
        self, store: ObjectStore, clock: Clock, ids: Ids | None = None, options: WalOptions | None = None
    ) -> None:
        """`options`: how long storage is tried."""
        self._store, self._clock, self._ids = store, clock, ids or SystemIds()
        self._options = options or WalOptions()
        self._reads = with_retried_reads(store, clock, self._options)
        self._numbers: dict[str, int] = {}  # by what is paused: all pauses below have ended

    def now(self, *, patient: bool = True) -> dict[str, Any]:
        """Return what is paused, as `Paused`. Asks storage, for one small object each, for two of what is paused.
        `patient`: try again while it does not answer.
        """
        found = {what: self._current(what, patient=patient)[1] for what in WHATS}
        return {what: pause.told() for what, pause in found.items() if pause is not None}

    def pause(self, what: What, by: str, reason: str = "") -> tuple[Pause, bool]:
        """Pause `what`; return the pause in force, and whether this call made it: another one may have been first."""
        ours = Pause(self._clock.now(), by, _line(reason), self._ids.entry_id())
        while True:
            number, found = self._current(what)
            if found is not None:
                return found, False
            if self._put(paused_key(what, number), asdict(ours)):
                return ours, True

    def resume(self, what: What) -> Pause | None:
        """End the pause of `what`; return it, None if there was none, or if somebody else has ended it just now."""
        number, found = self._current(what)
        ended = {"at": self._clock.now(), "id": self._ids.entry_id()}
        return found if found is not None and self._put(resumed_key(what, number), ended) else None

    def _put(self, key: str, note: Mapping[str, Any]) -> bool:
        """Create a note; return False if another process has created it."""
        data = json.dumps(note).encode()
        return put_until_known(self._store, key, data, clock=self._clock, options=self._options) is None

    def _current(self, what: What, *, patient: bool = True) -> tuple[int, Pause | None]:
        """Return the number of the pause that has not ended, and the pause; None if it was not made yet."""
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
    """What is paused, as of a recent look at storage.

    Thread safety. Any thread.
    """

    def __init__(self, pauses: Pauses, clock: Clock, every: float) -> None:
        """`every`: seconds for which a look counts as recent."""
        self.pauses, self._clock, self._every = pauses, clock, every
        self._looking = threading.Lock()
        self._looked = float("-inf")
        self._last: Paused | None = None

    @classmethod
    def of(cls, store: ObjectStore, clock: Clock, ids: Ids, options: WalOptions) -> PauseWatch:
        """Return the watch of the table in `store`."""
        every = LOOK_EVERY_REMOTE if store.remote else LOOK_EVERY
        return cls(Pauses(store, clock, ids, options), clock, every)

    @property
    def last(self) -> Paused:
        """What was paused at the last look that succeeded; nothing before the first."""
        return self._last or {}

    def recent(self) -> Paused:
        """Return what is paused; look at storage unless the last look is recent. Raises: wal errors.

        Nothing counts as not paused before a look has succeeded. After it, a look that fails is repeated as late as one
        that succeeds, and what was paused counts on.
        """
        if self._last is None:
            return self.look()
        if self._clock.monotonic() - self._looked >= self._every:
            return self._look(patient=False)
        return self._last

    def look(self) -> Paused:
        """Look at storage now, and return what is paused. Raises: wal errors."""
        return self._look(patient=True)

    def _look(self, *, patient: bool) -> Paused:
        with self._looking:
            self._looked, before = self._clock.monotonic(), self.last
            self._last = now = self.pauses.now(patient=patient)
        for what in now.keys() - before.keys():
            _LOG.info("%s", text_of(what, now[what]), extra={"event": "paused"})
        for what in before.keys() - now.keys():
            _LOG.info("%s: the pause has ended", what, extra={"event": "resumed"})
        return now


def text_of(what: str, told: Mapping[str, Any]) -> str:
    """Return one line: what is paused, since when, by whom and why."""
    since = _date(told["since"])
    at = f" since {since:%Y-%m-%d %H:%M:%S} UTC" if since is not None else ""
    by = f" by {told['by']}" if told["by"] else ""
    reason = f": {told['reason']}" if told["reason"] else ""
    return f"{what} {'are' if what == 'commits' else 'is'} paused{at}{by}{reason}"


def merged(found: list[Paused]) -> dict[str, Any]:
    """Merge what several processes have seen: each pause that one of them knows, since looks differ by seconds."""
    return {what: told for each in found for what, told in each.items()}


def _parsed(data: bytes) -> Pause:
    try:
        found = json.loads(data)
        since = 0.0 if _date(found["since"]) is None else float(found["since"])
        return Pause(since, _line(str(found["by"])), _line(str(found["reason"])), str(found["id"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Pause(0.0, "", "its note beside the table cannot be read", "")


def _line(text: str) -> str:
    """Return `text` as one line that a terminal only prints; whoever may write beside the table may write a note."""
    return "".join(filter(str.isprintable, " ".join(text.split())))[:_LONGEST]


def _date(since: Any) -> datetime | None:
    """Return the date of a unix time in seconds; None for 0, and for what is no date, as others write notes too."""
    try:
        return datetime.fromtimestamp(float(since), UTC) if since else None
    except (ValueError, TypeError, OverflowError, OSError):
        return None
