"""An outage of the source: restart the query from its checkpoint, for up to `outage_max`.

Spark's Kafka source fails after its client's timeouts. Nothing is lost, so the run restarts the query instead of
ending. It logs each attempt, and is not ready meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from memwal.ingest.errors import SILENT, MemWalError
from memwal.ingest.service.ops.health import Health
from memwal.wal import Clock
from memwal.wal.retries import Backoff

_LOG = logging.getLogger("memwal.pipeline")
PAUSE_FIRST, PAUSE_MOST = 1.0, 30.0
"""Seconds between the end of a query and its next start: the first pause, which doubles, and the longest one."""
_HELD = "source_silent"


class Outage:
    """Decides whether and when the query of one pipeline is started again.

    Thread safety. One thread.
    """

    def __init__(self, table: str, longest: float, health: Health, clock: Clock) -> None:
        """`longest`: seconds after the first failure during which the query is restarted; 0: never."""
        self._table, self._longest, self._health, self._clock = table, longest, health, clock
        self._since: float | None = None
        self._next: float | None = None
        self._backoff = Backoff(PAUSE_FIRST, PAUSE_MOST)

    @property
    def waits(self) -> bool:
        """Return whether no query runs and its next start is not due yet."""
        return self._next is not None and self._clock.monotonic() < self._next

    @property
    def due(self) -> bool:
        """Return whether the query must be started now."""
        return self._next is not None and not self.waits

    def failed(self, error: MemWalError) -> None:
        """Handle `error`, which ended the query. Raises: `error` if it is not an outage, or if `longest` is over."""
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        if error.details.get("reason") != SILENT or now + self._backoff.next - self._since > self._longest:
            raise error
        pause = self._backoff.pause()
        self._next = now + pause
        said = error.message.partition("; ")[0]
        self._health.hold(_HELD, said)
        spent, left = now - self._since, self._longest
        _LOG.warning(
            "%s: %s; retry in %.0f s, down for %.0f s of at most %.0f s", self._table, said, pause, spent, left
        )

    def started(self) -> None:
        """Note that the query runs again. Whether the source answers is detected later."""
        self._next = None

    def look(self, status: Mapping[str, Any]) -> None:
        """Evaluate the `status` of the query: if it waits for data or its next trigger, the source has answered."""
        if self._since is not None and str(status.get("message", "")).startswith("Waiting"):
            self.over()

    def over(self) -> None:
        """Note that the source answers."""
        if self._since is not None:
            _LOG.warning("%s: the source answers again", self._table)
        self.forget()

    def forget(self) -> None:
        """End the outage without a log line: during a pause the source is not read, so the wait for it is over."""
        self._since = self._next = None
        self._backoff.reset()
        self._health.release(_HELD)
