"""The chaos of a `ClusterWorld`, and the end of a run, without faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from memwal import flush
from memwal.ingest.engine.table.pauses import Pauses
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import MemWalError
from tests.simulation.actors import Chaos
from tests.simulation.cluster_clients import Checkpoint, Connected, Producer
from tests.simulation.cluster_feed import Follower
from tests.simulation.oracle import Wrong
from tests.simulation.storage import OUTAGES

if TYPE_CHECKING:
    from tests.simulation.cluster_world import ClusterWorld
    from tests.simulation.world import World

_SERVED_WITHIN = 90.0


class End(Producer):
    """Checks without faults that everything promised holds at each level."""

    def __init__(self, world: World, name: str) -> None:
        self._checkpoint = Checkpoint()
        Connected.__init__(self, world, name)

    def live(self) -> None:
        world, scheduler = self.cluster, self.world.scheduler
        began = scheduler.elapsed
        Pauses(self.store, self.clock, self.host.ids, world.wal_options).resume(
            "commits"
        )  # the operator that paused may be dead
        self._finish_resize()
        while not self._served():
            if scheduler.elapsed > began + _SERVED_WITHIN:
                raise Wrong(f"no daemon serves every region after {_SERVED_WITHIN:.0f} s of good weather")
            scheduler.pause(1.0)
        world.land_some()
        for name, checkpoint in list(world.checkpoints.items()):
            self.name, self._checkpoint = name, checkpoint
            while not self.delivered():
                with suppress(MemWalError):  # puts may wait for a commit if none is made by policy
                    self.table.commit()
                if scheduler.elapsed > began + 2 * _SERVED_WITHIN:
                    raise Wrong(f"{name}: batch {checkpoint.number} is not taken in good weather")
            if not checkpoint.acked:
                self.done()
        while not world.network.idle:  # a write that arrives late would land between the flush and the commit
            if scheduler.elapsed > began + 3 * _SERVED_WITHIN:
                raise Wrong(f"calls are not done in good weather: {world.network.open_calls}")
            scheduler.pause(0.5)
        self._check("latest")
        self._check("durable")
        self._step(self.table.flush)
        self._check("flushed")
        self._step(self.table.commit)
        self._check("committed")
        for name in world.feed.copies:
            Follower(world, name).check_end()

    def _step(self, act: Callable[[], object]) -> None:
        """Call `act` in several attempts, since some machines are ten times slower."""
        began = self.world.scheduler.elapsed
        while True:
            try:
                act()
            except MemWalError as error:
                self.expected(error)
                if self.world.scheduler.elapsed > began + _SERVED_WITHIN:
                    raise Wrong(f"not done in {_SERVED_WITHIN:.0f} s of good weather: {error}") from error
            else:
                return

    def _finish_resize(self) -> None:
        """Finish a resize that was interrupted before its decision: it holds until an operator repeats it."""
        world = self.cluster
        base = flush.BaseTable.open(world.uri)
        if flush.is_being_resized(base, self.store, clock=self.clock):
            options: dict[str, Any] = {"clock": self.clock, "ids": self.host.ids, "options": world.wal_options}
            with suppress(flush.InvalidResize):  # a daemon has finished it meanwhile
                flush.resize(world.uri, None, self.store, base.buckets, at_once=1, **options)

    def _served(self) -> bool:
        """Return whether a client can read everything, and no daemon sleeps or opens."""
        try:
            self.table.scan(level="latest").read_all()
        except MemWalError as error:
            self.expected(error)
            self._table = None
            return False
        return True

    def _check(self, level: Any) -> None:
        world, began = self.cluster, self.cluster.ledger.moment()
        world.check_all(f"{level} through the owners", level, self.table.scan(level=level).read_all(), began)
        if level != "latest":
            stored = StoredTable(world.base, self.store).scan(level=level).read_all()
            world.check_all(f"{level} from storage", level, stored, began)


class ClusterChaos(Chaos):
    """Kills, stops and ends daemons, kills clients, cuts the network, and causes outages of the storage."""

    def _strike(self) -> None:
        world = cast("ClusterWorld", self.world)
        victim: Any = world.random.choice([*world.daemons, *world.daemons, *world.visitors])
        chosen = world.random.choice(
            ("kill", "kill", "stop", "stop", "end", "cut", "cut off", "cut daemons", "outage", "outage for all")
        )
        long = 5.0 if chosen.startswith("outage") else 8.0
        until = world.scheduler.elapsed + world.random.choice((0.5, 3.0, long))
        world.say(f"{chosen} {victim.name} until {until:.1f}")
        if chosen == "kill":
            world.scheduler.kill(victim.host)
        elif chosen == "stop":
            world.scheduler.stop(victim.host, until)
        elif chosen == "end" and victim in world.daemons:
            victim.stop.set()
        elif chosen == "cut daemons":
            one, other = world.random.sample(world.daemons, 2)
            world.network.cuts.append((until, one.name, other.name))
        elif chosen.startswith("cut"):
            daemon = world.random.choice(world.daemons).name
            world.network.cuts.append((until, daemon, "" if chosen == "cut off" else victim.name))
        elif chosen.startswith("outage"):
            whom = None if chosen == "outage for all" else victim.host
            world.weather.outages.append((until, world.random.choice(OUTAGES), whom))
