"""Limits on concurrent work: on the rows of several callers, and on the steps of one caller."""

from __future__ import annotations

import threading

import pytest

from memwal.ingest.errors import Unavailable
from memwal.ingest.service.client.writes import InFlight
from memwal.ingest.spark.sink.send import OrderedPipeline
from tests.messages import raises


def test_who_finds_no_room_waits_and_what_is_too_large_goes_alone() -> None:
    room = InFlight(100)
    with room.of(60, 1.0), room.of(40, 1.0), raises(Unavailable), room.of(1, 0.01):
        pass
    with room.of(1000, 1.0), pytest.raises(Unavailable), room.of(1, 0.01):
        pass
    entered = threading.Event()

    def enter() -> None:
        with room.of(70, 60.0):
            entered.set()

    with room.of(50, 1.0):
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.05)
    assert entered.wait(60)
    waiting.join()


def test_results_come_in_order_and_only_as_many_bytes_are_under_way_as_may_be() -> None:
    gates = [threading.Event() for _ in range(4)]
    results: list[int] = []

    def step(number: int) -> int:
        assert gates[number].wait(60)
        return number

    with OrderedPipeline[int](100) as pipelined:
        for number in (0, 1):
            results += pipelined.begin(lambda number=number: step(number), 50)
        assert results == []  # both are under way
        gates[1].set()
        gates[0].set()
        results += pipelined.begin(lambda: step(2), 60)
        assert results == [0, 1]  # step 2 had to wait until both had ended
        gates[2].set()
        gates[3].set()
        results += pipelined.begin(lambda: step(3), 1000)
        results += pipelined.rest()
    assert results == [0, 1, 2, 3]


def test_a_step_that_fails_is_told_when_its_turn_comes() -> None:
    def broken() -> int:
        raise Unavailable("no")

    with OrderedPipeline[int](100) as pipelined:
        assert list(pipelined.begin(broken, 10)) == []
        assert list(pipelined.begin(lambda: 1, 10)) == []
        with pytest.raises(Unavailable):
            list(pipelined.rest())
