"""The queues of a region: what gathers while the taker is busy, the pace of entries, and the end of the region."""

from __future__ import annotations

import threading
from collections import Counter

import pyarrow as pa
import pytest

from memwal.ingest.engine.api.filter_writes import Where
from memwal.ingest.engine.region.write_queue import PROBE, Item, PacedQueue, Pending, Request, Write, WriteQueue
from memwal.wal import SystemClock
from tests.messages import raises
from tests.support.clock import FakeClock


def _write(value: int) -> Write:
    return Write(pa.table({"x": [value]}))


def test_everything_that_gathered_is_taken_at_once_in_order() -> None:
    queue = WriteQueue(SystemClock(), Counter)
    items = [_write(1), Request(int), _write(2)]
    for item in items:
        queue.submit(item)
    assert queue.take() == items
    assert queue.take() == []


@pytest.mark.parametrize("paced", [False, True])
def test_the_taker_is_woken_after_each_submit_and_the_close(paced: bool) -> None:
    """It finds the item when it is woken."""
    found: list[object] = []

    def wake() -> None:
        found.append(queue.take())

    clock = FakeClock()
    queue = PacedQueue(clock, wake, INTERVAL, SIZE_MAX) if paced else WriteQueue(clock, wake)
    queue.submit(write := _write(1))
    queue.submit(request := Request(int))
    queue.close(RuntimeError("closed"))
    assert found == [[write], [request], None]


def test_the_oldest_write_counts_until_it_is_answered() -> None:
    queue = WriteQueue(SystemClock(), Counter)
    assert queue.oldest() is None
    for since in (5.0, 7.0):
        queue.submit(Write(pa.table({"x": [1]}), since=since))
    assert queue.oldest() == 5.0
    queue.take()
    queue.submit(Write(pa.table({"x": [1]}), since=9.0))
    assert queue.oldest() == 5.0
    queue.served()
    assert queue.oldest() == 9.0
    queue.take()
    assert queue.oldest() == 9.0
    queue.served()
    assert queue.oldest() is None


@pytest.fixture(params=["at once", "paced"])
def any_queue(request: pytest.FixtureRequest) -> WriteQueue:
    """Return a queue of each kind; the interval of the paced one has just begun."""
    if request.param == "paced":
        return request.getfixturevalue("queue")  # type: ignore[no-any-return]
    return WriteQueue(SystemClock(), Counter)


def test_breaking_off_fails_waiting_and_later_writes_with_the_reason(any_queue: WriteQueue) -> None:
    any_queue.submit(waiting := _write(1))
    any_queue.break_off(reason := RuntimeError("fenced"))
    assert waiting.done.exception(timeout=1) is reason
    with raises(RuntimeError):
        any_queue.submit(_write(2))


def test_a_closed_queue_hands_out_what_it_holds_and_then_ends(any_queue: WriteQueue) -> None:
    any_queue.submit(last := _write(1))
    any_queue.close(RuntimeError("closed"))
    assert any_queue.take() == [last]
    assert any_queue.take() is None
    with raises(RuntimeError):
        any_queue.submit(_write(2))


def test_a_taker_that_finds_items_in_a_closed_queue_is_woken_again_for_its_end() -> None:
    """The wake-ups for the items and for the close may be one."""
    woken: list[None] = []
    queue = WriteQueue(FakeClock(), lambda: woken.append(None))
    queue.submit(last := _write(1))
    queue.close(RuntimeError("closed"))
    woken.clear()
    assert queue.take() == [last]
    assert len(woken) == 1
    assert queue.take() is None


def test_a_taker_lets_as_many_gather_as_it_answered_the_last_time() -> None:
    """The second caller arrives while the taker yields. The taker does not wait for a third one, which stays away."""
    late = [_write(2)]

    class Aside(FakeClock):
        def sleep(self, seconds: float) -> None:
            assert seconds == 0
            if late:
                queue.submit(late.pop())

    queue = WriteQueue(Aside(), Counter)
    for value in (1, 2, 3):
        queue.submit(_write(value))
    assert len(queue.take() or []) == 3
    queue.submit(_write(1))
    assert len(queue.take() or []) == 2


def test_two_halves_of_the_callers_are_taken_together_before_long() -> None:
    """Callers that were answered submit again while the taker yields, or else while it serves the other half."""
    answered: list[Write] = []

    def submit_again() -> None:
        for write in answered:
            queue.submit(write)
        answered.clear()

    class Aside(FakeClock):
        def sleep(self, seconds: float) -> None:
            assert seconds == 0
            submit_again()

    queue = WriteQueue(Aside(), Counter)
    sizes = []
    answered[:] = [_write(1)] * 4
    submit_again()
    answered[:] = [_write(2)] * 4
    for _ in range(PROBE):
        taken = queue.take()
        assert taken is not None
        sizes.append(len(taken))
        submit_again()
        answered[:] = [_write(3)] * len(taken)
    assert sizes == [4] * (PROBE - 1) + [8]


