"""Rows of one source go to many tables of a fleet, each exactly once: from a Spark program, and with `memwal run`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import load, load_tables
from memwal.ingest.spark.dlq.table import DeadLetters
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.sink.foreach_batch import MemWalSink
from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.ingest.spark.source.stream import read_stream
from memwal.wal import SystemClock
from tests.conftest import Start
from tests.integration.test_fleet import FleetProcesses
from tests.messages import raises

TENANTS, ROWS = 12, 600
COLUMNS = {"id": "int64", "tenant": "string", "v": "int64"}
SCHEMA = pa.schema([("id", pa.int64()), ("tenant", pa.string()), ("v", pa.int64())])
MISFIT = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.string())])


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start one Spark for the module."""
    settings = load({"table": {"uri": str(tmp_path_factory.mktemp("unused"))}}, {})
    session = start_session(configuration(settings, 2, once=True))
    yield session
    session.stop()


@pytest.fixture(params=[1, 3], ids=["one region", "three regions"])
def fleet(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> FleetProcesses:
    """Start two daemons of a fleet; `request.param`: the number of regions of a new table."""
    table = {"key": ["id"], "columns": COLUMNS}
    return FleetProcesses(start, tmp_path, table=table, regions={"count": request.param})


class Streamed:
    """A directory of files as a stream into the tables of a fleet."""

    def __init__(self, spark: Any, fleet: FleetProcesses, at: Path) -> None:
        self.spark, self.fleet, self.source, self.checkpoint = spark, fleet, at / "in", at / "checkpoint"
        self.source.mkdir()
        self.sections: dict[str, Any] = {
            "table": {"key": ["id"], "columns": COLUMNS},
            "fleet": {"prefix": str(fleet.prefix)},
            "source": {"path": str(self.source)},
            "daemon": {"endpoints": fleet.endpoints},
        }
        self.batches: list[BatchReceipt] = []

    def land(self, *rows: tuple[int, str | None, int]) -> None:
        """Add a file; each is a micro-batch."""
        columns = list(zip(*rows, strict=True))
        file = self.source / f"{len(list(self.source.iterdir()))}.parquet"
        pq.write_table(pa.table(columns, schema=SCHEMA), file)

    def run(self, table: Any, **sections: Any) -> None:
        """Write the files that are new to the checkpoint. Raises: the error that ended the query."""
        settings = load_tables({**self.sections, **sections}, {})
        sink = MemWalSink(settings, table=table, on_batch=self.batches.append)
        rows = read_stream(self.spark, settings.source, SCHEMA)
        sink.small = rows.small
        writer = rows.frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(300)
        except Exception as error:
            raise (sink.failure or of_spark(error)) from error
        finally:
            query.stop()

    def forget_last(self) -> None:
        """Let Spark replay its last micro-batch."""
        last = max(int(each.name) for each in (self.checkpoint / "commits").iterdir() if each.name.isdigit())
        (self.checkpoint / "commits" / str(last)).unlink()
        (self.checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)

    def tables(self) -> dict[str, list[tuple[int, int]]]:
        """Return the id and v of each row by the name of its table, without tables that cannot be opened."""
        found = {}
        for told in memwal.tables(self.fleet.endpoints):
            if told["state"] == "broken":
                continue
            with self.fleet.connect(told["name"]) as table:
                rows = table.scan(["id", "v"]).read_all().to_pylist()
            found[told["name"]] = sorted((row["id"], row["v"]) for row in rows)
        return found

    def letters(self) -> list[tuple[str, str]]:
        """Return the stage and the reason of each dead letter."""
        found = DeadLetters.find(f"{self.fleet.prefix}.dlq", {}, SystemClock())
        return (
            []
            if found is None
            else sorted((row["stage"], row["reason"]) for row in found.dataset.to_table().to_pylist())
        )


@pytest.fixture
def streamed(spark: Any, fleet: FleetProcesses, tmp_path: Path) -> Streamed:
    return Streamed(spark, fleet, tmp_path)


def expected(count: int, prefix: str = "t") -> dict[str, list[tuple[int, int]]]:
    return {f"{prefix}{tenant}": [(id, id) for id in range(tenant, count, TENANTS)] for tenant in range(TENANTS)}


@pytest.mark.parametrize("by", ["column", "expression"])
def test_each_table_has_its_rows_once_also_when_a_micro_batch_is_replayed(streamed: Streamed, by: str) -> None:
    from pyspark.sql import functions

    rows = [(id, f"t{id % TENANTS}", id) for id in range(ROWS)]
    table, prefix = ("tenant", "t") if by == "column" else (functions.concat(functions.lit("of_"), "tenant"), "of_t")
    for first in range(0, ROWS, ROWS // 3):
        streamed.land(*rows[first : first + ROWS // 3])
        streamed.run(table)
    assert streamed.tables() == expected(ROWS, prefix)
    assert {each.table for each in streamed.batches[-1].regions} == set(expected(ROWS, prefix))
    streamed.forget_last()
    streamed.run(table)
    assert not any(each.applied for each in streamed.batches[-1].regions), "every table has dropped the repetition"
    assert streamed.tables() == expected(ROWS, prefix)


BAD_NAMES = {None: "null", **dict.fromkeys(("a b", "../x", "x" * 200), "is not a table name")}


@pytest.mark.parametrize("by", ["tenant", "concat('', tenant)"])
def test_rows_with_a_bad_name_are_dead_letters(streamed: Streamed, by: str) -> None:
    names = [*BAD_NAMES, "good"]
    for _ in range(2):  # a large micro-batch is shuffled, as the first; a small one is not
        streamed.land(*((id, name, id) for id, name in enumerate(names)))
        streamed.run(by, dlq={"mode": "table", "max_bad_percent": 100})
    assert streamed.tables() == {"good": [(len(BAD_NAMES), len(BAD_NAMES))]}
    assert [stage for stage, _ in streamed.letters()] == ["route"] * 2 * len(BAD_NAMES)
    assert all(sum(why in reason for _, reason in streamed.letters()) >= 2 for why in BAD_NAMES.values())
    streamed.land((1, None, 1))
    with raises(Invalid):
        streamed.run(by)
    assert streamed.tables() == {"good": [(len(BAD_NAMES), len(BAD_NAMES))]}


@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_a_table_with_other_columns_refuses_its_rows_and_the_others_take_theirs(streamed: Streamed) -> None:
    memwal.open(streamed.fleet.prefix / "other.lance", schema=MISFIT, key="id", regions=2).close()
    streamed.land((1, "other", 1), (2, "good", 2), (3, "other", 3))
    streamed.run("tenant", dlq={"mode": "table", "max_bad_percent": 100})
    assert streamed.tables() == {"good": [(2, 2)]}
    letters = streamed.letters()
    assert [stage for stage, _ in letters] == ["refused"] * 2
    assert "columns.tenant: the table at" in letters[0][1]
    streamed.forget_last()
    streamed.run("tenant", dlq={"mode": "table", "max_bad_percent": 100})
    assert (streamed.letters(), streamed.tables()["good"]) == (letters, [(2, 2)])
    streamed.land((1, "other", 1))
    with raises(Invalid):
        streamed.run("tenant")


@pytest.mark.parametrize("fleet", [1], indirect=True)
@pytest.mark.parametrize("by", ["nope(tenant)", "nobody", "concat(tenant", "concat(tenant, rand())"])
def test_an_expression_that_names_no_table(streamed: Streamed, by: str) -> None:
    streamed.land((1, "a", 1))
    with raises(Invalid):
        streamed.run(by)
    assert streamed.tables() == {}


def test_settings_that_do_not_route(tmp_path: Path) -> None:
    one = {"table": {"uri": str(tmp_path / "t.lance"), "key": ["id"], "columns": COLUMNS}}
    many = {**one, "table": {"key": ["id"], "columns": COLUMNS}, "fleet": {"prefix": str(tmp_path)}}
    bare = {**many, "table": {"key": ["id"]}}
    for sections, more in ((one, {}), (bare, {}), (many, {"daemon": {"on_spark": 1}})):
        with raises(Invalid):
            MemWalSink({**sections, **more}, table="tenant")
        with raises(Invalid):
            load_tables({**sections, **more, "route": {"table": "tenant"}}, {})
