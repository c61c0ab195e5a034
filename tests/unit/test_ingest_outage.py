"""Restarts of a pipeline's query after its source gave no answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from memwal.ingest.errors import SILENT, Invalid, Unavailable
from memwal.ingest.service.ops.health import Health
from memwal.ingest.spark.pipeline.outage import PAUSE_MOST, Outage
from memwal.ingest.spark.pipeline.stream import PipelineStream
from tests.support.clock import FakeClock

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
