"""Daemons, producers and resizes as a simulation: who applies what exactly once, whoever owns a region when.

Daemons fight over the regions, hand them over, are killed, sleep through everything and wake up; a table's buckets are
grown and shrunk beneath them; committers and a collector to which nothing is too young are at work. Producers deliver
micro-batches by region, each to any daemon and again to any other while no answer comes, so that attempts which were
given up are still served later; a replay routes anew. Each producer has keys of its own, and begins with a batch only
when all regions have acked the one before. So there is nothing to weigh:

 1. Whenever a batch is acked as a whole, storage shows exactly what all batches of its producer come to.
 2. At the end every producer finishes its batch; then the same holds at every level, the base table at last.

What the batches come to depends on the table, drawn by the seed: rows replace others, or stay (`insert`), or the higher
version counts, or there is no key, and every row is there once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal import flush, wal
from memwal.ingest.api.tokens import Token
from memwal.ingest.errors import Unavailable
from memwal.ingest.region.core import RETRY_FLUSH
from memwal.ingest.region.write_queue import Write
from memwal.ingest.table.stored import StoredTable
from memwal.memtable import TOMBSTONE, row_schema
from tests.simulation.actors import Chaos, Visitor
from tests.simulation.daemon import Daemon
from tests.simulation.oracle import Wrong
from tests.simulation.process import EXPECTED, pairs
from tests.simulation.scheduler import SimulatedClock, Trace
from tests.simulation.storage import CALL_FAULTS, PUT_FAULTS, Weather
from tests.simulation.table_actors import EagerCommitter, HungryCollector
from tests.simulation.world import Shape, World

BUCKETS_MAX = 4
_BATCHES_MAX = 40
_OWN_KEYS = 6
Row = tuple[int, int | None]
"""Key and value; None deletes the key."""


@dataclass
class Checkpoint:
    """What a producer knows again after it was killed."""

    number: int = 0
    rows: list[Row] = field(default_factory=list)
    acked: bool = True
    state: Counter[Row] = field(default_factory=Counter)
    """The rows that all batches up to this one come to."""
    values: int = 0


class DaemonWorld(World):
    """See the module's text. One thread."""

    option = " --daemons"

    def __init__(self, seed: int, directory: str, trace: Trace) -> None:
        super().__init__(seed, directory, trace)
        self.region_ids = [wal.bucket_region(bucket) for bucket in range(BUCKETS_MAX)]
        self.checkpoints: dict[str, Checkpoint] = {}
        self.told: dict[UUID, wal.Released | None] = {}
        """What the daemon that released a region last tells the next ones, of which some claim long after that."""
        self.daemons = cast("list[Daemon]", self.processes)

    def drawn(self) -> tuple[Shape, Weather]:
        chance = self.random
        kinds = (flush.WriteRules(), flush.WriteRules("insert"), flush.WriteRules(version="v"))
        self.append, self.rules = chance.random() < 0.25, flush.WriteRules()
        if not self.append:
            self.rules = chance.choice(kinds)
        beings = ("committer0", "committer1", "collector0", "producer1", "producer2", "resizer0")
        shape = Shape(
            regions=chance.choice((1, 2, 3)),
            writers=chance.choice((2, 2, 3)),
            seconds=chance.choice((60.0, 120.0)),
            keys=1,
            paces=chance.choice(((0.0, 0.05, 0.3), (0.3, 1.0, 3.0))),
            rest=chance.choice((2.0, 10.0, 30.0)),
            chaos=chance.choice((0.0, 0.1, 0.3)),
            patience=10,
            rows_max=chance.choice((3, 8, 40)),
            entry_size_max=chance.choice((60, 1 << 20)),
            wal_format="lance",
            visitors=("producer0", *(name for name in beings if chance.random() < 0.7)),
        )
        weather = Weather(
            rate=chance.choice((0.0, 0.005, 0.02)),
            put_faults=PUT_FAULTS,
            call_faults=CALL_FAULTS,
            lag=chance.choice((0.0, 0.2)),
            speed=chance.choice((0.2, 1.0)),
        )
        return shape, weather

    def beings(self) -> Mapping[str, type[Visitor]]:
        return {
            "committer": EagerCommitter,
            "collector": HungryCollector,
            "producer": Producer,
            "resizer": Resizer,
        }

    def live(self) -> None:
        for number in range(self.shape.writers):
            self.daemons.append(Daemon(self, f"daemon{number}"))
        for name in self.shape.visitors:
            self.visitors.append(self.beings()[name.rstrip("0123456789")](self, name))
        Chaos(self)
        try:
            self.scheduler.run()
            self.weather.clear()
            self._settle()
        finally:
            self.scheduler.end()

    # ---- rows ----------------------------------------------------------------------------------------------------

    def table_of(self, rows: Sequence[Row]) -> pa.Table:
        """Rows of a batch in the columns of the table, as a daemon brings them there."""
        columns = [each for each in row_schema(self.base.schema, self.base.key) if each.name != TOMBSTONE]
        given = {"id": [key for key, _ in rows], "v": [value for _, value in rows]}
        return pa.table(given, schema=pa.schema(columns))

    def write_of(self, rows: pa.Table, token: tuple[str, int]) -> Write:
        """What a daemon makes of the stream of one region."""
        gone = rows["v"].is_null().to_numpy()
        deletes: bool | np.ndarray[Any, np.dtype[np.bool_]] = (
            gone if gone.any() and not gone.all() else bool(gone.all())
        )
        return Write(rows, True, Token(*token), deletes)

    def fold(self, state: Counter[Row], rows: Sequence[Row]) -> Counter[Row]:
        """What is there after a batch."""
        if self.append:
            return state + Counter(rows)
        there = dict(list(state))
        for key, value in rows:
            if value is None:
                there.pop(key, None)
            elif self.rules.upsert == "insert":
                there.setdefault(key, value)
            elif not self.rules.version or value >= (there.get(key) or 0):
                there[key] = value
        return Counter(there.items())

    # ---- looking -------------------------------------------------------------------------------------------------

    def expect(self, name: str, level: Any, store: wal.ObjectStore) -> None:
        """Storage shows what the batches of a producer come to. Raises Wrong; Unavailable."""
        found = Counter(
            row for row in pairs(StoredTable(self.base, store).scan(level=level).read_all()) if self.is_of(name, row[0])
        )
        there = self.checkpoints[name]
        expected: Counter[Row] = there.state if self.append else Counter(list(there.state))
        if found != expected:
            raise Wrong(
                f"{name} at {level} after batch {there.number}: {sorted((found - expected).items())[:5]} too many, "
                f"{sorted((expected - found).items())[:5]} missing"
            )

    @staticmethod
    def is_of(name: str, key: int) -> bool:
        return key // 100_000 == int(name.removeprefix("producer"))

    # ---- the end -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self.say("the storage is well again")
        self._land_some()
        clock, ids, store = SimulatedClock(self.scheduler), self.ids("end"), self._store()
        base = flush.BaseTable.open(self.uri)
        base = flush.finish_resize(base, store, clock=clock, ids=ids, options=self.wal_options, at_once=1)
        if flush.is_being_resized(base, store, clock=clock):
            flush.resize(self.uri, None, store, base.buckets, clock=clock, ids=ids, at_once=1)
        last = Daemon(self, "last")
        last.open()
        assert last.base is not None
        for region in last.base.regions:
            last.claim(region)
        self._land_some()
        for daemon in self.daemons:
            if not daemon.host.dead:
                daemon.wake()
        for name, checkpoint in self.checkpoints.items():
            self._finish(name, checkpoint, last)
            self.expect(name, "durable", store)
        for core in last.cores.values():
            core.freeze()
            while core.publish_next():
                continue
        flush.commit(self.uri, None, store, clock=clock, ids=ids)
        for name in self.checkpoints:
            self.expect(name, "committed", store)

    def _finish(self, name: str, checkpoint: Checkpoint, last: Daemon) -> None:
        assert last.base is not None
        for _ in range(2):
            rows = self.table_of(checkpoint.rows)
            buckets = last.base.route(rows)
            for bucket, region in enumerate(last.base.regions):
                part = rows.filter(pa.array(buckets == bucket))
                if part.num_rows:
                    write = self.write_of(part, (name, checkpoint.number))
                    last.cores[region].serve([write])
                    write.done.result()
        if not checkpoint.acked:
            checkpoint.state, checkpoint.acked = self.fold(checkpoint.state, checkpoint.rows), True


