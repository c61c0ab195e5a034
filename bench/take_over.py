"""Measure how long writes stop when a daemon is killed, stopped with SIGTERM, started again, or frozen.

`python -m bench.take_over [--smoke | --trials N] [--freeze [SECONDS]] [--rate N] [--s3 [MS]]` prints a table.

Two daemons share a table on a local disk, or with `--s3` on an S3 server; with MS above 0 a proxy delays each request
by MS milliseconds. A client (`memwal.connect`) puts N durable rows (50) per second into each region, in one thread per
region. The client finds the owners itself, so the figures include its part, and up to 1/N seconds between two puts.

* kill: from the SIGKILL of a daemon until every region that it owned has acknowledged a row that was put afterwards.
* hand-over: the longest time between two acknowledgements of a region that moves when a daemon gets SIGTERM.
* give-back: the same for a region that moves back to a daemon that starts.
* start: from the start of the process until it reports that it serves its share, including Python's start and imports.
* freeze: the longest time between two acknowledgements of any region while a daemon is stopped by SIGSTOP and
  continued.

At the end every acknowledged row must be in the table.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa

import memwal
from bench.daemons import Daemons, until
from memwal.flush import BaseTable
from memwal.ingest.engine.table.public import Table
from memwal.ingest.errors import MemWalError
from tests.conftest import toml
from tests.s3_place import Place, on_s3

REGIONS = 4
SMOKE, FULL = 1, 20
RATE = 50
"""Puts per second and region."""
REST, SHORT_REST = 10.0, 1.0
"""Seconds before each trial, and before a single trial; daemons read ahead meanwhile (`daemon.read_ahead`)."""
KEYS = 400_000
"""Number of rows that can be put, each with a key of its own."""
ROWS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])


class Writer:
    """Put rows of one region at a steady rate, whoever owns it; record when each was sent and acknowledged."""

    def __init__(
        self, region: str, keys: Sequence[int], table: Table, stop: threading.Event, rate: float = RATE
    ) -> None:
        """Start the thread. `rate`: puts per second."""
        self._every = 1 / rate
        self.region, self._keys, self._table, self._stop = region, keys, table, stop
        self.acks: list[tuple[float, float]] = []
        self.errors: list[str] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def acked(self) -> Sequence[int]:
        """Return the keys of all acknowledged rows."""
        return self._keys[: len(self.acks)]

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._stop.is_set():
            number = len(self.acks)
            row = pa.table([pa.array([self._keys[number]]), pa.array(["value"])], schema=ROWS)
            sent = time.perf_counter()
            try:
                self._table.put(row, token=f"{self.region}:{number}")
                self.acks.append((sent, time.perf_counter()))
            except MemWalError as error:
                self.errors.append(str(error))
            due = max(due + self._every, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))

    def accepted_after(self, moment: float) -> float | None:
        """Return when the first row that was sent after `moment` was acknowledged; None if no such row was."""
        recent = list(itertools.takewhile(lambda ack: ack[0] >= moment, reversed(self.acks)))
        return recent[-1][1] if recent else None

    def longest_pause(self, since: float) -> float:
        """Return the longest time between two acknowledgements, beginning with the last one before `since`."""
        recent = list(itertools.takewhile(lambda ack: ack[1] > since, reversed(self.acks)))
        times = [acked for _, acked in self.acks[-len(recent) - 1 :]]
        return float(np.max(np.diff(times), initial=0.0))


def all_accepted(writers: Sequence[Writer], moment: float) -> float:
    """Wait until each of `writers` has an acknowledged row sent after `moment`, and return when the last one had it."""
    until(lambda: all(writer.accepted_after(moment) for writer in writers))
    return max(writer.accepted_after(moment) or 0.0 for writer in writers)


def keys_by_region(place: Place) -> dict[str, list[int]]:
    """Return the keys of each region."""
    base = BaseTable.open(place.uri, place.options)
    numbers = pa.table({"id": pa.array(range(KEYS))}, schema=pa.schema([ROWS.field("id")]))
    buckets = base.route(numbers)
    return {str(region): np.flatnonzero(buckets == bucket).tolist() for bucket, region in enumerate(base.regions)}


class Trials:
    """Run trials on daemons under load, and record their durations."""

    def __init__(self, daemons: Daemons, writers: Sequence[Writer], rest: float) -> None:
        self._daemons, self._writers, self._rest = daemons, writers, rest
        self.found: dict[str, list[float]] = {}

    def kill(self, endpoint: str) -> None:
        """Kill a daemon and start it again."""
        moving = self._of(endpoint)
        began = time.perf_counter()
        self._daemons.kill(endpoint)
        self._note("kill", all_accepted(moving, began) - began)
        self._start(endpoint, moving)

    def hand_over(self, endpoint: str) -> None:
        """Stop a daemon with SIGTERM and start it again."""
        moving = self._of(endpoint)
        began = time.perf_counter()
        self._daemons.end(endpoint)
        all_accepted(moving, time.perf_counter())
        self._note("hand-over", max(each.longest_pause(began) for each in moving))
        self._start(endpoint, moving)

    def freeze(self, endpoint: str, seconds: float) -> None:
        """Stop a daemon with SIGSTOP for `seconds`, and continue it."""
        time.sleep(self._rest)  # a pause begins with an acknowledgement
        began = time.perf_counter()
        with self._daemons.frozen(endpoint):
            time.sleep(seconds)
        until(self._daemons.settled)
        all_accepted(self._writers, time.perf_counter())
        self._note("freeze", max(each.longest_pause(began) for each in self._writers))

    def _of(self, endpoint: str) -> list[Writer]:
        time.sleep(self._rest)
        moving = [writer for writer in self._writers if writer.region in self._daemons.regions(endpoint)]
        all_accepted(self._writers, time.perf_counter())
        return moving

    def _start(self, endpoint: str, moving: Sequence[Writer]) -> None:
        began = time.perf_counter()
        self._note("start", self._daemons.start(endpoint))
        until(self._daemons.settled)
        all_accepted(moving, time.perf_counter())
        self._note("give-back", max(each.longest_pause(began) for each in moving))

    def _note(self, name: str, seconds: float) -> None:
        self.found.setdefault(name, []).append(seconds)


@contextmanager
def loaded(at: Path, place: Place, rate: int) -> Iterator[tuple[Daemons, list[Writer]]]:
    """Start the daemons of a new table, and a client that puts rows into each region. Raises at the end: LostRows."""
    stop = threading.Event()
    table = toml({"table": {**place.section, "key": ["id"], "columns": {"id": "int64", "value": "string"}}})
    with Daemons(at, table, REGIONS, place.environ) as daemons, memwal.connect(daemons.endpoints) as client:
        writers = [Writer(region, keys, client, stop, rate) for region, keys in keys_by_region(place).items()]
        try:
            yield daemons, writers
        finally:
            stop.set()
            for writer in writers:
                writer.thread.join()
        check(client, writers)


class LostRows(Exception):
    """An acknowledged row is not in the table."""


def check(client: Table, writers: Sequence[Writer]) -> None:
    """Check that every acknowledged row is in the table. Raises: LostRows."""
    there = set(client.scan(columns=["id"]).read_all().column("id").to_pylist())
    acked = {key for writer in writers for key in writer.acked}
    print(f"{len(acked):,} rows acked, {len(acked - there)} of them missing", flush=True)
    if acked - there:
        raise LostRows(f"keys {sorted(acked - there)[:10]} were acked and are not in the table")


def measure(
    at: Path, place: Place, trials: int, freeze: float, rate: int = RATE, rest: float = REST
) -> tuple[dict[str, list[float]], list[str]]:
    """Return the seconds of every trial by kind, and the errors that the client raised.

    `freeze`: seconds, or 0. `rest`: seconds before each trial; with a single trial SHORT_REST is used.
    """
    with loaded(at, place, rate) as (daemons, writers):
        under = Trials(daemons, writers, SHORT_REST if trials == SMOKE else rest)
        for trial in range(trials):
            endpoint = daemons.endpoints[trial % len(daemons.endpoints)]
            under.kill(endpoint)
            under.hand_over(endpoint)
        if freeze:
            under.freeze(daemons.endpoints[0], freeze)
    return under.found, [error for writer in writers for error in writer.errors]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.take_over", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one trial of each")
    parser.add_argument("--trials", type=int, default=FULL, help="trials of each (%(default)s)")
    parser.add_argument("--freeze", type=float, nargs="?", const=30.0, default=0.0, help="seconds (%(const)s)")
    parser.add_argument("--rate", type=int, default=RATE, help="puts per second and region (%(default)s)")
    parser.add_argument("--s3", type=float, nargs="?", const=0.0, help="milliseconds that a request takes longer")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        local = nullcontext(Place(str(at / "table.lance")))
        with local if given.s3 is None else on_s3(at, given.s3 / 1e3, proxied=given.s3 > 0) as place:
            found, errors = measure(at, place, SMOKE if given.smoke else given.trials, given.freeze, given.rate)
    print(f"{'':<12} {'trials':>6} {'p50':>9} {'p99':>9} {'worst':>9}")
    for name, seconds in found.items():
        p50, p99 = np.percentile(seconds, [50, 99])
        print(f"{name:<12} {len(seconds):>6} {p50:>7.3f} s {p99:>7.3f} s {max(seconds):>7.3f} s")
    print(f"{len(errors)} puts raised an error{''.join(sorted({chr(10) + error for error in errors}))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
