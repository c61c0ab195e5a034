"""A put whose rows lack columns of the table: rejected, set to null, or kept, through every way into the table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Thread
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.ingest.errors import Invalid
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.settings.load import load
from memwal.ingest.spark.pipeline.checks import find_problems, written_schema
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.source.columns import DELETE, FILE
from memwal.ingest.spark.source.whole_input import by_region
from tests.integration.test_router import Pair
from tests.messages import raises
from tests.routed import placed, shuffled
from tests.ways import entered, served

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("price", pa.int64()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
ONE = {"id": 1, "text": "one", "price": 10, "vector": [1.0, 0.0]}
TWO = {"id": 2, "text": "two", "price": 20, "vector": [0.0, 1.0]}


@pytest.fixture
def made(tmp_path: Path, ends: ExitStack) -> Callable[..., Any]:
    """Create a table of two rows, and return it embedded, as a client of a daemon, or as a client of two daemons."""

    def create(way: str = "embedded", *, key: Any = "id", **rules: Any) -> Any:
        uri, settings = str(tmp_path / "t.lance"), {"commit": {"interval": "0s"}, "table": rules}
        table = memwal.open(uri, schema=SCHEMA, key=key, regions=2, indexes={"price": "btree"}, settings=settings)
        table.put([ONE, TWO])
        table.flush()
        if way == "daemons":
            table.close()
            config = tmp_path / "t.toml"
            config.write_text(f'[table]\nuri = "{uri}"\n[commit]\ninterval = "0s"\n')
            return ends.enter_context(memwal.connect(Pair(config, ends).endpoints))
        return entered(way, ends.enter_context(table), ends)

    return create


def found(table: Any) -> dict[int, Any]:
    return {row["id"]: row for row in table.scan().read_all().to_pylist()}


WAYS = ("embedded", "flight", "daemons")


@pytest.mark.parametrize("way", WAYS)
def test_a_put_that_lacks_columns_is_refused_with_the_choices(way: str, made: Callable[..., Any]) -> None:
    table = made(way)
    partial = pa.table({"id": [1, 2], "price": [11, 21]})
    for rows in (partial, partial.to_pylist(), partial.to_pandas(), partial.to_reader()):
        with raises(Invalid):
            table.put(rows)
    with raises(Invalid):
        table.put([{"id": 1, "price": 1}, {"id": 2, "price": 1, "text": "x"}])
    with raises(Invalid):
        table.put(partial, missing="kept")
    assert found(table) == {1: ONE, 2: TWO}


@pytest.mark.parametrize("way", WAYS)
def test_a_mistake_in_the_columns_is_named_before_what_is_missing(way: str, made: Callable[..., Any]) -> None:
    table = made(way)
    with raises(Invalid):
        table.put([{"id": 1, "prise": 1}])
    with raises(Invalid):
        table.put([{"price": 1}])


@pytest.mark.parametrize("way", WAYS)
def test_columns_that_rows_lack_are_set_to_null_or_kept_as_the_caller_says(way: str, made: Callable[..., Any]) -> None:
    table = made(way)
    three = {"id": 3, "text": None, "price": 33, "vector": None}
    receipt = table.put([{"id": 1, "price": 11}, {"id": 3, "price": 33}], missing="keep", token="prices:1")
    assert (receipt.rows, receipt.applied) == (2, True)
    assert found(table) == {1: {**ONE, "price": 11}, 2: TWO, 3: three}
    # A repeated token changes nothing, whatever was put since, and whatever `missing` it has.
    table.put([{"id": 1, "text": "new"}], missing="keep")
    for missing in ("keep", "null"):
        again = table.put([{"id": 1, "price": 11}, {"id": 3, "price": 33}], missing=missing, token="prices:1")
        assert (again.applied, again.repeated) == (False, 2)
    assert found(table)[1] == {**ONE, "price": 11, "text": "new"}
    table.put([{"id": 1, "price": 12}, {"id": 2, "text": "x"}], missing="null")
    nulls = dict.fromkeys(SCHEMA.names)
    assert found(table) == {1: {**nulls, "id": 1, "price": 12}, 2: {**nulls, "id": 2, "text": "x"}, 3: three}


def test_rows_with_different_columns_cannot_all_keep(made: Callable[..., Any]) -> None:
    table = made()
    with raises(Invalid):
        table.put([{"id": 1, "price": 1}, {"id": 2, "price": 1, "text": "x"}], missing="keep")
    assert found(table) == {1: ONE, 2: TWO}


def test_the_index_has_the_kept_values(made: Callable[..., Any]) -> None:
    table = made()
    table.commit()
    table.put([{"id": 1, "text": "new"}], missing="keep")
    assert table.scan(["id"], "price = 10 AND text = 'new'").read_all()["id"].to_pylist() == [1]


def test_puts_that_mean_different_things_go_out_together(made: Callable[..., Any]) -> None:
    """Each caller that shares an entry gets its own `missing` rule; they apply in the region's order of callers."""
    table = made()
    ids = range(100, 400)
    table.put([{**ONE, "id": id} for id in ids])
    start = Barrier(3)

    def run(of: int, missing: str) -> None:
        start.wait()
        for id in ids[of::3]:
            table.put([{"id": id, "price": -id}], missing=missing, durable=False)

    threads = [Thread(target=run, args=each) for each in enumerate(("keep", "null"))]
    for thread in threads:
        thread.start()
    start.wait()
    for id in ids[2::3]:
        table.put([{**TWO, "id": id}], durable=False)
    for thread in threads:
        thread.join()
    rows = found(table)
    for at, id in enumerate(ids):
        kept, null = {**ONE, "id": id, "price": -id}, {**dict.fromkeys(SCHEMA.names), "id": id, "price": -id}
        assert rows[id] == (kept, null, {**TWO, "id": id})[at % 3]


