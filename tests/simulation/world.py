"""One run: a seed decides the shape of the world and everything that happens in it.

1. A fresh table on a RAM disk, the actors, the faults.
2. The actors run until the closing time: some writers close, others are killed or sleep.
3. The storage has no more faults; puts that are still in flight land now, later, or never.
4. Every region is claimed once more, read, flushed and committed. At each step the oracle checks the rows, and the log,
   the manifests and the base table are checked object by object.

In an `AppendWorld` the table has no key: each write has unique ids, so that a doubled or lost row can be identified;
the rest is the same.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal import flush, wal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.region.context import Limits, RegionContext
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.engine.table.stored import StoredTable
from memwal.memtable import TOMBSTONE, IndexSpec, row_schema
from memwal.memtable.index_spec import IndexKind
from memwal.wal.layout import entry_key, manifest_key, parse_entry_key, wal_prefix
from memwal.wal.manifest_garbage import pruned_below
from tests.simulation.actors import (
    Chaos,
    Client,
    Collector,
    Committer,
    Driver,
    Sleeper,
    StorageReader,
    Stranger,
    TailReader,
    Visitor,
)
from tests.simulation.coverage import Cells
from tests.simulation.lance_calls import simulated_machine
from tests.simulation.oracle import Attempt, Oracle, Wrong
from tests.simulation.process import Process, pairs
from tests.simulation.scheduler import Host, Scheduler, SimulatedClock, Trace
from tests.simulation.storage import CALL_FAULTS, PUT_FAULTS, Disk, SimulatedStore, Weather
from tests.support.clock import SeededIds

_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
_RAM_DISK = Path("/dev/shm")
_ATTEMPTS_MAX = 200
_Indexes = tuple[tuple[str, IndexKind], ...]
_Kind = tuple[int, wal.WalFormat, _Indexes, bool, flush.WriteRules]
_IDS = 9_000
"""More than any run writes; keys of other programs begin above."""


class SeedFailed(AssertionError):
    """A run broke a promise, or failed. The text has the seed and the last steps; `reason` is its own line."""

    def __init__(self, seed: int, steps: str, error: Exception, option: str = "") -> None:
        self.reason = f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        again = f"see every step: python -m tests.simulation{option} --seed {seed} --trace"
        super().__init__(f"{steps}\n{self.reason}\n{again}")


_SHARD_WRITERS_LIMITS = {"generation_rows": 30, "generation_entries": 12}
"""Far below the real limits, so that runs reach them."""


@dataclass(frozen=True)
class Shape:
    """The size of a world, drawn by the seed."""

    regions: int
    writers: int
    seconds: float
    keys: int
    paces: tuple[float, ...]
    """Pauses of a writer between two turns."""
    rest: float
    """Longest pause of a writer that lost a region, before it claims the region again."""
    chaos: float
    patience: int
    rows_max: int
    entry_size_max: int
    wal_format: wal.WalFormat
    visitors: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The result of a run: equal for equal seeds."""

    seed: int
    digest: str
    steps: int
    attempts: int
    acked: int
    cells: Cells = field(compare=False, repr=False)


