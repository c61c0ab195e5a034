"""Retries: of a client's call, of a query whose source is silent, and of a process that keeps ending."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from memwal.ingest.errors import (
    SILENT,
    Corrupted,
    FencedError,
    Internal,
    Invalid,
    MemWalError,
    Unavailable,
    UnknownOutcome,
)
from memwal.ingest.service.client.retry import FIRST_PATIENCE, LONGEST_PAUSE, Attempts, verdict
from memwal.ingest.service.daemon.child import STEADY, Restarts
from memwal.ingest.service.ops.health import Health
from memwal.ingest.spark.pipeline.outage import PAUSE_MOST, Outage
from memwal.ingest.spark.pipeline.stream import PipelineStream
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


@pytest.mark.parametrize(
    ("error", "seconds", "given"),
    [
        (unavailable("lost"), 0.0, {"repeatable": True}),
        (UNKNOWN, 300.0, {"repeatable": False, "restarts": 60.0}),  # without a token
        (unavailable("flush_failing"), 300.0, {"repeatable": True}),  # a put; a stream waits
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_an_error_that_no_retry_can_mend_ends_the_call(
    error: MemWalError, seconds: float, given: dict[str, Any], alone: bool
) -> None:
    with pytest.raises(type(error)):
        Attempts(FakeClock(), SeededIds(), seconds, **given).after(error, alone=alone)


def test_a_stream_waits_for_flushes_that_fail() -> None:
    stream = Attempts(FakeClock(), SeededIds(), 300.0, repeatable=True, restarts=60.0)
    assert stream.after(unavailable("flush_failing"), alone=True) is False


def test_a_daemon_with_too_many_calls_says_how_long_to_wait() -> None:
    clock = FakeClock()
    attempts = Attempts(clock, SeededIds(1), 10.0, repeatable=False)
    before = clock.monotonic()
    assert not attempts.after(Unavailable("full", {"reason": "busy", "retry_after": 3.0}), alone=True)
    assert clock.monotonic() - before == 3.0
    with raises(Unavailable):
        attempts.after(Unavailable("full", {"reason": "busy", "retry_after": 8.0}), alone=True)


SILENCE = Unavailable("source: Kafka does not answer: no; run it again", {"reason": SILENT})


def outage(longest: float) -> tuple[Outage, Health, FakeClock]:
    health, clock = Health(), FakeClock()
    return Outage("t", longest, health, clock), health, clock


def test_the_query_is_started_again_with_ever_longer_pauses_until_the_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, health, clock = outage(200.0)

    def attempt() -> None:
        found.failed(SILENCE)
        assert [each["reason"] for each in health.reasons()] == ["source_silent"]
        assert (found.waits, found.due) == (True, False)
        clock.advance(PAUSE_MOST)
        assert found.due
        found.started()
        assert not found.due

    for _ in range(6):  # of 30 s each
        attempt()
    with pytest.raises(Unavailable) as ended:
        attempt()
    assert ended.value is SILENCE
    pauses = [line.rpartition("retry in ")[2].partition(" ")[0] for line in caplog.messages]
    assert pauses == ["1", "2", "4", "8", "16", "30"]


def test_a_source_that_answers_again_has_all_the_time_again() -> None:
    found, health, clock = outage(100.0)
    for status in ({"message": "Waiting for data to arrive"}, {"message": "Waiting for next trigger"}):
        found.failed(SILENCE)
        clock.advance(90.0)
        found.started()
        found.look({"message": "Getting offsets from KafkaV2[…]"})
        assert health.reasons() != []
        found.look(status)
        assert health.reasons() == []


def test_the_time_of_a_pause_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    found, health, clock = outage(100.0)
    found.failed(SILENCE)
    found.forget()
    assert (found.waits, found.due, health.reasons()) == (False, False, [])
    clock.advance(1000.0)
    found.failed(SILENCE)
    assert "answers again" not in caplog.text


class Pausing(PipelineStream):
    """A pipeline without Spark, whose ingestion is paused."""

    def __init__(self, outage: Outage, health: Health) -> None:
        self.pausing, self.said = SimpleNamespace(told="ingestion is paused", stands=False), list[str]()
        self._outage, self._pausing = outage, cast("Any", self.pausing)
        self._pages = cast("Any", SimpleNamespace(health=health))
        self._progress = cast("Any", SimpleNamespace(phase=self.said.append))


def test_a_pipeline_that_is_paused_forgets_its_outage() -> None:
    found, health, _ = outage(100.0)
    found.failed(SILENCE)
    stream = Pausing(found, health)
    stream.start(once=False)
    assert (stream.pausing.stands, stream.said) == (True, ["ingestion is paused"])
    assert (health.reasons(), found.due) == ([], False)


@pytest.mark.parametrize("error", [Invalid("wrong"), Unavailable("a daemon", {"reason": "lost"})])
def test_what_does_not_pass_by_itself_ends_the_run(error: Exception) -> None:
    with pytest.raises(type(error)):
        outage(100.0)[0].failed(error)


def test_no_time_means_that_the_run_ends() -> None:
    with pytest.raises(Unavailable):
        outage(0.0)[0].failed(SILENCE)


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
