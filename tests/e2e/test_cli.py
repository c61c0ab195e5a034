"""The `memwal` command as a user types it, without Spark: init, status, query, inspect, config."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memwal
from tests.conftest import environment


@pytest.fixture
def filled(open_small: Callable[..., Any], small_config: Callable[..., Path], made: Any) -> tuple[Path, dict[int, Any]]:
    """Return the configuration of a table without an owner, and the table's rows by id.

    Some rows are committed, some are only flushed, some are only in the log.
    """
    with open_small() as table:
        table.put(made.table(range(30)))
        table.flush()
        table.commit()
        table.put(made.table(range(25, 40), 1))
        table.flush()
        table.put(made.table(range(35, 45), 2))
        table.delete([0, 26, 36])
    versions = dict.fromkeys(range(30), 0) | dict.fromkeys(range(25, 40), 1) | dict.fromkeys(range(35, 45), 2)
    return small_config(), {id: made.row(id, v) for id, v in versions.items() if id not in (0, 26, 36)}


@pytest.fixture
def query(cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]]) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that returns the rows of `memwal query CONFIG … --format json`."""

    def ask(*arguments: str) -> list[dict[str, Any]]:
        ran = cli("query", filled[0], *arguments, "--format", "json")
        assert (ran.code, ran.err) == (0, "")
        return printed(ran.out)

    return ask


def printed(text: str) -> list[dict[str, Any]]:
    """Parse a JSON list of rows. Vectors are printed with the shortest text of each number that gives the same
    float32."""
    rows: list[dict[str, Any]] = json.loads(text)
    vectors = {"vector": lambda row: np.array(row["vector"], np.float32).tolist()}
    return [row | {name: of(row) for name, of in vectors.items() if name in row} for row in rows]


