"""Micro-batches over a table, beside `MERGE` of Delta Lake and of Iceberg through their Spark connectors.

    python -m bench.peers_spark NAME … --out FILE [--smoke] [--rounds N] [--workdir DIRECTORY]

`bench.peers` starts it as a process, because each connector needs a Spark with its jars, and Iceberg another Spark
version than the project's. Spark fetches the jars itself, once per machine, into the user's cache. Query, files and
Spark's configuration are those of `bench.spark_path` for both sides; the peer's `foreachBatch` registers the
micro-batch as a view and runs one `MERGE`. Every round begins with a new base table.

Durability when a micro-batch ends: memwal's rows are synced to its log. Delta and Iceberg have written their files
through Hadoop's local file system, which does not sync; a system-call trace of both shows no fsync.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from bench.benchmark import Benchmark, Contender, Parameter, Values
from bench.commit_path import upserted_digest
from bench.peers_fetch import cache
from bench.result import RunResult
from bench.rounds import ResultsDiffer, run
from bench.spark_path import COLUMNS, KEY, REGIONS, ROWS, Sink, Stream, base_rows, micro_batches
from bench.surroundings import host, versions
from memwal.ingest.errors import Unavailable
from memwal.ingest.settings.load import load
from memwal.ingest.spark.session import configuration, start_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DIFFER = 3
"""The exit code if the sides hold different rows."""
NOT_SYNCED = "its files are written, not synced"
_SCALA = "2.13"


@dataclass(frozen=True, slots=True)
class Connector:
    """A table format with its Spark connector.

    `package`: `{spark}` is replaced by the version of Spark in two numbers. `configuration`: `{at}` is replaced by a
    directory for tables. `table`: returns the table's SQL name for a path and a name without dots. `spark`: the
    required version of PySpark; "" means the project's.
    """

    title: str
    package: str
    configuration: Mapping[str, str]
    table: Callable[[Path, str], str]
    spark: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a connector: `properties` of the table, `session` of Spark SQL."""

    name: str
    properties: Mapping[str, str] = field(default_factory=dict)
    session: Mapping[str, str] = field(default_factory=dict)


DELTA = Connector(
    "Delta",
    f"io.delta:delta-spark_{{spark}}_{_SCALA}:4.4.0",
    {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    },
    lambda path, _: f"delta.`{path}`",
)
ICEBERG = Connector(
    "Iceberg",
    f"org.apache.iceberg:iceberg-spark-runtime-4.1_{_SCALA}:1.12.0",
    {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.ice.type": "hadoop",
        "spark.sql.catalog.ice.warehouse": "{at}",
        # The file system that `memwal run` configures lacks a call: "Not implemented by the RawLocalFileSystem".
        "spark.sql.catalog.ice.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
        "spark.sql.catalog.ice.hadoop.fs.file.impl.disable.cache": "true",
    },
    lambda _, name: f"ice.rounds.`{name}`",
    spark="4.1.4",
)
"""Iceberg 1.12 has no runtime for Spark 4.2, and Spark 4.2 cannot load the one for 4.1: "IncompatibleClassChangeError:
class org.apache.iceberg.spark.source.SparkView can not implement org.apache.spark.sql.connector.catalog.View".
"""
DELTA_SETTINGS = (
    Setting("defaults"),
    Setting("1 snapshot partition", {}, {"spark.databricks.delta.snapshotPartitions": "1"}),
)
"""By default Delta reads its log with a job of 50 tasks. Seconds for a MERGE of 1,000 rows: 1.2 with this setting; with
deletion vectors 2.2, compiled stages 1.9, compiled stages and adaptive execution 2.0.
"""
ICEBERG_SETTINGS = (Setting("copy-on-write (default)"), Setting("merge-on-read", {"write.merge.mode": "merge-on-read"}))
"""Seconds for a MERGE of 1,000 rows: 0.8 with merge-on-read; with format 3 (deletion vectors) 1.1, compiled stages 1.2,
adaptive execution 1.3.
"""


