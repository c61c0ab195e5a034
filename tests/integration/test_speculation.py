"""Spark runs a task twice at a time if the first attempt seems slow: both send the same rows to the same regions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from tests.conftest import ROOT, Serve, Start
from tests.cut_short import BATCHES, ONE_TASK, ROUTE, ROWS, SEND, SPECULATION, Case, Scene, cut_spark, how_it_ended
from tests.integration.test_spark_streams import finished
from tests.pausing import Pausing
from tests.spark_cluster import SparkCluster, quick


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a cluster of two hosts, since Spark runs a copy on a different host."""
    with SparkCluster.started(tmp_path_factory.mktemp("spark")) as cluster:
        more = {**quick(cluster.master), **SPECULATION, "spark.executorEnv.PYTHONPATH": str(ROOT)}
        session = cut_spark(tmp_path_factory.mktemp("unused"), cluster.master, more)
        yield session
        session.stop()


CASES = {
    Case(ONE_TASK, append=True, letters=True): ((7, True), (BATCHES - 1, False)),
    Case(SEND, append=True, letters=True, daemons=2): ((7, False), (BATCHES - 1, True)),
}
"""For each case, the boundary where the first attempt waits for its copy, and whether it then continues beside it."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_and_letters_of_a_task_that_runs_twice_arrive_once(
    spark: Any, tmp_path: Path, start: Start, case: Case
) -> None:
    table = Scene(spark, tmp_path, case, start)
    try:
        for boundary, race in CASES[case]:
            tasks = table.run_twice(boundary, race=race)
            assert len(tasks) > 1, "Spark ran no copy"
            assert any(each.how == "ended" for each in tasks), "; ".join(map(how_it_ended, tasks))
            table.check()
    finally:
        table.close()


def test_a_routing_task_that_runs_twice_is_one(spark: Any, tmp_path: Path, start: Start) -> None:
    table = Scene(spark, tmp_path, Case(ROUTE, append=True, letters=True), start)
    try:
        table.run_twice(7, race=False)
        table.check()
    finally:
        table.close()


def test_a_micro_batch_that_is_written_by_name_has_each_row_once(
    spark: Any, serve: Serve, tmp_path: Path, uri: str
) -> None:
    memwal.register_spark(spark)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    memwal.open(uri, schema=schema, key=(), regions=2, settings={"commit": {"interval": "0s"}}).close()
    (config := tmp_path / "config.toml").write_text(f'[table]\nuri = "{uri}"\n')
    serve(config)
    for name in ("in", "place"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "0.json").write_text("".join(f'{{"id": {id}}}\n' for id in range(ROWS)))
    pausing = Pausing(7, str(tmp_path / "place"))
    pausing.let_others()
    frame = spark.readStream.schema("id long").json(str(tmp_path / "in")).coalesce(1).mapInArrow(pausing, "id long")
    finished(
        frame.writeStream.format("memwal")
        .options(path=uri, checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    assert (tmp_path / "place" / "waits").exists()  # the first task is still blocked, so a copy has done its work
    with memwal.connect(uri) as table:
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == list(range(ROWS))
