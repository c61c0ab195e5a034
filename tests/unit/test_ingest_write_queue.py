"""The queue gathers while its taker is busy, and wakes every waiter when the region ends."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from memwal.ingest.engine.region.write_queue import Pending, Request, Write, WriteQueue
from memwal.wal import SystemClock
from tests.messages import raises
from tests.support.clock import FakeClock


def _write(value: int) -> Write:
    return Write(pa.table({"x": [value]}))


def test_everything_that_gathered_is_taken_at_once_in_order() -> None:
    queue = WriteQueue(SystemClock())
    items = [_write(1), Request(int), _write(2)]
    for item in items:
        queue.submit(item)
    assert queue.take(timeout=None) == items
    assert queue.take(timeout=0.0) == []


def test_the_taker_is_woken_by_a_submit() -> None:
    queue = WriteQueue(SystemClock())
    taken: list[object] = []
    taker = threading.Thread(target=lambda: taken.extend(queue.take(timeout=30) or []))
    taker.start()
    queue.submit(write := _write(1))
    taker.join(60)
    assert taken == [write]


def test_the_oldest_write_counts_until_the_taker_comes_again() -> None:
    queue = WriteQueue(SystemClock())
    assert queue.oldest() is None
    for since in (5.0, 7.0):
        queue.submit(Write(pa.table({"x": [1]}), since=since))
    assert queue.oldest() == 5.0
    queue.take(timeout=0.0)
    queue.submit(Write(pa.table({"x": [1]}), since=9.0))
    assert queue.oldest() == 5.0
    queue.take(timeout=0.0)
    assert queue.oldest() == 9.0
    queue.take(timeout=0.0)
    assert queue.oldest() is None


def test_breaking_off_fails_waiting_and_later_writes_with_the_reason() -> None:
    queue = WriteQueue(SystemClock())
    queue.submit(waiting := _write(1))
    queue.break_off(reason := RuntimeError("fenced"))
    assert waiting.done.exception(timeout=1) is reason
    with raises(RuntimeError):
        queue.submit(_write(2))


def test_a_closed_queue_hands_out_what_it_holds_and_then_ends() -> None:
    queue = WriteQueue(SystemClock())
    queue.submit(last := _write(1))
    queue.close(RuntimeError("closed"))
    assert queue.take(timeout=None) == [last]
    assert queue.take(timeout=None) is None
    with raises(RuntimeError):
        queue.submit(_write(2))


def test_a_taker_lets_as_many_gather_as_it_answered_the_last_time() -> None:
    """The second caller arrives while the taker yields. The taker does not wait for a third one, which stays away."""
    late = [_write(2)]

    class Aside(FakeClock):
        def sleep(self, seconds: float) -> None:
            assert seconds == 0
            if late:
                queue.submit(late.pop())

    queue = WriteQueue(Aside())
    for value in (1, 2, 3):
        queue.submit(_write(value))
    assert len(queue.take(timeout=None) or []) == 3
    queue.submit(_write(1))
    assert len(queue.take(timeout=None) or []) == 2


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
