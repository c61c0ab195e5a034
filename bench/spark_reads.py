"""Reading a table in Spark by name, beside Lance's own reader of the base table in Spark.

    python -m bench.spark_reads [--smoke] [--rounds N]

It is separate from `make bench` because it needs Java. The peer is a `mapInArrow` whose tasks scan fragments of the
base table with pylance and yield the batches; no reader of a Lance table in a Python worker can be faster. Both
sides have the same fragments per task, and Spark sums the rows of both. memwal is measured twice: the base table alone,
which must give the same sums as the peer, and with rows in SSTs and in the log that replace base rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa

import memwal
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Side, Values, Watch
from bench.source_data import SEED
from bench.spark_path import KEY, REGIONS, ROWS, run_named
from memwal import flush
from memwal.ingest.settings.load import load
from memwal.ingest.spark.session import configuration, start_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS_OF_A_FRAGMENT = 1_000_000
_STILL = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}, "memtable": {"age_max": "1h"}}


def _rows(ids: Any, seed: int) -> pa.Table:
    rng = np.random.default_rng((SEED, seed))
    return pa.table([pa.array(ids, pa.int64()), rng.random(len(ids)), rng.integers(0, 1000, len(ids))], schema=ROWS)


def _base_rows(rows: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, rows, _ROWS_OF_A_FRAGMENT):
        yield from _rows(np.arange(first, min(rows, first + _ROWS_OF_A_FRAGMENT)), 0).to_batches()


class Read(Contender):
    """Read all rows of a table in Spark and sum them there; subclasses define the reader."""

    def __init__(self, name: str, side: Side, rows: int, above: int, *, question: str) -> None:
        super().__init__(name, side, {"rows": rows, "above": above}, question=question)
        self._rows, self._above = rows, above

    def prepare(self, at: Path) -> None:
        """Create the base table, and the rows above it: half in SSTs, half in the log.

        Half of the rows above have keys of the base.
        """
        self._table = str(at / "table")
        self._spark = _session(at)
        flush.BaseTable.create(self._table, ROWS, [KEY], REGIONS, [])
        base = pa.RecordBatchReader.from_batches(ROWS, _base_rows(self._rows))
        lance.write_dataset(base, self._table, mode="append", max_rows_per_file=_ROWS_OF_A_FRAGMENT)
        if self._above:
            keys = np.random.default_rng(SEED).choice(2 * self._rows, self._above, replace=False)
            with memwal.open(self._table, settings=_STILL) as table:
                table.put(_rows(keys[::2], 1))
                table.flush()
                table.put(_rows(keys[1::2], 2))
            self._expected = self._rows + int((keys >= self._rows).sum())
        else:
            self._expected = self._rows

    def round(self, at: Path, watch: Watch) -> Sample:  # noqa: ARG002 - nothing is written
        """Run one query."""
        from pyspark.sql import functions

        count = functions.count(functions.lit(1))
        with watch.timed():
            sums = self.frame().agg(count, functions.sum(KEY), functions.sum("count")).collect()[0]
        if sums[0] != self._expected:
            raise AssertionError(f"{self.name}: {sums[0]} rows, expected {self._expected}")
        return Sample(np.array([watch.seconds]), watch.seconds, self._expected, str(tuple(sums)))

    @abstractmethod
    def frame(self) -> DataFrame:
        """Return the rows."""


class ByName(Read):
    """memwal, through `spark.read.format("memwal")`."""

    def frame(self) -> DataFrame:
        """Return the rows in the way that a user reads them."""
        return self._spark.read.format("memwal").option("level", "durable").load(self._table)


class ByLance(Read):
    """Lance's reader of the base table in `mapInArrow`."""

    def frame(self) -> DataFrame:
        """Return the rows with one task per fragment."""
        fragments = len(lance.dataset(self._table).get_fragments())
        scan = partial(_scanned, self._table)
        numbers = self._spark.range(0, fragments, 1, fragments)
        return numbers.mapInArrow(scan, f"{KEY} long, value double, count long")


def _scanned(table: str, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    fragments = lance.dataset(table).get_fragments()
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from fragments[number].to_batches()


def _session(at: Path) -> SparkSession:
    settings = load({"table": {"uri": str(at / "table"), "key": [KEY]}}, {})
    spark = start_session(configuration(settings, REGIONS, once=True))
    memwal.register_spark(spark)
    return spark


def _contenders(values: Values) -> list[Contender]:
    rows, above = values["rows"], values["above"]
    return [
        ByLance("Lance's reader in mapInArrow, the base", "lance", rows, 0, question="base"),
        ByName("memwal by name, the base", "memwal", rows, 0, question="base"),
        ByName(f"memwal by name, {above:,} rows above the base", "memwal", rows, above, question="merged"),
    ]


BENCHMARKS = (
    Benchmark(
        "spark_read",
        "All rows of a table in Spark, by name",
        "rows_per_second",
        {
            "rows": Parameter(3_000, 10_000_000, "rows of the base table"),
            "above": Parameter(100, 200_000, "rows above it"),
        },
        _contenders,
    ),
)


if __name__ == "__main__":
    raise SystemExit(run_named("bench.spark_reads", BENCHMARKS))
