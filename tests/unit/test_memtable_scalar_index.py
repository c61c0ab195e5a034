"""Columns sorted by value: the index misses no row that may pass, and returns few others."""

import datetime
import tracemalloc
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.memtable import IndexSpec, InvalidRows, MemTable, row_schema, snapshot
from memwal.memtable import with_tombstone as rows_of
from memwal.memtable.arrays import Mask, Positions
from memwal.memtable.filter import conditions as exact
from memwal.memtable.filter import predicate
from memwal.memtable.filter.conditions import Columns, Narrowing
from memwal.memtable.filter.scalar_index import Asked, ScalarIndex, sort_form
from tests.conftest import extent
from tests.messages import raises
from tests.support.together import together

TEXTS = st.text(st.sampled_from("ab\0é🙂 z\uffff"), max_size=4)
FLOATS = [-np.inf, -1.5, -0.0, 0.0, 0.1, 0.2, 2.0, 1e30, np.inf, np.nan]
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    **{
        kind: st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1) | st.integers(-3, 3)
        for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())
    },
    **{
        kind: st.integers(0, 2**kind.bit_width - 1) | st.integers(0, 4)
        for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
    },
    pa.float32(): st.sampled_from([float(np.float32(value)) for value in FLOATS]),
    pa.float64(): st.sampled_from(FLOATS),
    pa.bool_(): st.booleans(),
    pa.string(): TEXTS,
    pa.large_string(): TEXTS,
    pa.binary(): TEXTS.map(str.encode) | st.binary(max_size=2),
    pa.date32(): st.dates(datetime.date(1969, 12, 30), datetime.date(1970, 1, 3)) | st.dates(),
    pa.timestamp("us"): st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
}


def numbers(array: pa.Array) -> list[Any]:
    """Return the values as Python compares them: text by its bytes, times as integers."""
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    return [value.encode() if isinstance(value, str) else value for value in array.to_pylist()]


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[pa.Array], list[tuple[int, Asked]]]:
    """Draw the chunks of one column, and the conditions to evaluate after each of them."""
    kind = draw(st.sampled_from(list(VALUES)))
    chunks = draw(st.lists(st.lists(st.none() | VALUES[kind], max_size=8), min_size=1, max_size=8))
    known = VALUES[kind].filter(lambda value: value == value)
    asked = []
    for _ in range(draw(st.integers(1, 6))):
        low, high = (
            sort_form(pa.array(draw(st.lists(known, min_size=1, max_size=3, unique=True)), kind)) for _ in "lh"
        )
        shape = draw(st.sampled_from(["range", "low", "high", "in", "null", "any"]))
        low = low if shape == "in" else low.slice(0, 1)
        made = {
            "range": Asked(low, high.slice(0, 1), draw(st.booleans()), draw(st.booleans())),
            "low": Asked(low=low, low_inclusive=draw(st.booleans())),
            "high": Asked(high=high.slice(0, 1), high_inclusive=draw(st.booleans())),
            "in": Asked(low, low),
            "null": Asked(nulls=True),
            "any": Asked(),
        }
        asked.append((draw(st.integers(0, len(chunks))), made[shape]))
    return [pa.array(chunk, kind) for chunk in chunks], asked


def passes(asked: Asked, value: Any) -> bool:
    if value is None or asked.nulls:
        return value is None and asked.nulls
    lows = [None] if asked.low is None else numbers(asked.low)
    highs = [None] if asked.high is None else numbers(asked.high)
    return value != value or any(
        (low is None or value > low or (asked.low_inclusive and value == low))
        and (high is None or value < high or (asked.high_inclusive and value == high))
        for low, high in zip(lows, highs, strict=True)
    )


