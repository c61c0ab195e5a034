"""Runbooks: rows are inserted, deleted and replaced, and after each step searches must still return the nearest rows.

    python -m bench.runbooks [NAME …] [--smoke] [--points N] [--steps N] [--queries N]

The streaming track of the NeurIPS'23 competition ran a list of insert, delete, replace and search steps (a runbook) on
each index, and measured recall after each step. Three of its kinds are implemented here over generated vectors
(`bench.mixtures`):

* sliding_window: every step inserts a batch; from half of the steps on it also deletes the oldest batch.
* clustered_expiration: the vectors are clustered. Every step inserts a batch of one random cluster, so that a model
  trained on earlier batches does not fit, and deletes the rows whose random lifetime has ended.
* random_replace: half of the points are inserted; then every step puts new vectors to random keys.

An embedded table with an IVF-PQ index takes each step as one durable put and one durable delete. Flushes, commits and
index upkeep run concurrently with small limits, so that all levels have rows at any time. After each step the benchmark
searches at level `latest`, with default settings. The reference is exact search by faiss over the live vectors.
Recall@10 is the share of the ten answers that are at most as far from the query as the tenth nearest live row (within
1e-5; rows at the same distance are equivalent). A deleted row or a duplicate in an answer fails the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import memwal
from bench.mixtures import Ids, Vectors, column, mixed, nearest, queries
from bench.source_data import SEED, VECTOR_WIDTH
from bench.surroundings import host, versions

K, BAR, PUBLISHED = 10, 0.98, 0.912
"""Number of neighbours; the least recall of a step; the best recall published by participants of the track."""
POINTS, STEPS, QUERIES = 40_000, 40, 200
SMOKE_POINTS, SMOKE_STEPS, SMOKE_QUERIES = 1_500, 6, 20
CLUSTERS = 16
_LEFT_FOREVER = 0.25
"""Share of rows of clustered_expiration that never expire."""
SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("embedding", pa.list_(pa.float32(), VECTOR_WIDTH))]
)


@dataclass(frozen=True)
class Step:
    """One step: `put` with its vectors (of new keys, or new vectors of live keys), then `deleted`."""

    put: Ids
    vectors: Vectors
    deleted: Ids


def sliding_window(points: int, steps: int) -> Iterator[Step]:
    """Yield the steps of sliding_window; from the middle on, half of the points are live."""
    batches = np.array_split(np.arange(points), steps)
    for at, batch in enumerate(batches):
        old = batches[at - steps // 2] if at >= steps // 2 else np.empty(0, np.int64)
        yield Step(batch, mixed(len(batch), at), old)


def clustered_expiration(points: int, steps: int) -> Iterator[Step]:
    """Yield batches of one cluster each, in random order.

    Most rows live for a random number of steps, up to half of all steps.
    """
    rng, vectors = np.random.default_rng((SEED, 1)), mixed(points, 0)
    clusters = min(CLUSTERS, steps)
    means = faiss.Kmeans(VECTOR_WIDTH, clusters, niter=10, seed=SEED, min_points_per_centroid=1)
    means.train(vectors)
    cluster = means.assign(vectors)[1]
    ordered = np.argsort(cluster, kind="stable")
    batches = np.array_split(ordered, steps)
    until = np.full(points, steps + 1)
    for at, which in enumerate(rng.permutation(steps)):
        batch = batches[which]
        lives = rng.integers(1, max(2, steps // 2), len(batch))
        until[batch] = np.where(rng.random(len(batch)) < _LEFT_FOREVER, steps + 1, at + lives)
        yield Step(batch, vectors[batch], np.flatnonzero(until == at))


def random_replace(points: int, steps: int) -> Iterator[Step]:
    """Yield a step that inserts all keys, then steps that replace the vectors of some of them."""
    rng, live = np.random.default_rng((SEED, 2)), points // 2
    nothing = np.empty(0, np.int64)
    yield Step(np.arange(live), mixed(live, 0), nothing)
    for at in range(1, steps):
        ids = np.sort(rng.choice(live, max(1, points // 2 // steps), replace=False))
        yield Step(ids, mixed(len(ids), at), nothing)


RUNBOOKS: dict[str, Callable[[int, int], Iterator[Step]]] = {
    "sliding_window": sliding_window,
    "clustered_expiration": clustered_expiration,
    "random_replace": random_replace,
}


class WrongAnswer(Exception):
    """A search returned a row that is not live, a duplicate, or too few rows."""


@dataclass
class Live:
    """The live rows by what was acknowledged: their ids and vectors."""

    vectors: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)

    def take(self, step: Step) -> None:
        """Apply `step`, as the table does once it is acknowledged."""
        self.vectors.update(zip(step.put.tolist(), step.vectors, strict=True))
        for id in step.deleted.tolist():
            del self.vectors[id]

    def nearest(self, asked: Vectors) -> tuple[npt.NDArray[np.float32], dict[int, npt.NDArray[np.float32]]]:
        """Return the squared distances of the K nearest rows to each query, and all vectors."""
        ids = np.fromiter(self.vectors, np.int64, len(self.vectors))
        distances, _ = nearest(np.stack(list(self.vectors.values())), ids, asked, K)
        return distances, self.vectors


@dataclass(frozen=True)
class Outcome:
    """The result of one step. `where`: rows in base table, SSTs and memtables."""

    live: int
    recall: float
    milliseconds: npt.NDArray[np.float64]
    where: tuple[int, int, int]


def recall(live: Live, asked: Vectors, answers: Sequence[pa.Table]) -> float:
    """Return Recall@K of the answers. Raises: WrongAnswer."""
    distances, vectors = live.nearest(asked)
    hits = total = 0
    for query, exact, answer in zip(asked, distances, answers, strict=True):
        ids = answer.column("id").to_pylist()
        due = min(K, len(vectors))
        if len(ids) != due or len(set(ids)) != due or not all(id in vectors for id in ids):
            gone = [id for id in ids if id not in vectors]
            raise WrongAnswer(f"{len(ids)} answers for {due}, {len(set(ids))} different, not alive: {gone}")
        apart = ((np.stack([vectors[id] for id in ids]) - query) ** 2).sum(axis=1)
        hits += int((apart <= exact[due - 1] + 1e-5).sum())
        total += due
    return hits / total


def settings(points: int, steps: int) -> dict[str, Any]:
    """Return settings that keep rows at all levels: a memtable of about three steps, commits every second."""
    return {"memtable": {"rows_max": max(100, 3 * points // steps)}, "commit": {"interval": "1s"}}


def run(name: str, points: int, steps: int, count: int, at: Path) -> Iterator[Outcome]:
    """Run the steps of a runbook, and yield the outcome of each. Raises: WrongAnswer."""
    asked, live = queries(count), Live()
    with memwal.open(
        str(at / f"{name}.lance"),
        schema=SCHEMA,
        key="id",
        regions=2,
        indexes={"embedding": "ivf_pq"},
        settings=settings(points, steps),
    ) as table:
        for step in RUNBOOKS[name](points, steps):
            table.put(pa.table([pa.array(step.put), column(step.vectors)], schema=SCHEMA))
            if len(step.deleted):
                table.delete(step.deleted.tolist())
            live.take(step)
            answers, seconds = [], []
            for query in asked:
                began = time.perf_counter()
                answers.append(table.search("embedding", query, k=K, columns=["id"]))
                seconds.append(time.perf_counter() - began)
            yield Outcome(len(live.vectors), recall(live, asked, answers), np.array(seconds) * 1e3, _where(table))


def _where(table: Any) -> tuple[int, int, int]:
    status = table.status()
    ssts = sum(sst["rows"] or 0 for region in status["regions"] for sst in region["ssts"] if not sst["committed"])
    return status["rows"], ssts, sum(region["memtable_rows"] for region in status["regions"])


def summary(found: dict[str, list[Outcome]]) -> Iterator[str]:
    """Yield a Markdown table with one row per runbook; steps below the bar are named."""
    yield f"| runbook | steps | live rows | recall@{K}, lowest | mean | search p50, p99 ms | bar {BAR} |"
    yield "|---|---|---|---|---|---|---|"
    for name, outcomes in found.items():
        recalls = [each.recall for each in outcomes]
        p50, p99 = np.percentile(np.concatenate([each.milliseconds for each in outcomes]), [50, 99])
        below = [at for at, each in enumerate(recalls, 1) if each < BAR]
        said = f"missed at steps {', '.join(map(str, below))}" if below else "held"
        yield (
            f"| {name} | {len(outcomes)} | {min(e.live for e in outcomes):,} to {max(e.live for e in outcomes):,} "
            f"| {min(recalls):.4f} | {np.mean(recalls):.4f} | {p50:.1f}, {p99:.1f} | {said} |"
        )
    said = ", ".join(f"{name} {value}" for name, value in {**versions(), **host()}.items())
    yield f"\nBest recall published for the track: {PUBLISHED}. {said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; return 1 if a step missed the bar, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.runbooks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNBOOKS)}; none: all")
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    parser.add_argument("--points", type=int, help=f"vectors of a runbook ({POINTS:,})")
    parser.add_argument("--steps", type=int, help=f"its steps ({STEPS})")
    parser.add_argument("--queries", type=int, help=f"searches after each step ({QUERIES})")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in RUNBOOKS]
    if unknown:
        parser.error(f"no runbook is called {unknown[0]}; there are {', '.join(RUNBOOKS)}")
    full = (SMOKE_POINTS, SMOKE_STEPS, SMOKE_QUERIES) if given.smoke else (POINTS, STEPS, QUERIES)
    points, steps, count = given.points or full[0], given.steps or full[1], given.queries or full[2]
    found: dict[str, list[Outcome]] = {}
    for name in given.names or RUNBOOKS:
        with tempfile.TemporaryDirectory() as directory:
            for at, each in enumerate(run(name, points, steps, count, Path(directory)), 1):
                found.setdefault(name, []).append(each)
                base, ssts, memtables = each.where
                print(
                    f"{name} {at}/{steps}: {each.live:,} live (base {base:,}, SSTs {ssts:,}, memtables {memtables:,}), "
                    f"recall {each.recall:.4f}, p50 {np.median(each.milliseconds):.1f} ms",
                    flush=True,
                )
    print("\n".join(summary(found)), flush=True)
    return 1 if any(each.recall < BAR for outcomes in found.values() for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
