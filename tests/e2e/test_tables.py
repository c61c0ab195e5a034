"""Commands on a configuration of several tables: on one by `--table`, on all of them, and `memwal tables`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet
import pytest

import memwal
from memwal.ingest.settings.load import load_tables
from tests.conftest import toml

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "v": pa.array([1.0, 2.0, 3.0])})
TEMPLATE: dict[str, Any] = {"key": ["id"], "columns": {"id": "int64", "v": "float64"}}
BY_HAND = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def written(path: Path, sections: Mapping[str, Any]) -> Path:
    """Write a configuration; tables inside [tables] become sections."""
    tables = {f"tables.{name}": table for name, table in sections.get("tables", {}).items()}
    path.write_text(toml({name: each for name, each in sections.items() if name != "tables"} | tables))
    return path


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Return a configuration with the tables `orders` and `users`."""
    tables = {name: {"uri": str(tmp_path / "at" / f"{name}.lance"), **TEMPLATE} for name in ("orders", "users")}
    return written(tmp_path / "fleet.toml", {"tables": tables, "regions": {"count": 2}, **BY_HAND})


@pytest.fixture
def below(tmp_path: Path) -> Path:
    """Return a configuration of all tables below a directory, which is empty."""
    (tmp_path / "at").mkdir()
    return written(tmp_path / "below.toml", {"table": TEMPLATE, "fleet": {"prefix": f"{tmp_path}/at/"}, **BY_HAND})


@pytest.fixture
def ok(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a command which succeeds, and returns its output."""

    def run(*arguments: str | Path) -> str:
        ran = cli(*arguments, cwd=tmp_path)
        assert (ran.code, ran.err) == (0, ""), ran.err
        return str(ran.out)

    return run


@pytest.fixture
def refused(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a command which is refused, and returns its line of output."""

    def run(*arguments: str | Path) -> str:
        ran = cli(*arguments, cwd=tmp_path)
        assert (ran.code, ran.out) == (2, ""), ran.err
        (line,) = ran.error_lines
        return str(line)

    return run


def file_of_rows(directory: Path) -> Path:
    """Return a Parquet file with ROWS."""
    pyarrow.parquet.write_table(ROWS, directory / "rows.parquet")
    return directory / "rows.parquet"


def put(config: Path, name: str, rows: pa.Table = ROWS) -> None:
    """Put rows into a table, and leave them in its log."""
    settings = load_tables(config, {}).of_table(name)
    with memwal.open(settings.table.uri, settings=BY_HAND) as table:
        table.put(rows)


def test_commands_of_all_tables_report_each_and_go_on(
    cli: Callable[..., Any], ok: Callable[..., str], fleet: Path, tmp_path: Path
) -> None:
    said = ok("init", fleet).splitlines()
    assert [said[0], said[2]] == ["orders:", "users:"]
    assert all("created" in line for line in (said[1], said[3]))
    put(fleet, "users")
    for command, words in {
        "status": ("orders:", "users:", "3 rows in memtables"),
        "flush": ("nothing to flush", "flushed 3 rows"),
        "commit": ("nothing to commit", "committed"),
        "verify": ("users:", "clean"),
        "gc": ("orders:", "users:"),
    }.items():
        said_of = ok(command, fleet)
        assert [word for word in words if word not in said_of] == [], command
    assert lance.dataset(str(tmp_path / "at" / "users.lance")).count_rows() == 3
    copies = str(tmp_path / "copies")
    for command, *more in (("status",), ("verify",), ("gc", "--dry-run"), ("commit",), ("backup", copies)):
        found = json.loads(ok(command, fleet, *more, "--json"))
        assert list(found) == ["orders", "users"], command
        assert "error" not in found["users"], command
    again = written(tmp_path / "again.toml", {"table": {"uri": "again.lance", **TEMPLATE}})
    ok("restore", again, f"{copies}/users")
    assert lance.dataset(str(tmp_path / "again.lance")).count_rows() == 3

    for manifest in (tmp_path / "at" / "orders.lance" / "_versions").iterdir():
        manifest.write_bytes(b"damaged")
    ran = cli("status", fleet, "--json")
    found = json.loads(ran.out)
    assert ran.code == 1
    assert found["users"]["rows"] == 3
    assert [line.startswith("memwal: orders: ") for line in ran.error_lines] == [True]
    assert found["orders"]["error"] in ran.error_lines[0]
    assert cli("verify", fleet).code
    listed = cli("tables", fleet, "--format", "json")
    assert listed.code == 1
    assert [(row["name"], row["state"]) for row in json.loads(listed.out)] == [
        ("orders", "broken"),
        ("users", "not served"),
    ]
    one = ok("status", fleet, "--table", "users").replace("\n", "")
    assert "users.lance" in one
    assert "orders.lance" not in one


def test_one_table_is_chosen_by_its_name(ok: Callable[..., str], below: Path, tmp_path: Path) -> None:
    ok("init", below, "--table", "orders")
    ok("init", below, "--table", "users")
    put(below, "orders")
    assert json.loads(ok("query", below, "--table", "orders", "--key", "2", "--format", "json"))[0]["v"] == 2.0
    assert json.loads(ok("query", below, "--table", "users", "--format", "json")) == []
    ok("delete", below, "--table", "orders", "--key", "1")
    ok("load", below, file_of_rows(tmp_path), "--table", "new", "--quiet")
    assert [row["name"] for row in json.loads(ok("tables", below, "--format", "json"))] == ["new", "orders", "users"]
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(ok("tables", below, "--format", "csv")))}
    assert {name: (row["rows"], row["regions"], row["state"], row["owners"]) for name, row in rows.items()} == {
        "new": ("3", "2", "not served", ""),
        "orders": ("0", "2", "not served", ""),
        "users": ("0", "2", "not served", ""),
    }
    assert {name for name, row in rows.items() if int(row["pending"])} == {"orders"}
    assert rows["orders"]["location"] == str(tmp_path / "at" / "orders.lance")
    assert list(json.loads(ok("verify", below, "--json"))) == ["new", "orders", "users"]


