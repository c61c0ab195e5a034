"""Daemons of a table are replaced one by one by daemons of the next version, while rows are put continuously."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

import memwal
from memwal.flush.base.setup import STORAGE
from memwal.ingest import protocol
from memwal.ingest.protocol import OURS, Version
from memwal.ingest.service.rpc.connection import Connection
from tests import append_rows
from tests.cluster import ask, spread
from tests.conftest import SCRIPTS, Cli, OpenSmall, Running, SmallConfig, Start, Tree, WaitUntil
from tests.integration.test_router_daemons import REGIONS, Writers
from tests.messages import raises

NEXT, FAR = f"{OURS.major}.{OURS.minor + 1}", f"{OURS.major}.{OURS.minor + 2}"
Begin = Callable[..., Running]


@pytest.fixture
def fleet(tmp_path: Path, start: Start) -> tuple[list[str], Path, Begin]:
    """Return the endpoints of two daemons, their configuration, and a function that starts one with
    a protocol version.
    """
    endpoints = spread(2, REGIONS)
    config = append_rows.configured(
        tmp_path,
        str(tmp_path / "rows.lance"),
        regions={"count": REGIONS},
        daemon={"endpoints": endpoints, "http_port": 0},
        commit={"interval": "500ms"},
    )

    def begin(endpoint: str, version: str = str(OURS), **more: str) -> Running:
        env = {"MEMWAL__DAEMON__PORT": endpoint.rpartition(":")[2], **more}
        return start([sys.executable, str(SCRIPTS / "other_protocol.py"), version, "serve", str(config)], env=env)

    return endpoints, config, begin


def owned(endpoint: str) -> set[str]:
    return set(ask(endpoint, "regions")["regions"])


def test_two_daemons_are_upgraded_one_after_another_and_taken_back(
    fleet: tuple[list[str], Path, Begin], tmp_path: Path, cli: Cli, wait_until: WaitUntil
) -> None:
    """At the beginning the first daemon has just ended; the other one, of our version, has all regions."""
    endpoints, config, begin = fleet
    running = {endpoints[1]: begin(endpoints[1])}
    running[endpoints[1]].line_with("serving")
    with memwal.connect(endpoints) as table:
        writers = Writers(table, str(tmp_path / "rows.lance"))
        wait_until(writers.went_on())
        for endpoint, version in ((endpoints[0], NEXT), (endpoints[1], NEXT), (endpoints[0], str(OURS))):
            if endpoint in running:
                running[endpoint].process.send_signal(signal.SIGTERM)
                assert running[endpoint].wait() == 0
                wait_until(writers.went_on())  # at the other daemon, which has all regions
            running[endpoint] = begin(endpoint, version)
            running[endpoint].line_with("serving")  # the daemon has its share
            assert owned(endpoint)
            assert ask(endpoint, "regions")["protocol"] == version
            wait_until(writers.went_on())
        told = table.status()["versions"]
        writers.end()
        assert writers.problems == [], "no put and no stream failed"
        assert append_rows.counted(table) == writers.acked
        assert {endpoint: each["protocol"] for endpoint, each in told.items()} == {
            endpoints[0]: str(OURS),
            endpoints[1]: NEXT,
        }
        table.flush()
        table.commit()
        assert append_rows.counted(table, "committed") == writers.acked
    shown = cli("status", config).out
    assert f"protocol {OURS})" in shown
    assert f"protocol {NEXT})" in shown
    for each in running.values():
        each.process.send_signal(signal.SIGTERM)
    for each in running.values():
        assert each.wait() == 0
        assert not any("another" in line or "Traceback" in line for line in each.errors)
    append_rows.clean(str(tmp_path / "rows.lance"))


def test_a_daemon_that_is_two_versions_ahead_is_refused_in_one_line(
    fleet: tuple[list[str], Path, Begin], tmp_path: Path
) -> None:
    (first, second), _, begin = fleet
    serving = begin(first)
    url = serving.line_with("metrics, health and status at").rsplit(" ", 1)[1]
    serving.line_with("serving")
    before = owned(first)
    with memwal.connect(first) as table:
        table.put(append_rows.rows(range(10)))
        for ahead in (FAR, f"{OURS.major + 1}.0"):
            refused = begin(second, ahead)
            assert refused.wait() == 2
            (line,) = refused.errors
            assert line == (
                f"memwal: the daemon at {first} speaks protocol {OURS}, and this process {ahead}, which talks to "
                f"{protocol_range(ahead)}: upgrade the daemon at {first} first"
            )
        assert owned(first) == before, "it took nothing"
        table.put(append_rows.rows(range(10, 20)))
        assert append_rows.counted(table).total() == 20
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    assert f'protocol="{OURS}",storage="{STORAGE}",version="' in metrics
    with urllib.request.urlopen(f"{url}/health/readyz", timeout=60) as answer:
        assert json.load(answer)["ready"]


def test_a_daemon_with_another_token_ends_before_it_takes_anything(fleet: tuple[list[str], Path, Begin]) -> None:
    """Otherwise each daemon would treat the other one as silent, and take its regions."""
    (first, second), _, begin = fleet
    reference = {"MEMWAL__DAEMON__TOKEN": "env:OUR_TOKEN"}
    serving = begin(first, OUR_TOKEN="one of the two tokens", **reference)
    serving.line_with("serving")
    refused = begin(second, OUR_TOKEN="the other of the two tokens", **reference)
    assert refused.wait() == 2
    (line,) = refused.errors
    assert f"the daemon at {first} refuses the call: missing or wrong token" in line
    serving.process.send_signal(signal.SIGTERM)
    assert serving.wait() == 0
    assert not any("fence" in line for line in serving.errors), "it took nothing"


def protocol_range(version: str) -> str:
    major, minor = map(int, version.split("."))
    return f"{major}.{max(0, minor - 1)} to {major}.{minor + 1}"


def test_clients_of_the_next_version_are_served_and_later_ones_refused(
    fleet: tuple[list[str], Path, Begin], monkeypatch: pytest.MonkeyPatch
) -> None:
    (endpoint, _), _, begin = fleet
    begin(endpoint).line_with("serving")
    monkeypatch.setattr(protocol, "OURS", Version(OURS.major, OURS.minor + 1))
    with memwal.connect(endpoint) as table:
        table.put(append_rows.rows(range(10)), token="loader:1")
        assert table.count() == 10
        connection = Connection(endpoint)
        with pytest.raises(memwal.Invalid) as unknown:
            connection.act("compress")
        assert str(unknown.value) == (
            f"the daemon does not know the operation 'compress': it speaks protocol {OURS} and the caller {NEXT}; "
            "upgrade the daemon first"
        )
        with raises(memwal.Invalid):
            connection.act("count", {"level": "latest", "newest": True, "needs": ["newest"]})
        assert connection.act("count", {"level": "latest", "hint": True}) == 10
        connection.close()

        monkeypatch.setattr(protocol, "OURS", Version(OURS.major, OURS.minor + 2))
        for call in (lambda: table.put(append_rows.rows([10])), table.count, table.status, table.flush):
            with raises(memwal.Invalid):
                call()  # though it already has a connection
    with raises(memwal.Invalid) as refused:
        memwal.connect(endpoint)
    assert str(refused.value).endswith(f"upgrade the daemon at {endpoint} first")
    monkeypatch.setattr(protocol, "OURS", OURS)
    with memwal.connect(endpoint) as table:
        assert table.count() == 10, "what was refused had no effect"


def test_a_client_of_a_fleet_is_told_which_daemon_to_upgrade(
    fleet: tuple[list[str], Path, Begin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client can talk to one of the two daemons, but not to the other one."""
    (first, second), _, begin = fleet
    begin(first).line_with("serving")
    begin(second, NEXT).line_with("serving")
    with memwal.connect([first, second]) as table:
        table.put(append_rows.rows(range(40)))
    monkeypatch.setattr(protocol, "OURS", Version(OURS.major, OURS.minor + 2))
    with pytest.raises(memwal.Invalid, match=f"upgrade the daemon at {first} first"):
        memwal.connect([first, second]).put(append_rows.rows(range(40)))


def test_a_table_of_a_newer_storage_is_refused_before_anything_is_written(
    small_config: SmallConfig, open_small: OpenSmall, made: Any, uri: str, cli: Cli, tree: Tree
) -> None:
    with open_small() as table:
        table.put(made.rows(range(8)))
    lance.dataset(uri).update_schema_metadata({"memwal:storage": "3"})
    before, config = tree(Path(uri)), small_config()
    told = "the table has storage version 3, and this memwal reads and writes 2 and below: upgrade memwal here first"
    for command in (("serve",), ("status",), ("flush",), ("commit",), ("pause",), ("query", "--limit", "1")):
        ran = cli(command[0], config, *command[1:])
        assert (ran.code, ran.error_lines) == (2, [f"memwal: {told}"]), command
    with raises(memwal.Invalid):
        memwal.open(uri)
    assert tree(Path(uri)) == before
    lance.dataset(uri).update_schema_metadata({"memwal:storage": "1"})
    with open_small() as table:
        assert table.count() == 8