class SqlMerge(Stream):
    """A `foreachBatch` that runs one MERGE."""

    def __init__(
        self, connector: Connector, setting: Setting, batches: Sequence[pa.Table], base: int, *, question: str
    ) -> None:
        super().__init__(f"{connector.title} MERGE, {setting.name}", "peer", batches, base, question=question)
        self.settings |= {**setting.properties, **setting.session}
        self.note = NOT_SYNCED
        self._connector, self._setting = connector, setting

    def fill(self, table: Path) -> None:
        """Write the rows of the base to a file, the source of every round's table."""
        self._files = table.with_name("base.parquet")
        pq.write_table(pa.Table.from_batches(base_rows(self._base), schema=ROWS), self._files)

    def place(self, table: Path) -> None:
        """Create a table with the rows of the base."""
        self._table = self._connector.table(table, f"{self.name} {table.parent.name}")
        properties = ", ".join(f"'{name}' = '{value}'" for name, value in self._setting.properties.items())
        with_properties = f"TBLPROPERTIES ({properties})" if properties else ""
        self._spark.sql(
            f"CREATE TABLE {self._table} USING {self._connector.title} {with_properties} "
            f"AS SELECT * FROM parquet.`{self._files}`"
        )

    def open(self, table: Path) -> None:  # noqa: ARG002 - `place` has made it
        """Apply the session's settings; a query uses those of its start."""
        for name, value in self._setting.session.items():
            self._spark.conf.set(name, value)

    def stream(self) -> DataFrame:
        """Return the files' own columns, as in a user's query."""
        return super().stream().select(*ROWS.names)

    def micro_batch(self, frame: DataFrame, batch_id: int) -> None:  # noqa: ARG002 - as Spark calls it
        """Run one merge."""
        frame.createOrReplaceTempView("micro_batch")
        frame.sparkSession.sql(
            f"MERGE INTO {self._table} t USING micro_batch s ON t.{KEY} = s.{KEY} "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )

    def finish(self) -> None:
        """Remove the session's settings, so that they do not affect other contenders."""
        for name in self._setting.session:
            self._spark.conf.unset(name)

    def found(self, table: Path) -> str:  # noqa: ARG002 - Spark reads it by name
        """Return the digest of all rows, read by Spark."""
        rows = self._spark.table(self._table).toArrow().cast(ROWS)
        self._spark.sql(f"DROP TABLE {self._table}")
        return upserted_digest(rows, pa.concat_tables(self._batches), KEY)


def _of(connector: Connector, settings: Sequence[Setting]) -> Callable[[Values], list[Contender]]:
    def contenders(values: Values) -> list[Contender]:
        batches, base = micro_batches(values["batches"] + 1, values["rows"], values["base"]), values["base"]
        peers = [SqlMerge(connector, setting, batches, base, question="same") for setting in settings]
        return [Sink(batches, base, question="same"), *peers]

    return contenders


def _micro_batch(connector: Connector, settings: Sequence[Setting], rows: int, batches: int) -> Benchmark:
    parameters = {
        "base": Parameter(2_000, 1_000_000, "rows of the base table"),
        "rows": Parameter(100, rows, "rows of a micro-batch, one in six new"),
        "batches": Parameter(2, batches, "micro-batches of a round"),
    }
    title = f"A micro-batch of {rows:,} rows over 1,000,000, beside {connector.title}"
    return Benchmark(f"{connector.title.lower()}_{rows}", title, "p50_ms", parameters, _of(connector, settings))


BY_CONNECTOR: Mapping[str, tuple[Connector, tuple[Benchmark, ...]]] = {
    connector.title.lower(): (
        connector,
        (_micro_batch(connector, settings, 1_000, 4), _micro_batch(connector, settings, 100_000, 3)),
    )
    for connector, settings in ((DELTA, DELTA_SETTINGS), (ICEBERG, ICEBERG_SETTINGS))
}


def start(connector: Connector, at: Path) -> None:
    """Start this process's Spark session, which all contenders use. Raises: Unavailable."""
    import pyspark

    settings = load(
        {"table": {"uri": str(at / "unused"), "key": [KEY], "columns": COLUMNS}, "source": {"path": str(at)}}, {}
    )
    spark = ".".join(pyspark.__version__.split(".")[:2])
    more = {name: value.format(at=at / "warehouse") for name, value in connector.configuration.items()}
    more |= {"spark.jars.packages": connector.package.format(spark=spark), "spark.jars.ivy": str(cache() / "ivy")}
    start_session(configuration(settings, REGIONS, once=False) | more)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks of one connector; return 2 if Spark does not start with its jars, DIFFER, or 0."""
    parser = argparse.ArgumentParser("python -m bench.peers_spark")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workdir", type=lambda path: Path(path).resolve(), required=True, help="for tables")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    connector, benchmarks = BY_CONNECTOR[given.names[0].partition("_")[0]]
    try:
        start(connector, given.workdir)
    except Unavailable as error:
        print(f"{connector.title}'s connector: {error}", file=sys.stderr)
        return 2
    import pyspark

    began, found = time.perf_counter(), []
    for each in benchmarks:
        if each.name in given.names:
            at = given.workdir / each.name
            try:
                found.append(run(each, at, smoke=given.smoke, rounds=given.rounds, progress=_said))
            except ResultsDiffer as error:
                _said(str(error))
                return DIFFER
    mode, seconds = "smoke" if given.smoke else "full", time.perf_counter() - began
    known = {**versions(), "pyspark": pyspark.__version__}
    RunResult(mode, given.rounds, seconds, known, host(), tuple(found)).write(given.out)
    return 0


def _said(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
