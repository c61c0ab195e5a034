"""Workloads to record: short programs that together take every step of the protocols on a local disk.

`python -m tests.power_cuts.workloads NAME PLACE [FAULT]` runs one, with its tables below PLACE/disk. Before and after
each call it writes a line to PLACE/marks, which appears in the trace among the calls to the file system: a call is
acknowledged before the second line. The lines are plain data, so that the checker needs nothing else.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

import memwal
import memwal.flush.backup.copying
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.load_notes import begin_load, load_id
from memwal.wal import SystemClock, SystemIds, open_store
from tests.backups import backed_up, restored
from tests.load_world import load, rows_of
from tests.power_cuts.planted import PLANTED
from tests.power_cuts.record import DISK, MARKS
from tests.support.garbage import collect
from tests.support.waits import as_only_process

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string()), pa.field("n", pa.int64())])
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "commit": {"interval": "0s", "optimize_interval": "0s", "compact_interval": "0s"},
    "gc": {"interval": "0s", "versions_interval": "0s"},
    "wal": {"read_lease": "0s", "retry_budget": "5s", "put_timeout": "5s"},
}
UPKEEP = {
    "interval": "0s",
    "optimize_interval": "1ms",
    "optimize_segments": 2,
    "compact_interval": "1ms",
    "compact_fragments": 2,
}
"""[commit]: every commit maintains the base table."""
INDEXES = {"n": "btree", "v": "fts"}
WITH_VECTORS = SCHEMA.append(pa.field("e", pa.list_(pa.float32(), 8)))


def row(id: int, value: int, *, vectors: bool = False) -> dict[str, Any]:
    """Return a row; `value` distinguishes two rows of one key in every column."""
    made = {"id": id, "v": f"word{value} " + "x" * (id * 37 % 700), "n": value}
    return {**made, "e": vector(id, value)} if vectors else made


def vector(id: int, value: int) -> list[float]:
    """Return the vector of a row, with numbers that float32 holds exactly."""
    rng = random.Random(id * 1_000_003 + value)
    return [rng.randrange(-512, 512) / 64 for _ in range(8)]


class Run:
    """Calls memwal, and marks its calls and their acknowledgements. Thread safety. Any thread."""

    def __init__(self, place: Path, *, first: int = 1) -> None:
        """`first`: the number of the first call; another process of the workload uses another range."""
        self.disk = place / DISK
        self._with_vectors: set[str] = set()
        self._marks = os.open(place / MARKS, os.O_CREAT | os.O_WRONLY)
        self.number_from(first)
        self._lock = threading.Lock()

    def number_from(self, first: int) -> None:
        """Set the number of the next call, and of the rows of the next put."""
        self._numbers, self._values = count(first), count(first)

    @contextmanager
    def marked(self, do: str, table: str, **what: Any) -> Iterator[None]:
        """Mark the beginning of a call, and its acknowledgement unless it raises."""
        number = next(self._numbers)
        self._mark({"call": number, "do": do, "table": table, **what})
        yield
        self._mark({"done": number})

    def _mark(self, said: Mapping[str, Any]) -> None:
        with self._lock:
            os.write(self._marks, json.dumps(said).encode() + b"\n")

    def open(self, name: str, *, key: str | tuple[()] = "id", upkeep: bool = False, **kind: Any) -> Any:
        """Open or create a table below the disk. `upkeep`: every commit maintains it. `kind`: as for `open_table`."""
        if kind.get("vectors"):
            self._with_vectors.add(name)
        with self.marked("open", name, keyed=bool(key), kind=kind):
            sections = {"commit": UPKEEP} if upkeep else {}
            return open_table(self.disk / name, key=key, **kind, **sections)

    def put(self, table: Any, name: str, ids: Sequence[int], token: str | None = None, *, durable: bool = True) -> None:
        """Put new rows of `ids`, all with one value."""
        value = next(self._values)
        with self.marked("put", name, ids=list(ids), value=value, token=token, durable=durable):
            table.put([row(id, value, vectors=name in self._with_vectors) for id in ids], token=token, durable=durable)

    def delete(self, table: Any, name: str, ids: Sequence[int], token: str | None = None) -> None:
        """Delete rows."""
        with self.marked("delete", name, ids=list(ids), token=token, durable=True):
            table.delete(list(ids), token=token)

    def flush(self, table: Any, name: str) -> None:
        """Flush."""
        with self.marked("flush", name):
            table.flush()

    def commit(self, table: Any, name: str) -> None:
        """Commit, and maintain the base."""
        with self.marked("commit", name):
            table.commit()

    def close(self, table: Any, name: str) -> None:
        """Close."""
        with self.marked("close", name):
            table.close()

    def collect(self, name: str) -> None:
        """Delete all garbage, of any age."""
        with self.marked("collect", name):
            collect(str(self.disk / name), orphan=0.0)

    def memwal(self, do: str, name: str, *command: str, **what: Any) -> None:
        """Run a command of the command line on a table."""
        from tests.command_line import run_here

        settings = self.disk.parent / f"{do}.toml"
        settings.write_text(f'[table]\nuri = "{self.disk / name}"\n[wal]\nread_lease = "0s"\n')
        with self.marked(do, name, **what):
            environ = {**os.environ, "COLUMNS": "200"}
            code, out, err = run_here(
                [*command[:2], str(settings), *command[2:]], cwd=self.disk.parent, environ=environ
            )
            assert code == 0, out + err


def open_table(
    uri: Path,
    *,
    key: str | tuple[()] = "id",
    regions: int = 2,
    indexed: bool = False,
    vectors: bool = False,
    arrow: bool = False,
    **sections: Mapping[str, Any],
) -> Any:
    """Open or create a table with SETTINGS, updated with `sections`.

    `indexed`: with INDEXES. `vectors`: with an indexed column of vectors. `arrow`: the format of its log.
    """
    settings = {**SETTINGS, **sections}
    if arrow:
        settings["wal"] = {**settings["wal"], "format": "arrow"}
    return memwal.open(
        str(uri),
        schema=WITH_VECTORS if vectors else SCHEMA,
        key=key,
        regions=None if uri.exists() else regions,
        indexes={**INDEXES, **({"e": "ivf_pq"} if vectors else {})} if indexed else None,
        settings=settings,
        take_over=True,
    )


# ---- the workloads ---------------------------------------------------------------------------------------------------


def life(run: Run) -> None:
    """Creation, puts of every kind, flushes, commits with indexes and maintenance, collections."""
    name = "a/b/t.lance"
    table = run.open(name, indexed=True, upkeep=True)
    for turn in range(2):
        run.put(table, name, range(10), f"p:{3 * turn + 1}")
        run.put(table, name, [turn, 20 + turn])
        run.put(table, name, range(5, 15), f"p:{3 * turn + 2}")
        run.delete(table, name, [2, 20], f"p:{3 * turn + 3}")
        run.flush(table, name)
        run.put(table, name, [2, 30 + turn], durable=False)
        with ThreadPoolExecutor(3) as threads:
            firsts = (40, 50, 60)
            tokens = [f"q{first}:{turn + 1}" for first in firsts]
            list(threads.map(partial(run.put, table, name), [(first, first + 1) for first in firsts], tokens))
        run.flush(table, name)
        run.commit(table, name)
        run.collect(name)
    run.put(table, name, [3, 70], "p:9")
    run.close(table, name)
    table = run.open(name, indexed=True, upkeep=True)
    run.put(table, name, [4, 71], "p:10")
    run.commit(table, name)
    run.close(table, name)


def small(run: Run) -> None:
    """A short life: creation, two puts, a flush, a put, a commit, a put. For runs that must be cheap."""
    name = "new/t.lance"
    table = run.open(name)
    run.put(table, name, range(6), "p:1")
    run.put(table, name, [1, 7], "p:2")
    run.flush(table, name)
    run.delete(table, name, [3], "p:3")
    run.commit(table, name)
    run.put(table, name, [2, 8], "p:4")
    run.flush(table, name)
    run.commit(table, name)
    run.put(table, name, [9], "p:5")
    run.close(table, name)


def driver(run: Run) -> None:
    """A sink's driver on a table without a key: each micro-batch has a token, which is stored after the ack."""
    name = "queue.lance"
    table = run.open(name, key=())
    for batch in range(8):
        run.put(table, name, range(10 * batch, 10 * batch + 5), f"query:{batch}")
        if batch % 3 == 1:
            run.flush(table, name)
        if batch % 3 == 2:
            run.commit(table, name)
            run.collect(name)
    run.close(table, name)


