"""The sink's executor side without Spark: rows validated and routed, regions streamed to an owner over Flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.ingest.errors import MemWalError
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.spark.dlq.bad_rows import BadRow, Rules
from memwal.ingest.spark.errors import found_in
from memwal.ingest.spark.sink.receipts import RECEIPT
from memwal.ingest.spark.sink.route import RouteTask, RowNumbers
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.source.columns import (
    BLOCK,
    BUCKET,
    DELETE,
    LANDED,
    LETTER,
    OFFSET,
    PARTITION,
    PROBLEM,
    RAW_KEY,
    RAW_VALUE,
    ROW,
    TOPIC,
)
from memwal.ingest.spark.task import TaskError
from tests.routed import placed, shuffled, uncounted


def refused(task: Any, batches: Sequence[pa.RecordBatch]) -> MemWalError:
    with pytest.raises(TaskError) as raised:
        list(task(iter(batches)))
    found = found_in(str(raised.value))
    assert found is not None
    assert len(found.lines) == 1
    return found


@pytest.fixture
def route(open_small: Callable[..., Any], uri: str) -> RouteTask:
    """Return the first task, on an existing table with two regions and without an owner."""
    open_small().close()
    return RouteTask(uri, ())


@pytest.fixture
def owner(open_small: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """An open table and the endpoint it is served at."""
    table = open_small()
    service = FlightService(OneTable(table), "grpc://127.0.0.1:0")
    yield table, f"grpc://127.0.0.1:{service.port}"
    service.shutdown()


@dataclass
class Sender:
    """The two tasks of a query into an open table."""

    route: RouteTask
    table: Any
    endpoint: str

    def routed(self, *batches: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of the first task as Spark's shuffle passes them to the second."""
        return shuffled(list(self.route(iter(batches))))

    def send(self, *rows: pa.RecordBatch, batch_id: int = 0, **more: Any) -> pa.Table:
        """Send rows by the second task; return its receipts."""
        task = SendTask(self.endpoint, self.table.base.regions, "query", batch_id, 30.0, **more)
        return pa.Table.from_batches(task(iter(rows)))


@pytest.fixture
def sender(route: RouteTask, owner: tuple[Any, str]) -> Sender:
    return Sender(route, *owner)


def test_rows_pass_unchanged_with_their_number_and_region(route: RouteTask, made: Any, uri: str) -> None:
    from memwal.flush import BaseTable

    rows = made.table(range(50))
    routed = uncounted(list(route(iter([placed(rows)]))))
    assert routed.select(rows.column_names).to_pylist() == rows.to_pylist()
    assert routed[ROW].to_pylist() == list(range(50))
    assert routed[BUCKET].to_pylist() == BaseTable.open(uri).route(rows).tolist()
    assert set(routed[BUCKET].to_pylist()) == {0, 1}


def test_row_numbers_do_not_depend_on_how_tasks_and_batches_are_cut(made: Any) -> None:
    a, b = placed(made.table(range(7)), "a"), placed(made.table(range(5)), "b", block=64)
    both = pa.Table.from_batches([a, b]).combine_chunks().to_batches()[0]
    whole = RowNumbers().of(both)
    assert whole.tolist() == [*range(7), *range(5)]
    cut = RowNumbers()
    assert np.concatenate([cut.of(both.slice(0, 4)), cut.of(both.slice(4))]).tolist() == whole.tolist()
    assert RowNumbers().of(b).tolist() == list(range(5))


def test_rows_without_files_are_numbered_as_they_come(made: Any) -> None:
    numbers, batch = RowNumbers(), made.table(range(3)).to_batches()[0]
    assert [*numbers.of(batch), *numbers.of(batch.slice(0, 0)), *numbers.of(batch)] == list(range(6))


def test_a_null_key_names_column_row_and_file(route: RouteTask, made: Any) -> None:
    good = placed(made.table(range(10)))
    bad = pa.table({"id": pa.array([1, None], pa.int64()), **{n: made.table([1, 2])[n] for n in ("name", "vector")}})
    found = refused(route, [good, placed(bad)])
    assert found.kind == "INVALID"
    assert "'id'" in str(found)
    assert "row 11 of a.parquet" in str(found)


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("vector", pa.array([[1.0, 2.0]]), "'vector' has 2 numbers"),
        ("vector", pa.array([[float("nan")] * 8]), "'vector'"),
        ("price", pa.array(["12"]), "'price' has the type string"),
        ("prices", pa.array([12]), "'prices' is not in the table"),
    ],
)
def test_bad_rows_are_refused_by_column(route: RouteTask, column: str, values: pa.Array, says: str) -> None:
    found = refused(route, [placed(pa.table({"id": pa.array([1]), column: values}))])
    assert found.kind == "INVALID"
    assert says in str(found)


