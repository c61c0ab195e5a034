"""The decision whether the owner that a note names lives: pure, from the note, this process and a daemon's answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.engine.table import owner_notes
from memwal.ingest.engine.table.live_owners import (
    Claimant,
    LiveOwners,
    Owner,
    can_be_asked,
    endpoint_to_ask,
    judge,
    noted_owners,
)
from memwal.ingest.engine.table.owner_notes import Note, Process
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.service.open import asking
from memwal.ingest.settings.load import load
from memwal.wal import bucket_region, open_store
from memwal.wal.layout import owner_key
from tests.messages import raises

HERE = Process.here()
GONE = replace(HERE, started="1")
AWAY = Process("elsewhere", "m", "b", "s", 12, "1")
AT = "grpc://10.0.0.7:5000"
SILENT = Unavailable("does not answer", {"reason": "lost"})
ID = "the table"


def owner(process: Process | None, endpoint: str = AT, *, daemon: bool = True, epoch: int = 3) -> Owner:
    return Owner(endpoint, daemon, process, {"r0": epoch})


def answer(**changes: Any) -> dict[str, Any]:
    return {"id": ID, "regions": {"r0": 3}, "claiming": [], "draining": False, "endpoints": [AT]} | changes


@pytest.fixture
def living() -> Any:
    """Yield another process of this machine, and its name in a note."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = open(f"/proc/{process.pid}/stat").read()  # noqa: PTH123, SIM115
    yield process, replace(HERE, pid=process.pid, started=stat.rpartition(")")[2].split()[19])
    process.kill()
    process.wait()


def test_a_process_that_was_killed_and_not_waited_for_does_not_run(living: Any) -> None:
    process, named = living
    assert named.runs(HERE) is True
    os.kill(process.pid, 9)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert named.runs(HERE) is False


@pytest.mark.parametrize(
    ("process", "runs"),
    [
        (HERE, True),
        (GONE, False),  # the same process id, started at another time
        (AWAY, None),
        (replace(HERE, space="the container before it was started again"), False),
        (replace(HERE, space="another container", host="of another name"), None),
        (replace(HERE, boot="before"), False if HERE.machine else None),
        (replace(HERE, boot="before", machine="another machine of this name"), None),
    ],
)
def test_a_process_runs_if_this_machine_can_say_so(process: Process, runs: bool | None) -> None:
    assert process.runs(HERE) is runs


def test_a_process_that_the_system_does_not_show_may_run(
    living: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case if /proc is mounted with hidepid and the owner belongs to another user."""
    _, named = living
    monkeypatch.setattr(owner_notes, "_PROC", tmp_path)
    assert named.runs(HERE) is None
    assert replace(named, pid=2**22 + 1).runs(HERE) is False


def test_a_process_is_written_into_a_note_and_read_again() -> None:
    assert Process.of(asdict(HERE)) == HERE
    assert Process.of({"pid": 1}) is None
    assert Process.of(None) is None


@pytest.mark.parametrize(
    ("who", "said", "state"),
    [
        (owner(HERE), answer(), "free"),
        (owner(GONE), None, "free"),
        (owner(AWAY), answer(), "lives"),
        (owner(AWAY), answer(regions={"r0": 4}), "lives"),
        (owner(AWAY), answer(regions={"r0": 2}), "free"),
        (owner(AWAY), answer(regions={}), "free"),
        (owner(AWAY), answer(regions={}, claiming=["r0"]), "lives"),
        (owner(AWAY), answer(id="another table"), "free"),
        (owner(AWAY), answer(draining=True), "ends"),
        (owner(AWAY), SILENT, "free"),
        (owner(AWAY), Invalid("no token", {"reason": "unauthenticated"}), "lives"),
        (owner(AWAY), Invalid("speaks protocol 7.0", {"reason": "protocol", "id": ID}), "lives"),
        (owner(AWAY), Invalid("speaks protocol 7.0", {"reason": "protocol", "id": "another"}), "free"),
        (owner(AWAY), Unavailable("no trust", {"untrusted": True}), "lives"),
        (owner(AWAY, "grpc://127.0.0.1:5000"), None, "unknown"),
        (owner(AWAY, "grpc://0.0.0.0:5000"), None, "unknown"),
        (owner(AWAY, "", daemon=False), None, "unknown"),
        (owner(None), answer(), "lives"),
        (owner(None), SILENT, "free"),
    ],
)
def test_the_table_of_the_module(who: Owner, said: Any, state: str) -> None:
    assert can_be_asked(who, HERE) is (said is not None and who.process != HERE)
    assert judge(who, HERE, said, ID).state == state


def test_a_process_of_this_machine_that_does_not_answer_is_waited_for(living: Any) -> None:
    _, named = living
    assert judge(owner(named, "grpc://127.0.0.1:1"), HERE, SILENT, ID).state == "ends"
    assert judge(owner(named, "", daemon=False), HERE, None, ID).state == "lives"


def test_daemons_of_one_configuration_take_nothing_over_from_each_other() -> None:
    ours = ["grpc://10.0.0.7:5000", "grpc://10.0.0.8:5000"]
    assert judge(owner(AWAY), HERE, answer(), ID, ours).state == "free"
    of_before = owner(AWAY, "grpc://10.0.0.9:5000")
    told = answer(endpoints=[*ours, "grpc://10.0.0.9:5000"])
    assert judge(of_before, HERE, told, ID, ours).state == "free"
    assert judge(of_before, HERE, answer(endpoints=["grpc://10.0.0.9:5000"]), ID, ours).state == "lives"


def test_notes_are_gathered_by_owner_and_say_who_it_is() -> None:
    regions = [bucket_region(bucket) for bucket in range(3)]
    notes = {
        regions[0]: Note(3, AT, True, AWAY),
        regions[1]: Note(5, AT, True, AWAY),
        regions[2]: Note(2, "", False, AWAY),
    }
    daemon, program = noted_owners(notes)
    assert str(daemon) == f"served by {AT} (process 12 on elsewhere, writer epoch 5)"
    assert str(program) == "opened by process 12 on elsewhere (writer epoch 2)"
    assert daemon.epochs == {str(regions[0]): 3, str(regions[1]): 5}


@pytest.mark.parametrize(
    ("noted_as", "there"), [("grpc://0.0.0.0:7", "grpc://127.0.0.1:7"), (AT, AT), ("grpc+tls://h:1", "grpc+tls://h:1")]
)
def test_the_address_of_any_interface_is_asked_on_loopback(noted_as: str, there: str) -> None:
    assert endpoint_to_ask(noted_as) == there


def test_the_remedy_is_one_that_works() -> None:
    program, daemon = replace(owner(AWAY), endpoint="", daemon=False), owner(AWAY)
    assert Claimant().remedy_for(daemon) == "use connect(), or take_over=True"
    assert "read_only=True" in Claimant().remedy_for(program)
    assert "memwal serve --take-over" in Claimant(daemon=True).remedy_for(daemon)


def test_what_is_wrong_with_our_own_certificate_says_nothing_of_the_owner(tmp_path: Path) -> None:
    store, region = open_store(str(tmp_path)), bucket_region(0)
    note = {"epoch": 3, "daemon": True, "endpoint": AT, "process": asdict(AWAY)}
    store.put(owner_key(region), json.dumps(note).encode())
    settings = load(
        {"table": {"uri": str(tmp_path), "key": ["id"]}, "daemon": {"tls_ca": str(tmp_path / "none.pem")}}, {}
    )

    with raises(Invalid):
        LiveOwners("t", store, [region], ID, asking(settings, {})).find()