@pytest.mark.parametrize("way", WAYS)
def test_a_table_whose_upserts_merge_keeps_unless_told_otherwise(way: str, made: Callable[..., Any]) -> None:
    table = made(way, upsert="merge")
    table.put([{"id": 1, "price": 11}])
    table.put([{"id": 2, "price": 21}], missing="null")
    assert found(table) == {1: {**ONE, "price": 11}, 2: {"id": 2, "text": None, "price": 21, "vector": None}}


@pytest.mark.parametrize("way", WAYS)
def test_where_no_stored_row_changes_columns_may_be_missing(way: str, made: Callable[..., Any]) -> None:
    table = made(way, upsert="insert")
    for missing in (None, "null", "keep"):
        assert table.put([{"id": 1, "price": 11}], missing=missing).skipped == 1
    table.put([{"id": 3, "price": 3}, {"id": 4, "text": "four"}])
    nulls = dict.fromkeys(SCHEMA.names)
    assert found(table) == {1: ONE, 2: TWO, 3: {**nulls, "id": 3, "price": 3}, 4: {**nulls, "id": 4, "text": "four"}}


@pytest.mark.parametrize("way", WAYS)
def test_rows_without_a_key_may_lack_columns(way: str, made: Callable[..., Any]) -> None:
    table = made(way, key=())
    table.put([{"id": 1, "price": 11}], missing="keep")
    table.put([{"id": 1, "price": 12}, {"id": 1, "price": 13, "text": "x"}])
    assert sorted(row["price"] for row in table.scan(["price"], "vector IS NULL").read_all().to_pylist()) == [
        11,
        12,
        13,
    ]


def test_a_required_column_may_be_kept_and_not_be_null(tmp_path: Path) -> None:
    must = SCHEMA.append(pa.field("must", pa.int64(), nullable=False))
    with memwal.open(tmp_path / "t.lance", schema=must, key="id") as table:
        table.put([{**ONE, "must": 7}])
        with raises(Invalid):
            table.put([{"id": 1, "price": 2}], missing="null")
        with raises(Invalid):
            table.put([{"id": 2, "price": 2}], missing="keep")
        with raises(Invalid):
            table.put([{"id": 1, "must": None}], missing="keep")
        table.put([{"id": 1, "price": 2}], missing="keep")
        assert found(table) == {1: {**ONE, "price": 2, "must": 7}}


def test_a_late_row_keeps_nothing_and_a_version_cannot_be_missing(made: Callable[..., Any]) -> None:
    table = made(version="price")
    assert table.put([{"id": 1, "price": 9, "text": "late"}], missing="keep").skipped == 1
    table.put([{"id": 1, "price": 11, "text": "new"}], missing="keep")
    assert found(table)[1] == {**ONE, "price": 11, "text": "new"}
    with raises(Invalid):
        table.put([{"id": 1, "text": "no version"}], missing="keep")


