"""A memtable against a list of rows: every read of the newest state and of kept snapshots, after any order of calls.

The oracle has no indexes. It computes the answer of a snapshot from the rows put before the snapshot: the newest row of
each key without deleted rows, then the filter, then the k nearest or the matching rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memwal.memtable import (
    TOMBSTONE,
    IndexSpec,
    InvalidRows,
    MemTable,
    MemTableFrozen,
    Snapshot,
    batch_store,
    row_schema,
    tombstones,
    with_tombstone,
)
from memwal.memtable.filter import scalar_index
from memwal.memtable.vector import index as vector_index
from tests.index_modes import memtable_in

WIDTH = 4
WORDS = ("ash", "birch", "cedar", "elm")
KEY_FIELDS: dict[str, list[tuple[str, pa.DataType]]] = {
    "int64": [("number", pa.int64())],
    "string": [("name", pa.string())],
    "two strings": [("left", pa.string()), ("right", pa.string())],
    "mixed": [("day", pa.int32()), ("raw", pa.binary()), ("flag", pa.bool_())],
    "none": [],  # every row stays, also identical ones
}
KEYS: dict[str, list[tuple[Any, ...]]] = {
    "int64": [(n,) for n in (0, 1, -1, 2, -(2**63), 2**63 - 1, 2**53 + 1, 2**53)],
    "string": [(text,) for text in ("", "a", "ab", "a\0", "b", "é", "it's", "zz" * 40)],
    "two strings": [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("", ""), ("b", "a"), ("b", "b"), ("é", "\0")],
    "mixed": [(day, raw, flag) for day in (-1, 3) for raw in (b"", b"\xff\0") for flag in (False, True)],
    "none": [()] * 8,
}
VECTORS = st.none() | st.tuples(*[st.integers(-3, 3).map(float)] * WIDTH)
TEXTS = st.none() | st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join)
VALUES = st.tuples(st.integers(0, 7), st.none() | st.integers(0, 9), TEXTS, VECTORS)
DELETES = st.tuples(st.integers(0, 7), st.none(), st.none(), st.none(), st.just(True))
ROWS = st.lists(VALUES | VALUES | DELETES, max_size=8)
AGES = st.integers(0, 3)


@dataclass(frozen=True)
class Row:
    """One row of the oracle."""

    key: tuple[Any, ...]
    price: int | None = None
    text: str | None = None
    vector: tuple[float, ...] | None = None
    deleted: bool = False


@dataclass(frozen=True)
class Filter:
    """A predicate as SQL and as a function. `passes` is true if and only if the SQL is true, so never for a null."""

    sql: str
    passes: Callable[[Row], bool]


def price_filter(low: int, high: int, shape: int) -> Filter:
    """Return a filter over price and text in one of the possible shapes."""
    word = WORDS[low % len(WORDS)]
    return (
        Filter(
            f"price >= {low} AND price < {high}",
            lambda row: row.price is not None and low <= row.price < high,
        ),
        Filter(f"price IN ({low}, {high})", lambda row: row.price in (low, high)),
        Filter(f"price BETWEEN {low} AND {high}", lambda row: row.price is not None and low <= row.price <= high),
        Filter("price IS NULL", lambda row: row.price is None),
        Filter(f"price <> {low}", lambda row: row.price is not None and row.price != low),
        Filter(f"price = {low} OR text IS NULL", lambda row: row.price == low or row.text is None),
        Filter(
            f"{low} <= price AND text LIKE '%{word}%'",
            lambda row: row.price is not None and low <= row.price and word in (row.text or ""),
        ),
        Filter("true", lambda row: True),
    )[shape]


FILTERS = st.builds(price_filter, st.integers(0, 9), st.integers(0, 9), st.integers(0, 7))


def distance(metric: str, query: Sequence[float], vector: Sequence[float]) -> float:
    """Return Lance's distance: squared L2; 1 - cosine; 1 - dot product."""
    inner = sum(a * b for a, b in zip(query, vector, strict=True))
    if metric == "dot":
        return 1 - inner
    if metric == "cosine":
        return float(1 - inner / (np.linalg.norm(query) * np.linalg.norm(vector)))
    return sum((a - b) ** 2 for a, b in zip(query, vector, strict=True))


