"""Timestamps and zeros in filters: the same rows as Lance, whatever compares them."""

from __future__ import annotations

from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import InvalidRows
from memwal.memtable.filter.translation import checked, translate
from tests.conftest import extent
from tests.messages import raises
from tests.support.snapshots import snapshot

STAMPS = [0, 1, 999, 1_000, 1_001, 1_582_934_523_004_000_001, -1, None]
STAMPED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("t", pa.timestamp("ns")),
        ("u", pa.timestamp("us")),
        ("ms", pa.timestamp("ms")),
        ("z", pa.timestamp("ns", "UTC")),
        ("clock", pa.time64("ns")),
        ("s", pa.string()),
    ]
)
FINE, COARSE = "1970-01-01 00:00:00.000000001", "1970-01-01 00:00:00.000001"

SAME = f"""
t = timestamp '{COARSE}' | t >= timestamp '{COARSE}000' | t = cast('{COARSE}' as timestamp) | t < '{COARSE}'::timestamp
t = timestamp(9) '{FINE}' | t > timestamp(6) '{FINE}' | t = timestamp(3) '{FINE}' | t = cast('{FINE}' as timestamp(9))
t = cast('{FINE}' as timestamp(6)) | t in (timestamp '1970-01-01', timestamp '{COARSE}') | u > timestamp '{COARSE}'
t between timestamp '1970-01-01' and timestamp '{COARSE}' | ms = timestamp '{COARSE}' | z <= timestamp '{COARSE}'
u < timestamp '2300-01-01' | ms > timestamp '0001-01-01' | t = to_timestamp_nanos('{FINE}')
z > to_timestamp_nanos('{FINE}') | t::timestamp = timestamp '{COARSE}'
t >= arrow_cast('{FINE}', 'Timestamp(Nanosecond, None)') | t in (to_timestamp_nanos('{FINE}'), to_timestamp('{FINE}'))
cast(s as timestamp) = timestamp '1970-01-01' | cast(id as timestamp) = timestamp '{COARSE}'
cast(t as timestamp) > timestamp '1970-01-01' | date_trunc('second', t) = timestamp '1970-01-01' | t < now()
date_part('nanosecond', timestamp '{FINE}') = 1 | t = coalesce(t, timestamp '{FINE}')
cast(timestamp '{COARSE}' as bigint) = 1 | clock = arrow_cast('00:00:00.000000001', 'Time64(Nanosecond)')
t between timestamp '1970-01-01' and to_timestamp('{COARSE}') | t = TIMESTAMP "{COARSE}"
t = try_cast('{COARSE}' as timestamp)
"""

REFUSED = f"""
t = timestamp '{FINE}' | '{FINE}'::timestamp = t | t >= cast('{FINE}' as timestamp)
t = try_cast('{FINE}' as TimeStamp) | s = 'a' or t in (timestamp '{FINE}')
t = timestamp "{FINE}" | t = cast(('{FINE}') as timestamp) | u != timestamp '{FINE}'
t between timestamp '1970-01-01' and timestamp '{FINE}' | t in (timestamp '1970-01-01', to_timestamp_nanos('{FINE}'))
t between timestamp '1970-01-01' and to_timestamp('{FINE}') | t in (null, to_timestamp_micros(0), timestamp(9) '{FINE}')
t not between timestamp(3) '1970-01-01' and timestamp '{COARSE}' and t is null
t in (timestamp '{COARSE}', arrow_cast('{FINE}', 'Timestamp(Nanosecond, None)')) | t < timestamp /* - */ '{FINE}0'
"""


def filters(text: str) -> list[str]:
    return [each.strip() for line in text.strip().splitlines() for each in line.split(" | ")]


