"""A writer process: it claims the regions, serves its own clients and the driver's batches, freezes and flushes.

Two actors act for each `RegionCore`, as two threads do in a real process, and with some seeds a third one for
each append of lingering rows. When the core ends, fenced or poisoned, the process claims the region again after a
while, so that several processes compete for it. After a kill the process restarts with nothing in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal import wal
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.read.local import LevelReads
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.region.core import RETRY_FLUSH, RegionCore
from memwal.ingest.engine.region.log import NOTHING_WRITTEN
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.errors import FencedError, Unavailable, UnknownOutcome
from tests.simulation.oracle import Attempt, Floors, Order
from tests.simulation.scheduler import Host, SimulatedClock
from tests.simulation.storage import SimulatedStore

if TYPE_CHECKING:
    from tests.simulation.world import World

EXPECTED = (wal.Fenced, wal.Poisoned, wal.OutcomeUnknown, wal.StoreUnavailable, wal.StoreRefused, OSError)
"""Errors that storage and rivals may cause in a writer; any other error, above all Corrupt, fails the run."""


@dataclass
class Region:
    """One region inside a process."""

    number: int
    core: RegionCore | None = None
    inbox: deque[tuple[Write, Attempt]] = field(default_factory=deque)
    ends: dict[int, Order] = field(default_factory=dict)
    """For each generation frozen here, the last place of the acknowledged writes in it."""
    generation: int = 0
    released: wal.Released | None = None
    """What the manifest of its last rest says to the next claim."""


class Process:
    """One life of a writer process; `World.start_process` begins the next one."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.host = Host(name)
        self.store = SimulatedStore(world.disk, world.weather, world.scheduler, self.host)
        skew, rate = world.random.choice((0.0, 0.0, -30.0, 400.0)), world.leases.choice((1.0, 0.96, 1.04))
        self.clock = SimulatedClock(world.scheduler, skew, rate)
        self.regions = [Region(number) for number in range(world.shape.regions)]
        self._context = world.context(self.store, self.clock, name)
        self._reader = Reader(world.base, self.store)
        for region in self.regions:
            world.spawn(f"{name}/r{region.number}", lambda region=region: self._serve(region), self.host)
            world.spawn(f"{name}/f{region.number}", lambda region=region: self._flush(region), self.host)

    # ---- serving -------------------------------------------------------------------------------------------------

    def _serve(self, region: Region) -> None:
        random, world = self.world.random, self.world
        world.scheduler.pause(random.choice((0.0, 0.5, 5.0)))
        while world.open:
            if region.core is None or region.core.failure is not None:
                self._claim(region)
            else:
                self._serve_once(region, region.core)
            world.scheduler.pause(random.choice(world.shape.paces))
        if region.core is not None and random.random() < 0.5:
            self._close(region, region.core)

    def _claim(self, region: Region) -> None:
        random = self.world.random
        if region.core is not None:
            self.world.scheduler.pause(random.random() * self.world.shape.rest)
        region.core, region.ends = None, {}
        try:
            beside = self._beside if self.world.appends_beside else None
            known, region.released = wal.Known(released=region.released), None
            core = RegionCore.open(self._context, self.world.region_ids[region.number], known, beside=beside)
        except EXPECTED as error:
            self.world.say(f"claim failed: {_line(error)}")
            self.world.scheduler.pause(random.choice((0.1, 1.0, 10.0)))
            return
        region.core, region.generation = core, core.levels.active.generation
        self.world.oracle.claimed(region.number, core.guard.epoch)
        self.world.say(f"claimed epoch {core.guard.epoch}")

    def _beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run an append of lingering rows in its own actor."""
        scheduler = self.world.scheduler
        actor = scheduler.spawn(f"{self.name}/log", work, self.host)

        def wait() -> None:
            while not actor.run.dead:
                scheduler.pause(0.01)

        return wait

    def _serve_once(self, region: Region, core: RegionCore) -> None:
        """Do one turn of a region's thread."""
        chosen = self.world.random.random()
        try:
            if self.world.rests and chosen < 0.4:
                self._rest(region, core)
                return
            if chosen < 0.7:
                self._write(region, core)
            elif chosen < 0.83:
                self.read(region, core)
            elif chosen < 0.88:
                core.durable_view()
                self._all_durable(region, core)
            elif chosen < 0.92:
                core.refresh()
            elif chosen < 0.96:
                core.freeze()
                self._all_durable(region, core)
            core.keep_limits()
        except EXPECTED as error:
            self.world.say(f"serving: {_line(error)}")
        self._note_freezes(region, core)

    def _close(self, region: Region, core: RegionCore) -> None:
        try:
            core.close()
            core.release()
        except EXPECTED as error:
            self.world.say(f"close: {_line(error)}")
        else:
            self._all_durable(region, core)

    def _rest(self, region: Region, core: RegionCore) -> None:
        """Release the region at rest, as `RegionSet.rest` does, if its rows are committed soon. Then claim it later."""
        scheduler, patience = self.world.scheduler, self.world.random.choice((0, 10, 20))
        core.freeze()
        self._all_durable(region, core)
        self._note_freezes(region, core)
        for _ in range(patience):
            if core.at_rest:
                break
            scheduler.pause(0.5)
            core.refresh()
        if not core.at_rest:
            return
        core.close()
        rested = core.release(rest=True)
        self.world.say(f"rests, {'and says so' if rested else 'and nobody knows'}")
        region.core, region.ends = None, {}
        region.released = None if rested is None else wal.Released(rested, rested.last_seen)
        scheduler.pause(self.world.random.choice((0.0, 1.0, 4.0)))

    def _all_durable(self, region: Region, core: RegionCore) -> None:
        self.world.oracle.all_durable(region.number, self.world.oracle.now(core.guard.epoch))

    def _write(self, region: Region, core: RegionCore) -> None:
        writes = list(region.inbox)
        region.inbox.clear()
        random = self.world.random
        if not writes or random.random() < 0.5:
            writes += [self._own(region.number) for _ in range(random.choice((1, 1, 1, 2, 4)))]
        for _, attempt in writes:
            self.world.oracle.taken(attempt, core.guard.epoch)
        self.world.say("serves " + " ".join(str(attempt) for _, attempt in writes))
        try:
            core.serve([write for write, _ in writes])
        finally:
            # Also while a kill unwinds: an answer given before the kill counts.
            for write, attempt in writes:
                self._answered(write, attempt)

    def _own(self, region: int) -> tuple[Write, Attempt]:
        """Return a write of the process's own client; a write with a token is repeated until it is known to be
        applied."""
        random = self.world.random
        rows = self.world.random_rows(region, random.choice((1, 1, 2, 3, 12)))
        token = (f"{self.name}/{region}", self._next_token(region)) if random.random() < 0.4 else None
        attempt = self.world.oracle.attempt(region, rows, token)
        return self.world.write(attempt, durable=token is not None or random.random() < 0.6), attempt

    def _next_token(self, region: int) -> int:
        tokens = self.world.tokens
        number, known = tokens.get((self.name, region), (0, True))
        tokens[self.name, region] = (number + known, False)
        return number + known

    def _answered(self, write: Write, attempt: Attempt) -> None:
        oracle = self.world.oracle
        if self.host.dead or not write.done.done():
            return
        error = write.done.exception()
        if error is not None:
            self.world.say(f"{attempt} -> {_line(error)}")
            if isinstance(error, NOTHING_WRITTEN):
                oracle.failed(attempt)
            return
        ack = write.done.result()
        attempt.position = ack.position if ack.applied else 0
        if attempt.token is not None and attempt.token[0] == f"{self.name}/{attempt.region}":
            self.world.tokens[self.name, attempt.region] = (attempt.token[1], True)
        self.world.say(f"{attempt} -> {'applied' if ack.applied else 'applied before'} at {ack.position}")
        if not ack.applied:
            oracle.repeated(attempt)
        else:
            if attempt.token is not None:
                oracle.first(attempt)
            (oracle.acked if ack.position else oracle.volatile)(attempt)

    def _note_freezes(self, region: Region, core: RegionCore) -> None:
        active = core.levels.active.generation
        for generation in range(region.generation, active):
            region.ends[generation] = self.world.oracle.now(core.guard.epoch)
        region.generation = active

    def wake(self) -> None:
        """Write once more to every region that this process believes to own; other processes have taken all of them.

        It does not read before, since a read would reveal that.
        """
        for region in self.regions:
            if region.core is not None and region.core.failure is None:
                attempt = self.world.oracle.attempt(region.number, self.world.random_rows(region.number, 2))
                region.inbox = deque([(self.world.write(attempt), attempt)])
                with suppress(*EXPECTED):
                    self._write(region, region.core)

    # ---- flushing ------------------------------------------------------------------------------------------------

    def _flush(self, region: Region) -> None:
        world = self.world
        while world.open:
            core = region.core
            try:
                if core is not None and core.failure is None and core.publish_next():
                    self._published(region, core)
                    continue
            except (*RETRY_FLUSH, *EXPECTED) as error:
                world.say(f"flush: {_line(error)}")
            world.scheduler.pause(world.random.choice((0.1, 0.5, 2.0)))

    def _published(self, region: Region, core: RegionCore) -> None:
        generation = core.levels.manifest.current_generation - 1
        self.world.say(f"published generation {generation}")
        oracle, until = self.world.oracle, region.ends.get(generation)
        if self.world.shape.wal_format == "arrow":
            # In this format a generation may end inside `serve`, so positions determine what it holds.
            oracle.raise_floor_at(oracle.flushed, region.number, core.levels.manifest.replay_after)
        elif until is not None and region.core is core:
            oracle.raise_floor(oracle.flushed, region.number, until)

    # ---- reading what it owns --------------------------------------------------------------------------------------

    def read(self, region: Region, core: RegionCore) -> None:
        """Read at `latest` from a process that owns the region or believes to.

        The read must show everything that any owner has acknowledged as durable before it began, and what this process
        has acknowledged without durability.
        """
        oracle, epoch = self.world.oracle, core.guard.epoch
        floors: Floors = {}
        for each in oracle.attempts:
            own = each.state == "volatile" and each.order[0] == epoch
            acked = each.state == "acked" and each.answered
            if each.region == region.number and (acked or own):
                for key in each.rows:
                    floors[key] = max(floors.get(key, (0, 0)), each.order)
        try:
            found = OwnerReads(self.world, self._reader, core).scan(level="latest").read_all()
        except (Unavailable, FencedError, UnknownOutcome) as error:
            self.world.say(f"read: {_line(error)}")
            return
        mine = [row for row in pairs(found) if oracle.region_of.get(row[0]) == region.number]
        self.world.say(f"read {len(mine)} rows at latest")
        oracle.check(self.name, mine, floors, durable=False)


class OwnerReads(LevelReads):
    """Reads of the region that a core owns."""

    def __init__(self, world: World, reader: Reader, core: RegionCore) -> None:
        super().__init__(world.base, reader)
        self._core = core

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        del keys
        if again or not self._core.alone or not self._core.lease.covers(self._core.lease.ticket()):
            self._core.prove()
        return [self._core.view()]


def pairs(rows: pa.Table) -> Iterable[tuple[int, int]]:
    """Return (key, value) of every row."""
    return zip(rows.column("id").to_pylist(), rows.column("v").to_pylist(), strict=True)


def _line(error: BaseException) -> str:
    """Format an error without parts that differ from run to run: temporary paths and Lance's random names."""
    return type(error).__name__
