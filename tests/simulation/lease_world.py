"""A world of leases: writers that are read all the time and write seldom, and usurpers that claim their regions and
write at once. It finds reads by owners that do not know yet that they were deposed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from memwal import wal
from memwal.ingest.engine.region.core import RegionCore
from tests.simulation.actors import Visitor
from tests.simulation.process import EXPECTED
from tests.simulation.storage import Weather
from tests.simulation.world import Shape, Trace, World


class Usurper(Visitor):
    """Claims a region, writes to it, and ends: with a release, with one that only its own next claim knows, or without
    one."""

    pace = (1.0, 3.0, 6.0)

    def __init__(self, world: World, name: str) -> None:
        self._told: dict[int, wal.Released] = {}
        """The release of its own last claim of each region that ended with one."""
        super().__init__(world, name)

    def told(self, number: int) -> wal.Released | None:
        """Return the release that the next claim of the region knows."""
        return self._told.get(number)

    def step(self) -> None:
        with suppress(*EXPECTED):
            self._take(self.world.random.randrange(self.world.shape.regions))

    def _take(self, number: int) -> None:
        world, oracle = self.world, self.world.oracle
        context, known = world.context(self.store, self.clock, self.name), wal.Known(released=self.told(number))
        core = RegionCore.open(context, world.region_ids[number], known, settle=False)
        oracle.claimed(number, core.guard.epoch)
        world.say(f"took region {number} with epoch {core.guard.epoch}")
        for _ in range(world.random.choice((1, 3))):
            attempt = oracle.attempt(number, world.random_rows(number, 2))
            oracle.taken(attempt, core.guard.epoch)
            write = world.write(attempt)
            core.serve([write])
            attempt.position = write.done.result().position
            oracle.acked(attempt)
        core.settle()
        end = world.random.random()
        if end < 0.6:
            core.close()
        if end < 0.3:
            core.release()
        elif end < 0.6 and (released := core.end_reads()) is not None:
            self._told[number] = released


class LeaseWorld(World):
    """A table whose owners grant long read leases. One thread."""

    option = " --leases"

    def __init__(self, seed: int, directory: str, trace: Trace) -> None:
        super().__init__(seed, directory, trace)
        self.wal_options = replace(self.wal_options, read_lease=self.leases.choice((0.5, 2.0, 8.0)))

    def drawn(self) -> tuple[Shape, Weather]:
        shape, weather = super().drawn()
        visitors = ("client0", "client1", "usurper0", "committer0")
        return replace(shape, writers=2, paces=(2.0, 8.0), wal_format="lance", visitors=visitors), weather

    def beings(self) -> Mapping[str, type[Visitor]]:
        return {**super().beings(), "usurper": Usurper}
