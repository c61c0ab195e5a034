"""Actors of a `TableWorld`: an inspector, a hungry collector, upkeep of the base, another program, a loader."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import lance
import pyarrow as pa

from memwal import flush, wal
from memwal.flush.base.table import BaseTable
from memwal.flush.base.ttl import Expiry
from memwal.flush.commits.expiry import ExpiredRows
from memwal.flush.commits.load import RowsToLoad, load
from memwal.flush.commits.load_notes import begin_load, end_abandoned, load_id
from memwal.flush.commits.maintenance import CompactionLimits, clean_up, compact, merge_segments
from memwal.flush.commits.thinning import VersionRules
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.read.local import LevelReads
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.errors import FencedError, Unavailable, UnknownOutcome
from tests.simulation.actors import Chaos, Collector, Committer, Stranger, Visitor
from tests.simulation.oracle import Wrong
from tests.simulation.process import EXPECTED, pairs
from tests.simulation.scheduler import SimulatedClock
from tests.simulation.storage import OUTAGES

if TYPE_CHECKING:
    from tests.simulation.table_world import TableWorld
    from tests.simulation.world import World

_WAY_OFF = 1e6
"""Seconds that a hungry collector's clock is ahead, so that everything is old enough."""
_FEW_VERSIONS = VersionRules(age_min=0.0, hourly=0.0, daily=0.0, newest=1)


class Inspector(Visitor):
    """Inspects everything at one moment; see `TableWorld.inspect`."""

    pace = (2.0, 5.0, 12.0)

    def step(self) -> None:
        cast("TableWorld", self.world).inspect("an inspection")


class RestartChaos(Chaos):
    """Chaos, with an inspection of what a killed process has left, before its successor starts."""

    def revive(self) -> None:
        before = [*self.world.processes, *self.world.visitors]
        super().revive()
        if before != [*self.world.processes, *self.world.visitors]:
            cast("TableWorld", self.world).inspect("a restart")

    def _strike(self) -> None:
        """Mostly kill, with short outages, so that commits make progress."""
        world = self.world
        victim = world.random.choice([*world.processes, *world.visitors])
        until = world.scheduler.elapsed + world.random.choice((0.5, 2.0))
        chosen = world.random.choice(("kill", "kill", "kill", "stop", "outage"))
        world.say(f"{chosen} {victim.name} until {until:.1f}")
        if chosen == "kill":
            world.scheduler.kill(victim.host)
        elif chosen == "stop":
            world.scheduler.stop(victim.host, until + 4.0)
        else:
            world.weather.outages.append((until, world.random.choice(OUTAGES), victim.host))


class EagerCommitter(Committer):
    """Commits as soon as there are SSTs to commit."""

    pace = (0.1, 0.5, 2.0)


class HungryCollector(Collector):
    """Deletes all garbage in every region, of any age."""

    pace = (0.2, 1.0, 3.0)

    def step(self) -> None:
        world = self.world
        for region in world.region_ids:
            clock = SimulatedClock(world.scheduler, skew=_WAY_OFF)
            try:
                world.prune_manifests(self.store, region, clock, 0.0)
                wal.WalCollector(self.store, region, world.codec, clock, workers=1).collect(0.0)
                collector = flush.SstCollector(self.store, region, clock, workers=1)
                listing = collector.list_region()
                needs = flush.base_needs(self.store, flush.BaseTable.open(world.uri), clock.now())
                found = collector.collect(listing, needs, 0.0)
            except EXPECTED as error:
                world.say(f"collect: {type(error).__name__}")
                continue
            world.say(f"collected {found.committed} committed and {found.abandoned} abandoned SSTs")
            if found.unaccounted:
                raise Wrong(f"{self.name}: {found}")


class Upkeep(Visitor):
    """Maintains the base between commits, as a committer does, with very low limits."""

    pace = (1.0, 3.0, 6.0)

    def step(self) -> None:
        world, chosen = self.world, self.world.random.choice(("merge", "compact", "clean up"))
        try:
            dataset = lance.dataset(world.uri)
            if chosen == "merge":
                merge_segments(dataset, [spec.name for spec in world.base.indexes], 2)
            elif chosen == "compact":
                compact(dataset, CompactionLimits(fragments_min=2, deleted_min=0.1))
            else:
                clean_up(self.store, dataset, _FEW_VERSIONS, self.clock.now() + _WAY_OFF)
        except (*EXPECTED, RuntimeError, ValueError) as error:
            world.say(f"upkeep, {chosen}: {type(error).__name__}")
        else:
            world.say(f"upkeep: {chosen}, version {dataset.version}")


