"""Durable puts beside SlateDB and beside LanceDB's LSM merge: the same rows, one caller and many.

SlateDB stores keys and values. The key of a row is its id, eight bytes; its value is the other columns, serialised
before the clock starts. A put of many rows is one `WriteBatch`. Filling it takes one call into SlateDB per row, 40 µs
of processor time, because its Python package has no call for many rows. Filling is timed, and one contender has its
batches filled beforehand, to show the remaining time. Callers are tasks of one event loop, as that package requires;
callers of memwal and LanceDB are threads.

Durability when a put returns, by system-call traces on local files: memwal syncs the entry and its directory. SlateDB
0.17 and LanceDB 0.40 wait until the log file is written and linked, without fsync, so a power cut can lose what they
acknowledged.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench import memwal_side, peers_fetch
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Values, Watch
from bench.digest import rows_digest
from bench.memwal_side import MemwalTable
from bench.put_path import Puts
from bench.source_data import NARROW, NARROW_KEY, narrow_batches
from bench.storage_floor import StorageFloor

Pairs = Sequence[tuple[bytes, bytes]]
Callers = Sequence[Sequence[pa.Table]]
Write = Callable[[Any], Awaitable[Any]]

NOT_SYNCED = "its log file is written and linked, not synced"
_KEY = struct.Struct(">q")
_VALUE = struct.Struct("<d")
_DEFAULT_INTERVAL = 100
"""SlateDB writes its log on a timer, 100 ms by default. Timers of 1 ms, 0.5 ms, 0.1 ms and 0 perform alike, because its
clock has steps of 1 ms. Calling `flush` after each write does not wait for the timer.
"""


class SlatePuts(Contender):
    """SlateDB with local files.

    `interval`: of the log's timer, in milliseconds. `flush`: after each write. `filled`: batches are filled before the
    clock starts.
    """

    def __init__(
        self, name: str, callers: Callers, *, interval: int | None = None, flush: bool = False, filled: bool = False
    ) -> None:
        settings = {
            "flush_interval": f"{_DEFAULT_INTERVAL if interval is None else interval}ms",
            "flush after each write": flush,
        }
        super().__init__(f"SlateDB, {name}", "peer", settings, note=NOT_SYNCED)
        self._interval, self._flush, self._filled = interval, flush, filled
        self._rows = sum(batch.num_rows for batches in callers for batch in batches)
        self._callers = [[_pairs(batch) for batch in batches] for batches in callers]

    def prepare(self, at: Path) -> None:  # noqa: ARG002 - nothing is kept between rounds
        """Import SlateDB."""
        peers_fetch.importable()
        self._slatedb = import_module("slatedb.uniffi")

    def round(self, at: Path, watch: Watch) -> Sample:
        """Put every batch into one database."""
        return asyncio.run(self._round(at, watch))

    async def _round(self, at: Path, watch: Watch) -> Sample:
        db = await self._open(at)
        try:
            writes = [[self._write(pairs) for pairs in batches] for batches in self._callers]
            with watch.timed():
                taken = await asyncio.gather(*(self._caller(db, each) for each in writes))
            found = rows_digest(await self._scanned(db), [NARROW_KEY])
        finally:
            await db.shutdown()
        latencies = np.asarray([seconds for each in taken for seconds in each])
        return Sample(latencies, watch.seconds, self._rows, found)

    async def _open(self, at: Path) -> Any:
        store = self._slatedb.ObjectStoreBuilder(self._slatedb.ObjectStoreType.LOCAL)
        store.with_config("local_path", str(at))
        builder, settings = self._slatedb.DbBuilder("db", store.build()), self._slatedb.Settings.default()
        if self._interval is not None:
            settings.set("flush_interval", f'"{self._interval}ms"')
        builder.with_settings(settings)
        return await builder.build()

    async def _caller(self, db: Any, writes: Sequence[Write]) -> list[float]:
        taken = []
        for write in writes:
            began = time.perf_counter()
            written = await write(db)
            if self._flush:
                await db.flush()
            await written.await_durable()
            taken.append(time.perf_counter() - began)
        return taken

    def _write(self, pairs: Pairs) -> Write:
        """Return a function that puts these rows into a database."""
        if len(pairs) == 1:
            return lambda db: db.put(*pairs[0])
        if self._filled:
            batch = self._batch(pairs)
            return lambda db: db.write(batch)
        return lambda db: db.write(self._batch(pairs))

    def _batch(self, pairs: Pairs) -> Any:
        batch = self._slatedb.WriteBatch()
        for key, value in pairs:
            batch.put(key, value)
        return batch

    async def _scanned(self, db: Any) -> pa.Table:
        everything = self._slatedb.KeyRange(start=None, start_inclusive=False, end=None, end_inclusive=False)
        rows, iterator = [], await db.scan(everything)
        while (pair := await iterator.next()) is not None:
            (value,) = _VALUE.unpack(pair.value[: _VALUE.size])
            rows.append((_KEY.unpack(pair.key)[0], value, pair.value[_VALUE.size :].decode()))
        return pa.table([pa.array(each) for each in zip(*rows, strict=True)], schema=NARROW)


def _pairs(batch: pa.Table) -> Pairs:
    """Return each row as a key and a value."""
    columns = (batch.column(name).to_pylist() for name in NARROW.names)
    return [(_KEY.pack(id), _VALUE.pack(value) + label.encode()) for id, value, label in zip(*columns, strict=True)]


class LsmTable:
    """A LanceDB table with an LSM write spec of one bucket, so that `merge_insert` writes to Lance's MemWAL.

    Thread safety. `put` from any thread; everything else from one thread.
    """

    def __init__(self, at: Path, writer: Mapping[str, str]) -> None:
        """Create the table. `writer`: settings of Lance's ShardWriter."""
        lancedb, native = import_module("lancedb"), import_module("lancedb._lancedb")
        self._table = lancedb.connect(str(at)).create_table("rows", schema=NARROW)
        self._table.set_unenforced_primary_key(NARROW_KEY)
        spec = native.LsmWriteSpec.bucket(NARROW_KEY, 1)
        self._table.set_lsm_write_spec(spec.with_writer_config_defaults(dict(writer)) if writer else spec)

    def put(self, rows: pa.Table) -> None:
        """Merge rows; returns when the merge has returned."""
        merge = self._table.merge_insert(NARROW_KEY).when_matched_update_all().when_not_matched_insert_all()
        merge.use_lsm(True).execute(rows)

    def rows(self) -> pa.Table:
        """Return every row of base and memtable."""
        return self._table.to_arrow()

    def close(self) -> None:
        """Release the shard."""
        self._table.close_lsm_writers()


