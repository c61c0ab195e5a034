"""A daemon of a `ClusterWorld`: `memwal serve` as the actors of one process.

Real: the process's own loop, the table, its regions with their threads, the commit loop, the collection, the balancer
with its requests to peers, claims and hand-overs, the service. Imitated: the steps before the loop (settings from
files, probes of the storage, the search for live owners) and the HTTP pages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import memwal.ingest.engine.table.embedded
import memwal.ingest.engine.table.open
import memwal.ingest.service.daemon.balancer
import memwal.ingest.service.daemon.serve
from memwal import flush, wal
from memwal.flush.base.open import LanceCaches
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import MemWalError
from memwal.ingest.lanes import Scheduler
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.rpc.guard import Guard
from tests.simulation import fates
from tests.simulation.process import EXPECTED
from tests.simulation.scheduler import Host, SimulatedClock
from tests.simulation.storage import SimulatedStore
from tests.simulation.threads import Event

if TYPE_CHECKING:
    from tests.simulation.cluster_world import ClusterWorld


class ServingDaemon:
    """One life of a daemon. After a kill or its end the world starts the next one."""

    def __init__(self, world: ClusterWorld, name: str) -> None:
        self.world, self.name = world, name
        self.endpoint = world.endpoint_of(name)
        chance = world.random
        self.host = Host(name, fate=fates.drawn(chance, fates.OF_DAEMONS, world.fated))
        self.host.clock = SimulatedClock(
            world.scheduler, chance.choice((0.0, 0.0, -30.0, 400.0)), chance.choice((1.0, 0.97, 1.03))
        )
        self.host.ids = world.ids(name)
        self.store = SimulatedStore(world.disk, world.weather, world.scheduler, self.host)
        self.stop: Any = Event()
        world.scheduler.spawn(name, self.live, self.host, background=True)

    def open(self) -> Table:
        """Open the table as `open_table` does for one of several daemons, with limits that a small run reaches."""
        world, clock, ids, settings = self.world, self.host.clock, self.host.ids, self.world.settings
        assert clock is not None
        base = flush.BaseTable.open(world.uri)
        base = flush.finish_resize(base, self.store, clock=clock, ids=ids, options=world.wal_options)
        context = memwal.ingest.engine.table.open.context_of(settings, base, self.store, clock, ids, world.wal_options)
        limits = replace(context.limits, rows_max=world.shape.rows_max, entry_size_max=world.shape.entry_size_max)
        limits = replace(limits, entries_max=world.entries_max, pending_max=world.pending_max)
        context = replace(context, limits=limits, daemon=True, lanes=Scheduler())
        shared = replace(base, caches=LanceCaches(settings.table.cache_max))
        table = Table(shared, context, settings, (), lazy=world.rests)
        if world.rests:
            world.scheduler.spawn(f"{self.name}/rest", lambda: self._rest(table), self.host, background=True)
        return table

    def _rest(self, table: Table) -> None:
        """Release idle regions until the table is closed, or the world: at its end every region must have an owner."""
        world = self.world
        while world.open and not table.closed:
            world.scheduler.pause(world.random.choice((0.2, 1.0, 3.0)))
            with suppress(*EXPECTED, MemWalError):
                if rested := table.regions.rest_idle(world.random.choice((0.0, 0.5))):
                    world.say(f"{rested} regions rest")

    def live(self) -> None:
        world = self.world
        world.say("starts")
        place = Place(self.endpoint, list(world.endpoints), ends=self.stop.is_set)
        pages = SimpleNamespace(
            serves=lambda _: None,
            shows=lambda *_: None,
            health=SimpleNamespace(hold=lambda *_: None),
            events=RecentEvents(),
        )
        life = memwal.ingest.service.daemon.serve._Daemon(
            world.settings,
            {},
            place,
            Guard(),
            self.stop,
            pages,
            take_over=False,  # type: ignore[arg-type]
        )
        try:
            life.run(None, lambda _: world.say("serves its share"))
        except (*EXPECTED, MemWalError, flush.CommitConflict, RuntimeError) as error:
            world.say(f"ends: {type(error).__name__}")
        else:
            world.say("ended")
        world.scheduler.kill(self.host)


@contextmanager
def simulated_daemons(world: ClusterWorld) -> Iterator[None]:
    """Let daemons open the tables of `world` inside the context, each with its host's clock and identifiers.

    memwal's log is silent inside it, since faults are expected, and daemons register no exit handlers.
    """

    def opened(*_: Any, **__: Any) -> Table:
        actor = world.scheduler.current
        assert actor is not None
        return next(each for each in world.daemons if each.host is actor.host).open()

    clock = SimulatedClock(world.scheduler)

    def of_the_machine(name: str) -> Any:
        def ask(*args: Any) -> Any:
            actor = world.scheduler.current
            own = None if actor is None else actor.host.clock
            return getattr(own or clock, name)(*args)

        return staticmethod(ask)

    def drawn(name: str) -> Any:
        def draw(_: Any) -> Any:
            actor = world.scheduler.current
            assert actor is not None, "the machine was asked for chance"
            return getattr(actor.host.ids, name)()

        return draw

    def seldom(*of: Any) -> Any:
        """Leave most claims to the calls that need the region."""
        steps = decide(*of)
        return replace(steps, claim=[each for each in steps.claim if not world.open or world.random.random() < 0.1])

    decide = memwal.ingest.service.daemon.balancer.decide
    log = logging.getLogger("memwal")
    with ExitStack() as patches:
        patches.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL + 1)
        for name in ("now", "monotonic", "sleep"):
            patches.enter_context(patch.object(wal.SystemClock, name, of_the_machine(name)))
        for name in ("entry_id", "token", "uuid"):
            patches.enter_context(patch.object(wal.SystemIds, name, drawn(name)))
        patches.enter_context(patch.object(memwal.ingest.service.daemon.serve, "open_table", opened))
        patches.enter_context(patch.object(memwal.ingest.engine.table.embedded, "close_at_exit", lambda _: None))
        if world.rests:
            patches.enter_context(patch.object(memwal.ingest.service.daemon.balancer, "decide", seldom))
        yield
