"""A table is never taken over by accident: a process that opens it for writing first checks for live owners."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lancedb
import pytest

import memwal
from memwal import wal
from memwal.flush import resize
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.engine.table.owner_notes import Process
from memwal.wal.layout import owner_key
from tests.conftest import Cli, OpenSmall, Script, Serve, SmallConfig, Start, WaitUntil
from tests.messages import raises

SETTINGS = {"commit": {"interval": "0s"}}


def epochs(uri: str) -> list[int]:
    """Return the writer epoch of each region from storage."""
    store = wal.open_store(uri)
    manifests = [wal.ManifestStore(store, region).latest() for region in wal.regions(store)]
    return [manifest.writer_epoch for manifest in manifests if manifest is not None]


def test_a_daemon_that_serves_is_not_fenced_by_a_program(
    small_config: SmallConfig, serve: Serve, made: Any, uri: str
) -> None:
    _, endpoint = serve(small_config())
    with memwal.connect(endpoint) as table:
        table.put(made.rows(range(4)))
        before = epochs(uri)
        with raises(memwal.Unavailable) as told:
            memwal.open(uri, settings=SETTINGS)
        assert told.value.details == {"reason": "served", "endpoint": endpoint}
        assert epochs(uri) == before, "nothing was claimed"
        table.put(made.rows([5]))
    with memwal.open(uri, settings=SETTINGS, take_over=True) as taken:
        assert taken.count() == 5
        assert epochs(uri) == [epoch + 1 for epoch in before]


def test_a_table_that_is_open_in_another_program_is_not_fenced(script: Script, uri: str, open_small: OpenSmall) -> None:
    process = script("putter.py", uri, 1000)
    process.line_with("ready")
    process.tell("go")
    process.line_with('"ack": 2}')
    with raises(memwal.Unavailable):
        memwal.open(uri, settings=SETTINGS)
    process.kill()
    with memwal.open(uri, settings=SETTINGS) as table:
        assert table.count() >= 2, "what a crash left is claimed without a flag"


def test_a_table_that_was_closed_is_free(script: Script, uri: str) -> None:
    process = script("putter.py", uri, 1000)
    process.line_with("ready")
    process.tell("go")
    process.line_with('"ack": 2}')
    process.tell("stop")
    assert process.wait() == 0
    assert not list(Path(uri).glob("_mem_wal/*/owner.json"))
    memwal.open(uri, settings=SETTINGS).close()


def test_who_closes_while_another_claims_leaves_no_table_that_looks_free(
    open_small: OpenSmall, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note that a closing owner deletes may be its successor's, written after the owner read the note."""
    older, newer, get = open_small(), list[Any](), wal.LocalStore.get

    def read_then_sleep(store: wal.LocalStore, key: str) -> bytes | None:
        data = get(store, key)
        if key.endswith("/owner.json"):
            monkeypatch.undo()
            newer.append(open_small(take_over=True))
        return data

    monkeypatch.setattr(wal.LocalStore, "get", read_then_sleep)
    older.close()
    assert owners.read(wal.open_store(uri), newer[0].base.regions).keys() == set(newer[0].base.regions)
    with raises(memwal.Unavailable):
        memwal.open(uri, settings=SETTINGS)
    newer[0].upkeep.collect()
    here = Process.here()
    assert all(note.process == here for note in owners.read(wal.open_store(uri), newer[0].base.regions).values())
    newer[0].close()
    assert not list(Path(uri).glob("_mem_wal/*/owner.json"))


def test_who_closes_after_a_resize_leaves_no_note(open_small: OpenSmall, uri: str) -> None:
    """The newer claims are those of the resize, which does not serve the table."""
    older = open_small()
    resize(uri, None, wal.open_store(uri), 3, clock=wal.SystemClock(), ids=wal.SystemIds())
    with suppress(memwal.MemWalError):
        older.close()
    assert not list(Path(uri).glob("_mem_wal/*/owner.json"))
    open_small().close()


def test_an_owner_writes_its_note_again(open_small: OpenSmall, uri: str) -> None:
    """The owner replaces a missing note and one written by a former owner's late request, but not a
    newer owner's note.
    """
    table, store = open_small(regions=3), wal.open_store(uri)
    gone, older, newer = table.base.regions
    store.delete(owner_key(gone))
    owners.announce(store, older, 0)
    owners.announce(store, newer, 9, "grpc://127.0.0.1:1")
    table.upkeep.collect()
    assert [note.epoch for note in owners.read(store, (gone, older, newer)).values()] == [1, 1, 9]


def test_the_same_process_opens_its_table_again(open_small: OpenSmall, made: Any) -> None:
    first = open_small()
    first.put(made.rows(range(3)))
    second = open_small()
    assert second.count() == 3


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_that_ends_or_was_killed_is_followed_at_once(
    stop: int, small_config: SmallConfig, serve: Serve, made: Any, uri: str, wait_until: WaitUntil
) -> None:
    config = small_config()
    running, endpoint = serve(config)
    with memwal.connect(endpoint) as table:
        table.put(made.rows(range(4)))
    os.kill(running.process.pid, stop)  # the test does not wait for its end

    def opened() -> Any:
        with suppress(memwal.Unavailable):  # the daemon serves until it handles the signal
            return memwal.open(uri, settings=SETTINGS)

    with wait_until(opened) as table:
        assert table.count() == 4


