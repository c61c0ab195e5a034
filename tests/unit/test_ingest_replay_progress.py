"""Progress output while regions are opened: none for a quick replay, and none without a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from memwal.ingest.engine.table.replay_progress import Unhurried, in_words, replay_bar
from memwal.ingest.settings.load import load
from memwal.wal import bucket_region
from tests.opened import open_table
from tests.support.clock import FakeClock

REGION = bucket_region(0)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=terminal, color_system=None, legacy_windows=False), out


def test_what_takes_a_second_is_told_four_times_a_second() -> None:
    told, clock = list[int](), FakeClock()
    tell = Unhurried(lambda region, step, done, total: told.append(done), clock)
    for done in range(1, 31):
        tell(REGION, "reading", done, 30)
        clock.advance(0.125)
    assert told == list(range(9, 31, 2))


def test_a_terminal_shows_the_region_and_how_far_it_is_and_is_left_clean() -> None:
    on, out = console(terminal=True)
    clock = FakeClock()
    with replay_bar(clock, on) as tell:
        assert tell is not None
        tell(REGION, "reading", 1, 3000)
        assert out.getvalue() == ""
        clock.advance(1)
        tell(REGION, "reading", 120, 3000)
        clock.advance(1)
        tell(REGION, "applying", 2999, 3000)
    assert "region 4a388480: applying its log, 2,999 of 3,000 entries" in out.getvalue()
    assert out.getvalue().endswith("\x1b[1A\x1b[2K")  # up, and the line erased


def test_a_replay_that_is_quick_shows_nothing() -> None:
    on, out = console(terminal=True)
    with replay_bar(FakeClock(), on) as tell:
        assert tell is not None
        tell(REGION, "reading", 1, 1)
    assert out.getvalue() == ""


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    on, out = console(terminal=False)
    with replay_bar(FakeClock(), on) as tell:
        assert tell is None
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
    assert told == [f"region 4a388480: {each}" for each in expected]