class _OfStrangers(Expiry):
    """An expiry that covers the meddler's rows only: their value is 0."""

    @property
    def expired(self) -> str:
        return f"{self.column} < {self.least}"


class Expirer(Visitor):
    """Collects expired rows: those of the meddler. After a compaction they share fragments with other rows."""

    pace = (1.0, 3.0, 6.0)

    def __init__(self, world: TableWorld, name: str) -> None:
        self._rows = ExpiredRows()
        super().__init__(world, name)

    def step(self) -> None:
        world, dataset = self.world, None
        try:
            dataset = lance.dataset(world.uri)
            rows = self._rows.collect(dataset, _OfStrangers("v", pa.int64(), 1), {})
            world.say(f"expired rows deleted: {rows}")
        except (OSError, RuntimeError, ValueError) as error:
            world.say(f"deleting expired rows: {type(error).__name__}")
        finally:
            with world.scheduler.undisturbed():
                there = lance.dataset(world.uri).to_table(columns=["id"])["id"].to_pylist()
            world.strangers.update({key: key in there for key in world.strangers})


class Meddler(Stranger):
    """Another program with its own rows that changes the table in any way that Lance allows, at any moment."""

    pace = (0.5, 2.0, 5.0)

    def step(self) -> None:
        world = self.world
        deeds = (self._append, self._append, self._merge, self._delete, self._compact, self._build, self._extend)
        deed = world.random.choice(deeds if world.has_sleeper else (*deeds, self._clean_up))
        self._do(deed, (0.0, 0.05, 0.3))

    def _do(self, deed: Callable[[lance.LanceDataset], None], pauses: tuple[float, ...]) -> None:
        """Open the table, wait, and change it from this handle."""
        world = self.world
        try:
            dataset = lance.dataset(world.uri)
            world.scheduler.pause(world.random.choice(pauses))
            deed(dataset)
        except (OSError, RuntimeError, ValueError) as error:
            world.say(f"{deed.__name__}: {type(error).__name__}")
        else:
            world.say(f"{deed.__name__}, version {dataset.version}")

    def _append(self, dataset: lance.LanceDataset) -> None:
        fresh = self._fresh()
        dataset.insert(self._rows(fresh))
        self.world.strangers.update(dict.fromkeys(fresh, True))

    def _merge(self, dataset: lance.LanceDataset) -> None:
        """Merge its own rows again, and new ones; read afterwards whether it took effect, since answers get lost."""
        fresh = self._fresh()
        old = [key for key, there in self.world.strangers.items() if there][:2]
        merge = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().use_index(False)
        self.world.strangers.update(dict.fromkeys(fresh, False))
        try:
            merge.conflict_retries(0).execute(self._rows([*old, *fresh]))
        finally:
            with self.world.scheduler.undisturbed():
                there = lance.dataset(self.world.uri).to_table(columns=["id"])["id"].to_pylist()
            self.world.strangers.update({key: key in there for key in (*old, *fresh)})

    def _delete(self, dataset: lance.LanceDataset) -> None:
        there = sorted(key for key, there in self.world.strangers.items() if there)
        if there:
            gone = self.world.random.choice(there)
            dataset.delete(f"id = {gone}")
            self.world.strangers[gone] = False

    @staticmethod
    def _compact(dataset: lance.LanceDataset) -> None:
        dataset.optimize.compact_files()

    @staticmethod
    def _build(dataset: lance.LanceDataset) -> None:
        dataset.create_scalar_index("v", "BTREE", name="v_idx", replace=True)

    @staticmethod
    def _extend(dataset: lance.LanceDataset) -> None:
        dataset.optimize.optimize_indices()

    @staticmethod
    def _clean_up(dataset: lance.LanceDataset) -> None:
        dataset.cleanup_old_versions(older_than=timedelta(0))

    def _fresh(self) -> list[int]:
        return [self.first_key + len(self.world.strangers) + n for n in range(3)]

    def _rows(self, keys: list[int]) -> pa.Table:
        return pa.table({"id": keys, "v": [0] * len(keys)}, schema=self.world.base.schema)


