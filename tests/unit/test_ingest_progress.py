"""The progress output of a run: whole lines without a terminal, a panel of 80 columns on a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from memwal.ingest.spark.pipeline.metrics import Figures, RunMeter
from memwal.ingest.spark.pipeline.screen import Screen
from memwal.ingest.spark.sink.receipts import BatchReceipt, RegionReceipt
from tests.support.clock import FakeClock

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


def shown(*, terminal: bool, batches: tuple[int, ...]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None, legacy_windows=False)
    with Screen(console, ["data/[x]/packages.lance"], FakeClock()) as screen:
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
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=False, color_system=None)
    with Screen(console, ["orders", "users"], FakeClock()) as screen:
        screen.phase("starting Spark")
        screen.boards[1].phase("streaming")
        screen.boards[0].show(figures(3), STATUS)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["memwal: starting Spark", "memwal: users: streaming"]
    assert lines[2].startswith("memwal: orders: micro-batch 3: 1,000,000 rows in")


def test_a_terminal_shows_a_panel_for_each_of_several_pipelines() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    with Screen(console, ["orders", "users"], FakeClock()) as screen:
        screen.phase("starting Spark")
        for board in screen.boards:
            board.show(figures(3), STATUS)
    last = out.getvalue()[out.getvalue().rindex("orders") :]
    assert last.index("starting Spark") < last.index("users")
    assert last.count("1,000,000 rows in") == 2
