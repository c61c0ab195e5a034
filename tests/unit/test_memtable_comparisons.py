"""Filters that Arrow evaluates select the rows that DataFusion selects."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.memtable import IndexSpec, InvalidRows, MemTable, Snapshot, row_schema
from memwal.memtable import snapshot as snapshot_module
from memwal.memtable.filter.predicate import plan

TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "small": pa.int8(),
    "big": pa.uint64(),
    "name": pa.string(),
    "long": pa.large_string(),
    "day": pa.date32(),
    "done": pa.bool_(),
    "weight": pa.float64(),
    "at": pa.timestamp("us"),
}
NAMES = ("", "a", "ab", "b", "B", "é", "it''s", "z%")
DAYS = [datetime.date(2024, 1, 1) + datetime.timedelta(days) for days in (-400, 0, 1, 31)]
LITERALS: dict[str, list[str]] = {
    "id": ["-3", "0", "2", "7", "300"],
    "small": ["-128", "0", "2", "127"],
    "big": ["0", "2", "9223372036854775807"],
    "name": [f"'{name}'" for name in NAMES],
    "long": [f"'{name}'" for name in NAMES],
    "day": [f"date '{day}'" for day in DAYS],
    "done": ["true", "false"],
}
VALUES: dict[str, list[Any]] = {
    "id": [*range(8), -3],
    "small": [None, -128, 0, 2, 127],
    "big": [None, 0, 2, 2**63 - 1, 2**64 - 1],
    "name": [None, *(name.replace("''", "'") for name in NAMES), "ab "],
    "long": [None, *(name.replace("''", "'") for name in NAMES)],
    "day": [None, *DAYS],
    "done": [None, True, False],
    "weight": [None, float("nan"), -0.0, 1.5],
    "at": [None, 1_704_067_200_000_000],
}


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    """Return 4,200 rows with every value and with nulls, in several batches."""
    schema = row_schema(pa.schema([pa.field(n, kind, nullable=n != "id") for n, kind in TYPES.items()]), [])
    table = MemTable(schema, [], [IndexSpec("small", "btree", {}), IndexSpec("name", "btree", {})], 1)
    for first in range(0, 4_200, 1_400):
        columns = {
            name: pa.array(
                [values[(at * 7 + at // 13) % len(values)] for at in range(first, first + 1_400)], TYPES[name]
            )
            for name, values in VALUES.items()
        }
        rows = pa.table(columns).append_column("_tombstone", pa.array([False] * 1_400))
        table.apply(rows.cast(schema))
    return table.snapshot()


def comparisons() -> st.SearchStrategy[str]:
    columns = st.sampled_from(list(LITERALS))

    def compared(column: str) -> st.SearchStrategy[str]:
        literal = st.sampled_from(LITERALS[column])
        signs = st.sampled_from(["=", "<", "<=", ">", ">="])
        several = st.lists(st.one_of(literal, st.just("NULL")), min_size=1, max_size=4)
        forms = [
            st.builds("{} {} {}".format, st.just(column), signs, literal),
            st.builds("{} {} {}".format, literal, signs, st.just(column)),
            st.builds("{} BETWEEN {} AND {}".format, st.just(column), literal, literal),
            several.map(lambda values: f"{column} IN ({', '.join(values)})"),
            st.sampled_from([f"{column} IS NULL", f"{column} IS NOT NULL"]),
        ]
        if column == "done":
            forms = [*forms[3:], st.sampled_from(["done", "NOT done", "done = true", "done IS TRUE"])]
        return st.one_of(forms)

    leaf = columns.flatmap(compared)
    joined = lambda part: st.builds("({} {} {})".format, part, st.sampled_from(["AND", "OR"]), part)  # noqa: E731
    return st.recursive(leaf, joined, max_leaves=5)


@given(predicate=comparisons(), data=st.data())
def test_arrow_selects_what_datafusion_selects(snapshot: Snapshot, predicate: str, data: Any) -> None:
    masks = [snapshot.live(), snapshot.live() & (snapshot.take(np.arange(snapshot.n), ["id"])["id"].to_numpy() < 3)]
    mask = masks[data.draw(st.integers(0, 1))]
    found = snapshot.where(predicate, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_module, "plan", lambda *given: replace(plan(*given), exact=None))
        assert found.tolist() == snapshot.where(predicate, mask).tolist()


@pytest.mark.parametrize(
    "predicate",
    [
        "id = 3",
        "3 < id",
        "small >= -1 AND small < 7 AND name IN ('a', 'b')",
        "name = 'a' OR day > date '2024-01-01' OR done",
        "big IS NOT NULL AND long <= 'ab'",
        "ID BETWEEN 1 AND 5",
    ],
)
def test_filters_of_comparisons_are_for_arrow(snapshot: Snapshot, predicate: str) -> None:
    assert plan(predicate, snapshot.schema, ("small", "name")).exact is not None


@pytest.mark.parametrize(
    "predicate",
    [
        "weight > 1.0",  # NaN is the largest number, and a literal may be rounded
        "weight IS NULL AND weight > 1.0",
        "at >= timestamp '2024-01-01 00:00:00'",
        "name LIKE 'a%'",
        "id = 3 AND name LIKE 'a%'",
        "id = 3 OR length(name) = 1",
        "NOT (id = 3)",
        "id <> 3",
        "id IS DISTINCT FROM 3",
        "small = 300",  # no value of the column's type
        "id = 2.0",
        "id + 1 = 3",
        "name = 3",
        "id NOT IN (1, 2)",
    ],
)
def test_other_filters_are_for_datafusion(snapshot: Snapshot, predicate: str) -> None:
    assert plan(predicate, snapshot.schema, ("small", "name")).exact is None


@pytest.mark.parametrize(
    "predicate",
    [
        "done ISNULL",
        "small NOTNULL",
        "(done ISNULL) OR id = 3",
        "id < 99 {# x #} AND done",
        "id BETWEEN SYMMETRIC 5 AND 2",
        "id IN (1, 2,)",
        "!done",
    ],
)
def test_what_only_our_parser_understands_is_refused(snapshot: Snapshot, predicate: str) -> None:
    """Lance evaluates some of these predicates only up to the part that it cannot parse. A memtable must not evaluate
    more than Lance, so it refuses them."""
    for _ in range(2):
        with pytest.raises(InvalidRows):
            snapshot.where(predicate, snapshot.live())
