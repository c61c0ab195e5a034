"""Values that do not fit their column are rejected by column and row; the size of the others is known before."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import InvalidRows
from memwal.memtable.batch_store import BATCH_OVERHEAD
from memwal.memtable.conversion import convert, exact, misfit
from memwal.memtable.converted_size import ConvertedSize, converted_bytes, null_bytes
from tests.messages import raises

# ruff: noqa: DTZ001 - values without a time zone are what is tested


BERLIN = pa.timestamp("us", "Europe/Berlin")
F16, F32, F64 = pa.float16(), pa.float32(), pa.float64()
LOUD, NAN = float("inf"), float("nan")


def converted(values: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> list[Any]:
    column = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])
    found = convert(column, pa.field("c", kind))
    assert found.type == kind
    found.validate(full=True)
    return list(found.to_pylist())


def struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


LOSES = {
    "float64 beyond float32": (pa.array([1.5, 1e300]), F32),
    "float64 beyond float16": (pa.array([1.5, -70000.0]), F16),
    "integer beyond float16": (pa.array([1, 2049]), F16),
    "integer beyond float64": (pa.array([1, 2**53 + 1]), F64),
    "a fraction into an integer": (pa.array([1.0, 5.5]), pa.int64()),
    "not a number into an integer": (pa.array([1.0, NAN]), pa.int64()),
    "an integer out of range": (pa.array([1, 300]), pa.int8()),
    "digits of a float": (pa.array([0.5, 0.125]), pa.decimal128(10, 2)),
    "a float beyond a decimal": (pa.array([0.5, 1e300]), pa.decimal128(10, 2)),
    "no number into a decimal": (pa.array([0.5, NAN]), pa.decimal128(10, 2)),
    "an integer beyond a decimal": (pa.array([5, 500]), pa.decimal128(4, 2)),
    "digits of a decimal": (pa.array([Decimal("1.50"), Decimal("1.55")]), pa.decimal128(10, 1)),
    "a decimal's fraction": (pa.array([Decimal("1.0"), Decimal("1.5")]), pa.int64()),
    "more digits than float64 has": (pa.array([Decimal("0.5"), Decimal("12345678901234567890.5")]), F64),
    "the time of a day": (pa.array([datetime(2020, 1, 1), datetime(2020, 1, 1, 15, 30)]), pa.date32()),
    "the time of a day, in milliseconds": (pa.array([datetime(2020, 1, 1), datetime(2020, 1, 1, 15, 30)]), pa.date64()),
    "a day beyond date32": (pa.array([0, 2**60]).view(pa.timestamp("s")), pa.date32()),
    "microseconds": (pa.array([datetime(2020, 1, 1), datetime(2020, 1, 1, 0, 0, 0, 5)]), pa.timestamp("ms")),
    "beyond nanoseconds": (pa.array([datetime(2020, 1, 1), datetime(2700, 1, 1)]), pa.timestamp("ns")),
    "inside a list": (pa.array([[1.5], [2.0, 1e300]]), pa.list_(F32)),
    "inside a vector": (pa.array([[1.5, 2.0], [2.0, 1e300]]), pa.list_(F32, 2)),
    "inside a struct": (pa.array([{"a": 0.5}, {"a": 0.125}]), struct(a=pa.decimal128(10, 2))),
    "inside a struct in a list": (pa.array([[{"a": 1.0}], [{"a": 1.0}, {"a": 1.5}]]), pa.list_(struct(a=pa.int32()))),
}


@pytest.mark.parametrize("name", LOSES)
def test_a_value_that_does_not_fit_exactly_is_refused_by_its_row(name: str) -> None:
    values, kind = LOSES[name]
    with raises(InvalidRows) as refused:
        converted(values, kind)
    assert (refused.value.column, refused.value.row) == ("c", 1)
    converted(values.slice(0, 1), kind)


@pytest.mark.parametrize("name", LOSES)
def test_the_row_is_counted_over_chunks(name: str) -> None:
    values, kind = LOSES[name]
    chunks = pa.chunked_array([values.slice(0, 1), values.slice(0, 1), values])
    with pytest.raises(InvalidRows) as refused:
        converted(chunks, kind)
    assert refused.value.row == 3


WRONG = {
    "noon of no place into a zone": (pa.array([datetime(2020, 1, 1, 12)]), BERLIN),
    "noon of no place into UTC": (pa.array([datetime(2020, 1, 1, 12)]), pa.timestamp("us", "UTC")),
    "an instant into no zone": (pa.array([datetime(2020, 1, 1, tzinfo=UTC)]), pa.timestamp("us")),
    "an instant into a day": (pa.array([datetime(2020, 1, 1, tzinfo=UTC)]), pa.date32()),
    "a day into an instant": (pa.array([date(2020, 1, 1)]), BERLIN),
    "a number into a time": (pa.array([1.5e9]), pa.timestamp("us")),
    "a whole number into a time": (pa.array([5]), pa.timestamp("us")),
    "a number into a day": (pa.array([5]), pa.date32()),
    "a number into a span": (pa.array([5]), pa.duration("s")),
    "text into a number": (pa.array(["5"]), pa.int64()),
    "a number into text": (pa.array([5]), pa.string()),
    "a bool into a number": (pa.array([True]), pa.int64()),
    "text into a number, in a struct": (pa.array([{"a": "1"}]), struct(a=pa.int64())),
    "a number into a time, in a list": (pa.array([[5]]), pa.list_(pa.timestamp("us"))),
    "a field of a struct that is not there": (pa.array([{"a": 1, "b": 2}]), struct(a=pa.int64())),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_type_that_must_be_guessed_is_refused_with_the_remedy(name: str) -> None:
    values, kind = WRONG[name]
    with raises(InvalidRows) as refused:
        converted(values, kind)
    assert refused.value.column == "c"


FITS = {
    "float64 rounds into float32": (pa.array([0.1, None]), F32, [np.float32(0.1), None]),
    "infinity": (pa.array([LOUD, -LOUD]), F32, [LOUD, -LOUD]),
    "too small for float32": (pa.array([1e-300]), F32, [0.0]),
    "whole floats": (pa.array([5.0, None]), pa.int64(), [5, None]),
    "floats by their digits": (pa.array([0.1, 12.5, 1e-2]), pa.decimal128(10, 2), ["0.10", "12.50", "0.01"]),
    "float32 by its digits": (pa.array([0.1], F32), pa.decimal128(10, 2), ["0.10"]),
    "integers as decimals": (pa.array([5, -5, None]), pa.decimal128(10, 2), ["5.00", "-5.00", None]),
    "decimals as floats": (pa.array([Decimal("0.1"), None]), F64, [0.1, None]),
    "decimals as small floats": (pa.array([Decimal("0.5")]), F16, [0.5]),
    "uint64 as Spark carries it": (pa.array([Decimal(2**64 - 1)]), pa.uint64(), [2**64 - 1]),
    "midnights": (pa.array([datetime(2020, 1, 1), None]), pa.date32(), [date(2020, 1, 1), None]),
    "days": (pa.array([date(2020, 1, 1)]), pa.timestamp("us"), [datetime(2020, 1, 1)]),
    "dictionary": (pa.array(["a", None, "a"]).dictionary_encode(), pa.string(), ["a", None, "a"]),
    "nulls": (pa.nulls(2), pa.list_(F32, 2), [None, None]),
    "lists as vectors": (pa.array([[1.0, 2.0], None, [3.0, 4.0]]), pa.list_(F32, 2), [[1, 2], None, [3, 4]]),
    "vectors as lists": (pa.array([[1, 2], None], pa.list_(F64, 2)), pa.large_list(F32), [[1, 2], None]),
    "a slice": (pa.array([[9.0], [1.0, 2.0], None]).slice(1), pa.list_(F32, 2), [[1, 2], None]),
    "structs by name": (
        pa.array([{"b": 1, "a": 2}, None, {"a": 5}]).slice(1),
        struct(a=pa.int8(), b=pa.int8(), c=pa.string()),
        [None, {"a": 5, "b": None, "c": None}],
    ),
    "times of a day": (pa.array([1000]).view(pa.time64("us")), pa.time32("ms"), [timedelta(milliseconds=1)]),
}


@pytest.mark.parametrize("name", FITS)
def test_a_value_that_fits_is_taken(name: str) -> None:
    values, kind, expected = FITS[name]
    found = converted(values, kind)
    if pa.types.is_decimal(kind):
        found = [None if each is None else str(each) for each in found]
    if pa.types.is_time(kind):
        found = [timedelta(microseconds=each.microsecond) for each in found]
    assert found == expected


def test_an_instant_stays_the_same_one_in_another_zone() -> None:
    noon = datetime(2020, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert converted(pa.array([noon]), BERLIN) == [noon]


def test_what_a_null_hides_is_not_looked_at() -> None:
    hidden = pa.StructArray.from_arrays([pa.array([0.125, 0.5])], ["a"], mask=pa.array([True, False]))
    assert converted(hidden, struct(a=pa.decimal128(10, 2))) == [None, {"a": Decimal("0.50")}]


def test_a_column_of_the_type_is_the_same_object() -> None:
    column = pa.chunked_array([pa.array([1, 2])])
    assert convert(column, pa.field("c", pa.int64())) is column


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
