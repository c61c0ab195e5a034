"""The commit path: the time until published SSTs are part of the base table.

A round copies a base table by hard links, publishes SSTs beside it, and times the commit alone: reading the SSTs, the
newest row of each key, the merge, its fsync, the manifest. The peer is a bare `merge_insert` of the same reduced rows,
passed in memory, into the same base, without a sync.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.benchmark import Benchmark, Contender, Parameter, Sample, Values, Watch
from bench.digest import rows_digest
from bench.source_data import NARROW, NARROW_KEY, SEED, narrow_rows, newest
from memwal import flush
from memwal.flush.base.fsync import sync_tree
from memwal.memtable import MemTable, row_schema, with_tombstone
from memwal.wal import Claim, LanceCodec, LocalStore, ManifestStore, SystemClock, SystemIds, bucket_region, claim

_ROWS_OF_A_BATCH = 250_000
_ROWS_OF_A_FRAGMENT = 1_000_000
_FRESH = 1.2
"""Keys are drawn from this many times the base, so one in six is new."""


def base_rows(rows: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, rows, _ROWS_OF_A_BATCH):
        yield from narrow_rows(range(first, min(first + _ROWS_OF_A_BATCH, rows)), 0).cast(NARROW).to_batches()


def _upserts(values: Values, ssts: int) -> list[pa.Table]:
    """Return the rows of each SST: no duplicate key in one SST, some keys in several."""
    rng = np.random.default_rng(SEED)
    made = []
    for number in range(ssts):
        keys = rng.choice(int(values["base"] * _FRESH), values["rows"], replace=False)
        made.append(narrow_rows(range(values["rows"]), number + 1).set_column(0, NARROW.field(0), pa.array(keys)))
    return made


def linked(source: Path, target: Path) -> None:
    """Copy a table by hard links; its files never change."""
    shutil.copytree(source, target, copy_function=os.link)


def merged_digest(uri: Path, rows: pa.Table, key: str = NARROW_KEY) -> str:
    """Return `upserted_digest` of a Lance table."""
    return upserted_digest(lance.dataset(str(uri)).to_table(), rows, key)


def upserted_digest(table: pa.Table, rows: pa.Table, key: str) -> str:
    """Return the row count of `table` and the digest of its current rows for the upserted keys."""
    upserted = table.filter(pc.is_in(table.column(key), value_set=rows.column(key).combine_chunks()))
    return f"{table.num_rows} {rows_digest(upserted, [key])}"


class Commits(Contender):
    """Commit one SST for each element of `rows` into the base, in one commit."""

    def __init__(self, base: int, rows: Sequence[pa.Table]) -> None:
        name = f"memwal, {len(rows)} SST{'s' if len(rows) > 1 else ''} of {rows[0].num_rows:,} rows"
        super().__init__(name, "memwal", {"ssts": len(rows)})
        self._rows, self._base_rows = rows, base
        self._newest = newest(list(rows), NARROW_KEY)

    def prepare(self, at: Path) -> None:
        """Create the base table with one commit in its history, because the first commit checks all existing rows."""
        self._at = at / "table"
        base = flush.BaseTable.create(str(self._at), NARROW, [NARROW_KEY], 1, [])
        source = pa.RecordBatchReader.from_batches(NARROW, base_rows(self._base_rows))
        lance.write_dataset(source, str(self._at), mode="append", max_rows_per_file=_ROWS_OF_A_FRAGMENT)
        one_row = lance.dataset(str(self._at)).to_table(limit=1).cast(NARROW)
        _publish(self._at, base, [one_row])
        _commit(self._at)
        sync_tree(str(self._at))

    def round(self, at: Path, watch: Watch) -> Sample:
        """Run one commit."""
        table = at / "table"
        linked(self._at, table)
        _publish(table, flush.BaseTable.open(str(table)), self._rows)
        sync_tree(str(table))
        with watch.timed():
            report = _commit(table)
        taken = sum(each.num_rows for each in self._rows)
        digest = merged_digest(table, self._newest)
        measures = {"versions": float(report.versions), "megabytes": report.bytes_written / 1e6}
        return Sample(np.asarray([watch.seconds]), watch.seconds, taken, digest, measures)


class BareMerge(Contender):
    """`merge_insert` of the newest rows of `rows`: the minimum work of a commit."""

    def __init__(self, base: int, rows: Sequence[pa.Table]) -> None:
        reduced = newest(list(rows), NARROW_KEY).cast(NARROW)
        super().__init__(f"merge_insert of {reduced.num_rows:,} rows", "lance", {})
        self._rows, self._base_rows, self._taken = reduced, base, sum(each.num_rows for each in rows)

    def prepare(self, at: Path) -> None:
        """Create the base table."""
        self._at = at / "table"
        source = pa.RecordBatchReader.from_batches(NARROW, base_rows(self._base_rows))
        lance.write_dataset(source, str(self._at), max_rows_per_file=_ROWS_OF_A_FRAGMENT)
        sync_tree(str(self._at))

    def round(self, at: Path, watch: Watch) -> Sample:
        """Run one merge."""
        table = at / "table"
        linked(self._at, table)
        dataset = lance.dataset(str(table))
        with watch.timed():
            merge = dataset.merge_insert(NARROW_KEY).when_matched_update_all().when_not_matched_insert_all()
            merge.execute(self._rows)
        digest = merged_digest(table, self._rows)
        return Sample(np.asarray([watch.seconds]), watch.seconds, self._taken, digest)


def _publish(uri: Path, base: flush.BaseTable, ssts: Sequence[pa.Table]) -> None:
    """Publish one SST for each element of `ssts`, after a new claim of the table's only region."""
    store, rows, region = LocalStore(str(uri)), row_schema(base.schema, base.key), bucket_region(0)
    claimed: Claim = claim(store, region, spec_id=1, codec=LanceCodec(rows), ids=SystemIds(), clock=SystemClock())
    for each in ssts:
        manifests = ManifestStore(store, region)
        manifest = manifests.latest()
        assert manifest is not None
        table = MemTable(rows, [NARROW_KEY], [], manifest.current_generation)
        table.apply(with_tombstone(each, rows))
        table.freeze()
        flush.flush(
            store,
            manifests,
            claimed.guard,
            table.snapshot(),
            flush.SstFormat.of(base),
            generation=table.generation,
            covers_position=manifest.replay_after + 1,
            ids=SystemIds(),
        )


def _commit(uri: Path) -> flush.CommitReport:
    return flush.commit(str(uri), None, LocalStore(str(uri)), clock=SystemClock())


def _of(ssts: int) -> Callable[[Values], list[Contender]]:
    def contenders(values: Values) -> list[Contender]:
        rows = _upserts(values, ssts)
        return [Commits(values["base"], rows), BareMerge(values["base"], rows)]

    return contenders


_BASE = Parameter(5000, 4_000_000, "rows of the base table, 3 narrow columns")

_SMALL = {"base": _BASE, "rows": Parameter(200, 25_000, "rows of each SST, one in six new")}

BENCHMARKS = (
    Benchmark(
        "commit",
        "Commit of upserts, one SST",
        "p50_ms",
        {"base": _BASE, "rows": Parameter(500, 100_000, "rows of the SST, one in six new")},
        _of(1),
    ),
    Benchmark("commit_1", "Commit of upserts, one small SST", "p50_ms", _SMALL, _of(1)),
    Benchmark("commit_4", "Commit of upserts, 4 small SSTs at once", "p50_ms", _SMALL, _of(4)),
    Benchmark("commit_8", "Commit of upserts, 8 small SSTs at once", "p50_ms", _SMALL, _of(8)),
)
