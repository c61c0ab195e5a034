"""PySpark programs started by the Python of a virtual environment that is not activated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from tests import spark_classes

_PROGRAM = """
import os
import sys

from pyspark.sql import SparkSession

import memwal

uri, landing, checkpoint = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
if "SINK" in os.environ:
    sink = memwal.MemWalSink({"table": {"uri": uri, "key": ["id"]}})
    stream = spark.readStream.schema("id long, price double, body string").parquet(landing).writeStream
    query = stream.foreachBatch(sink).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    sink.close()
memwal.register_spark(spark)
print(spark.read.format("memwal").option("level", "durable").load(uri).count())
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Any]:
    """Run a program while the first `python3` on the PATH has no memwal."""
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    other.chmod(0o755)
    (tmp_path / "landing").mkdir()

    def run(uri: str, **environ: str) -> Any:
        path = {"PATH": f"{other.parent}{os.pathsep}{os.environ['PATH']}"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
        words = [sys.executable, "-c", _PROGRAM, uri, str(tmp_path / "landing"), str(tmp_path / "checkpoint")]
        return subprocess.run(
            words,
            env=inherited | spark_classes.environ() | path | environ,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    return run


def test_workers_run_the_python_of_the_program(program: Callable[..., Any], tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    rows = [{"id": id, "price": float(id), "body": f"row {id}"} for id in range(10)]
    with memwal.open(uri, schema={"id": "int64", "price": "float64", "body": "string"}, key=["id"]) as table:
        table.put(rows)

    pq.write_table(
        pa.Table.from_pylist([row | {"id": row["id"] + 5} for row in rows]), tmp_path / "landing" / "0.parquet"
    )
    ran = program(uri, SINK="yes")
    assert (ran.returncode, ran.stdout) == (0, "15\n"), ran.stderr[-2_000:]

    other = str(tmp_path / "bin" / "python3")
    ran = program(uri, PYSPARK_PYTHON=other)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert f"Spark's Python workers run {other}, which cannot import memwal: set PYSPARK_PYTHON" in last


_COMMAND = """
import pyarrow

from memwal.ingest.own_process import without_pandas

without_pandas()
pyarrow.array([1])  # looks for pandas, as the work before a session does
from memwal.ingest.settings.load import load
from memwal.ingest.spark.session import configuration, start_session

spark = start_session(configuration(load({"table": {"uri": "t.lance"}}, {}), 1, once=True))
rows = spark.createDataFrame(pyarrow.table({"id": [1, 2]}))
print(rows.mapInArrow(lambda batches: batches, "id long").toArrow()["id"].to_pylist())
"""


def test_a_command_that_starts_without_pandas_can_use_spark(tmp_path: Path) -> None:
    """`memwal dlq replay` maps records in Spark, whose Python API refuses that without pandas."""
    environ = {**os.environ, **spark_classes.environ()}
    ran = subprocess.run(
        [sys.executable, "-c", _COMMAND], env=environ, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[1, 2]"
