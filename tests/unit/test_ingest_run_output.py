"""What a run prints: its figures, the progress of micro-batches and of replays, and the report at the end."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import memwal
from memwal.ingest.engine.table.replay_progress import Unhurried, in_words, replay_bar
from memwal.ingest.settings.load import load
from memwal.ingest.spark.pipeline.metrics import Figures, RunMeter
from memwal.ingest.spark.pipeline.report import print_report, queries
from memwal.ingest.spark.pipeline.screen import Screen
from memwal.ingest.spark.sink.receipts import BatchReceipt, RegionReceipt
from memwal.wal import SystemClock, bucket_region
from tests.opened import open_table
from tests.support.clock import FakeClock


def receipt(
    region: str, rows: int, *, applied: bool = True, ack: float = 0.01, waited: float | None = 1.0
) -> RegionReceipt:
    landed = None if waited is None else 100.0 - waited
    return RegionReceipt(region, rows, applied, 1, ack, landed, landed, acked_at=100.0)


def test_rows_are_counted_per_region_and_over_time() -> None:
    clock = FakeClock()
    stats = RunMeter(clock)
    clock.sleep(50.0)
    stats.begin()
    clock.sleep(2.0)
    stats.add(BatchReceipt(4, (receipt("a", 30), receipt("b", 10))))
    clock.sleep(100.0)
    figures = stats.figures()
    assert (figures.rows, figures.micro_batches, figures.batch_id) == (40, 1, 4)
    assert figures.by_region == {"a": 30, "b": 10}
    assert figures.seconds == pytest.approx(2.0)
    assert figures.rows_per_second == pytest.approx(20.0)


def test_the_time_in_which_no_query_ran_does_not_count() -> None:
    clock = FakeClock()
    stats = RunMeter(clock)
    for number in range(2):  # the query is started again after a pause
        clock.sleep(1000.0)
        stats.begin()
        clock.sleep(2.0)
        stats.add(BatchReceipt(number, (receipt("a", 40),)))
    assert stats.figures().seconds == pytest.approx(4.0)
    assert stats.figures().rows_per_second == pytest.approx(20.0)


def test_rows_that_were_applied_before_are_told_apart() -> None:
    stats = RunMeter(FakeClock())
    stats.add(BatchReceipt(0, (receipt("a", 30, applied=False), receipt("b", 10))))
    assert (stats.figures().rows, stats.figures().repeated) == (40, 30)


def test_waiting_times_count_by_rows_and_acks_by_stream() -> None:
    stats = RunMeter(FakeClock())
    stats.add(BatchReceipt(0, (receipt("a", 1, ack=0.5, waited=9.0), receipt("b", 99, ack=0.1, waited=2.0))))
    figures = stats.figures()
    assert (figures.queryable_p50, figures.queryable_max) == (2.0, 9.0)
    assert figures.ack_p50 == pytest.approx(0.3)


def test_rows_of_a_topic_have_waited_for_different_times() -> None:
    stats = RunMeter(FakeClock())
    stats.add(BatchReceipt(0, (RegionReceipt("a", 10, True, 1, 0.01, 99.0, 99.5, acked_at=100.0),)))
    assert (stats.figures().queryable_p50, stats.figures().queryable_max) == (0.75, 1.0)


def test_nothing_measured_is_not_zero() -> None:
    stats = RunMeter(FakeClock())
    assert math.isnan(stats.figures().ack_p50)
    assert math.isnan(stats.figures().queryable_max)
    stats.add(BatchReceipt(0, (receipt("a", 5, waited=None),)))
    assert math.isnan(stats.figures().queryable_p50)
    assert stats.figures().ack_p50 == pytest.approx(0.01)


IDS = ("4a388480-a25b-59a8-b058-24217f980256", "8e131bde-8368-54ff-89d9-c2e1cc781b29")
STATUS: dict[str, Any] = {
    "base_version": 12,
    "rows": 123_456,
    "regions": [
        {"id": id, "bucket": bucket, "memtable_rows": 250_000, "wal_position": 98_765, "generation": 17, "ssts": [1, 2]}
        for bucket, id in enumerate(IDS)
    ],
}


def figures(batch_id: int) -> Figures:
    clock = FakeClock()
    stats = RunMeter(clock)
    clock.sleep(1.0)
    stats.add(BatchReceipt(batch_id, tuple(RegionReceipt(id, 500_000, True, 1, 0.01, None, None, 1.0) for id in IDS)))
    return stats.figures()


def console(*, terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    """Return a console and its output."""
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal, color_system=None, legacy_windows=False), out


def shown(*, terminal: bool, batches: tuple[int, ...]) -> str:
    on, out = console(terminal=terminal)
    with Screen(on, ["data/[x]/packages.lance"], FakeClock()) as screen:
        progress = screen.boards[0]
        progress.phase("streaming")
        for batch_id in batches:
            progress.show(figures(batch_id), STATUS, "6/10")
    return out.getvalue()


def test_plain_lines_say_each_micro_batch_once() -> None:
    lines = shown(terminal=False, batches=(0, 0, 1, 1, 1)).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "memwal: streaming",
        "memwal: micro-batch 0: 1",
        "memwal: micro-batch 1: 1",
    ]
    assert "1,000,000 rows in, 1,000,000 rows/s, 500,000 in memtables, base version 12" in lines[1]
    assert "\x1b" not in "".join(lines)


def test_the_panel_fits_80_columns_and_shows_every_region() -> None:
    out = shown(terminal=True, batches=(1234,))
    last = out[out.rindex("data/[x]/packages.lance") :]
    rows = [line.rstrip() for line in last.replace("\x1b[?25h", "").split("\n")]
    assert "streaming" in rows[0]
    assert rows[1].split(" · ") == [
        "  1,000,000 rows in",
        "1,000,000/s",
        "batch 1234",
        "file 6/10",
        "base v12: 123,456",
    ]
    assert max(map(len, rows)) <= 80
    for bucket, id in enumerate(IDS):
        row = next(line for line in rows if id[:8] in line)
        assert row.split()[:6] == [str(bucket), id[:8], "500,000", "250,000", "98,765", "2"]


def test_of_several_pipelines_each_line_says_which() -> None:
    on, out = console(terminal=False)
    with Screen(on, ["orders", "users"], FakeClock()) as screen:
        screen.phase("starting Spark")
        screen.boards[1].phase("streaming")
        screen.boards[0].show(figures(3), STATUS)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["memwal: starting Spark", "memwal: users: streaming"]
    assert lines[2].startswith("memwal: orders: micro-batch 3: 1,000,000 rows in")


def test_a_terminal_shows_a_panel_for_each_of_several_pipelines() -> None:
    on, out = console(terminal=True)
    with Screen(on, ["orders", "users"], FakeClock()) as screen:
        screen.phase("starting Spark")
        for board in screen.boards:
            board.show(figures(3), STATUS)
    last = out.getvalue()[out.getvalue().rindex("orders") :]
    assert last.index("starting Spark") < last.index("users")
    assert last.count("1,000,000 rows in") == 2


def report(table: Any, stats: RunMeter) -> list[str]:
    on, out = console(terminal=False)
    print_report(on, table, table.base.indexes, stats.figures(), SystemClock())
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
    counted.add(BatchReceipt(0, (RegionReceipt("r", 320, True, 1, 0.0125, 100.0, 100.0, 101.5),), seconds=0.25))
    return counted


def line(lines: list[str], start: str) -> str:
    return next(each.strip() for each in lines if each.strip().startswith(start))


def test_every_figure_is_there(filled: Any, stats: RunMeter) -> None:
    lines = report(filled, stats)
    assert "320 in 1 micro-batch" in line(lines, "rows in")
    assert "160 over 2.0 s" in line(lines, "rows per second")
    assert "p50 12.5 ms, p99 12.5 ms" in line(lines, "put ack")
    assert "p50 250.0 ms, max 250.0 ms" in line(lines, "batch to queryable")
    figures = f"version {filled.status()['base_version']}, 300 rows in 2 regions; 0 SSTs not committed"
    assert figures in line(lines, "table ")


def test_four_queries_with_an_answer_and_a_time_each(filled: Any, stats: RunMeter) -> None:
    lines = report(filled, stats)
    assert "1 row, " in line(lines, "by key  id = ")
    assert "price >= " in line(lines, "by filter")
    assert "2 rows, " in line(lines, "by vector  vector near that of ")
    assert "body matches '" in line(lines, "by text")
    assert all(line(lines, f"by {name}").endswith(" ms") for name in ("key", "filter", "vector", "text"))
    assert any("_distance" in each for each in lines)
    assert any("_score" in each for each in lines)


def test_it_fits_a_screen_and_prints_no_vectors(filled: Any, stats: RunMeter) -> None:
    lines = report(filled, stats)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
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
    assert "no row was sent" in line(lines, "batch to queryable")


def test_texts_with_quotes_and_brackets_are_printed_as_they_are(uri: str) -> None:
    import pyarrow as pa

    schema = pa.schema([pa.field("name", pa.string(), nullable=False), pa.field("n", pa.int64())])
    with memwal.open(uri, schema=schema, key="name", regions=1, indexes={"n": "btree"}) as table:
        table.put([{"name": "it's [bold] [/x]", "n": 1}])
        lines = report(table, RunMeter(FakeClock()))
    assert "name = 'it''s [bold] [/x]'" in line(lines, "by key")
    assert sum("it's [bold] [/x]" in each for each in lines) >= 1


REGION = bucket_region(0)


def test_what_takes_a_second_is_told_four_times_a_second() -> None:
    told, clock = list[int](), FakeClock()
    tell = Unhurried(lambda region, step, done, total: told.append(done), clock)
    for done in range(1, 31):
        tell(REGION, "reading", done, 30)
        clock.advance(0.125)
    assert told == list(range(9, 31, 2))


def test_a_terminal_shows_the_region_and_how_far_it_is_and_is_left_clean() -> None:
    on, out = console(terminal=True, width=100)
    clock = FakeClock()
    with replay_bar(clock, on) as tell:
        assert tell is not None
        tell(REGION, "reading", 1, 3000)
        assert out.getvalue() == ""
        clock.advance(1)
        tell(REGION, "reading", 120, 3000)
        clock.advance(1)
        tell(REGION, "applying", 2999, 3000)
    assert "region 0: applying its log, 2,999 of 3,000 entries" in out.getvalue()
    assert out.getvalue().endswith("\x1b[1A\x1b[2K")  # up, and the line erased


@pytest.mark.parametrize("terminal", [True, False])
def test_a_replay_that_is_quick_or_has_no_terminal_shows_nothing(terminal: bool) -> None:
    on, out = console(terminal=terminal)
    with replay_bar(FakeClock(), on) as tell:
        assert (tell is not None) == terminal
        if tell is not None:
            tell(REGION, "reading", 1, 1)
    assert out.getvalue() == ""


def test_opening_a_table_tells_of_the_entries_read_and_applied(made: Any, uri: str) -> None:
    sections = {"table": {"uri": uri, "key": ["id"]}, "regions": {"count": 1}, "commit": {"interval": "0s"}}
    settings = load(None, {}, sections)
    with open_table(settings, {}, made.schema) as table:
        for id in range(3):
            table.put(made.table([id]))
    told: list[str] = []
    with open_table(settings, {}, on_replay=lambda *each: told.append(in_words(*each))) as table:
        assert table.count() == 3
    expected = [f"reading its log, {n} of 3 entries" for n in range(1, 4)]
    expected += ["applying its log, 3 of 3 entries"]  # small ones are applied together
    assert told == [f"region 0: {each}" for each in expected]