class Producer(Visitor):
    """A Spark query: one batch after the other, each until every region has acked it, then sometimes once more."""

    pace = (0.0, 0.3, 2.0)

    def __init__(self, world: World, name: str) -> None:
        self._checkpoint = cast("DaemonWorld", world).checkpoints.setdefault(name, Checkpoint())
        self._base = world.base
        super().__init__(world, name)

    def step(self) -> None:
        world, mine = cast("DaemonWorld", self.world), self._checkpoint
        if mine.acked:
            if mine.number == _BATCHES_MAX:
                return
            mine.number, mine.rows, mine.acked = mine.number + 1, self._rows(), False
        if not self._delivered():
            return
        if not mine.acked:
            mine.state, mine.acked = world.fold(mine.state, mine.rows), True
            world.oracle.attempt(0, {}).state = "acked"
            world.say(f"batch {mine.number} is done")
        try:
            world.expect(self.name, "durable", self.store)
        except (Unavailable, *EXPECTED) as error:
            world.say(f"look: {type(error).__name__}")
        if world.random.random() < 0.2:
            self._delivered()

    def _rows(self) -> list[Row]:
        chance, mine = self.world.random, self._checkpoint
        first = int(self.name.removeprefix("producer")) * 100_000
        count = chance.choice((1, 3, _OWN_KEYS))
        mine.values += 1
        if cast("DaemonWorld", self.world).append:
            return [(first + mine.number * 10 + n, mine.values) for n in range(count)]
        keys = chance.sample(range(first, first + _OWN_KEYS), count)
        value = max(1, mine.values - chance.choice((0, 0, 0, 2)))
        return [(key, None if chance.random() < 0.25 else value) for key in keys]

    def _delivered(self) -> bool:
        """Whether every region has acked the batch, as it is routed now."""
        world, mine = cast("DaemonWorld", self.world), self._checkpoint
        try:
            self._base = flush.BaseTable.open(world.uri) if world.random.random() < 0.5 else self._base
        except EXPECTED:
            return False
        rows = world.table_of(mine.rows)
        if world.random.random() < 0.3:  # other tasks, another order of keys
            rows = rows.take(pa.array(world.random.sample(range(rows.num_rows), rows.num_rows)))
        base, buckets = self._base, self._base.route(rows)
        noted = mine.number % 7 == 6  # by regions that get none of them, too
        for bucket, region in enumerate(base.regions):
            part = rows.filter(pa.array(buckets == bucket))
            if (part.num_rows or noted) and not self._sent(region, part, base.routing_version):
                return False
        return True

    def _sent(self, region: UUID, rows: pa.Table, routing: int) -> bool:
        """Whether a region acked; an attempt that is given up stays where it is."""
        world = cast("DaemonWorld", self.world)
        for _ in range(6):
            if not world.open:
                return False
            daemon = self._chosen(region)
            write = world.write_of(rows, (self.name, self._checkpoint.number))
            world.say(f"sends batch {self._checkpoint.number}, {rows.num_rows} rows, to {daemon.name}")
            if not daemon.submit(region, write, routing):
                world.scheduler.pause(0.3)
                continue
            for _ in range(world.random.choice((2, 20))):
                world.scheduler.pause(0.2)
                if write.done.done() or daemon.host.dead:
                    break
            if not daemon.host.dead and write.done.done() and write.done.exception() is None:
                return True
        return False

    def _chosen(self, region: UUID) -> Daemon:
        """The owner mostly, or one that believes to be it, or just anybody."""
        world = cast("DaemonWorld", self.world)
        believing = sorted(
            ((core.guard.epoch, at) for at, each in enumerate(world.daemons) if (core := each.cores.get(region)))
        )
        chosen = world.random.random()
        if not believing or chosen < 0.1:
            return world.random.choice(world.daemons)
        return world.daemons[believing[-1 if chosen < 0.7 else 0][1]]


class Resizer(Visitor):
    """`memwal regions resize`: by itself now and then, and by all means where one was broken off."""

    pace = (6.0, 15.0, 30.0)

    def step(self) -> None:
        world, clock = self.world, self.clock
        buckets = world.random.randint(1, BUCKETS_MAX)
        options = {"clock": clock, "ids": world.ids(self.name), "at_once": 1, "options": world.wal_options}
        try:
            report = flush.resize(world.uri, None, self.store, buckets, **options)
        except (*RETRY_FLUSH, *EXPECTED, wal.Resized, flush.CommitConflict, flush.InvalidResize, RuntimeError) as error:
            world.say(f"resize to {buckets}: {type(error).__name__}")
        else:
            world.say(f"resized from {report.before} to {report.regions}")