def by_id(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the rows by key; assert that no key occurs twice."""
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


# ---- init ----------------------------------------------------------------------------------------------------------


def test_init_creates_the_table_once_and_says_what_it_did(
    cli: Callable[..., Any], small_config: Callable[..., Path], uri: str
) -> None:
    config = small_config(regions={"count": 3})
    first = cli("init", config)
    assert (first.code, first.err) == (0, "")
    for fact in ("created", uri, "5 columns", "key id", "3 regions", "vector (ivf_pq)", "body (fts)", "price (btree)"):
        assert fact in first.out
    before = {path: path.stat().st_mtime_ns for path in Path(uri).rglob("*")}
    second = cli("init", config)
    assert (second.code, second.err) == (0, "")
    assert "created" not in second.out
    assert {path: path.stat().st_mtime_ns for path in Path(uri).rglob("*")} == before
    with memwal.open(uri) as table:
        assert table.key == ("id",)
        assert len(table.status()["regions"]) == 3
    pending = cli("status", config)
    assert pending.code == 0
    assert "nothing pending" in pending.out


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, ("query", "CONFIG", "--limit", "99", "--format", "csv")),
        (0, ("status", "CONFIG")),
        (2, ("query", "CONFIG", "--level", "newest")),
        (1, ("inspect", "ENTRY")),
    ],
)
def test_a_process_of_its_own_says_what_the_fixture_says(
    cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]], uri: str, code: int, words: tuple[str, ...]
) -> None:
    """The other tests run their commands in the process of the tests."""
    entry = next((Path(uri) / "_mem_wal").rglob("wal/*.lance"))
    if "ENTRY" in words:
        entry.write_bytes(entry.read_bytes()[:100])
    paths = {"CONFIG": filled[0], "ENTRY": entry}
    words = tuple(str(paths.get(word, word)) for word in words)
    here, there = cli(*words), cli(*words, process=True)
    assert there.code == code
    assert here == there


# ---- query ---------------------------------------------------------------------------------------------------------


def test_query_by_key(query: Callable[..., Any], filled: tuple[Path, dict[int, Any]]) -> None:
    rows = filled[1]
    assert by_id(query("--key", "3", "--key", "30", "--key", "40", "--key", "36", "--key", "999")) == {
        id: rows[id] for id in (3, 30, 40)
    }
    assert query("--key", "40", "--columns", "name, price") == [{"name": "row 40 v2", "price": rows[40]["price"]}]


def test_query_by_filter_and_limit(query: Callable[..., Any], filled: tuple[Path, dict[int, Any]]) -> None:
    rows = filled[1]
    wanted = {id: row for id, row in rows.items() if row["price"] < 400 and "v1" in row["name"]}
    assert by_id(query("--filter", "price < 400 AND name LIKE '%v1'", "--limit", "100")) == wanted
    assert by_id(query("--limit", "1000")) == rows
    assert len(query()) == 10


def test_query_by_level(query: Callable[..., Any], filled: tuple[Path, dict[int, Any]], made: Any) -> None:
    committed = {id: made.row(id) for id in range(30)}
    assert by_id(query("--limit", "99", "--level", "committed")) == committed
    flushed = committed | {id: made.row(id, 1) for id in range(25, 40)}
    assert by_id(query("--limit", "99", "--level", "flushed")) == flushed
    assert by_id(query("--limit", "99", "--level", "durable")) == filled[1]


def test_query_by_vector(query: Callable[..., Any], filled: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    rows = filled[1]
    vector = rows[38]["vector"]
    distance = {id: float(np.sum((np.float32(row["vector"]) - np.float32(vector)) ** 2)) for id, row in rows.items()}
    nearest = sorted(distance, key=lambda id: distance[id])
    file = tmp_path / "vector.json"
    file.write_text(json.dumps(vector))
    for way in (json.dumps(vector), f"@{file}", "key:38"):
        found = query("--near", f"vector={way}", "--limit", "4", "--columns", "id")
        assert [row["id"] for row in found] == nearest[:4], way
        assert [row["_distance"] for row in found] == pytest.approx([distance[id] for id in nearest[:4]], abs=1e-4)
    filtered = query("--near", "vector=key:38", "--limit", "3", "--filter", "price > 500", "--columns", "id")
    assert [row["id"] for row in filtered] == [id for id in nearest if rows[id]["price"] > 500][:3]


def test_query_by_words(query: Callable[..., Any], filled: tuple[Path, dict[int, Any]]) -> None:
    rows = filled[1]
    found = query("--match", "body=harbor", "--limit", "99")
    assert {row["id"] for row in found} == {id for id, row in rows.items() if "harbor" in row["body"]}
    assert [row["_score"] for row in found] == sorted((row["_score"] for row in found), reverse=True)


def test_query_by_several_columns_with_boosts_and_fuzzy_words(
    cli: Callable[..., Any], small_config: Callable[..., Path], uri: str, made: Any
) -> None:
    indexes = {"name": "fts", "body": "fts", "vector": "ivf_pq"}
    config = small_config(table={"indexes": indexes})
    rows = [
        made.row(1) | {"name": "harbor", "body": "old lights"},
        made.row(2) | {"name": "lights", "body": "of the harbor"},
        made.row(3) | {"name": "mountain", "body": "paths"},
    ]
    with memwal.open(uri, schema=made.schema, key="id", regions=1, indexes=indexes) as table:
        table.put(rows)

    def found(*arguments: str) -> list[int]:
        ran = cli("query", config, *arguments, "--format", "json")
        assert (ran.code, ran.err) == (0, "")
        return [row["id"] for row in json.loads(ran.out)]

    assert sorted(found("--match", "name,body=+harbor +lights")) == [1, 2]
    assert found("--match", "name^3,body=harbor") == [1, 2]
    assert found("--match", "name^0.1,body=harbor") == [2, 1]
    assert found("--match", "name^2=harbor") == [1]
    assert sorted(found("--match", "name,body^2=habor~")) == [1, 2]
    assert found("--match", "name=mountian~2") == [3]
    near = "vector=" + json.dumps(rows[2]["vector"])
    assert set(found("--near", near, "--match", "name,body=harbor", "--limit", "3")) == {1, 2, 3}


def test_query_prints_tables_and_csv(cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]]) -> None:
    config, rows = filled
    ran = cli("query", config, "--limit", "99", "--columns", "id,name,price", "--format", "csv")
    read = list(csv.DictReader(io.StringIO(ran.out)))
    assert {int(row["id"]): (row["name"], int(row["price"])) for row in read} == {
        id: (row["name"], row["price"]) for id, row in rows.items()
    }
    ran = cli("query", config, "--key", "40")
    assert (ran.code, ran.err) == (0, "")
    assert "row 40 v2" in ran.out
    assert "1 row" in ran.out
    assert rows[40]["body"] in ran.out


def test_query_asks_the_daemon_that_owns_the_table(
    cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]], serve: Callable[..., Any], made: Any
) -> None:
    """The query returns the rows in the owner's memory and, once the owner is killed, the rows on storage."""
    config, rows = filled
    running, endpoint = serve(config)
    memwal.connect(endpoint).put(made.rows([70], 7))
    status = json.loads(cli("status", config, "--json").out)
    assert all(region["owner"] for region in status["regions"])
    for alive in (True, False):
        ran = cli("query", config, "--limit", "99", "--format", "json")
        assert (ran.code, ran.err) == (0, "")
        assert by_id(printed(ran.out)) == rows | {70: made.row(70, 7)}, alive
        running.kill() if alive else None
    status = json.loads(cli("status", config, "--json").out)
    assert not any(region["owner"] for region in status["regions"])


BAD_QUERIES = {
    "level": (("--level", "newest"), ("newest", "latest")),
    "column": (("--columns", "prize"), ("prize", "price")),
    "filter": (("--filter", "prize = 3"), ("prize", "price")),
    "two questions": (("--key", "3", "--match", "body=x"), ("--key", "--match")),
    "vector": (("--near", "vector=[1, 2]"), ("vector", "2", "8")),
    "no number": (("--near", "vector=near"), ("--near",)),
    "no such row": (("--near", "vector=key:999"), ("999",)),
    "match form": (("--match", "harbor"), ("--match", "COLUMN=")),
    "match boost": (("--match", "body^x=harbor"), ("'x' is no number", "title^3,body=")),
    "match without boost": (("--match", "body^=harbor"), ("'' is no number",)),
    "match twice": (("--match", "body,body^2=harbor"), ("'body' is named twice",)),
    "match of nothing": (("--match", "body,,name=harbor"), ("no name",)),
    "match boost below zero": (("--match", "body^-1=harbor"), ("boost of column 'body'", "0.001")),
    "match boost nan": (("--match", "body^nan=harbor"), ("boost of column 'body'",)),
    "match unknown": (("--match", "body,bodi=harbor"), ("bodi", "body")),
    "format": (("--format", "xml"), ("xml", "json")),
    "option": (("--colums", "id"), ("--colums", "--columns")),
}


def test_bad_queries_are_one_line_and_exit_code_2(cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]]) -> None:
    for case, (arguments, named) in BAD_QUERIES.items():
        ran = cli("query", filled[0], *arguments)
        assert (ran.code, ran.out, len(ran.error_lines)) == (2, "", 1), f"{case}: {ran.err}"
        for name in named:
            assert name in ran.err, case


