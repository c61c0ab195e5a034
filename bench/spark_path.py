"""The path from Spark: how fast rows stream through the sink, and how long a micro-batch takes over a large base table.

    python -m bench.spark_path [--smoke] [--rounds N] [NAME …]

It is separate from `make bench` because it needs Java and minutes, and has other peers: Spark alone, with a
`mapInArrow` that drops the rows (no sink can be faster), and a `foreachBatch` that calls Lance's `merge_insert`. All
contenders run the same query: Parquet files of narrow rows, one file per micro-batch, with Spark's configuration of
`memwal run`. The first micro-batch of a query is not counted, because Spark starts during it. The merged rows are read
back and must be equal.

The two sides of a micro-batch differ: merge_insert returns when the rows are in the base table, without a sync. memwal
returns when they are synced to its log and queryable, and commits them to the base table concurrently.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import memwal
from bench.benchmark import Benchmark, Contender, Figure, Parameter, Sample, Side, Values, Watch
from bench.commit_path import linked, merged_digest
from bench.result import BenchmarkResult
from bench.rounds import run
from bench.source_data import SEED
from memwal import flush
from memwal.flush.base.fsync import sync_tree
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.spark.reading import SourceRows
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.source.stream import read_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEY = "id"
COLUMNS = {KEY: "int64", "value": "float64", "count": "int64"}
ROWS = pa.schema([pa.field(KEY, pa.int64(), nullable=False), ("value", pa.float64()), ("count", pa.int64())])
REGIONS = 2
_ROWS_OF_A_FRAGMENT = 1_000_000
_LONGEST = 1800
_FIRST_FILE = 1_700_000_000
_FRESH = 1.2
"""Keys are drawn from this many times the base, so one in six is new; for an empty base all are new."""


def _rows(ids: Any, seed: int) -> pa.Table:
    rng = np.random.default_rng((SEED, seed))
    return pa.table([pa.array(ids, pa.int64()), rng.random(len(ids)), rng.integers(0, 1000, len(ids))], schema=ROWS)


def base_rows(rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a base table."""
    for first in range(0, rows, _ROWS_OF_A_FRAGMENT):
        yield from _rows(np.arange(first, min(rows, first + _ROWS_OF_A_FRAGMENT)), 0).to_batches()


def micro_batches(number: int, rows: int, base: int) -> list[pa.Table]:
    """Return `number` tables of `rows` rows, without duplicate keys in a table; one row in six is new to the base."""
    rng = np.random.default_rng(SEED)
    space = max(int(base * _FRESH), number * rows)
    return [_rows(rng.choice(space, rows, replace=False), n + 1) for n in range(number)]