def test_a_table_that_is_gone_is_an_error_of_the_configuration(tmp_path: Any, made: Any) -> None:
    assert refused(RouteTask(str(tmp_path / "none.lance"), ()), [placed(made.table([1]))]).kind == "INVALID"


def test_each_region_gets_one_stream_and_answers_with_one_receipt(sender: Sender, made: Any) -> None:
    table = sender.table
    rows = sender.routed(placed(made.table(range(40)), landed=2_000_000))
    receipts = sender.send(rows.slice(0, 7), rows.slice(7))
    assert receipts.schema.equals(RECEIPT)
    assert sum(receipts["rows"].to_pylist()) == 40
    assert sorted(receipts["region"].to_pylist()) == sorted(region["id"] for region in table.status()["regions"])
    assert receipts["applied"].to_pylist() == [True, True]
    assert receipts["landed_first"].to_pylist() == [2.0, 2.0]
    positions = {region["id"]: region["wal_position"] for region in table.status()["regions"]}
    assert dict(zip(receipts["region"].to_pylist(), receipts["position"].to_pylist(), strict=True)) == positions
    assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == list(range(40))


def test_the_row_of_the_newer_file_wins_inside_a_micro_batch(sender: Sender, made: Any) -> None:
    newer = placed(made.table(range(20), version=1), "a-later-name-sorts-first", landed=2_000)
    older = placed(made.table(range(20), version=0), "b", landed=1_000)
    sender.send(sender.routed(newer, older))
    assert set(sender.table.scan(["name"]).read_all()["name"].to_pylist()) == {f"row {id} v1" for id in range(20)}


def test_columns_that_are_changed_between_two_micro_batches_are_found_by_workers_and_owner(
    sender: Sender, made: Any, uri: str
) -> None:
    """The workers and the owner have the table open, and get no message about the change."""
    sender.send(sender.routed(placed(made.table(range(10)))))
    lance.dataset(uri).add_columns(pa.field("grade", pa.int64()))
    lance.dataset(uri).alter_columns({"path": "price", "name": "cost"})
    newer = made.table(range(10, 20)).append_column("grade", pa.array([7] * 10))
    newer = newer.rename_columns([name.replace("price", "cost") for name in newer.column_names])
    sender.send(sender.routed(placed(newer)), batch_id=1)
    found = {row["id"]: row for row in sender.table.scan(["id", "cost", "grade"]).read_all().to_pylist()}
    assert found == {id: {"id": id, "cost": made.row(id)["price"], "grade": None if id < 10 else 7} for id in range(20)}


def test_a_batch_that_is_sent_again_is_acked_and_not_applied(sender: Sender, made: Any) -> None:
    rows = sender.routed(placed(made.table(range(20))))
    sender.send(rows, batch_id=3)
    before = [region["wal_position"] for region in sender.table.status()["regions"]]
    assert sender.send(rows, batch_id=3)["applied"].to_pylist() == [False, False]
    assert [region["wal_position"] for region in sender.table.status()["regions"]] == before


def test_a_region_whose_rows_did_not_all_come_applies_none(route: RouteTask, owner: tuple[Any, str], made: Any) -> None:
    table, endpoint = owner
    rows = shuffled(list(route(iter([placed(made.table(range(20)))]))))
    first_region = rows[BUCKET].to_pylist().count(0) - 1

    def cut_off() -> Iterator[pa.RecordBatch]:
        yield rows.slice(0, first_region + 3)
        raise OSError("the shuffle was lost")

    with pytest.raises(TaskError):
        list(SendTask(endpoint, table.base.regions, "query", 0, 30.0)(cut_off()))
    applied = [region for region in table.status()["regions"] if region["memtable_rows"]]
    assert [(region["bucket"], region["memtable_rows"]) for region in applied] == [(0, first_region)]


def test_an_empty_partition_opens_no_connection(made: Any) -> None:
    nobody = SendTask("grpc://127.0.0.1:1", (), "query", 0, 30.0)
    assert list(nobody(iter([]))) == []
    assert list(nobody(iter([placed(made.table([1])).slice(0, 0)]))) == []


