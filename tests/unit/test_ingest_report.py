"""The report after `run --once`: figures and four queries, readable on 80 columns, on the table's own columns."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import memwal
from memwal.ingest.spark.pipeline.metrics import RunMeter
from memwal.ingest.spark.pipeline.report import print_report, queries
from memwal.ingest.spark.sink.receipts import BatchReceipt, RegionReceipt
from memwal.wal import SystemClock
from tests.support.clock import FakeClock


def report(table: Any, stats: RunMeter) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=False)
    print_report(console, table, table.base.indexes, stats.figures(), SystemClock())
    return out.getvalue().splitlines()


@pytest.fixture
def filled(open_small: Callable[..., Any], made: Any) -> Any:
    """Return a table with 300 committed rows and 20 rows in memtables."""
    table = open_small()
    table.put(made.table(range(300)))
    table.flush()
    table.commit()
    table.put(made.table(range(290, 310), version=1))
    return table


@pytest.fixture
def stats() -> RunMeter:
    """One micro-batch of 320 rows."""
    clock = FakeClock()
    counted = RunMeter(clock)
    clock.sleep(2.0)
    counted.add(BatchReceipt(0, (RegionReceipt("r", 320, True, 1, 0.0125, 100.0, 100.0, 101.5),)))
    return counted


def line(lines: list[str], start: str) -> str:
    return next(each.strip() for each in lines if each.strip().startswith(start))


def test_every_figure_is_there(filled: Any, stats: RunMeter) -> None:
    lines = report(filled, stats)
    assert "320 in 1 micro-batch" in line(lines, "rows in")
    assert "160 over 2.0 s" in line(lines, "rows per second")
    assert "p50 12.5 ms, p99 12.5 ms" in line(lines, "put ack")
    assert "p50 1.50 s, max 1.50 s" in line(lines, "event to queryable")
    assert "4 in 2 regions" in line(lines, "WAL entries")
    assert "2 flushed, 0 not committed" in line(lines, "SSTs")
    assert f"version {filled.status()['base_version']}, 300 rows" in line(lines, "base table")


def test_four_queries_with_an_answer_and_a_time_each(filled: Any, stats: RunMeter) -> None:
    lines = report(filled, stats)
    assert "1 row, " in line(lines, "by key  id = ")
    assert "price >= " in line(lines, "by filter")
    assert "3 rows, " in line(lines, "by vector  vector near that of ")
    assert "body matches '" in line(lines, "by text")
    assert all(line(lines, f"by {name}").endswith(" ms") for name in ("key", "filter", "vector", "text"))
    assert any("_distance" in each for each in lines)
    assert any("_score" in each for each in lines)


def test_it_fits_a_screen_and_prints_no_vectors(filled: Any, stats: RunMeter) -> None:
    lines = report(filled, stats)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    assert not any("[" in each for each in lines)


def test_the_nearest_row_is_the_one_asked_for(filled: Any) -> None:
    asked = next(query for query in queries(filled, filled.base.indexes) if query.name == "by vector")
    found = asked.ask().to_pylist()[0]
    assert asked.words.endswith(f"of {found['id']}")
    assert found["_distance"] == pytest.approx(0.0, abs=1e-5)


def test_an_empty_table_and_a_run_without_rows(open_small: Callable[..., Any]) -> None:
    lines = report(open_small(), RunMeter(FakeClock()))
    assert "nothing new" in line(lines, "rows in")
    assert not any(each.startswith("by ") for each in lines)


def test_a_run_of_bad_rows_only_measures_nothing(open_small: Callable[..., Any]) -> None:
    """The report must not print "p50 nan s"."""
    counted = RunMeter(FakeClock())
    counted.add(BatchReceipt(0, (), 3, 3))
    lines = report(open_small(), counted)
    assert "3 left out, 3 new dead letters" in line(lines, "bad rows")
    assert "no row was sent" in line(lines, "put ack")
    assert "no row was sent" in line(lines, "event to queryable")


def test_texts_with_quotes_and_brackets_are_printed_as_they_are(uri: str) -> None:
    import pyarrow as pa

    schema = pa.schema([pa.field("name", pa.string(), nullable=False), pa.field("n", pa.int64())])
    with memwal.open(uri, schema=schema, key="name", regions=1, indexes={"n": "btree"}) as table:
        table.put([{"name": "it's [bold] [/x]", "n": 1}])
        lines = report(table, RunMeter(FakeClock()))
    assert "name = 'it''s [bold] [/x]'" in line(lines, "by key")
    assert sum("it's [bold] [/x]" in each for each in lines) >= 1