def test_values_of_a_row_that_has_expired_are_not_kept(tmp_path: Path) -> None:
    schema = SCHEMA.append(pa.field("at", pa.timestamp("us")))
    settings = {"table": {"ttl": "1h", "ttl_column": "at"}, "commit": {"interval": "0s"}}
    with memwal.open(tmp_path / "t.lance", schema=schema, key="id", settings=settings) as table:
        old = pa.scalar(0, pa.timestamp("us")).as_py()
        table.put([{**ONE, "at": old}])
        table.put([{"id": 1, "price": 2, "at": None}], missing="keep")
        assert found(table) == {1: {"id": 1, "text": None, "price": 2, "vector": None, "at": None}}
        table.put([{"id": 1, "price": 3}], missing="keep")  # the age's column is kept like any other column
        assert found(table)[1]["price"] == 3


# ---- columns that another program adds -----------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, "null", "keep"])
@pytest.mark.parametrize("way", WAYS)
def test_a_column_that_a_caller_does_not_know_is_kept(
    way: str, missing: Any, made: Callable[..., Any], ends: ExitStack, tmp_path: Path
) -> None:
    table = made(way)
    lance.dataset(tmp_path / "t.lance").add_columns(pa.field("grade", pa.int64()))
    with memwal.connect(served(table, ends) if way == "embedded" else table.endpoint) as other:
        other.put([{**ONE, "grade": 1}, {**TWO, "grade": 2}])
    table.put([{**ONE, "price": 11}], missing=missing)  # all columns that the table had when it was opened
    assert found(table) == {1: {**ONE, "price": 11, "grade": 1}, 2: {**TWO, "grade": 2}}
    # From now on this caller knows the column.
    table.put([{**ONE, "grade": 7}])
    if missing is None:
        with raises(Invalid):
            table.put([ONE])
    else:
        table.put([ONE], missing=missing)
    assert found(table)[1]["grade"] == (None if missing == "null" else 7)


@pytest.mark.parametrize("way", WAYS)
def test_a_column_that_was_dropped_is_not_missing(way: str, made: Callable[..., Any], tmp_path: Path) -> None:
    table = made(way)
    lance.dataset(tmp_path / "t.lance").drop_columns(["text"])
    without = {name: value for name, value in ONE.items() if name != "text"}
    table.put([{**without, "price": 11}])
    assert found(table)[1] == {**without, "price": 11}


# ---- the wire ------------------------------------------------------------------------------------------------------


def test_a_client_that_says_nothing_of_missing_columns_means_nulls(made: Callable[..., Any]) -> None:
    """Clients of protocol 1.0 send requests without this field."""
    table = made("flight")
    connection = Connection(table.endpoint)
    request = {"op": "write", "delete": False, "durable": True, "token": None}
    connection.write(pa.table({"id": [1], "price": [11]}), request)
    assert found(table)[1] == {"id": 1, "text": None, "price": 11, "vector": None}
    for nulls in ("text", [1], {"text": 1}):
        with raises(Invalid):
            connection.write(pa.table({"id": [2], "price": [1]}), request | {"nulls": nulls})
    connection.write(pa.table({"id": [2], "price": [1]}), request | {"nulls": ["text", "no such column"]})
    assert found(table)[2] == {**TWO, "price": 1, "text": None}


def test_a_stream_of_a_region_keeps_what_it_does_not_name(made: Callable[..., Any]) -> None:
    table = made("flight")
    for number, nulls in enumerate([(), ("vector",)]):
        rows = pa.table({"id": [1, 2], "price": [100 + number, 200 + number]})
        buckets = table.splitter.buckets(rows)
        for bucket, region in enumerate(table.router.regions):
            mine = rows.filter(pa.array(buckets == bucket))
            token, columns = memwal.Token("query", number), ["id", "price"]
            stream = table.open_stream(UUID(region), token, columns=columns, rows=mine.num_rows, nulls=nulls)
            for batch in mine.to_batches():
                stream.write(batch)
            stream.finish()
    assert found(table) == {
        1: {**ONE, "price": 101, "vector": None},
        2: {**TWO, "price": 201, "vector": None},
    }


