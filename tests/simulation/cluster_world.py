"""A world of everything at once: daemons, clients, producers, committers, collectors, resizes, readers, and faults.

Two or three daemons share a table: they query each other, claim, hand over, take over and lose regions, sleep at any
moment and wake up, each with its own clock; they commit by policy and collect garbage that is seconds old. Clients
with their own routers write and read through them, over a network that loses answers, delays calls and is cut;
producers deliver micro-batches; operators commit by hand and pause commits; others read storage, commit, collect, load
past the log, change the base table, and resize the table during all of this. The seed draws which of them take part,
and how frequent faults are, so that a run is small and all combinations occur in some runs.

What must hold:

 1. A read shows no older row than was known before it began (`ledger`), from any process, at `latest` and `durable`.
 2. A refused write is never seen; a write is visible in a region as a whole; a repeated token applies nothing twice.
 3. Whenever a micro-batch is acked by all regions, storage shows exactly the result of all batches of its producer.
 4. While commits are paused no daemon commits by its policy.
 5. Without faults every region is served again within a minute; then 1 to 3 hold at every level.
 6. A reader of changes gets each change once and as it was, and its copy equals the table (`cluster_feed`).
 7. At rest manifests, positions and generations have no gap, `memwal verify` finds nothing, no SST is left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pyarrow as pa

import memwal.ingest.service.client.remote
import memwal.ingest.service.client.retry
import memwal.ingest.service.daemon.balancer
import memwal.ingest.service.daemon.peers
from memwal import flush, wal
from memwal.flush.commits.load_notes import has_landed, load_id
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table.commit_loop import CommitLoop
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.settings.load import load
from memwal.memtable import TOMBSTONE, row_schema
from tests.simulation import fates
from tests.simulation.actors import Visitor
from tests.simulation.cluster_clients import (
    Checkpoint,
    Looker,
    Operator,
    Prober,
    Producer,
    Resizer,
    Row,
    StorageLooker,
    Writer,
)
from tests.simulation.cluster_daemon import ServingDaemon, simulated_daemons
from tests.simulation.cluster_end import ClusterChaos, End
from tests.simulation.cluster_feed import Feed, Follower
from tests.simulation.ledger import Ledger
from tests.simulation.network import Network, simulated_network
from tests.simulation.oracle import Wrong
from tests.simulation.process import pairs
from tests.simulation.scheduler import Host, Trace
from tests.simulation.storage import CALL_FAULTS, PUT_FAULTS, Weather
from tests.simulation.table_actors import EagerCommitter, Expirer, HungryCollector, Loader, Meddler, Upkeep
from tests.simulation.threads import simulated_threads
from tests.simulation.world import Shape, World, check_region

BUCKETS_MAX = 4
_RESTS_EVERY = 9
"""In every seed divisible by it, daemons claim most regions at their first use, and release idle ones."""
_CLIENT_KEYS = 9_000
"""Keys of clients are below this number."""
_PAUSE_NOTED = 4.0
"""Seconds until every daemon has noted a pause; until then a commit decided earlier may begin."""
_VISITORS: Mapping[str, type[Visitor]] = {
    "writer": Writer,
    "looker": Looker,
    "prober": Prober,
    "storage": StorageLooker,
    "follower": Follower,
    "producer": Producer,
    "operator": Operator,
    "resizer": Resizer,
    "committer": EagerCommitter,
    "collector": HungryCollector,
    "loader": Loader,
    "meddler": Meddler,
    "upkeep": Upkeep,
    "expirer": Expirer,
}
_ANY = ("producer0", "producer1", "storage0", "operator0", "resizer0", "committer0", "collector0")
_OF_CLIENTS = ("writer1", "looker1")
_OF_THE_BASE = ("loader0", "meddler0", "upkeep0", "expirer0")


class ClusterWorld(World):
    """A world of daemons and clients; see the module. One thread."""

    option = ""
    books: type[Ledger] = Ledger
    """The class that judges what clients see."""

    def __init__(self, seed: int, directory: str, trace: Trace) -> None:
        super().__init__(seed, directory, trace)
        chance = self.random
        self.rests = seed % _RESTS_EVERY == 0
        self.region_ids = [wal.bucket_region(bucket) for bucket in range(BUCKETS_MAX)]
        self.daemons = cast("list[ServingDaemon]", self.processes)
        self.endpoints = [self.endpoint_of(f"daemon{number}") for number in range(self.shape.writers)]
        self.entries_max, self.pending_max = chance.choice((2, 5, 1000)), chance.choice((0, 0, 3))
        self.feed = Feed.drawn(seed, self.shape.visitors)
        if self.feed.followed:
            self.shape = replace(self.shape, visitors=(*self.shape.visitors, "follower0"))
        self.network = Network(self.scheduler, self.scheduler.coverage, chance.choice((0.0, 0.01, 0.03)))
        self.settings = self._settings()
        self._look_every = chance.choice((0.25, 1.0, 1.0, 1.0))
        resized = any(name.startswith("resizer") for name in self.shape.visitors)
        known = {} if resized or self.append else self._routed(list(self.oracle.region_of))
        if known and self.rules == flush.WriteRules() and chance.random() < 0.6:
            self.shape = replace(self.shape, visitors=(*self.shape.visitors, "prober0"))
        self.ledger = self.books(known)
        self.fated = chance.choice((0.0, 0.3, 0.6))
        self.checkpoints: dict[str, Checkpoint] = {}
        self.batches = self.loads = 0
        self.paused_since = float("inf")
        self._fresh = 0

    def drawn(self) -> tuple[Shape, Weather]:
        chance = self.random
        rules = (*[flush.WriteRules()] * 3, flush.WriteRules("insert"), flush.WriteRules(version="v"))
        self.append, self.rules = chance.random() < 0.2, flush.WriteRules()
        if not self.append:
            self.rules = chance.choice(rules)
        plain = self.rules == flush.WriteRules()
        of_the_base = _OF_THE_BASE if plain and not self.append else ()
        self.indexes = (("v", "btree"),) if of_the_base and chance.random() < 0.5 else ()
        beings = ["writer0", "looker0"] if plain else ["producer0", "storage0"]
        beings += [name for name in _ANY if chance.random() < (0.4 if plain else 0.6)]
        beings += [name for name in _OF_CLIENTS if plain and chance.random() < 0.7]
        beings += [name for name in of_the_base if chance.random() < 0.15]
        shape = Shape(
            regions=chance.choice((1, 2, 3)),
            writers=chance.choice((2, 2, 3)),
            seconds=chance.choice((8.0, 16.0, 24.0)),
            keys=chance.choice((4, 12)),
            paces=(0.3,),
            rest=2.0,
            chaos=chance.choice((0.0, 0.3, 0.6)),
            patience=10,
            rows_max=chance.choice((3, 8, 40)),
            entry_size_max=chance.choice((60, 1 << 20)),
            wal_format="lance" if self.append else chance.choice(("lance", "lance", "lance", "arrow")),
            visitors=tuple(dict.fromkeys(beings)),
        )
        weather = Weather(
            rate=chance.choice((0.0, 0.005, 0.02)),
            put_faults=PUT_FAULTS,
            call_faults=CALL_FAULTS,
            lag=chance.choice((0.0, 0.2)),
            speed=chance.choice((0.2, 1.0)),
            lance_writes_worse=8.0,
        )
        return shape, weather

    def _routed(self, keys: Sequence[int]) -> dict[int, int]:
        buckets = self.base.route(pa.table({"id": pa.array(keys, pa.int64())}))
        return dict(zip(keys, map(int, buckets), strict=True))

    def _settings(self) -> Any:
        chance = self.random
        age = f"{chance.choice((0.5, 5.0))}s"
        rests = {"interval": "2s"} if self.rests else {}
        return load(
            {
                "table": {"uri": self.uri, **({"append_only": True} if self.append else {"key": ["id"]})},
                "daemon": {
                    "endpoints": self.endpoints,
                    "read_ahead": chance.choice(("0s", "2s")),
                    "drain_timeout": "2s",
                },
                "commit": {
                    "interval": chance.choice(("0s", "2s", "6s")),
                    "ssts_max": chance.choice((1, 3)),
                    "pending_max": 0,
                    "compact_fragments": 2,
                    **rests,
                },
                "gc": {
                    "interval": chance.choice(("0s", "3s")),
                    "wal_age_min": age,
                    "sst_age_min": age,
                    "manifest_age_min": age,
                    "changes_age_min": self.feed.age,
                },
                "flush": {"retry_delay": "0.2s"},
                "wal": {"linger_max": chance.choice(("50ms", "50ms", "1s"))},
                "memtable": {"age_max": chance.choice(("3s", "30s"))},
            },
            {},
        )

    def beings(self) -> Mapping[str, type[Visitor]]:
        return _VISITORS

    @staticmethod
    def endpoint_of(name: str) -> str:
        """Return the endpoint at which a daemon listens."""
        return f"grpc://{name}:1"

    @property
    def open(self) -> bool:
        return self.scheduler.elapsed < self.shape.seconds

    @contextmanager
    def machine(self) -> Iterator[None]:
        def step(loop: CommitLoop) -> Any:
            began = self.scheduler.elapsed
            decided = original(loop)
            # A failed read of the storage leaves the earlier state of pauses.
            since = max([self.paused_since, *(until for until, _, _ in self.weather.outages)])
            if decided in ("commit", "flush") and began > since + _PAUSE_NOTED and loop._steps.leading:  # type: ignore[attr-defined]
                raise Wrong(f"a daemon decided to {decided}, though commits are paused for {_PAUSE_NOTED} s")
            return decided

        original = CommitLoop.step
        with (
            super().machine(),
            simulated_threads(self.scheduler),
            simulated_network(self.network),
            simulated_daemons(self),
            patch.object(CommitLoop, "step", step),
            # Daemons query each other continuously, and clients query all of them while no daemon serves.
            patch.object(memwal.ingest.service.daemon.peers, "LOOK_EVERY", self._look_every),
            patch.object(memwal.ingest.service.daemon.balancer, "LOOK_EVERY", self._look_every),
            patch.object(memwal.ingest.service.client.retry, "LONGEST_PAUSE", 1.0),
            patch.object(memwal.ingest.service.client.retry, "LOOK_EVERY", 1.0),
            patch.object(memwal.ingest.service.client.remote, "STEP_TIMEOUT", 20.0),
            patch.object(memwal.ingest.service.client.remote, "READ_TIMEOUT", 20.0),
        ):
            yield

    def rest(self, paces: Sequence[float]) -> None:
        """Pause, but not beyond the closing time, so that the end does not wait for resting actors."""
        self.scheduler.pause(max(0.0, min(self.random.choice(paces), self.shape.seconds - self.scheduler.elapsed)))

    def host(self, name: str) -> Host:
        host, parts = super().host(name), fates.OF_VISITORS.get(name.rstrip("0123456789"), ())
        host.fate = fates.drawn(self.random, parts, self.fated)
        return host

    # ---- rows ----------------------------------------------------------------------------------------------------

    def is_of_clients(self, key: int) -> bool:
        """Return whether a key belongs to the writers."""
        return key < _CLIENT_KEYS

    def is_logged(self, key: int) -> bool:
        """Return whether a key belongs to a writer or a producer, whose rows are in the log."""
        return self.is_of_clients(key) or key >= Producer.first_key("producer0")

    def keys_of_clients(self) -> list[int]:
        """Return the keys of the writers."""
        return list(range(1, self._fresh + 1)) if self.append else list(self.oracle.region_of)

    def rows_of_a_client(self, most: int) -> dict[int, bool]:
        """Return some keys, all put or all deleted; in a table without a key, fresh ids."""
        if self.append:
            first, self._fresh = self._fresh + 1, self._fresh + most
            return dict.fromkeys(range(first, self._fresh + 1), False)
        keys = self.keys_of_clients()
        return dict.fromkeys(self.random.sample(keys, min(most, len(keys))), self.random.random() < 0.2)

    def table_of(self, rows: Sequence[Row]) -> pa.Table:
        """Return the rows of a batch in the columns of the table."""
        columns = [each for each in row_schema(self.base.schema, self.base.key) if each.name != TOMBSTONE]
        given = {"id": [key for key, _ in rows], "v": [value for _, value in rows]}
        return pa.table(given, schema=pa.schema(columns))

    def fold(self, state: Counter[Row], rows: Sequence[Row]) -> Counter[Row]:
        """Return the expected rows after a batch."""
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

    def expect(self, name: str, level: Any, store: wal.ObjectStore) -> None:
        """Check that storage shows the result of a producer's batches. Raises: Wrong; Unavailable."""
        self._compare(name, level, StoredTable(self.base, store).scan(level=level).read_all())

    def _compare(self, name: str, level: str, rows: pa.Table) -> None:
        first = Producer.first_key(name)
        found = Counter(row for row in pairs(rows) if first <= row[0] < first + 100_000)
        there = self.checkpoints[name]
        expected: Counter[Row] = there.state if self.append else Counter(list(there.state))
        if found != expected:
            raise Wrong(
                f"{name} at {level} after batch {there.number}: {sorted((found - expected).items())[:5]} too many, "
                f"{sorted((expected - found).items())[:5]} missing"
            )

    # ---- loads past the log --------------------------------------------------------------------------------------

    def landed(self) -> int:
        """Return how many loads have landed, from their markers."""
        with self.scheduler.undisturbed():
            committed = flush.BaseTable.open(self.uri).committed
        return sum(has_landed(committed, load_id(Loader.token(number))) for number in range(self.loads + 1))

    def counted(self) -> tuple[int, int]:
        acked = sum(op.settled is not None and not op.failed for op in self.ledger.ops)
        return len(self.ledger.ops) + self.batches, acked + self.batches

    # ---- the run -------------------------------------------------------------------------------------------------

    def live(self) -> None:
        for number in range(self.shape.writers):
            self.daemons.append(ServingDaemon(self, f"daemon{number}"))
        for name in self.shape.visitors:
            self.visitors.append(self.beings()[name.rstrip("0123456789")](self, name))
        ClusterChaos(self)
        try:
            self.scheduler.run()
            self.weather.clear()
            self.weather.pace = 0.1
            self.network.clear()
            self._settle()
        finally:
            self.scheduler.end()

    def _settle(self) -> None:
        self.say("the storage and the network are well again")
        self.land_some()
        self.fated = 0.0
        for host in (*(each.host for each in self.daemons), *(each.host for each in self.visitors)):
            host.fate = None
        for place, daemon in enumerate(self.daemons):
            if daemon.host.dead:
                self.daemons[place] = ServingDaemon(self, daemon.name)
        self.visitors = [End(self, "end")]
        self.scheduler.run()
        for daemon in self.daemons:
            self.scheduler.kill(daemon.host)
        self._check_at_rest()

    def _check_at_rest(self) -> None:
        base = flush.BaseTable.open(self.uri)
        with self.scheduler.undisturbed():
            if self.wal_is_ours and (found := verify_table(self.disk.inner, self.uri).findings):
                raise Wrong(f"the end: verify: {found[0]}")
        for region in base.regions:
            self._collect_ssts(region)
            check_region(self.disk.inner, region, self.codec.suffix)
        rows = StoredTable(self.base, self._store()).scan(level="committed").read_all()
        self.check_all("the base table without SSTs", "committed", rows, self.ledger.moment())
        if self.loads:
            self._check_loads(rows)

    @property
    def wal_is_ours(self) -> bool:
        """Whether memwal alone has changed the table."""
        return not any(name.startswith("meddler") for name in self.shape.visitors)

    def _check_loads(self, rows: pa.Table) -> None:
        loaded, landed = sorted(row for row in pairs(rows) if row[0] in Loader.keys), self.landed()
        if landed < self.loads or loaded != [(key, Loader.value(landed - 1)) for key in Loader.keys if landed]:
            raise Wrong(f"the end: {landed} loads have landed, of {self.loads}; their rows are {loaded}")

    def check_all(self, who: str, level: str, rows: pa.Table, began: int) -> None:
        """Check a read at the end against everything that was known at `began`."""
        ours = [row for row in pairs(rows) if self.is_of_clients(row[0])]
        self.say(f"{who}: {len(ours)} rows of clients")
        # No call is in flight any more, so owners and storage show the same.
        self.ledger.read(f"the end, {who}", began, ours, self.keys_of_clients(), level="durable", stored=True)
        for name in self.checkpoints:
            self._compare(name, level, rows)
