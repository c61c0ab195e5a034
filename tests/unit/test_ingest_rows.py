"""Rows in every form become one Arrow table."""

# ruff: noqa: DTZ001 - values without a time zone are what is tested
from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from memwal.ingest.engine.api.rows import as_table
from memwal.ingest.errors import Invalid
from memwal.memtable import exact
from tests.messages import raises

SCHEMA = pa.schema([pa.field("k", pa.int32(), nullable=False), pa.field("v", pa.list_(pa.float32(), 2))])
TABLE = pa.table({"k": pa.array([1, 2], pa.int32()), "v": pa.array([[1, 2], None], pa.list_(pa.float32(), 2))})


class Frame:
    """A frame as Arrow sees those of pandas and polars."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "rows",
    [
        TABLE,
        TABLE.to_batches()[0],
        TABLE.to_reader(),
        Frame(),
        [{"k": 1, "v": [1, 2]}, {"k": 2}],
    ],
    ids=["table", "batch", "reader", "frame", "dicts"],
)
def test_every_form_gives_the_same_table(rows: Any) -> None:
    assert as_table(rows, SCHEMA) == TABLE


def test_a_name_that_only_a_later_dict_has_is_kept() -> None:
    assert as_table([{"k": 1}, {"k": 2, "other": "x"}], SCHEMA).column_names == ["k", "other"]


def test_a_value_that_does_not_fit_names_its_column_and_type() -> None:
    with raises(Invalid):
        as_table([{"k": "one"}], SCHEMA)


def test_what_holds_no_rows_is_refused_with_what_would_do() -> None:
    with raises(Invalid):
        as_table(42, SCHEMA)


class Odd(tzinfo):
    """A time zone whose offset no Arrow type can hold."""

    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(microseconds=7)

    def dst(self, when: datetime | None) -> None:
        return None

    def tzname(self, when: datetime | None) -> str:
        return "odd"


NOON = datetime(2020, 1, 1, 12)
REFUSED: dict[str, tuple[Any, Any, pa.DataType]] = {
    "a fraction": (5.0, 5.5, pa.int64()),
    "a float beyond float32": (1.5, 1e300, pa.float32()),
    "a vector beyond float32": ([1.5, 2.0], [1.5, 1e300], pa.list_(pa.float32(), 2)),
    "a bool in a vector": ([1.5, 2.0], [True, 2.0], pa.list_(pa.float32(), 2)),
    "a bool": (5, True, pa.int64()),
    "a bool as a float": (5.0, True, pa.float64()),
    "a number without a unit": (NOON, 1_700_000_000, pa.timestamp("us")),
    "a float without a unit": (NOON, 1.7e9, pa.timestamp("us")),
    "a number as a day": (date(2020, 1, 1), 5, pa.date32()),
    "the time of a day": (date(2020, 1, 1), NOON, pa.date32()),
    "noon of no place": (NOON.replace(tzinfo=UTC), NOON, pa.timestamp("us", "Europe/Berlin")),
    "an instant": (NOON, NOON.replace(tzinfo=UTC), pa.timestamp("us")),
    "microseconds of a zone": (
        NOON.replace(tzinfo=timezone(timedelta(hours=1))),
        NOON.replace(tzinfo=timezone(timedelta(microseconds=1))),
        pa.timestamp("us", "UTC"),
    ),
    "microseconds of a zone of one's own": (
        NOON.replace(tzinfo=UTC),
        NOON.replace(tzinfo=Odd()),
        pa.timestamp("ns", "UTC"),
    ),
    "microseconds of a zone in a list": (
        [NOON.replace(tzinfo=ZoneInfo("Europe/Berlin"))],
        [NOON.replace(tzinfo=UTC), NOON.replace(tzinfo=timezone(timedelta(seconds=1, microseconds=5)))],
        pa.list_(pa.timestamp("us", "UTC")),
    ),
    "microseconds": (NOON, NOON.replace(microsecond=5), pa.timestamp("ms")),
    "microseconds of a span": (timedelta(seconds=1), timedelta(microseconds=5), pa.duration("s")),
    "microseconds of a day's time": (time(12), time(12, 0, 0, 5), pa.time32("s")),
    "digits of a float": (0.5, 0.125, pa.decimal128(10, 2)),
    "digits of a decimal": (Decimal("0.5"), Decimal("0.125"), pa.decimal128(10, 2)),
    "a decimal's fraction": (5, Decimal("5.5"), pa.int64()),
    "bytes as text": ("a", b"a", pa.string()),
    "text as bytes": (b"a", "a", pa.binary()),
    "a fraction in a list": ([5], [5, 5.5], pa.list_(pa.int64())),
    "a fraction in a struct": ({"a": 5}, {"a": 5.5}, pa.struct([("a", pa.int64())])),
    "a field too many": ({"a": 5}, {"a": 5, "b": 6}, pa.struct([("a", pa.int64())])),
    "both sorts of times in a list": ([NOON], [NOON, NOON.replace(tzinfo=UTC)], pa.list_(pa.timestamp("us"))),
    "text in a list of bytes": ([b"a"], ["a"], pa.list_(pa.binary())),
    "a list too long": ([1.0, 2.0], [1.0, 2.0, 3.0], pa.list_(pa.float32(), 2)),
    "an integer beyond 64 bits": (5, 2**70, pa.int64()),
    "a number as text": ("a", 5, pa.string()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_of_a_dict_that_does_not_fit_exactly_names_its_row(name: str) -> None:
    good, bad, kind = REFUSED[name]
    schema = pa.schema([("c", kind)])
    for rows in ([good, good, bad, good], [None, None, bad], [good, None, bad]):
        with raises(Invalid):
            as_table([{"c": value} for value in rows], schema)
    assert as_table([{"c": good}, {"c": None}], schema).column("c").type == kind


TAKEN: dict[str, tuple[list[Any], pa.DataType, list[Any]]] = {
    "whole floats": ([5.0, 7, None], pa.int32(), [5, 7, None]),
    "NumPy's numbers": ([np.int64(5), np.float64(7.0), None], pa.int32(), [5, 7, None]),
    "NumPy's vectors": ([np.array([1.0, 2.0]), [3, 4], None], pa.list_(pa.float32(), 2), [[1, 2], [3, 4], None]),
    "zeros and ones": ([[0.0, 1.0], (1, 0)], pa.list_(pa.float32(), 2), [[0, 1], [1, 0]]),
    "floats by their digits": (
        [0.1, Decimal("0.25"), 3],
        pa.decimal128(10, 2),
        [Decimal(n) for n in ("0.10", "0.25", "3")],
    ),
    "midnights": ([datetime(2020, 1, 1), date(2020, 1, 2)], pa.date32(), [date(2020, 1, 1), date(2020, 1, 2)]),
    "days as times": ([NOON, date(2020, 1, 2)], pa.timestamp("ns"), [NOON, datetime(2020, 1, 2)]),
    "lists of structs": (
        [[{"a": 1.0}], [], None, [None, {"a": 2, "t": ["x"]}]],
        pa.list_(pa.struct([("a", pa.int8()), ("t", pa.list_(pa.string()))])),
        [[{"a": 1, "t": None}], [], None, [None, {"a": 2, "t": ["x"]}]],
    ),
    "large numbers": ([2**64 - 1, None], pa.uint64(), [2**64 - 1, None]),
    "bytes of one width": ([b"ab", None], pa.binary(2), [b"ab", None]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_value_of_a_dict_that_fits_is_taken(name: str) -> None:
    values, kind, expected = TAKEN[name]
    found = as_table([{"c": value} for value in values], pa.schema([("c", kind)])).column("c")
    assert found.type == kind
    assert found.to_pylist() == expected


def test_an_index_without_a_name_is_no_column() -> None:
    frame = pd.DataFrame({"id": [1, 2, 3]})
    for rows in (frame[frame.id > 1], frame.sort_values("id", ascending=False), pd.concat([frame, frame])):
        assert as_table(rows, pa.schema([("id", pa.int64())])).column_names == ["id"]
    named = frame.set_index("id").assign(v=1)
    assert set(as_table(named, pa.schema([("id", pa.int64()), ("v", pa.int64())])).column_names) == {"id", "v"}


@pytest.mark.parametrize(
    ("value", "kind", "stored"),
    [
        (pd.Timestamp("2020-01-01T00:00:00.123456789"), pa.timestamp("ns"), 1_577_836_800_123_456_789),
        (pd.Timedelta(1001, "ns"), pa.duration("ns"), 1001),
    ],
)
def test_nanoseconds_of_pandas_values_are_kept(value: Any, kind: pa.DataType, stored: int) -> None:
    rows = as_table([{"v": value}, {"v": None}], pa.schema([("v", kind)]))
    assert rows["v"].cast(pa.int64()).to_pylist() == [stored, None]


@pytest.mark.parametrize("value", [float("nan"), pd.NA, pd.NaT])
def test_what_pandas_has_for_nothing_says_what_to_write(value: Any) -> None:
    with raises(Invalid):
        as_table([{"v": 1}, {"v": value}], pa.schema([("v", pa.int64())]))


def test_a_uuid_is_its_bytes_and_a_time_with_a_zone_is_refused() -> None:
    one = UUID(int=7)
    assert as_table([{"v": one}], pa.schema([("v", pa.binary(16))]))["v"].to_pylist() == [one.bytes]
    with raises(Invalid):
        as_table([{"v": time(12, tzinfo=UTC)}], pa.schema([("v", pa.time64("us"))]))


@pytest.mark.parametrize("inner", [pa.list_(pa.float32(), 2), pa.struct([("v", pa.list_(pa.float32(), 2))])])
def test_a_vector_within_a_list_has_its_length(inner: pa.DataType) -> None:
    wide = {"v": [1.0, 2, 3, 4]} if pa.types.is_struct(inner) else [1.0, 2, 3, 4]
    four = pa.list_(pa.float64(), 4)
    given = pa.array([[wide, wide]], pa.list_(pa.struct([("v", four)]) if pa.types.is_struct(inner) else four))
    with raises(pa.ArrowInvalid):
        exact(given, pa.list_(inner))
