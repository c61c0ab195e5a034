"""`memwal log` and `memwal verify` as a user runs them, on a local disk and on S3."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import lance
import pytest

import memwal
from memwal.flush.history.actions import read_history
from memwal.flush.verification.runner import verify_table
from memwal.ingest.cli import backup as cli_backup
from memwal.ingest.cli import log as cli_log
from memwal.ingest.cli.command import Call, CommandConsole
from memwal.ingest.settings.load import load
from memwal.wal import open_store
from tests.conftest import INDEXES, SCHEMA, Cli, SmallConfig

QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def fill(table: Any, made: Any) -> None:
    """Make two commits, the second with deletes, then a flush and a WAL tail."""
    table.put(made.table(range(30)))
    table.flush()
    table.commit()
    table.put(made.table(range(25, 40), 1))
    table.delete([0, 1])
    table.flush()
    table.commit()
    table.put(made.table(range(35, 45), 2))
    table.flush()
    table.put(made.table([50], 3))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, made: Any) -> Path:
    path = tmp_path_factory.mktemp("filled") / "table.lance"
    with memwal.open(path, schema=SCHEMA, key="id", indexes=INDEXES, regions=2, settings=QUIET) as table:
        fill(table, made)
    return path


@pytest.fixture
def config(filled: Path, uri: str, small_config: SmallConfig) -> Path:
    """Return the configuration of a copy of the filled table."""
    shutil.copytree(filled, uri)
    return small_config()


# ---- log -----------------------------------------------------------------------------------------------------------


def test_log_tells_every_version_newest_first(cli: Cli, config: Path, uri: str) -> None:
    ran = cli("log", config)
    assert (ran.code, ran.err) == (0, "")
    lines = [line for line in ran.out.splitlines() if line[:8].strip().isdigit()]
    newest = lance.dataset(uri).version
    assert [int(line.split()[0]) for line in lines] == list(range(newest, 0, -1))
    (commit,) = (at for at, line in enumerate(lines) if "insert 10, update 5 rows; commit generation" in line)
    assert "regions 0–1" in lines[commit]
    assert f"delete 2 rows; first half of the commit in version {newest - commit}" in lines[commit + 1]
    assert "create the table: id, name, price, body, vector" in lines[-1]


@pytest.mark.parametrize("width", [80, 120])
def test_log_fits_the_terminal(config: Path, uri: str, width: int) -> None:
    text = io.StringIO()
    call = Call(load(config, {}), {}, CommandConsole(file=text, width=width))
    cli_log.show_log(call, limit=50, as_json=False)
    lines = text.getvalue().replace(uri, "uri").splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text.getvalue()


def test_log_as_json_and_with_a_limit(cli: Cli, config: Path, uri: str) -> None:
    ran = cli("log", config, "--json", "--limit", "3")
    told = json.loads(ran.out)
    assert (ran.code, len(told["versions"])) == (0, 3)
    assert told["older"] == lance.dataset(uri).version - 3
    everything = json.loads(cli("log", config, "--json").out)["versions"]
    committed = [each for version in everything for each in version["actions"] if each["action"] == "commit"]
    assert {each["name"] for each in committed} == {"region 0", "region 1"}
    assert {(each["first"], each["last"]) for each in committed} >= {(1, 1)}
    assert [each["version"] for each in everything] == sorted((each["version"] for each in everything), reverse=True)
    assert {"time", "rows", "fragments", "bytes", "operation", "part_of"} <= everything[0].keys()
    assert "older versions; --limit" in cli("log", config, "--limit", "3").out


def test_diff_counts_and_names_keys(cli: Cli, config: Path, uri: str) -> None:
    versions = json.loads(cli("log", config, "--json").out)["versions"]
    before = next(each["version"] for each in versions if each["rows"] == 30)
    ran = cli("log", config, "--diff", before, lance.dataset(uri).version, "--keys", "3", "--json")
    told = json.loads(ran.out)
    assert ran.code == 0
    assert {name: told[name] for name in ("added", "removed", "changed", "same")} == {
        "added": 10,
        "removed": 2,
        "changed": 5,
        "same": 23,
    }
    assert sorted(each["id"] for each in told["keys"]["removed"]) == [0, 1]
    assert len(told["keys"]["added"]) == 3
    shown = cli("log", config, "--diff", before, lance.dataset(uri).version, "--keys", "1").out
    assert "changed columns: name (5)" in shown
    assert ", …" in shown
    assert "keys" not in cli("log", config, "--diff", before, before).out


@pytest.mark.parametrize("command", [["log"], ["log", "--diff", "1", "2"], ["verify"]])
def test_a_table_that_is_not_there_is_one_line_and_exit_code_2(
    cli: Cli, small_config: SmallConfig, command: list[str], uri: str
) -> None:
    ran = cli(command[0], small_config(), *command[1:])
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"memwal: {uri}: no Lance table is there; correct table.uri\n"
    assert not Path(uri).exists()


def test_a_version_that_is_not_kept_is_one_line_and_exit_code_2(cli: Cli, config: Path, uri: str) -> None:
    ran = cli("log", config, "--diff", "1", "99")
    newest = lance.dataset(uri).version
    assert (ran.code, ran.err) == (2, f"memwal: version 99 of {uri} does not exist; existing versions: 1–{newest}\n")


# ---- verify --------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_table(cli: Cli, config: Path) -> None:
    ran = cli("verify", config)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("clean: version ")
    assert "no rows read (--deep reads them)" in ran.out
    ran = cli("verify", config, "--deep")
    assert (ran.code, "--deep" in ran.out) == (0, False)
    told = json.loads(cli("verify", config, "--json").out)
    assert (told["clean"], told["findings"], told["regions"]) == (True, [], 2)


def test_verify_of_a_damaged_table_says_what_where_and_how_to_mend_it(cli: Cli, config: Path, uri: str) -> None:
    filter_file = next(Path(uri).glob("_mem_wal/*/*_gen_3/bloom_filter.bin"))
    filter_file.unlink()
    ran = cli("verify", config)
    assert (ran.code, ran.err) == (1, "")
    first, summary = ran.out.splitlines()
    where = filter_file.relative_to(uri)
    assert first == f"bloom  {where}: it is missing; restore the directory from a backup"
    assert summary.startswith("1 finding: version ")
    told = json.loads(cli("verify", config, "--json").out)
    assert told["clean"] is False
    assert told["findings"] == [
        {
            "check": "bloom",
            "where": str(where),
            "what": "it is missing",
            "remedy": "restore the directory from a backup",
        }
    ]


def test_verify_shows_its_progress_on_a_terminal_alone(config: Path) -> None:
    def shown(terminal: bool) -> str:
        text = io.StringIO()
        call = Call(load(config, {}), {}, CommandConsole(file=text, force_terminal=terminal, width=120))
        assert cli_backup.verify(call, deep=True, as_json=False) == 0
        return text.getvalue()

    assert "checking" in shown(terminal=True)
    assert len(shown(terminal=False).splitlines()) == 1


# ---- S3 ------------------------------------------------------------------------------------------------------------


def test_a_table_on_s3_is_clean_and_tells_its_history(s3_table: Any, made: Any) -> None:
    uri, options = s3_table
    arguments: dict[str, Any] = {"schema": SCHEMA, "key": "id", "indexes": {"price": "btree"}, "settings": QUIET}
    with memwal.open(uri, regions=1, storage_options=options, **arguments) as table:
        fill(table, made)
        store = open_store(uri, options)
        assert verify_table(store, uri, deep=True).findings == ()
    history = read_history(store)
    told = [(each.kind, each.details.get("rows")) for change in history.changes for each in change.actions or ()]
    assert [each for each in told if each[0] in ("insert", "update", "delete")] == [
        ("insert", 10),
        ("update", 5),
        ("delete", 2),
        ("insert", 30),
    ]
    sst = next(key for key in store.list("_mem_wal/") if key.endswith("_gen_3/_pk_index/page_lookup.lance"))
    store.delete(sst)
    assert [each.where for each in verify_table(store, uri, deep=True).findings] == [sst]
