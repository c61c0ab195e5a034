"""A table with a random schedule of all steps that affect reads, and an oracle of every kind of read.

`python -m tests.reads_world --seeds 200` runs many seeds; a failure prints its seed and steps, and a seed gives one
run. The oracle is a dict per level, changed by what each step promises; reads are compared with sorts and distances
that NumPy computes over it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
import tests.inside  # noqa: F401 - what is imported changes what tests see
from memwal import flush, wal
from tests.support.rows import by_key
from tests.ways import entered

WORDS = ("harbor", "copper", "violet", "meadow", "zebra")
LEVELS = ("committed", "flushed", "durable", "latest")
INDEXES = {"v": "ivf_pq", "text": "fts", "n": "btree"}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("n", pa.int64()),
        ("text", pa.string()),
        ("v", pa.list_(pa.float32(), 4)),
    ]
)
SETTINGS: dict[str, Any] = {
    "commit": {"interval": "0s", "compact_fragments": 2, "optimize_segments": 2},
    "gc": {"interval": "0s", "sst_age_min": "1ms", "wal_age_min": "1ms"},
    "wal": {"read_lease": "20ms"},  # how long a claim waits if the region has an owner
}
Model = dict[int, dict[str, Any]]


class ReadsWorld:
    """One seed: a table, its readers, and the rows that each level must show."""

    schema, settings = SCHEMA, SETTINGS

    def __init__(self, seed: int, directory: Path) -> None:
        self.draw = np.random.default_rng(seed)
        self.uri = str(directory / "table.lance")
        self.levels: dict[str, Model] = {level: {} for level in LEVELS}
        self.indexed = {name: kind for name, kind in INDEXES.items() if self.draw.random() < 0.6}
        self.metric = str(self.draw.choice(["l2", "cosine", "dot"]))
        self.version = 0
        self.trace = list[str]()
        self._open = ExitStack()
        given = {name: self._index(kind) for name, kind in self.indexed.items()}
        regions = int(self.draw.integers(1, 4))
        self._opened(schema=self.schema, key="id", regions=regions, indexes=given)
        self.stored = memwal.open(self.uri, read_only=True)
        self.seldom = memwal.open(self.uri, read_only=True)
        """A reader that reads storage after some steps only, so that much changes between two of its reads."""

    def run(self, steps: int) -> None:
        """Take `steps` random steps, and check all reads after each."""
        kinds = self.kinds()
        weights = np.array([weight for _, weight in kinds])
        for _ in range(steps):
            step = kinds[int(self.draw.choice(len(kinds), p=weights / weights.sum()))][0]
            self.trace.append(step.__name__)
            step()
            self.check()

    def kinds(self) -> list[tuple[Callable[[], None], float]]:
        """Return the possible steps, each with its weight."""
        return [
            (self.put, 8),
            (self.delete, 3),
            (self.flush, 3),
            (self.commit, 3),
            (self.collect, 1),
            (self.compact, 1),
            (self.add_index, 1.5),
            (self.drop_index, 1),
            (self.reopen, 1),
            (self.take_over, 1),
            (self.resize, 0.5),
        ]

    def close(self) -> None:
        """Close the table and its clients."""
        self._open.close()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        ids = self.draw.choice(60, int(self.draw.integers(1, 25)))
        rows = [self.row(int(id)) for id in ids]
        self.table.put(rows)
        self._wrote({**self.levels["latest"], **{row["id"]: row for row in rows}})

    def delete(self) -> None:
        ids = set(self.draw.choice(60, int(self.draw.integers(1, 10))).tolist())
        self.table.delete(sorted(ids))
        self._wrote({id: row for id, row in self.levels["latest"].items() if id not in ids})

    def flush(self) -> None:
        self.table.flush()
        self.levels["flushed"] = self.levels["latest"]

    def commit(self) -> None:
        self.table.commit()
        self.levels["committed"] = self.levels["flushed"]

    def collect(self) -> None:
        self.table.upkeep.collect()

    def compact(self) -> None:
        """Compact the base as another program."""
        lance.dataset(self.uri).optimize.compact_files()

    def add_index(self) -> None:
        absent = sorted(INDEXES.keys() - self.indexed.keys())
        if absent:
            column = str(self.draw.choice(absent))
            given = self._index(INDEXES[column])
            kind = given.pop("type")
            self.table.create_index(column, kind, **given)
            self.indexed[column] = kind
            self.flush()  # the table flushed its memtables, which lack the new index

    def drop_index(self) -> None:
        if self.indexed:
            column = str(self.draw.choice(sorted(self.indexed)))
            self.table.drop_index(f"{column}_idx")
            del self.indexed[column]
            self.flush()

    def reopen(self) -> None:
        self._open.close()
        self._opened()

    def take_over(self) -> None:
        """Let another owner claim the regions while this one still serves; this one is fenced and then closed."""
        self.clients.close()
        fenced = self.table
        self._opened(take_over=True)
        with pytest.raises(memwal.FencedError):
            fenced.put([self.row(1)])

    def resize(self) -> None:
        self._open.close()
        store, regions = wal.open_store(self.uri, {}), int(self.draw.integers(1, 5))
        if regions != self.table.base.buckets:
            flush.resize(self.uri, {}, store, regions, clock=wal.SystemClock(), ids=wal.SystemIds())
            self.levels = dict.fromkeys(LEVELS, self.levels["latest"])
        self._opened()

    # ---- reads -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare every kind of read at every level, through a random kind of table, with the oracle."""
        for level in LEVELS:
            kind = ("table", "stored", "client")[int(self.draw.integers(3))]
            table = getattr(self, kind)
            model = self.visible(level)
            try:
                self.check_rows(table, level, model)
                self._check_ranked(table, level, model)
            except Exception as error:
                where = f"{kind} at {level} after {', '.join(self.trace)}"
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        for reader, share in ((self.stored, 1.0), (self.seldom, 0.2)):
            if self.draw.random() < share:
                found = by_key(reader.scan(level="durable").read_all())
                assert found == self.visible("durable"), f"a look at storage after {', '.join(self.trace)}"

    def visible(self, level: str) -> Model:
        """Return the rows that reads at `level` must show now."""
        return self.levels[level]

    def check_rows(self, table: Any, level: str, model: Model) -> None:
        assert by_key(table.scan(level=level).read_all()) == model
        low, high = sorted(self.draw.integers(0, 100, 2).tolist())
        predicate = f"n >= {low} AND n < {high}"
        passing = {id: row for id, row in model.items() if low <= row["n"] < high}
        assert by_key(table.scan(filter=predicate, level=level).read_all()) == passing
        assert table.count(predicate, level=level) == len(passing)
        assert table.count(level=level) == len(model)
        facets = table.facets("n", predicate, level=level).to_pydict()
        by_count = sorted(Counter(row["n"] for row in passing.values()).items(), key=lambda each: (-each[1], each[0]))
        assert [*zip(facets["n"], facets["_count"], strict=True)] == by_count
        ids = self.draw.permutation(70)[:20].tolist()
        found = table.get(ids, ["id", "text"], level=level).to_pylist()
        assert found == [{"id": id, "text": model[id]["text"]} for id in ids if id in model]
        ordered = sorted(passing.values(), key=lambda row: (-row["n"], row["id"]))
        limit, offset = int(self.draw.integers(1, 12)), int(self.draw.integers(0, 6))
        asked: dict[str, Any] = {"order_by": [("n", "descending"), "id"], "limit": limit, "offset": offset}
        assert (
            table.scan(filter=predicate, level=level, **asked).read_all().to_pylist()
            == ordered[offset : offset + limit]
        )

    def _check_ranked(self, table: Any, level: str, model: Model) -> None:
        query = self.draw.normal(size=4).astype(np.float32)
        metric = str(self.draw.choice(["l2", "cosine", "dot"]))
        distances = measured(model, query, metric)
        nearest = sorted(distances, key=lambda id: distances[id])
        k = int(self.draw.integers(1, 40))
        found = table.search("v", query, k, metric=metric, level=level)
        assert found["id"].to_pylist() == nearest[:k]
        assert np.allclose(found["_distance"].to_numpy(), [distances[id] for id in nearest[:k]], rtol=1e-4, atol=1e-5)
        assert all(row == model[row["id"]] for row in found.drop_columns(["_distance"]).to_pylist())
        few = table.search("v", query, k, "n % 2 = 0", metric=metric, level=level)["id"].to_pylist()
        assert few == [id for id in nearest if model[id]["n"] % 2 == 0][:k]
        if len(nearest) > 4:
            low, high = (distances[nearest[at]] + 1e-4 for at in (1, len(nearest) // 2))
            inside = [id for id in nearest if low <= distances[id] < high]
            around = min((abs(distance - end) for distance in distances.values() for end in (low, high)), default=1.0)
            if around > 1e-5:  # otherwise rounding decides
                ids = table.search("v", query, 100, metric=metric, distance_range=(low, high), level=level)["id"]
                assert ids.to_pylist() == inside
        word = str(self.draw.choice(WORDS))
        if "text" not in self.indexed:
            self._expect_no_match(table, word, level)
            return
        matching = {id: row for id, row in model.items() if word in row["text"].split()}
        matched = table.match("text", word, 100, level=level)
        assert by_key(matched.drop_columns(["_score"])) == matching
        both = table.hybrid(query, word, 200, candidates=100, metric=metric, level=level)
        assert set(both["id"].to_pylist()) == set(nearest) | set(matching)
        for row in both.to_pylist():
            assert (row["_score"] is not None) == (row["id"] in matching)
            assert (row["_distance"] is None) == (row["id"] not in distances)

    def _expect_no_match(self, table: Any, word: str, level: str) -> None:
        with pytest.raises(memwal.Invalid, match="has no fts index"):
            table.match("text", word, level=level)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _opened(self, **given: Any) -> None:
        self._open = ExitStack() if not given.get("take_over") else self._open
        self.table = self._open.enter_context(memwal.open(self.uri, settings=self.settings, **given))
        self.clients = ExitStack()
        self.client = entered("flight", self.table, self.clients)
        self._open.push(self.clients)

    def _wrote(self, model: Model) -> None:
        self.levels["latest"] = self.levels["durable"] = model

    def _index(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "metric": self.metric} if kind == "ivf_pq" else {"type": kind}

    def row(self, id: int) -> dict[str, Any]:
        """Return a new version of a row, different from every other."""
        self.version += 1
        words = [str(word) for word in self.draw.choice(WORDS, 3)]
        vector = None if self.draw.random() < 0.1 else self.draw.normal(size=4).astype(np.float32).tolist()
        return {"id": id, "n": int(self.draw.integers(100)), "text": " ".join(words), "v": vector}


def measured(model: Model, query: Any, metric: str) -> dict[int, float]:
    """Return the distances by id as Lance computes them, of the rows with a vector."""
    found = {}
    for id, row in model.items():
        if row["v"] is not None:
            vector = np.array(row["v"])
            inner = float(vector @ query)
            lengths = float(np.linalg.norm(vector) * np.linalg.norm(query))
            measures = {"l2": float(np.sum((vector - query) ** 2)), "dot": 1 - inner, "cosine": 1 - inner / lengths}
            found[id] = measures[metric]
    return found


def run_seed(seed: int, steps: int) -> None:
    """Run one seed in its own directory. Raises: AssertionError naming the seed."""
    directory = Path(tempfile.mkdtemp())
    try:
        world = ReadsWorld(seed, directory)
        try:
            world.run(steps)
        finally:
            world.close()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        shutil.rmtree(directory)


def main() -> int:
    """Run many seeds; return the exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.reads_world", description=__doc__)
    parser.add_argument("--start", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    failed = 0
    for seed in range(asked.start, asked.start + asked.seeds):
        try:
            run_seed(seed, asked.steps)
        except AssertionError as error:
            print(error)
            failed += 1
    print(f"{asked.seeds} seeds of {asked.steps} steps, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
