"""What commands show to people and to programs, and every error that ends one: one line and an exit code."""

from __future__ import annotations

import io
import json
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from memwal.flush.base.state import TableState, Transaction
from memwal.flush.history.actions import Action, Change, History
from memwal.ingest.cli import app as cli
from memwal.ingest.cli import log as cli_log
from memwal.ingest.cli import status as cli_status
from memwal.ingest.cli.print import cell, print_rows, shown_values
from memwal.wal import bucket_region


class PanicException(BaseException):
    """The exception that pylance raises when its Rust code panics."""


def test_a_panic_of_lance_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def panics(**_: object) -> int:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(cli, "app", panics)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memwal: PanicException: called `Option::unwrap()` on a `None` value; ")
    assert "MEMWAL_TRACEBACK=1" in line


def test_a_fault_of_many_lines_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(**_: object) -> int:
        raise RuntimeError("odd\n\tat one.place\n\tat.another")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memwal: RuntimeError: odd; ")


TWO = """
[pipelines.a.table]
uri = "a.lance"
key = ["id"]
columns = {{ id = "int64" }}
[pipelines.b.table]
uri = "b.lance"
{}
columns = {{ id = "{}" }}
"""


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `memwal ARGUMENTS` in this process on 80 columns; return the exit code."""
    monkeypatch.setattr(sys, "argv", ["memwal", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_check_looks_at_every_pipeline_of_a_file_and_names_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console must not print `:a:` in `FILE:a:` as an emoji."""
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO.format('key = ["id"]', "int64"))
    assert typed(monkeypatch, "config", "check", "two.toml") == 0
    assert capsys.readouterr().out.splitlines() == ["two.toml:a: ok", "two.toml:b: ok"]
    Path("two.toml").write_text(TWO.format("", "int65").replace("a.lance", ""))
    assert typed(monkeypatch, "config", "check", "two.toml") == 2
    said = capsys.readouterr().err
    assert "two.toml:a: [table] uri is not set" in said
    assert "two.toml:b: [table] columns.id = 'int65'" in said
    Path("two.toml").write_text(TWO.format('key = ["id"]', "int64").replace("b.lance", "a.lance"))
    assert typed(monkeypatch, "config", "check", "two.toml") == 2
    assert "the same sink.checkpoint" in capsys.readouterr().err


def test_the_version_says_what_lies_below_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "--version") == 0
    said = capsys.readouterr().out
    assert said.startswith("memwal ")
    assert all(name in said for name in ("pylance ", "pyspark ", "Python "))


@pytest.mark.parametrize("names", [["serve"], ["run"], ["dlq", "show"], ["inspect"]])
def test_help_loses_nothing_on_80_columns(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *names, "--help") == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert ("source.spark" in said) == (names == ["serve"])
    assert ("PATH" if names == ["inspect"] else "CONFIG") in said


NAMES = {"r0": "region 0", "r1": "region 1", "r2": "region 2", "r3": "region 3"}


def words(*actions: Action, message: str = "", **more: Any) -> str:
    """Return the text that `memwal log` prints for a version with these actions."""
    transaction = Transaction("update", 1, message=message)
    state = TableState(7, 0.0, {}, {}, {}, {}, {}, transaction)
    return text(History((Change(state, tuple(actions), **more),), 0))


def text(history: History, limit: int = 1) -> str:
    out = io.StringIO()
    Console(file=out, width=300).print(cli_log.render("table", history, NAMES, limit))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    return "\n".join(rows)


def commit(region: str, first: int, last: int) -> Action:
    return Action("commit", {"region": region, "first": first, "last": last})


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ([Action("insert", {"rows": 1})], "insert 1 row"),
        ([Action("insert", {"rows": 1200}), Action("update", {"rows": 1})], "insert 1,200, update 1 row"),
        ([commit("r0", 4, 4)], "commit generation 4 of region 0"),
        ([commit("r0", 4, 6), commit("r2", 4, 6)], "commit generations 4–6 of regions 0, 2"),
        ([commit(f"r{n}", 1, 1) for n in range(4)], "commit generation 1 of regions 0–3"),
        ([commit("r0", 1, 2), commit("r1", 3, 3)], "commit generations 1–2 of region 0 and 3 of region 1"),
        ([commit("r0", 1, 1), commit("else", 1, 1)], "commit generation 1 of else, region 0"),
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