def test_an_answer_is_there_for_everybody_who_waits() -> None:
    pending: Pending[int] = Pending()
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.01)
    assert not pending.done()
    found: list[int] = []
    waiting = [threading.Thread(target=lambda: found.append(pending.result(timeout=10))) for _ in range(5)]
    for thread in waiting:
        thread.start()
    pending.set_result(7)
    for thread in waiting:
        thread.join(60)
    assert found == [7] * 5
    assert (pending.done(), pending.result(timeout=0), pending.exception()) == (True, 7, None)


def test_an_error_is_raised_in_the_place_of_the_value() -> None:
    pending: Pending[int] = Pending()
    pending.set_exception(error := RuntimeError("fenced"))
    assert pending.exception(timeout=0) is error
    with raises(RuntimeError):
        pending.result()


def test_a_writes_fate_is_decided_once() -> None:
    write = _write(1)
    assert [write.take() for _ in range(3)] == [True, False, False]


INTERVAL, SIZE_MAX = 20.0, 1_000


def of_rows(rows: int = 1, *, durable: bool = True) -> Write:
    return Write(pa.table({"x": list(range(rows))}), durable=durable)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> PacedQueue:
    """Return a queue whose interval has just begun."""
    queue = PacedQueue(clock, Counter, INTERVAL, SIZE_MAX)
    queue.submit(first := of_rows())
    assert queue.take() == [first], "the first write after a pause does not wait"
    return queue


def test_durable_writes_wait_for_the_interval_and_are_taken_together(queue: PacedQueue, clock: FakeClock) -> None:
    queue.submit(one := of_rows())
    assert queue.take() == []
    clock.advance(INTERVAL / 2)
    queue.submit(other := of_rows())
    assert queue.take() == []
    clock.advance(INTERVAL / 2)
    assert queue.take() == [one, other]
    queue.submit(later := of_rows())
    assert queue.take() == [], "the next interval begins when the last has been taken"
    clock.advance(INTERVAL)
    assert queue.take() == [later]


@pytest.mark.parametrize(
    "hurry",
    [
        of_rows(durable=False),
        Request(int),
        Write(pa.table({"x": [1]}), deletes=True, where=Where("x > 0", 1)),
    ],
    ids=["not durable", "request", "delete by filter"],
)
def test_what_does_not_wait_takes_the_waiting_along_in_order(queue: PacedQueue, hurry: Item) -> None:
    queue.submit(waiting := of_rows())
    queue.submit(hurry)
    assert queue.take() == [waiting, hurry]
    queue.submit(of_rows())
    assert queue.take() == [], "and the interval holds again"


def test_what_writes_no_entry_begins_no_interval(queue: PacedQueue, clock: FakeClock) -> None:
    clock.advance(INTERVAL)
    queue.submit(withdrawn := of_rows())
    assert withdrawn.take(), "by its caller"
    queue.submit(Request(int))
    queue.take()
    queue.submit(write := of_rows())
    assert queue.take() == [write]


def test_an_item_is_queued_and_hurries_at_one_moment(clock: FakeClock) -> None:
    """The queue, and whether it hurries, change under one lock. A take between the two changes would make the item wait
    for a whole interval."""
    held: list[bool] = []

    class Watched(PacedQueue):
        def _append(self, item: Item) -> None:
            held.append(self._lock.locked())
            super()._append(item)

    queue = Watched(clock, Counter, INTERVAL, SIZE_MAX)
    queue.submit(Request(int))
    assert held == [True]


def test_an_entry_that_is_full_does_not_wait(queue: PacedQueue) -> None:
    writes = [of_rows(rows=50), of_rows(rows=50), of_rows(rows=50)]
    for write in writes[:2]:
        queue.submit(write)
    assert queue.take() == []
    queue.submit(writes[2])
    assert queue.take() == writes


def test_a_queue_tells_when_its_items_are_due(queue: PacedQueue, clock: FakeClock) -> None:
    assert queue.due() is None
    queue.submit(of_rows())
    clock.advance(INTERVAL / 4)
    assert queue.due() == pytest.approx(INTERVAL * 3 / 4)
    queue.submit(Request(int))
    assert queue.due() == 0
