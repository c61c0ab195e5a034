"""Retries of a call: the decision, the pauses and the deadline."""

from __future__ import annotations

import pytest

from memwal.ingest.errors import Corrupted, FencedError, Internal, Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.service.client.retry import FIRST_PATIENCE, LONGEST_PAUSE, Attempts, verdict
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds


def unavailable(reason: str | None = None) -> Unavailable:
    return Unavailable("no", {} if reason is None else {"reason": reason})


FENCED, UNKNOWN = FencedError("fenced"), UnknownOutcome("unknown")


@pytest.mark.parametrize(
    ("error", "repeatable", "alone", "expected"),
    [
        (unavailable("busy"), False, False, "wait"),
        (unavailable("busy"), False, True, "wait"),
        (unavailable("not_owner"), False, False, "learn"),
        (unavailable("not_owner"), False, True, "learn"),
        (unavailable("draining"), False, False, "learn"),
        (unavailable("draining"), False, True, "raise"),
        (unavailable("lost"), False, False, "learn"),
        (unavailable("lost"), True, True, "raise"),
        (unavailable(), False, False, "learn"),
        (unavailable(), True, True, "raise"),
        (unavailable("flush_failing"), True, False, "raise"),
        (FENCED, False, False, "learn"),
        (FENCED, True, True, "raise"),
        (UnknownOutcome("?", {"reason": "moved"}), True, False, "wait"),
        (UnknownOutcome("?", {"reason": "moved"}), False, False, "raise"),
        (UNKNOWN, True, False, "learn"),
        (UNKNOWN, False, False, "raise"),
        (UNKNOWN, True, True, "raise"),
        (Invalid("wrong"), True, False, "raise"),
        (Corrupted("broken"), True, False, "raise"),
        (Internal("bug"), True, False, "raise"),
    ],
)
def test_only_what_may_pass_and_cannot_double_rows_is_tried_again(
    error: MemWalError, repeatable: bool, alone: bool, expected: str
) -> None:
    assert verdict(error, repeatable=repeatable, alone=alone) == expected


def test_pauses_grow_to_a_limit_and_end_at_the_deadline() -> None:
    clock = FakeClock()
    attempts = Attempts(clock, SeededIds(), 10.0, repeatable=False)
    error = unavailable("not_owner")

    def for_ever() -> None:
        while attempts.after(error, alone=False):
            pass

    with pytest.raises(Unavailable) as raised:
        for_ever()
    assert raised.value is error
    tried = len(clock.slept)
    assert 50 < tried < 150
    assert clock.monotonic() <= 10.0
    assert 0 < clock.slept[0] < 0.02
    assert max(clock.slept) <= LONGEST_PAUSE
    assert len(set(clock.slept)) == tried, "clients that were refused together do not come back together"


def test_an_attempt_has_all_the_time_where_nobody_else_could_do_better() -> None:
    clock = FakeClock()
    attempts = Attempts(clock, SeededIds(), 300.0, repeatable=True)
    assert attempts.patience(alone=True) == 300.0
    assert attempts.patience(alone=False) == FIRST_PATIENCE
    attempts.after(unavailable("lost"), alone=False)
    assert attempts.patience(alone=False) == 2 * FIRST_PATIENCE
    clock.advance(290.0)
    assert attempts.patience(alone=False) == attempts.left < 10.0


def test_no_time_means_one_attempt() -> None:
    with pytest.raises(Unavailable):
        Attempts(FakeClock(), SeededIds(), 0.0, repeatable=True).after(unavailable("lost"), alone=False)


def test_a_daemon_that_is_alone_is_waited_for_where_somebody_starts_it_again() -> None:
    clock = FakeClock()
    attempts = Attempts(clock, SeededIds(), 300.0, repeatable=True, restarts=60.0)
    for error in (unavailable("lost"), UNKNOWN, unavailable("draining"), unavailable()):
        assert attempts.after(error, alone=True)
    with pytest.raises(FencedError):
        attempts.after(FENCED, alone=True)
    with pytest.raises(Invalid):
        attempts.after(Invalid("wrong"), alone=True)
    clock.advance(61.0)
    with pytest.raises(Unavailable):
        attempts.after(unavailable("lost"), alone=True)


def test_without_a_token_an_unknown_outcome_ends_a_call_wherever_it_is_met() -> None:
    attempts = Attempts(FakeClock(), SeededIds(), 300.0, repeatable=False, restarts=60.0)
    with pytest.raises(UnknownOutcome):
        attempts.after(UNKNOWN, alone=True)


def test_a_daemon_with_too_many_calls_says_how_long_to_wait() -> None:
    clock = FakeClock()
    attempts = Attempts(clock, SeededIds(1), 10.0, repeatable=False)
    before = clock.monotonic()
    assert not attempts.after(Unavailable("full", {"reason": "busy", "retry_after": 3.0}), alone=True)
    assert clock.monotonic() - before == 3.0
    with raises(Unavailable):
        attempts.after(Unavailable("full", {"reason": "busy", "retry_after": 8.0}), alone=True)


def test_a_stream_waits_for_flushes_that_fail_and_a_put_does_not() -> None:
    error = unavailable("flush_failing")
    stream = Attempts(FakeClock(), SeededIds(), 300.0, repeatable=True, restarts=60.0)
    assert stream.after(error, alone=True) is False
    with pytest.raises(Unavailable):
        Attempts(FakeClock(), SeededIds(), 300.0, repeatable=True).after(error, alone=False)
