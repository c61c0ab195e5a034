"""The sink inside Spark: micro-batches reach regions exactly once, and their rows never pass through the driver."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import memwal
from memwal import flush
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.sink import foreach_batch as spark_sink
from memwal.ingest.spark.sink.foreach_batch import MemWalSink
from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.sink.small import PACKED, OneTask, PreparedTask, in_order, needs_paths, unpacked
from memwal.ingest.spark.source.columns import BLOCK, BUCKET, DELETE, FILE, LANDED, PART, ROW
from memwal.ingest.spark.source.feed import Feed
from memwal.ingest.spark.source.stream import read_stream
from memwal.wal import SystemIds, open_store
from tests.cluster import start_daemon
from tests.conftest import SmallConfig, Start, WaitUntil
from tests.opened import announced
from tests.s3_server import free_ports
from tests.support.clock import FakeClock

RESULT_LIMIT = 64 << 10
"""Maximum bytes that tasks may send to the driver: enough for receipts, too few for the rows of the test."""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start one Spark for the module, with a driver that cannot receive rows."""
    source = {"spark": {"spark.driver.maxResultSize": str(RESULT_LIMIT)}}
    settings = load({"table": {"uri": str(tmp_path_factory.mktemp("unused"))}, "source": source}, {})
    session = start_session(configuration(settings, 2, once=True))
    yield session
    session.stop()


_LAST_SECOND = ((1 << 43) - 1) // 1_000
"""The last second of 2248 that fits into the number."""


class Stream:
    """The small table's configuration, its source directory, and the query as a user writes it."""

    def __init__(self, spark: Any, config: Path, directory: Path, endpoint: str | None = None) -> None:
        """`endpoint`: of a daemon in place of a child daemon of the sink."""
        self.spark, self.config, self.endpoint = spark, config, endpoint
        self.settings: Settings = load(config, {})
        self.source = directory
        self.checkpoint = directory.parent / "checkpoint"
        self.batches: list[BatchReceipt] = []
        self.sink = self.new_sink()

    def new_sink(self) -> MemWalSink:
        return MemWalSink(self.config, endpoint=self.endpoint, on_batch=self.batches.append)

    def land(self, *tables: pa.Table) -> None:
        """Put files into the source, one per table, in this order."""
        feed = self.source.parent / "feed"
        feed.mkdir(exist_ok=True)
        for table in tables:
            pq.write_table(table, feed / f"{len(list(feed.iterdir())):03d}.parquet")
        Feed(feed, self.source, 0.0, FakeClock()).land_all()

    def run(self, schema: pa.Schema, through: Callable[[Any], Any] = lambda frame: frame) -> None:
        """Process the existing files, with `through` applied to the frame. Raises: the error that ended the query, with
        its kind.
        """
        frame = through(read_stream(self.spark, self.settings.source, schema).frame)
        writer = frame.writeStream.foreachBatch(self.sink).option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(300)
        except Exception as error:
            raise (self.sink.failure or of_spark(error)) from error
        finally:
            query.stop()

    def status(self) -> Any:
        with memwal.connect(self.settings.table.uri) as table:
            return table.status()

    def names(self) -> dict[int, str]:
        with memwal.connect(self.settings.table.uri) as table:
            return {row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()}


@pytest.fixture
def stream(spark: Any, small_config: SmallConfig, tmp_path: Path, ends: ExitStack) -> Iterator[Callable[..., Stream]]:
    """Make a stream into the small table. A daemon in this process serves it, or (`child`) a child daemon, which ends
    with the test."""
    made: list[Stream] = []

    def make(files_per_trigger: int = 1, *, child: bool = False, **table: str) -> Stream:
        (tmp_path / "in").mkdir()
        source = {"path": str(tmp_path / "in"), "files_per_trigger": files_per_trigger}
        config = small_config(source=source, table=table)
        endpoint = None if child else announced(load(config, {}), ends)
        made.append(Stream(spark, config, tmp_path / "in", endpoint))
        return made[-1]

    yield make
    for each in made:
        each.sink.close()