def take_over(run: Run) -> None:
    """Another process claims the table of this one, which detects it at its next put."""
    name = "taken.lance"
    table = run.open(name)
    run.put(table, name, range(8), "p:1")
    run.flush(table, name)
    run.put(table, name, [1, 9], "p:2")
    command = [sys.executable, "-m", "tests.power_cuts.workloads", "taker", str(run.disk.parent)]
    subprocess.run(command, check=True, timeout=300)
    try:
        run.put(table, name, [2, 10], "p:99")  # refused, so never acknowledged
    except memwal.FencedError:
        with suppress(memwal.FencedError):
            table.close()
    else:
        raise AssertionError("the writer was not fenced")


def taker(run: Run) -> None:
    """The other process of `take_over`."""
    name = "taken.lance"
    table = run.open(name)
    run.put(table, name, [1, 11], "q:1")
    run.flush(table, name)
    run.put(table, name, [12], "q:2")
    run.commit(table, name)
    run.collect(name)
    run.close(table, name)


def loading(run: Run) -> None:
    """Loads past the log, with puts before and after."""
    name = "loaded.lance"
    table = run.open(name, indexed=True)
    run.put(table, name, range(6), "p:1")
    run.flush(table, name)
    run.commit(table, name)
    for turn in range(2):
        value, ids = 1000 + turn, list(range(4 + turn, 30))
        rows = pa.Table.from_pylist([row(id, value) for id in ids], BaseTable.open(str(run.disk / name)).schema)
        with run.marked("put", name, ids=ids, value=value, token=None, durable=True):
            uri = str(run.disk / name)
            store, token, clock = open_store(uri), f"load-{turn}", SystemClock()
            attempt = begin_load(store, BaseTable.open(uri), load_id(token), clock, SystemIds())
            load(uri, {}, store, rows_of(rows, ["id"]), token, attempt, clock=clock)
            attempt.withdraw(store)
        run.put(table, name, [5, 31], f"p:{2 + turn}")
        run.flush(table, name)
        run.commit(table, name)
        run.collect(name)
    run.close(table, name)