# ---- Spark ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(made: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Create a table and send micro-batches to its daemon as the sink does, without Spark; return its rows."""
    table, uri = made("flight"), str(tmp_path / "t.lance")
    regions = tuple(UUID(region) for region in table.router.regions)
    endpoint, numbers = table.endpoint, iter(range(100))

    def send(rows: pa.Table, missing: Any, known: Any = SCHEMA.names) -> dict[int, Any]:
        routed = shuffled(list(RouteTask(uri, ())(iter([placed(rows)]))))
        task = SendTask(endpoint, regions, "query", next(numbers), 30.0, known=tuple(known), missing=missing)
        list(task.sent(by_region(iter([routed]))))
        return found(table)

    return send


def test_a_micro_batch_that_lacks_columns(sent: Callable[..., Any]) -> None:
    with raises(Invalid):
        sent(pa.table({"id": [1, 2], "price": [11, 21]}), None)
    assert sent(pa.table({"id": [1, 3], "price": [11, 31]}), "keep") == {
        1: {**ONE, "price": 11},
        2: TWO,
        3: {"id": 3, "text": None, "price": 31, "vector": None},
    }
    assert sent(pa.table({"id": [1], "text": ["new"]}), "null")[1] == dict.fromkeys(SCHEMA.names) | {
        "id": 1,
        "text": "new",
    }
    deletes = pa.table({"id": [1, 2], "price": [None, 22], DELETE: [True, False]})
    assert sent(deletes, "keep") == {2: {**TWO, "price": 22}, 3: {"id": 3, "text": None, "price": 31, "vector": None}}


@pytest.mark.parametrize("missing", [None, "null", "keep"])
def test_a_column_that_was_added_while_a_query_runs_is_kept(
    missing: Any, sent: Callable[..., Any], tmp_path: Path
) -> None:
    whole = pa.Table.from_pylist([{**ONE, "price": 11}], schema=SCHEMA)
    assert sent(whole, missing)[1]["price"] == 11
    lance.dataset(tmp_path / "t.lance").add_columns(pa.field("grade", pa.int64()))
    graded = pa.Table.from_pylist([{**ONE, "grade": 1}], schema=SCHEMA.append(pa.field("grade", pa.int64())))
    assert sent(graded, missing)[1] == {**ONE, "grade": 1}
    assert sent(whole, missing)[1] == {**ONE, "price": 11, "grade": 1}


def test_a_sink_refuses_columns_before_its_query_starts(made: Callable[..., Any], tmp_path: Path) -> None:
    made()
    table = {"uri": str(tmp_path / "t.lance")}
    with raises(Invalid):
        memwal.MemWalSink({"table": table}).expect_columns(["id", "price", FILE])
    for missing in ("null", "keep"):
        memwal.MemWalSink({"table": table, "sink": {"missing": missing}}).expect_columns(["id", "price", FILE])
    memwal.MemWalSink({"table": table}).expect_columns([*SCHEMA.names, FILE])


def test_a_run_reads_the_columns_of_its_configuration_where_it_says_what_happens_to_the_others(
    made: Callable[..., Any], tmp_path: Path
) -> None:
    made()
    landing = tmp_path / "in"
    landing.mkdir()
    pq.write_table(pa.table({"id": [1], "price": [11]}), landing / "a.parquet")
    uri, base = str(tmp_path / "t.lance"), BaseTable.open(str(tmp_path / "t.lance"))
    named = {"uri": uri, "key": ["id"], "columns": {"id": "int64", "price": "int64"}}

    def problems(**sink: Any) -> tuple[list[str], list[str]]:
        settings = load({"table": named, "source": {"path": str(landing)}, "sink": sink}, {})
        _, errors = find_problems(settings, {}, starts=False)
        return written_schema(settings, base).names, [str(error) for error in errors if "a.parquet" in str(error)]

    names, (said,) = problems()
    assert names == SCHEMA.names
    assert said.endswith(
        "add it to the files, or write the columns that they have in [table] columns and set sink.missing"
    )
    for missing in ("null", "keep"):
        assert problems(missing=missing) == (["id", "price"], [])
