"""The queue between the callers of a region and its one thread.

Callers hand in `Write`s and wait; the region's thread takes everything that has gathered since it last looked. That is
all of adaptive group commit: an idle thread takes one write and appends it at once, a busy one finds many waiting and
appends them as one entry. Nobody ever waits for a timer.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa

from ingest.levels import RegionView
from ingest.tokens import Token


@dataclass(frozen=True, slots=True)
class Ack:
    """What a region answers: `rows` of the write, whether this call `applied` them (False: its token was applied
    before), and the WAL `position` that made them durable (0: not durable yet)."""

    rows: int
    applied: bool
    position: int


@dataclass(slots=True)
class Write:
    """Rows on their way into one region; `rows` has the row schema and passed validation.

    `size`: their bytes, counted in the caller's thread: Arrow lets go of the interpreter lock to count, and a region's
    thread would queue for it again behind all its callers.
    """

    rows: pa.Table
    size: int
    durable: bool
    token: Token | None
    done: Future[Ack] = field(default_factory=Future)


@dataclass(slots=True)
class Freeze:
    """A request to freeze the memtable behind everything that was queued before it.

    `done`: the generation that is active then; everything queued before is in an older one.
    """

    done: Future[int] = field(default_factory=Future)


@dataclass(slots=True)
class DurableView:
    """A request to append what lingers and to capture the levels at that moment."""

    done: Future[RegionView] = field(default_factory=Future)


Item = Write | Freeze | DurableView
"""What a region's thread is asked to do."""


class WriteQueue:
    """First in, first out, many callers, one taker.

    Thread safety. `submit`, `break_off` and `close` from any thread, `take` from the region's thread only.
    Invariants. (1) A write is taken once or failed once. (2) After `break_off(error)` every later submit raises it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writes: deque[Item] = deque()
        self._broken: BaseException | None = None
        self._closed = False

    def submit(self, item: Item) -> None:
        """Queue an item. Raises: the error that broke the region."""
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._writes.append(item)
            self._changed.notify()

    def take(self, timeout: float | None) -> list[Item] | None:
        """All writes that have gathered, waiting up to `timeout` seconds for the first; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._writes or self._closed, timeout)
            taken = list(self._writes)
            self._writes.clear()
            return None if self._closed and not taken else taken

    def break_off(self, error: BaseException) -> None:
        """Fail every queued write with `error`, and every later one."""
        with self._changed:
            self._broken = self._broken or error
            orphans = list(self._writes)
            self._writes.clear()
        for write in orphans:
            write.done.set_exception(error)

    def close(self, error: BaseException) -> None:
        """Take no more: later submits raise `error`; what is queued is still taken."""
        with self._changed:
            self._closed, self._broken = True, self._broken or error
            self._changed.notify()