def test_a_single_table_is_listed_and_may_be_named(ok: Callable[..., str], tmp_path: Path) -> None:
    config = written(tmp_path / "one.toml", {"table": {"uri": "one.lance", **TEMPLATE}})
    assert "not created" in ok("tables", config)
    ok("init", config)
    (row,) = json.loads(ok("tables", config, "--format", "json"))
    assert (row["name"], row["rows"], row["pending"], row["state"]) == ("one", 0, 0, "not served")
    assert ok("status", config) == ok("status", config, "--table", "one")


def test_a_served_table_is_listed_with_its_owner(
    ok: Callable[..., str], fleet: Path, serve: Callable[..., Any], tmp_path: Path
) -> None:
    _, endpoint = serve(fleet, "--table", "orders")
    with memwal.connect(endpoint) as table:
        table.put(ROWS)
    orders, users = json.loads(ok("tables", fleet, "--format", "json"))
    assert (orders["state"], orders["owners"], orders["pending"]) == ("served", endpoint, 3)
    assert users == {
        **dict.fromkeys(("rows", "pending", "regions", "owners")),
        "name": "users",
        "state": "not created",
        "location": str(tmp_path / "at" / "users.lance"),
    }


def test_what_needs_one_table_names_the_tables_in_one_line(
    refused: Callable[..., str], ok: Callable[..., str], fleet: Path, below: Path, tmp_path: Path
) -> None:
    commands = (["run"], ["query"], ["sql", "select 1"], ["tail"], ["delete", "--key", "1"], ["doctor"])
    for words in (*commands, ["status", "--watch"], ["log"], ["pause"], ["dlq", "list"], ["index", "list"]):
        at = 2 if words[0] in ("dlq", "index") else 1
        line = refused(*words[:at], fleet, *words[at:])
        assert line == f"memwal: {fleet}: it has several tables; choose one with --table NAME: orders, users", words
    assert "none yet; init --table NAME creates one" in refused("query", below)
    assert "'orders'" in refused("query", fleet, "--table", "ordres")
    assert "not a table name" in refused("query", below, "--table", "../x")
    ok("init", below, "--table", "orders")
    assert "did you mean 'orders'?" in refused("query", below, "--table", "ordres")
    gone = written(tmp_path / "gone.toml", {"table": TEMPLATE, "fleet": {"prefix": f"{tmp_path}/none"}})
    for words in (["status"], ["tables"], ["config", "check"]):
        assert "no such directory; create it, or correct the prefix" in refused(*words, gone)
    for words in (["init"], ["query"]):
        assert "no such directory" in refused(*words, gone, "--table", "x")
    assert not (tmp_path / "none").exists()