def test_micro_batches_arrive_and_the_newest_row_of_a_key_wins_also_inside_one(
    stream: Callable[..., Stream], made: Any
) -> None:
    source = stream(files_per_trigger=3)
    source.land(made.table(range(60)), made.table(range(40), version=1), made.table(range(20), version=2))
    source.land(made.table(range(10), version=3))
    source.run(made.schema)
    assert [batch.rows for batch in source.batches] == [120, 10]
    assert all(region.applied and region.position > 0 for batch in source.batches for region in batch.regions)
    versions = {id: 3 if id < 10 else 2 if id < 20 else 1 if id < 40 else 0 for id in range(60)}
    assert source.names() == {id: f"row {id} v{version}" for id, version in versions.items()}


def test_columns_that_a_frame_does_not_have_keep_what_is_stored(stream: Callable[..., Stream], made: Any) -> None:
    source = stream(files_per_trigger=2, upsert="merge")
    source.land(made.table(range(30)))
    source.run(made.schema)
    prices = pa.schema([made.schema.field(name) for name in ("id", "price")])
    source.land(*(pa.table({"id": range(20, 40), "price": [n] * 20}, schema=prices) for n in (1, 2)))
    source.run(prices)
    expected = {id: made.row(id) for id in range(30)}
    for id in range(20, 40):
        expected[id] = {**expected.get(id, dict.fromkeys(made.schema.names) | {"id": id}), "price": 2}
    with memwal.connect(source.settings.table.uri) as table:
        assert {row["id"]: row for row in table.scan().read_all().to_pylist()} == expected


def test_a_micro_batch_that_repeats_a_key_is_refused(stream: Callable[..., Stream], made: Any) -> None:
    source = stream(files_per_trigger=2, on_duplicate="fail")
    source.land(made.table(range(30)), made.table(range(29, 50), version=1))
    with pytest.raises(
        memwal.Invalid, match=r"the key id = 29 is in row .* of one put; .* put each key once"
    ) as raised:
        source.run(made.schema)
    assert len(raised.value.lines) == 1
    assert 29 not in source.names()


def test_rows_that_a_frame_marks_delete_their_keys(stream: Callable[..., Stream], made: Any) -> None:
    from pyspark.sql import functions

    def with_deletes(frame: Any) -> Any:
        marked = frame.withColumn(DELETE, functions.col("name").endswith("v2"))
        return marked.withColumn("name", functions.when(~functions.col(DELETE), functions.col("name")))

    source = stream(files_per_trigger=3)
    source.land(made.table(range(60)), made.table(range(40), version=1), made.table(range(20), version=2))
    source.land(made.table(range(10), version=3), made.table(range(50, 55), version=2))
    source.run(made.schema, with_deletes)
    assert [batch.rows for batch in source.batches] == [120, 15]
    versions = {id: 3 if id < 10 else 1 if id < 40 else 0 for id in [*range(10), *range(20, 50), *range(55, 60)]}
    assert source.names() == {id: f"row {id} v{version}" for id, version in versions.items()}


def test_the_oldest_row_of_a_key_counts_in_a_micro_batch(stream: Callable[..., Stream], made: Any) -> None:
    source = stream(files_per_trigger=2, on_duplicate="first")
    source.land(made.table(range(30)), made.table(range(20, 40), version=1), made.table(range(5), version=2))
    source.run(made.schema)
    assert [batch.rows for batch in source.batches] == [50, 5]
    versions = {id: 2 if id < 5 else 0 if id < 30 else 1 for id in range(40)}
    assert source.names() == {id: f"row {id} v{version}" for id, version in versions.items()}


def test_a_refused_row_means_that_nothing_of_its_micro_batch_is_written(
    stream: Callable[..., Stream], made: Any
) -> None:
    source = stream(files_per_trigger=2)
    source.land(made.table(range(30)))
    source.run(made.schema)
    before = [region["wal_position"] for region in source.status()["regions"]]
    nullable = pa.schema([field.with_nullable(True) for field in made.schema])
    rows = made.rows(range(100, 104))
    rows[2]["id"] = None
    source.land(made.table(range(30, 60)), pa.Table.from_pylist(rows, schema=nullable))
    with pytest.raises(memwal.Invalid, match=r"key column 'id' is null.*row 2 of 002\.parquet") as raised:
        source.run(made.schema)
    assert len(raised.value.lines) == 1
    assert [region["wal_position"] for region in source.status()["regions"]] == before
    assert sorted(source.names()) == list(range(30))


