"""Users of the table of a `ClusterWorld`: writers, readers, producers like Spark, operators, and resizers.

All of them use the real client, `RemoteTable`: its router, attempts, splitting, merging and streams.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pyarrow as pa

from memwal import flush, wal
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.region.core import RETRY_FLUSH
from memwal.ingest.engine.table import owner_notes
from memwal.ingest.engine.table.pauses import Pauses
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import FencedError, Internal, Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.service.client.remote import RemoteTable
from memwal.memtable import TOMBSTONE
from tests.simulation.actors import Visitor
from tests.simulation.ledger import Op
from tests.simulation.oracle import Wrong
from tests.simulation.process import EXPECTED, pairs
from tests.simulation.scheduler import SimulatedClock
from tests.simulation.storage import SimulatedStore

if TYPE_CHECKING:
    from tests.simulation.cluster_world import ClusterWorld
    from tests.simulation.world import World

Row = tuple[int, int | None]
"""Key and value; None deletes the key."""
_BATCHES_MAX = 40
_OWN_KEYS = 6
_PATIENCE = 2.0


class Connected(Visitor):
    """A process with a client of the daemons."""

    def __init__(self, world: World, name: str) -> None:
        self.cluster = cast("ClusterWorld", world)
        self._table: RemoteTable | None = None
        super().__init__(world, name)
        self.host.clock = self.clock = SimulatedClock(world.scheduler, rate=world.random.choice((1.0, 0.98, 1.02)))
        self.host.ids = world.ids(name)

    def live(self) -> None:
        super().live()
        if self._table is not None:
            self._table.close()

    @property
    def table(self) -> RemoteTable:
        """The client, connected at first use. Raises: Unavailable."""
        if self._table is None:
            world = self.cluster
            known = world.random.sample(world.endpoints, world.random.randint(1, len(world.endpoints)))
            notes = world.random.random() < 0.5
            self._table = RemoteTable(
                known, clock=self.clock, ids=self.host.ids, patience=_PATIENCE, find=self._found if notes else None
            )
        return self._table

    def _found(self) -> tuple[str, ...]:
        notes = owner_notes.find(self.store, self.cluster.base.regions)
        return () if notes is None else notes.endpoints

    def expected(self, error: MemWalError) -> bool:
        """Return True if a fault of the simulation explains an error. Raises: Wrong if it does not."""
        refused = isinstance(error, Invalid) and "the simulated storage refuses" in str(error)
        ended = error.details.get("ended", ())
        if isinstance(error, Internal) and 1 < len(ended) <= sum(host.dead for host in self.cluster.network.hosts):
            return True  # the client sends no read to a third daemon
        if not refused and not isinstance(error, Unavailable | FencedError | UnknownOutcome):
            raise Wrong(f"{self.name} was answered with {type(error).__name__}: {error}") from error
        return True


class Writer(Connected):
    """Puts and deletes rows of its own keys and of others' keys, with and without a token."""

    pace = (0.05, 0.3, 1.5)

    def step(self) -> None:
        chance, world = self.world.random, self.cluster
        if chance.random() < 0.1:  # another client, which requests the owners anew
            self._table = None
        rows = world.rows_of_a_client(chance.choice((1, 1, 2, 5)))
        token = (self.name, self._next()) if chance.random() < 0.6 else None
        durable = token is not None or chance.random() < 0.7 or world.ledger.all_durable
        op = world.ledger.begin(self.name, rows, token, durable=durable)
        unsure = False
        for _ in range(chance.choice((1, 4, 10))):
            if (again := self._sent(op, unsure=unsure)) is None:
                return
            unsure |= again
            if token is None or not world.open:
                break
            world.scheduler.pause(chance.choice((0.1, 1.0)))
        if not unsure:
            world.ledger.refused(op)

    def _sent(self, op: Op, *, unsure: bool) -> bool | None:
        """Send a write; return None if it was acknowledged, else whether it may have been applied."""
        world, timeout = self.cluster, self.world.random.choice((0.5, 3.0, 10.0))
        token = None if op.token is None else Token(*op.token)
        world.say(f"sends {op}")
        try:
            if any(op.rows.values()):
                receipt = self.table.delete(list(op.rows), durable=op.durable, token=token, timeout=timeout)
            else:
                given = pa.table({"id": list(op.rows), "v": [op.number] * len(op.rows)}, schema=world.base.schema)
                receipt = self.table.put(given, durable=op.durable, token=token, timeout=timeout)
        except MemWalError as error:
            world.say(f"{op} -> {type(error).__name__}")
            self.expected(error)
            return isinstance(error, UnknownOutcome)
        world.say(f"{op} -> {'applied' if receipt.applied else 'applied before'}")
        if not receipt.applied and not unsure:
            raise Wrong(f"{op} was answered with 'applied before', and was never sent before")
        world.ledger.acked(op)
        return None

    def _next(self) -> int:
        number = self.world.tokens.get((self.name, 0), (0, True))[0] + 1
        self.world.tokens[self.name, 0] = (number, True)
        return number