class Stream(Contender):
    """A query over `batches`; subclasses define how a micro-batch is processed."""

    def __init__(self, name: str, side: Side, batches: Sequence[pa.Table], base: int, *, question: str) -> None:
        super().__init__(name, side, {"base": base}, question=question)
        self._batches, self._base = batches, base

    def prepare(self, at: Path) -> None:
        """Write the files and the base table."""
        self._at = at
        (at / "in").mkdir()
        for number, rows in enumerate(self._batches):
            file = at / "in" / f"{number:04d}.parquet"
            pq.write_table(rows, file)
            os.utime(file, (_FIRST_FILE + number, _FIRST_FILE + number))  # Spark reads in the order of these times
        self._settings = self.settings_for(at / "table")
        self._spark = start_session(configuration(self._settings, REGIONS, once=False))
        self.fill(at / "table")

    def settings_for(self, table: Path) -> Settings:
        """Return the configuration of `memwal run`."""
        return load(
            {
                "table": {"uri": str(table), "key": [KEY], "columns": COLUMNS},
                "regions": {"count": REGIONS},
                "source": {"path": str(self._at / "in"), "files_per_trigger": 1},
            },
            {},
        )

    def fill(self, table: Path) -> None:
        """Create the table with the rows of the base; every round starts from a copy of it."""
        self.create(table)
        if self._base:
            rows_of_base = pa.RecordBatchReader.from_batches(ROWS, base_rows(self._base))
            lance.write_dataset(rows_of_base, str(table), mode="append", max_rows_per_file=_ROWS_OF_A_FRAGMENT)
        sync_tree(str(table))

    def create(self, table: Path) -> None:
        """Create the table without rows."""
        lance.write_dataset(ROWS.empty_table(), str(table))

    def place(self, table: Path) -> None:
        """Create the table of one round by hard links to the prepared one."""
        linked(self._at / "table", table)

    def round(self, at: Path, watch: Watch) -> Sample:  # noqa: ARG002 - the query's micro-batches are the watch
        """Run one query over all files, into a new table."""
        self.place(at / "table")
        self.open(at / "table")
        try:
            ends = self._run(at / "checkpoint")
        finally:
            self.finish()
        latencies = np.diff(ends)  # between the ends of micro-batches, so all work of Spark counts
        rows = sum(each.num_rows for each in self._batches[1:])
        return Sample(latencies, float(latencies.sum()), rows, self.found(at / "table"))

    def _run(self, checkpoint: Path) -> list[float]:
        ends: list[float] = []

        def timed(frame: DataFrame, batch_id: int) -> None:
            self.micro_batch(frame, batch_id)
            ends.append(time.perf_counter())

        writer = self.stream().writeStream.foreachBatch(timed).option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            if not query.awaitTermination(_LONGEST):
                raise TimeoutError(f"{self.name}: the query takes more than {_LONGEST} s")
        finally:
            query.stop()
        return ends

    def stream(self) -> DataFrame:
        """Return the files' rows with the columns that locate them."""
        return self.source_rows().frame

    def source_rows(self) -> SourceRows:
        """Return the rows in the form that `memwal run` reads."""
        return read_stream(self._spark, self._settings.source, ROWS)

    def open(self, table: Path) -> None:
        """Prepare the round before the query starts."""

    @abstractmethod
    def micro_batch(self, frame: DataFrame, batch_id: int) -> None:
        """Process a micro-batch."""

    def finish(self) -> None:
        """Release resources after the query has ended."""

    def found(self, table: Path) -> str:
        """Return the digest of the table with the rows of all micro-batches."""
        return merged_digest(table, pa.concat_tables(self._batches), KEY)


class Sink(Stream):
    """memwal's sink with its child daemon, at default settings."""

    def __init__(self, batches: Sequence[pa.Table], base: int, *, question: str) -> None:
        super().__init__(f"memwal, {base:,} rows", "memwal", batches, base, question=question)

    def create(self, table: Path) -> None:
        """Create the table with its regions."""
        flush.BaseTable.create(str(table), ROWS, [KEY], REGIONS, [])

    def open(self, table: Path) -> None:
        """Start the daemon and let Spark's workers open the table, as `memwal run` does before its query."""
        self._sink = memwal.MemWalSink(self.settings_for(table))
        self._sink.warm_up(self._spark)

    def stream(self) -> DataFrame:
        """Return the rows as in `memwal run`, with the faster path for small micro-batches."""
        rows = self.source_rows()
        self._sink.small = rows.small
        return rows.frame

    def micro_batch(self, frame: DataFrame, batch_id: int) -> None:
        """Call the sink."""
        self._sink(frame, batch_id)

    def finish(self) -> None:
        """Stop the daemon."""
        self._sink.close()

    def found(self, table: Path) -> str:
        """Flush and commit, then return the digest of the committed rows."""
        with memwal.open(table) as opened:
            opened.flush()
            opened.commit()
        return super().found(table)


class Merge(Stream):
    """A `foreachBatch` with `merge_insert`, with or without a B-tree on the key. Rows reach the driver as Arrow."""

    def __init__(self, batches: Sequence[pa.Table], base: int, *, btree: bool, question: str) -> None:
        name = f"merge_insert{', B-tree on the key' if btree else ''}, {base:,} rows"
        super().__init__(name, "lance", batches, base, question=question)
        self._btree = btree

    def prepare(self, at: Path) -> None:
        """Prepare the files and the table, and build the index."""
        super().prepare(at)
        if self._btree:
            lance.dataset(str(at / "table")).create_scalar_index(KEY, "BTREE")

    def stream(self) -> DataFrame:
        """Return the files' own columns, as in a user's query."""
        return super().stream().select(*ROWS.names)

    def open(self, table: Path) -> None:
        """Open the dataset once for all micro-batches."""
        self._dataset = lance.dataset(str(table))

    def micro_batch(self, frame: DataFrame, batch_id: int) -> None:  # noqa: ARG002 - as Spark calls it
        """Run one merge."""
        merge = self._dataset.merge_insert(KEY).when_matched_update_all().when_not_matched_insert_all()
        merge.execute(frame.toArrow().cast(ROWS))