def test_what_a_program_on_another_machine_holds_is_not_taken(open_small: OpenSmall, uri: str) -> None:
    open_small().close()
    store = wal.open_store(uri)
    there = {"host": "elsewhere", "machine": "m", "boot": "b", "space": "s", "pid": 12, "started": "1"}
    for region in wal.regions(store):
        store.put(f"_mem_wal/{region}/owner.json", json.dumps({"epoch": 1, "daemon": False, "process": there}).encode())
    with raises(memwal.Unavailable):
        memwal.open(uri, settings=SETTINGS)
    memwal.open(uri, settings=SETTINGS, take_over=True).close()


def test_a_note_without_an_endpoint_is_no_daemons(script: Script, uri: str) -> None:
    process = script("putter.py", uri, 1000)
    process.line_with("ready")
    process.tell("go")
    process.line_with('"ack": 2}')
    store = wal.open_store(uri)
    assert owners.find(store, wal.regions(store)) is None


def test_a_second_serve_says_what_it_would_do_and_does_it_when_told_to(
    small_config: SmallConfig, serve: Serve, start: Start, cli: Cli, made: Any, uri: str
) -> None:
    config = small_config()
    _first, endpoint = serve(config)
    with memwal.connect(endpoint) as table:
        table.put(made.rows(range(4)))
    before = epochs(uri)
    second = cli("serve", config)
    assert second.code == 1
    assert len(second.error_lines) == 1
    assert f"served by {endpoint}" in second.error_lines[0]
    assert "memwal serve --take-over" in second.error_lines[0]
    assert epochs(uri) == before, "nothing was claimed"
    third = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config), "--take-over"])
    taken = third.line_with("serving").rsplit(" ", 1)[1]
    assert taken != endpoint
    assert any("taking over what is served by" in line for line in third.errors)
    with memwal.connect(taken) as table:
        assert table.count() == 4
    assert epochs(uri) == [epoch + 1 for epoch in before]


def test_a_step_of_the_command_line_fences_no_program(
    script: Script, cli: Cli, uri: str, wait_until: WaitUntil
) -> None:
    process = script("putter.py", uri, 1000)
    process.line_with("ready")
    process.tell("go")
    process.line_with('"ack": 2}')
    config = Path(uri).parent / "flush.toml"
    config.write_text(f'[table]\nuri = "{uri}"\n')
    before = epochs(uri)
    # The program flushes every 20 entries: right after that there is nothing to flush, and no region is contacted.
    ran = wait_until(lambda: next((ran for ran in [cli("flush", config)] if "nothing to flush" not in ran.out), None))
    assert ran.code == 1, (ran, process.process.poll(), process.lines[-3:], process.errors[-3:])
    assert f"opened by process {process.process.pid}" in ran.error_lines[0]
    assert epochs(uri) == before


def serving(uri: str, endpoint: str) -> bool:
    """Return whether the daemon at `endpoint` owns every region with the newest epoch."""
    with suppress(memwal.MemWalError), memwal.connect(endpoint) as client:
        return sorted(client.identity["epochs"].values()) == sorted(epochs(uri))
    return False


def test_a_daemon_claims_again_what_a_writer_that_has_gone_took(
    small_config: SmallConfig, serve: Serve, made: Any, open_small: OpenSmall, uri: str, wait_until: WaitUntil
) -> None:
    _, endpoint = serve(small_config(daemon={"claim_again": "200ms"}))
    with memwal.connect(endpoint) as client:
        client.put(made.rows(range(4)), token="loader:1")
        with open_small(take_over=True) as thief:
            thief.put(made.rows([2], 1))
            with pytest.raises(memwal.FencedError):
                client.put(made.rows(range(4), 2), token="loader:2")
    wait_until(lambda: serving(uri, endpoint))
    with memwal.connect(endpoint) as client:
        client.put(made.rows(range(4, 6)), token="loader:3")
        found = {row["id"]: row["name"] for row in client.scan(["id", "name"]).read_all().to_pylist()}
    assert found == {id: f"row {id} v{int(id == 2)}" for id in range(6)}


@pytest.mark.parametrize("pause", ["0s", "200ms"])
def test_a_daemon_ends_where_the_writer_that_fenced_it_lives(
    pause: str, small_config: SmallConfig, watchful: Serve, open_small: OpenSmall, uri: str
) -> None:
    """No client writes: the daemon detects the fence by itself."""
    running, _ = watchful(small_config(daemon={"claim_again": pause}))
    thief = open_small(take_over=True)
    assert running.wait() == 1
    lines = [line for line in running.errors if line.startswith("memwal: ")]
    assert len(lines) == 1
    assert "was fenced by epoch 2, opened by process" in lines[0]
    assert thief.count() == 0


def test_a_lancedb_merge_insert_fences_the_daemon_for_a_while_only(
    small_config: SmallConfig, watchful: Serve, made: Any, uri: str, wait_until: WaitUntil
) -> None:
    """LanceDB writes into the regions of an `arrow` table by default, and leaves no note."""
    config = small_config(
        wal={"format": "arrow"}, daemon={"claim_again": "200ms"}, table={"indexes": {}}, regions={"count": 1}
    )
    _, endpoint = watchful(config)
    with memwal.connect(endpoint) as client:
        client.put(made.rows(range(4)))
        client.flush()
    theirs = lancedb.connect(str(Path(uri).parent)).open_table(Path(uri).stem)
    merge = theirs.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(made.table([2, 9], 1))
    taken = epochs(uri)
    assert taken == [2], "it claimed the region"
    wait_until(lambda: serving(uri, endpoint))
    assert epochs(uri) == [3]
    with memwal.connect(endpoint) as client:
        client.put(made.rows([10]))
        found = {row["id"]: row["name"] for row in client.scan(["id", "name"]).read_all().to_pylist()}
    assert found == {**{id: f"row {id} v0" for id in (0, 1, 3, 10)}, 2: "row 2 v1", 9: "row 9 v1"}
