"""Routing of rows without a key is a pure function of their values; golden values hold it fixed."""

from __future__ import annotations

import decimal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.flush import BaseTable
from memwal.flush.base.row_hash import is_hashed, row_hashes
from tests.conftest import ROOT, environment

COLUMNS: dict[str, tuple[pa.DataType, list[Any], str]] = {
    "int8": (pa.int8(), [1, -1, None], "297aebda250168b4 68ec67a62b8ffc69 0000000000000000"),
    "int64": (pa.int64(), [1, -(2**63), None], "297aebda250168b4 f7a99e8789879ac0 0000000000000000"),
    "uint64": (pa.uint64(), [2**64 - 1, 0, None], "3510b7f3835b7f9f 49b429aec464ced6 0000000000000000"),
    "bool": (pa.bool_(), [True, False, None], "297aebda250168b4 49b429aec464ced6 0000000000000000"),
    "half": (
        pa.float16(),
        [np.float16(1.5), np.float16(0), None],
        "5bf9a192c36d0758 49b429aec464ced6 0000000000000000",
    ),
    "float": (
        pa.float32(),
        [0.0, -0.0, float("nan"), 1.25, None],
        "49b429aec464ced6 49b429aec464ced6 3510b7f3835b7f9f 1b055f699fc9a7cb 0000000000000000",
    ),
    "double": (pa.float64(), [0.1, -1e300, None], "cfb361c1b741bed8 00259678ba5150cc 0000000000000000"),
    "text": (
        pa.string(),
        ["", "a", "ä" * 9, None],
        "8f330c5100d4c481 d1ec100d6548e271 5ffc420bb3b3937a 0000000000000000",
    ),
    "large text": (pa.large_string(), ["", "a", None], "8f330c5100d4c481 d1ec100d6548e271 0000000000000000"),
    "bytes": (pa.binary(), [b"\x00", b"a", None], "183b490538185462 d1ec100d6548e271 0000000000000000"),
    "fixed bytes": (pa.binary(3), [b"abc", b"abd", None], "40374bff9dfe44b6 33bbccca5f86701d 0000000000000000"),
    "decimal": (
        pa.decimal128(20, 2),
        [decimal.Decimal("1.50"), decimal.Decimal(-1), None],
        "586836994a5194db 04b1b95afe75ca6f 0000000000000000",
    ),
    "date": (pa.date32(), [0, 19_000, None], "49b429aec464ced6 c036d691beff4857 0000000000000000"),
    "timestamp": (pa.timestamp("us", "UTC"), [0, 1, None], "49b429aec464ced6 297aebda250168b4 0000000000000000"),
    "list": (
        pa.list_(pa.int32()),
        [[1, 2], [2, 1], [], [None], None],
        "a38487b8e4b4d85f bdc280d7c184de3e 49b429aec464ced6 297aebda250168b4 0000000000000000",
    ),
    "nested": (
        pa.list_(pa.list_(pa.string())),
        [[["a"], []], [[], ["a"]], None],
        "4431ecf6ea8121cc 55cb1b1454acfc92 0000000000000000",
    ),
    "vector": (
        pa.list_(pa.float32(), 2),
        [[1, 2], [2, 1], [None, 1], None],
        "dab86ea1fda8e6da 7745fa9dcbac7caa 7302838f22331cd4 0000000000000000",
    ),
    "struct": (
        pa.struct([("x", pa.int32()), ("y", pa.string())]),
        [{"x": 1, "y": "a"}, {"x": 1}, None],
        "a5ddf6672c0146f9 b731bb23a58469f3 0000000000000000",
    ),
}


def hashes(kind: pa.DataType, values: list[Any], number: int = 0) -> list[int]:
    return [int(each) for each in row_hashes([(number, pa.array(values, kind))], len(values))]


@pytest.mark.parametrize("name", COLUMNS)
def test_golden_values(name: str) -> None:
    kind, values, golden = COLUMNS[name]
    assert " ".join(f"{each:016x}" for each in hashes(kind, values)) == golden


