"""Small micro-batches that the driver reads without a job: it returns the same rows as a job, or none."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lance
import pyarrow as pa
import pytest

from memwal.ingest.settings.load import Settings, load
from memwal.ingest.spark import reading
from memwal.ingest.spark.reading import DriverRead
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.sink import foreach_batch
from memwal.ingest.spark.sink.foreach_batch import MemWalSink
from memwal.ingest.spark.sink.small import MOST_BYTES
from memwal.ingest.spark.source.kafka import stream as kafka_stream
from memwal.ingest.spark.source.kafka.stream import read_kafka
from memwal.ingest.spark.source.stream import read_stream
from tests.conftest import toml
from tests.kafka_records import kafka_settings
from tests.kafka_server import KafkaServer, Record

EVERY_KIND = {
    "id": "int64",
    "small": "int8",
    "u": "uint16",
    "huge": "uint64",
    "x": "float32",
    "y": "float64",
    "yes": "bool",
    "text": "string",
    "bytes": "binary",
    "day": "date32",
    "at": "timestamp[us, UTC]",
    "local": "timestamp[us]",
    "large": "large_string",
    "vector": "vector[3]",
    "narrow": "vector[3, float16]",
}
Seen = list[tuple[pa.RecordBatch | None, pa.Table, int]]
"""For each micro-batch: the driver's rows, a job's rows, and Spark's row count of the driver's rows."""


@pytest.mark.parametrize("most_bytes", [MOST_BYTES, 1_000])
def test_a_run_reads_its_small_micro_batches_itself(
    kafka: KafkaServer, kafka_connector: dict[str, str], tmp_path: Path, cli: Callable[..., Any], most_bytes: int
) -> None:
    """`most_bytes` limits mapped rows, which may be larger than their records; above it a job writes them."""
    topic, uri, config = tmp_path.name, str(tmp_path / "t.lance"), tmp_path / "config.toml"
    kafka.create_topic(topic, partitions=4)
    kafka.produce(topic, [Record(b'{"id": %d, "n": %d}' % (at % 700, at), b"%d" % (at % 700)) for at in range(2_000)])
    source = {"format": "kafka", "brokers": kafka.brokers, "topics": [topic], "max_offsets_per_trigger": 900}
    table = {"uri": uri, "key": ["id"], "columns": {"id": "int64", "n": "int64"}}
    sections = {"table": table, "regions": {"count": 3}, "source": {**source, "spark": kafka_connector}}
    config.write_text(toml(sections))
    here: list[bool] = []
    by_driver = MemWalSink._by_driver

    def noted(sink: MemWalSink, frame: Any, send: Any) -> Any:
        rows = by_driver(sink, frame, send)
        here.append(rows is not None)
        return rows

    with patch.object(MemWalSink, "_by_driver", noted), patch.object(foreach_batch, "MOST_BYTES", most_bytes):
        ran = cli("run", config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert set(here) == {most_bytes > 1_000}
    newest = {at % 700: at for at in range(2_000)}
    assert {row["id"]: row["n"] for row in lance.dataset(uri).to_table().to_pylist()} == newest


def test_files_without_rows_are_passed_over(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Spark makes no part for a file without bytes, and a part without rows for a file that has only a line break."""
    landing, uri, config = tmp_path / "in", str(tmp_path / "t.lance"), tmp_path / "config.toml"
    landing.mkdir()
    for number, text in enumerate(['{"id": 1}\n', "", "\n", '{"id": 2}\n']):
        (landing / f"{number}.json").write_text(text)
    source = {"format": "json", "path": str(landing), "files_per_trigger": 1}
    table = {"uri": uri, "key": ["id"], "columns": {"id": "int64"}}
    config.write_text(toml({"table": table, "source": source, "dlq": {"mode": "table"}}))
    ran = cli("run", config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert sorted(lance.dataset(uri).to_table()["id"].to_pylist()) == [1, 2]


def test_numbers_of_tasks_are_none_that_spark_gives_a_meaning() -> None:
    assert next(reading._NUMBERS) > 1024


# ---- in this process -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark(kafka_connector: dict[str, str]) -> Iterator[Any]:
    """Start a Spark with the connector."""
    session = start_session(configuration(kafka_settings({"id": "int64"}, spark=kafka_connector), 2, once=True))
    yield session
    session.stop()


@pytest.fixture
def seen(spark: Any, kafka: KafkaServer, tmp_path: Path) -> Callable[..., Seen]:
    """Return the rows of a topic's micro-batches as both ways read them, the driver's first."""

    def read_topic(topic: str, settings: Settings, *, raw: bool = False) -> Seen:
        source = settings.source.model_copy(update={"brokers": kafka.brokers, "topics": [topic]})
        rows = read_kafka(spark, source, settings.arrow_schema(), tuple(settings.table.key), raw=raw)
        assert rows.small is not None
        small, found = rows.small, []

        def look(frame: Any, _number: int) -> None:
            found.append((small(frame), frame.toArrow()))

        writer = rows.frame.writeStream.foreachBatch(look).option("checkpointLocation", str(tmp_path / topic))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        counted = [each.numInputRows for each in query.recentProgress]
        return [(*both, count) for both, count in zip(found, counted, strict=False)]

    return read_topic


def by_place(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    order = sorted(rows.to_pylist(), key=lambda row: (row["_memwal_partition"], row["_memwal_offset"]))
    return [dict(sorted(row.items())) for row in order]


@pytest.mark.parametrize("raw", [False, True])
def test_rows_of_every_kind_are_those_of_a_job(kafka: KafkaServer, seen: Callable[..., Seen], *, raw: bool) -> None:
    topic = f"kinds-{raw}".lower()
    kafka.create_topic(topic, partitions=3)
    full = {"small": -1, "u": 65535, "huge": 2**64 - 1, "x": 0.25, "y": 1e300, "yes": True}
    full |= {"text": "ä😀", "bytes": "AAE=", "day": "2026-01-02", "at": "2026-01-02T03:04:05.000006Z"}
    full |= {"local": "2026-01-02T03:04:05", "large": "é", "vector": [1.0, -2.5, 3.0], "narrow": [0.5] * 3}
    records = [Record(json.dumps({"id": id, **(full if id % 2 else {})}).encode(), b"%d" % id) for id in range(60)]
    records += [Record(None, b"7"), Record(b"{", b"8"), Record(b'{"id": 1, "small": 300}'), Record(b"")]
    records += [Record(b'{"id": 9}', None, {"h": b"5"}), Record(b'{"id": 10}', None, {"h": b"x"})]
    kafka.produce(topic, records)
    table = EVERY_KIND | {"h": "int32", "place": "int64"}
    settings = kafka_settings(table, columns={"h": "headers.h", "place": "offset"})
    ((here, by_job, _),) = seen(topic, settings, raw=raw)
    assert here is not None
    assert by_place(here) == by_place(by_job)
    assert here.num_rows == len(records)
    assert sum(problem is not None for problem in here["_memwal_problem"].to_pylist()) == 4
    assert here.schema.names == by_job.schema.names


@pytest.mark.parametrize("format", ["parquet", "orc", "json", "csv"])
def test_rows_of_files_are_those_of_a_job(spark: Any, tmp_path: Path, format: str) -> None:
    """The places match too: rows of three files, each read in parts, with bad rows where a file may have them."""
    landing = tmp_path / "in"
    made = ["id", "id * 0.5D as x", "cast(id as string) as name", "timestamp_seconds(id) as at"]
    made.append("array(id * 1F, 1.5F) as v")
    flat = made[:4] if format == "csv" else made
    for number in range(3):
        rows = spark.range(number * 100, number * 100 + 100, 1, 2).selectExpr(*flat).coalesce(1)
        rows.write.format(format).mode("append").save(str(landing))
    if format in ("json", "csv"):
        (landing / f"bad.{format}").write_text('{"id": "no"}\n{"id"\n' if format == "json" else "no,1\n")
    columns = {"id": "int64", "x": "float64", "name": "string", "at": "timestamp[us, UTC]"}
    columns |= {} if format == "csv" else {"v": "vector[2]"}
    options = {"header": "false"} if format == "csv" else {}
    source = {"format": format, "path": str(landing), "files_per_trigger": 10, "options": options}
    settings = load({"table": {"uri": "unused", "key": ["id"], "columns": columns}, "source": source}, {})
    rows = read_stream(spark, settings.source, settings.arrow_schema())
    found: list[tuple[pa.RecordBatch | None, pa.Table]] = []

    def look(frame: Any, _number: int) -> None:
        assert rows.small is not None
        found.append((rows.small(frame), frame.toArrow()))

    writer = rows.frame.writeStream.foreachBatch(look).option("checkpointLocation", str(tmp_path / "checkpoint"))
    with small_parts(spark):
        writer.trigger(availableNow=True).start().awaitTermination()
    ((here, by_job),) = found
    assert here is not None
    assert sorted(here.to_pylist(), key=repr) == sorted(by_job.to_pylist(), key=repr)
    assert here.num_rows >= 300
    assert here.schema.names == by_job.schema.names
    for file in set(here["_memwal_file"].to_pylist()):
        of_file = [(row["_memwal_block"], row["id"]) for row in here.to_pylist() if row["_memwal_file"] == file]
        of_job = [(row["_memwal_block"], row["id"]) for row in by_job.to_pylist() if row["_memwal_file"] == file]
        for block in {each[0] for each in of_file}:
            assert [id for at, id in of_file if at == block] == [id for at, id in of_job if at == block]


@contextmanager
def small_parts(spark: Any) -> Iterator[None]:
    """Make Spark read a file of a few KB in several parts inside the context."""
    names = {"spark.sql.files.maxPartitionBytes": "1500", "spark.sql.files.openCostInBytes": "1"}
    before = {name: spark.conf.get(name) for name in names}
    for name, value in names.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def test_debezium_and_a_rolled_back_transaction(kafka: KafkaServer, seen: Callable[..., Seen]) -> None:
    kafka.create_topic("driver-cdc", partitions=1)
    change = json.dumps({"before": None, "after": {"id": 1, "n": 2}, "op": "c"}).encode()
    gone = json.dumps({"before": {"id": 1}, "after": None, "op": "d"}).encode()
    kafka.produce_at_once("driver-cdc", [change, gone], kept=True)
    kafka.produce_at_once("driver-cdc", [change] * 5, kept=False)
    kafka.produce_at_once("driver-cdc", [change], kept=True)
    ((here, by_job, counted),) = seen("driver-cdc", kafka_settings({"id": "int64", "n": "int64"}, envelope="debezium"))
    assert here is not None
    assert by_place(here) == by_place(by_job)
    assert here["_memwal_delete"].to_pylist() == [False, True, False]
    assert counted == 2 * here.num_rows, "the progress of the query counts what the driver has read, as a job's rows"


def test_records_of_aborted_transactions_alone_are_no_rows(kafka: KafkaServer, seen: Callable[..., Seen]) -> None:
    kafka.create_topic("driver-aborted", partitions=1)
    kafka.produce_at_once("driver-aborted", [b'{"id": 1}'] * 5, kept=False)
    ((here, by_job, _),) = seen("driver-aborted", kafka_settings({"id": "int64"}))
    assert here is not None
    assert (here.num_rows, by_job.num_rows) == (0, 0)


def test_times_come_in_the_zone_of_the_session(spark: Any, kafka: KafkaServer, seen: Callable[..., Seen]) -> None:
    kafka.create_topic("driver-zone", partitions=1)
    kafka.produce("driver-zone", [Record(b'{"id": 1}', timestamp=1_700_000_000_000)])
    settings = kafka_settings({"id": "int64", "at": "timestamp[us]"}, columns={"at": "timestamp"})
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        ((here, by_job, _),) = seen("driver-zone", settings)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert here is not None
    assert here["at"].to_pylist() == by_job["at"].to_pylist()


@pytest.mark.parametrize("limit", [{"most_rows": 99}, {"most_bytes": 2_000}])
def test_more_than_the_driver_takes_is_left_to_a_job(
    kafka: KafkaServer, seen: Callable[..., Seen], limit: dict[str, int]
) -> None:
    topic = f"driver-{next(iter(limit))}"
    kafka.create_topic(topic, partitions=2)
    kafka.produce(topic, [Record(b'{"id": %d}' % id) for id in range(100)])

    def limited(scan: Any) -> DriverRead:
        return DriverRead(scan, **limit)

    with patch.object(kafka_stream, "DriverRead", limited):
        ((here, by_job, _),) = seen(topic, kafka_settings({"id": "int64"}))
    assert here is None
    assert sorted(by_job["id"].to_pylist()) == list(range(100))


def test_a_driver_that_is_killed_leaves_no_rows_on_the_disk(
    kafka: KafkaServer, seen: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the driver reads a micro-batch, the directory for temporary files has no file of it; on Linux."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kafka.create_topic("driver-file", partitions=1)
    kafka.produce("driver-file", [Record(b'{"id": 1}')])
    write, found = reading._Inside.write, list[list[Path]]()

    def looked_after(inside: Any, batches: Any, path: str) -> None:
        write(inside, batches, path)
        found.append(list(temporary.iterdir()))

    with patch.object(reading._Inside, "write", looked_after):
        ((here, by_job, _),) = seen("driver-file", kafka_settings({"id": "int64"}))
    assert here is not None
    assert here["id"].to_pylist() == by_job["id"].to_pylist() == [1]
    assert [len(files) for files in found] == [0 if hasattr(os, "memfd_create") else 1]


def test_records_that_are_gone_end_no_read_early(spark: Any, kafka: KafkaServer, tmp_path: Path) -> None:
    """The driver's read fails like a job's; it does not return the rows that it has read until then."""
    kafka.create_topic("driver-gone", partitions=1)
    kafka.produce("driver-gone", [Record(b'{"id": %d}' % id) for id in range(100)])
    quick = {"kafkaConsumer.pollTimeoutMs": "2000"}
    settings = kafka_settings({"id": "int64"}, brokers=kafka.brokers, topics=["driver-gone"], options=quick)
    rows = read_kafka(spark, settings.source, settings.arrow_schema(), ("id",))
    found: list[Any] = []

    def look(frame: Any, _number: int) -> None:
        kafka.delete_records("driver-gone", {0: 50})
        assert rows.small is not None
        found.append(rows.small(frame))

    writer = rows.frame.writeStream.foreachBatch(look).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert found == [None]
