"""Worlds of the simulation that record their writes and reads as a history for Porcupine.

`python -m tests.histories.simulated --seeds 200` runs seeds of the log, of leases and of everything at once; the
history of a seed that is not linearizable stays, with its picture. The oracle and the ledger of the simulation judge
the same runs by other means than Porcupine, which knows only what clients saw.

Every write is durable: a non-durable write may be seen and then lost, and no level promises anything about it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import greenlet

from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import FencedError, Unavailable, UnknownOutcome
from tests.histories.clients import by_key
from tests.histories.judge import Judgement, judge
from tests.histories.record import Operation, Recorder, Steps
from tests.simulation.actors import StorageReader, Visitor
from tests.simulation.cluster_world import ClusterWorld
from tests.simulation.lease_world import LeaseWorld
from tests.simulation.ledger import Ledger, Op
from tests.simulation.oracle import Attempt, Floors, Oracle
from tests.simulation.process import OwnerReads, Process, Region, pairs
from tests.simulation.scheduler import Trace
from tests.simulation.storage import Weather
from tests.simulation.world import SeedFailed, Shape, World, simulate


class RecordingOracle(Oracle):
    """Records what clients observe, then checks it as the oracle does, unless it is `blind`.

    Thread safety. One thread.
    """

    blind = False

    def __init__(self, region_of: dict[int, int], recorder: Recorder) -> None:
        super().__init__(region_of)
        self._recorder = recorder
        self._writes: dict[int, Operation] = {}
        self._reads: dict[greenlet.greenlet, dict[int, Operation]] = {}

    def wrote(self, attempt: Attempt) -> None:
        """Record that a client sends a write."""
        client = f"write {attempt.number}"  # a client of its own: it may never return
        deletes = any(attempt.rows.values())
        given = {"keys": list(attempt.rows)} if deletes else {"rows": dict.fromkeys(attempt.rows, attempt.number)}
        self._writes[attempt.number] = self._recorder.invoke(
            client, "delete" if deletes else "put", attempt.region, **given
        )

    def acked(self, attempt: Attempt) -> None:
        if begun := self._writes.pop(attempt.number, None):
            begun.ok()
        if not self.blind:
            super().acked(attempt)

    def failed(self, attempt: Attempt) -> None:
        if begun := self._writes.pop(attempt.number, None):
            begun.failed()
        if not self.blind:
            super().failed(attempt)

    def repeated(self, attempt: Attempt) -> None:
        if begun := self._writes.pop(attempt.number, None):
            begun.failed("another attempt of its token was applied")
        if not self.blind:
            super().repeated(attempt)

    def first(self, attempt: Attempt) -> None:
        if not self.blind:
            super().first(attempt)

    def reads(self, who: str, regions: Iterable[int], level: str) -> None:
        """Record that the running actor begins a read of some regions; `check` or `read_failed` ends it."""
        keys = {region: [key for key, of in self.region_of.items() if of == region] for region in regions}
        self._reads[greenlet.getcurrent()] = {
            region: self._recorder.invoke(who, "read", region, keys=some, level=level) for region, some in keys.items()
        }

    def read_failed(self) -> None:
        """Record that the read of the running actor returned nothing, unless it has ended."""
        for begun in self._reads.pop(greenlet.getcurrent(), {}).values():
            begun.failed()

    def check(self, who: str, rows: Iterable[tuple[int, int]], floors: Floors, *, durable: bool = True) -> Floors:
        found = list(rows)
        begun_here = {} if who.endswith(("flushed", "committed")) else self._reads.pop(greenlet.getcurrent(), {})
        for region, begun in begun_here.items():
            begun.ok(by_key((key, value) for key, value in found if self.region_of[key] == region))
        return {} if self.blind else super().check(who, found, floors, durable=durable)

    def check_one_of(self, *given: Any) -> None:
        if not self.blind:
            super().check_one_of(*given)


class RecordedProcess(Process):
    """A process whose reads are recorded."""

    def read(self, region: Region, core: RegionCore) -> None:
        oracle = self.world.oracle
        assert isinstance(oracle, RecordingOracle)
        oracle.reads(f"{self.name}/{region.number}", [region.number], "latest")
        super().read(region, core)
        oracle.read_failed()


class RecordedReader(StorageReader):
    """A reader of storage whose reads at `durable` are recorded."""

    def step(self) -> None:
        oracle = self.world.oracle
        assert isinstance(oracle, RecordingOracle)
        oracle.reads(self.name, range(self.world.shape.regions), "stored")
        super().step()
        oracle.read_failed()


class ReadingClient(Visitor):
    """Reads a region from a process that believes to own it; if there are several, from the one that claimed first.

    It has its own reader, since two actors of one thread must not wait for each other's reads.
    """

    pace = (0.1, 0.5)

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._reader = Reader(world.base, self.store)

    def step(self) -> None:
        world, oracle = self.world, self.world.oracle
        number = world.random.randrange(world.shape.regions)
        alive = [process.regions[number].core for process in world.processes if not process.host.dead]
        cores = [core for core in alive if core is not None and core.failure is None]
        if not cores:
            return
        core = min(cores, key=lambda each: each.guard.epoch)
        assert isinstance(oracle, RecordingOracle)
        oracle.reads(self.name, [number], "latest")
        try:
            found = OwnerReads(world, self._reader, core).scan(level="latest").read_all()
        except (Unavailable, FencedError, UnknownOutcome) as error:
            world.say(f"read: {type(error).__name__}")
            oracle.read_failed()
            return
        mine = [row for row in pairs(found) if oracle.region_of.get(row[0]) == number]
        world.say(f"read {len(mine)} rows at latest")
        oracle.check(self.name, mine, {}, durable=False)


class _Recorded(World):
    """Common part of the recorded worlds: they append to `lines` of their class."""

    process = RecordedProcess
    oracle_kind = RecordingOracle
    lines: list[str]

    def __init__(self, seed: int, directory: str, trace: Trace) -> None:
        super().__init__(seed, directory, trace)
        recorder = Recorder(self.lines.append, f"seed-{seed}", Steps())
        self.oracle: RecordingOracle = self.oracle_kind(self.oracle.region_of, recorder)

    def beings(self) -> Mapping[str, type[Visitor]]:
        return {**super().beings(), "client": ReadingClient, "reader": RecordedReader}

    def write(self, attempt: Attempt, *, durable: bool = True) -> Write:
        self.oracle.wrote(attempt)
        return super().write(attempt)

    def compare(self, who: str, table: StoredTable, level: str) -> None:
        if level == "durable":
            self.oracle.reads("the end", range(self.shape.regions), "stored")
        super().compare(who, table, level)


class RecordedWorld(_Recorded):
    """The log with a table's reads and commits."""

    option = ", recorded"

    def drawn(self) -> tuple[Shape, Weather]:
        shape, weather = super().drawn()
        return replace(shape, visitors=(*shape.visitors, "client0")), weather


