"""Measure what a process keeps over many micro-batches: memory, threads, descriptors, files, and latencies.

`python -m bench.soak [--batches N] [--rows N] [--keys N] [--read-every N] [--samples N] [--index KIND …] [--json]`
prints a line per sample.

One process owns the table and puts micro-batches with rising tokens over a bounded key space, like the driver of a
stream; after a number of micro-batches it gets, matches and searches. All limits are tiny: memtables are flushed after
some micro-batches and committed after a second, and superseded objects, index segments and base versions are collected
after some seconds. The table keeps its size, so anything that grows is a leak.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Lance logs a line for each index that it cannot describe. Set before its import.
os.environ.setdefault("LANCE_LOG", "critical")

import numpy as np
import pyarrow as pa

import memwal
from memwal import wal
from memwal.ingest.engine.table.public import Table

BATCHES, SAMPLES, ROWS, KEYS, READ_EVERY, WORDS_OF_A_ROW, WIDTH = 100_000, 10, 20, 2_000, 25, 12, 16
INDEXES = ("fts", "ivf_pq", "btree")
COLUMNS = {"fts": "body", "ivf_pq": "embedding", "btree": "price"}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.float64()),
        ("body", pa.string()),
        ("embedding", pa.list_(pa.float32(), WIDTH)),
    ]
)
TINY = {
    "table": {"cache_max": "64MiB"},
    "regions": {"count": 2},
    "memtable": {"rows_max": 500, "entries_max": 50, "vector_train_rows": 256},
    "commit": {"interval": "1s", "optimize_interval": "1s", "compact_interval": "1s", "ssts_max": 4},
    "gc": {
        "interval": "2s",
        "wal_age_min": "2s",
        "sst_age_min": "2s",
        "manifest_age_min": "2s",
        "versions_age_min": "2s",
        "versions_min": 2,
        "versions_interval": "2s",
    },
}
"""Settings of the table; those of a real table are at least a hundred times as large."""
REQUESTS = ("put_if_absent", "put", "get", "exists", "children", "list_some", "describe", "delete")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_VOCABULARY = np.array([f"word{n}" for n in range(2_000)])


@dataclass(frozen=True, slots=True)
class Sample:
    """The process after `batches` micro-batches.

    `version`: of the base table. `memory`: in bytes. `files`: of the table. `requests` to storage per micro-batch and
    medians in milliseconds cover the time since the previous sample.
    """

    batches: int
    seconds: float
    version: int
    memory: int
    threads: int
    descriptors: int
    files: int
    requests: float
    put: float
    get: float
    match: float
    search: float


class Client:
    """Put micro-batches, read after some of them, and record the durations.

    Thread safety. One thread.
    """

    def __init__(self, table: Table, options: argparse.Namespace) -> None:
        self._table, self._rows, self._keys, self._every = table, options.rows, options.keys, options.read_every
        self._indexes = frozenset(options.index)
        self._random = np.random.default_rng(14)
        self._taken: dict[str, list[float]] = {"put": [], "get": [], "match": [], "search": []}

    def turn(self, number: int) -> None:
        """Put micro-batch `number`, and run each kind of read if it is due."""
        rows, table, draw = self._batch(), self._table, self._random
        self._timed("put", lambda: table.put(rows, token=memwal.Token("stream", number)))
        if number % self._every:
            return
        self._timed("get", lambda: table.get(rows.column("id")[:2].to_pylist()))
        if "fts" in self._indexes:
            self._timed("match", lambda: table.match("body", str(draw.choice(_VOCABULARY)), k=5))
        if "ivf_pq" in self._indexes:
            self._timed("search", lambda: table.search("embedding", draw.random(WIDTH, np.float32), k=5))

    def medians(self) -> dict[str, float]:
        """Return the median milliseconds by operation since the last call; 0 if an operation did not run."""
        found = {name: statistics.median(taken) * 1e3 if taken else 0.0 for name, taken in self._taken.items()}
        for taken in self._taken.values():
            taken.clear()
        return found

    def _timed(self, name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        self._taken[name].append(time.perf_counter() - began)

    def _batch(self) -> pa.Table:
        draw, n = self._random, self._rows
        words = draw.choice(_VOCABULARY, (n, WORDS_OF_A_ROW))
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(draw.random(n * WIDTH, np.float32)), WIDTH)
        ids = pa.array(draw.choice(self._keys, n, replace=False))
        columns = [ids, pa.array(draw.random(n)), pa.array([" ".join(row) for row in words]), vectors]
        return pa.Table.from_arrays(columns, schema=SCHEMA)


def soak(at: Path, options: argparse.Namespace, show: Callable[[Sample], None] = lambda _: None) -> list[Sample]:
    """Run on a new table below `at`; return a sample after every share of the micro-batches."""
    indexes = {COLUMNS[kind]: kind for kind in options.index}
    samples: list[Sample] = []
    with (
        counted() as requests,
        memwal.open(at / "table", schema=SCHEMA, key="id", indexes=indexes, settings=TINY) as table,
    ):
        client, began = Client(table, options), time.perf_counter()
        for share in range(options.samples):
            done = samples[-1].batches if samples else 0
            upto = options.batches * (share + 1) // options.samples
            for number in range(done, upto):
                client.turn(number)
            seconds, asked = time.perf_counter() - began, requests.total() / max(1, upto - done)
            requests.clear()
            version = table.status()["base_version"]
            took = {"requests": asked, **client.medians()}
            samples.append(Sample(upto, seconds, version, *_process(at), **took))
            show(samples[-1])
        if options.settle:
            time.sleep(options.settle)
            last = samples[-1]
            samples.append(replace(last, files=_process(at)[-1], seconds=last.seconds + options.settle))
            show(samples[-1])
    return samples


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the requests to local storage inside the context."""
    found: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            found[name] += 1
            return method(*args)

        return asked

    with ExitStack() as patches:
        for name in REQUESTS:
            patches.enter_context(patch.object(wal.LocalStore, name, counting(name, getattr(wal.LocalStore, name))))
        yield found


