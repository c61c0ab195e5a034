"""Durable writes wait for the end of the interval and are taken together. No other item waits; none waits in vain."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from memwal.ingest.engine.api.deletes import Where
from memwal.ingest.engine.region.write_queue import Item, PacedQueue, Request, Write
from tests.support.clock import FakeClock

INTERVAL, SIZE_MAX = 20.0, 1_000


def _write(rows: int = 1, *, durable: bool = True) -> Write:
    return Write(pa.table({"x": list(range(rows))}), durable=durable)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> PacedQueue:
    """Return a queue whose interval has just begun."""
    queue = PacedQueue(clock, INTERVAL, SIZE_MAX)
    queue.submit(first := _write())
    assert queue.take(timeout=None) == [first], "the first write after a pause does not wait"
    return queue


def test_durable_writes_wait_for_the_interval_and_are_taken_together(queue: PacedQueue, clock: FakeClock) -> None:
    queue.submit(one := _write())
    assert queue.take(timeout=0.0) == []
    clock.advance(INTERVAL / 2)
    queue.submit(other := _write())
    assert queue.take(timeout=0.0) == []
    clock.advance(INTERVAL / 2)
    assert queue.take(timeout=None) == [one, other]
    queue.submit(later := _write())
    assert queue.take(timeout=0.0) == [], "the next interval begins when the last has been taken"
    clock.advance(INTERVAL)
    assert queue.take(timeout=None) == [later]


@pytest.mark.parametrize(
    "hurry",
    [
        _write(durable=False),
        Request(int),
        Write(pa.table({"x": [1]}), deletes=True, where=Where("x > 0", 1)),
    ],
    ids=["not durable", "request", "delete by filter"],
)
def test_what_does_not_wait_takes_the_waiting_along_in_order(queue: PacedQueue, hurry: Item) -> None:
    queue.submit(waiting := _write())
    queue.submit(hurry)
    assert queue.take(timeout=None) == [waiting, hurry]
    queue.submit(_write())
    assert queue.take(timeout=0.0) == [], "and the interval holds again"


def test_what_writes_no_entry_begins_no_interval(queue: PacedQueue, clock: FakeClock) -> None:
    clock.advance(INTERVAL)
    queue.submit(withdrawn := _write())
    assert withdrawn.take(), "by its caller"
    queue.submit(Request(int))
    queue.take(timeout=None)
    queue.submit(write := _write())
    assert queue.take(timeout=None) == [write]


def test_an_item_is_queued_and_hurries_at_one_moment(clock: FakeClock) -> None:
    """The queue, and whether it hurries, change under one lock. A take between the two changes would make the item wait
    for a whole interval."""
    held: list[bool] = []

    class Watched(PacedQueue):
        def _append(self, item: Item) -> None:
            held.append(self._lock.locked())
            super()._append(item)

    queue = Watched(clock, INTERVAL, SIZE_MAX)
    queue.submit(Request(int))
    assert held == [True]


def test_an_entry_that_is_full_does_not_wait(queue: PacedQueue) -> None:
    writes = [_write(rows=50), _write(rows=50), _write(rows=50)]
    for write in writes[:2]:
        queue.submit(write)
    assert queue.take(timeout=0.0) == []
    queue.submit(writes[2])
    assert queue.take(timeout=None) == writes


def test_a_taker_that_waits_is_woken_by_what_does_not_wait(queue: PacedQueue) -> None:
    queue.submit(waiting := _write())
    taken: list[object] = []
    taker = threading.Thread(target=lambda: taken.extend(queue.take(timeout=None) or []))
    taker.start()
    queue.submit(freeze := Request(int))
    taker.join(60)
    assert taken == [waiting, freeze]
