"""Puts into the memtable alone: empty, growing and full, with the key index alone and with all indexes.

Lance's side is a ShardWriter that does not wait for its log, with the largest memtable it accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench import lance_side
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Values, Watch
from bench.digest import rows_digest
from bench.lance_side import LanceShard
from bench.latencies import timed_each
from bench.memtable_data import (
    COMPOSITE,
    COMPOSITE_KEY,
    STRING,
    STRING_KEY,
    in_batches,
    many_narrow,
    many_packages,
    with_composite_key,
    with_string_key,
)
from bench.memtable_side import BareMemTable, Shape
from bench.memwal_side import MemwalTable
from bench.put_path import PACKAGE_INDEXES, Puts
from bench.source_data import NARROW, NARROW_KEY, PACKAGES_KEY, SEED, narrow_batches, packages
from memwal.flush import BaseTable
from memwal.ingest.engine.region.context import IndexMode
from memwal.memtable import VectorModel, with_tombstone

HELD = Parameter(2000, 1_000_000, "rows in the memtable")
LARGE: Mapping[str, Any] = {
    **lance_side.FAST_BEST,
    "max_memtable_rows": 4_000_000,
    "max_memtable_size": 4 << 30,
    "max_memtable_batches": 100_000,
    "max_unflushed_memtable_bytes": 8 << 30,
}
"""ShardWriter with a memtable of a million rows; by default it flushes at 100,000."""


def _as_rows(batches: Sequence[pa.Table], shape: Shape) -> list[pa.Table]:
    return [with_tombstone(batch, shape.row_schema) for batch in batches]


# ---- put ----------------------------------------------------------------------------------------------------------


class BarePuts(Contender):
    """Put into a memtable; measures the caller's time, and the time until no row waits for an index.

    `base`: rows of the base table; the memtable's indexes begin with its trained models. `converting`: see
    BareMemTable. `settled`: the rate uses the time until no row waits for an index.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        batches: Sequence[pa.Table],
        base: pa.Table | None = None,
        *,
        converting: bool = False,
        settled: bool = False,
    ) -> None:
        super().__init__(f"memwal, {name}", "memwal", shape.settings())
        self._shape, self._converting, self._settled = shape, converting, settled
        self._batches = batches if converting else _as_rows(batches, shape)
        self._base = shape.schema.empty_table() if base is None else base
        self._models: Mapping[str, VectorModel] = {}

    def prepare(self, at: Path) -> None:
        """Build the indexes of the base table, if any."""
        if self._shape.indexes:
            MemwalTable(at, self._base, self._shape.key[0], self._shape.indexes).close()
            self._models = BaseTable.open(str(at / "table.lance")).vector_models()

    def round(self, at: Path, watch: Watch) -> Sample:  # noqa: ARG002 - nothing is on storage
        """Fill one memtable."""
        table = BareMemTable(self._shape, self._models, converting=self._converting)
        until_indexed = Watch()
        try:
            with until_indexed.timed():
                with watch.timed():
                    latencies = timed_each(table.put, self._batches)
                table.indexed()
            rows = table.rows()
        finally:
            table.close()
        count = sum(batch.num_rows for batch in self._batches)
        seen = pa.concat_tables([self._base, rows])  # the base has none of the keys that are put
        digest = rows_digest(seen, self._shape.key)
        seconds = until_indexed.seconds if self._settled else watch.seconds
        more = {} if self._settled else {"rows/s until indexed": count / until_indexed.seconds}
        return Sample(np.asarray(latencies), seconds, count, digest, more)


# ---- put, the key index alone --------------------------------------------------------------------------------------


def _put(
    schema: pa.Schema, key: Sequence[str], made: Callable[[pa.Table], pa.Table]
) -> Callable[[Values], list[Contender]]:
    """Return contenders for puts of narrow rows with one kind of key."""

    def contenders(values: Values) -> list[Contender]:
        shape = Shape(schema, key)
        batches = [made(batch) for batch in narrow_batches(values["puts"], values["rows"])]
        found: list[Contender] = [
            BarePuts("checked and applied", shape, batches),
            BarePuts("and brought to the row schema", shape, batches, converting=True),
        ]
        for name, settings in (("best", lance_side.FAST_BEST), ("default", lance_side.FAST)):
            found.append(_shard_puts(f"ShardWriter, {name}", settings, schema.empty_table(), key, {}, batches))
        return found

    return contenders


def _put_many(values: Values) -> list[Contender]:
    """Return contenders for enough puts that indexing must keep up with them."""
    batches = [with_string_key(batch) for batch in narrow_batches(values["puts"], values["rows"])]
    return [
        BarePuts("until indexed", Shape(STRING, [STRING_KEY]), batches, settled=True),
        _shard_puts("ShardWriter, best, one memtable", LARGE, STRING.empty_table(), [STRING_KEY], {}, batches),
    ]


def _shard_puts(
    name: str,
    settings: Mapping[str, Any],
    base: pa.Table,
    key: Sequence[str],
    indexes: Mapping[str, Mapping[str, Any]],
    batches: Sequence[pa.Table],
) -> Puts:
    def open_at(at: Path) -> LanceShard:
        return LanceShard(at, base, key, indexes, settings)

    return Puts(name, "lance", settings, open_at, [batches], key)


# ---- put, three indexes --------------------------------------------------------------------------------------------


