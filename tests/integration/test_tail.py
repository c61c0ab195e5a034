"""`memwal tail`: formats, positions, following, the end by Ctrl-C."""

from __future__ import annotations

import csv
import io
import itertools
import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import memwal
from tests.conftest import Cli, OpenSmall, Ran, Serve, SmallConfig, Start


@pytest.fixture
def tail(cli: Cli) -> Callable[..., Ran]:
    """Run `memwal tail`."""
    return partial(cli, "tail")


@pytest.fixture
def config(small_config: SmallConfig, open_small: OpenSmall, made: Any) -> Path:
    """Return the configuration of a closed table, with two rows put, one changed and one deleted."""
    table = open_small(regions=1)
    table.put(made.rows([1, 2]))
    table.put(made.rows([1], 1))
    table.delete([2])
    table.close()
    return small_config()


def test_json_is_one_object_per_line_and_a_position_goes_on(
    config: Path, tail: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = tail(config, "--format", "json", "--columns", "name")
    assert ran.code == 0
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [(row["_change"], row["id"], row["name"]) for row in rows] == [
        ("insert", 1, "row 1 v0"),
        ("insert", 2, "row 2 v0"),
        ("update", 1, "row 1 v1"),
        ("delete", 2, None),
    ]
    assert [(row["_position"], row["_row"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (3, 0)]
    position = ran.err.split("'")[1]
    assert tail(config, "--format", "json", "--since", position).out == ""
    earlier = json.loads(position)
    earlier["regions"] = dict.fromkeys(earlier["regions"], 2)
    (tmp_path / "position.json").write_text(json.dumps(earlier))
    out = tail(config, "--format", "json", "--images", "both", "--since", f"@{tmp_path / 'position.json'}").out
    assert [(row["_change"], row["name"]) for row in map(json.loads, out.splitlines())] == [("delete", "row 2 v0")]


def test_csv_and_table(config: Path, tail: Callable[..., Ran]) -> None:
    rows = list(csv.reader(io.StringIO(tail(config, "--format", "csv", "--columns", "name").out)))
    assert rows[0] == ["_change", "_region", "_position", "_row", "id", "name"]
    assert [row[0] for row in rows[1:]] == ["insert", "insert", "update", "delete"]
    shown = tail(config, "--columns", "name").out
    assert "row 1 v1" in shown
    assert "_region" not in shown


def test_a_large_entry_is_printed_in_parts(
    open_small: OpenSmall, small_config: SmallConfig, tail: Callable[..., Ran], made: Any
) -> None:
    table = open_small(regions=1)
    table.put(made.rows(range(1_200)))
    table.close()
    out = tail(small_config(), "--columns", "name").out
    heads = [number for number, line in enumerate(out.splitlines()) if "_change" in line]
    assert len(heads) == 3
    assert max(end - begin for begin, end in itertools.pairwise(heads)) < 510
    assert out.count(" v0") == 1_200


def test_a_limit_ends_it_and_its_position_skips_no_row(config: Path, tail: Callable[..., Ran]) -> None:
    """A position at a limit inside an entry repeats the rows of that entry, and no others."""
    whole = [json.loads(line) for line in tail(config, "--format", "json").out.splitlines()]
    for limit, first in ((1, 0), (2, 2), (3, 3), (4, 4), (9, 4)):
        ran = tail(config, "--format", "json", "--limit", limit)
        assert [json.loads(line) for line in ran.out.splitlines()] == whole[:limit]
        assert ("repeats 1 row" in ran.err) == (limit == 1)
        rest = tail(config, "--format", "json", "--since", ran.err.split("'")[1]).out
        assert [json.loads(line) for line in rest.splitlines()] == whole[first:]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--since", "yesterday"), "earliest"),
        (("--since", "{"), "JSON"),
        (("--since", "@missing.json"), "No such file"),
        (("--since", "@no text"), "no text is not text: give a file that holds a position"),
        (("--images", "before"), "both"),
        (("--columns", "nam"), "name"),
    ],
)
def test_mistakes_are_one_line(config: Path, tail: Callable[..., Ran], arguments: tuple[str, ...], text: str) -> None:
    (config.parent / "no text").write_bytes(b"\xff\xfe")
    ran = tail(config, *arguments, cwd=config.parent)
    assert (ran.code, ran.out, len(ran.error_lines)) == (2, "", 1)
    assert text in ran.err


def test_it_follows_a_daemon_until_it_is_interrupted(
    small_config: SmallConfig, serve: Serve, start: Start, made: Any
) -> None:
    path = small_config()
    _, endpoint = serve(path)
    with memwal.connect(endpoint) as table:
        table.put(made.rows([1]))
        command = [sys.executable, "-m", "memwal.ingest.cli.app", "tail", str(path), "-f", "--format", "json"]
        running = start([*command, "--columns", "name"])
        assert json.loads(running.line_with("row 1 v0"))["_change"] == "insert"
        table.put(made.rows([1], 1))
        assert json.loads(running.line_with("row 1 v1"))["_change"] == "update"
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 0
        assert "--since '{" in "\n".join(running.errors)
