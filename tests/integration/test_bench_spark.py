"""The benchmarks of the path from Spark run at their smoke values; both sides of a micro-batch find the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import spark_reads
from bench.rounds import run
from bench.spark_path import BENCHMARKS, lines


@pytest.fixture
def spark_ends() -> Iterator[None]:
    """End the session that a benchmark has started."""
    yield
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


@pytest.mark.long
def test_both_kinds_run_and_merge_insert_finds_what_memwal_finds(tmp_path: Path, spark_ends: None) -> None:
    rate, micro_batch = BENCHMARKS[0], BENCHMARKS[1]
    one_size = replace(micro_batch, contenders=lambda values: micro_batch.contenders(values)[2:5])
    for benchmark, names in ((rate, ["memwal, 0 rows", "Spark alone"]), (one_size, ["memwal, 2,000 rows"])):
        result = run(benchmark, tmp_path / "tables", smoke=True, rounds=1)
        assert [each.name for each in result.contenders][: len(names)] == names
        assert all(each.median("rows_per_second") > 0 for each in result.contenders)
        assert len(list(lines(result))) == 1 + len(result.contenders)
    assert {each.question for each in result.contenders} == {"2000 rows"}
    assert len({each.rounds[0].digest for each in result.contenders}) == 1


def test_reading_by_name_finds_what_lance_finds(tmp_path: Path, spark_ends: None) -> None:
    result = run(spark_reads.BENCHMARKS[0], tmp_path / "tables", smoke=True, rounds=1)
    peer, base, merged = (each.rounds[0] for each in result.contenders)
    assert peer.digest == base.digest != merged.digest
