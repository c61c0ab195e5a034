"""Special contents of a real broker's topics: transactions, and topics that were deleted and created again."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lance
import pytest
from pyspark import SparkContext

from memwal.ingest.spark.checkpoint_files import LocalFiles, SparkFiles
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.sink.foreach_batch import MemWalSink
from memwal.ingest.spark.source.kafka.topics import TopicGuard
from tests.conftest import Cli, Start, toml
from tests.kafka_records import kafka_settings
from tests.kafka_server import KafkaServer, Record


def values(ids: Iterable[int]) -> list[bytes]:
    return [json.dumps({"id": id, "n": id}).encode() for id in ids]


def test_transactions_and_a_topic_that_is_created_anew(
    kafka: KafkaServer, kafka_connector: dict[str, str], tmp_path: Path, cli: Cli
) -> None:
    topic, config = tmp_path.name, tmp_path / "config.toml"
    kafka.create_topic(topic)
    sections = {
        "table": {"uri": str(tmp_path / "t.lance"), "columns": {"id": "int64", "n": "int64"}, "append_only": True},
        "source": {"format": "kafka", "brokers": kafka.brokers, "topics": [topic], "spark": kafka_connector},
    }

    def run(**sink: str) -> Any:
        config.write_text(toml({**sections, "sink": sink} if sink else sections))
        return cli("run", config, "--once")

    def ids() -> list[int]:
        return sorted(lance.dataset(str(tmp_path / "t.lance")).to_table(["id"])["id"].to_pylist())

    # The broker ends each transaction with a record of its own, so offsets have gaps, also at the end.
    for first in range(0, 20, 5):
        kafka.produce_at_once(topic, values(range(first, first + 5)), kept=first % 10 == 0)
    ran = run()
    assert (ran.code, ran.error_lines) == (0, [])
    assert ids() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]

    # The new topic has more records than the old one: by offsets alone its first records would count as read.
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    kafka.produce(topic, [Record(value) for value in values(range(100, 150))])
    ran = run()
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert f"topic '{topic}' was deleted and created anew" in ran.err
    assert "set sink.checkpoint to a new one" in ran.err
    assert len(ids()) == 10
    ran = run(checkpoint=str(tmp_path / "anew"))
    assert (ran.code, ran.error_lines) == (0, [])
    assert ids() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, *range(100, 150)]


@dataclass(frozen=True)
class Pipeline:
    """A configuration that reads topics of the broker into an append-only table, which keeps doubled rows."""

    kafka: KafkaServer
    config: Path

    def ids(self) -> list[int]:
        """Return the ids in the base table, in order."""
        return sorted(lance.dataset(str(self.config.parent / "t.lance")).to_table(["id"])["id"].to_pylist())

    def recreate(self, topic: str, ids: Iterable[int]) -> None:
        """Delete the topic, and create it with other records."""
        self.kafka.delete_topic(topic)
        self.kafka.create_topic(topic)
        self.produce(topic, ids)

    def produce(self, topic: str, ids: Iterable[int]) -> None:
        """Append records."""
        self.kafka.produce(topic, [Record(value) for value in values(ids)])


@pytest.fixture
def pipeline(kafka: KafkaServer, kafka_connector: dict[str, str], tmp_path: Path) -> Callable[..., Pipeline]:
    """Return a function that writes a configuration of a topic named after the test, with the records 0 to 9."""

    def make(**source: Any) -> Pipeline:
        given = {"format": "kafka", "brokers": kafka.brokers, "spark": kafka_connector, **source}
        if "topic_pattern" not in given:
            given["topics"] = [tmp_path.name]
        table = {"uri": str(tmp_path / "t.lance"), "columns": {"id": "int64", "n": "int64"}, "append_only": True}
        (tmp_path / "config.toml").write_text(toml({"table": table, "source": given}))
        kafka.create_topic(tmp_path.name)
        made = Pipeline(kafka, tmp_path / "config.toml")
        made.produce(tmp_path.name, range(10))
        return made

    return make


def running_of(start: Start, made: Pipeline) -> Any:
    return start([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(made.config)])


def assert_refused(code: int, lines: list[str], topic: str) -> None:
    assert (code, len(lines)) == (2, 1), lines
    assert f"topic '{topic}' was deleted and created anew" in lines[0]
    assert "set sink.checkpoint to a new one" in lines[0]


def test_a_topic_recreated_between_two_micro_batches_ends_the_run(
    pipeline: Callable[..., Pipeline], cli: Cli, tmp_path: Path
) -> None:
    made, write = pipeline(), MemWalSink.__call__

    def then_recreated(sink: MemWalSink, *batch: Any) -> None:
        write(sink, *batch)
        made.recreate(tmp_path.name, range(100, 150))

    with patch.object(MemWalSink, "__call__", then_recreated):
        ran = cli("run", made.config)
    assert_refused(ran.code, ran.error_lines, tmp_path.name)
    ran = cli("run", made.config, "--once")
    assert_refused(ran.code, ran.error_lines, tmp_path.name)
    cli("flush", made.config), cli("commit", made.config)
    assert made.ids() == list(range(10)), "no record of the new topic was sent"


def test_a_topic_recreated_during_a_pause_ends_the_run(
    pipeline: Callable[..., Pipeline], cli: Cli, start: Start, tmp_path: Path
) -> None:
    made = pipeline(trigger="500ms")
    running = running_of(start, made)
    running.line_with(": 10 rows in")
    assert cli("pause", made.config).code == 0
    running.line_with("paused")
    made.recreate(tmp_path.name, range(100, 150))
    assert cli("resume", made.config).code == 0
    assert_refused(running.wait(), running.errors, tmp_path.name)


def test_a_topic_that_appeared_during_a_run_is_recognised_by_the_next_run(
    pipeline: Callable[..., Pipeline], cli: Cli, tmp_path: Path
) -> None:
    made, late = pipeline(topic_pattern=f"{tmp_path.name}.*"), f"{tmp_path.name}-late"
    write, written = MemWalSink.__call__, list[int]()

    def then_more(sink: MemWalSink, frame: Any, batch_id: int) -> None:
        write(sink, frame, batch_id)
        written.append(batch_id)
        if batch_id == 0:
            made.kafka.create_topic(late)
            made.produce(late, range(10, 20))
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(MemWalSink, "__call__", then_more):
        ran = cli("run", made.config)
    assert (ran.code, ran.error_lines, written) == (0, [], [0, 1])
    made.recreate(late, range(100, 150))
    for _ in range(2):  # the run does not record the new id either
        ran = cli("run", made.config, "--once")
        assert_refused(ran.code, ran.error_lines, late)


@pytest.mark.parametrize("way", ["driver", "one task", "shuffle"])
def test_a_topic_recreated_while_its_records_are_read_sends_none_of_them(
    pipeline: Callable[..., Pipeline], cli: Cli, tmp_path: Path, way: str
) -> None:
    made, check = pipeline(), TopicGuard.check

    def late(guard: TopicGuard) -> None:
        made.recreate(tmp_path.name, range(100, 150))
        check(guard)

    def no_driver(sink: MemWalSink, *_: Any) -> None:
        sink._last = 10 if way == "one task" else None

    ways = patch.object(MemWalSink, "_by_driver", no_driver) if way != "driver" else nullcontext()
    with patch.object(TopicGuard, "check", late), ways:
        ran = cli("run", made.config, "--once")
    assert_refused(ran.code, ran.error_lines, tmp_path.name)
    cli("flush", made.config), cli("commit", made.config)
    assert made.ids() == []


def test_a_recreated_topic_is_read_on_where_loss_is_accepted(
    pipeline: Callable[..., Pipeline], cli: Cli, tmp_path: Path
) -> None:
    made = pipeline(fail_on_data_loss=False)
    assert cli("run", made.config, "--once").code == 0
    made.recreate(tmp_path.name, range(100, 150))
    ran = cli("run", made.config, "--once")
    assert ran.code == 0
    assert ran.err.count("was deleted and created anew") == 2, "one line of the check, one of the query's start"
    assert made.ids() == [*range(10), *range(110, 150)]
    made.produce(tmp_path.name, range(150, 160))
    ran = cli("run", made.config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])


@pytest.mark.parametrize("way", ["one task", "shuffle"])
def test_records_that_spark_would_read_again_after_the_check_are_checked_again(
    pipeline: Callable[..., Pipeline], cli: Cli, tmp_path: Path, way: str
) -> None:
    made, check, checks = pipeline(), TopicGuard.check, list[bool]()

    def losing(guard: TopicGuard) -> None:
        check(guard)
        checks.append(True)
        if len(checks) == 1:
            active: Any = SparkContext._active_spark_context
            tracker = active._jvm.org.apache.spark.SparkEnv.get().mapOutputTracker()
            for shuffle in filter(tracker.containsShuffle, range(100)):
                tracker.unregisterAllMapAndMergeOutput(shuffle)

    def no_driver(sink: MemWalSink, *_: Any) -> None:
        sink._last = 10 if way == "one task" else None

    with patch.object(TopicGuard, "check", losing), patch.object(MemWalSink, "_by_driver", no_driver):
        ran = cli("run", made.config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert (made.ids(), len(checks)) == (list(range(10)), 2)


def test_files_of_a_checkpoint_are_the_same_through_spark(kafka_connector: dict[str, str], tmp_path: Path) -> None:
    spark = start_session(configuration(kafka_settings({"id": "int64"}, spark=kafka_connector), 1, once=True))
    try:
        through_spark, local = tmp_path / "spark", tmp_path / "local"
        for files, at in ((SparkFiles(spark, through_spark.as_uri()), through_spark), (LocalFiles(local), local)):
            assert files.read("note-é") is None
            for text in ("first é\n", "second\n"):
                files.write("note-é", text)
                assert files.read("note-é") == (at / "note-é").read_text() == text
            assert files.names("offsets") == []
            (at / "offsets").mkdir()
            assert files.names("offsets") == []
            (at / "offsets" / "0").touch()
            assert files.names("offsets") == ["0"]
    finally:
        spark.stop()
