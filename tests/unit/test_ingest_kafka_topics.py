"""Topics are identified by their ids: the offsets of a checkpoint are invalid in another topic of the same name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from memwal import Invalid
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.spark.checkpoint_files import LocalFiles
from memwal.ingest.spark.source.kafka.topics import Topic, TopicGuard, check_places
from tests.messages import raises


def of(at: Path | str, **source: Any) -> Settings:
    """Return settings with the checkpoint `at`."""
    given = {"format": "kafka", "brokers": "b:1", "topic_pattern": ".*", **source}
    return load({"table": {"uri": "t", "key": ["id"]}, "sink": {"checkpoint": str(at)}, "source": given}, {})


class Brokers:
    """A stand-in for brokers, with topics that a test changes."""

    def __init__(self, **ids: str) -> None:
        self.all, self.calls = ids, 0

    def wanted(self) -> dict[str, Topic]:
        """Return all topics, with one partition each."""
        return {name: Topic(id, 1) for name, id in self.all.items()}

    def ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ids of topics, and count the call."""
        self.calls += 1
        return {name: self.all[name] for name in names if name in self.all}

    def close(self) -> None:
        """Nothing is open."""


def guard(at: Path, brokers: Brokers, **source: Any) -> TopicGuard:
    """Return the guard of a query that starts."""
    started = TopicGuard(of(at, **source), brokers, LocalFiles(at))
    started.start()
    return started


def planned(at: Path, batch_id: int, *topics: str) -> None:
    """Write the offsets of a micro-batch as Spark does."""
    (at / "offsets").mkdir(parents=True, exist_ok=True)
    offsets = json.dumps({topic: {"0": 7} for topic in topics})
    (at / "offsets" / str(batch_id)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{offsets}')


def test_a_recreated_topic_is_recognised_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planned(tmp_path, 0, "a", "b")
    for brokers in (Brokers(a="A", b="B"), Brokers(a="A", c="C")):  # topics come and go
        guard(tmp_path, brokers)
    back = Brokers(b="B2")
    for _ in range(2):
        with raises(Invalid):
            guard(tmp_path, back)
    guard(tmp_path, back, fail_on_data_loss=False)
    assert "topic 'b' was deleted and created anew" in caplog.text
    guard(tmp_path, back)


def test_a_checkpoint_without_offsets_knows_no_topic(tmp_path: Path) -> None:
    guard(tmp_path, Brokers(a="A"))
    guard(tmp_path, Brokers(a="A2"))
    (tmp_path / "sources" / "0").mkdir(parents=True)
    (tmp_path / "sources" / "0" / "0").touch()  # the offsets at which Spark begins; no micro-batch had records yet
    with raises(Invalid):
        guard(tmp_path, Brokers(a="A3"))


def test_a_topic_is_noted_before_its_first_micro_batch_and_compared_in_each(tmp_path: Path) -> None:
    brokers = Brokers(a="A")
    query = guard(tmp_path, brokers)
    brokers.all["b"] = "B"
    planned(tmp_path, 0, "a", "b")
    query.begin(0)
    assert json.loads((tmp_path / "memwal-topics").read_text()) == {"a": "A", "b": "B"}
    query.check()
    calls = brokers.calls
    planned(tmp_path, 1, "a", "b")
    query.begin(1)
    query.check()
    assert brokers.calls == calls + 1, "one call in a micro-batch without new topics"
    brokers.all["b"] = "B2"
    with raises(Invalid):
        query.check()
    with raises(Invalid):
        guard(tmp_path, brokers)


def test_a_topic_that_is_gone_ends_the_run_unless_loss_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    brokers = Brokers(a="A", b="B")
    planned(tmp_path, 0, "a", "b")
    query, lax = guard(tmp_path, brokers), guard(tmp_path, brokers, fail_on_data_loss=False)
    del brokers.all["b"]
    for each in (query, lax):
        each.begin(0)
    with raises(Invalid):
        query.check()
    lax.check()
    brokers.all["b"] = "B2"
    for _ in range(2):
        lax.check()
    assert caplog.text.count("topic 'b' was deleted and created anew") == 1


def test_lost_offsets_are_reported(tmp_path: Path) -> None:
    with raises(Invalid):
        guard(tmp_path, Brokers(a="A")).begin(3)


@pytest.mark.parametrize(
    "offsets",
    [
        {"a": {"0": 5}},
        {"a": {"0": 5, "1": 5, "2": 5}},
        {"b": {"0": 5}},
    ],
)
def test_starting_offsets_are_of_the_partitions_that_there_are(tmp_path: Path, offsets: Any) -> None:
    found = {"a": Topic("A", 2)}
    with raises(Invalid):
        check_places(of(tmp_path, starting_offsets=json.dumps(offsets)), found, LocalFiles(tmp_path))
    check_places(of(tmp_path, starting_offsets='{"a": {"0": -2, "1": 17}}'), found, LocalFiles(tmp_path))
    planned(tmp_path, 0, "a")
    check_places(of(tmp_path, starting_offsets=json.dumps(offsets)), found, LocalFiles(tmp_path))
