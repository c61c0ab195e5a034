"""Sustained puts: enough rows that memtables are filled and flushed all the time, unlike in a burst.

A round creates a table and puts every batch, one caller, none durable. The same condition stops the clock on both
sides:

- `put_sustained`: every row is put and flushed. Closing a ShardWriter is the only way to know that its log has the last
  row, and closing flushes; therefore the last memtable of memwal is flushed within the time as well.
- `packages_sustained`: every row is put and in each of the three indexes. A put of ShardWriter returns when its rows
  are (measured: its indexes do not grow afterwards); for memwal the benchmark waits until no memtable has unindexed
  rows. Rows of an SST count as indexed, because the SST holds its own indexes on storage; in the memtable that memwal
  keeps for reads in place of the SST, the same rows may be indexed up to a second later. The rest is flushed
  afterwards, which "rows/s until flushed" includes.

Then the digests of all rows are compared. ShardWriter's rows are read from its SSTs, the newest row of each key,
because its own newest-version read takes 26 s for 3 million rows in 30 SSTs.

memwal's recall is measured in a second, untimed pass over the same batches: searches at level `latest` as soon as each
quarter of the rows is acknowledged, indexed or not, compared with exact search over the rows acknowledged by then.
Lance has no search that sees a memtable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bench import lance_side, memwal_side, mixtures, put_path
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Side, Values, Watch
from bench.digest import rows_digest, texts_digest
from bench.lance_side import LanceShard
from bench.latencies import timed_each
from bench.memtable_data import in_batches
from bench.memwal_side import MemwalTable
from bench.put_path import PACKAGE_INDEXES
from bench.source_data import NARROW, NARROW_KEY, PACKAGES_KEY, REPEATS, SEED, VECTOR_WIDTH, newest, packages

K = 10
PLACES = 4
"""Recall is measured after each of this many equal shares of the rows."""
LOOK_EVERY = 0.005
"""Seconds between two checks for rows that wait for an index."""
PIECE = 1_000_000
"""Rows hashed at a time, because a digest creates an object for each text."""
VECTORS_SEED = 3

NO_COMMITS: Mapping[str, Mapping[str, Any]] = {"commit": {"interval": "0s"}}
"""memwal's defaults without commits: its SSTs remain SSTs, like those of a ShardWriter."""
NARROW_BEST: Mapping[str, Any] = {**lance_side.FAST_BEST, "max_unflushed_memtable_bytes": 8 << 30}
"""Puts do not wait for flushes. Measured with 5 million rows: 540,000 to 710,000 rows/s; with the default 480,000 to
680,000. Memtables of 10,000 to 50,000 rows: 370,000 to 490,000. Memtables of 150,000 rows and more, which slow down a
put: 310,000 to 460,000. The default of 100,000 rows is the best.
"""
PACKAGES_BEST: Mapping[str, Any] = {**lance_side.FAST_BEST, "max_memtable_rows": 1000}
"""Adding to a small graph of vectors is faster. Measured with 40,000 and 200,000 rows: 12,700 to 15,100 rows/s.
Memtables of 2,500 rows: 11,600 to 12,600; of 5,000: 11,100 to 12,400; of 10,000: 9,200 to 11,000; of 20,000: 7,000; of
100,000 (the default): 2,200 to 6,600.
"""
MANY_SSTS = "an SST for every 1,000 rows: the fastest to put into, but every search visits all of them"


# ---- the two sides ---------------------------------------------------------------------------------------------------


class Target(put_path.Target, Protocol):
    """A new table that takes puts, flushes meanwhile, and counts its flushes."""

    def indexed(self) -> None: ...
    def flush(self) -> None: ...
    def flushes(self) -> int: ...


class SustainedTable(MemwalTable):
    """memwal's side.

    Thread safety. One thread.
    """

    def indexed(self) -> None:
        """Return when no row of a memtable waits for an index."""
        while any(region["unindexed_rows"] for region in self.table.status()["regions"]):
            time.sleep(LOOK_EVERY)

    def flushes(self) -> int:
        """Return the number of SSTs that were written and not committed."""
        return sum(len(region["ssts"]) for region in self.table.status()["regions"])


class SustainedShard(LanceShard):
    """Lance's side.

    Thread safety. One thread.
    """

    def indexed(self) -> None:
        """Return at once: a put returns when its rows are indexed."""

    def flushes(self) -> int:
        """Return the number of SSTs that were written."""
        return len(self._ssts())

    def rows(self) -> pa.Table:
        """Return the newest row of each key in base table and SSTs, without the memtable."""
        (key,) = [field.name for field in self._schema if field.metadata]
        datasets = [self.dataset, *(lance.dataset(str(sst)) for sst in self._ssts())]
        return newest([dataset.to_table(columns=self._schema.names) for dataset in datasets], key)

    def _ssts(self) -> list[Path]:
        return sorted(self._path.glob("*_gen_*"), key=lambda sst: int(sst.name.rpartition("_")[2]))


