"""Micro-batches written by name, without Spark: staged by tasks, sent by the driver, each region exactly once."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lance
import lancedb
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table.garbage import Ages, TableCollector
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.spark.connector.options import WriteOptions
from memwal.ingest.spark.connector.source import MemWalSource
from memwal.ingest.spark.connector.writer import MemWalStreamWriter, StagedRows, StageTask
from memwal.ingest.spark.schema import spark_schema
from memwal.ingest.spark.sink.route import RouteTask
from memwal.wal.layout import STAGED_PREFIX
from tests.messages import raises

QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64())])
KEYED = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
Batches = Sequence[pa.RecordBatch]


class World:
    """A served table, and the queries that write into it."""

    def __init__(self, uri: str, key: Any) -> None:
        self.uri, self.store = uri, wal.open_store(uri)
        new: dict[str, Any] = {"schema": KEYED if key else SCHEMA, "key": key, "regions": 3}
        self.table: Any = memwal.open(uri, settings=QUIET, **({} if Path(uri).exists() else new))
        self.service = FlightService(OneTable(self.table), "grpc://127.0.0.1:0")

    def writer(self, schema: pa.Schema | None = None, **more: str) -> MemWalStreamWriter:
        """Create a writer as Spark does, for a micro-batch or for its commit."""
        options = {
            "path": self.uri,
            "endpoint": f"grpc://127.0.0.1:{self.service.port}",
            "checkpointLocation": "x",
            **more,
        }
        source = pickle.loads(pickle.dumps(MemWalSource(options)))
        columns = spark_schema(self.table.schema if schema is None else schema)
        writer = source.streamWriter(columns, False)
        assert isinstance(writer, MemWalStreamWriter)
        return writer

    def tasks(self, rows: pa.Table, partitions: int, held: int = 1 << 20, routing: int = 1) -> list[StagedRows]:
        """Return the messages of the tasks of a micro-batch."""
        found = []
        for number in range(partitions):
            mine = rows.take(pa.array(range(number, len(rows), partitions), pa.int64()))
            staged = StageTask(RouteTask(self.uri, (), routing), self.store, number, held).stage(mine.to_batches())
            found.append(StagedRows("query", number, routing, staged))
        return pickle.loads(pickle.dumps(found))

    def rows(self) -> list[dict[str, Any]]:
        return sorted(self.table.scan(["id", "n"]).read_all().to_pylist(), key=repr)

    def staged(self) -> list[str]:
        return self.store.list(STAGED_PREFIX)

    def close(self) -> None:
        self.service.shutdown()
        self.table.close()


@pytest.fixture
def world(uri: str) -> Iterator[World]:
    """Return a table without a key, which shows a row that is applied twice."""
    found = World(uri, ())
    yield found
    found.close()


@pytest.fixture
def keyed(uri: str) -> Iterator[World]:
    """Return a table with the key `id`."""
    found = World(uri, "id")
    yield found
    found.close()


def rows(count: int, n: int = 0) -> pa.Table:
    return pa.table({"id": pa.array(range(count), pa.int64()), "n": pa.array([n] * count, pa.int64())})


def expected(*tables: pa.Table) -> list[dict[str, Any]]:
    return sorted((row for table in tables for row in table.to_pylist()), key=repr)


def test_a_repeated_micro_batch_is_applied_once_whatever_its_partitions(world: World) -> None:
    for attempt, partitions in enumerate((4, 1, 7)):
        world.writer().commit(world.tasks(rows(60), partitions), 0)
        assert world.rows() == expected(rows(60)), attempt
    world.writer().commit(world.tasks(rows(10, 1), 2), 1)
    assert world.rows() == expected(rows(60), rows(10, 1))
    assert world.staged() == []


@pytest.mark.parametrize("applied", [1, 2])
def test_a_driver_that_is_killed_between_regions_loses_and_doubles_nothing(world: World, applied: int) -> None:
    """The regions before the damaged one have applied the micro-batch; the others apply it at the replay."""
    messages = world.tasks(rows(60), 3)
    later = next(each for each in messages[2].staged if each.bucket == applied)
    world.store.delete(later.key)
    with raises(Unavailable):
        world.writer().commit(messages, 0)
    assert 0 < len(world.rows()) < 60
    world.writer().abort([*messages[:2], None], 0)  # Spark has lost the third message
    assert len(world.staged()) == len(messages[2].staged) - 1
    world.writer().commit(world.tasks(rows(60), 2), 0)
    assert world.rows() == expected(rows(60))


def test_an_object_that_is_not_what_the_task_wrote_is_never_sent(world: World) -> None:
    messages = world.tasks(rows(60), 2)
    first, other = messages[0].staged[0], messages[1].staged[0]
    world.store.put(first.key, world.store.get(other.key) or b"")
    with raises(Unavailable):
        world.writer().commit(messages, 0)
    assert first.bucket == 0
    assert world.rows() == []  # regions are sent in their order
    world.writer().commit(world.tasks(rows(60), 5), 0)
    assert world.rows() == expected(rows(60))


def test_a_message_too_few_applies_nothing(world: World) -> None:
    messages = world.tasks(rows(60), 2)
    with raises(Unavailable):
        world.writer().commit([messages[0], None], 0)
    assert world.rows() == []


def test_an_empty_micro_batch_and_empty_partitions(world: World) -> None:
    world.writer().commit([], 0)
    world.writer().commit(world.tasks(rows(0), 2), 1)
    world.writer().commit(world.tasks(rows(1), 4), 2)
    assert world.rows() == expected(rows(1))


def test_a_checkpoint_that_was_set_back_is_refused(world: World) -> None:
    world.writer().commit(world.tasks(rows(60), 2), 7)
    messages = world.tasks(rows(5, 5), 1)
    with raises(Invalid):
        world.writer().commit(messages, 6)
    assert world.rows() == expected(rows(60))


def test_rows_of_a_key_keep_their_order_over_objects_and_deletes_count(keyed: World, uri: str) -> None:
    world = keyed
    many = pa.table({"id": [1, 2, 3] * 200, "n": range(600), "_memwal_delete": [False] * 599 + [True]})
    messages = world.tasks(many, 1, held=1)  # every batch is an object
    more = StageTask(RouteTask(uri, ()), world.store, 0, held=1).stage(many.to_batches(max_chunksize=7))
    assert len(more) > 100
    world.writer().commit([StagedRows("query", 0, 1, more)], 0)
    assert world.rows() == [{"id": 1, "n": 597}, {"id": 2, "n": 598}]
    world.writer().abort(messages, 0)


def test_a_frame_that_lacks_columns_needs_a_choice_in_its_first_micro_batch(keyed: World) -> None:
    world, one = keyed, pa.schema([KEYED.field("id")])
    world.table.put(pa.table({"id": [0, 1], "n": [5, 6]}))
    ids, added = pa.table({"id": [0]}), pa.table({"id": [1], "n": [7]})
    with raises(Invalid):
        world.writer(one).commit(world.tasks(ids, 1), 0)
    world.writer(one, missing="keep").commit(world.tasks(ids, 1), 0)
    assert world.rows() == [{"id": 0, "n": 5}, {"id": 1, "n": 6}]
    # In a later micro-batch another program may have added the column: keep its values and do not fail.
    world.writer(one).commit(world.tasks(ids, 1), 1)
    world.writer(missing="null").commit(world.tasks(added, 1), 2)
    assert world.rows() == [{"id": 0, "n": 5}, {"id": 1, "n": 7}]
    world.writer(one, missing="null").commit(world.tasks(ids, 1), 3)
    assert world.rows() == [{"id": 0, "n": None}, {"id": 1, "n": 7}]
    with raises(Invalid):
        world.writer(one, missing="kept")


def test_a_row_that_does_not_fit_is_named_by_its_place_and_nothing_is_staged(keyed: World, uri: str) -> None:
    world = keyed
    bad = pa.table({"id": pa.array([1, None], pa.int64()), "n": [1, 2]})
    with raises(Invalid):
        StageTask(RouteTask(uri, ()), world.store, 3).stage([*rows(10).to_batches(), *bad.to_batches()])
    assert world.staged() == []


def test_a_table_that_was_resized_meanwhile_takes_the_replay(uri: str) -> None:
    world = World(uri, ())
    messages = world.tasks(rows(60), 2)
    world.close()
    flush.resize(uri, None, world.store, 2, clock=wal.SystemClock(), ids=wal.SystemIds())
    world = World(uri, ())
    try:
        with raises(Unavailable):
            world.writer().commit(messages, 0)
        world.writer().abort(messages, 0)
        assert world.staged() == []
        world.writer().commit(world.tasks(rows(60), 3, routing=2), 0)
        assert world.rows() == expected(rows(60))
    finally:
        world.close()


def test_orphans_disturb_nobody_and_are_collected_by_age(world: World) -> None:
    world.writer().commit(world.tasks(rows(60), 2), 0)
    orphans = [each.key for message in world.tasks(rows(60), 2) for each in message.staged]
    world.table.flush()
    assert verify_table(world.store, world.uri, deep=True).findings == ()
    assert lance.dataset(world.uri).count_rows() == 0
    path = Path(world.uri)
    assert lancedb.connect(str(path.parent)).open_table(path.name.removesuffix(".lance")).count_rows() == 0
    old = orphans[0]
    os.utime(path / old, (0, 0))

    def collected() -> set[str]:
        base = flush.BaseTable.open(world.uri)
        collector = TableCollector(world.store, base.codec, wal.SystemClock(), wal.regions(world.store))
        return {*collector.collect(base, Ages(wal=0.0, sst=0.0, orphan=604_800.0)).orphans.files}

    assert collected() == {old}
    assert sorted(world.staged()) == sorted(orphans[1:])
    world.table.commit()
    assert verify_table(world.store, world.uri, deep=True).findings == ()
    assert world.rows() == expected(rows(60))


def test_what_cannot_be_written_is_one_line(uri: str, tmp_path: Path, small_config: Callable[..., Path]) -> None:
    memwal.open(uri, schema=KEYED, key="id", settings=QUIET).close()
    with raises(Invalid):
        MemWalSource({"path": uri}).streamWriter(None, True)
    with raises(Invalid):
        MemWalSource({"path": uri}).writer(None, True)
    with raises(Unavailable):
        MemWalSource({"path": uri}).streamWriter(spark_schema(SCHEMA), False)
    with raises(Invalid):
        WriteOptions.of({"path": uri, "levl": "x"})
    config = small_config(daemon={"endpoints": ["grpc://127.0.0.1:9"]})
    written = WriteOptions.of({"config": str(config), "checkpointlocation": "x"})
    assert (written.uri, written.endpoints) == (uri, ("grpc://127.0.0.1:9",))
    with raises(Invalid):
        WriteOptions.of({"config": str(config), "path": uri})
    with raises(Invalid):
        WriteOptions.of({"config": str(small_config(name="d.toml", dlq={"mode": "table"}))})