def stamped_rows() -> pa.Table:
    def stamps(unit: str, nanoseconds: int, zone: str | None = None) -> pa.Array:
        return pa.array([stamp and stamp // nanoseconds for stamp in STAMPS], pa.timestamp(unit, zone))

    clock = pa.array([stamp and abs(stamp) % 1_000_000 for stamp in STAMPS], pa.time64("ns"))
    columns = [stamps("ns", 1), stamps("us", 1_000), stamps("ms", 1_000_000), stamps("ns", 1, "UTC"), clock]
    return pa.table([pa.array(range(len(STAMPS))), *columns, pa.array([FINE] * len(STAMPS))], schema=STAMPED)


@pytest.fixture(scope="module")
def stamped() -> lance.LanceDataset:
    return lance.write_dataset(stamped_rows(), "memory://")


@pytest.mark.usefixtures("every_index")
@pytest.mark.parametrize("filter", filters(SAME))
def test_timestamps_select_the_same_rows_as_lance(stamped: lance.LanceDataset, filter: str) -> None:
    wanted = stamped.to_table(filter=filter)["id"].to_pylist()
    plain = snapshot(stamped_rows())
    assert np.flatnonzero(plain.where(filter, plain.live())).tolist() == wanted
    indexed = snapshot(stamped_rows(), "t", "u", "ms")
    assert np.flatnonzero(indexed.where(filter, indexed.live())).tolist() == wanted


@pytest.mark.parametrize("filter", filters(REFUSED))
def test_a_timestamp_that_would_be_cut_short_is_refused(filter: str) -> None:
    table = snapshot(stamped_rows())
    with raises(InvalidRows):
        table.where(filter, table.live())


@pytest.mark.parametrize("filter", [f"s = '{FINE}'", f"s = 'timestamp {FINE}'", f"s in ('{FINE}', 'a') and t < now()"])
def test_a_text_that_is_no_timestamp_is_not_refused(filter: str) -> None:
    assert checked(filter, STAMPED.names)


def test_the_unit_is_written_out_but_in_functions() -> None:
    assert translate("u > timestamp '2020-01-01'", STAMPED) == "\"u\" > timestamp(6) '2020-01-01'"
    assert (
        translate("coalesce(u, timestamp '2020-01-01') = u", STAMPED) == 'coalesce("u", timestamp \'2020-01-01\') = "u"'
    )
    named = pa.schema([*STAMPED, ("timestamp", pa.int64())])
    assert translate("timestamp = 1 and timestamp in (1, 2)", named) == '"timestamp" = 1 and "timestamp" in (1, 2)'


NUMBERS = [0.0, -0.0, 1.5, 1.0, None, float("nan"), 0.1, float("-inf"), 2.0**24]
STRUCT = pa.struct([("f", pa.float64()), ("g", pa.float32()), ("h", pa.float16()), ("i", pa.int64())])
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("f", pa.float64()),
        ("g", pa.float32()),
        ("h", pa.float16()),
        ("st", STRUCT),
        ("l", pa.list_(pa.float64())),
        ("ls", pa.list_(STRUCT)),
        ("i", pa.int64()),
        ("w", pa.uint64()),
        ("m", pa.decimal128(10, 2)),
    ]
)
FLOATS = ("f", "g", "h", "st.f", "st.g", "st.h", "l[1]", "ls[1].g", "abs(f)", "coalesce(g, 1)", "-f", "f + 0", "(st.h)")
ZEROS = ("0", "-0", "0.0", "-0.0", "0e0", "(0)", "cast(0 as double)")
SHAPES = """
{x} IN ({z}) | {x} IN ({z}, 7, 8, 9) | {x} NOT IN (7, {z}, 8, 9, 1.5) | {x} IN (NULL, {z}, 7, 8, 9) | {x} IN ({z}, 7)
{x} NOT IN ({z}, NULL, 7, 8) | NOT {x} IN ({z}, 7, 8, 9) | NOT ({x} IN ({z}, 7, 8, 9)) | ({x} IN ({z}, 7, 8, 9)) IS NULL
{x} IN ({z}, 1, 2, 4097) | {x} = {z} OR {x} = 7 OR {x} = 8 OR {x} = 9 | {x} = {z} OR {x} IN (7, 8, 9)
{x} != {z} AND {x} != 7 AND {x} <> 8 AND {x} <> 9 | NOT ({x} <> {z} AND {x} NOT IN (7, 8, 9)) | {x} = {z} | {x} <> {z}
{x} BETWEEN {z} AND 1 | {x} BETWEEN -1 AND {z} | {x} >= {z} | {x} < {z} | {x} IS NOT DISTINCT FROM {z}
{z} = {x} | {z} = {x} AND id IN (0, 1, 2, 3) | ({x} = {z}) IS NOT TRUE
"""
OTHERS = """
i IN (0, 7, 8, 9) | NOT (i IN (-0.0, 7, 8, 9)) | abs(i) IN (-0.0, 7, 8, 9) | w IN (0, 18446744073709551615, 7, 8)
array_length(l) IN (0, 1, 2, 3) | m IN (0, 1, 2, 3) | f = i OR f IN (7, 8, 9) | id + 1 = 0 OR id + 1 IN (7, 8, 9)
abs(w) IN (0, 9007199254740993, 7, 8) | 0 = f OR f IN (7, 8, 9) | -0.0 = st.g OR st.g IN (7, 8, 9)
0 <> g AND g NOT IN (7, 8, 9) | g IN (0, 0.1, 7, 8) | h NOT IN (0.1, -0.0, 7, 8) | st.g IN (0.1, 0, 7, 8)
(0) = f OR f IN (7, 8, 9) | cast(0 as double) = g OR g IN (7, 8, 9)
f = 0 IS TRUE | -f IN (0, 1, 2, 16777217) | abs(f) IN (16777216, 3, 4, -0)
f - 0 = 0 - 0 | f=0 or f=7 or f=8 or f=9 | i * 1.5 IN (0, 3, 4, 5) | f IN (i, 0, 7, 8)
"""


