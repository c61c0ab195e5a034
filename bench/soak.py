"""What a process keeps over many commits: memory, threads, open descriptors, and the time of puts and reads.

`python -m bench.soak [--commits N] [--rows N] [--keys N] [--samples N] [--index KIND …] [--json]` prints a line per
sample.

One process has the table. A client puts rows over a bounded key space, gets, matches and searches, all in turn; beside
it every memtable is flushed and committed again and again. So the table stays as large as it is, and whatever grows
with the commits is kept for nothing. The first sample is a warm-up: caches fill up until then.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Lance logs a line per index it cannot show. Before it is imported.
os.environ.setdefault("LANCE_LOG", "critical")

import numpy as np
import pyarrow as pa

import ingest

COMMITS, SAMPLES, ROWS, KEYS, WORDS_OF_A_ROW, WIDTH = 800, 8, 200, 5_000, 12, 16
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
_PAGE = os.sysconf("SC_PAGE_SIZE")
_VOCABULARY = np.array([f"word{n}" for n in range(2_000)])


@dataclass(frozen=True, slots=True)
class Sample:
    """The process after so many commits; memory in bytes, medians since the sample before in milliseconds."""

    commits: int
    seconds: float
    memory: int
    threads: int
    descriptors: int
    put: float
    get: float
    match: float
    search: float


class Client:
    """Puts and reads in turn, and how long each took. Thread safety. One thread; `medians` from any."""

    def __init__(self, table: ingest.Table, options: argparse.Namespace) -> None:
        self._table, self._rows, self._keys = table, options.rows, options.keys
        self._indexes = frozenset(options.index)
        self._random = np.random.default_rng(14)
        self._taken: dict[str, list[float]] = {"put": [], "get": [], "match": [], "search": []}

    def turn(self) -> None:
        """One put and one of each read."""
        rows, table, draw = self._batch(), self._table, self._random
        self._timed("put", lambda: table.put(rows))
        self._timed("get", lambda: table.get(rows.column("id")[:2].to_pylist()))
        if "fts" in self._indexes:
            self._timed("match", lambda: table.match("body", str(draw.choice(_VOCABULARY)), k=5))
        if "ivf_pq" in self._indexes:
            self._timed("search", lambda: table.search("embedding", draw.random(WIDTH, np.float32), k=5))

    def medians(self) -> dict[str, float]:
        """Milliseconds by operation since the last call; 0 where it is not made."""
        found = {name: statistics.median(taken) * 1e3 if taken else 0.0 for name, taken in self._taken.items()}
        for taken in self._taken.values():
            taken.clear()
        return found

    def _timed(self, name: str, work: object) -> None:
        began = time.perf_counter()
        work()  # type: ignore[operator]
        self._taken[name].append(time.perf_counter() - began)

    def _batch(self) -> pa.Table:
        draw, n = self._random, self._rows
        words = draw.choice(_VOCABULARY, (n, WORDS_OF_A_ROW))
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(draw.random(n * WIDTH, np.float32)), WIDTH)
        ids = pa.array(draw.choice(self._keys, n, replace=False))
        columns = [ids, pa.array(draw.random(n)), pa.array([" ".join(row) for row in words]), vectors]
        return pa.Table.from_arrays(columns, schema=SCHEMA)


def soak(at: Path, options: argparse.Namespace, show: object = None) -> list[Sample]:
    """Run it on a new table below `at`; a sample after every share of the commits. Raises: what the table raises."""
    indexes = {COLUMNS[kind]: kind for kind in options.index}
    settings = {"commit": {"interval": "0s", "optimize_interval": "1s", "compact_interval": "1s"}}
    found: list[Sample] = []
    with ingest.open(at / "table", schema=SCHEMA, key="id", regions=2, indexes=indexes, settings=settings) as table:
        client, began = Client(table, options), time.perf_counter()
        for share in range(options.samples):
            upto = options.commits * (share + 1) // options.samples
            committing = threading.Thread(target=_commit, args=(table, upto - (found[-1].commits if found else 0)))
            committing.start()
            while committing.is_alive():
                client.turn()
            committing.join()
            found.append(_sample(upto, time.perf_counter() - began, client))
            if callable(show):
                show(found[-1])
    return found


def _commit(table: ingest.Table, times: int) -> None:
    for _ in range(times):
        table.flush()
        table.commit()


def _sample(commits: int, seconds: float, client: Client) -> Sample:
    gc.collect()
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))  # noqa: PTH208
    return Sample(commits, seconds, memory, threads, descriptors, **client.medians())


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--commits", type=int, default=COMMITS, help="commits in all (%(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a put (%(default)s)")
    parser.add_argument("--keys", type=int, default=KEYS, help="distinct keys (%(default)s)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="lines printed (%(default)s)")
    parser.add_argument("--index", choices=INDEXES, nargs="*", default=list(INDEXES), help="indexes of the table (all)")
    parser.add_argument("--json", action="store_true", help="one JSON object per sample")
    parser.add_argument("--workdir", type=Path, help="where the table is put meanwhile")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; returns the exit code."""
    options = options_of(arguments)

    def show(each: Sample) -> None:
        line = (
            f"{each.commits:>8} commits {each.seconds:>7.0f} s  {each.memory >> 20:>6} MiB {each.threads:>5} threads "
            f"{each.descriptors:>5} descriptors   put {each.put:.1f}, get {each.get:.1f}, match {each.match:.1f}, "
            f"search {each.search:.1f} ms"
        )
        print(json.dumps(asdict(each)) if options.json else line, flush=True)

    with tempfile.TemporaryDirectory(dir=options.workdir) as directory:
        soak(Path(directory), options, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
