"""`memwal flush` and `memwal commit`: with a daemon, without one, and with nothing to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

import memwal
from tests.conftest import Made, Ran

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(cli: Callable[..., Ran]) -> Command:
    """Run a command; return exit code, output, errors."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        ran = cli(*arguments)
        return ran.code, ran.out, ran.err

    return run


def test_flush_then_commit_without_a_daemon(
    command: Command, small_config: Callable[..., Path], open_small: Callable[..., Any], uri: str, made: Made
) -> None:
    config = small_config()
    with open_small() as table:
        table.put(made.rows(range(100)))
        table.flush()
        table.commit()
        table.put(made.rows(range(95, 110), 1))
        table.delete([0, 1])
    code, out, err = command("flush", config)
    assert (code, out, err) == (0, f"flushed 17 rows of {uri} (this process, because no daemon answers)\n", "")
    assert lance.dataset(uri).count_rows() == 100
    code, out, err = command("commit", config)
    assert (code, err) == (0, "")
    assert out.startswith("committed 2 SSTs of 2 regions as version")
    assert ": 10 rows inserted, 5 rows updated, 2 rows deleted; " in out
    assert re.search(r"; [0-9.]+ (bytes|kB) written to [1-9]\d* files? in [0-9.]+ s\n", out), out
    assert len(out.splitlines()) == 1
    assert lance.dataset(uri).count_rows() == 108
    epochs = [region["epoch"] for region in json.loads(command("status", config, "--json")[1])["regions"]]
    before = lance.dataset(uri).version
    assert command("flush", config)[1] == f"nothing to flush in {uri} (this process, because no daemon answers)\n"
    assert command("commit", config)[1] == f"nothing to commit: version {before} of {uri} has every flushed row\n"
    after = json.loads(command("status", config, "--json")[1])
    assert ([region["epoch"] for region in after["regions"]], after["base_version"]) == (epochs, before)


def test_the_report_of_a_commit_as_json(
    command: Command, small_config: Callable[..., Path], open_small: Callable[..., Any], uri: str, made: Made
) -> None:
    with open_small(regions=1) as table:
        for first in range(0, 100, 10):
            table.put(made.rows(range(first, first + 10)))
            table.flush()
    code, out, err = command("commit", small_config(), "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    counts = {name: report[name] for name in ("rows_inserted", "rows_updated", "rows_deleted", "ssts")}
    assert counts == {"rows_inserted": 100, "rows_updated": 0, "rows_deleted": 0, "ssts": 10}
    assert list(report["regions"].values()) == [10]
    assert (report["version"], report["seconds"] > 0) == (lance.dataset(uri).version, True)
    assert report["maintenance"] == []


def test_commit_maintains_the_base_table(
    command: Command, small_config: Callable[..., Path], open_small: Callable[..., Any], uri: str, made: Made
) -> None:
    off = {"optimize_interval": "0s", "compact_interval": "0s", "interval": "0s"}
    settings = {"commit": off}
    with memwal.open(uri, schema=made.schema, key="id", indexes={"price": "btree"}, settings=settings) as table:
        for first in range(0, 40, 5):
            table.put(made.rows(range(first, first + 5)))
            table.flush()
            table.commit()
    assert len(lance.dataset(uri).get_fragments()) == 8
    lines = command("commit", small_config(table={"indexes": {"price": "btree"}}))[1].splitlines()
    assert lines[0].startswith("nothing to commit")
    assert lines[1:] == ["index segments merged: price_idx", "fragments compacted: 8 into 1"]
    assert len(lance.dataset(uri).get_fragments()) == 1
    assert lance.dataset(uri).count_rows() == 40


def test_beside_a_daemon(
    command: Command, small_config: Callable[..., Path], serve: Callable[[Path], Any], uri: str, made: Made
) -> None:
    config = small_config()
    running, endpoint = serve(config)
    with memwal.connect(endpoint) as remote:
        remote.put(made.rows(range(30)))
        assert command("flush", config) == (0, f"flushed 30 rows of {uri} (the daemon at {endpoint})\n", "")
        assert command("commit", config)[1].startswith("committed 2 SSTs of 2 regions as version ")
        assert remote.count(level="committed") == 30
        remote.put(made.rows(range(25, 35), 1))  # the commands fenced no owner
        assert remote.count() == 35
        assert command("flush", config)[0] == command("commit", config)[0] == 0
        assert remote.count(level="committed") == 35
        assert command("delete", config, "--filter", "id < 10", "--dry-run")[1] == f"would delete 10 rows of {uri}\n"
        assert remote.count() == 35
        assert command("delete", config, "--filter", "id < 10") == (0, f"deleted 10 rows of {uri}\n", "")
        assert command("delete", config, "--key", "10") == (0, f"deleted 1 row of {uri}\n", "")
        assert remote.count() == 24
        assert {region["epoch"] for region in remote.status()["regions"]} == {1}
    assert running.process.poll() is None


def test_delete_without_a_daemon(
    command: Command, small_config: Callable[..., Path], open_small: Callable[..., Any], uri: str, made: Made
) -> None:
    config = small_config()
    with open_small() as table:
        table.put(made.rows(range(100)))
        table.flush()
        table.commit()
        table.put(made.rows(range(95, 110), 1))
    for options, said in (
        (("--filter", "id >= 97"), "deleted 13 rows"),
        (("--filter", "id >= 97"), "deleted 0 rows"),
        (("--key", "3", "--key", "4", "--key", "105"), "deleted 2 rows"),
        (("--key", "5"), "deleted 1 row"),
    ):
        missing = "; 1 key had no row" if "105" in options else ""
        would = said.replace("deleted", "would delete")
        for dry, text in ((["--dry-run"], would), ([], said)):
            assert command("delete", config, *options, *dry) == (0, f"{text} of {uri}{missing}\n", "")
    with open_small() as table:
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [0, 1, 2, *range(6, 97)]


def test_a_mistaken_delete_deletes_nothing(
    command: Command, small_config: Callable[..., Path], open_small: Callable[..., Any], made: Made
) -> None:
    config = small_config()
    with open_small() as table:
        table.put(made.rows(range(10)))
    for options, said in (
        ((), "--key or --filter"),
        (("--key", "1", "--filter", "id = 1"), "--key or --filter"),
        (("--key", "one"), "'id' is int64"),
        (("--filter", "prise > 3"), "did you mean 'price'"),
        (("--filter", "price >"), "price >"),
        (("--filter", ""), "filter ''"),
    ):
        code, out, err = command("delete", config, *options)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert said in err
    with open_small() as table:
        assert table.count() == 10


@pytest.mark.parametrize("name", ["flush", "commit"])
def test_mistakes_are_told_in_one_line(
    command: Command, small_config: Callable[..., Path], tmp_path: Path, tree: Callable[..., Any], name: str
) -> None:
    config = small_config()
    wrong = small_config("wrong.toml", commit={"intervall": "1s"})
    (tmp_path / "file").write_text("no table")
    other = small_config("other.toml", table={"uri": str(tmp_path / "file")})
    before = tree(tmp_path)
    for path, said in (
        (config, "the table does not exist; `memwal init`, `memwal load` or `memwal run` creates it"),
        (tmp_path / "absent.toml", "absent.toml"),
        (wrong, "intervall"),
        (other, "file"),
    ):
        code, out, err = command(name, path)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert said in err
    assert tree(tmp_path) == before