class World:
    """Everything that one run consists of. One thread."""

    indexes: _Indexes = ()
    """Columns and kinds of the indexes of the table and its SSTs."""
    append = False
    """Whether the table has no key."""
    has_sleeper = False
    """Whether a program writes from a handle that it has kept open for long."""
    rests = False
    """Whether writers release regions at rest, and readers read them from storage."""
    rules = flush.WriteRules()
    chaos: type[Chaos] = Chaos
    process: type[Process] = Process
    option = " --log"
    """The option of the command line that chooses this kind."""

    def __init__(self, seed: int, directory: str, trace: Trace) -> None:
        self.random = random.Random(f"world {seed}")
        self.scheduler = Scheduler(f"schedule {seed}", trace)
        self.shape, self.weather = self.drawn()
        self._short_maps = seed % 2 == 0  # snapshots of the applied map, which has few names here
        self.appends_beside = seed % 3 == 0
        kind = (self.shape.regions, self.shape.wal_format, self.indexes, self.append, self.rules)
        self.uri = _new_table(directory, kind)
        self.disk = Disk(wal.LocalStore(self.uri), self.scheduler)
        self.base = flush.BaseTable.open(self.uri)
        self.codec = self.base.codec
        self.leases = random.Random(f"leases {seed}")
        self.wal_options = wal.WalOptions(
            put_timeout=2.0,
            retry_budget=self.random.choice((4.0, 12.0)),
            read_lease=self.leases.choice((0.0, 0.5, 4.0, 4.0)),
        )
        self.region_ids: list[UUID] = [wal.bucket_region(bucket) for bucket in range(self.shape.regions)]
        self.keys = _keys_by_region(self.base, self.shape)
        known = () if self.append else enumerate(self.keys)
        self.oracle = Oracle({key: region for region, keys in known for key in keys})
        self.strangers: dict[int, bool] = {}
        """Keys of other programs, and whether their rows exist."""
        self.tokens: dict[tuple[str, int], tuple[int, bool]] = {}
        """For each client and region, the last token's number and whether it is known to be applied."""
        self.processes: list[Process] = []
        self.visitors: list[Visitor] = []
        self._lives = count()

    # ---- overridden by other kinds of worlds ---------------------------------------------------------------------

    def drawn(self) -> tuple[Shape, Weather]:
        """Draw the shape of the world and its faults."""
        return _shape(self.random), _weather(self.random)

    def beings(self) -> Mapping[str, type[Visitor]]:
        """Return the kinds of visitors, by the names in `Shape.visitors` without their number."""
        return _VISITORS

    @contextmanager
    def machine(self) -> Iterator[None]:
        """Replace pylance's calls and the machine's clock inside the context."""
        with ExitStack() as patches:
            patches.enter_context(self.calls())
            # Hash tables of a dozen keys: filling the usual 8,192 slots would take a fifth of a run.
            patches.enter_context(patch("memwal.memtable.key.code_table.FIRST_SLOTS", 5))
            if self._short_maps:
                patches.enter_context(patch("memwal.wal.applied._INLINE_MAX", 40))
                patches.enter_context(patch("memwal.wal.applied._OF_A_NAME", 1))
            yield

    def calls(self) -> AbstractContextManager[None]:
        """Return the replacements of pylance's calls and the machine's clock."""
        return simulated_machine(self.scheduler, self.weather)

    # ---- used by the actors --------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether there is time left, and a write left to make."""
        return self.scheduler.elapsed < self.shape.seconds and len(self.oracle.attempts) < _ATTEMPTS_MAX

    def rest(self, paces: Sequence[float]) -> None:
        """Let the running actor pause for one of `paces`, in seconds."""
        self.scheduler.pause(self.random.choice(paces))

    def host(self, name: str) -> Host:
        """Return the process of a visitor."""
        return Host(name)

    def spawn(self, name: str, work: Callable[[], None], host: Host) -> None:
        """Add an actor."""
        self.scheduler.spawn(name, work, host)

    def say(self, text: str) -> None:
        """Add a line to the trace."""
        self.scheduler.note(text)

    def ids(self, name: str) -> SeededIds:
        """Return the identifiers of a new life of `name`."""
        return SeededIds(self.random.getrandbits(64) + next(self._lives))

    def context(self, store: SimulatedStore, clock: SimulatedClock, name: str) -> RegionContext:
        """Return the context that the regions of one process share."""
        limits = Limits(
            entry_size_max=self.shape.entry_size_max,
            linger_max=0.5,
            size_max=1 << 30,
            rows_max=self.shape.rows_max,
            age_max=20.0,
            unflushed_max=1 << 30,
            retry_delay=0.2,
            **(_SHARD_WRITERS_LIMITS if self.shape.wal_format == "arrow" else {}),
        )
        return RegionContext(
            store=store,
            codec=self.codec,
            clock=clock,
            ids=self.ids(name),
            schema=row_schema(self.base.schema, self.base.key),
            key=self.base.key,
            indexes=(),
            sst_format=flush.SstFormat.of(self.base, indexes=flush.SstIndexes(self.base.indexes)),
            limits=limits,
            wal_options=self.wal_options,
        )

    def prune_manifests(self, store: SimulatedStore, region: UUID, clock: SimulatedClock, age: float) -> None:
        """Delete all but two versions, of any age: nothing here needs older ones, and sleepers are frequent."""
        if self.shape.wal_format == "lance":
            found = wal.ManifestCollector(store, region, clock, kept=2).collect(lambda _: False, age)
            self.say(f"pruned {found.versions} manifests, kept {found.kept}")

    def random_rows(self, region: int, most: int) -> dict[int, bool]:
        """Return some keys of a region, all put or all deleted; in a table without a key, fresh ids."""
        if self.append:
            fresh, self.keys[region] = self.keys[region][:most], self.keys[region][most:]
            self.oracle.region_of.update(dict.fromkeys(fresh, region))
            return dict.fromkeys(fresh, False)
        keys = self.random.sample(self.keys[region], min(most, len(self.keys[region])))
        return dict.fromkeys(keys, self.random.random() < 0.2)

    def write(self, attempt: Attempt, *, durable: bool = True) -> Write:
        """Return the write of an attempt into a region."""
        deletes = any(attempt.rows.values())
        values = pa.array([None if deletes else attempt.number] * len(attempt.rows), pa.int64())
        columns = [field for field in row_schema(self.base.schema, self.base.key) if field.name != TOMBSTONE]
        rows = pa.table([pa.array(list(attempt.rows), pa.int64()), values], schema=pa.schema(columns))
        token = None if attempt.token is None else Token(*attempt.token)
        return Write(rows, durable, token, deletes)

    # ---- the run -------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Run steps 2 to 4. Raises: what the oracle or an actor raises."""
        for number in range(self.shape.writers):
            self.processes.append(self.process(self, f"writer{number}"))
        for name in self.shape.visitors:
            self.visitors.append(self.beings()[name.rstrip("0123456789")](self, name))
        type(self).chaos(self)
        try:
            self.scheduler.run()
            self.weather.clear()
            self.settle()
        finally:
            self.scheduler.end()

    def settle(self) -> None:
        self.say("the storage is well again")
        self.land_some()
        cores = [self._claimed(number) for number in range(self.shape.regions)]
        self.land_some()
        table = StoredTable(self.base, self._store())
        self.compare("the log", table, "durable")
        for core in cores:
            core.freeze()
            while core.publish_next():
                continue
        self.compare("SSTs", table, "flushed")
        self._wake_sleepers()
        flush.commit(self.uri, None, self._store(), clock=SimulatedClock(self.scheduler), ids=self.ids("end"))
        self.compare("the base table", table, "committed")
        for region in self.region_ids:
            self._collect_ssts(region)
            check_region(self.disk.inner, region, self.codec.suffix)
        self.compare("the base table without SSTs", table, "latest")

    def land_some(self) -> None:
        for key, data in list(self.disk.pending):
            if self.random.random() < 0.5:
                self.disk.land(key, data)

    def _wake_sleepers(self) -> None:
        """Collect all entries, then let every process that believes to own a region detect that it lost it."""
        for region in self.region_ids:
            clock = SimulatedClock(self.scheduler, skew=1e6)
            wal.WalCollector(self._store(), region, self.codec, clock, workers=1).collect(0.0)
        for process in self.processes:
            if not process.host.dead:
                process.wake()

    def _collect_ssts(self, region: UUID) -> None:
        """Collect the SSTs of a region after everything is published and committed: no directory may be left."""
        collector = flush.SstCollector(self._store(), region, SimulatedClock(self.scheduler, skew=1e6), workers=1)
        listing = collector.list_region()
        found = collector.collect(listing, flush.base_needs(self._store(), flush.BaseTable.open(self.uri), 1e12), 0.0)
        self.say(f"{found.committed} committed, {found.abandoned} abandoned SSTs collected in the end")
        if left := collector.names():
            raise Wrong(f"region {region}: SST directories {left} are left over: {found}")

    def counted(self) -> tuple[int, int]:
        """Return how many writes there were, and how many of them were acknowledged."""
        return len(self.oracle.attempts), sum(attempt.state == "acked" for attempt in self.oracle.attempts)

    def loaded_keys(self) -> list[int]:
        """Return the keys that were loaded past the log."""
        return []

    def _store(self) -> SimulatedStore:
        return SimulatedStore(self.disk, self.weather, self.scheduler, Host("end"))

    def _claimed(self, region: int) -> RegionCore:
        context = self.context(self._store(), SimulatedClock(self.scheduler), "end")
        core = RegionCore.open(context, self.region_ids[region])
        self.oracle.claimed(region, core.guard.epoch)
        return core

    def compare(self, who: str, table: StoredTable, level: str) -> None:
        """Check one read at the end: it shows every acked row; what it proves, every later check must show too."""
        found = list(pairs(table.scan(level=level).read_all()))
        ours = [row for row in found if row[0] in self.oracle.region_of]
        self.say(f"{who}: {len(ours)} rows, {len(found) - len(ours)} of strangers")
        self.oracle.durable |= self.oracle.check(f"the end, {who}", ours, self.oracle.durable)
        self.oracle.check_one_of(f"the end, {who}", ours, self.oracle.one_of)
        strangers = sorted(key for key, _ in found if key not in self.oracle.region_of)
        expected = sorted([key for key, there in self.strangers.items() if there] + self.loaded_keys())
        if strangers != expected:
            raise Wrong(f"the end, {who}: strangers' keys are {strangers}, not {expected}")