FIRST, SECOND = "grpc+tls://ingest-0.example.org:17447", "grpc+tls://ingest-1.example.org:17447"


def region(bucket: int, owner: str | None, **changed: Any) -> dict[str, Any]:
    found = {
        "bucket": bucket,
        "id": str(bucket_region(bucket)),
        "epoch": 12,
        "wal_position": 1_234_567,
        "replay_after": 1_234_000,
        "generation": 4321,
        "memtable_rows": 1_000_000,
        "state": "serving",
        "failure": None,
        "flush_error": None,
        "last_errors": {},
        "ssts": [],
        "behind": {"committed": 27.5} if owner else None,
        "owner": owner,
    }
    return found | changed


def printed(status: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80, emoji=False).print(cli_status.render(status))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("place", ["data/t.lance", "/data/[prod]/t:a:.lance"])
def test_nothing_is_cut_at_80_columns(place: str) -> None:
    """Long addresses and headings are the texts at risk."""
    regions = [region(bucket, FIRST if bucket in (0, 1, 3) else SECOND) for bucket in range(5)]
    lines = printed({"table": place, "base_version": 7, "rows": 3, "regions": regions})
    assert lines[0].startswith(f"{place}: version 7, 3 rows committed")
    assert f"{FIRST} serves regions 0–1, 3" in lines
    assert f"{SECOND} serves regions 2, 4" in lines
    assert not any("…" in line for line in lines)
    (head,) = [line.split() for line in lines if line.lstrip().startswith("region  id")]
    assert head == ["region", "id", "epoch", "WAL", "flushed", "gen", "in", "memory", "SSTs", "behind"]
    (row,) = [line.split() for line in lines if line.split()[:1] == ["3"]]
    assert row[2:] == ["12", "1234567", "1234000", "4321", "1,000,000", "0", "27.5", "s"]


def test_a_column_of_larger_numbers_is_left_out_and_not_cut() -> None:
    regions = [region(bucket, FIRST, wal_position=10**12 + 7, generation=10**9 + 7) for bucket in range(5)]
    status = {"table": "t", "base_version": 1, "rows": 0, "regions": regions}
    lines = printed(status)
    assert sum("1000000000007" in line and "1000000007" in line for line in lines) == 5
    assert "not shown: behind (--json prints them)" in lines
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    out = io.StringIO()
    Console(file=out, width=80, emoji=False).print(cli_status.render(status, 2))
    assert out.getvalue().count("1000000000007") == 2
    assert "3 more regions; --limit 5 shows them" in out.getvalue()


def test_regions_that_nobody_serves_say_who_did() -> None:
    status = {"table": "t", "base_version": 1, "rows": 0, "regions": [region(0, None)], "served_last_by": [FIRST]}
    lines = printed(status)
    assert "no owner answers for region 0; shown as stored" in lines
    assert f"last served by {FIRST}" in lines


def test_the_newest_error_of_a_region_is_told_with_its_time_also_when_it_is_over() -> None:
    errors = {"flush": {"at": 90.0, "error": "disk full"}, "append": {"at": 86_400.5, "error": "no answer"}}
    status = {"table": "t", "base_version": 1, "rows": 0, "regions": [region(0, FIRST, last_errors=errors)]}
    assert "region 0: last error at 1970-01-02 00:00:00 UTC, append: no answer" in printed(status)
    troubled = region(0, FIRST, last_errors=errors, state="flush_failing", flush_error="disk full")
    lines = printed(status | {"regions": [troubled]})
    assert "region 0 is flush failing: disk full" in lines
    assert not any("last error" in line for line in lines)


