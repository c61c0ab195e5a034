"""A source that does not answer for a while: the query ends, and is started again from its checkpoint, for so long.

Spark's Kafka source gives up after its client's timeouts. Nothing is lost by that, so ending the run only has somebody
start it again; here that somebody is the run itself. It says so at each attempt, and is not ready meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from memwal.ingest.errors import SILENT, MemWalError
from memwal.ingest.ops.health import Health
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.pipeline")
PAUSE_FIRST, PAUSE_MOST = 1.0, 30.0
"""Seconds between the end of a query and its next start, doubling."""
_HELD = "source_silent"


class Outage:
    """Whether, and when, the query of one pipeline is started again.

    Thread safety. One thread.
    """

    def __init__(self, table: str, longest: float, health: Health, clock: Clock) -> None:
        """`longest`: seconds for which the source is asked again, from its first failure on; 0: not at all."""
        self._table, self._longest, self._health, self._clock = table, longest, health, clock
        self._since: float | None = None
        self._next: float | None = None
        self._pause = PAUSE_FIRST

    @property
    def waits(self) -> bool:
        """Whether there is no query at this moment, and none is due yet."""
        return self._next is not None and self._clock.monotonic() < self._next

    @property
    def due(self) -> bool:
        """Whether the query is to be started now."""
        return self._next is not None and not self.waits

    def met(self, error: MemWalError) -> None:
        """The query ended by `error`. Raises: `error`, where it is none that passes, or the time is over."""
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        if error.details.get("reason") != SILENT or now + self._pause - self._since > self._longest:
            raise error
        self._next, pause = now + self._pause, self._pause
        self._pause = min(2 * self._pause, PAUSE_MOST)
        said = error.message.partition("; ")[0]
        self._health.hold(_HELD, said)
        spent, left = now - self._since, self._longest
        _LOG.warning("%s: %s; asked again in %.0f s, since %.0f s of %.0f s", self._table, said, pause, spent, left)

    def started(self) -> None:
        """The query runs again; whether the source answers is seen later."""
        self._next = None

    def look(self, status: Mapping[str, Any]) -> None:
        """`status`: of the query. One that waits for data or its next trigger has been answered."""
        if self._since is not None and str(status.get("message", "")).startswith("Waiting"):
            self.over()

    def over(self) -> None:
        """The source answers."""
        if self._since is not None:
            _LOG.warning("%s: the source answers again", self._table)
        self._since, self._pause = None, PAUSE_FIRST
        self._health.release(_HELD)