@dataclass(frozen=True)
class Load:
    """The rows to put, and the table that takes them. `flushes`: the least number of SSTs that each side must write."""

    base: pa.Table
    key: str
    indexes: Mapping[str, Mapping[str, Any]]
    batches: Sequence[pa.Table]
    flushes: int

    @property
    def rows(self) -> int:
        """Return the number of rows to put."""
        return sum(batch.num_rows for batch in self.batches)

    def memwal(self, at: Path) -> SustainedTable:
        """Return a table of memwal below `at` with the rows of `base`."""
        return SustainedTable(at, self.base, self.key, self.indexes, durable=False, settings=NO_COMMITS)

    def lance(self, settings: Mapping[str, Any]) -> Callable[[Path], SustainedShard]:
        """Return a function that creates the same table for a ShardWriter with `settings`."""
        return lambda at: SustainedShard(at, self.base, self.key, self.indexes, settings)


# ---- the contenders --------------------------------------------------------------------------------------------------


class SustainedPuts(Contender):
    """Put every batch into a new table each round; the clock stops when all rows are flushed."""

    def __init__(
        self,
        name: str,
        side: Side,
        settings: Mapping[str, Any],
        open_at: Callable[[Path], Target],
        load: Load,
        **more: str,
    ) -> None:
        super().__init__(name, side, settings, **more)
        self._open, self._load = open_at, load

    def round(self, at: Path, watch: Watch) -> Sample:
        """Run one table. Raises: ValueError if fewer SSTs were written than the load requires."""
        target = self._open(at)
        try:
            with watch.timed():
                latencies = timed_each(target.put, self._load.batches)
                self._end(target)
            measures = self._measures(target, watch)
            found = self._digest(target.rows())
        finally:
            target.close()
        return Sample(np.asarray(latencies), watch.seconds, self._load.rows, found, measures)

    def _end(self, target: Target) -> None:
        """Do the last timed step."""
        target.flush()

    def _measures(self, target: Target, watch: Watch) -> dict[str, float]:  # noqa: ARG002 - see SustainedPackages
        flushes = target.flushes()
        if flushes < self._load.flushes:
            raise ValueError(f"{self.name}: {flushes} flushes, {self._load.flushes} expected; put more rows")
        return {"flushes": float(flushes)}

    def _digest(self, rows: pa.Table) -> str:
        ordered, key = rows.sort_by(self._load.key), [self._load.key]
        return texts_digest([rows_digest(ordered.slice(at, PIECE), key) for at in range(0, ordered.num_rows, PIECE)])


class SustainedPackages(SustainedPuts):
    """The same, but the clock stops when every row is indexed."""

    def _end(self, target: Target) -> None:
        target.indexed()

    def _measures(self, target: Target, watch: Watch) -> dict[str, float]:
        rest = Watch()
        with rest.timed():
            target.flush()
        until_flushed = self._load.rows / (watch.seconds + rest.seconds)
        return {**super()._measures(target, watch), "rows/s until flushed": until_flushed}