def test_an_owner_that_does_not_answer_is_unavailable(route: RouteTask, made: Any) -> None:
    rows = shuffled(list(route(iter([placed(made.table(range(3)))]))))
    assert refused(SendTask("grpc://127.0.0.1:1", (), "query", 0, 0.5), [rows]).kind == "UNAVAILABLE"


def deleting(rows: pa.Table, deletes: Sequence[bool | None]) -> pa.Table:
    return rows.append_column(DELETE, pa.array(deletes, pa.bool_()))


def test_rows_that_delete_travel_with_those_that_put_and_need_only_their_key(
    route: RouteTask, owner: tuple[Any, str], made: Any
) -> None:
    table, endpoint = owner
    table.put(made.rows(range(10)))
    put = made.table(range(5, 15), version=1)
    lists = [field.with_type(pa.list_(pa.float32())) if field.name == "vector" else field for field in put.schema]
    schema = pa.schema([field.with_nullable(True) for field in lists])  # as Spark has them
    gone = [{"id": id, "vector": [1.0]} for id in range(8)]  # a vector of another width, which a delete ignores
    rows = [
        placed(deleting(put.cast(schema), [None] * 10), landed=1_000),
        placed(deleting(pa.Table.from_pylist(gone, schema), [True] * 8), landed=2_000),
        placed(deleting(made.table([3]).cast(schema), [False]), landed=3_000),
    ]
    routed = shuffled([each for batch in rows for each in route(iter([batch]))])
    receipts = pa.Table.from_batches(SendTask(endpoint, table.base.regions, "query", 0, 30.0)(iter([routed])))
    assert sum(receipts["rows"].to_pylist()) == 19
    assert {row["id"]: row["name"] for row in table.scan().read_all().to_pylist()} == {
        3: "row 3 v0",
        **{id: f"row {id} v1" for id in range(8, 15)},
    }


def test_a_row_that_deletes_without_a_key_is_refused_with_its_place(route: RouteTask, made: Any) -> None:
    rows = deleting(made.table(range(3)), [False, True, None])
    gone = rows.set_column(rows.column_names.index("id"), "id", pa.array([0, None, 2], pa.int64()))
    found = refused(route, [placed(gone)])
    assert (found.kind, "'id' is null in row 1" in str(found), "row 1 of a.parquet" in str(found)) == (
        "INVALID",
        True,
        True,
    )


# ---- bad rows --------------------------------------------------------------------------------------------------------


def recorded(rows: pa.Table, problems: Sequence[str | None]) -> pa.RecordBatch:
    """Return rows as the mapping of Kafka's records passes them to the sink."""
    n = rows.num_rows
    for name, column in (
        (LANDED, pa.array([1_000_000] * n, pa.timestamp("us", "UTC"))),
        (TOPIC, pa.array(["orders"] * n)),
        (PARTITION, pa.array([3] * n, pa.int32())),
        (OFFSET, pa.array(range(100, 100 + n), pa.int64())),
        (PROBLEM, pa.array(problems, pa.string())),
        (RAW_KEY, pa.array([b"key %d" % at for at in range(n)])),
        (RAW_VALUE, pa.array([b"value \xff %d" % at for at in range(n)])),
    ):
        rows = rows.append_column(name, column)
    return rows.combine_chunks().to_batches()[0]


def with_nulls(made: Any, ids: Sequence[int | None]) -> pa.Table:
    nullable = pa.schema([field.with_nullable(True) for field in made.schema])
    rows = [{**made.row(at), "id": id} for at, id in enumerate(ids)]
    return pa.Table.from_pylist(rows, schema=nullable)


def test_a_record_that_was_not_mapped_is_named_by_its_offset(route: RouteTask, made: Any) -> None:
    found = refused(route, [recorded(made.table(range(3)), [None, "parse: no JSON", None])])
    assert str(found) == "no JSON (offset 101 of partition 3 of topic orders)"
    assert found.kind == "INVALID"
    found = refused(route, [recorded(with_nulls(made, [0, 1, None]), [None] * 3)])
    assert "key column 'id' is null in row 2: give it a value (offset 102 of partition 3 of topic orders)" in str(found)