class AgainstTheOracle(RuleBasedStateMachine):
    """The state machine. `rows`: all rows put into the active memtable. `kept`: snapshots with their expected rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.kept: list[tuple[Snapshot, list[Row]]] = []
        self.tables: list[MemTable] = []
        self.rows: list[Row] = []

    def teardown(self) -> None:
        for snapshot, rows in self.kept:  # whatever was put, indexed or frozen since
            self.check_all(snapshot, rows)
        self.patch.undo()

    @initialize(
        kind=st.sampled_from(sorted(KEY_FIELDS)),
        metric=st.sampled_from(["l2", "cosine", "dot"]),
        half=st.booleans(),
        mode=st.sampled_from(["sync", "async"]),
        train_rows=st.sampled_from([2, 4, 1_000]),
    )
    def create(self, kind: str, metric: str, half: bool, mode: str, train_rows: int) -> None:
        # Small limits, so that quantiser, sorted runs and merged batches are used; a search still fetches every row.
        self.patch.setattr(vector_index, "EXACT_ROWS", 0)
        self.patch.setattr(scalar_index, "LOOKS", 1)
        self.patch.setattr(batch_store, "MERGE_AT", 3)
        self.kind, self.metric, self.mode = kind, metric, mode
        keys = [pa.field(name, type, nullable=False) for name, type in KEY_FIELDS[kind]]
        number = pa.float16() if half else pa.float32()
        values = [("price", pa.int64()), ("text", pa.string()), ("vector", pa.list_(number, WIDTH))]
        self.schema = row_schema(pa.schema([*keys, *values]), [field.name for field in keys])
        self.key = [field.name for field in keys]
        self.indexes = [
            IndexSpec("vector", "ivf_pq", {"metric": metric, "train_rows": train_rows}),
            IndexSpec("text", "fts"),
            IndexSpec("price", "btree"),
        ]
        self.open()

    def open(self) -> None:
        generation = len(self.tables) + 1
        self.table = memtable_in(self.mode, self.schema, self.key, self.indexes, generation)
        self.tables.append(self.table)
        self.rows = []

    # ---- writing ---------------------------------------------------------------------------------------------------

    def arrow_keys(self, keys: Sequence[tuple[Any, ...]]) -> pa.Table:
        columns = {
            name: pa.array([key[place] for key in keys], self.schema.field(name).type)
            for place, name in enumerate(self.key)
        }
        return pa.table(columns)

    def arrow_rows(self, rows: Sequence[Row]) -> pa.Table:
        keys = self.arrow_keys([row.key for row in rows])
        values = {
            "price": pa.array([row.price for row in rows], pa.int64()),
            "text": pa.array([row.text for row in rows], pa.string()),
            "vector": pa.array([row.vector for row in rows], pa.list_(pa.float32(), WIDTH)),
        }
        table = with_tombstone(pa.table(dict(zip(keys.column_names, keys.columns, strict=True)) | values), self.schema)
        deleted = pa.array([row.deleted for row in rows], pa.bool_())
        return table.set_column(table.num_columns - 1, self.schema.field(TOMBSTONE), deleted)

    @rule(batch=ROWS, checked=st.booleans())
    def put(self, batch: list[tuple[Any, ...]], checked: bool) -> None:
        """Put rows that may delete; their keys may occur twice, exist already, or be deleted."""
        rows = [Row(KEYS[self.kind][each[0]], *each[1:]) for each in batch if self.key or len(each) == 4]
        table = self.arrow_rows(rows)
        self.table.apply(self.table.check(table) if checked else table)
        self.rows += rows

    @precondition(lambda self: self.key)
    @rule(numbers=st.lists(st.integers(0, 7), max_size=5))
    def delete(self, numbers: list[int]) -> None:
        keys = [KEYS[self.kind][number] for number in numbers]
        self.table.apply(tombstones(self.arrow_keys(keys), self.schema))
        self.rows += [Row(key, deleted=True) for key in keys]

    @rule(steps=st.integers(1, 4), back=st.integers(1, 3))
    def index(self, steps: int, back: int) -> None:
        """Index some of the waiting rows, possibly of a frozen memtable."""
        table = self.tables[-min(back, len(self.tables))]
        for _ in range(steps):
            table.index_step()

    @precondition(lambda self: len(self.rows) > 12 and len(self.tables) < 3)
    @rule()
    def freeze(self) -> None:
        self.keep()
        self.table.freeze()
        with pytest.raises(MemTableFrozen):
            self.table.apply(self.arrow_rows([Row(KEYS[self.kind][0])]))
        self.keep()
        self.open()

    @rule()
    def keep(self) -> None:
        self.kept.append((self.table.snapshot(), list(self.rows)))

    # ---- the oracle ------------------------------------------------------------------------------------------------

    def taken(self, age: int) -> tuple[Snapshot, list[Row]]:
        """Return the current state, or a kept one."""
        if age == 0 or not self.kept:
            return self.table.snapshot(), self.rows
        return self.kept[-min(age, len(self.kept))]

    def newest(self, rows: list[Row]) -> dict[Any, int]:
        return {row.key if self.key else position: position for position, row in enumerate(rows)}

    def live(self, rows: list[Row], filter: Filter | None = None) -> list[int]:
        newest = (position for position in self.newest(rows).values() if not rows[position].deleted)
        return sorted(position for position in newest if filter is None or filter.passes(rows[position]))

    def masked(self, snapshot: Snapshot, rows: list[Row], filter: Filter | None) -> tuple[np.ndarray, list[int]]:
        """Return the memtable's mask of the rows that pass; assert that it equals the oracle's."""
        mask = snapshot.live() if filter is None else snapshot.where(filter.sql, snapshot.live())
        wanted = self.live(rows, filter)
        assert np.flatnonzero(mask).tolist() == wanted, filter
        return mask, wanted

    # ---- reading ---------------------------------------------------------------------------------------------------

    @rule(age=AGES, numbers=st.lists(st.integers(0, 7), max_size=6))
    def get(self, age: int, numbers: list[int]) -> None:
        snapshot, rows = self.taken(age)
        self.check_lookup(snapshot, rows, [KEYS[self.kind][number] for number in numbers])

    def check_lookup(self, snapshot: Snapshot, rows: list[Row], keys: list[tuple[Any, ...]]) -> None:
        if not self.key:
            with pytest.raises(InvalidRows):
                snapshot.lookup(pa.table({"price": [1]}))
            return
        newest = self.newest(rows)
        assert snapshot.lookup(self.arrow_keys(keys)).tolist() == [newest.get(key, -1) for key in keys]

    @rule(age=AGES)
    def scan(self, age: int) -> None:
        snapshot, rows = self.taken(age)
        assert snapshot.n == len(rows)
        newest = sorted(self.newest(rows).values())
        assert np.flatnonzero(snapshot.newest()).tolist() == newest
        assert snapshot.tombstone().tolist() == [row.deleted for row in rows]
        found = snapshot.take(np.flatnonzero(snapshot.live())).to_pylist()
        assert [tuple(row[name] for name in self.key) for row in found] == [rows[n].key for n in self.live(rows)]
        for name in ("price", "text"):
            assert [row[name] for row in found] == [getattr(rows[n], name) for n in self.live(rows)]
        wanted = [rows[n].vector for n in self.live(rows)]
        assert [None if row["vector"] is None else tuple(map(float, row["vector"])) for row in found] == wanted
        if self.key:
            kept_keys = snapshot.keys(snapshot.newest()).to_pylist()
            assert [tuple(row.values()) for row in kept_keys] == [rows[n].key for n in newest]

    @rule(age=AGES, filter=FILTERS)
    def scan_with_filter(self, age: int, filter: Filter) -> None:
        self.masked(*self.taken(age), filter)

    @precondition(lambda self: self.key)
    @rule(age=AGES, low=st.integers(0, 7), high=st.integers(0, 7), shape=st.integers(0, 3), filter=st.none() | FILTERS)
    def key_range(self, age: int, low: int, high: int, shape: int, filter: Filter | None) -> None:
        """Check ranges over the first key column, alone or with another condition."""
        name, ends = self.key[0], [KEYS[self.kind][n][0] for n in (low, high)]
        below, above = [literal(end) for end in ends]
        key, passes = (
            (f"{name} >= {below} AND {name} < {above}", lambda value: ends[0] <= value < ends[1]),
            (f"{name} BETWEEN {below} AND {above}", lambda value: ends[0] <= value <= ends[1]),
            (f"{name} IN ({below}, {above})", lambda value: value in ends),
            (f"{below} < {name}", lambda value: ends[0] < value),
        )[shape]
        both = Filter(
            key if filter is None else f"{key} AND ({filter.sql})",
            lambda row: passes(row.key[0]) and (filter is None or filter.passes(row)),
        )
        self.masked(*self.taken(age), both)

    @rule(age=AGES, query=VECTORS.filter(bool), k=st.integers(1, 12), filter=st.none() | FILTERS)
    def search(self, age: int, query: tuple[float, ...], k: int, filter: Filter | None) -> None:
        self.check_search(*self.taken(age), query, k, filter)

    def check_search(
        self, snapshot: Snapshot, rows: list[Row], query: tuple[float, ...], k: int, filter: Filter | None
    ) -> None:
        mask, passing = self.masked(snapshot, rows, filter)
        cosine = self.metric == "cosine"
        true = {
            n: distance(self.metric, query, vector)
            for n in passing
            if (vector := rows[n].vector) is not None and not (cosine and not (any(vector) and any(query)))
        }
        positions, distances = snapshot.search("vector", np.array(query), k, mask)
        assert len(set(positions.tolist())) == len(positions)
        assert distances.tolist() == pytest.approx([true[n] for n in positions.tolist()], rel=1e-5, abs=1e-6)
        assert distances.tolist() == pytest.approx(sorted(true.values())[:k], rel=1e-5, abs=1e-6)

    @rule(
        age=AGES,
        words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
        k=st.sampled_from([1, 3, 1_000]),
        filter=st.none() | FILTERS,
    )
    def match(self, age: int, words: list[str], k: int, filter: Filter | None) -> None:
        self.check_match(*self.taken(age), words, k, filter)

    def check_match(self, snapshot: Snapshot, rows: list[Row], words: list[str], k: int, filter: Filter | None) -> None:
        mask, passing = self.masked(snapshot, rows, filter)
        wanted = {n for n in passing if set(words) & set((rows[n].text or "").split())}
        positions, scores = snapshot.match("text", " ".join(words), k, mask)
        assert len(set(positions.tolist())) == len(positions) == min(k, len(wanted))
        assert set(positions.tolist()) <= wanted
        assert (scores > 0).all()
        assert (np.diff(scores) <= 0).all()

    def check_all(self, snapshot: Snapshot, rows: list[Row]) -> None:
        """Check every kind of read of one snapshot."""
        assert snapshot.n == len(rows)
        self.check_lookup(snapshot, rows, KEYS[self.kind])
        for filter in (None, price_filter(2, 7, 0), price_filter(2, 7, 5)):
            self.check_search(snapshot, rows, (1.0, 0.0, -2.0, 3.0), 5, filter)
            self.check_match(snapshot, rows, [WORDS[0], WORDS[3]], 1_000, filter)

    @invariant()
    def sizes(self) -> None:
        if self.tables:
            assert self.table.rows == len(self.rows)
            usage = self.table.usage()
            assert min(usage.values()) >= 0
            assert self.key or usage["key"] <= 4096
            assert self.table.bytes == sum(usage.values())


def literal(value: Any) -> str:
    """Return a key value as SQL."""
    if isinstance(value, str):
        quoted = value.replace("'", "''")
        return f"'{quoted}'"
    return str(value)


TestAgainstTheOracle = AgainstTheOracle.TestCase
TestAgainstTheOracle.settings = settings(
    max_examples=settings().max_examples * 6 // 10, stateful_step_count=35, deadline=None
)