def _put_packages(values: Values) -> list[Contender]:
    base = packages().slice(0, values["base"])
    rows = many_packages(values["stream"])
    batches = in_batches(rows, values["rows"])
    modes: tuple[IndexMode, ...] = ("async", "sync")
    found: list[Contender] = [
        BarePuts(mode, Shape(rows.schema, [PACKAGES_KEY], PACKAGE_INDEXES, mode), batches, base) for mode in modes
    ]
    for name, settings in (("best", lance_side.FAST_BEST), ("default", lance_side.FAST)):
        found.append(_shard_puts(f"ShardWriter, {name}", settings, base, [PACKAGES_KEY], PACKAGE_INDEXES, batches))
    return found


# ---- put into a full memtable --------------------------------------------------------------------------------------


class FullPuts(Contender):
    """Put into a table that holds many rows, and put the same rows into an empty one.

    `times as when empty`: p50 in the full table divided by p50 in the empty one, of the same round.
    """

    def __init__(
        self,
        name: str,
        side: Any,
        settings: Mapping[str, Any],
        open_at: Callable[[Path], Any],
        held: Sequence[pa.Table],
        rounds: Sequence[Sequence[pa.Table]],
    ) -> None:
        super().__init__(name, side, settings)
        self._open, self._held, self._rounds = open_at, held, iter(rounds)
        self._full: Any = None

    def prepare(self, at: Path) -> None:
        """Fill the table."""
        self._full = self._open(at)
        for batch in self._held:
            self._full.put(batch)

    def round(self, at: Path, watch: Watch) -> Sample:
        """Put the next batches into both tables."""
        batches = next(self._rounds)
        empty = self._open(at)
        try:
            before = timed_each(empty.put, batches)
        finally:
            empty.close()
        with watch.timed():
            latencies = timed_each(self._full.put, batches)
        flat = {"times as when empty": float(np.median(latencies) / np.median(before))}
        count = sum(batch.num_rows for batch in batches)
        return Sample(np.asarray(latencies), watch.seconds, count, self._digest(batches[-1]), flat)

    def _digest(self, put: pa.Table) -> str:
        """Hash the rows of one put without their ids, which differ in each round."""
        rows, ids = self._full.rows().select(NARROW.names), put.column(NARROW_KEY)
        found = rows.take(pc.index_in(ids.combine_chunks(), rows.column(NARROW_KEY)))
        return rows_digest(found.set_column(0, NARROW_KEY, pa.array(np.arange(len(ids)))), [NARROW_KEY])

    def close(self) -> None:
        """Release the full table."""
        if self._full is not None:
            self._full.close()


MOST_ROUNDS = 20


def _put_full(values: Values) -> list[Contender]:
    shape, size = Shape(NARROW, [NARROW_KEY]), values["rows"]
    held = in_batches(many_narrow(values["held"]), size)
    rounds = [_later_batches(values, number) for number in range(MOST_ROUNDS)]

    def shard(at: Path) -> LanceShard:
        return LanceShard(at, NARROW.empty_table(), NARROW_KEY, {}, LARGE)

    return [
        FullPuts(
            "memwal, checked and applied",
            "memwal",
            {},
            lambda _: BareMemTable(shape),
            _as_rows(held, shape),
            [_as_rows(batches, shape) for batches in rounds],
        ),
        FullPuts("ShardWriter, best, one memtable", "lance", LARGE, shard, held, rounds),
    ]


def _later_batches(values: Values, number: int) -> list[pa.Table]:
    """Return the batches of round `number`: nine new keys, then one existing key."""
    held, count = values["held"], values["puts"] * values["rows"]
    first = held + number * count
    rng = np.random.default_rng((SEED, number))
    ids = np.arange(first, first + count)
    ids[9::10] = rng.choice(held, len(ids[9::10]), replace=False)
    rows = many_narrow(count)
    return in_batches(rows.set_column(0, NARROW.field(NARROW_KEY), pa.array(ids)), values["rows"])


_PUTS = {"puts": Parameter(3, 90, "puts of a round"), "rows": Parameter(100, 1000, "rows of a put")}

BENCHMARKS = (
    Benchmark(
        "memtable_put_int64",
        "Memtable alone: put, 3 narrow columns, int64 key",
        "rows_per_second",
        _PUTS,
        _put(NARROW, [NARROW_KEY], lambda rows: rows),
    ),
    Benchmark(
        "memtable_put_string",
        "Memtable alone: put, 3 narrow columns, string key",
        "rows_per_second",
        _PUTS,
        _put(STRING, [STRING_KEY], with_string_key),
    ),
    Benchmark(
        "memtable_put_composite",
        "Memtable alone: put, 3 narrow columns, key of string and int64",
        "rows_per_second",
        _PUTS,
        _put(COMPOSITE, COMPOSITE_KEY, with_composite_key),
    ),
    Benchmark(
        "memtable_put_many",
        "Memtable alone: put until it is large, string key, keys indexed",
        "rows_per_second",
        {"puts": Parameter(20, 500, "puts"), "rows": _PUTS["rows"]},
        _put_many,
    ),
    Benchmark(
        "memtable_put_packages",
        "Memtable alone: put of packages, ivf_pq + fts + btree kept",
        "rows_per_second",
        {
            "base": Parameter(256, 1000, "packages in the base table, on which both sides' quantisers are trained"),
            "stream": Parameter(300, 4000, "rows that are put: the packages again, with other names and near vectors"),
            "rows": Parameter(100, 1000, "rows of a put"),
        },
        _put_packages,
    ),
    Benchmark(
        "memtable_put_full",
        "Memtable alone: put into one that is full",
        "p50_ms",
        {"held": HELD, **_PUTS},
        _put_full,
    ),
)