def test_a_replayed_micro_batch_is_applied_once(stream: Callable[..., Stream], made: Any) -> None:
    source = stream()
    source.land(made.table(range(30)))
    source.run(made.schema)
    before = [region["wal_position"] for region in source.status()["regions"]]
    for done in (source.checkpoint / "commits").iterdir():
        done.unlink()  # as if the driver had died between the acks and its own record of them
    source.run(made.schema)
    assert [batch.batch_id for batch in source.batches] == [0, 0]
    assert [region.applied for region in source.batches[1].regions] == [False, False]
    assert [region["wal_position"] for region in source.status()["regions"]] == before


@pytest.mark.parametrize("same", [False, True], ids=["a new sink", "the same sink"])
def test_of_a_checkpoint_that_was_set_back_no_region_takes_anything(
    same: bool, stream: Callable[..., Stream], made: Any, tmp_path: Path
) -> None:
    """Its micro-batches have other rows under numbers that regions have applied, so these would be dropped silently.
    A region behind the others takes no rows either: it would take them again once the newest checkpoint is back.
    """
    source = stream(files_per_trigger=3)
    rows, more = made.table(range(30)), made.table(range(30), version=1)
    source.land(rows)
    source.run(made.schema)
    shutil.copytree(source.checkpoint, tmp_path / "copy")
    buckets = pa.array(flush.BaseTable.open(source.settings.table.uri).route(rows))
    for _ in range(2):
        source.land(more.filter(pc.equal(buckets, 0)))
        source.run(made.schema)
    before = source.names()
    shutil.rmtree(source.checkpoint)
    shutil.copytree(tmp_path / "copy", source.checkpoint)
    source.land(more.filter(pc.equal(buckets, 1)))
    if not same:
        source.sink.close()
        source.sink = source.new_sink()
    for _ in range(2):
        with pytest.raises(memwal.Invalid, match=r"checkpoint is older than the table: .* up to 2 .* micro-batch 1 "):
            source.run(made.schema)
    assert source.names() == before


def test_a_region_that_missed_a_micro_batch_gets_it_from_the_replay(stream: Callable[..., Stream], made: Any) -> None:
    source = stream()
    source.land(made.table(range(30)))
    source.run(made.schema)
    query = next((source.checkpoint / "metadata").open()).split('"')[3]
    source.land(made.table(range(30), version=1))
    token = memwal.Token(query, 1)
    with memwal.connect(source.settings.table.uri) as table:
        base = flush.BaseTable.open(source.settings.table.uri)
        rows = made.table(range(30), version=1)
        part = rows.filter(pa.array(base.route(rows) == 0))
        from memwal.wal import bucket_region

        put = table.open_stream(bucket_region(0), token)
        put.write(part.cast(table.schema).combine_chunks().to_batches()[0])
        put.finish()
    source.run(made.schema)
    assert sorted(region.applied for region in source.batches[-1].regions) == [False, True]
    assert source.names() == {id: f"row {id} v1" for id in range(30)}


def test_rows_never_pass_through_the_driver(stream: Callable[..., Stream], made: Any) -> None:
    source = stream()
    rng = np.random.default_rng(1)
    texts = ["".join(map(chr, rng.integers(33, 120, 400))) for _ in range(2000)]
    wide = made.table(range(2000)).set_column(1, "name", pa.array(texts))
    source.land(wide)
    with pytest.raises(Exception, match="maxResultSize"):  # the limit works: this driver cannot receive these rows
        source.spark.read.parquet(str(source.source)).collect()
    source.run(made.schema)
    assert source.batches[0].rows == 2000
    assert source.names() == dict(enumerate(texts))