class Looker(Connected):
    """Reads through the owners, mostly at `latest`. Storage must have the rows that they show as durable."""

    pace = (0.05, 0.3, 1.5)

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._stored = StoredTable(world.base, self.store, self.clock)

    def step(self) -> None:
        chance, world = self.world.random, self.cluster
        level = chance.choice(("latest",) * 5 + ("durable",) * 3 + ("flushed", "committed"))
        keys = world.keys_of_clients()
        if not world.append and chance.random() < 0.4:
            keys = chance.sample(keys, min(len(keys), 3))
        began = world.ledger.moment()
        try:
            if len(keys) < 4 and not world.append:
                found = self.table.get(keys, level=level)
            else:
                found = self.table.scan(level=level).read_all()
        except MemWalError as error:
            world.say(f"read {level}: {type(error).__name__}")
            self.expected(error)
            return
        ours = [row for row in pairs(found) if world.is_of_clients(row[0])]
        world.say(f"read {len(ours)} rows at {level}")
        world.ledger.read(f"{self.name} at {level}", began, ours, keys, level=level)
        if level == "durable" and chance.random() < 0.3:
            read_storage(world, f"{self.name} beneath", self._stored, "durable")


class Prober(Connected):
    """Reads the rows of a region at `latest` from one daemon or another, whether it owns the region or not.

    It acts like a client with outdated owners. A daemon that answers must know the newest rows.
    """

    pace = (0.02, 0.1, 0.3)

    def step(self) -> None:
        chance, world = self.world.random, self.cluster
        number, endpoint = chance.randrange(world.shape.regions), chance.choice(world.endpoints)
        keys = [key for key, region in world.ledger.region_of.items() if region == number]
        asked = {"columns": ["id", "v"], "level": "latest", "regions": [str(world.region_ids[number])]}
        began = world.ledger.moment()
        try:
            found = pa.Table.from_batches(
                list(self.table.router.connection(endpoint).read("scan", asked, timeout=chance.choice((0.5, 3.0)))),
                schema=world.base.schema,
            )
        except MemWalError:
            return
        mine = [row for row in pairs(found) if row[0] in keys]
        world.say(f"{len(mine)} rows of region {number} at {endpoint}")
        world.ledger.read(f"{self.name} at {endpoint}", began, mine, keys, level="latest")


