"""Actors beside the writers: readers, committers, collectors, other programs, a Spark driver, and chaos."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from memwal import flush, wal
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import Unavailable
from memwal.wal.layout import manifest_key
from tests.simulation.oracle import Floors, Order, Wrong
from tests.simulation.process import EXPECTED, pairs
from tests.simulation.scheduler import Host, SimulatedClock
from tests.simulation.storage import OUTAGES, SimulatedStore

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World


class Visitor:
    """A process without a region. A killed one is replaced by a new object."""

    pace: tuple[float, ...] = (0.2, 1.0, 3.0)

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.host = world, name, world.host(name)
        self.store = SimulatedStore(world.disk, world.weather, world.scheduler, self.host)
        self.clock = SimulatedClock(world.scheduler)
        world.spawn(name, self.live, self.host)

    def live(self) -> None:
        while self.world.open:
            self.world.rest(self.pace)
            self.step()

    def step(self) -> None:
        """Do one visit."""
        raise AssertionError("every visitor has its own")


class StorageReader(Visitor):
    """Reads the table from storage at any level. A later read must never show an older state than an earlier one."""

    def __init__(self, world: World, name: str) -> None:
        self._table = StoredTable(world.base, SimulatedStore(world.disk, world.weather, world.scheduler, Host(name)))
        self._seen: dict[str, Floors] = {}
        super().__init__(world, name)
        self._table = StoredTable(world.base, self.store)

    def step(self) -> None:
        level: Level = self.world.random.choice(("durable", "durable", "durable", "flushed", "committed"))
        oracle = self.world.oracle
        known = {"durable": oracle.durable, "flushed": oracle.flushed, "committed": oracle.committed}[level]
        before, one_of = self._seen.get(level, {}), list(oracle.one_of)
        floors = {key: max(known.get(key, (0, 0)), before.get(key, (0, 0))) for key in {*known, *before}}
        try:
            found = self._table.scan(level=level).read_all()
        except Unavailable as error:
            self.world.say(f"read {level}: {type(error.__cause__ or error).__name__}")
            return
        ours = [row for row in pairs(found) if row[0] in oracle.region_of]
        self.world.say(f"read {len(ours)} rows at {level}")
        self._seen[level] = oracle.check(f"{self.name} at {level}", ours, floors)
        if level == "durable":
            oracle.check_one_of(self.name, ours, one_of)


class Client(Visitor):
    """Begins reads at `latest` from a process that believes to own a region; if there are several, from the one that
    claimed first.

    `Process.read` checks the rows of that read; this class checks only whether a read may begin.
    """

    pace = (0.03, 0.1)

    def step(self) -> None:
        number = self.world.random.randrange(self.world.shape.regions)
        alive = [process.regions[number].core for process in self.world.processes if not process.host.dead]
        cores = [core for core in alive if core is not None and core.failure is None]
        if not cores:
            return
        core = min(cores, key=lambda each: each.guard.epoch)
        others = [each for each in self.world.oracle.attempts if each.region == number and each.answered]
        newer = [each for each in others if each.order[0] > core.guard.epoch]
        ticket = core.lease.ticket()
        if not core.alone or not core.lease.covers(ticket):
            try:
                core.prove()
            except EXPECTED as error:
                self.world.say(f"begins no read: {type(error).__name__}")
                return
        if newer:
            raise Wrong(f"epoch {core.guard.epoch} answers a read, though {newer[-1]} was acknowledged before it began")


class TailReader(Visitor):
    """Reads the WAL tail of one region from storage. The rows must be those of the acknowledged writes, in order."""

    pace = (0.1, 0.5, 2.0)

    def __init__(self, world: World, name: str) -> None:
        self._region = world.random.randrange(world.shape.regions)
        super().__init__(world, name)

    def step(self) -> None:
        world = self.world
        region = world.region_ids[self._region]
        acked = [each for each in world.oracle.attempts if each.region == self._region and each.position]
        try:
            manifest = wal.ManifestStore(self.store, region, clock=self.clock).latest()
            after, log_id = (0, "") if manifest is None else (manifest.replay_after, manifest.log_id)
            known: dict[str, Any] = {"clock": self.clock, "options": world.wal_options, "log_id": log_id}
            entries, _ = wal.read_tail(self.store, region, world.codec, after, **known)
        except wal.Overtaken:
            world.say("overtaken")
            return
        except EXPECTED as error:
            world.say(f"read of the tail: {type(error).__name__}")
            return
        world.say(f"tail after {after}: {[entry.position for entry in entries]}")
        numbers = self._checked(entries)
        for each in acked:
            if each.position > after and each.number not in numbers and not any(each.rows.values()):
                raise Wrong(f"{self.name}: the tail after position {after} does not hold {each}")

    def _checked(self, entries: list[wal.Entry]) -> set[int]:
        """Return the numbers of the attempts in `entries`. Checks that their orders never go back, and that none
        failed."""
        last: Order = (0, 0)
        numbers: set[int] = set()
        for entry in entries:
            for value in filter(None, entry.rows.column("v").to_pylist()):
                attempt = self.world.oracle.attempts[value - 1]
                if attempt.state == "failed":
                    raise Wrong(f"{self.name}: position {entry.position} holds {attempt}, which failed")
                if attempt.order < last:
                    raise Wrong(f"{self.name}: position {entry.position} holds {attempt} after order {last}")
                last = attempt.order
                numbers.add(value)
        return numbers


class Committer(Visitor):
    """Commits published SSTs; one of two committers that race."""

    pace = (0.5, 2.0, 6.0)

    def step(self) -> None:
        world = self.world
        published = dict(world.oracle.flushed)
        try:
            report = flush.commit(
                world.uri, None, self.store, clock=self.clock, ids=world.ids(self.name), retries=world.shape.patience
            )
        except (*EXPECTED, flush.CommitConflict, RuntimeError) as error:
            world.say(f"commit: {type(error).__name__}")
            return
        world.say(
            f"committed {report.ssts} SSTs: +{report.rows_inserted} ~{report.rows_updated} -{report.rows_deleted}"
        )
        for key, order in published.items():
            world.oracle.committed[key] = max(world.oracle.committed.get(key, (0, 0)), order)


class Collector(Visitor):
    """Deletes WAL entries and SSTs that are no longer needed."""

    pace = (0.3, 1.0, 3.0)

    def step(self) -> None:
        world = self.world
        region = world.random.choice(world.region_ids)
        clock = SimulatedClock(world.scheduler, skew=world.random.choice((0.0, 0.0, 1000.0)))
        age, dry_run = world.random.choice((0.0, 0.0, 2.0, 20.0)), world.random.random() < 0.1
        try:
            if not dry_run:
                world.prune_manifests(self.store, region, clock, age)
            garbage = wal.WalCollector(self.store, region, world.codec, clock, workers=1).collect(age, dry_run=dry_run)
            collector = flush.SstCollector(self.store, region, clock, workers=1)
            listing = collector.list_region()
            needs = flush.base_needs(self.store, flush.BaseTable.open(world.uri), clock.now() - age)
            ssts = collector.collect(listing, needs, age, dry_run=dry_run)
        except EXPECTED as error:
            world.say(f"collect: {type(error).__name__}")
            return
        world.say(f"collected {garbage.entries} entries up to {garbage.boundary}, kept {garbage.fences} fences")
        world.say(f"collected {ssts.committed} committed and {ssts.abandoned} abandoned SSTs")
        if ssts.unaccounted:
            raise Wrong(f"{self.name}: {ssts}")


class Sleeper(Visitor):
    """Reads the newest manifest, sleeps, and then writes the next version, whose slot may have been pruned
    meanwhile."""

    def step(self) -> None:
        world = self.world
        region = world.random.choice(world.region_ids)
        manifests = wal.ManifestStore(self.store, region, ids=world.ids(self.name), clock=self.clock)
        try:
            if (read := manifests.latest()) is None:
                return
            world.scheduler.pause(world.random.choice((0.0, 2.0, 10.0)))
            written = manifests.create(read, replace(read, version=read.version + 1))
        except EXPECTED as error:
            world.say(f"sleeper: {type(error).__name__}")
            return
        world.say(f"sleeper: version {read.version + 1} {'was taken' if written is None else 'is mine'}")
        if written and (manifest_key(region, written.version), written.encode()) in world.disk.refilled:
            raise Wrong(f"{self.name}: believes to have written version {written.version}, which was pruned")


class Stranger(Visitor):
    """Another program that uses the base table: it appends, deletes its own rows, compacts."""

    pace = (1.0, 4.0, 10.0)
    first_key = 10_000

    def step(self) -> None:
        world, chosen = self.world, self.world.random.random()
        rows = world.strangers
        try:
            dataset = lance.dataset(world.uri)
            world.scheduler.pause(world.random.choice((0.0, 0.05, 0.3)))
            if chosen < 0.5:
                fresh = [self.first_key + len(world.strangers) + n for n in range(3)]
                table = pa.table({"id": fresh, "v": [0] * 3}, schema=world.base.schema)
                dataset.insert(table)
                rows.update(dict.fromkeys(fresh, True))
            elif chosen < 0.75 and rows:
                gone = world.random.choice(sorted(rows))
                dataset.delete(f"id = {gone}")
                rows[gone] = False
            else:
                dataset.optimize.compact_files()
        except (OSError, RuntimeError) as error:
            world.say(f"stranger: {type(error).__name__}")
        else:
            world.say(f"stranger {'appends' if chosen < 0.5 else 'deletes or compacts'}, version {dataset.version}")


class Driver(Visitor):
    """A Spark query: delivers each micro-batch to every region, in order, until all have it, and sometimes once
    more."""

    pace = (0.0, 0.5, 2.0)

    def __init__(self, world: World, name: str) -> None:
        self._batch = 0
        super().__init__(world, name)

    def step(self) -> None:
        """Deliver one micro-batch at least once."""
        self._batch += 1
        self.world.say(f"batch {self._batch} begins")
        rows = [self.world.random_rows(region, 6) for region in range(self.world.shape.regions)]
        for _ in range(self.world.random.choice((1, 1, 1, 2, 3))):
            for region, each in enumerate(rows):
                while self.world.open and not self._deliver(region, each):
                    self.world.scheduler.pause(0.1)

    def _deliver(self, region: int, rows: dict[int, bool]) -> bool:
        world = self.world
        process = world.random.choice(world.processes)
        token = (self.name, self._batch)
        attempt = world.oracle.attempt(region, rows, token)
        write = world.write(attempt)
        process.regions[region].inbox.append((write, attempt))
        world.say(f"sends {attempt} to {process.name}")
        for _ in range(world.random.choice((3, 30))):
            world.scheduler.pause(0.2)
            if write.done.done() or process.host.dead:
                break
        return not process.host.dead and write.done.done() and write.done.exception() is None


class Chaos:
    """Kills processes, stops them for a while, restarts them, and causes outages of the storage."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.spawn("chaos", self.live, Host("chaos"))

    def live(self) -> None:
        world = self.world
        while world.open:
            world.rest((0.2, 1.0, 4.0))
            self.revive()
            if world.random.random() < world.shape.chaos:
                self._strike()

    def revive(self) -> None:
        for beings in (self.world.processes, self.world.visitors):
            for place, each in enumerate(beings):
                if each.host.dead and self.world.random.random() < 0.5:
                    self.world.say(f"{each.name} comes back")
                    beings[place] = type(each)(self.world, each.name)  # type: ignore[call-overload]

    def _strike(self) -> None:
        world = self.world
        beings: list[Process | Visitor] = [*world.processes, *world.processes, *world.visitors]
        victim = world.random.choice(beings)
        until = world.scheduler.elapsed + world.random.choice((0.5, 3.0, 12.0))
        chosen = world.random.choice(("kill", "stop", "stop", "outage", "outage for all"))
        world.say(f"{chosen} {victim.name} until {until:.1f}")
        if chosen == "kill":
            world.scheduler.kill(victim.host)
        elif chosen == "stop":
            world.scheduler.stop(victim.host, until)
        else:
            whom = None if chosen == "outage for all" else victim.host
            world.weather.outages.append((until, world.random.choice(OUTAGES), whom))


__all__ = ["Chaos", "Collector", "Committer", "Driver", "Sleeper", "StorageReader", "Stranger", "TailReader", "Visitor"]
