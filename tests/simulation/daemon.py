"""A daemon as a `DaemonWorld` has it: one life with one routing, regions that come and go, writes that wait for them.

It does what `Table.put_region` and `RegionSet` do around a `RegionCore`, without their threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa

from memwal import flush, wal
from memwal.flush.resizing.routing import decided
from memwal.ingest.errors import Unavailable
from memwal.ingest.read.levels import RegionView
from memwal.ingest.read.reader import Reader
from memwal.ingest.refusals import expect_routing
from memwal.ingest.region.context import RegionContext
from memwal.ingest.region.core import RETRY_FLUSH, RegionCore
from memwal.ingest.region.write_queue import Write
from memwal.memtable import TOMBSTONE
from tests.simulation.oracle import Wrong
from tests.simulation.process import EXPECTED
from tests.simulation.scheduler import Host, SimulatedClock
from tests.simulation.storage import SimulatedStore

if TYPE_CHECKING:
    from tests.simulation.world import World

_MISTAKES = (wal.Corrupt, wal.InvariantViolation, ValueError, TypeError, KeyError, AssertionError)
"""Answers that no weather explains."""


class Daemon:
    """One life of a daemon's process; after a kill the world makes the next one."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.host = world, name, Host(name)
        self.store = SimulatedStore(world.disk, world.weather, world.scheduler, self.host)
        self.clock = SimulatedClock(world.scheduler, skew=world.random.choice((0.0, 0.0, -30.0, 400.0)))
        self.base: flush.BaseTable | None = None
        self.cores: dict[UUID, RegionCore] = {}
        self._inboxes: dict[UUID, deque[Write]] = {region: deque() for region in world.region_ids}
        if name != "last":
            for number, region in enumerate(world.region_ids):
                world.spawn(f"{name}/r{number}", lambda region=region: self._serve(region), self.host)
                world.spawn(f"{name}/f{number}", lambda region=region: self._flush(region), self.host)
            world.spawn(f"{name}/m", self._manage, self.host)

    # ---- what producers see --------------------------------------------------------------------------------------

    def submit(self, region: UUID, write: Write, routing: int) -> bool:
        """Whether the stream of a region is taken; it may be served much later."""
        core = self.cores.get(region)
        if self.base is None or self.host.dead or core is None or core.failure is not None:
            return False
        try:
            expect_routing(self.base.uri, routing, self.base.routing_version)
        except Unavailable:
            return False
        self._inboxes[region].append(write)
        return True

    # ---- a life --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """What `memwal serve` does before it claims anything."""
        world, ids = self.world, self.world.ids(self.name)
        base = flush.BaseTable.open(world.uri)
        base = flush.finish_resize(base, self.store, clock=self.clock, ids=ids, options=world.wal_options, at_once=1)
        self._reader, self.base = Reader(base, self.store), base
        self._context: RegionContext = replace(
            world.context(self.store, self.clock, self.name),
            rules=base.rules,
            required=base.required,
            find=self._found,
            routing=base.routing_version,
            route_into=base.route_into,
        )

    def _found(
        self, view: RegionView, keys: pa.Table, columns: Sequence[str], shape: Any, above: int | None = None
    ) -> pa.Table:
        named = [name for name in columns if name != TOMBSTONE]
        return self._reader.get([view], keys, named, shape, tombstones=len(named) < len(columns), above=above)

    def _manage(self) -> None:
        """Open, and begin anew where the table was resized, as a supervisor has it."""
        world = self.world
        while world.open:
            world.scheduler.pause(world.random.choice((0.2, 0.5, 2.0)))
            try:
                if self.base is None:
                    self.open()
                elif decided(self.store, self.base.routing_version + 1) is not None:
                    world.say("the table was resized: begins anew")
                    self.base = None
                    self.cores.clear()
                    for inbox in self._inboxes.values():
                        inbox.clear()
            except (*EXPECTED, flush.CommitConflict, RuntimeError) as error:
                world.say(f"open: {type(error).__name__}")

    def _serve(self, region: UUID) -> None:
        world, random = self.world, self.world.random
        while world.open:
            world.scheduler.pause(random.choice(world.shape.paces))
            core = self.cores.get(region)
            if core is not None and core.failure is None:
                self._turn(region, core)
            elif self.base is not None and region in self.base.regions:
                found = self.cores.pop(region, None)
                world.scheduler.pause(random.random() * (world.shape.rest if found else 4.0))
                self._claim(region)

    def _claim(self, region: UUID) -> None:
        base = self.base
        if base is None or region not in base.regions:
            return
        try:
            self.claim(region)
        except (*EXPECTED, wal.Sealed, wal.Resized) as error:
            self.world.say(f"claim failed: {type(error).__name__}")
        if self.base is not base:
            self.cores.pop(region, None)

    def claim(self, region: UUID) -> None:
        """Claim a region and serve it from now on. Raises: as `wal.claim`."""
        assert self.base is not None
        known = wal.Known(self.base.committed.get(region, 0), self.world.told.get(region))
        core = RegionCore.open(self._context, region, known)
        self.cores[region] = core
        self.world.say(f"claimed epoch {core.guard.epoch}")

    def _turn(self, region: UUID, core: RegionCore) -> None:
        chosen = self.world.random.random()
        try:
            if self._inboxes[region] and chosen < 0.9:
                self.serve(region, core)
            elif chosen < 0.93:
                core.refresh()
            elif chosen < 0.96:
                core.freeze()
            elif chosen < 0.98:
                self._release(region, core)
            core.keep_limits()
        except EXPECTED as error:
            self.world.say(f"serving: {type(error).__name__}")

    def serve(self, region: UUID, core: RegionCore) -> None:
        """Serve what waits. Raises: what ended the region; Wrong for an answer that is nobody's fault."""
        writes, inbox = list(self._inboxes[region]), self._inboxes[region]
        inbox.clear()
        try:
            core.serve(writes)
        finally:
            for write in writes if not self.host.dead else ():
                error = write.done.exception() if write.done.done() else None
                if isinstance(error, _MISTAKES):
                    raise Wrong(f"{self.name}: {write.token} was answered with {type(error).__name__}: {error}")
                told = type(error).__name__ if error else "acked" if write.done.done() else "no answer"
                self.world.say(f"batch {write.token} -> {told}")

    def _release(self, region: UUID, core: RegionCore) -> None:
        """A planned hand-over: what was queued is served first."""
        self.cores.pop(region, None)
        if self._inboxes[region]:
            self.serve(region, core)
        core.close()
        self.world.told[region] = core.end_reads()
        self.world.say(f"released epoch {core.guard.epoch}")

    def _flush(self, region: UUID) -> None:
        world = self.world
        while world.open:
            world.scheduler.pause(world.random.choice((0.1, 0.5, 2.0)))
            core = self.cores.get(region)
            with suppress(*RETRY_FLUSH, *EXPECTED):
                if core is not None and core.failure is None:
                    core.publish_next()

    def wake(self) -> None:
        """After the end: everything that was sent to it, and to which another region's owner has been true since."""
        for region, core in list(self.cores.items()):
            if self._inboxes[region] and core.failure is None:
                with suppress(*EXPECTED):
                    self.serve(region, core)
