"""Zeros in filters: 0.0 and -0.0 are equal, as in Lance, whatever compares them."""

from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable.filter.translation import translate
from tests.support.snapshots import snapshot

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


def split(text: str) -> list[str]:
    return [each.strip() for line in text.strip().splitlines() for each in line.split(" | ")]


def check(dataset: lance.LanceDataset, filters: list[str]) -> int:
    """Compare the rows found with Lance's, with and without indexes; return how many filters Lance accepts."""
    plain, indexed, taken = snapshot(rows()), snapshot(rows(), "f", "g", "i"), 0
    for filter in filters:
        try:
            dataset.scanner(filter=filter).explain_plan()
        except ValueError:
            continue
        taken += 1
        wanted = dataset.to_table(filter=filter)["id"].to_pylist()
        for found in (plain, indexed):
            assert np.flatnonzero(found.where(filter, found.live())).tolist() == wanted, filter
    return taken


@pytest.mark.parametrize("column", FLOATS)
def test_floats_are_compared_with_zeros_as_in_lance(
    dataset: lance.LanceDataset, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.memtable.filter.scalar_index.LOOKS", 0)
    monkeypatch.setattr("memwal.memtable.snapshot.WORTH", 1)
    monkeypatch.setattr("memwal.memtable.snapshot.SCANNED", 0)
    filters = [shape.format(x=column, z=zero) for shape in split(SHAPES) for zero in ZEROS]
    assert check(dataset, filters) > len(filters) / 2


def test_other_comparisons_with_zeros_stay_as_they_are(dataset: lance.LanceDataset) -> None:
    filters = split(OTHERS)
    assert check(dataset, filters) > len(filters) / 2


def test_only_a_comparison_with_a_zero_is_changed() -> None:
    for filter in ("i IN (0, 7)", "array_length(l) IN (70, 8)", "w = 0", "m NOT IN (0, 1)", "abs(w) = 0"):
        assert ("+ 0.0" in translate(filter, SCHEMA)) == ("abs" in filter)
    assert translate("f IN (1, 0, 2)", SCHEMA) == '("f" in (1, 0, 2) OR ("f" + 0.0) = 0.0)'
    assert translate("st.g = 10 or f=0", SCHEMA).endswith('or ("f" + 0.0) = 0.0')