class StorageLooker(Visitor):
    """Reads the table from storage, without the owners."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._table = StoredTable(world.base, self.store)

    def step(self) -> None:
        level = self.world.random.choice(("durable", "durable", "flushed", "committed"))
        read_storage(cast("ClusterWorld", self.world), self.name, self._table, level)


def read_storage(world: ClusterWorld, who: str, table: StoredTable, level: Level) -> None:
    """Read all rows of clients from storage. Raises: Wrong."""
    began = world.ledger.moment()
    try:
        found = table.scan(level=level).read_all()
    except Unavailable as error:
        world.say(f"read {level}: {type(error.__cause__ or error).__name__}")
        return
    ours = [row for row in pairs(found) if world.is_of_clients(row[0])]
    world.say(f"read {len(ours)} rows at {level}")
    world.ledger.read(f"{who} at {level}", began, ours, world.keys_of_clients(), level=level, stored=True)


@dataclass
class Checkpoint:
    """The state of a producer that survives a kill."""

    number: int = 0
    rows: list[Row] = field(default_factory=list)
    acked: bool = True
    state: Counter[Row] = field(default_factory=Counter)
    """The expected rows after all batches up to this one."""
    values: int = 0


class Producer(Connected):
    """A Spark query: sends one micro-batch after the other by streams to the owners of its regions.

    Each batch is sent until every region has acked it, and sometimes once more. Whenever a batch is done, storage shows
    exactly the result of all batches.
    """

    pace = (0.0, 0.3, 2.0)

    def __init__(self, world: World, name: str) -> None:
        self._checkpoint = cast("ClusterWorld", world).checkpoints.setdefault(name, Checkpoint())
        super().__init__(world, name)

    def step(self) -> None:
        world, mine = self.cluster, self._checkpoint
        if mine.acked:
            if mine.number == _BATCHES_MAX:
                return
            mine.number, mine.rows, mine.acked = mine.number + 1, self._rows(), False
        if not self.delivered():
            return
        if not mine.acked:
            self.done()
        try:
            world.expect(self.name, "durable", self.store)
        except (Unavailable, *EXPECTED) as error:
            world.say(f"look: {type(error).__name__}")
        if world.random.random() < 0.5:
            self.delivered()

    @staticmethod
    def first_key(name: str) -> int:
        """Return the first key of a producer."""
        return (int(name.removeprefix("producer")) + 1) * 100_000

    def done(self) -> None:
        """Record that every region has acked the batch."""
        world, mine = self.cluster, self._checkpoint
        mine.state, mine.acked = world.fold(mine.state, mine.rows), True
        world.say(f"batch {mine.number} is done")
        world.batches += 1

    def delivered(self) -> bool:
        """Send the batch by the current routing; return whether every region has acked it."""
        world, mine = self.cluster, self._checkpoint
        try:
            base = flush.BaseTable.open(world.uri)
            rows = world.table_of(mine.rows)
            if world.random.random() < 0.3:  # other tasks, another order of keys
                order = world.random.sample(range(rows.num_rows), rows.num_rows)
                rows = rows.take(pa.array(order, pa.int64()))
            buckets, noted = base.route(rows), mine.number % 7 == 6  # also regions without rows of the batch
            for bucket, region in enumerate(base.regions):
                part = rows.filter(pa.array(buckets == bucket))
                if part.num_rows or noted:
                    self._send(region, part, base.routing_version)
        except (*EXPECTED, MemWalError) as error:
            if isinstance(error, MemWalError):
                self.expected(error)
            world.say(f"batch {mine.number}: {type(error).__name__}")
            return False
        return True

    def _send(self, region: UUID, rows: pa.Table, routing: int) -> None:
        gone = rows["v"].is_null()
        deletes = bool(gone.to_pylist().count(True))
        given = rows.append_column(TOMBSTONE, gone) if deletes else rows
        stream = self.table.open_stream(
            region,
            Token(self.name, self._checkpoint.number),
            timeout=self.world.random.choice((1.0, 8.0)),
            deletes=deletes,
            routing=routing,
            rows=rows.num_rows,
        )
        for batch in given.to_batches(max_chunksize=self.world.random.choice((1, 2, 100))):
            if batch.num_rows:
                stream.write(batch)
        receipt = stream.finish()
        self.world.say(f"batch {self._checkpoint.number}, {rows.num_rows} rows -> {receipt.applied}")

    def _rows(self) -> list[Row]:
        chance, mine = self.world.random, self._checkpoint
        first = self.first_key(self.name)
        count = chance.choice((1, 3, _OWN_KEYS))
        mine.values += 1
        if self.cluster.append:
            return [(first + mine.number * 10 + n, mine.values) for n in range(count)]
        keys = chance.sample(range(first, first + _OWN_KEYS), count)
        value = max(1, mine.values - chance.choice((0, 0, 0, 2)))
        return [(key, None if chance.random() < 0.25 else value) for key in keys]


class Operator(Connected):
    """Flushes and commits by hand, through the daemons, and pauses automatic commits for a while."""

    pace = (2.0, 6.0)

    def step(self) -> None:
        if self.world.random.random() < 0.5:
            self._flush_and_commit()
        else:
            self._pause()

    def _flush_and_commit(self) -> None:
        world, began = self.cluster, self.cluster.ledger.moment()
        try:
            self.table.flush()
            self.table.commit()
        except MemWalError as error:
            world.say(f"by hand: {type(error).__name__}")
            self.expected(error)
            return
        try:
            found = StoredTable(world.base, self.store).scan(level="committed").read_all()
        except Unavailable as error:
            world.say(f"look: {type(error).__name__}")
            return
        ours = [row for row in pairs(found) if world.is_of_clients(row[0])]
        world.say(f"flushed and committed by hand: {len(ours)} rows")
        keys = world.keys_of_clients()
        world.ledger.read(f"{self.name} after its commit", began, ours, keys, level="durable", stored=True)

    def _pause(self) -> None:
        world, pauses = self.cluster, Pauses(self.store, self.clock, self.host.ids, self.world.wal_options)
        try:
            pauses.pause("commits", self.name)
            world.paused_since = world.scheduler.elapsed
            world.say("commits are paused")
            world.rest((6.0, 10.0))
        except EXPECTED as error:
            world.say(f"pause: {type(error).__name__}")
        while world.open:
            world.paused_since = float("inf")
            try:
                pauses.resume("commits")
            except EXPECTED:
                world.scheduler.pause(0.5)
            else:
                world.say("commits are resumed")
                return


class Resizer(Visitor):
    """Runs `memwal regions resize`: from time to time on its own, and always if one was interrupted."""

    pace = (2.0, 6.0, 12.0)

    def step(self) -> None:
        world, clock = self.world, self.clock
        buckets = world.random.randint(1, len(world.region_ids))
        options: dict[str, Any] = {"clock": clock, "ids": world.ids(self.name), "at_once": 1}
        try:
            report = flush.resize(world.uri, None, self.store, buckets, options=world.wal_options, **options)
        except (*RETRY_FLUSH, *EXPECTED, wal.Resized, flush.CommitConflict, flush.InvalidResize, RuntimeError) as error:
            world.say(f"resize to {buckets}: {type(error).__name__}")
        else:
            world.say(f"resized from {report.before} to {report.regions}")


__all__ = [
    "Checkpoint",
    "Looker",
    "Operator",
    "Prober",
    "Producer",
    "Resizer",
    "Row",
    "SimulatedStore",
    "StorageLooker",
    "Writer",
]