LSM_BEST: Mapping[str, str] = {"max_wal_flush_interval_ms": "1"}
"""A buffer of one byte, the best setting of ShardWriter itself, takes 10 ms here instead of 1.2 ms; together with the
timer it is as fast as the timer alone.
"""


def _memwal(callers: Callers) -> Puts:
    def open_at(at: Path) -> MemwalTable:
        return MemwalTable(at, NARROW.empty_table(), NARROW_KEY, {})

    resolved = memwal_side.resolved({}, durable=True, regions=1)
    return Puts("memwal, default", "memwal", resolved, open_at, callers, NARROW_KEY)


def _lancedb(name: str, callers: Callers, writer: Mapping[str, str], **more: str) -> Puts:
    def open_at(at: Path) -> LsmTable:
        return LsmTable(at, writer)

    return Puts(f"LanceDB LSM merge, {name}", "peer", writer, open_at, callers, NARROW_KEY, **more)


def _one_caller(values: Values) -> list[Contender]:
    batches = narrow_batches(values["puts"], values["rows"])
    filled = [SlatePuts("flush, batch filled before", [batches], flush=True, filled=True)] if values["rows"] > 1 else []
    return [
        _memwal([batches]),
        SlatePuts("default", [batches]),
        SlatePuts("timer of 1 ms", [batches], interval=1),
        SlatePuts("flush after each write", [batches], flush=True),
        *filled,
        _lancedb("default", [batches], {}, note=NOT_SYNCED),
        _lancedb("timer of 1 ms", [batches], LSM_BEST, note=NOT_SYNCED),
        StorageFloor(batches),
    ]


def _many_callers(values: Values) -> list[Contender]:
    rows = narrow_batches(values["callers"] * values["puts"], 1)
    everything = [rows[n :: values["callers"]] for n in range(values["callers"])]
    few = [batches[: values["puts_default"]] for batches in everything]
    fewer = {"question": "fewer puts", "note": f"{values['puts_default']} puts per caller; {NOT_SYNCED}"}
    return [
        _memwal(everything),
        SlatePuts("default", everything),
        SlatePuts("timer of 1 ms", everything, interval=1),
        SlatePuts("flush after each write", everything, flush=True),
        _lancedb("default", few, {}, **fewer),
        _lancedb("timer of 1 ms", everything, LSM_BEST, note=NOT_SYNCED),
        StorageFloor(everything[0]),
    ]


BENCHMARKS = (
    Benchmark(
        "puts",
        "Durable put of 1,000 rows, one caller",
        "p50_ms",
        {"puts": Parameter(3, 40, "puts of a round"), "rows": Parameter(100, 1_000, "rows of a put")},
        _one_caller,
    ),
    Benchmark(
        "row_puts",
        "Durable put of 1 row, one caller",
        "p50_ms",
        {"puts": Parameter(3, 60, "puts of a round"), "rows": Parameter(1, 1, "rows of a put")},
        _one_caller,
    ),
    Benchmark(
        "callers",
        "Durable puts of 1 row, many callers at once",
        "rows_per_second",
        {
            "callers": Parameter(4, 32, "callers"),
            "puts": Parameter(3, 40, "puts of each caller in a round"),
            "puts_default": Parameter(1, 2, "the same for LanceDB at its default"),
        },
        _many_callers,
    ),
)
