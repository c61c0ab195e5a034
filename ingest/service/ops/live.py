"""The data of the page at /: samples every second, and one message with everything, from memory only.

http.md describes the form of the message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.ops.history import History, Sample
from memwal.ingest.service.ops.pages import Page
from memwal.ingest.threads import Periodic
from memwal.wal import Clock

SAMPLE_EVERY = 1.0
_AGAIN = 10.0
"""Seconds for which changed data is repeated in messages that otherwise contain only new data."""


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


class Live:
    """The message of a process.

    Thread safety. Any thread.
    """

    def __init__(self, kind: str, source: Source, events: RecentEvents, clock: Clock) -> None:
        """Prepare a message of `kind` "daemon" or "run". Sampling begins with `start`."""
        self.kind, self.source = kind, source
        self._events, self._clock = events, clock
        self._began = clock.monotonic()
        self._history = History()
        self._queryable: dict[str, Any] | None = None
        self._queryable_since = -_AGAIN
        self._samples = Periodic("live", self.sample, SAMPLE_EVERY)

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

    @property
    def newest(self) -> int:
        """The number of the next sample, which a later message takes as `since`."""
        return self._history.count

    def message(self, since: int = 0) -> dict[str, Any]:
        """Return the message.

        `since` 0: the `whole` message. Otherwise `history` and `events` contain only the data since that sample, with
        a small overlap, and `query` is present only if it has just changed.
        """
        now, figures = self._clock.now(), self._history.figures()
        message = {
            "kind": self.kind,
            "whole": not since,
            "time": now,
            "uptime": self._clock.monotonic() - self._began,
            "pid": os.getpid(),
            "rates": figures["rates"],
            "acks": figures["acks"],
            "appends": figures["appends"],
            **self.source.show(figures),
            "history": self._history.series(since),
            "events": self._events.newest(now - _AGAIN if since else 0.0),
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