@settings(max_examples=extent(100, 300))
@given(columns(), st.sampled_from([0, 1, 3, 10**9]), st.sampled_from([4, 131_072]))
def test_exactly_the_rows_asked_for_are_named_and_those_not_sorted_yet(
    column: tuple[list[pa.Array], list[tuple[int, Asked]]], looks: int, longest: int
) -> None:
    chunks, questions = column
    index = ScalarIndex(chunks[0].type)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memwal.memtable.filter.scalar_index.LOOKS", looks)
        patch.setattr("memwal.memtable.filter.scalar_index.LONGEST_RUN", longest)
        for upto, asked in questions:
            held = pa.chunked_array(chunks[:upto], chunks[0].type)
            values = [value for chunk in chunks[:upto] for value in numbers(chunk)]
            found = index.candidates(asked, lambda held=held: held, len(held), limit=10**9)  # type: ignore[misc]
            assert found is not None
            wanted = {row for row, value in enumerate(values) if passes(asked, value)}
            unsorted = min({*found.tolist()} - wanted, default=len(held))
            assert sorted(found.tolist()) == sorted({*wanted, *range(unsorted, len(held))})
            assert looks or unsorted == len(held)
            assert index.candidates(asked, lambda held=held: held, len(held), limit=-1) is None  # type: ignore[misc]


def test_waiting_rows_are_sorted_once_they_were_looked_at_often() -> None:
    index, column = ScalarIndex(pa.int64()), pa.chunked_array([np.arange(1_000)])
    one = Asked(pa.array([7]), pa.array([7]))
    named = [len(index.candidates(one, lambda: column, 1_000, 10**9)) for _ in range(9)]  # type: ignore[arg-type]
    assert named == [1_000] * 7 + [1] * 2


def test_runs_stay_few_and_none_grows_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal.memtable.filter.scalar_index.LOOKS", 0)
    monkeypatch.setattr("memwal.memtable.filter.scalar_index.LONGEST_RUN", 4_000)
    index, values = ScalarIndex(pa.int64()), np.random.default_rng(1).permutation(20_000)
    for n in range(0, 20_001, 100):
        index.candidates(Asked(), lambda n=n: pa.chunked_array([values[:n]]), n, 10**9)  # type: ignore[misc]
        lengths = [len(run) for run in index._sorted.runs]
        assert max(lengths, default=0) <= 4_000
        assert len(lengths) <= 2 * n / 4_000 + 8


