"""Limit how often a region writes entries, for storage that charges for each request.

With `wal.entry_interval`, durable writes wait in the queue until the interval since the last ones were taken has
passed, and then share one entry. The first write after a pause is taken at once. Waiting writes are taken early when
they fill an entry, when an item that does not wait arrives after them (a non-durable write, a piece of a delete by
filter, a freeze, a durable read), or when the queue is closed. A write whose caller waits for less than the interval is
withdrawn by its caller.
"""

from __future__ import annotations

from memwal.ingest.engine.api.rows import size_bound
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.write_queue import Item, Write, WriteQueue
from memwal.wal import Clock


class PacedQueue(WriteQueue):
    """Release durable writes once per `interval` seconds. Thread safety and invariants. As `WriteQueue`."""

    def __init__(self, clock: Clock, interval: float, size_max: int) -> None:
        """`size_max`: bytes of queued rows that end the interval early."""
        super().__init__(clock)
        self._interval, self._size_max = interval, size_max
        self._not_before = clock.monotonic()
        self._bytes = 0
        self._hurry = False
        """Whether the queue has an item that does not wait."""

    def submit(self, item: Item) -> None:
        """Queue an item. Raises: the error that broke the region."""
        more = size_bound(item.rows) if isinstance(item, Write) else 0
        with self._lock:  # one critical section: a `take` between the statements would lose `_hurry`
            self._append(item)
            self._bytes += more
            self._hurry = self._hurry or not _waits(item) or self._bytes >= self._size_max
        self._wake_taker()

    def take(self, timeout: float | None) -> list[Item] | None:
        """Return as `WriteQueue.take`; return no items if `timeout` ends or a nudge arrives while writes wait for the
        interval.
        """
        until = None if timeout is None else self._clock.monotonic() + timeout
        self._served = []
        self._wait(timeout)
        if not self._due(until):
            return []
        with self._lock:
            self._bytes, self._hurry = 0, False
            if any(_waits(item) and not item.withdrawn for item in self._writes if isinstance(item, Write)):
                self._not_before = self._clock.monotonic() + self._interval
        return super().take(0.0)

    def _due(self, until: float | None) -> bool:
        """Wait until the queued items may be taken; return False if `until` (monotonic s) or a nudge comes first."""
        while True:
            now = self._clock.monotonic()
            with self._lock:
                queued = len(self._writes)
                if not queued or self._hurry or self._closed or now >= self._not_before:
                    return True
                if self._nudged:
                    self._nudged = False
                    return False
            if until is not None and now >= until:
                return False
            self._wait(self._not_before - now if until is None else min(self._not_before, until) - now, beyond=queued)


def _waits(item: Item) -> bool:
    """Return whether an item waits for the interval; the consecutive pieces of a delete by filter do not."""
    return isinstance(item, Write) and item.durable and item.where is None


def queue_of(context: RegionContext) -> WriteQueue:
    """Return the queue of a region."""
    limits = context.limits
    if not limits.entry_interval:
        return WriteQueue(context.clock)
    return PacedQueue(context.clock, limits.entry_interval, limits.entry_size_max)