def test_a_child_daemon_that_dies_under_a_micro_batch_fails_nothing(
    stream: Callable[..., Stream], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stream(child=True)
    source.land(made.table(range(30)))
    source.run(made.schema)
    assert source.sink.child is not None
    first = source.sink.child.pid

    def dies(*args: Any) -> SendTask:
        if source.sink.child.pid == first:
            os.kill(first, signal.SIGKILL)
        return SendTask(*args)

    monkeypatch.setattr(spark_sink, "SendTask", dies)
    source.land(made.table(range(20, 60), version=1))
    source.run(made.schema)
    assert source.sink.child.pid != first
    assert [batch.rows for batch in source.batches] == [30, 40]
    assert source.names() == {id: f"row {id} v{int(id >= 20)}" for id in range(60)}


def test_a_child_daemon_that_cannot_come_back_is_named(
    stream: Callable[..., Stream], made: Any, wait_until: WaitUntil
) -> None:
    source = stream(child=True)
    source.land(made.table(range(30)))
    source.run(made.schema)
    child = source.sink.child
    assert child is not None
    shutil.move(source.settings.table.uri, tmp := f"{source.settings.table.uri}.away")
    Path(source.settings.table.uri).write_text("no table")
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: child.failure)
    assert "the daemon ended (signal 9) and cannot be started again: " in str(child.failure)
    Path(source.settings.table.uri).unlink()
    shutil.move(tmp, source.settings.table.uri)
    source.land(made.table(range(30, 60)))
    source.run(made.schema)  # with a new child
    assert sorted(source.names()) == list(range(60))


def test_two_daemons_are_fed_and_one_that_dies_fails_no_micro_batch(
    spark: Any, small_config: SmallConfig, tmp_path: Path, start: Start, made: Any
) -> None:
    endpoints = [f"grpc://127.0.0.1:{port}" for port in free_ports(2)]
    (tmp_path / "in").mkdir()
    source = {"path": str(tmp_path / "in"), "files_per_trigger": 1}
    config = small_config(source=source, daemon={"endpoints": endpoints}, regions={"count": 4})
    daemons = [start_daemon(start, config, endpoint) for endpoint in endpoints]
    for daemon in daemons:
        daemon.line_with("serving")
    source_of = Stream(spark, config, tmp_path / "in")
    source_of.land(made.table(range(60)))
    source_of.run(made.schema)
    daemons[0].kill()
    source_of.land(made.table(range(30, 90), version=1))
    source_of.run(made.schema)
    assert [batch.rows for batch in source_of.batches] == [60, 60]
    assert source_of.names() == {id: f"row {id} v{int(id >= 30)}" for id in range(90)}
    assert source_of.sink.child is None


def test_outside_a_streaming_query_it_says_how_to_use_it(stream: Callable[..., Stream], made: Any) -> None:
    source = stream()
    with pytest.raises(memwal.Invalid, match="foreachBatch"):
        source.sink(source.spark.range(3), 0)


def test_a_table_that_is_resized_between_two_micro_batches(stream: Callable[..., Stream], made: Any) -> None:
    source = stream(child=True)
    source.land(made.table(range(40)))
    source.run(made.schema)
    uri = source.settings.table.uri
    flush.resize(uri, {}, open_store(uri), 5, clock=FakeClock(), ids=SystemIds())
    source.land(made.table(range(20, 60), version=1))
    source.run(made.schema)
    assert len(source.status()["regions"]) == 5
    assert source.names() == {id: f"row {id} v{int(id >= 20)}" for id in range(60)}


def test_a_micro_batch_that_is_too_large_for_one_task_is_shuffled_and_applied_once(
    stream: Callable[..., Stream], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_sink, "MOST_BYTES", 6_000)
    routed_frame, shuffled = spark_sink.routed_frame, list[int]()

    def counted(frame: Any, *args: Any) -> Any:
        shuffled.append(len(source.batches))
        return routed_frame(frame, *args)

    monkeypatch.setattr(spark_sink, "routed_frame", counted)
    source = stream()
    source.land(made.table(range(10)), made.table(range(10), version=1), made.table(range(60), version=2))
    source.land(made.table(range(5), version=3))
    source.run(made.schema)
    assert [batch.rows for batch in source.batches] == [10, 10, 60, 5]
    assert shuffled == [0, 2, 3], "the last one too: the limit is half of the rows that were too many"
    assert source.names() == {id: f"row {id} v{3 if id < 5 else 2}" for id in range(60)}


