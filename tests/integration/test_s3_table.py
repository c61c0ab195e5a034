"""A table on S3: everything that a user does with a table, on a real server."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lance
import pyarrow.parquet as pq
import pytest

import memwal
from memwal import wal
from tests import fault_proxy as faults
from tests.conftest import INDEXES, SCHEMA, Cli, Start, small_sections, toml
from tests.messages import raises

LEVELS = ("committed", "flushed", "durable", "latest")
QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
SECRETS = {"S3_KEY": "access_key_id", "S3_SECRET": "secret_access_key"}


@pytest.fixture
def open_s3() -> Iterator[Callable[..., Any]]:
    """Open the small table at an `S3Table`, creating it at the first call; the fixture closes open
    tables at the end.
    """
    opened = []

    def open_table(at: Any, *, regions: int = 2, **sections: Any) -> Any:
        settings = {**QUIET, **sections}
        uri, options = at
        table = memwal.open(
            uri,
            schema=SCHEMA,
            key="id",
            indexes=INDEXES,
            regions=regions,
            storage_options=options,
            settings=settings,
            take_over=bool(opened),
        )
        opened.append(table)
        return table

    yield open_table
    for table in opened:
        with suppress(memwal.MemWalError):  # fenced, or its storage fails
            table.close()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, str | None]]]:
    """Write the configuration of the small table on S3; return it with the environment of its secrets."""

    def write(at: Any, **changes: Mapping[str, Any]) -> tuple[Path, dict[str, str | None]]:
        uri, options = at
        sections = small_sections(uri)
        references = {option: f"env:{name}" for name, option in SECRETS.items()}
        sections["table"]["storage_options"] = {**options, **references}
        for section, values in (*QUIET.items(), *changes.items()):
            sections.setdefault(section, {}).update(values)
        path = tmp_path / "s3.toml"
        path.write_text(toml(sections))
        return path, {name: options[option] for name, option in SECRETS.items()}

    return write


def ids(rows: Any) -> list[int]:
    return sorted(rows.column("id").to_pylist())


def serve_on(start: Start, path: Path, env: Mapping[str, str | None]) -> tuple[Any, str]:
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(path)], env=env)
    return running, running.line_with("serving").rsplit(" ", 1)[1]


# ---- one table -------------------------------------------------------------------------------------------------------


def test_every_read_at_every_level_then_flush_and_commit(open_s3: Callable[..., Any], s3_table: Any, made: Any) -> None:
    table = open_s3(s3_table)
    table.put(made.table(range(300)))
    table.flush()
    table.commit()
    table.put(made.rows([1], 1))  # flushed, but not committed
    table.flush()
    table.put(made.rows([2], 1))  # in the log
    table.delete([3])
    table.put(made.rows([4], 1), durable=False)  # in memory for a while
    seen = {level: table.get([1, 2, 3], ["id", "name"], level=level).to_pylist() for level in LEVELS}
    names = {level: [row["name"] for row in rows] for level, rows in seen.items()}
    assert names["committed"] == ["row 1 v0", "row 2 v0", "row 3 v0"]
    assert names["flushed"] == ["row 1 v1", "row 2 v0", "row 3 v0"]
    assert names["durable"] == names["latest"] == ["row 1 v1", "row 2 v1"]
    assert table.get([4], ["name"]).to_pylist() == [{"name": "row 4 v1"}]
    for level in LEVELS:
        assert table.scan(["id"], level=level).read_all().num_rows == (
            300 if level in ("committed", "flushed") else 299
        )
        nearest = table.search("vector", made.row(9)["vector"], 1, columns=["id"], level=level)
        assert ids(nearest) == [9]
        word = made.row(9)["body"].split()[0]
        assert 9 in ids(table.match("body", word, 300, columns=["id"], level=level))
    table.flush()
    table.commit()
    base = lance.dataset(s3_table.uri, storage_options=s3_table.storage_options)
    assert base.count_rows() == 299
    assert base.to_table(filter="id IN (1, 2, 4)").column("name").to_pylist() == ["row 1 v1", "row 2 v1", "row 4 v1"]


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_the_commands_work_on_s3(cli: Cli, start: Start, config: Callable[..., Any], s3_table: Any, made: Any) -> None:
    path, env = config(s3_table)
    made_now = cli("init", path, env=env)
    assert (made_now.code, made_now.error_lines) == (0, [])
    assert f"created {s3_table.uri}" in made_now.out
    running, endpoint = serve_on(start, path, env)
    with memwal.connect(endpoint) as remote:
        remote.put(made.rows(range(30)))
        remote.flush()
        remote.put(made.rows([30]))
        assert remote.count() == 31
    asked = json.loads(cli("query", path, "--filter", "id >= 29", "--format", "json", env=env).out)
    assert sorted(row["id"] for row in asked) == [29, 30]
    status = json.loads(cli("status", path, "--json", env=env).out)
    assert status["table"] == s3_table.uri
    assert {region["owner"] for region in status["regions"]} != {None}
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    assert [line for line in running.errors if line] == []
    region = status["regions"][0]["id"]
    alone = json.loads(cli("query", path, "--key", "30", "--format", "json", env=env).out)
    assert [row["name"] for row in alone] == ["row 30 v0"]
    for below, said in (("", "base version"), (f"/_mem_wal/{region}", "write-ahead log")):
        shown = cli("inspect", f"{s3_table.uri}{below}", "--config", path, env=env)
        assert (shown.code, said in shown.out) == (0, True), shown.err
    nothing = cli("inspect", f"{s3_table.uri}/_mem_wal/nothing", "--config", path, env=env)
    assert (nothing.code, len(nothing.error_lines)) == (2, 1)


def test_run_streams_into_s3(cli: Cli, config: Callable[..., Any], s3_table: Any, made: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(made.table(range(50)), tmp_path / "in" / "one.parquet")
    source = {"path": str(tmp_path / "in")}
    path, env = config(s3_table, source=source)
    refused = cli("run", path, "--once", env=env)
    assert refused.code == 2
    assert re.search(r"^memwal: sink.checkpoint is not set.*local directory", refused.error_lines[0])
    path, env = config(s3_table, source=source, sink={"checkpoint": str(tmp_path / "checkpoint")})
    ran = cli("run", path, "--once", env=env, process=True)
    assert ran.code == 0, ran.err
    assert lance.dataset(s3_table.uri, storage_options=s3_table.storage_options).count_rows() == 50


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"access_key_id": "AKIAWRONG"}, 2, "InvalidAccessKeyId.*access_key_id"),
        ({"secret_access_key": "wrong-secret-words"}, 2, "SignatureDoesNotMatch.*secret_access_key"),
        ({"uri": "s3://nobody-made-this/t.lance"}, 2, "NoSuchBucket.*create it or correct table.uri"),
        ({"endpoint": "http://127.0.0.1:1"}, 1, "at http://127.0.0.1:1: no connection"),
        ({"allow_http": "false"}, 2, 'allow it with allow_http = "true"'),
        ({"regoin": "x"}, 2, "did you mean region"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_mistakes_are_told_in_one_line_without_secrets(
    cli: Cli,
    config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    s3_table: Any,
    change: dict[str, str],
    code: int,
    said: str,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(wal.SystemClock, "sleep", lambda _, seconds: pauses.append(seconds))
    options = s3_table.storage_options | {name: value for name, value in change.items() if name != "uri"}
    path, env = config((change.get("uri", s3_table.uri), options))
    for name in ("init", "serve"):
        ran = cli(name, path, env=env)
        assert (ran.code, len(ran.error_lines)) == (code, 1), ran.err
        assert re.search(said, ran.error_lines[0])
        assert options["secret_access_key"] not in ran.out + ran.err
        assert pauses == [], "asking again does not mend a mistake, and a daemon that starts tells at once"


# ---- requests to storage ---------------------------------------------------------------------------------------------


def test_an_idle_region_makes_no_request(
    open_s3: Callable[..., Any], s3_table_through_proxy: Any, fault_proxy: Any, made: Any
) -> None:
    """A durable put of an idle region does not wait for a timer: it makes one request at once."""
    table = open_s3(s3_table_through_proxy, regions=1, wal={"linger_max": "1h"})
    table.put(made.rows(range(10)))
    assert fault_proxy.falls_silent(3.0)
    for id in (11, 12):
        table.put(made.rows([id]))
    assert [(each.method, "/wal/" in each.key) for each in fault_proxy.requests] == [("PUT", True)] * 2


def test_puts_of_a_busy_region_are_bounded_by_round_trips(
    open_s3: Callable[..., Any], s3_table_through_proxy: Any, fault_proxy: Any, made: Any
) -> None:
    table = open_s3(s3_table_through_proxy, regions=1)
    round_trip, callers, each = 0.1, 64, 5
    fault_proxy.inject(faults.slow(round_trip), method="PUT", key="/wal/", times=None)
    fault_proxy.forget()
    everyone = [threading.Thread(target=_put_one_by_one, args=(table, made, n, each)) for n in range(callers)]
    for caller in everyone:
        caller.start()
    for caller in everyone:
        caller.join()
    sent = [request for request in fault_proxy.requests if request.method == "PUT" and "/wal/" in request.key]
    assert all(later.at > one.at + 0.9 * round_trip for one, later in pairwise(sent))  # one at a time
    assert len(sent) <= callers * each / 4  # callers share entries
    fault_proxy.heal()
    assert table.count() == callers * each


def _put_one_by_one(table: Any, made: Any, caller: int, count: int) -> None:
    for number in range(count):
        table.put(made.rows([caller * 1000 + number]))


def test_a_region_changes_hands_in_few_requests_one_after_the_other(
    open_s3: Callable[..., Any], s3_table_through_proxy: Any, fault_proxy: Any, made: Any
) -> None:
    table = open_s3(s3_table_through_proxy, regions=1)
    for number in range(3):
        table.put(made.rows([number]))
    (region,) = table.base.regions
    before = table.before_claim(region)  # while it still has an owner
    table.release(region)
    fault_proxy.forget()
    table.acquire(region, before)
    assert _asked(fault_proxy) == {
        ("LIST", "wal"): 1,
        # The hint, the newest manifest, none after it; after each of the two writes, the manifest before it must still
        # exist.
        ("GET", "manifest"): 5,
        ("PUT", "manifest"): 3,  # the epoch, the sentinel's position, the hint
        ("PUT", "owner.json"): 1,
        ("GET", "wal"): 4,  # the newest entry, then all entries, several at once
        ("PUT", "wal"): 1,
    }
    assert table.count() == 3


def test_a_claimer_that_was_told_makes_few_requests(
    open_s3: Callable[..., Any], s3_table_through_proxy: Any, fault_proxy: Any, made: Any
) -> None:
    table = open_s3(s3_table_through_proxy, regions=1)
    for number in range(3):
        table.put(made.rows([number]))
    (region,) = table.base.regions
    before = table.before_claim(region)
    _, released = table.give(region)
    fault_proxy.forget()
    table.acquire(region, replace(before, released=released))
    assert _asked(fault_proxy) == {
        ("GET", "manifest"): 2,  # after each of the two writes, the manifest before it must still exist
        ("PUT", "manifest"): 3,
        ("PUT", "owner.json"): 1,
        ("GET", "wal"): 4,  # in parallel
        ("PUT", "wal"): 1,
    }
    assert table.count() == 3


def _asked(fault_proxy: Any) -> Mapping[tuple[str, str], int]:
    """Return the number of requests by method and kind of object of a region."""
    return Counter((each.method, each.key.split("/")[4]) for each in fault_proxy.requests)


def test_storage_that_fails_is_asked_a_bounded_number_of_times(
    open_s3: Callable[..., Any], s3_table_through_proxy: Any, fault_proxy: Any, made: Any
) -> None:
    limits = {"put_timeout": "10s", "retry_budget": "12500ms"}  # one immediate answer, and 2.5 s of retries
    table = open_s3(s3_table_through_proxy, regions=1, wal=limits)
    table.put(made.rows(range(5)))
    fault_proxy.inject(faults.answers(503, "SlowDown"), times=None)
    fault_proxy.forget()
    with pytest.raises(memwal.UnknownOutcome):
        table.put(made.rows([5]))
    asked = len(fault_proxy.requests)
    assert 2 <= asked <= 12
    with raises(memwal.MemWalError):
        table.put(made.rows([6]))
    fault_proxy.heal()
    again = open_s3(s3_table_through_proxy, regions=1)
    assert set(range(5)) <= set(ids(again.scan(["id"]).read_all()))


@pytest.mark.usefixtures("retries_at_once")
def test_a_read_while_storage_is_down_is_unavailable_and_not_corrupt(
    open_s3: Callable[..., Any], s3_table_through_proxy: Any, fault_proxy: Any, made: Any
) -> None:
    options = s3_table_through_proxy.storage_options | {"client_max_retries": "0", "download_retry_count": "0"}
    table = open_s3((s3_table_through_proxy.uri, options))
    table.put(made.rows(range(300)))
    table.flush()
    fault_proxy.inject(faults.answers(503, "SlowDown"), times=None)
    for level in ("committed", "flushed"):
        with pytest.raises(memwal.Unavailable):
            table.scan(["id"], level=level)
    fault_proxy.heal()
    assert table.count(level="flushed") == 300


def test_lance_commits_by_conditional_puts_too(s3_table_through_proxy: Any, fault_proxy: Any, made: Any) -> None:
    """Two commits of one version: storage decides, and not the order of arrival; the loser gets an error and commits
    the next version.
    """
    uri, options = s3_table_through_proxy
    lance.write_dataset(made.table(range(3)), uri, storage_options=options)
    fault_proxy.inject(faults.answers(412, "PreconditionFailed"), method="PUT", key="_versions/", times=1)
    lance.write_dataset(made.table(range(3, 6)), uri, mode="append", storage_options=options)
    assert fault_proxy.count("PUT", "_versions/") >= 3
    assert lance.dataset(uri, storage_options=options).count_rows() == 6
