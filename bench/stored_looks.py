"""Measure how soon another process reads a durable row from storage alone, and what that read costs.

    python -m bench.stored_looks [--smoke] [--seconds N] [--rate N] [--pause MS]

A process of its own owns a table on local files with two regions. It puts rows durably at a fixed rate, one per put,
and records when each put was acknowledged. This process opens the same files read-only and calls `get` at level
`durable` for the rows that it has not seen, with a pause between two reads. Both processes use the monotonic clock of
the host, which is the same for all processes. The wait of a row runs from its acknowledgement to the return of the read
that shows it. The owner flushes, commits and collects meanwhile, so the reads also meet these steps.

Two readers take turns of five seconds: a table that is kept open and reads only what is new, and a table that is opened
for each read and replays the whole log. Requests are those of the object-store port; Lance's check for a newer version
of the base table is not included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import memwal
from bench.growth import Counting
from bench.source_data import NARROW, NARROW_KEY
from memwal import flush
from memwal.ingest.engine.table.stored import StoredTable

BAR = 0.050
"""Seconds from an acknowledgement until a read shows the row, p50."""
SECONDS, RATE, PAUSE = 60.0, 50, 0.005
SMOKE_SECONDS, SMOKE_RATE = 1.5, 20
REGIONS, AT_REST = 2, 20
_TURN = 5.0
_PATIENCE = 60.0
_SETTINGS = {
    "memtable": {"rows_max": 500},
    "commit": {"interval": "5s"},
    "gc": {"interval": "5s", "wal_age_min": "1s", "sst_age_min": "1s"},
}


def own(uri: str, rate: float) -> None:
    """Run the owner: put at `rate` until standard input ends.

    It prints each id with the time of its acknowledgement.
    """
    done = threading.Event()
    threading.Thread(target=_until_input_ends, args=(done,), daemon=True).start()
    with memwal.open(uri, schema=NARROW, key=NARROW_KEY, regions=REGIONS, settings=_SETTINGS) as table:
        began, id = time.monotonic(), 0
        while not done.wait(max(0.0, began + id / rate - time.monotonic())):
            table.put([{"id": id, "value": id / 7, "label": f"label {id}"}])
            print(id, time.monotonic(), flush=True)
            id += 1


def _until_input_ends(done: threading.Event) -> None:
    sys.stdin.read()
    done.set()


class Acks:
    """The ids that are acknowledged and not yet seen by a reader, with the times of their acknowledgements."""

    def __init__(self, owner: subprocess.Popen[str]) -> None:
        self.waiting: dict[int, float] = {}
        self.total = 0
        self._owner = owner
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._owner.stdout is not None
        for line in self._owner.stdout:
            id, at = line.split()
            self.waiting[int(id)] = float(at)
            self.total += 1


@dataclass
class Found:
    """The figures of one reader; times in seconds."""

    waits: list[float] = field(default_factory=list)
    looks: list[float] = field(default_factory=list)
    missed: int = 0
    """Rows acknowledged before a read began that the read did not return."""
    at_rest: Counter[str] = field(default_factory=Counter)
    """Requests of one read of a table without new rows."""


class Reader:
    """Read the waiting rows from storage. `kept`: with one open table; otherwise with a new one each time."""

    def __init__(self, uri: str, *, kept: bool) -> None:
        self._base, self._store, self._kept = flush.BaseTable.open(uri), Counting(Path(uri)), kept
        self._table = StoredTable(self._base, self._store)
        self._since, self.found = 0.0, Found()

    def catch_up(self, acks: Acks) -> None:
        """Read the rows of the other reader's turn; only rows acknowledged later count."""
        self.look(acks, counts=False)
        self._since = time.monotonic()

    def look(self, acks: Acks, *, counts: bool = True) -> None:
        """Read once all rows that were acknowledged before the read began."""
        wanted = dict(acks.waiting)
        began = time.monotonic()
        table = self._table if self._kept else StoredTable(self._base, self._store)
        seen = table.get(list(wanted), columns=[NARROW_KEY], level="durable")[NARROW_KEY].to_pylist()
        now = time.monotonic()
        for id in seen:
            acks.waiting.pop(id, None)
        if counts:
            self.found.looks.append(now - began)
            self.found.waits += [now - wanted[id] for id in seen if wanted[id] >= self._since]
        self.found.missed += len(wanted) - len(seen)

    def rest(self) -> None:
        """Count the requests of reads of a table without new rows."""
        self._table.count(level="durable")
        self._store.requests.clear()
        for _ in range(AT_REST):
            (self._table if self._kept else StoredTable(self._base, self._store)).count(level="durable")
        self.found.at_rest = Counter({name: number // AT_REST for name, number in self._store.requests.items()})


@contextmanager
def _owner(uri: str, rate: float) -> Iterator[Acks]:
    command = [sys.executable, "-m", "bench.stored_looks", "--own", uri, "--rate", str(rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    acks = Acks(process)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not acks.total:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the owner of the table did not begin to put")
            time.sleep(0.01)
        yield acks
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def measure(uri: str, seconds: float, rate: float, pause: float) -> tuple[dict[str, Found], int]:
    """Run both readers in turn beside the owner, `seconds` each.

    Returns their figures, and the number of acknowledged rows.
    """
    with _owner(uri, rate) as acks:
        readers = {"kept open": Reader(uri, kept=True), "opened for each look": Reader(uri, kept=False)}
        for _ in range(max(1, round(seconds / _TURN))):
            for reader in readers.values():
                reader.catch_up(acks)
                until = time.monotonic() + min(seconds, _TURN)
                while time.monotonic() < until:
                    reader.look(acks)
                    time.sleep(pause)
    for reader in readers.values():
        reader.catch_up(acks)
        reader.rest()
    return {name: reader.found for name, reader in readers.items()}, acks.total


def lines(found: dict[str, Found], acked: int) -> Iterator[str]:
    """Yield the figures as a Markdown table, and whether the bar is held."""
    yield "| reader | ack to seen, ms: p50, p99, worst | a look, ms: p50, p99 | requests of a look at rest | missed |"
    yield "|---|---|---|---|---|"
    for name, each in found.items():
        p50, p99 = np.percentile(each.waits, [50, 99]) * 1e3
        look50, look99 = np.percentile(each.looks, [50, 99]) * 1e3
        asked = ", ".join(f"{number} {kind}" for kind, number in sorted(each.at_rest.items()))
        yield (
            f"| {name} | {p50:.1f}, {p99:.1f}, {max(each.waits) * 1e3:.1f} | {look50:.1f}, {look99:.1f} "
            f"| {sum(each.at_rest.values())} ({asked}) for {REGIONS} regions | {each.missed} |"
        )
    p50 = float(np.percentile(found["kept open"].waits, 50))
    held = "held" if p50 <= BAR else "missed"
    yield f"{acked:,} rows acked; bar {BAR * 1e3:.0f} ms: {held} ({p50 * 1e3:.1f} ms, p50)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a read missed a row that was acknowledged before it began, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.stored_looks", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    parser.add_argument("--seconds", type=float, help=f"how long each reader looks ({SECONDS:g})")
    parser.add_argument("--rate", type=float, help=f"puts per second ({RATE})")
    parser.add_argument("--pause", type=float, default=PAUSE * 1e3, help="ms between two looks (%(default)g)")
    parser.add_argument("--own", metavar="URI", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    rate = given.rate or (SMOKE_RATE if given.smoke else RATE)
    if given.own:
        own(given.own, rate)
        return 0
    seconds = given.seconds or (SMOKE_SECONDS if given.smoke else SECONDS)
    with tempfile.TemporaryDirectory() as directory:
        found, acked = measure(f"{directory}/table.lance", seconds, rate, given.pause / 1e3)
    print("\n".join(lines(found, acked)), flush=True)
    return 1 if any(each.missed for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