def check_region(store: wal.ObjectStore, region: UUID, suffix: str) -> None:
    """Check the objects of a region at rest: manifests form a chain, positions and generations have no gap."""
    current: wal.RegionManifest | None = None
    for version in count(pruned_below(store, region)):
        data = store.get(manifest_key(region, version))
        if data is None:
            break
        proposed = wal.RegionManifest.decode(data)
        if current is not None or version == 1:
            wal.check_succession(current, proposed)
        current = proposed
    if current is None:
        raise Wrong(f"region {region} has no manifest")
    found = {parsed.position for key in store.list(wal_prefix(region)) if (parsed := parse_entry_key(key))}
    missing = [p for p in range(current.replay_after + 1, max(found, default=0)) if p not in found]
    if missing:
        raise Wrong(f"region {region}: positions {missing} are missing above replay_after {current.replay_after}")
    if current.last_seen > max(found, default=0):
        raise Wrong(f"region {region}: {entry_key(region, current.last_seen, suffix)} was seen once and is missing")


class AppendWorld(World):
    """A table without a key. One thread."""

    append = True
    option = " --append"

    def drawn(self) -> tuple[Shape, Weather]:
        shape, weather = super().drawn()
        return replace(shape, keys=_IDS, wal_format="lance"), weather


def simulate(seed: int, show: Callable[[str], None] | None = None, kind: type[World] = World) -> Outcome:
    """Run one seed. Raises: SeedFailed, with the seed and the last steps, if anything is wrong."""
    trace = Trace(show)
    directory = tempfile.mkdtemp(prefix="memwal-simulation-", dir=_RAM_DISK if _RAM_DISK.is_dir() else None)
    try:
        world = kind(seed, directory, trace)
        with world.machine():
            world.live()
    except Exception as error:
        raise SeedFailed(seed, "\n".join(trace.last), error, kind.option) from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Outcome(seed, trace.digest, trace.steps, *world.counted(), world.scheduler.coverage.cells)