class RecordedLeases(_Recorded, LeaseWorld):
    """Owners that are read while other processes depose them."""

    option = " --leases, recorded"


class RecordingLedger(Ledger):
    """Records what clients of daemons observe, then checks it as the ledger does, unless it is `blind`.

    If the table is resized, each key counts as a region, since regions change.

    Thread safety. One thread.
    """

    all_durable = True
    blind = False
    lines: list[str]

    def __init__(self, region_of: Mapping[int, int]) -> None:
        super().__init__(region_of)
        self._at = 0
        self._recorder = Recorder(self.lines.append, "cluster", lambda: self._at)
        self._writes: dict[int, list[Operation]] = {}

    def begin(self, client: str, rows: Mapping[int, bool], token: tuple[str, int] | None, *, durable: bool) -> Op:
        op = super().begin(client, rows, token, durable=durable)
        self._at = op.began
        deletes = any(rows.values())
        self._writes[op.number] = [
            # A client of its own, since the write may never return.
            self._recorder.invoke(f"write {op.number}", "delete" if deletes else "put", region, **given)
            for region, keys in self._by_region(rows).items()
            for given in ({"keys": keys} if deletes else {"rows": dict.fromkeys(keys, op.number)},)
        ]
        return op

    def acked(self, op: Op) -> None:
        self._at = self.moment()
        for begun in self._writes.pop(op.number):
            begun.ok()
        super().acked(op)

    def refused(self, op: Op) -> None:
        self._at = self.moment()
        for begun in self._writes.pop(op.number):
            begun.failed()
        if not self.blind:
            super().refused(op)

    def read(
        self,
        who: str,
        began: int,
        rows: Iterable[tuple[int, int]],
        keys: Iterable[int],
        *,
        level: str,
        stored: bool = False,
    ) -> None:
        found, now = list(rows), self.moment()
        regions = self._by_region(keys) if level in ("latest", "durable") else {}
        for region, some in regions.items():
            self._at = began
            begun = self._recorder.invoke(who, "read", region, keys=some, level="stored" if stored else level)
            self._at = now
            begun.ok(by_key(row for row in found if row[0] in some))
        if not self.blind:
            super().read(who, began, found, keys, level=level, stored=stored)

    def _by_region(self, keys: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for key in keys:
            found.setdefault(self.region_of.get(key, key), []).append(key)
        return found


class RecordedCluster(ClusterWorld):
    """Everything at once."""

    option = ", recorded"


KINDS: dict[str, type[World]] = {"log": RecordedWorld, "leases": RecordedLeases, "cluster": RecordedCluster}


class _Blind(RecordingOracle):
    blind = True


def record(seed: int, kind: str, path: Path, *, blind: bool = False) -> None:
    """Run a seed and write its history to `path`, even if the run fails. `blind`: the oracle checks nothing.

    Raises: SeedFailed.
    """
    lines: list[str] = []
    books = type("books", (RecordingLedger,), {"lines": lines, "blind": blind})
    changes = {"lines": lines, "oracle_kind": _Blind if blind else RecordingOracle, "books": books}
    try:
        simulate(seed, kind=type(kind, (KINDS[kind],), changes))
    finally:
        path.write_text("".join(f"{line}\n" for line in lines))


def judged(seeds: Iterable[int], kind: str, directory: Path) -> tuple[Judgement, list[str]]:
    """Run seeds and judge each; return all verdicts, and a line for each seed that failed."""
    parts, failed = [], []
    for seed in seeds:
        path = directory / f"{kind}-{seed}.jsonl"
        try:
            record(seed, kind, path)
        except SeedFailed as error:
            failed.append(error.reason)
        pictures = directory / path.stem
        pictures.mkdir(exist_ok=True)
        said = judge([path], pictures=pictures)
        parts += said.parts
        failed += [f"seed {seed} of {kind}: {part}" for part in said.wrong]
    return Judgement(parts), failed


def main() -> int:
    """Run the seeds of the arguments; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many of each kind")
    parser.add_argument("--kind", choices=sorted(KINDS), action="append")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="memwal-histories-"))
    wrong = False
    for kind in given.kind or KINDS:
        began = time.monotonic()
        said, failed = judged(range(given.start, given.start + given.seeds), kind, directory)
        print(f"{kind}: {given.seeds} seeds in {time.monotonic() - began:.0f} s; {said}")
        print("\n".join(failed))
        wrong = wrong or bool(failed)
    if wrong:
        print(f"the histories: {directory}")
    else:
        shutil.rmtree(directory)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
