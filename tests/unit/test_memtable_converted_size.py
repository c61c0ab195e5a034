"""The size of rows as columns of a table is computed before any value is converted."""

from __future__ import annotations

import pyarrow as pa
import pytest

from memwal.memtable.batch_store import BATCH_OVERHEAD
from memwal.memtable.conversion import exact, misfit
from memwal.memtable.converted_size import ConvertedSize, converted_bytes, null_bytes

VECTOR = pa.list_(pa.float32(), 1000)
MANY = 2**31 - 1
TEXT = pa.array(["x" * 100, None, "yy", "x" * 100])
EXACT = {
    "numbers": (pa.array([1, 2, 3]), pa.int64()),
    "wider numbers": (pa.array([1, 2, None], pa.int8()), pa.float64()),
    "texts": (TEXT, pa.string()),
    "larger texts": (TEXT, pa.large_string()),
    "nulls": (pa.nulls(7), VECTOR),
    "lists of nulls": (pa.array([[None] * 100, [], None]), pa.list_(pa.int64())),
    "a dictionary of texts": (TEXT.dictionary_encode(), pa.string()),
    "a dictionary of numbers": (pa.array([5, 5, None, 5], pa.int8()).dictionary_encode(), pa.int64()),
    "a dictionary of lists": (
        pa.DictionaryArray.from_arrays(pa.array([0] * 50, pa.int8()), pa.array([[1.0] * 30])), pa.list_(pa.float64())
    ),
    "views": (TEXT.cast(pa.string_view()), pa.string()),
    "a slice of views": (TEXT.cast(pa.string_view()).slice(2), pa.string()),
    "vectors": (pa.array([[1.0, 2.0], None], pa.list_(pa.float16(), 2)), pa.list_(pa.float32(), 2)),
    "structs of nulls": (pa.array([{"x": None}] * 9), pa.struct([("x", VECTOR)])),
    "a slice": (pa.array([[1, 2], [3], [4, 5, 6]]).slice(1), pa.list_(pa.int64())),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kind"), EXACT.values(), ids=EXACT)
def test_the_size_is_never_below_that_of_the_converted_column_and_not_far_above(
    given: pa.Array, kind: pa.DataType
) -> None:
    assert misfit(given.type, kind) is None
    converted = exact(given, kind)
    size = converted_bytes(given, kind)
    assert 0.95 * converted.nbytes <= size + len(given)  # without the bits of nulls
    assert size <= 64 + given.nbytes + 4 * converted.nbytes


NO_BYTES = {
    "nulls": pa.Array.from_buffers(pa.null(), MANY, [None]),
    "lists of nulls": pa.FixedSizeListArray.from_arrays(pa.Array.from_buffers(pa.null(), MANY, [None]), MANY),
    "structs": pa.Array.from_buffers(pa.struct([]), MANY, [None]),
    "bytes of no width": pa.Array.from_buffers(pa.binary(0), MANY, [None, pa.py_buffer(b"")]),
    "a run": pa.RunEndEncodedArray.from_arrays(pa.array([MANY], pa.int32()), pa.array(["x"])),
    "list views": pa.ListViewArray.from_arrays(
        pa.array([0] * 10_000, pa.int32()), pa.array([100_000] * 10_000, pa.int32()), pa.array(range(100_000))
    ),
}


@pytest.mark.parametrize("given", NO_BYTES.values(), ids=NO_BYTES)
def test_rows_without_bytes_of_their_own_are_counted(given: pa.Array) -> None:
    assert converted_bytes(given, given.type) >= 2**30
    assert (
        ConvertedSize(pa.schema([("c", given.type)]), pa.schema([]), whole=False).of(
            pa.RecordBatch.from_arrays([given], ["c"])
        )
        >= 2**30
    )


def test_columns_that_the_rows_lack_count_and_a_batch_has_a_size_of_its_own() -> None:
    table = pa.schema([("id", pa.int64()), ("v", VECTOR)])
    batch = pa.RecordBatch.from_pydict({"id": list(range(1000))})
    size = ConvertedSize(batch.schema, table, whole=True).of(batch)
    assert size == BATCH_OVERHEAD + 8000 + 1000 * null_bytes(VECTOR) == BATCH_OVERHEAD + 8000 + 4_000_000
    assert ConvertedSize(batch.schema, table, whole=False).of(batch) == BATCH_OVERHEAD + 8000
