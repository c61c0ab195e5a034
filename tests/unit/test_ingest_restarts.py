"""Restarts of a process that keeps ending: the pauses grow, and are short again after a steady run."""

from __future__ import annotations

from memwal.ingest.service.daemon.child import STEADY, Restarts
from tests.support.clock import FakeClock


def test_the_time_between_two_starts_doubles_up_to_the_longest_and_starts_over_after_a_steady_run() -> None:
    clock = FakeClock()
    restarts = Restarts(clock, first=1.0, longest=4.0)
    assert restarts.left == 0.0
    left = []
    for _ in range(4):
        restarts.started()
        left.append(restarts.left)
        clock.advance(restarts.left)
        assert restarts.left == 0.0
    assert left == [1.0, 2.0, 4.0, 4.0]
    clock.advance(STEADY)
    restarts.started()
    assert restarts.left == 1.0


def test_the_time_that_it_ran_counts_towards_the_pause() -> None:
    clock = FakeClock()
    restarts = Restarts(clock, first=10.0, longest=10.0)
    restarts.started()
    clock.advance(7.0)
    assert restarts.left == 3.0