def test_readers_of_different_snapshots_share_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal.memtable.filter.scalar_index.LOOKS", 0)
    values = np.random.default_rng(2).permutation(20_000)
    index = ScalarIndex(pa.int64())

    def read(seed: int) -> None:
        for n in np.random.default_rng(seed).integers(1, 20_000, 100):
            low = int(values[n // 2])
            asked = Asked(pa.array([low]), pa.array([low + 3]))
            found = index.candidates(asked, lambda n=n: pa.chunked_array([values[:n]]), n, 10**9)  # type: ignore[misc]
            assert found is not None
            wanted = np.flatnonzero((values[:n] >= low) & (values[:n] <= low + 3))
            assert set(wanted) <= set(found.tolist()) <= set(range(n))

    together(*(partial(read, seed) for seed in range(4)))


@pytest.mark.parametrize("kind", [pa.int64(), pa.float32(), pa.string()])
def test_what_it_holds_is_counted(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal.memtable.filter.scalar_index.LOOKS", 0)
    numbers = np.random.default_rng(3).integers(0, 10**6, 60_000)
    column = pa.array([f"name-{number}" for number in numbers]) if kind == pa.string() else pa.array(numbers).cast(kind)
    chunks = [column.slice(first, 1_000) for first in range(0, len(column), 1_000)]
    index = ScalarIndex(kind)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    for count in range(1, len(chunks) + 1):
        index.candidates(Asked(), lambda count=count: pa.chunked_array(chunks[:count]), 1_000 * count, 10**9)  # type: ignore[misc]
    grown = pa.total_allocated_bytes() - before + tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * grown <= index.bytes <= 1.2 * grown


# ---- in a memtable -------------------------------------------------------------------------------------------------


def memtable(data: Sequence[pa.Table], key: Sequence[str], indexed: Sequence[str] = ()) -> MemTable:
    schema = row_schema(pa.schema([field.with_nullable(field.name not in key) for field in data[0].schema]), key)
    table = MemTable(schema, key, [IndexSpec(name, "btree") for name in indexed], 1)
    for rows in data:
        table.apply(rows_of(rows, schema))
    return table


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of rows that each filter is evaluated on; indexes are sorted at once."""
    counts: list[int] = []

    def counting(text: str, sql: str, rows: pa.Table, positions: Positions, n: int) -> Any:
        counts.append(len(positions))
        return predicate.evaluate(text, sql, rows, positions, n)

    def counting_arrow(conditions: Narrowing, column: Columns) -> Mask:
        counts.append(len(column(conditions.columns[0])))
        return exact.satisfied(conditions, column)

    monkeypatch.setattr("memwal.memtable.filter.scalar_index.LOOKS", 0)
    monkeypatch.setattr(snapshot, "evaluate", counting)
    monkeypatch.setattr(snapshot, "satisfied", counting_arrow)
    return counts


N = 10_000
MANY = pa.table(
    {
        "id": np.random.default_rng(5).permutation(N),
        "name": [f"package-{number:05d}" for number in range(N)],
        "u": np.arange(N, dtype=np.uint64) + np.uint64(2**63),
        "x": np.arange(N) / 8,
        "rare": pa.array([row % 1_000 == 3 or None for row in range(N)], pa.bool_()),
        "day": pa.array(np.arange(N, dtype=np.int32), pa.date32()),
        "at": pa.array(np.arange(N) * 1_000_000, pa.timestamp("us")),
        "raw": [number.to_bytes(4, "big") for number in range(N)],
        "some": pa.array([None if row % 500 else row for row in range(N)], pa.int64()),
        "most": pa.array([row if row % 500 else None for row in range(N)], pa.int16()),
    }
)


@pytest.mark.parametrize(
    ("condition", "most"),
    [
        ("id = 17", 1),
        ("17 = id", 1),
        ("id >= 17 AND id < 27", 10),
        ("id < 27 AND name IS NOT NULL AND id >= 17", 10),
        ("id BETWEEN 17 AND 26", 10),
        ("id IN (1, 5, 17, NULL)", 3),
        (f"id IN ({', '.join(map(str, range(0, N, 100)))})", 100),
        ("id = 17 OR name = 'package-00044' OR (id > 9990 AND id <= 9995)", 7),
        ("name = 'package-00017'", 1),
        ("name LIKE 'package-0001%'", 10),
        ("name LIKE 'package-0001_' AND x > 0", 10),
        ("name > 'package-0001' AND name < 'package-0002'", 10),
        ("name IN ('package-00017', 'other')", 1),
        (f"u = {2**63 + 7}", 1),
        (f"u >= {2**63 + 7} AND u <= {2**63 + 9}", 3),
        ("x = 17.125", 1),
        ("x IN (1.0, 2.5, 100)", 3),
        ("x > 17 AND x <= 18", 10),
        ("rare", 10),
        ("rare = true", 10),
        ("rare IS TRUE", 10),
        ("NOT rare", 0),
        ("day = date '1970-02-01'", 1),
        ("day >= date '1970-02-01' AND day < date '1970-02-11'", 10),
        ("at = timestamp '1970-01-01 00:00:07'", 1),
        ("at < timestamp '1970-01-01 00:00:07'", 7),
        ("raw = X'00000011'", 1),
        ("raw < X'00000011'", 17),
        ("some IS NOT NULL", 20),
        ("most IS NULL", 20),
        ("(id < 200 AND x < 20) AND most IS NULL", 20),
    ],
)
def test_a_selective_condition_is_evaluated_on_few_rows(condition: str, most: int, evaluated: list[int]) -> None:
    indexed = memtable([MANY], ["id"], set(MANY.column_names) - {"id"}).snapshot()
    plain = memtable([MANY], []).snapshot()  # a key has an index too
    mask = indexed.where(condition, indexed.live())
    assert evaluated[-1] <= most
    assert mask.tolist() == plain.where(condition, plain.live()).tolist()
    assert evaluated[-1] == N


def test_a_filter_that_no_row_can_pass_is_checked_once(evaluated: list[int]) -> None:
    found = memtable([MANY], ["id"]).snapshot()
    for _ in range(2):
        assert not found.where("id = -1 AND x > 0", found.live()).any()
    assert evaluated == [0]
    for _ in range(2):
        with raises(InvalidRows):
            found.where("id = -1 AND nosuch > 0", found.live())


def test_every_version_of_a_key_is_named(evaluated: list[int]) -> None:
    found = memtable([MANY] * 3, ["id"]).snapshot()
    row = MANY["id"].to_pylist().index(17)
    every = found.where("id = 17", np.ones(found.n, dtype=bool))
    assert np.flatnonzero(every).tolist() == [row, row + N, row + 2 * N]
    assert np.flatnonzero(found.where("id = 17", found.live())).tolist() == [row + 2 * N]
    assert evaluated == [3, 1]