def rows() -> pa.Table:
    def struct(value: Any) -> Any:
        return {"f": value, "g": value, "h": half(value), "i": None if value is None else 0}

    def half(value: Any) -> Any:
        return None if value is None else np.float16(min(value, 1_000.0))

    integers = [0, 1, 7, None, -1, 2**53, 2**53 + 1, 0, 3]
    columns = {
        "id": range(len(NUMBERS)),
        "f": NUMBERS,
        "g": NUMBERS,
        "h": [half(value) for value in NUMBERS],
        "st": [struct(value) for value in NUMBERS],
        "l": [[value, 0.0] for value in NUMBERS],
        "ls": [[struct(value)] for value in NUMBERS],
        "i": integers,
        "w": [value and abs(value) for value in integers],
        "m": [0, 1, 2, None, 0, 0, 1, 2, 3],
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


@pytest.fixture(scope="module")
def dataset() -> lance.LanceDataset:
    return lance.write_dataset(rows(), "memory://")


def check(dataset: lance.LanceDataset, asked: list[str]) -> int:
    """Compare the rows found with Lance's, with and without indexes; return how many filters Lance accepts."""
    plain, indexed, taken = snapshot(rows()), snapshot(rows(), "f", "g", "i"), 0
    for filter in asked:
        try:
            dataset.scanner(filter=filter).explain_plan()
        except ValueError:
            continue
        taken += 1
        wanted = dataset.to_table(filter=filter)["id"].to_pylist()
        for found in (plain, indexed):
            assert np.flatnonzero(found.where(filter, found.live())).tolist() == wanted, filter
    return taken


@pytest.mark.usefixtures("every_index")
@pytest.mark.parametrize("column", FLOATS)
def test_floats_are_compared_with_zeros_as_in_lance(dataset: lance.LanceDataset, column: str) -> None:
    asked = []
    for at, shape in enumerate(filters(SHAPES)):
        asked += [shape.format(x=column, z=zero) for zero in extent(ZEROS[at % 6 :][:2], ZEROS)]
    assert check(dataset, asked) > len(asked) / 2


def test_other_comparisons_with_zeros_stay_as_they_are(dataset: lance.LanceDataset) -> None:
    asked = filters(OTHERS)
    assert check(dataset, asked) > len(asked) / 2


def test_only_a_comparison_with_a_zero_is_changed() -> None:
    for filter in ("i IN (0, 7)", "array_length(l) IN (70, 8)", "w = 0", "m NOT IN (0, 1)", "abs(w) = 0"):
        assert ("+ 0.0" in translate(filter, SCHEMA)) == ("abs" in filter)
    assert translate("f IN (1, 0, 2)", SCHEMA) == '("f" in (1, 0, 2) OR ("f" + 0.0) = 0.0)'
    assert translate("st.g = 10 or f=0", SCHEMA).endswith('or ("f" + 0.0) = 0.0')