def test_a_table_that_is_not_there_says_how_to_make_it(
    cli: Callable[..., Any], small_config: Callable[..., Path], uri: str
) -> None:
    config = small_config()
    for command in ("query", "status"):
        ran = cli(command, config)
        assert (ran.code, ran.out, len(ran.error_lines)) == (2, "", 1)
        assert uri in ran.err
        assert "memwal init" in ran.err
    assert not Path(uri).exists()


# ---- status and inspect --------------------------------------------------------------------------------------------


def test_status_says_what_is_pending(cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]], uri: str) -> None:
    config, _ = filled
    status = json.loads(cli("status", config, "--json").out)
    assert (status["table"], status["rows"]) == (uri, 30)
    assert sum(region["memtable_rows"] for region in status["regions"]) == 13
    pending = [sst for region in status["regions"] for sst in region["ssts"] if not sst["committed"]]
    assert sum(sst["rows"] for sst in pending) == 15
    ran = cli("status", config)
    assert (ran.code, ran.err) == (0, "")
    assert "pending: 13 rows in memtables, 15 rows in 2 SSTs" in ran.out
    with memwal.open(uri) as table:
        table.flush()
        table.commit()
    assert "nothing pending" in cli("status", config).out
    status = json.loads(cli("status", config, "--json").out)
    assert status["rows"] == 42
    assert not [sst for region in status["regions"] for sst in region["ssts"] if not sst["committed"]]