class RestedReader(Visitor):
    """Reads regions at rest as a process does that claims regions at their first use. It must miss nothing durable."""

    pace = (0.1, 0.3, 1.0)

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._regions = RegionSet(world.base, world.context(self.store, self.clock, name))
        self._regions.claim = lambda *_: None
        self._reader = Reader(world.base, self.store, clock=self.clock)

    def step(self) -> None:
        world, oracle = self.world, self.world.oracle
        number = world.random.randrange(world.shape.regions)
        known = {key: order for key, order in oracle.durable.items() if oracle.region_of[key] == number}
        try:
            found = _ReadsAtRest(world.base, self._reader, self._regions, world.region_ids[number]).scan().read_all()
        except (Unavailable, FencedError, UnknownOutcome) as error:
            world.say(f"reads no region at rest: {type(error.__cause__ or error).__name__}")
            return
        mine = [row for row in pairs(found) if oracle.region_of.get(row[0]) == number]
        world.say(f"read {len(mine)} rows of region {number} at rest")
        oracle.check(self.name, mine, known)


class _ReadsAtRest(LevelReads):
    """Reads of one region, which fail with Unavailable unless it is at rest."""

    def __init__(self, base: BaseTable, reader: Reader, regions: RegionSet, region: UUID) -> None:
        super().__init__(base, reader)
        self._regions, self._region = regions, region

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        del level, keys, again
        (view,) = self._regions.sources([self._region], 1, flushed=False)
        assert isinstance(view, RegionView)
        return [view]


class Sleeper(Meddler):
    """A program that changes the table from a handle that is older than versions deleted since.

    In its worlds no other program deletes versions: only memwal raises a barrier above those that it deletes.
    """

    pace = (0.2, 1.0)
    first_key = 30_000

    def step(self) -> None:
        deed = self.world.random.choice((self._merge, self._delete, self._delete, self._delete, self._compact))
        self._do(deed, (2.0, 5.0, 10.0))

    def _delete(self, dataset: lance.LanceDataset) -> None:
        """Delete a row that its version has: Lance deletes nothing otherwise."""
        has = dataset.to_table(columns=["id"])["id"].to_pylist()
        if there := sorted(key for key in has if self.world.strangers.get(key)):
            gone = self.world.random.choice(there)
            dataset.delete(f"id = {gone}")
            self.world.strangers[gone] = False


class Loader(Visitor):
    """Loads three keys of its own past the log repeatedly, and repeats tokens that have landed.

    A load that lands twice would reset the rows to older values. From time to time it ends silent attempts of other
    loaders, as a delete with a filter does.
    """

    pace = (1.0, 3.0, 6.0)
    keys = (20_000, 20_001, 20_002)

    @staticmethod
    def token(number: int) -> str:
        """Return the token of a load."""
        return f"load {number}"

    @staticmethod
    def value(number: int) -> int:
        """Return the value of a load's rows; no writer uses such values."""
        return 1_000_000 + number

    def step(self) -> None:
        world = cast("TableWorld", self.world)
        landed, ids = world.loads, world.ids(self.name)
        number = landed if not landed or world.random.random() < 0.6 else world.random.randrange(landed)
        table = pa.table({"id": self.keys, "v": [self.value(number)] * 3}, schema=world.base.schema)
        rows = RowsToLoad(table.schema, 3, table.select(["id"]), lambda: iter(table.to_batches()))
        token, patience = self.token(number), world.shape.patience
        try:
            if world.random.random() < 0.3:
                end_abandoned(self.store, lambda: BaseTable.open(world.uri), self.clock)
            attempt = begin_load(self.store, BaseTable.open(world.uri), load_id(token), self.clock, ids)
            report = load(
                world.uri, None, self.store, rows, token, attempt, clock=self.clock, ids=ids, retries=patience
            )
            attempt.withdraw(self.store)
        except (*EXPECTED, flush.CommitConflict, flush.LoadEnded, RuntimeError) as error:
            world.say(f"load {number}: {type(error).__name__}")
        else:
            world.say(f"load {number}: {'landed before' if report.already else 'landed'}")
            if number < landed and not report.already:
                raise Wrong(f"{self.name}: load {number} landed twice")
        finally:  # answers get lost, and processes are killed
            world.loads = world.landed()