@pytest.mark.parametrize("mode", ["skip", "table"])
def test_bad_rows_are_taken_out_one_by_one(
    mode: Any, route: RouteTask, owner: tuple[Any, str], made: Any, uri: str
) -> None:
    table, endpoint = owner
    batch = recorded(with_nulls(made, [0, 1, None, 3, None, 5]), [None, "parse: no JSON", None, "map: odd", None, None])
    passed = list(RouteTask(uri, (), letters=mode)(iter([batch])))
    routed = uncounted(passed)
    assert routed.num_rows == 6
    assert not {PROBLEM, RAW_KEY, RAW_VALUE} & set(routed.schema.names), "good rows leave their bytes behind"
    assert [bucket < 0 for bucket in routed[BUCKET].to_pylist()] == [False, True, True, True, True, False]
    assert [row["name"] is None for row in routed.to_pylist()] == [False, True, True, True, True, False]
    sent = shuffled(passed)
    send = SendTask(endpoint, table.base.regions, "query", 0, 30.0, letters=Rules(mode, f"{uri}.dlq"))
    for repeated in (False, True):
        answers = pa.Table.from_batches(send(iter([sent.slice(0, 2), sent.slice(2, 3), sent.slice(5)]))).to_pylist()
        told = [each for each in answers if each["letters"] is not None]
        assert [(each["rows"], each["letters"]) for each in told] == [(4, 0 if repeated or mode == "skip" else 4)]
        assert "fit: key column 'id' is null: give it a value (2x)" in told[0]["said"]
        assert {each["applied"] for each in answers if each["letters"] is None} == {not repeated}
    assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [0, 5]
    if mode == "skip":
        return
    found = lance.dataset(f"{uri}.dlq").to_table().sort_by("offset").to_pylist()
    assert [(each["topic"], each["partition"], each["offset"]) for each in found] == [
        ("orders", 3, offset) for offset in (101, 102, 103, 104)
    ]
    assert [each["stage"] for each in found] == ["parse", "fit", "map", "fit"]
    assert [(each["raw_key"], each["raw_value"]) for each in found] == [
        (b"key %d" % at, b"value \xff %d" % at) for at in (1, 2, 3, 4)
    ]
    assert {each["row"] for each in found} == {None}
    assert len({each["id"] for each in found}) == 4


def test_letters_alone_open_no_connection(route: RouteTask, made: Any, uri: str) -> None:
    routed = list(RouteTask(uri, (), letters="skip")(iter([recorded(made.table([1, 2]), ["map: a", "map: b"])])))
    nobody = SendTask("grpc://127.0.0.1:1", (), "query", 0, 30.0, letters=Rules("skip"))
    assert [each["rows"][0].as_py() for each in nobody(iter([shuffled(routed)]))] == [2]


def test_a_row_that_its_region_refused_is_told_by_its_place(
    open_small: Callable[..., Any], uri: str, made: Any
) -> None:
    open_small().close()
    batch = recorded(made.table(range(3)), [None] * 3)
    task = RouteTask(uri, (), letters="table", refused={("orders", 3, 101): BadRow("refused", None, "no")})
    routed = uncounted(list(task(iter([batch]))))
    assert [letter and letter["stage"] for letter in routed[LETTER].to_pylist()] == [None, "refused", None]


def test_a_letter_of_before_is_left_out_where_bad_rows_end_the_job(route: RouteTask, made: Any) -> None:
    """The micro-batch is repeated with another `dlq.mode`; the letter of the first attempt remains valid."""
    batch = recorded(made.table(range(4)), [None, "map: odd", None, None])
    before = {("orders", 3, 101): BadRow("map", None, "odd"), ("orders", 3, 103): BadRow("fit", None, "no longer")}
    routed = uncounted(list(replace(route, refused=before)(iter([batch]))))
    assert routed["id"].to_pylist() == made.table([0, 2])["id"].to_pylist()
    assert routed[ROW].to_pylist() == [0, 2]


def test_letters_of_a_source_without_places_are_the_same_however_they_are_cut(
    owner: tuple[Any, str], made: Any, uri: str
) -> None:
    table, endpoint = owner
    rows = with_nulls(made, [None, 1, None, None]).take([0, 1, 2, 2, 3])
    cuts = [[rows.slice(0, 2), rows.slice(2)], [rows.slice(3), rows.slice(0, 3)]]
    for order in cuts:
        route = RouteTask(uri, (), letters="table")
        blocks = [part.append_column(BLOCK, pa.array([n] * len(part), pa.int64())) for n, part in enumerate(order)]
        sent = shuffled([batch for part in blocks for batch in route(iter(part.combine_chunks().to_batches()))])
        send = SendTask(endpoint, table.base.regions, "query", 0, 30.0, letters=Rules("table", f"{uri}.dlq"))
        assert sum(each["rows"][0].as_py() for each in send(iter([sent])) if each["letters"][0].is_valid) == 4
        assert lance.dataset(f"{uri}.dlq").count_rows() == 4