def test_status_can_be_watched_until_interrupted(
    filled: tuple[Path, dict[int, Any]], start: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "status", str(filled[0]), "--watch"])
    wait_until(lambda: any("13 rows in memtables" in line for line in running.lines))
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130
    assert running.errors == []


def test_inspect_shows_every_kind_of_object(
    cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]], uri: str, tree: Callable[[Path], dict[str, int]]
) -> None:
    before = tree(Path(uri))
    region = next(path for path in (Path(uri) / "_mem_wal").iterdir() if (path / "wal").is_dir())
    manifest = max((region / "manifest").glob("*.binpb"), key=lambda path: path.name[::-1])
    entries = sorted((region / "wal").glob("*.lance"), key=lambda path: path.name.removesuffix(".lance")[::-1])
    sst = max(region.glob("*_gen_*"), key=lambda path: path.name.rsplit("_", 1)[1])
    paths = (Path(uri), region, manifest, entries[0], sst)
    shown = {path: cli("inspect", path) for path in paths}
    for path, ran in shown.items():
        assert (ran.code, ran.err) == (0, ""), path
    assert "writer epoch" in shown[manifest].out
    assert region.name in shown[manifest].out
    assert sst.name in shown[manifest].out
    assert "row " in shown[entries[0]].out
    assert " v0" in shown[entries[0]].out
    assert "generation" in shown[sst].out
    assert " v1" in shown[sst].out
    assert "bytes" in shown[sst].out
    assert str(len(entries)) in shown[region].out
    assert "30" in shown[Path(uri)].out
    assert tree(Path(uri)) == before


def test_inspect_refuses_what_it_does_not_know(
    cli: Callable[..., Any], filled: tuple[Path, dict[int, Any]], uri: str, tmp_path: Path
) -> None:
    entry = next((Path(uri) / "_mem_wal").rglob("wal/*.lance"))
    entry.write_bytes(entry.read_bytes()[:100])
    for path, code, named in (
        (tmp_path / "missing", 2, "missing"),
        (filled[0], 2, "config.toml"),
        (entry, 1, "position"),
    ):
        ran = cli("inspect", path)
        assert (ran.code, ran.out, len(ran.error_lines)) == (code, "", 1), ran.err
        assert named in ran.err


# ---- config --------------------------------------------------------------------------------------------------------


def test_config_show_prints_everything_but_secrets(
    cli: Callable[..., Any], small_config: Callable[..., Path], tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2-from-file")
    options = {
        "region": "eu-west-1",
        "secret_access_key": "hunter2-literal",
        "access_key_id": "env:MEMWAL_TEST_KEY",
        "session_token": f"file:{secret}",
    }
    config = small_config(table={"storage_options": options})
    environ = {"MEMWAL_TEST_KEY": "hunter2-from-env", "MEMWAL__WAL__LINGER_MAX": "70ms"}
    ran = cli("config", "show", config, env=environ)
    assert (ran.code, ran.err) == (0, "")
    assert "hunter2" not in ran.out
    for shown in ("eu-west-1", "env:MEMWAL_TEST_KEY", 'linger_max = "70ms"', 'interval = "0s"', "rows_max = 1000000"):
        assert shown in ran.out
    checked = cli("config", "check", config, env=environ)
    assert (checked.code, checked.err) == (0, "")
    assert "hunter2" not in checked.out
    bad = cli("config", "check", small_config("bad.toml", table={"storage_options": options | {"region": 5}}))
    assert bad.code == 2
    assert "hunter2" not in bad.err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["re"], ["resume", "restore", "regions"]),
        (["query", "orders.toml", "--lev"], ["--level"]),
        (["config", "s"], ["show"]),
    ],
)
def test_the_shell_completes_commands_and_options(words: list[str], found: list[str]) -> None:
    """Request completions as the script of `--show-completion bash` does, under the program name that users type."""
    asked = {
        "_MEMWAL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["memwal", *words]),
        "COMP_CWORD": str(len(words)),
    }
    program = Path(sys.executable).with_name("memwal")
    ran = subprocess.run([program], env=environment(asked), capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == found
