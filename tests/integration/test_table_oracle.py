"""A table compared with a dict: random operations with flush, commit and reopening in between, every read after each.

The test runs once with limits that are never reached, when every level is known exactly, and once with limits of a few
rows, when flushes happen by themselves at any moment. The latter runs also use each rule for puts of existing keys.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import memwal
from tests.conftest import extent
from tests.support.rows import by_key

WORDS = ("harbor", "copper", "violet", "meadow")
SCHEMA = pa.schema(
    [
        pa.field("k", pa.string(), nullable=False),
        pa.field("n", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
    ]
)
KEYS = st.sampled_from([f"key-{n}" for n in range(24)])
Model = dict[str, dict[str, Any]]


class TableAgainstDict(RuleBasedStateMachine):
    """Random calls of the public methods; `model` holds the rows that `latest` must show after each call."""

    sections: ClassVar[dict[str, dict[str, Any]]] = {"commit": {"interval": "0s"}}
    exact = True
    upsert = "replace"

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.uri = str(Path(self.directory) / "table.lance")
        self.model: Model = {}
        self.flushed: Model = {}
        self.committed: Model = {}
        self.version = 0
        self.sequence = 0

    @initialize(regions=st.sampled_from([1, 2]))
    def create(self, regions: int) -> None:
        indexes = {"vector": "ivf_pq", "text": "fts", "n": "btree"}
        self.table = memwal.open(
            self.uri,
            schema=SCHEMA,
            key="k",
            regions=regions,
            indexes=indexes,
            settings={**self.sections, "table": {"upsert": self.upsert}},
        )

    @rule(keys=st.lists(KEYS, min_size=1, max_size=12), durable=st.booleans())
    def put(self, keys: list[str], durable: bool) -> None:
        rows = [self.row(key) for key in keys]
        receipt = self.table.put(rows, durable=durable)
        assert (receipt.rows, receipt.skipped) == (len(rows), self.stored(rows))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4, unique=True), durable=st.booleans())
    def delete(self, keys: list[str], durable: bool) -> None:
        self.table.delete(keys, durable=durable)
        for key in keys:
            self.model.pop(key, None)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True), repeats=st.integers(0, 2))
    def put_with_token(self, keys: list[str], repeats: int) -> None:
        self.sequence += 1
        rows = [self.row(key) for key in keys]
        for attempt in range(repeats + 1):
            receipt = self.table.put(
                rows if not attempt else [self.row(key) for key in keys], token=("p", self.sequence)
            )
            assert receipt.applied is (attempt == 0)
        self.stored(rows)

    @precondition(lambda self: self.upsert == "merge")
    @rule(
        keys=st.lists(KEYS, min_size=1, max_size=8),
        columns=st.lists(st.sampled_from(["n", "text", "vector"]), unique=True),
        durable=st.booleans(),
    )
    def put_columns(self, keys: list[str], columns: list[str], durable: bool) -> None:
        rows = [{name: self.row(key)[name] for name in ("k", *columns)} for key in keys if key in self.model]
        if rows:
            self.table.put(rows, durable=durable)
            self.stored(rows)

    @rule()
    def flush(self) -> None:
        self.table.flush()
        self.flushed = dict(self.model)

    @rule()
    def commit(self) -> None:
        self.table.commit()
        self.committed = dict(self.flushed)

    @rule()
    def reopen(self) -> None:
        self.table.close()
        self.table = memwal.open(self.uri, settings=self.sections)

    @rule(asked=st.lists(st.one_of(KEYS, st.just("absent")), max_size=8, unique=True))
    def get(self, asked: list[str]) -> None:
        assert by_key(self.table.get(asked), "k") == {key: self.model[key] for key in asked if key in self.model}

    @rule(low=st.integers(0, 60), span=st.integers(0, 40))
    def filter(self, low: int, span: int) -> None:
        expected = {key: row for key, row in self.model.items() if low <= row["n"] <= low + span}
        predicate = f"n BETWEEN {low} AND {low + span}"
        assert by_key(self.table.scan(filter=predicate).read_all(), "k") == expected
        assert self.table.count(predicate) == len(expected)

    @rule(k=st.integers(1, 30), bound=st.one_of(st.none(), st.integers(0, 99)))
    def search(self, k: int, bound: int | None) -> None:
        query = np.float32([0.5, -0.5, 0.25, 0.0])
        rows = [row for row in self.model.values() if bound is None or row["n"] < bound]
        expected = sorted(float(np.sum((np.float32(row["vector"]) - query) ** 2)) for row in rows)[:k]
        found = self.table.search("vector", query, k=k, filter=None if bound is None else f"n < {bound}")
        assert found["_distance"].to_pylist() == pytest.approx(expected, rel=1e-3, abs=1e-4)
        for row in found.drop(["_distance"]).to_pylist():
            assert row == self.model[row["k"]]

    @rule(word=st.sampled_from(WORDS))
    def match(self, word: str) -> None:
        expected = {key: row for key, row in self.model.items() if word in row["text"].split()}
        assert by_key(self.table.match("text", word, k=1000).drop(["_score"]), "k") == expected

    @invariant()
    def every_row_is_there_once(self) -> None:
        if hasattr(self, "table"):
            assert by_key(self.table.scan().read_all(), "k") == self.model
            assert self.table.count() == len(self.model)

    @precondition(lambda self: self.exact and hasattr(self, "table"))
    @invariant()
    def every_level_is_what_it_was_made(self) -> None:
        assert by_key(self.table.scan(level="flushed").read_all(), "k") == self.flushed
        assert by_key(self.table.scan(level="committed").read_all(), "k") == self.committed

    def stored(self, rows: list[dict[str, Any]]) -> int:
        """Apply a put to the model; return how many rows it leaves out."""
        left = [row for row in rows if self.upsert == "insert" and row["k"] in self.model]
        for row in rows:
            if row not in left:
                self.model = {**self.model, row["k"]: {**self.model.get(row["k"], {}), **row}}
        return len(left)

    def row(self, key: str) -> dict[str, Any]:
        """Return a new version of a key, which differs from every other in every column."""
        self.version += 1
        rng = np.random.default_rng(self.version)
        return {
            "k": key,
            "n": int(rng.integers(0, 100)),
            "text": f"{WORDS[self.version % 4]} v{self.version}",
            "vector": [float(x) for x in rng.standard_normal(4).astype(np.float32)],
        }

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.flush()
            self.table.commit()
            assert by_key(self.table.scan(level="committed").read_all(), "k") == self.model
            self.table.close()
        shutil.rmtree(self.directory)


class TinyTableAgainstDict(TableAgainstDict):
    """The same with ten rows per memtable, some three rows per entry, and commits every 30 ms."""

    sections: ClassVar[dict[str, dict[str, Any]]] = {
        "memtable": {"rows_max": 10, "size_max": "64KiB", "unflushed_max": "1MiB"},
        "wal": {"entry_size_max": "128B", "linger_max": "5ms", "put_timeout": "3min", "retry_budget": "6min"},
        "commit": {"interval": "30ms"},
    }
    exact = False


class InsertsAgainstDict(TinyTableAgainstDict):
    """The same with `upsert = "insert"`: stored rows stay unchanged."""

    upsert = "insert"


class MergesAgainstDict(TinyTableAgainstDict):
    """The same with `upsert = "merge"`: puts may have some of the columns."""

    upsert = "merge"


@pytest.mark.parametrize("machine", [TableAgainstDict, TinyTableAgainstDict, InsertsAgainstDict, MergesAgainstDict])
def test_a_table_is_a_dict(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=extent(6, 60),
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