class SearchedPackages(SustainedPackages):
    """memwal: the same, with recall from a second pass."""

    def __init__(self, load: Load, searches: int) -> None:
        settings = memwal_side.resolved(NO_COMMITS, durable=False, regions=1)
        super().__init__("memwal, default", "memwal", settings, load.memwal, load)
        self._queries = mixtures.queries(searches)

    def round(self, at: Path, watch: Watch) -> Sample:
        """Run two tables; only the first is timed."""
        timed = super().round(at / "timed", watch)
        table = self._load.memwal(at / "searched")
        try:
            recall = self._least_recall(table)
        finally:
            table.close()
        return Sample(timed.latencies, timed.seconds, timed.rows, timed.digest, {**timed.measures, "recall": recall})

    def _least_recall(self, table: SustainedTable) -> float:
        """Put everything and return the lowest recall of all measured places."""
        load, found = self._load, []
        rows = pa.concat_tables([load.base, *load.batches]).select([load.key, "embedding"])
        names, vectors, seen = rows.column(load.key).to_numpy(), _vectors(rows), load.base.num_rows
        for place in range(PLACES):
            for batch in load.batches[len(load.batches) * place // PLACES : len(load.batches) * (place + 1) // PLACES]:
                table.put(batch)
                seen += batch.num_rows
            answers = [table.table.search("embedding", query, k=K, columns=[load.key]) for query in self._queries]
            _, exact = mixtures.nearest(vectors[:seen], np.arange(seen), self._queries, K)
            nearest = [
                set(names[ids]) & set(answer.column(load.key).to_pylist())
                for ids, answer in zip(exact, answers, strict=True)
            ]
            found.append(sum(len(each) for each in nearest) / (K * len(nearest)))
        return min(found)


# ---- what is put -----------------------------------------------------------------------------------------------------


def narrow_stream(puts: int, rows: int) -> list[pa.Table]:
    """Like `source_data.narrow_batches`, in time linear in the rows.

    A batch has no duplicate key; REPEATS of the keys of each batch but the first are from earlier batches. A batch
    draws its n-th repeated key from the n-th of equal shares of all earlier keys, so that it draws none twice.
    """
    rng, again = np.random.default_rng(SEED), int(rows * REPEATS)
    ids = rng.permutation(puts * rows).reshape(puts, rows)
    new = ids[:, again:]
    share = np.arange(1, puts)[:, np.newaxis] * new.shape[1] // again
    drawn = np.arange(again) * share + (rng.random((puts - 1, again)) * share).astype(np.int64)
    ids[1:, :again] = new[drawn // new.shape[1], drawn % new.shape[1]]
    labels = pa.array([f"label {n:03d}" for n in range(1000)]).take(pa.array(rng.integers(0, 1000, ids.size)))
    return in_batches(pa.table([pa.array(ids.ravel()), pa.array(rng.random(ids.size)), labels], schema=NARROW), rows)


def package_stream(count: int) -> pa.Table:
    """Return rows drawn from the packages, each with a name and a vector of its own; see `mixtures.mixed`."""
    real, schema = packages(), packages().schema
    rng = np.random.default_rng((SEED, VECTORS_SEED))
    rows = real.take(pa.array(rng.integers(0, real.num_rows, count))).combine_chunks()
    numbers = pa.array(np.arange(count)).cast(pa.string())
    vectors = pa.FixedSizeListArray.from_arrays(
        pa.array(mixtures.mixed(count, VECTORS_SEED).ravel()), type=schema.field("embedding").type
    )
    made = {PACKAGES_KEY: pc.binary_join_element_wise(rows.column(PACKAGES_KEY), numbers, "~"), "embedding": vectors}
    return pa.table([made.get(name, rows.column(name)) for name in schema.names], schema=schema)


def _vectors(rows: pa.Table) -> npt.NDArray[np.float32]:
    flat = rows.column("embedding").combine_chunks().flatten().to_numpy()
    return np.asarray(flat, np.float32).reshape(rows.num_rows, VECTOR_WIDTH)


# ---- the benchmarks --------------------------------------------------------------------------------------------------


def _narrow(values: Values) -> list[Contender]:
    batches = narrow_stream(values["puts"], values["rows"])
    load = Load(NARROW.empty_table(), NARROW_KEY, {}, batches, values["flushes"])
    found: list[Contender] = [
        SustainedPuts(
            "memwal, default",
            "memwal",
            memwal_side.resolved(NO_COMMITS, durable=False, regions=1),
            load.memwal,
            load,
        )
    ]
    for name, settings in (("best", NARROW_BEST), ("default", lance_side.FAST)):
        found.append(SustainedPuts(f"ShardWriter, {name}", "lance", settings, load.lance(settings), load))
    return found


def _packages(values: Values) -> list[Contender]:
    base = packages().slice(0, values["base"])
    batches = in_batches(package_stream(values["stream"]), values["rows"])
    load = Load(base, PACKAGES_KEY, PACKAGE_INDEXES, batches, values["flushes"])
    found: list[Contender] = [SearchedPackages(load, values["searches"])]
    for name, settings, note in (("best", PACKAGES_BEST, MANY_SSTS), ("default", lance_side.FAST, "")):
        shard = load.lance(settings)
        found.append(SustainedPackages(f"ShardWriter, {name}", "lance", settings, shard, load, note=note))
    return found


_FLUSHES = Parameter(1, 2, "SSTs that each side must have written at least")

BENCHMARKS = (
    Benchmark(
        "put_sustained",
        "Sustained non-durable puts, 3 narrow columns, until all rows are flushed",
        "rows_per_second",
        {
            "puts": Parameter(5, 6_000, "puts of a round"),
            "rows": Parameter(100, 1000, "rows of a put"),
            "flushes": _FLUSHES,
        },
        _narrow,
    ),
    Benchmark(
        "packages_sustained",
        "Sustained non-durable puts of packages, ivf_pq + fts + btree, until all rows are indexed",
        "rows_per_second",
        {
            "base": Parameter(256, 1000, "packages in the base table, on which both sides' quantisers are trained"),
            "stream": Parameter(400, 150_000, "rows that are put: packages under new names, vectors mixed from theirs"),
            "rows": Parameter(100, 500, "rows of a put"),
            "searches": Parameter(2, 20, "searches at each of the places where memwal's recall is measured"),
            "flushes": _FLUSHES,
        },
        _packages,
    ),
)
