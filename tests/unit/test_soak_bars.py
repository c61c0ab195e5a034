"""The bars of the soak: they detect a leak planted in samples, and accept values that rise and fall again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault_proxy import Request
from tests.soak.bars import Series, verdicts
from tests.soak.ending import told
from tests.soak.journal import Journal, last, lines
from tests.soak.samples import Sample, count_kinds, of_process, requests_by_kind
from tests.soak.stream import Plan, mismatch
from tests.soak.trends import Bar, judge, slope, sparkline

MIB = 1 << 20


def daemon(minutes: int, memory: Callable[[float], float], descriptors: Callable[[float], float]) -> list[Sample]:
    """Return the samples of one life of a daemon, one every 5 s; `memory` in MiB."""
    times = [5.0 * number for number in range(12 * minutes)]
    return [Sample(at, "daemon 0", 1, int(MIB * memory(at)), 40, int(descriptors(at))) for at in times]


def broken(samples: list[Sample]) -> list[str]:
    """Return the bars that a run with these samples breaks."""
    return [verdict.broken for verdict in verdicts(Series(samples), 0) if verdict.broken]


def test_a_process_whose_samples_come_and_go_breaks_no_bar() -> None:
    chance = random.Random(1)
    assert not broken(daemon(60, lambda at: 250 + 60 * (at % 90) / 90, lambda _: 60 + chance.randrange(-12, 12)))


def test_what_fills_in_the_first_minute_is_no_leak() -> None:
    assert not broken(daemon(10, lambda at: 100 + 200 * min(1.0, at / 80), lambda at: 30 + min(30.0, at)))


@pytest.mark.parametrize("minutes", [30, 60])
def test_a_leaked_descriptor_for_each_flush_is_found(minutes: int) -> None:
    (line,) = broken(daemon(minutes, lambda _: 250, lambda at: 60 + at / 10))
    assert line.startswith("daemon 0, life 1: descriptors: grew by ")


def test_connections_of_a_clean_up_are_no_leak_of_a_short_life() -> None:
    assert not broken(daemon(11, lambda _: 250, lambda at: 50 + 64 * (int(at) // 150)))


def test_a_leak_below_waves_is_found_in_an_hour() -> None:
    chance = random.Random(2)
    (line,) = broken(daemon(60, lambda at: 250 + 130 * at / 3600 + 40 * chance.random(), lambda _: 60))
    assert line.startswith("daemon 0, life 1: memory: grew by ")


@pytest.mark.parametrize(
    ("memory", "descriptors", "leaks"),
    [(20, 0, ["memory"]), (0, 8, []), (0, 40, ["descriptors"])],
    ids=["memory", "connections of a burst", "ever more of them"],
)
def test_lives_that_begin_larger_each_time_are_found(memory: int, descriptors: int, leaks: list[str]) -> None:
    lives = [
        Sample(200.0 * life + at, "daemon 1", life, (200 + memory * life) * MIB, 40, 100 + descriptors * life)
        for life in range(8)
        for at in (0.0, 60.0, 75.0, 90.0)
    ]
    found = [line.partition(": grew by ")[0] for line in broken(lives)]
    assert found == [f"daemon 1, a minute after each start: {leak}" for leak in leaks]


def test_files_that_nobody_collects_are_found_and_those_of_cut_off_commits_are_allowed() -> None:
    files = [(15.0 * n, Counter({"data files": 50 + n, "SSTs": 10 + n % 7})) for n in range(240)]
    (line,) = [each.broken for each in verdicts(Series(files=files), 0) if each.broken]
    assert line.startswith("files: data files: grew by ")
    assert not [each.broken for each in verdicts(Series(files=files), 40) if each.broken]


def test_requests_that_rise_with_the_age_of_a_table_are_found() -> None:
    requests = [(15.0 * n, Counter({"get log": 200 + n, "list log": 30 + n % 9})) for n in range(240)]
    (line,) = [each.broken for each in verdicts(Series(requests=requests), 0) if each.broken]
    assert line.startswith("requests a minute: get log: grew by ")


def test_an_upper_limit_holds_for_a_short_series_too() -> None:
    assert "at most 10.0 is allowed" in judge("x", [(0.0, 11.0)], Bar(1, most=10)).broken


def test_the_slope_is_not_moved_by_samples_far_off() -> None:
    points = [(float(n), 3.0 * n + (900 if n % 10 == 0 else 0)) for n in range(100)]
    assert slope(points) == pytest.approx(3.0)
    assert slope([]) == slope([(1.0, 1.0)]) == 0.0


def test_a_picture_shows_where_a_series_rose() -> None:
    assert sparkline([0, 0, 8, 8], 4) == "▁▁██"
    assert len(sparkline(range(1000), 32)) == 32
    assert sparkline([]) == ""


def test_a_process_that_keeps_descriptors_and_threads_shows_it_in_its_samples() -> None:
    (before,) = of_process(0.0, "daemon 0", 1, os.getpid())
    kept, over = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)], threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    try:
        (after,) = of_process(1.0, "daemon 0", 1, os.getpid())
    finally:
        over.set()
        waiting.join()
        for each in kept:
            os.close(each)
    assert after.descriptors == before.descriptors + 20
    assert after.threads == before.threads + 1


def test_a_process_that_has_ended_gives_no_sample() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 90
    while list(of_process(0.0, "daemon 0", 1, process.pid)):
        assert time.monotonic() < deadline
    process.wait()
    assert not list(of_process(0.0, "daemon 0", 1, process.pid))


def test_objects_are_counted_by_kind_and_ssts_and_index_segments_by_directory() -> None:
    region = "table.lance/_mem_wal/1d8d46d4-1ffd-5f6e-9aea-466d5ea76fdb"
    keys = [f"{region}/wal/{'0' * 64}.lance", f"{region}/manifest/{'0' * 64}.binpb", f"{region}/owner.json"]
    keys += [f"{region}/0123abcd_gen_7/data/{name}.lance" for name in "ab"]
    keys += [f"{region}/manifest/version_hint.json", f"{region}/commits/{'0' * 64}.json"]
    keys += ["table.lance/_mem_wal/paused/commits.json", "table.lance/_mem_wal/paused/commits_0_ended.json"]
    keys += ["table.lance/_indices/u1/a.idx", "table.lance/_indices/u1/b.idx", "table.lance/data/x.lance"]
    keys += ["table.lance/_versions/1.manifest", "table.lance/_transactions/1.txn", "table.lance/_deletions/1.arrow"]
    found = count_kinds(keys)
    assert (found["entries"], found["manifests"], found["notes"], found["commit plans"]) == (1, 1, 2, 1)
    assert found["pauses"] == 2
    assert (found["SSTs"], found["index segments"], found["data files"]) == (1, 1, 1)
    assert (found["base versions"], found["transactions"], found["deletion files"], found["other"]) == (1, 1, 1, 0)


def test_requests_are_counted_by_what_they_are_for_and_probes_apart() -> None:
    region = "table.lance/_mem_wal/1d8d46d4-1ffd-5f6e-9aea-466d5ea76fdb"
    asked = [Request("GET", f"{region}/wal/{'0' * 64}.lance", status, "", 0.0, 0.0, 0) for status in (200, 404)]
    assert requests_by_kind(asked) == Counter({"get log": 2, "probed positions": 1})


def test_the_feed_is_judged_change_by_change(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "feed.jsonl")
    journal.note(changes=[["insert", 1, 1], ["update", 1, 2], ["delete", 1, None]], position=3)
    journal.note(changes=[["insert", 1, 5], ["insert", 2, 6]], position=5)
    assert told(tmp_path / "feed.jsonl") == ({1: 5, 2: 6}, 5, [])
    journal.note(changes=[["update", 2, 6], ["delete", 9, None], ["insert", 1, 8]], position=8)
    _, number, wrong = told(tmp_path / "feed.jsonl")
    assert number == 8
    assert len(wrong) == 3


def test_a_journal_that_a_kill_cut_off_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "writer-0.jsonl"
    path.write_bytes(b'{"begun":1}\n{"acked":1}\n{"beg')
    assert last(path, "begun") == 1
    Journal(path).note(begun=2)
    assert list(lines(path)) == [{"begun": 1}, {"acked": 1}, {"begun": 2}]
    assert last(path, "acked") == 1
    assert last(path, "nothing") is None


def test_the_rows_of_a_writer_are_a_function_of_its_steps() -> None:
    plan = Plan(writer=1, seed=7)
    state = plan.state(40)
    assert state == Plan(1, 7).state(40)
    assert state != Plan(1, 8).state(40)
    assert any(plan.step(n).deletes for n in range(1, 41))
    assert mismatch(state, state) == ""
    id = next(iter(state))
    assert "1 rows are missing" in mismatch({key: n for key, n in state.items() if key != id}, state)
    assert "1 have another version" in mismatch({**state, id: 99}, state)