_VISITORS: dict[str, type[Visitor]] = {
    "reader": StorageReader,
    "client": Client,
    "tail": TailReader,
    "committer": Committer,
    "collector": Collector,
    "stranger": Stranger,
    "sleeper": Sleeper,
    "query": Driver,
}


def _shape(chance: random.Random) -> Shape:
    beings = (
        "reader0",
        "reader1",
        "tail0",
        "committer0",
        "committer1",
        "collector0",
        "stranger0",
        "query0",
        "query1",
        "sleeper0",
    )
    return Shape(
        regions=chance.choice((1, 1, 2)),
        writers=chance.choice((1, 2, 2, 3, 3)),
        seconds=chance.choice((20.0, 40.0)),
        keys=chance.choice((4, 12, 40)),
        paces=chance.choice(((0.0, 0.05, 0.3), (0.3, 1.0, 3.0))),
        rest=chance.choice((0.1, 2.0, 8.0)),
        chaos=chance.choice((0.0, 0.3, 0.7)),
        patience=chance.choice((2, 10)),
        rows_max=chance.choice((4, 10, 40)),
        entry_size_max=chance.choice((40, 100, 1 << 20)),
        wal_format=chance.choice(("lance", "arrow")),
        visitors=tuple(name for name in beings if chance.random() < 0.8),
    )


def _weather(chance: random.Random) -> Weather:
    return Weather(
        rate=chance.choice((0.0, 0.01, 0.05, 0.15)),
        put_faults=_some(chance, PUT_FAULTS),
        call_faults=_some(chance, CALL_FAULTS),
        lag=chance.choice((0.0, 0.3)),
        speed=chance.choice((0.2, 1.0, 3.0)),
        manifests_worse=chance.choice((1.0, 1.0, 6.0)),
    )


def _some(chance: random.Random, kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(kind for kind in kinds if chance.random() < 0.6)


@cache
def _template(kind: _Kind) -> dict[str, bytes]:
    """Return the files of an empty table, created once for all runs of this process."""
    regions, wal_format, indexes, append, rules = kind
    with tempfile.TemporaryDirectory() as directory:
        uri, specs = f"{directory}/table.lance", [IndexSpec(*each) for each in indexes]
        key, by = ([], ["id"]) if append else (["id"], None)
        new = {"wal_format": wal_format, "append_by": by, "rules": rules}
        flush.BaseTable.create(uri, _SCHEMA, key, regions, specs, **new)  # type: ignore[arg-type]
        files = [each for each in Path(directory).rglob("*") if each.is_file()]
        return {str(each.relative_to(directory)): each.read_bytes() for each in files}


def _new_table(directory: str, kind: _Kind) -> str:
    for name, data in _template(kind).items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return f"{directory}/table.lance"


def _keys_by_region(base: flush.BaseTable, shape: Shape) -> list[list[int]]:
    keys = pa.table({"id": pa.array(np.arange(1, shape.keys + 1))})
    buckets = base.route(keys)
    found = [[int(key) for key in np.flatnonzero(buckets == bucket) + 1] for bucket in range(shape.regions)]
    return [each or [100 + number] for number, each in enumerate(found)]