class Drop(Stream):
    """Spark alone: every row passes a `mapInArrow` that drops it."""

    def stream(self) -> DataFrame:
        """Return the files' own columns."""
        return super().stream().select(*ROWS.names)

    def micro_batch(self, frame: DataFrame, batch_id: int) -> None:  # noqa: ARG002 - as Spark calls it
        """Send the rows to Python as Arrow batches; nothing returns."""
        frame.mapInArrow(_dropped, frame.schema).collect()

    def found(self, table: Path) -> str:  # noqa: ARG002 - there is none
        """Return "": there is no table to compare."""
        return ""


def _dropped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.slice(0, 0)


def _rates(values: Values) -> list[Contender]:
    batches = micro_batches(values["batches"] + 1, values["rows"], 0)
    return [Sink(batches, 0, question=""), Drop("Spark alone", "floor", batches, 0, question="")]


def _times(values: Values) -> list[Contender]:
    made: list[Contender] = []
    for base in (0, values["base"], 10 * values["base"]):
        batches, question = micro_batches(values["batches"] + 1, values["rows"], base), f"{base} rows"
        made.append(Sink(batches, base, question=question))
        made.append(Merge(batches, base, btree=False, question=question))
        if base:
            made.append(Merge(batches, base, btree=True, question=question))
    return made


def _micro_batch(rows: int, batches: int, title: str) -> Benchmark:
    parameters = {
        "base": Parameter(2_000, 1_000_000, "rows of the base table; none and ten times as many are measured too"),
        "rows": Parameter(100, rows, "rows of a micro-batch"),
        "batches": Parameter(2, batches, "micro-batches of a round"),
    }
    return Benchmark(f"micro_batch_{rows}", title, "p50_ms", parameters, _times)


BENCHMARKS = (
    Benchmark(
        "stream_rate",
        "Rows from Parquet files through Spark, end to end",
        "rows_per_second",
        {"rows": Parameter(500, 500_000, "rows of a micro-batch"), "batches": Parameter(2, 8, "of a round")},
        _rates,
    ),
    _micro_batch(1_000, 15, "A micro-batch of 1,000 rows over base tables of three sizes"),
    _micro_batch(100_000, 6, "A micro-batch of 100,000 rows over base tables of three sizes"),
)


def lines(result: BenchmarkResult) -> Iterator[str]:
    """Yield a result as text: the median of each contender, and its ratio to the first."""
    yield f"{result.name}  {result.title}"
    figure: Figure = result.figure
    first = result.contenders[0]
    for each in result.contenders:
        ratio = median(
            getattr(ours, figure) / getattr(one, figure) for ours, one in zip(each.rounds, first.rounds, strict=True)
        )
        value = each.median(figure)
        shown = f"{value:,.0f} ms" if figure == "p50_ms" else f"{value:,.0f} rows/s"
        yield f"  {each.name:<48}{shown:>20}   {ratio:.2f} x the first"


def run_named(module: str, benchmarks: Sequence[Benchmark]) -> int:
    """Run those of `benchmarks` that the command line of `module` names, or all, and print the results."""
    parser = argparse.ArgumentParser(f"python -m {module}")
    parser.add_argument("names", nargs="*", choices=[[], *(each.name for each in benchmarks)])
    parser.add_argument("--smoke", action="store_true", help="tiny values: does it run at all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workdir", type=Path, default=Path(__file__).resolve().parent.parent / "build")
    given = parser.parse_args()
    given.workdir.mkdir(parents=True, exist_ok=True)
    for benchmark in benchmarks:
        if not given.names or benchmark.name in given.names:
            with tempfile.TemporaryDirectory(dir=given.workdir, prefix="bench-") as at:
                result = run(benchmark, Path(at) / "tables", smoke=given.smoke, rounds=given.rounds)
            print("\n".join(lines(result)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_named("bench.spark_path", BENCHMARKS))
