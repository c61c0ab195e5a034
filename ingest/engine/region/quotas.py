"""Limit what one table takes of a process: `table.memory_max` and `table.put_rate_max`.

A put first waits for the rate, before any region receives rows; then its part for each region waits for memory, as for
`memtable.unflushed_max`. A put that waits too long is rejected as busy. Daemons that share a table each apply the whole
limits, as Kafka's brokers do with quotas.

The rate counts bytes of rows, as Kafka's `producer_byte_rate` does, because rows of different tables differ in size by
a factor of thousands. It counts puts, micro-batches of Spark, and the keys of deletes. It does not count reads, loads
past the log, and deletes and updates by filter: these consist of many writes, and one of them must not fail half done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from memwal.ingest.caller import expect_waiting
from memwal.ingest.engine.read.sst_cache import SstCache
from memwal.ingest.engine.region.counters import Meters
from memwal.ingest.errors import BUSY, PUT_RATE_MAX, Unavailable
from memwal.ingest.settings.values import format_size
from memwal.wal import Clock

BURST = 1.0
"""Seconds of the rate that a table may use at once after it was idle."""
LOOK_EVERY = 0.25
"""Seconds between two checks of a waiting put whether its caller has left."""


class Holder(Protocol):
    """A region that holds rows in memory. Thread safety. Any thread."""

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of the active memtable (0 without rows), and of the frozen ones."""
        ...

    def flush_soon(self) -> None:
        """Start to flush the active memtable; does not wait."""
        ...


class TableMemory:
    """The memory of a table's regions here: memtables that hold rows, with indexes, and cached SSTs.

    1. If active memtables reach half of the limit, the largest is flushed, while puts fill the other half.
    2. If everything together reaches the limit, cached SSTs are dropped: memtables take precedence.
    3. If that is not enough, puts wait until frozen memtables are published.

    Every memtable can be flushed and every SST dropped, so puts never wait forever, however low the limit is.
    Thread safety. Any thread.
    """

    def __init__(self, most: int, regions: Callable[[], Sequence[Holder]], cache: SstCache) -> None:
        """`most`: bytes, 0 for no limit. `regions`: returns the serving regions."""
        self.most, self._regions, self._cache = most, regions, cache

    @property
    def bytes(self) -> int:
        """Bytes of the memtables that hold rows, and of cached SSTs."""
        return sum(sum(region.held) for region in self._regions()) + self._cache.bytes

    def has_room(self) -> bool:
        """Return whether a put may begin. Starts a flush or drops cached SSTs if that is due."""
        regions = self._regions()
        held = [region.held for region in regions]
        active, frozen = sum(each[0] for each in held), sum(each[1] for each in held)
        if regions and 2 * active >= self.most:
            max(zip(held, regions, strict=True), key=lambda each: each[0][0])[1].flush_soon()
        cached = self._cache.bytes
        if active + frozen + cached >= self.most:
            cached = self._cache.shrink(max(0, self.most // 2 - active - frozen))
        return active + frozen + cached < self.most


class PutRate:
    """A token bucket: lets puts begin at `most` bytes per second, in the order of their arrival.

    A put begins when the puts before it are paid for, whatever its own size, so that large puts are not overtaken
    forever. A put whose caller leaves while it waits is paid for too.
    Thread safety. Any thread.
    Invariants. (1) Puts that begin within T seconds have at most `most` * (T + BURST) bytes, without the last of them.
    (2) Of two puts that wait, the one that arrived first begins first. (3) A rejected put delays no other.
    """

    def __init__(self, most: int, clock: Clock, meters: Meters, place: str) -> None:
        """`most`: bytes per second, above 0. `place`: address of the table, for messages."""
        self._most, self._clock, self._meters, self._place = most, clock, meters, place
        self._lock = threading.Lock()
        self._paid = float("-inf")
        """Monotonic time (s) at which all bytes that were let in are paid for."""

    def wait(self, size: int, patience: float) -> float:
        """Return when a put of `size` bytes may begin, with the seconds waited.

        Raises: Unavailable at once if that takes longer than `patience` seconds; `details["retry_after"]` is the wait.
        """
        if not size:
            return 0.0
        with self._lock:
            now = self._clock.monotonic()
            begins = max(self._paid, now - BURST)
            if begins - now > patience:
                raise self._refusal(begins - now)
            self._paid = begins + size / self._most
        if begins <= now:
            return 0.0
        while (left := begins - self._clock.monotonic()) > 0:
            expect_waiting()
            self._clock.sleep(min(left, LOOK_EVERY))
        self._meters.throttled(begins - now)
        return begins - now

    def _refusal(self, seconds: float) -> Unavailable:
        self._meters.refused(PUT_RATE_MAX)
        return Unavailable(
            f"{self._place}: puts have reached {PUT_RATE_MAX} = {format_size(self._most)} per second: this one would "
            f"wait {seconds:.1f} s; retry later with the same token, or raise the setting",
            {"reason": BUSY, "limit": PUT_RATE_MAX, "retry_after": seconds},
        )