def test_a_template_that_does_not_fit_a_table_is_one_line_and_the_others_are_served(
    cli: Callable[..., Any], ok: Callable[..., str], below: Path, tmp_path: Path
) -> None:
    lance.write_dataset(pa.table({"name": ["a"]}), str(tmp_path / "at" / "odd.lance"))
    ok("init", below, "--table", "orders")
    ran = cli("init", below)
    assert ran.code == 2
    (line,) = ran.error_lines
    assert line.startswith("memwal: odd: ")
    assert "orders:" in ran.out


def test_config_commands_know_several_tables(
    ok: Callable[..., str],
    refused: Callable[..., str],
    cli: Callable[..., Any],
    fleet: Path,
    below: Path,
    tmp_path: Path,
) -> None:
    assert ok("config", "check", fleet) == f"{fleet}: ok\n"
    assert ok("config", "check", below) == f"{below}: ok\n"
    shown = ok("config", "show", fleet)
    assert "[tables.orders]" in shown
    assert "[table]" not in shown
    one = ok("config", "show", fleet, "--table", "orders")
    assert "[table]" in one
    assert "[tables." not in one
    assert "orders.lance" in ok("config", "show", below, "--table", "orders")

    rows = file_of_rows(tmp_path)
    new = tmp_path / "new.toml"
    ok("config", "new", new, "--from", rows, "--table", "first")
    ok("config", "new", new, "--from", rows, "--table", "se.cond")
    assert load_tables(new, {}).names == ("first", "se.cond")
    ok("config", "check", new)
    ok("init", new, "--table", "se.cond")
    assert "[tables.first]" in refused("config", "new", new, "--from", rows, "--table", "first")
    assert "not a table name" in refused("config", "new", new, "--from", rows, "--table", "a/b")
    one_table = written(tmp_path / "one.toml", {"table": {"uri": "one.lance", **TEMPLATE}})
    assert "no [tables.NAME]" in refused("config", "new", one_table, "--from", rows, "--table", "a")
    assert "--table" in refused("config", "new", new, "--from", rows)
    bad = written(tmp_path / "bad.toml", {"tables": {"a": {"uri": "a.lance", **TEMPLATE}, "b": {"uri": "./a.lance/"}}})
    assert "[tables.b] uri" in refused("config", "check", bad)


def test_a_prefix_on_object_storage(
    ok: Callable[..., str], refused: Callable[..., str], s3_table: Any, tmp_path: Path
) -> None:
    prefix, options = s3_table.uri.rpartition("/")[0], s3_table.storage_options

    def config(at: str = prefix, **changed: str) -> Path:
        table = TEMPLATE | {"storage_options": options | changed}
        return written(tmp_path / "s3.toml", {"table": table, "fleet": {"prefix": at}, **BY_HAND})

    assert ok("status", config()) == f"no tables below {prefix}\n"
    ok("init", config(), "--table", "a")
    ok("init", config(), "--table", "b")
    assert list(json.loads(ok("status", config(), "--json"))) == ["a", "b"]
    listed = json.loads(ok("tables", config(), "--format", "json"))
    assert [(row["name"], row["location"]) for row in listed] == [(name, f"{prefix}/{name}.lance") for name in "ab"]
    for wrong in ({"secret_access_key": "wrong"}, {"at": "s3://memwal-absent/tables"}):
        for command in (["tables"], ["status"], ["config", "check"]):
            line = refused(*command, config(**wrong))
            assert "s3://" in line