@pytest.mark.parametrize("name", COLUMNS)
def test_how_rows_are_cut_does_not_matter(name: str) -> None:
    kind, values, _ = COLUMNS[name]
    whole = pa.array([*values, *values, values[0]], kind)
    expected = row_hashes([(3, whole)], len(whole))
    for start in range(len(whole)):
        part = whole.slice(start, 2)
        assert row_hashes([(3, part)], len(part)).tolist() == expected[start : start + 2].tolist()


def test_null_adds_nothing_and_zeros_and_nans_are_one() -> None:
    assert hashes(pa.int64(), [None]) == [0]
    plus, minus, nan, other_nan = hashes(pa.float64(), [0.0, -0.0, float("nan"), -float("nan")])
    assert (plus == minus, nan == other_nan, plus == nan) == (True, True, False)


def test_what_lies_behind_a_null_does_not_matter() -> None:
    validity = pa.array([True, False]).buffers()[1]
    for junk in (1.0, 7.0):
        values = pa.array([1.0, 1.0, junk, junk], pa.float32())
        vectors = pa.Array.from_buffers(pa.list_(pa.float32(), 2), 2, [validity], children=[values])
        assert row_hashes([(0, vectors)], 2)[1] == 0


def test_columns_count_by_their_id() -> None:
    one, two = pa.array([1]), pa.array([2])
    assert row_hashes([(0, one), (1, two)], 1) == row_hashes([(1, two), (0, one)], 1)
    assert row_hashes([(0, one), (1, two)], 1) != row_hashes([(1, one), (0, two)], 1)


def test_what_may_be_routed_by() -> None:
    good = (pa.int8(), pa.float64(), pa.string(), pa.large_binary(), pa.binary(2), pa.date32(), pa.timestamp("ms"))
    bad = (pa.list_(pa.int8()), pa.list_(pa.float32(), 2), pa.struct([("a", pa.int8())]), pa.null())
    assert all(map(is_hashed, good))
    assert not any(map(is_hashed, bad))


def created(at: Path, by: list[str], buckets: int = 4) -> BaseTable:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    return BaseTable.create(str(at), schema, [], buckets, [], append_by=by)


def test_rows_are_spread_and_by_names_what_counts(tmp_path: Path) -> None:
    rows = pa.table({"a": np.arange(40_000) // 4, "b": [f"row {n}" for n in range(40_000)]})
    whole, by_a = created(tmp_path / "whole", []), created(tmp_path / "by", ["a"])
    counts = np.bincount(whole.route(rows), minlength=4)
    assert counts.min() > 9_500
    together = by_a.route(rows).reshape(-1, 4)
    assert (together == together[:, :1]).all()
    assert by_a.route(rows.select(["a"])).tolist() == together.ravel().tolist()
    chunked = pa.concat_tables([rows.slice(0, 7), rows.slice(7)])
    assert (whole.route(chunked) == whole.route(rows)).all()
    assert (whole.route(rows.combine_chunks().to_batches()[0]) == whole.route(rows)).all()


def test_a_new_or_renamed_column_moves_no_row(tmp_path: Path) -> None:
    base = created(tmp_path / "table", [])
    rows = pa.table({"a": range(1000), "b": [f"row {n}" for n in range(1000)]})
    before = base.route(rows).tolist()
    dataset = lance.dataset(base.uri)
    dataset.add_columns(pa.schema([("c", pa.float64())]))
    dataset.alter_columns({"path": "b", "name": "d"})
    renamed = rows.rename_columns(["a", "d"])
    assert base.latest().route(renamed).tolist() == before
    assert base.latest().route(renamed.append_column("c", pa.nulls(1000, pa.float64()))).tolist() == before


def test_another_process_says_the_same() -> None:
    """Python seeds its hash of strings anew in each process."""
    ask = (
        "import pyarrow as pa; from memwal.flush.base.row_hash import row_hashes;"
        "print(row_hashes([(5, pa.array(['a', 'b', 'ä']))], 3).tolist())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", ask],
            env=environment({"PYTHONHASHSEED": seed}),
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert answers == {f"{hashes(pa.string(), ['a', 'b', 'ä'], 5)}\n"}
