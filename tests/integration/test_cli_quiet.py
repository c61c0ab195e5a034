"""`--quiet` for all commands: results, errors and exit codes stay; progress, hints and notes are left out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer.main

import memwal
from memwal.ingest.cli.app import app
from tests.conftest import Ran

Cli = Callable[..., Ran]
TERMINAL = {"FORCE_COLOR": "1"}
"""Makes commands show progress, as on a terminal."""
ARGUMENTS = {
    "query": ("--limit", "3"),
    "sql": ("select id from table order by id limit 3",),
    "delete": ("--key", "1"),
    "regions resize": ("--to", "2"),
    "index add": ("price", "btree"),
    "index drop": ("price_btree",),
    "dlq show": ("ffff",),
    "load": ("more.parquet",),
}
"""The arguments that a command needs besides its configuration."""


def names(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from names(command, *before, name)
        else:
            yield (*before, name)


COMMANDS = sorted(names(typer.main.get_command(app)))


@pytest.fixture
def config(small_config: Callable[..., Path], uri: str, made: Any) -> Path:
    """The configuration of a table with ten rows, which the memtables of an ended process held."""
    path = small_config(gc={"interval": "0s"})
    with memwal.open(uri, settings=path) as table:
        table.put(made.rows(range(10)))
    return path


def both(cli: Cli, *words: str | Path, **how: Any) -> tuple[Ran, Ran]:
    """Run a command that changes nothing without and with --quiet; return both results."""
    loud, quiet = cli(*words, **how), cli(*words, "--quiet", **how)
    assert (quiet.code, quiet.err if quiet.code else "") == (loud.code, loud.err if loud.code else "")
    return loud, quiet


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_it_and_fails_as_before(words: tuple[str, ...], cli: Cli, tmp_path: Path) -> None:
    assert "--quiet" in cli(*words, "--help", env={"COLUMNS": "120"}).out
    absent = tmp_path / "absent.toml"
    loud, quiet = both(cli, *words, absent, *ARGUMENTS.get(" ".join(words), ()))
    assert loud.code in (1, 2)
    assert (quiet.out, quiet.error_lines) == (loud.out, loud.error_lines)
    assert len(quiet.error_lines) == 1


def test_reads_print_their_rows_and_nothing_else(cli: Cli, config: Path) -> None:
    for words, note in (
        (("query", config, "--limit", "3", "--columns", "id"), "3 rows"),
        (("sql", config, "select id from table order by id limit 3"), "3 rows"),
    ):
        loud, quiet = both(cli, *words)
        assert note in loud.out
        assert quiet.out == loud.out.replace(f"{note}\n", ""), words
    for form in ("json", "csv", "ndjson"):
        loud, quiet = both(cli, "query", config, "--format", form)
        assert quiet.out == loud.out
    loud, quiet = both(cli, "tail", config, "--format", "json")
    assert "continues from here" in loud.err
    assert (quiet.out, quiet.err) == (loud.out, "")
    for command in (
        ("status",),
        ("config", "show"),
        ("config", "check"),
        ("index", "list"),
        ("log",),
        ("gc", "--dry-run"),
    ):
        options = command[1:] if command[-1].startswith("--") else ()
        loud, quiet = both(cli, *[word for word in command if word not in options], config, *options)
        assert quiet.out == loud.out != "", command


def test_steps_print_what_they_did_without_progress(cli: Cli, config: Path, uri: str) -> None:
    loud = cli("flush", config, env=TERMINAL)
    assert "flushing" in loud.out
    assert "flushed 10 rows" in loud.out
    quiet = cli("commit", config, "--quiet", env=TERMINAL)
    assert quiet.out.startswith("committed"), quiet.out
    assert "\x1b" not in quiet.out, "no line of progress"
    assert "maintaining the base table" in cli("commit", config, env=TERMINAL).out
    quiet = cli("gc", config, "--quiet", env=TERMINAL)
    assert (quiet.code, "collecting" in quiet.out) == (0, False)
    quiet = cli("delete", config, "--key", "1", "--quiet", env=TERMINAL)
    assert quiet.out == f"deleted 1 row of {uri}\n"
    assert "deleting" not in quiet.out
    quiet = cli("flush", config, "-q", env=TERMINAL)
    assert quiet.out.startswith("flushed 1 rows"), quiet.out
    quiet = cli("regions", "resize", config, "--to", "3", "--quiet", env=TERMINAL)
    assert (quiet.code, len(quiet.out.splitlines())) == (0, 1), quiet
    quiet = cli("verify", config, "--quiet", env=TERMINAL)
    assert (quiet.code, "checking" in quiet.out, "clean" in quiet.out) == (0, False, True)
    found = cli("query", config, "--format", "json", "--limit", "100", "--quiet")
    assert len(json.loads(found.out)) == 9


def test_a_load_says_what_it_loaded_only(cli: Cli, config: Path, tmp_path: Path, made: Any) -> None:
    for number in range(2):
        pq.write_table(made.table(range(20 + number, 21 + number)), tmp_path / f"{number}.parquet")
    loud, quiet = cli("load", config, tmp_path / "0.parquet"), cli("load", config, tmp_path / "1.parquet", "--quiet")
    assert (loud.code, quiet.code) == (0, 0), (loud, quiet)
    assert "reading the files for a token" in loud.err
    assert (quiet.err, len(quiet.out.splitlines())) == ("", len(loud.out.splitlines()))


def test_a_run_prints_its_report_only(cli: Cli, small_config: Callable[..., Path], tmp_path: Path, made: Any) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(made.table(range(40)), tmp_path / "in" / "0.parquet")
    config = small_config(source={"path": str(tmp_path / "in")})
    ran = cli("run", config, "--once", "--quiet")
    assert ran.code == 0, ran.err
    assert "memwal: " not in ran.out
    assert "query it:" not in ran.out
    assert "40" in ran.out


def test_a_daemon_prints_its_address_only(start: Callable[..., Any], config: Path) -> None:
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config), "--quiet"])
    running.line_with("serving")
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    assert len(running.lines) == 1, running.lines
