"""Where a direct `merge_insert` is better: batches of rising size upserted into one base, with memwal and without.

Direct: Lance's `merge_insert` of each batch, then fsync of the written files, so that both survive a power cut; on a
table without an index, and on one with a B-tree on the key. memwal: a durable put of each batch, then one flush and one
commit for all of them. Both end with the same rows in the base table. One batch is merged, and ten in a row.

* Wait: until one batch is durable and can be queried. memwal: until the acknowledgement.
* All work: wall time per batch until its rows are in the base table; one batch per commit, and ten.
* Processor time: the same for all threads of this process; other work on the host hardly changes it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.commit_path import linked, merged_digest
from bench.growing import merge, opened, tables_of, upserts_of
from bench.latencies import timed_each
from bench.parts import Curve, Points
from bench.rounds import ResultsDiffer
from bench.source_data import NARROW_KEY, narrow_rows, newest
from memwal.flush.base.fsync import sync_tree

OVER = "rows of a batch"
WAIT = "Wait until durable"
ONE, TEN = "All work, 1 batch a commit", "All work, 10 batches a commit"
PROCESSOR_ONE, PROCESSOR_TEN = "Processor time, 1 batch a commit", "Processor time, 10 batches a commit"
MEMWAL, PLAIN, INDEXED = "memwal", "merge_insert", "merge_insert, B-tree"
MANY = 10
MOST_ROWS_BY_BTREE = 100_000
"""From 300,000 rows Lance's merge by a B-tree fails: its hash join needs more memory than its pool."""
WARMING = narrow_rows(range(100), 99)
"""Put or merged before the first measurement."""
ROUNDS = 3
_MOST_ROWS_OF_TEN = 100_000
"""Ten batches with more rows would take longer than all other measurements."""


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds that one way took for one or more batches. `wait`: the median time of a batch until it is durable."""

    wait: float
    wall: float
    processor: float


def measure(at: Path, base: int, sizes: Sequence[int], *, rounds: int = ROUNDS) -> tuple[Curve, ...]:
    """Return the curves for a base of `base` rows and batches of `sizes`.

    The largest size runs once. Raises: ResultsDiffer.
    """
    plain, indexed = tables_of(at, base)
    panels = {name: Points(name, OVER) for name in (WAIT, ONE, TEN, PROCESSOR_ONE, PROCESSOR_TEN)}
    for size in sizes:
        ways = [(MEMWAL, plain), (PLAIN, plain)]
        if size <= MOST_ROWS_BY_BTREE:
            ways.append((INDEXED, indexed))
        counts = (1, MANY) if size <= _MOST_ROWS_OF_TEN else (1,)
        for count in counts:
            batches, check = upserts_of(base, size, count), count == counts[-1]
            for name, took in _in_turn(ways, at / "copy", batches, rounds, check=check).items():
                wait, wall, processor = (float(np.median(each)) * 1e3 for each in zip(*took, strict=True))
                panels[ONE if count == 1 else TEN].note(name, size, wall / count)
                panels[PROCESSOR_ONE if count == 1 else PROCESSOR_TEN].note(name, size, processor / count)
                if count == 1:
                    panels[WAIT].note(name, size, wait)
    return tuple(curve for panel in panels.values() for curve in panel.curves())


def _in_turn(
    ways: Sequence[tuple[str, Path]], copied: Path, batches: Sequence[pa.Table], rounds: int, *, check: bool
) -> dict[str, list[tuple[float, float, float]]]:
    """Run every way in turn on a copy of its table; return wait, wall and processor time of each round.

    `check`: read the rows back. Raises: ResultsDiffer if the ways left different rows.
    """
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name, _ in ways}
    digests = {}
    few = len(batches) * batches[0].num_rows <= _MOST_ROWS_OF_TEN
    for number in range(rounds if few else 1):
        for name, path in ways:
            linked(path, copied)
            took = _memwal(copied, batches) if name == MEMWAL else _direct(copied, batches)
            taken[name].append((took.wait, took.wall, took.processor))
            if check and not number:
                digests[name] = merged_digest(copied, newest([WARMING, *batches], NARROW_KEY))
            shutil.rmtree(copied)
    if len(set(digests.values())) > 1:
        raise ResultsDiffer(f"crossover, {len(batches)} batches of {batches[0].num_rows:,} rows: {digests}")
    return taken


def _memwal(path: Path, batches: Sequence[pa.Table]) -> Took:
    with opened(path) as table:
        table.put(WARMING)
        table.flush()
        table.commit()
        os.sync()
        wall, processor = time.perf_counter(), time.process_time()
        waits = timed_each(table.put, batches)
        table.flush()
        table.commit()
        return Took(float(np.median(waits)), time.perf_counter() - wall, time.process_time() - processor)


def _direct(path: Path, batches: Sequence[pa.Table]) -> Took:
    def upsert(rows: pa.Table) -> None:
        merge(path, rows)
        sync_tree(str(path))

    upsert(WARMING)
    os.sync()
    wall, processor = time.perf_counter(), time.process_time()
    waits = timed_each(upsert, batches)
    return Took(float(np.median(waits)), time.perf_counter() - wall, time.process_time() - processor)
