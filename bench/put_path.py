"""The put path: the time until a put is acknowledged, and rows per second.

A round creates a table, puts every batch (timed), and reads all rows with the side's own newest-version read. Their
digest must be the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from bench import lance_side, memwal_side
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Side, Values, Watch
from bench.digest import rows_digest
from bench.lance_side import LanceShard
from bench.latencies import timed_callers, timed_each
from bench.memwal_side import MemwalTable
from bench.source_data import NARROW, NARROW_KEY, PACKAGES_KEY, narrow_batches, package_updates, packages
from bench.storage_floor import StorageFloor

PACKAGE_INDEXES: Mapping[str, Mapping[str, Any]] = {
    "embedding": {"type": "ivf_pq", "num_partitions": 4, "num_sub_vectors": 48},
    "description": {"type": "fts"},
    "installed_kb": {"type": "btree"},
}
"""The three indexes of the quickstart; partitions and sub-vectors are set, so that both sides build the same index."""


class Target(Protocol):
    """A new table that takes puts."""

    def put(self, rows: pa.Table) -> None: ...
    def rows(self) -> pa.Table: ...
    def close(self) -> None: ...


class Puts(Contender):
    """Put batches into a new table each round. `callers`: one sequence of batches per caller."""

    def __init__(
        self,
        name: str,
        side: Side,
        settings: Mapping[str, Any],
        open_at: Callable[[Path], Target],
        callers: Sequence[Sequence[pa.Table]],
        key: str | Sequence[str],
        **more: str,
    ) -> None:
        super().__init__(name, side, settings, **more)
        self._open, self._callers, self._key = open_at, callers, [key] if isinstance(key, str) else list(key)

    def round(self, at: Path, watch: Watch) -> Sample:
        """Put every batch into one table."""
        target = self._open(at)
        try:
            if len(self._callers) == 1:
                with watch.timed():
                    latencies = timed_each(target.put, self._callers[0])
            else:
                latencies = timed_callers(target.put, self._callers, watch)
            found = rows_digest(target.rows(), self._key)
        finally:
            target.close()
        rows = sum(batch.num_rows for batches in self._callers for batch in batches)
        return Sample(np.asarray(latencies), watch.seconds, rows, found)


def _memwal(
    callers: Sequence[Sequence[pa.Table]],
    table: _Table,
    name: str = "default",
    settings: Mapping[str, Mapping[str, Any]] = memwal_side.DEFAULT,
    *,
    durable: bool = True,
) -> Puts:
    def open_at(at: Path) -> MemwalTable:
        return MemwalTable(at, table.base, table.key, table.indexes, durable=durable, settings=settings)

    resolved = memwal_side.resolved(settings, durable=durable, regions=1)
    return Puts(f"memwal, {name}", "memwal", resolved, open_at, callers, table.key)


def _lance(
    name: str, settings: Mapping[str, Any], callers: Sequence[Sequence[pa.Table]], table: _Table, **more: str
) -> Puts:
    def open_at(at: Path) -> LanceShard:
        return LanceShard(at, table.base, table.key, table.indexes, settings)

    return Puts(name, "lance", settings, open_at, callers, table.key, **more)


class _Table:
    """The contents of a benchmark's table before the first put."""

    def __init__(self, base: pa.Table, key: str, indexes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.base, self.key, self.indexes = base, key, indexes or {}


_NARROW = _Table(NARROW.empty_table(), NARROW_KEY)


def _durable(values: Values) -> list[Contender]:
    batches = narrow_batches(values["puts"], values["rows"])
    return [
        _memwal([batches], _NARROW),
        _memwal([batches], _NARROW, "arrow format", memwal_side.ARROW),
        _lance("ShardWriter, best", lance_side.DURABLE_BEST, [batches], _NARROW),
        _lance("ShardWriter, default", lance_side.DEFAULT, [batches], _NARROW),
        StorageFloor(batches),
    ]


def _callers(values: Values) -> list[Contender]:
    rows = narrow_batches(values["callers"] * values["puts"], 1)
    everything = [rows[n :: values["callers"]] for n in range(values["callers"])]
    few = [batches[: values["puts_default"]] for batches in everything]
    return [
        _memwal(everything, _NARROW),
        _memwal(everything, _NARROW, "arrow format", memwal_side.ARROW),
        _lance("ShardWriter, best", lance_side.DURABLE_BEST, everything, _NARROW),
        _lance(
            "ShardWriter, default",
            lance_side.DEFAULT,
            few,
            _NARROW,
            question="fewer puts",
            note=f"{values['puts_default']} puts per caller: its callers wait for the timer one after another",
        ),
        StorageFloor(everything[0]),
    ]


def _fast(values: Values) -> list[Contender]:
    batches = narrow_batches(values["puts"], values["rows"])
    return [
        _memwal([batches], _NARROW, durable=False),
        _lance("ShardWriter, best", lance_side.FAST_BEST, [batches], _NARROW),
        _lance("ShardWriter, default", lance_side.FAST, [batches], _NARROW),
    ]


def _packages(values: Values) -> tuple[list[pa.Table], _Table]:
    """Return batches of the packages that are not in the base yet, followed by all updates."""
    known = packages().slice(0, values["base"])
    stream = pa.concat_tables([packages().slice(values["base"]), package_updates()]).slice(0, values["stream"])
    step = values["rows"]
    batches = [stream.slice(at, step).combine_chunks() for at in range(0, stream.num_rows, step)]
    return batches, _Table(known, PACKAGES_KEY, PACKAGE_INDEXES)


def _packages_durable(values: Values) -> list[Contender]:
    batches, table = _packages(values)
    return [
        _memwal([batches], table),
        _lance("ShardWriter, best", lance_side.DURABLE_BEST, [batches], table),
        _lance("ShardWriter, default", lance_side.DEFAULT, [batches], table),
        StorageFloor(batches),
    ]


def _packages_fast(values: Values) -> list[Contender]:
    batches, table = _packages(values)
    return [
        _memwal([batches], table, durable=False),
        _lance("ShardWriter, best", lance_side.FAST_BEST, [batches], table),
        _lance("ShardWriter, default", lance_side.FAST, [batches], table),
    ]


_ROWS = Parameter(100, 1000, "rows of a put")
_PACKAGES = {
    "base": Parameter(256, 1000, "packages in the base table, on which Lance trains its vector index"),
    "stream": Parameter(200, 3900, "rows that are put: the other packages, then the updates"),
    "rows": Parameter(100, 500, "rows of a put"),
}

BENCHMARKS = (
    Benchmark(
        "put_durable",
        "Durable put, 3 narrow columns, one caller",
        "p50_ms",
        {"puts": Parameter(3, 40, "puts of a round"), "rows": _ROWS},
        _durable,
    ),
    Benchmark(
        "put_callers",
        "Durable puts of 1 row, many callers at once",
        "rows_per_second",
        {
            "callers": Parameter(4, 32, "callers"),
            "puts": Parameter(3, 40, "puts of each caller in a round"),
            "puts_default": Parameter(1, 2, "the same for ShardWriter at its default"),
        },
        _callers,
    ),
    Benchmark(
        "put_fast",
        "Non-durable put, 3 narrow columns, one caller",
        "rows_per_second",
        {"puts": Parameter(3, 90, "puts of a round"), "rows": _ROWS},
        _fast,
    ),
    Benchmark(
        "put_packages",
        "Durable put of real packages, ivf_pq + fts + btree kept",
        "rows_per_second",
        _PACKAGES,
        _packages_durable,
    ),
    Benchmark(
        "put_packages_fast",
        "Non-durable put of real packages, ivf_pq + fts + btree kept",
        "rows_per_second",
        _PACKAGES,
        _packages_fast,
    ),
)