def copies(run: Run) -> None:
    """A backup beside a writer, and a restore of it."""
    name = "copied.lance"
    table = run.open(name)
    run.put(table, name, range(8), "p:1")
    run.flush(table, name)
    run.commit(table, name)
    run.put(table, name, [1, 9], "p:2")
    run.flush(table, name)
    run.put(table, name, [10], "p:3")
    with patch.object(memwal.flush.backup.copying, "WHOLE_MAX", 2000):  # some objects are streamed
        with run.marked("backup", name, to="backups/first"):
            backed_up(str(run.disk / name), str(run.disk / "backups/first"), at_once=2)
        run.put(table, name, [2, 11], "p:4")
        with run.marked("restore", "restored/t.lance", source=name, backup="backups/first"):
            restored(str(run.disk / "backups/first"), str(run.disk / "restored/t.lance"), at_once=2)
    run.close(table, name)
    table = run.open("restored/t.lance")
    run.put(table, "restored/t.lance", [1, 12], "p:9")
    run.close(table, "restored/t.lance")


def resizing(run: Run) -> None:
    """Two changes of the number of regions."""
    name = "resized.lance"
    table = run.open(name)
    run.put(table, name, range(12), "p:1")
    run.flush(table, name)
    run.put(table, name, [1, 13], "p:2")
    run.close(table, name)
    for turn, to in enumerate((3, 1)):
        run.memwal("resize", name, "regions", "resize", "--to", str(to), to=to)
        table = run.open(name)
        run.put(table, name, [2, 14 + turn], f"p:{3 + turn}")
        run.flush(table, name)
        run.commit(table, name)
        run.close(table, name)
        run.collect(name)