def _process(at: Path) -> tuple[int, int, int, int]:
    """Return bytes of memory, threads and descriptors of this process, and the number of files below `at`."""
    gc.collect()
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))  # noqa: PTH208
    return memory, threads, descriptors, sum(len(names) for _, _, names in os.walk(at))


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=BATCHES, help="micro-batches in all (%(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a micro-batch (%(default)s)")
    parser.add_argument("--keys", type=int, default=KEYS, help="distinct keys (%(default)s)")
    parser.add_argument("--read-every", type=int, default=READ_EVERY, help="micro-batches between reads (%(default)s)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="lines printed (%(default)s)")
    parser.add_argument("--index", choices=INDEXES, nargs="*", default=list(INDEXES), help="indexes of the table (all)")
    parser.add_argument(
        "--settle", type=float, default=0.0, help="seconds to wait after the last put before a final count of the files"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per sample")
    parser.add_argument("--workdir", type=Path, help="where the table is put meanwhile")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; return the exit code."""
    options = options_of(arguments)

    def show(each: Sample) -> None:
        line = (
            f"{each.batches:>8,} micro-batches {each.seconds:>6.0f} s, version {each.version:>6,}  "
            f"{each.memory >> 20:>6,} MiB {each.threads:>4} threads {each.descriptors:>4} descriptors {each.files:>6,} "
            f"files {each.requests:>5.1f} requests   put {each.put:.1f}, get {each.get:.1f}, match {each.match:.1f}, "
            f"search {each.search:.1f} ms"
        )
        print(json.dumps(asdict(each)) if options.json else line, flush=True)

    with tempfile.TemporaryDirectory(dir=options.workdir) as directory:
        soak(Path(directory), options, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
