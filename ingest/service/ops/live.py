"""The data of the page at /: samples every second, and one message with everything, from memory only.

http.md describes the form of the message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from memwal.ingest.errors import Invalid
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.ops.history import History, Sample
from memwal.ingest.service.ops.pages import Page
from memwal.ingest.threads import Periodic
from memwal.wal import Clock

SAMPLE_EVERY = 1.0
_AGAIN = 10.0
"""Seconds for which changed data is repeated in messages that otherwise contain only new data."""
PARTS, _UNUSED = 20, 900.0
"""Tables that are sampled one by one, a third of a megabyte each; and seconds without a message until one no longer is.
"""


class Source(Protocol):
    """The process that a page shows.

    Thread safety. Any thread. Sends no request to storage, except in `ask`; holds a lock of a put for microseconds at
    most.
    """

    def sample(self) -> Sample:
        """Return the current counters and gauges."""
        ...

    def show(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of the message that this kind of process has, including `health`. `figures`: of
        `History.figures`."""
        ...

    def queryable(self) -> dict[str, Any] | None:
        """Return what a query may name (`columns`, `key`, `texts`, `vectors`); None while queries cannot be
        answered."""
        ...

    def ask(self, request: Mapping[str, Any]) -> Page:
        """Return the answer to one query. Raises: MemWalError."""
        ...


class Parts(Protocol):
    """The tables of a process that has several. Thread safety. Any thread."""

    def source(self, name: str) -> Source:
        """Return what the page of a table shows. Raises: Invalid for an unknown name."""
        ...

    def listed(self, asked: Mapping[str, str], covers: Callable[[str], bool]) -> dict[str, Any]:
        """Return the answer to /tables: the tables whose names `covers` accepts. Raises: Invalid for parameters in
        `asked` that are wrong."""
        ...


class Live:
    """The message of a process, or of one of its tables.

    Thread safety. Any thread.
    """

    def __init__(
        self, kind: str, source: Source, events: RecentEvents, clock: Clock, parts: Parts | None = None, name: str = ""
    ) -> None:
        """Prepare a message of `kind` "daemon" or "run". Sampling begins with `start`.

        `parts`: the tables, if there are several. `name`: of the table, if it is one of several.
        """
        self.kind, self.source, self.parts = kind, source, parts
        self._events, self._clock, self._name = events, clock, name
        self._lock, self._of = threading.Lock(), dict[str, Live]()
        self.used = clock.monotonic()
        """Monotonic time (s) of the last message."""
        self.began = clock.monotonic()
        self._history = History()
        self._queryable: dict[str, Any] | None = None
        self._queryable_since = -_AGAIN
        self._samples = Periodic("live", self.sample, SAMPLE_EVERY)

    def of(self, name: str | None) -> Live:
        """Return the message of a table, whose history begins at the first call; None: of the process.

        Raises: Invalid for an unknown name, or if there are not several tables.
        """
        if name is None:
            return self
        if self.parts is None:
            raise Invalid("this process serves one table, which has no name; leave out ?table=")
        source = self.parts.source(name)
        with self._lock:
            if name not in self._of:
                if len(self._of) >= PARTS:
                    del self._of[min(self._of, key=lambda each: self._of[each].used)]
                self._of[name] = part = Live(self.kind, source, self._events, self._clock, name=name)
                part.began = self.began
                part.sample()
            return self._of[name]

    def start(self) -> None:
        """Start sampling."""
        self.sample()
        self._samples.start()

    def stop(self) -> None:
        """End the thread that samples."""
        self._samples.stop()

    def sample(self) -> None:
        """Take a sample now."""
        now, queryable = self._clock.monotonic(), self.source.queryable()
        self._history.add(now, self._clock.now(), self.source.sample())
        if queryable != self._queryable:
            self._queryable, self._queryable_since = queryable, now
        with self._lock:
            self._of = {name: part for name, part in self._of.items() if now - part.used < _UNUSED}
            parts = list(self._of.values())
        for part in parts:
            part.sample()

    @property
    def newest(self) -> int:
        """The number of the next sample, which a later message takes as `since`."""
        return self._history.count

    def message(self, since: int = 0) -> dict[str, Any]:
        """Return the message.

        `since` 0: the `whole` message. Otherwise `history` and `events` contain only the data since that sample, with
        a small overlap, and `query` is present only if it has just changed.
        """
        now, figures, self.used = self._clock.now(), self._history.figures(), self._clock.monotonic()
        events = self._events.newest(now - _AGAIN if since else 0.0)
        message = {
            "kind": self.kind,
            "whole": not since,
            "time": now,
            "uptime": self._clock.monotonic() - self.began,
            "pid": os.getpid(),
            "rates": figures["rates"],
            "acks": figures["acks"],
            "appends": figures["appends"],
            **self.source.show(figures),
            "history": self._history.series(since),
            "events": [each for each in events if not self._name or each.get("table") == self._name],
        }
        changed = self._clock.monotonic() - self._queryable_since < _AGAIN
        return message | {"query": self.source.queryable()} if changed or not since else message


def levels(
    behind: Mapping[str, float | None], most: Mapping[str, float | None], limits: Mapping[str, tuple[float, str]]
) -> list[dict[str, Any]]:
    """Return the levels with the age of the oldest row that has not reached each: now, and at `most` in the last
    minute.

    `limits`: by level, the seconds (0: no limit) and the name of the setting.
    """
    return [
        {
            "name": name,
            "seconds": behind.get(name),
            "most": most.get(name),
            "limit": limits[name][0] or None,
            "setting": limits[name][1],
        }
        for name in ("latest", "flushed", "committed")
    ]
