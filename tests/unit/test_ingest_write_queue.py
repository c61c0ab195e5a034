"""The queue gathers while its taker is busy, and wakes every waiter when the region ends."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from ingest.write_queue import Freeze, Write, WriteQueue


def _write(value: int) -> Write:
    return Write(pa.table({"x": [value]}), size=8, durable=True, token=None)


def test_everything_that_gathered_is_taken_at_once_in_order() -> None:
    queue = WriteQueue()
    items = [_write(1), Freeze(), _write(2)]
    for item in items:
        queue.submit(item)
    assert queue.take(timeout=None) == items
    assert queue.take(timeout=0.0) == []


def test_the_taker_is_woken_by_a_submit() -> None:
    queue = WriteQueue()
    taken: list[object] = []
    taker = threading.Thread(target=lambda: taken.extend(queue.take(timeout=30) or []))
    taker.start()
    queue.submit(write := _write(1))
    taker.join(10)
    assert taken == [write]


def test_breaking_off_fails_waiting_and_later_writes_with_the_reason() -> None:
    queue = WriteQueue()
    queue.submit(waiting := _write(1))
    queue.break_off(reason := RuntimeError("fenced"))
    assert waiting.done.exception(timeout=1) is reason
    with pytest.raises(RuntimeError, match="fenced"):
        queue.submit(_write(2))


def test_a_closed_queue_hands_out_what_it_holds_and_then_ends() -> None:
    queue = WriteQueue()
    queue.submit(last := _write(1))
    queue.close(RuntimeError("closed"))
    assert queue.take(timeout=None) == [last]
    assert queue.take(timeout=None) is None
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(_write(2))