FORMS = ("table", "json", "ndjson", "csv")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("values", "kind", "shown"),
    [
        ([76.1, None, 0.1], pa.float32(), [76.1, None, 0.1]),
        ([np.float16(0.1)], pa.float16(), [0.1]),
        ([76.1, 1e-9, 1e300], pa.float64(), [76.1, 1e-9, 1e300]),
        ([[76.1, None], None, []], pa.list_(pa.float32()), [[76.1, None], None, []]),
        ([[76.1, 0.1]], pa.list_(pa.float32(), 2), [[76.1, 0.1]]),
        ([{"x": 76.1, "n": 1}, None], pa.struct([("x", pa.float32()), ("n", pa.int64())]), [{"x": 76.1, "n": 1}, None]),
        ([{"n": 1}], pa.struct([("n", pa.int64())]), [{"n": 1}]),
        (["a", None], pa.dictionary(pa.int8(), pa.string()), ["a", None]),
    ],
)
def test_values_have_no_digits_that_nobody_wrote(form: str, values: list[Any], kind: pa.DataType, shown: Any) -> None:
    assert shown_values(pa.array(values, kind), form) == shown


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2)])
def test_binary_is_hexadecimal_for_programs(kind: pa.DataType) -> None:
    column = pa.array([b"\x00\xff", None], kind)
    assert shown_values(column, "table") == [b"\x00\xff", None]
    for form in ("json", "ndjson", "csv"):
        assert shown_values(column, form) == ["00ff", None]
    assert shown_values(pa.array([[b"\x00"]], pa.list_(kind if kind != pa.binary(2) else pa.binary())), "csv") == [
        ["00"]
    ]


@example(1e12)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_narrow_number_reads_back_as_itself(value: float) -> None:
    ((shown),) = shown_values(pa.array([value], pa.float32()), "json")
    assert np.float32(shown) == np.float32(value)
    assert digits(shown) <= digits(float(np.float32(value)))


def digits(value: float) -> int:
    """Return the number of significant digits of a number's text: 1e12 has one."""
    return len(Decimal(repr(value)).normalize().as_tuple().digits)


@pytest.mark.parametrize("form", ["json", "ndjson"])
def test_json_has_no_number_that_is_none(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    column = [math.nan, math.inf, -math.inf, 1.5]
    rows = pa.table({"wide": column, "narrow": pa.array(column, pa.float32()), "list": [[each] for each in column]})
    print_rows(rows.column_names, [rows.slice(0, 2), rows.slice(2)], form, Console())
    text = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [text] if form == "json" else text.splitlines()
    read = [json.loads(line, parse_constant=refuse) for line in lines]
    found = read[0] if form == "json" else read
    assert [row["wide"] for row in found] == ["NaN", "Infinity", "-Infinity", 1.5]
    assert [row["list"] for row in found] == [["NaN"], ["Infinity"], ["-Infinity"], [1.5]]


@pytest.mark.parametrize(
    ("value", "shown"), [(1e-9, "1e-09"), (76.1, "76.1"), (0.1 + 0.2, "0.3"), (1234567.89, "1234567.89")]
)
def test_a_cell_shows_a_number_as_people_write_it(value: float, shown: str) -> None:
    assert cell(value).plain == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("red \x1b[31mtext\x07", r"red \x1b[31mtext\x07"),
        ("two\nlines\ttab", r"two\nlines\ttab"),
        ("Grüße, 世界 — ok", "Grüße, 世界 — ok"),
        ("\u202egnitirw", r"\u202egnitirw"),
        ({"a": "\x1b]52;c;eA==\x07"}, r"{'a': '\x1b]52;c;eA==\x07'}"),
    ],
)
def test_a_cell_sends_nothing_to_the_terminal_that_it_acts_on(value: Any, shown: str) -> None:
    assert cell(value, width=100).plain == shown
    assert all(each.isprintable() for each in cell([value]).plain)
