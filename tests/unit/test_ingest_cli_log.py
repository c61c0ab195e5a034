"""The words of `memwal log` for the actions that `flush.history.actions` finds."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from memwal.flush.base.state import TableState, Transaction
from memwal.flush.history.actions import Action, Change, History
from memwal.ingest.cli.log import render

NAMES = {"r0": "bucket-0", "r1": "bucket-1", "r2": "bucket-2", "r3": "bucket-3"}


def words(*actions: Action, message: str = "", **more: Any) -> str:
    """Return the text that `memwal log` prints for a version with these actions."""
    transaction = Transaction("update", 1, message=message)
    state = TableState(7, 0.0, {}, {}, {}, {}, {}, transaction)
    return text(History((Change(state, tuple(actions), **more),), 0))


def text(history: History, limit: int = 1) -> str:
    out = io.StringIO()
    Console(file=out, width=300).print(render("table", history, NAMES, limit))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    return "\n".join(rows)


def commit(region: str, first: int, last: int) -> Action:
    return Action("commit", {"region": region, "first": first, "last": last})


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ([Action("insert", {"rows": 1})], "insert 1 row"),
        ([Action("insert", {"rows": 1200}), Action("update", {"rows": 1})], "insert 1,200, update 1 row"),
        ([commit("r0", 4, 4)], "commit generation 4 of bucket-0"),
        ([commit("r0", 4, 6), commit("r2", 4, 6)], "commit generations 4–6 of buckets 0, 2"),
        ([commit(f"r{n}", 1, 1) for n in range(4)], "commit generation 1 of buckets 0–3"),
        ([commit("r0", 1, 2), commit("r1", 3, 3)], "commit generations 1–2 of bucket-0 and 3 of bucket-1"),
        ([commit("r0", 1, 1), commit("else", 1, 1)], "commit generation 1 of bucket-0, else"),
        ([Action("index built", {"index": "a"})], "build index a"),
        ([Action("index extended", {"index": n, "segments": 1}) for n in "ab"], "extend indexes a, b"),
        ([Action("column changed", {"column": "b", "type": "t", "was": "a t"})], "change column a t to b t"),
        ([Action("restore", {"version": 3, "rows": 1})], "restore version 3"),
        ([Action("other", {"operation": "clone"})], "nothing changed (Lance: clone)"),
    ],
)
def test_actions_are_said_in_words(actions: list[Action], said: str) -> None:
    (shown,) = (line for line in words(*actions).splitlines() if line.startswith("7 "))
    assert shown.endswith(f" - {said}")


def test_the_first_half_of_a_commit_names_the_second() -> None:
    said = words(Action("delete", {"rows": 2}), part_of=8)
    assert "delete 2 rows; first half of the commit in version 8" in said


def test_what_its_writer_says_of_a_version_is_shown() -> None:
    assert "insert 1 row; 'nightly load'" in words(Action("insert", {"rows": 1}), message="nightly load")


def test_what_cannot_be_told_is_said() -> None:
    state = TableState(7, 0.0, {}, {}, {}, {}, {}, Transaction("update", 6))
    said = text(History((Change(state, None),), older=12, gone=(4, 5, 6)), limit=3)
    assert "unknown: the previous version was cleaned up (Lance: update)" in said
    assert "cleaned up while being read: versions 4–6" in said
    assert "12 older versions; --limit 15 shows them" in said


def test_versions_that_were_cleaned_up_between_others_are_said_to_be() -> None:
    states = [TableState(version, 0.0, {}, {}, {}, {}, {}, None) for version in (9, 8, 3)]
    said = text(History(tuple(Change(state, ()) for state in states), 0)).splitlines()
    assert [line.split()[0] for line in said if line[:1] in "…983" and line] == ["9", "8", "…", "3"]
    assert "… cleaned up: 4–7" in said


def test_a_history_of_nothing_is_said() -> None:
    assert "no version could be read" in text(History((), 0, gone=(1,)))
