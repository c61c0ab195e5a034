"""Rows of an SST are compared with the memtable before they are published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.flush.errors import SstInvalid
from memwal.flush.sst import data
from memwal.flush.sst.read_back import EVERY, ReadBacks, expect_same, same
from memwal.flush.verification.runner import verify_table
from memwal.wal import open_store
from tests.conftest import Made, wait_until
from tests.messages import raises

BRIEFLY = {"put_timeout": "300ms", "retry_budget": "500ms"}
STRUCT = pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.string()))])


def damaging(column: str, change: Callable[[pa.Array], pa.Array]) -> Callable[..., Any]:
    """Return a `lance.write_dataset` that changes one column."""
    write = lance.write_dataset

    def written(rows: pa.RecordBatchReader, *arguments: Any, **more: Any) -> Any:
        table = rows.read_all().combine_chunks()
        place = table.schema.get_field_index(column)
        if place >= 0:
            changed = change(table.column(place).chunk(0))
            table = table.set_column(place, table.schema.field(place), changed)
        return write(table.to_reader(), *arguments, **more)

    return written


def last_is_null(values: pa.Array) -> pa.Array:
    return pa.concat_arrays([values.slice(0, len(values) - 1), pa.nulls(1, values.type)])


def swapped(values: pa.Array) -> pa.Array:
    return values.take(pa.array([1, 0, *range(2, len(values))]))


def zeroed(values: pa.Array) -> pa.Array:
    zeros = pa.array(np.zeros(len(values) * values.type.list_size), values.type.value_type)
    return pa.FixedSizeListArray.from_arrays(zeros, values.type.list_size)


@pytest.mark.parametrize(("column", "change"), [("name", last_is_null), ("price", swapped), ("vector", zeroed)])
def test_a_writer_that_damages_a_column_publishes_nothing_and_loses_nothing(
    open_small: Callable[..., Any],
    uri: str,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    change: Callable[[pa.Array], pa.Array],
) -> None:
    table = open_small(flush={"retry_delay": "10ms"}, wal=BRIEFLY)
    table.put(made.rows(range(20)))
    with monkeypatch.context() as planted:
        planted.setattr(data.lance, "write_dataset", damaging(column, change))
        with raises(memwal.MemWalError):
            table.flush()
        states = [region for region in table.status()["regions"] if region["flush_error"]]
        assert states
        assert all(region["state"] == "flush_failing" and not region["ssts"] for region in states)
        assert all(region["replay_after"] == 0 for region in states)
        assert table.count() == 20
        table.put(made.rows([30]))
    wait_until(lambda: not any(region["flush_error"] for region in table.status()["regions"]))
    table.flush()
    table.commit()
    assert table.count(level="committed") == 21
    assert not verify_table(open_store(uri), uri, deep=True).findings


def test_rows_of_a_failed_flush_are_replayed_by_the_next_owner(
    open_small: Callable[..., Any], uri: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_small(wal=BRIEFLY)
    table.put(made.rows(range(20)))
    with monkeypatch.context() as planted:
        planted.setattr(data.lance, "write_dataset", damaging("body", last_is_null))
        with pytest.raises(memwal.MemWalError):
            table.flush()
        table.close()
    with memwal.open(uri) as again:
        assert sorted(again.scan().read_all().to_pylist(), key=lambda row: row["id"]) == made.rows(range(20))


def test_flushes_are_read_back_until_one_passes_and_a_part_of_the_others() -> None:
    backs = ReadBacks()
    assert [backs.due, backs.due] == [True, True]  # two regions at once
    backs.done(passed=True)
    assert [backs.due for _ in range(2, 2 * EVERY)] == [number == EVERY for number in range(2, 2 * EVERY)]
    backs.done(passed=False)
    assert [backs.due, backs.due] == [True, True]


def test_a_column_added_by_another_program_is_read_back_at_once(
    open_small: Callable[..., Any], uri: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_small(regions=1, wal=BRIEFLY)
    table.put(made.rows(range(5)))
    table.flush()
    lance.dataset(uri).add_columns(pa.field("grade", pa.int64()))
    table.count()
    table.put([made.row(7) | {"grade": 5}])
    monkeypatch.setattr(data.lance, "write_dataset", damaging("grade", last_is_null))
    with raises(memwal.MemWalError):
        table.flush()


@pytest.mark.parametrize(
    ("kind", "values", "other"),
    [
        (pa.float32(), [float("nan"), None, 1.0], [float("nan"), None, 2.0]),
        (pa.float16(), [np.float16("nan"), None], [None, np.float16("nan")]),
        (STRUCT, [{"x": float("nan"), "tags": None}, None], [{"x": float("nan"), "tags": []}, None]),
        (
            pa.list_(STRUCT),
            [[{"x": float("nan"), "tags": ["a"]}], None],
            [[{"x": float("nan"), "tags": ["b"]}], None],
        ),
        (pa.list_(pa.float64(), 2), [[float("nan"), 1], None], [[float("nan"), 2], None]),
        (pa.list_(pa.float64()), [[float("nan")], [1.0, 2.0]], [[float("nan"), 1.0], [2.0]]),
    ],
    ids=str,
)
def test_values_are_compared_to_the_last_bit(kind: pa.DataType, values: list[Any], other: list[Any]) -> None:
    array = pa.array(values, kind)
    assert same(array, pa.array(values, kind))
    assert same(array.slice(1), pa.array(values[1:], kind))
    assert not same(array, pa.array(other, kind))
    assert not same(array, array.slice(1))


def test_a_file_that_lance_writes_and_cannot_read_is_named_by_its_column(tmp_path: Path) -> None:
    """A struct whose first field is a list, in pages with and without null structs (pylance 14.0.2)."""
    kind = pa.struct([("tags", pa.list_(pa.string()))])
    rows = [pa.array([{"tags": None}] * 6, kind), pa.array([None] * 6, kind)]
    batches = [pa.record_batch([part, pa.array(range(6))], names=["doc", "n"]) for part in rows]
    reader = pa.RecordBatchReader.from_batches(batches[0].schema, batches)
    dataset = lance.write_dataset(reader, str(tmp_path / "d.lance"), data_cache_bytes=1)
    with raises(SstInvalid):
        expect_same(dataset, batches, 100)


def test_rows_are_compared_whatever_their_batches(tmp_path: Path) -> None:
    table = pa.table({"n": range(100)})
    dataset = lance.write_dataset(table, str(tmp_path / "d.lance"))
    for size in (1, 7, 100):
        expect_same(dataset, table.to_batches(max_chunksize=size), 10)
    for wrong in (table.slice(1), table.slice(0, 99), pa.concat_tables([table, table.slice(0, 1)])):
        with pytest.raises(SstInvalid):
            expect_same(dataset, wrong.to_batches(), 10)