def test_paths_of_files_are_left_out_until_one_is_asked_for(
    stream: Callable[..., Stream], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task processes each micro-batch but the first; its arguments show whether the paths are left out."""
    monkeypatch.setattr(spark_sink, "WITHOUT_PATHS_FROM", 10)
    monkeypatch.setattr(spark_sink, "WITH_PATHS_FOR", 2)
    collected, given = PreparedTask.collected, list[bool]()

    def noted(prepared: Any, *args: Any) -> Any:
        given.append(prepared.task.without_paths)
        return collected(prepared, *args)

    monkeypatch.setattr(PreparedTask, "collected", noted)
    source = stream(files_per_trigger=2)
    for version in range(10):
        source.land(made.table(range(30), version=version))
    of_one_moment = sorted(source.source.iterdir())[4:6]
    for path in of_one_moment:
        os.utime(path, (path.stat().st_atime, of_one_moment[0].stat().st_mtime))
    source.run(made.schema)
    assert given == [True, True, False, False, True]
    assert [batch.rows for batch in source.batches] == [60] * 5
    assert all(region.applied for batch in source.batches for region in batch.regions)
    assert source.names() == {id: f"row {id} v9" for id in range(30)}

    nullable = pa.schema([field.with_nullable(True) for field in made.schema])
    rows = made.rows(range(100, 104))
    rows[2]["id"] = None
    source.land(pa.Table.from_pylist(rows, schema=nullable))
    with pytest.raises(memwal.Invalid, match=r"key column 'id' is null.*row 2 of 010\.parquet"):
        source.run(made.schema)
    assert given[5:] == [True, False]
    assert len(source.names()) == 30


@pytest.mark.parametrize(("columns", "measured"), [("id long, price double", False), ("id long, name string", True)])
def test_only_narrow_rows_are_handed_over_without_being_measured(spark: Any, columns: str, measured: bool) -> None:
    place = f", {LANDED} timestamp, {FILE} string, {BLOCK} long"
    frame = spark.createDataFrame([], columns + place)
    send = SendTask("grpc://127.0.0.1:1", (), "query", 0, 1.0)
    task = PreparedTask(OneTask(RouteTask("nowhere", ()), send, without_paths=True), frame.schema, frame)
    name = "spark.sql.execution.arrow.maxBytesPerBatch"
    before = spark.conf.get(name)
    with task.unmeasured(spark):
        assert (spark.conf.get(name) == before) is measured
    assert spark.conf.get(name) == before
    assert task.collected(frame, 7) == []


def test_one_number_orders_files_of_any_time(spark: Any) -> None:
    seconds = [-86_400, 0, 1_700_000_000, _LAST_SECOND, 10_413_792_000, 60_000_000_000]
    times = ", ".join(f"({at}, timestamp_seconds({at}), 'file:/{at}', 0)" for at in seconds)
    packed = spark.sql(f"SELECT {PACKED} FROM VALUES {times} AS (at, {LANDED}, {FILE}, {BLOCK}) ORDER BY at").toArrow()
    (batch,) = pa.table({PART: packed[0]}).combine_chunks().to_batches()
    landed = unpacked(batch)[LANDED].cast(pa.int64()).to_pylist()
    assert [at // 1_000_000 for at in landed] == [*seconds[:4], _LAST_SECOND, _LAST_SECOND]
    late = unpacked(batch).slice(4).append_column(BUCKET, pa.array([0, 0]))
    assert needs_paths(pa.Table.from_batches([late])), "these are ordered by their true times, which come with paths"


def test_one_task_orders_rows_as_spark_does(spark: Any) -> None:
    values = [None, float("nan"), 1.5, -0.5, None, float("inf"), float("-inf")]
    texts = ["b", None, "a\x00", "a", "é", "", "z"]
    rows = [(n % 2, value, text, n) for n, (value, text) in enumerate((v, t) for v in values for t in texts)]
    frame = spark.createDataFrame(rows, f"{BUCKET} int, value double, text string, {ROW} long")
    by_spark = frame.coalesce(1).sortWithinPartitions(BUCKET, "value", "text", ROW).toArrow()
    (whole,) = frame.toArrow().combine_chunks().to_batches()
    assert in_order(whole, ("value", "text"))[ROW].to_pylist() == by_spark[ROW].to_pylist()
