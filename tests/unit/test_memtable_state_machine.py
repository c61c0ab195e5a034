"""A memtable against a dict, its searches against exhaustive ones, over any order of puts and snapshots."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from memtable import (
    TOMBSTONE,
    IndexSpec,
    MemTable,
    Snapshot,
    batch_store,
    row_schema,
    scalar_index,
    vector_index,
    with_tombstone,
)

WORDS = ("ash", "birch", "cedar", "elm")
KEYS = st.tuples(st.integers(0, 6), st.sampled_from(["x", "y"]))
VECTORS = st.none() | st.tuples(*[st.integers(-3, 3).map(float)] * 2)
TEXTS = st.none() | st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join)


@dataclass(frozen=True)
class Row:
    """One row as the oracle knows it."""

    key: tuple[int, str]
    price: int | None
    text: str | None
    vector: tuple[float, float] | None
    deleted: bool


ROWS = st.builds(Row, KEYS, st.none() | st.integers(0, 20), TEXTS, VECTORS, st.just(False))
DELETES = st.builds(Row, KEYS, st.none(), st.none(), st.none(), st.just(True))
BATCHES = st.lists(ROWS | ROWS | DELETES, max_size=12)


class AgainstTheOracle(RuleBasedStateMachine):
    """The oracle is the list of all rows; a snapshot must answer as computed from its prefix of that list."""

    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(composite=st.booleans(), metric=st.sampled_from(["l2", "dot"]), trained=st.booleans())
    def create(self, composite: bool, metric: str, trained: bool) -> None:
        self.trained = trained
        if trained:  # limits so small that every search goes through the quantiser, every filter through a sorted run
            for limit, value in {
                "ADD_BLOCK": 2,
                "EXACT_ROWS": 0,
                "FETCH": 1,
                "FETCH_PER_K": 1,
                "PROBES": 1,
            }.items():
                self.patch.setattr(vector_index, limit, value)
            self.patch.setattr(vector_index, "ROWS_PER_LIST", 2)
            self.patch.setattr(scalar_index, "TAIL_ROWS", 2)
            self.patch.setattr(batch_store, "MERGE_AT", 3)
        self.key = ["number", "side"] if composite else ["number"]
        self.metric = metric
        self.base = pa.schema(
            [
                pa.field("number", pa.int32(), nullable=False),
                pa.field("side", pa.string(), nullable=not composite),
                ("price", pa.int64()),
                ("text", pa.string()),
                ("vector", pa.list_(pa.float32(), 2)),
            ]
        )
        self.schema = row_schema(self.base, self.key)
        vector = IndexSpec("vector", "ivf_pq", {"metric": metric, "train_rows": 4 if trained else 1_000})
        indexes = [vector, IndexSpec("text", "fts"), IndexSpec("price", "btree")]
        self.table = MemTable(self.schema, self.key, indexes, 1)
        self.rows: list[Row] = []

    @rule(batch=BATCHES)
    def apply(self, batch: list[Row]) -> None:
        columns = {
            "number": [row.key[0] for row in batch],
            "side": [row.key[1] for row in batch],
            "price": [row.price for row in batch],
            "text": [row.text for row in batch],
            "vector": [row.vector for row in batch],
        }
        arrays = [pa.array(columns[field.name], field.type) for field in self.base]
        rows = with_tombstone(pa.Table.from_arrays(arrays, schema=self.base), self.schema)
        deleted = pa.array([row.deleted for row in batch], pa.bool_())
        self.table.apply(rows.set_column(rows.num_columns - 1, self.schema.field(TOMBSTONE), deleted))
        self.rows += batch

    @rule(target=snapshots)
    def snapshot(self) -> tuple[Snapshot, list[Row]]:
        return self.table.snapshot(), list(self.rows)

    def newest(self, rows: list[Row]) -> dict[Any, int]:
        return {row.key[: len(self.key)]: position for position, row in enumerate(rows)}

    def live(self, rows: list[Row]) -> list[int]:
        return sorted(position for position in self.newest(rows).values() if not rows[position].deleted)

    @rule(taken=snapshots)
    def check_masks(self, taken: tuple[Snapshot, list[Row]]) -> None:
        snapshot, rows = taken
        assert snapshot.n == len(rows)
        assert np.flatnonzero(snapshot.newest()).tolist() == sorted(self.newest(rows).values())
        assert np.flatnonzero(snapshot.live()).tolist() == self.live(rows)
        assert snapshot.tombstone().tolist() == [row.deleted for row in rows]

    @rule(taken=snapshots)
    def check_rows(self, taken: tuple[Snapshot, list[Row]]) -> None:
        snapshot, rows = taken
        found = snapshot.take(np.flatnonzero(snapshot.live()), ["number", "side", "price", "text"]).to_pylist()
        wanted = [rows[position] for position in self.live(rows)]
        assert found == [
            {"number": row.key[0], "side": row.key[1], "price": row.price, "text": row.text} for row in wanted
        ]

    @rule(taken=snapshots, keys=st.lists(KEYS, max_size=5))
    def check_lookup(self, taken: tuple[Snapshot, list[Row]], keys: list[tuple[int, str]]) -> None:
        snapshot, rows = taken
        columns = {"side": [key[1] for key in keys], "number": [key[0] for key in keys]}
        asked = pa.table({name: pa.array(columns[name], self.base.field(name).type) for name in self.key})
        newest = self.newest(rows)
        assert snapshot.lookup(asked).tolist() == [newest.get(key[: len(self.key)], -1) for key in keys]

    @rule(taken=snapshots, low=st.integers(0, 20), number=st.integers(0, 6))
    def check_where(self, taken: tuple[Snapshot, list[Row]], low: int, number: int) -> None:
        snapshot, rows = taken
        live = [(position, rows[position]) for position in self.live(rows)]
        found = snapshot.where(f"price >= {low}", snapshot.live())
        wanted = [position for position, row in live if row.price is not None and row.price >= low]
        assert np.flatnonzero(found).tolist() == wanted
        found = snapshot.where(f"number = {number} AND text LIKE '%elm%'", snapshot.live())
        wanted = [position for position, row in live if row.key[0] == number and "elm" in (row.text or "")]
        assert np.flatnonzero(found).tolist() == wanted

    @rule(taken=snapshots, query=st.tuples(*[st.integers(-3, 3).map(float)] * 2), k=st.integers(1, 30))
    def check_search(self, taken: tuple[Snapshot, list[Row]], query: tuple[float, float], k: int) -> None:
        snapshot, rows = taken

        def distance(vector: tuple[float, float]) -> float:
            if self.metric == "dot":
                return 1 - sum(a * b for a, b in zip(query, vector, strict=True))
            return sum((a - b) ** 2 for a, b in zip(query, vector, strict=True))

        wanted = [
            (distance(vector), position)
            for position in self.live(rows)
            if (vector := rows[position].vector) is not None
        ]
        positions, distances = snapshot.search("vector", np.array(query), k, snapshot.live())
        found = list(zip(distances.tolist(), positions.tolist(), strict=True))
        if not self.trained:
            assert found == sorted(wanted)[:k]
        assert len(found) == min(k, len(wanted))
        assert found == sorted(found)
        assert set(found) <= set(wanted)

    @rule(taken=snapshots, word=st.sampled_from(WORDS))
    def check_match(self, taken: tuple[Snapshot, list[Row]], word: str) -> None:
        snapshot, rows = taken
        positions, scores = snapshot.match("text", word, 100, snapshot.live())
        wanted = [position for position in self.live(rows) if word in (rows[position].text or "").split()]
        assert sorted(positions.tolist()) == wanted
        assert (np.diff(scores) <= 0).all()

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "table"):
            assert self.table.rows == len(self.rows)


TestAgainstTheOracle = AgainstTheOracle.TestCase
TestAgainstTheOracle.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