def vectors(run: Run) -> None:
    """Vector, full-text and scalar indexes of SSTs and of the base: built, extended and merged."""
    name = "vectors.lance"
    table = run.open(name, indexed=True, vectors=True, regions=1, upkeep=True)
    run.put(table, name, range(300), "p:1")
    run.flush(table, name)
    run.commit(table, name)  # trains the index
    for turn in range(2):
        run.put(table, name, range(290 + 10 * turn, 310 + 10 * turn), f"p:{2 + turn}")
        run.delete(table, name, [turn, 295 + turn], f"q:{1 + turn}")
        run.flush(table, name)
        run.put(table, name, [5, 400 + turn])
        run.commit(table, name)
        run.collect(name)
    run.close(table, name)


def shards(run: Run) -> None:
    """A log in Arrow format, as Lance's ShardWriter writes it."""
    name = "shards.lance"
    table = run.open(name, arrow=True)
    for turn in range(2):
        run.put(table, name, range(6), f"p:{3 * turn + 1}")
        run.put(table, name, [1, 7 + turn], f"p:{3 * turn + 2}")
        run.delete(table, name, [3], f"p:{3 * turn + 3}")
        run.flush(table, name)
        run.put(table, name, [2, 9 + turn])
        run.commit(table, name)
        run.collect(name)
    run.close(table, name)
    table = run.open(name, arrow=True)
    run.put(table, name, [4, 12], "p:7")
    run.close(table, name)


def recovery(run: Run) -> None:
    """Open the tables after a power cut and continue with them. Not a workload by itself, see `again`.

    Every recovery of one table puts its own rows and tokens.
    """
    told = json.loads((run.disk.parent / OPENED).read_text())
    turn = told["turn"]
    run.number_from(_RECOVERIES + 1000 * turn)
    id = 5000 + 10 * turn
    for opened in told["tables"]:
        name = opened["name"]
        if opened["resize"]:
            run.memwal("resize", name, "regions", "resize", "--to", str(opened["resize"]), to=opened["resize"])
        table = run.open(name, key="id" if opened["keyed"] else (), **opened["kind"])
        run.put(table, name, [id, id + 1], f"again{turn}:1")
        run.flush(table, name)
        run.commit(table, name)
        run.put(table, name, [id + 2])
        run.collect(name)
        run.close(table, name)


OPENED = "opened"
"""Name of the file, beside the disk, that lists the tables for `recovery`, and the number of power cuts."""
WORKLOADS: Mapping[str, Callable[[Run], None]] = {
    each.__name__: each for each in (life, small, driver, take_over, loading, copies, resizing, vectors, shards)
}
_OTHER_PROCESSES = {"taker": 1_000_000}
"""Number of the first call of each program."""
_RECOVERIES = 2_000_000
_ALL = {**WORKLOADS, "taker": taker, "recovery": recovery}


def main(name: str, place: str, fault: str = "") -> None:
    """Run one workload; `fault`: one of PLANTED, "" for none."""
    first = _OTHER_PROCESSES.get(name, 1)
    with ExitStack() as stack:
        stack.enter_context(as_only_process())
        if fault:
            stack.enter_context(PLANTED[fault]())
        _ALL[name](Run(Path(place), first=first))


if __name__ == "__main__":
    main(*sys.argv[1:])
