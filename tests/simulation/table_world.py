"""A world of the table: flush, commit, collection and upkeep of the base, and programs that interfere.

A `World` with few faults of the log and much traffic in the base table: small generations, two committers
that race, a collector that ignores ages, upkeep, another program that appends, merges, deletes, compacts, builds
and extends indexes and cleans versions up; in every fifth seed a loader past the log, in every seventh a collection of
expired rows of the other program. Repeatedly, and after every restart, `TableWorld.inspect` checks at one moment what a
crash of the whole machine would leave:

 1. `memwal verify --deep` finds nothing.
 2. Rows at the levels durable, flushed and committed: nothing acknowledged is missing, doubled or older.
 3. Lance's own reader finds what memwal's does: the base table, the base through its index, base and SSTs together.
 4. No manifest has dropped an SST whose rows are in no base version that was synced to the disk.
 5. Loaded rows are those of the last load that landed, though older tokens are repeated.

At the end, when everything is committed: a collection leaves no SST directory, a collection of orphan files deletes
every file that no version refers to, of any age, and then 1 to 5 hold again.

One seed gives one run, except for what pylance chooses inside one call: names of its files, which affect no decision,
and the order of its threads' reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import lance
import pyarrow as pa
from lance.dataset import DatasetOptimizer, LanceDataset
from lance.mem_wal import LsmScanner

import memwal.flush.commits.committer
from memwal import wal
from memwal.flush.commits.load_notes import has_landed, load_id
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table.stored import StoredTable
from memwal.memtable.index_spec import IndexKind
from tests.lance_scan import snapshots
from tests.simulation.actors import Driver, StorageReader, Visitor
from tests.simulation.lance_calls import FAULTS, Points, simulated_machine
from tests.simulation.oracle import Wrong
from tests.simulation.process import pairs
from tests.simulation.scheduler import SimulatedClock, Trace
from tests.simulation.storage import CALL_FAULTS, PUT_FAULTS, Weather
from tests.simulation.table_actors import (
    EagerCommitter,
    Expirer,
    HungryCollector,
    Inspector,
    Loader,
    Meddler,
    RestartChaos,
    RestedReader,
    Sleeper,
    Upkeep,
)
from tests.simulation.world import Shape, World

_POINTS: Points = (
    (memwal.flush.commits.committer, "catch_up", FAULTS),
    (DatasetOptimizer, "optimize_indices", FAULTS),
    (DatasetOptimizer, "compact_files", FAULTS),
    (LanceDataset, "create_scalar_index", FAULTS),
    (LanceDataset, "cleanup_old_versions", FAULTS),
)
_VISITORS: Mapping[str, type[Visitor]] = {
    "committer": EagerCommitter,
    "collector": HungryCollector,
    "upkeep": Upkeep,
    "meddler": Meddler,
    "expirer": Expirer,
    "reader": StorageReader,
    "query": Driver,
    "inspector": Inspector,
    "loader": Loader,
    "sleeper": Sleeper,
}
_LOADS_EVERY, _EXPIRES_EVERY, _SLEEPS_EVERY = 5, 7, 4
"""The world has a loader, expiring rows, or a program that writes from old handles, in every seed divisible by
these."""
_BEINGS = ("committer0", "committer1", "collector0", "upkeep0", "meddler0", "reader0", "query0")


class TableWorld(World):
    """A world of the base table; see the module. One thread."""

    indexes: tuple[tuple[str, IndexKind], ...] = (("v", "btree"),)
    chaos = RestartChaos
    option = " --table"

    def __init__(self, seed: int, directory: str, trace: Trace) -> None:
        self._has_loader = seed % _LOADS_EVERY == 0
        self._has_expirer = seed % _EXPIRES_EVERY == 0
        self.has_sleeper = seed % _SLEEPS_EVERY == 0
        super().__init__(seed, directory, trace)
        self.synced: dict[UUID, int] = {}
        """For each region the highest generation in a base version that was synced."""
        self.loads = 0
        """Number of loads that have landed; the next one may have landed a moment ago."""

    # ---- what differs from the log's world -----------------------------------------------------------------------

    def drawn(self) -> tuple[Shape, Weather]:
        chance = self.random
        shape = Shape(
            regions=chance.choice((1, 1, 2)),
            writers=chance.choice((1, 2, 2)),
            seconds=chance.choice((40.0, 70.0)),
            keys=chance.choice((4, 10, 24)),
            paces=chance.choice(((0.3, 1.0, 3.0), (1.0, 2.0, 5.0))),
            rest=chance.choice((5.0, 15.0, 40.0)),
            chaos=chance.choice((0.0, 0.3, 0.6)),
            patience=chance.choice((2, 10)),
            rows_max=chance.choice((2, 4, 8)),
            entry_size_max=chance.choice((100, 1 << 20)),
            wal_format=chance.choice(("lance", "arrow")),
            visitors=(*(name for name in _BEINGS if chance.random() < 0.8), "inspector0"),
        )
        if self._has_loader:
            shape = replace(shape, visitors=(*shape.visitors, "loader0"))
        if self._has_expirer:
            shape = replace(shape, visitors=(*shape.visitors, "expirer0"))
        if self.has_sleeper:
            shape = replace(shape, visitors=tuple(dict.fromkeys((*shape.visitors, "upkeep0", "sleeper0"))))
        weather = Weather(
            rate=chance.choice((0.0, 0.005, 0.01, 0.02)),
            put_faults=PUT_FAULTS,
            call_faults=CALL_FAULTS,
            lag=chance.choice((0.0, 0.2)),
            speed=chance.choice((0.2, 1.0)),
            lance_writes_worse=8.0,
        )
        return shape, weather

    def loaded_keys(self) -> list[int]:
        return list(Loader.keys) if self.loads else []

    def landed(self) -> int:
        """Return how many loads have landed, from their markers."""
        with self.scheduler.undisturbed():
            committed = memwal.flush.BaseTable.open(self.uri).committed
        return sum(has_landed(committed, load_id(Loader.token(number))) for number in range(self.loads + 1))

    def beings(self) -> Mapping[str, type[Visitor]]:
        return _VISITORS

    def machine(self) -> AbstractContextManager[None]:
        return self._machine()

    @contextmanager
    def _machine(self) -> Iterator[None]:
        held: dict[int, Mapping[UUID, int]] = {}

        def pruning(store: wal.ObjectStore, base: memwal.flush.BaseTable, *rest: Any) -> None:
            held[id(base.dataset)] = base.committed
            prune_all(store, base, *rest)

        def synced(dataset: lance.LanceDataset) -> None:
            sync(dataset)
            for region, generation in held[id(dataset)].items():
                self.synced[region] = max(generation, self.synced.get(region, 0))

        sync, prune_all = memwal.flush.commits.committer.sync_table, memwal.flush.commits.committer.prune_all
        with ExitStack() as patches:
            patches.enter_context(patch.object(memwal.flush.commits.committer, "sync_table", synced))
            patches.enter_context(patch.object(memwal.flush.commits.committer, "prune_all", pruning))
            patches.enter_context(simulated_machine(self.scheduler, self.weather, _POINTS))
            yield

    # ---- inspection ----------------------------------------------------------------------------------------------

    def inspect(self, when: str) -> None:
        """Check 1 to 5 of the module. Raises: Wrong."""
        with self.scheduler.undisturbed():
            verified = verify_table(self.disk.inner, self.uri, deep=True)
            if verified.findings:
                raise Wrong(f"{when}: verify: {verified.findings[0]}")
            manifests = [m for r in self.region_ids if (m := wal.ManifestStore(self.disk.inner, r).latest())]
            self._check_pruned(when, manifests)
            self._check_levels(when, manifests)
        self.say(f"{when}: clean, {verified.ssts} SSTs")

    def _check_pruned(self, when: str, manifests: list[wal.RegionManifest]) -> None:
        for manifest in manifests:
            lowest = min((sst.generation for sst in manifest.ssts), default=manifest.current_generation)
            if lowest - 1 > self.synced.get(manifest.region_id, 0):
                raise Wrong(
                    f"{when}: region {manifest.region_id} has dropped generation {lowest - 1}, the base was synced "
                    f"with {self.synced.get(manifest.region_id, 0)}"
                )

    def _check_levels(self, when: str, manifests: list[wal.RegionManifest]) -> None:
        table, oracle = StoredTable(self.base, self.disk.inner), self.oracle
        durable = list(pairs(table.scan(level="durable").read_all()))
        flushed = sorted(pairs(table.scan(level="flushed").read_all()))
        committed = sorted(pairs(table.scan(level="committed").read_all()))
        for level, rows, floors in (
            ("durable", durable, oracle.durable),
            ("flushed", flushed, oracle.flushed),
            ("committed", committed, oracle.committed),
        ):
            ours = [row for row in rows if row[0] in oracle.region_of]
            oracle.check(f"{when} at {level}", ours, dict(floors))
        loaded, landed = [row for row in committed if row[0] in Loader.keys], self.landed()
        expected = [(key, Loader.value(landed - 1)) for key in Loader.keys if landed]
        if landed < self.loads or loaded != expected:
            raise Wrong(f"{when}: {landed} loads have landed, of {self.loads}; their rows are {loaded}, not {expected}")
        base = lance.dataset(self.uri)
        _compare(f"{when}: Lance's scan of the base", base.to_table(), committed)
        for value in sorted({value for _, value in committed})[-2:]:
            found = base.to_table(filter=f"v = {value}")
            _compare(f"{when}: Lance's filter v = {value}", found, [row for row in committed if row[1] == value])
        scan = LsmScanner.from_snapshots(base, snapshots(manifests)).to_table()
        _compare(f"{when}: Lance's scan of base and SSTs", scan, flushed)

    # ---- the end -------------------------------------------------------------------------------------------------

    def compare(self, who: str, table: StoredTable, level: str) -> None:
        super().compare(who, table, level)
        self.inspect(f"the end, {who}")

    def settle(self) -> None:
        super().settle()
        clock = SimulatedClock(self.scheduler, skew=1e12)
        found = memwal.flush.collect_orphans(self.disk.inner, lance.dataset(self.uri), clock, 0.0)
        self.say("orphans collected")
        self.compare("the base table without orphans", StoredTable(self.base, self.disk.inner), "latest")
        if again := memwal.flush.collect_orphans(self.disk.inner, lance.dataset(self.uri), clock, 0.0).files:
            raise Wrong(f"orphans {again[:3]} are left over after {len(found.files)} were deleted")


class RestingWorld(TableWorld):
    """A `TableWorld` whose writers release regions at rest, which others read from storage. One thread."""

    option = " --rest"
    rests = True

    def drawn(self) -> tuple[Shape, Weather]:
        shape, weather = super().drawn()
        always = ("committer0", "committer1", "rested0", "rested1")
        shape = replace(
            shape,
            writers=self.random.choice((1, 1, 2)),
            paces=(0.3, 1.0),
            rest=5.0,
            visitors=tuple(dict.fromkeys((*shape.visitors, *always))),
        )
        return shape, weather

    def beings(self) -> Mapping[str, type[Visitor]]:
        return {**super().beings(), "rested": RestedReader}


def _compare(what: str, found: pa.Table, expected: list[tuple[int, int]]) -> None:
    if (rows := sorted(pairs(found))) != expected:
        raise Wrong(f"{what}: {sorted(set(rows) ^ set(expected))[:6]} differ in {len(rows)} rows")
