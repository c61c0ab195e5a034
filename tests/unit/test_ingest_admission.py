"""Admission checks and copies the rows of a group once; an error names the row by its number in its own write."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from memwal.ingest.engine.api.rows import size_bound
from memwal.ingest.engine.region.admission import Admission
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.errors import Invalid
from memwal.memtable import InvalidRows, row_schema, tombstones
from tests.messages import raises
from tests.region_contexts import region_context
from tests.support.memory_store import MemoryStore

ID = pa.field("id", pa.int64(), nullable=False)
COLUMNS: dict[str, pa.Array] = {
    "int": pa.array(np.arange(6)),
    "float16": pa.array(np.arange(6, dtype=np.float16)),
    "bool": pa.array([True, False, None, True, True, False]),
    "string": pa.array(list("abcdef")),
    "large_string": pa.array(list("abcdef"), pa.large_string()),
    "binary": pa.array([b"x"] * 6),
    "fixed_binary": pa.array([b"xx"] * 6, pa.binary(2)),
    "decimal": pa.array([decimal.Decimal(1)] * 6),
    "date": pa.array([datetime.date(2000, 1, 1)] * 6),
    "timestamp": pa.array([datetime.datetime(2000, 1, 1)] * 6),  # noqa: DTZ001 - a column without a zone
    "list": pa.array([[1, 2], [], None, [3], [4], [5, 6]]),
    "large_list": pa.array([[1, 2], [], None, [3], [4], [5, 6]], pa.large_list(pa.int32())),
    "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 2),
    "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": 2, "b": []}] * 2),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"] * 6, pa.binary(16))),
}


def admission(*columns: pa.Field) -> Admission:
    """Return the admission of a table with the key `id`; columns declared not null are required."""
    required = tuple(field.name for field in columns if not field.nullable)
    return Admission(region_context(MemoryStore(), pa.schema([ID, *columns]), required=required))


def addresses(column: pa.ChunkedArray) -> set[int]:
    """Return the memory addresses of a column's buffers."""
    stored = (chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk for chunk in column.chunks)
    return {buffer.address for chunk in stored for buffer in chunk.buffers() if buffer is not None and buffer.size}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("parts", [[(0, 6)], [(1, 3)], [(0, 2), (2, 4)], [(0, 0), (1, 4)]], ids=str)
def test_nothing_of_the_callers_memory_is_kept(kind: str, parts: list[tuple[int, int]]) -> None:
    given = pa.table([pa.array(np.arange(6)), COLUMNS[kind]], names=["id", "c"])
    admits = admission(pa.field("c", COLUMNS[kind].type))
    slices = [admits.conform(given.slice(*part)) for part in parts]
    gathered = admits.gather([Write(each) for each in slices])
    for name in ("id", "c"):
        assert not addresses(gathered.rows[name]) & addresses(given[name])
    assert gathered.rows.drop_columns("_tombstone").to_pylist() == pa.concat_tables(slices).to_pylist()
    assert gathered.rows["_tombstone"].to_pylist() == [False] * gathered.num_rows


def test_the_size_of_a_group_is_counted_without_a_look_at_each_value() -> None:
    admits = admission(pa.field("s", pa.string()))
    rows = pa.table({"id": np.arange(100), "s": ["abc"] * 100})
    gathered = admits.gather([Write(admits.conform(rows))])
    assert gathered.size == pytest.approx(gathered.rows.nbytes, rel=0.1)
    assert size_bound(rows) == pytest.approx(rows.nbytes, rel=0.1)
    wide = pa.table({"id": np.arange(1_000_000)})
    assert size_bound(wide.slice(5, 10)) == 80, "a slice of a large table is no large write"


def test_a_column_that_must_have_a_value_may_be_null_in_a_delete() -> None:
    admits = admission(pa.field("v", pa.int64(), nullable=False))
    put = Write(admits.conform(pa.table({"id": [1], "v": [1]})))
    columns = row_schema(pa.schema([ID, pa.field("v", pa.int64())]), ("id",))
    delete = Write(tombstones(pa.table({"id": [2]}), columns).drop_columns("_tombstone"), deletes=True)
    assert admits.gather([put, delete]).rows["_tombstone"].to_pylist() == [False, True]
    missing = Write(admits.conform(pa.table({"id": [3, 4], "v": [1, None]})))
    with raises(InvalidRows):
        admits.gather([put, delete, missing])
    admits.check(delete.rows, deletes=True)
    with raises(InvalidRows):
        admits.check(missing.rows, deletes=False)


def test_offsets_that_lie_outside_of_their_buffer_are_refused_before_they_are_followed() -> None:
    offsets = pa.py_buffer(np.array([0, 1_000_000_000, 1], dtype=np.int32).tobytes())
    wild = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a")])
    admits = admission(pa.field("s", pa.string()))
    rows = pa.table({"id": [1, 2], "s": wild})
    with pytest.raises(pa.ArrowInvalid):
        admits.gather([Write(admits.conform(rows))])
    with raises(Invalid):
        admits.check(admits.conform(rows), deletes=False)
    with raises(Invalid):
        admits.conform(rows.cast(pa.schema([("id", pa.int32()), ("s", pa.string())])))
