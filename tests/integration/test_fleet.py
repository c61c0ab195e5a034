"""Two daemons of a fleet, as processes: tables are opened when they are used, move, and are closed when idle."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.ingest.errors import Invalid, MemWalError, Unavailable
from memwal.wal import bucket_region
from tests.conftest import Running, Start, serve_with, toml
from tests.messages import raises
from tests.s3_server import free_ports

REGION = bucket_region(0)
IDLE_AFTER = 2.0


class FleetProcesses:
    """The daemons of one fleet on a local disk."""

    def __init__(self, start: Start, at: Path, **sections: Any) -> None:
        self.prefix, self._start, self._at = at / "tables", start, at
        self.prefix.mkdir(exist_ok=True)
        self.endpoints = [f"grpc://127.0.0.1:{port}" for port in free_ports(2)]
        self._sections = {
            "table": {"key": ["id"], "columns": {"id": "int64", "v": "int64"}},
            "fleet": {"prefix": str(self.prefix), "idle_after": f"{IDLE_AFTER}s"},
            "commit": {"interval": "500ms"},
            **sections,
        }
        self.running: dict[str, Running] = {}
        for endpoint in self.endpoints:
            self.begin(endpoint)

    def begin(self, endpoint: str) -> None:
        """Start the daemon of `endpoint`; return once it serves."""
        port = int(endpoint.rpartition(":")[2])
        config = self._at / f"{port}.toml"
        config.write_text(toml({**self._sections, "daemon": {"port": port, "endpoints": self.endpoints}}))
        self.running[endpoint], _ = serve_with(self._start, config)

    def connect(self, name: str, *, create: bool = False) -> Any:
        """Return a client of one table."""
        return memwal.connect(self.endpoints, table=name, create=create)

    def told(self, name: str) -> dict[str, Any]:
        """Return the entry of a table in `memwal.tables`."""
        return next(table for table in memwal.tables(self.endpoints) if table["name"] == name)

    def epoch(self, name: str) -> int:
        """Return the writer epoch of the table's region on storage."""
        newest = wal.ManifestStore(wal.open_store(str(self.prefix / f"{name}.lance")), REGION).latest()
        assert newest is not None
        return newest.writer_epoch

    def until_idle(self, *names: str) -> None:
        """Return when no daemon has one of the tables open."""
        until(lambda: all(self.told(name)["state"] == "idle" for name in names))


def until(condition: Callable[[], Any], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows(*ids: int, v: int = 0) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "v": pa.array([v] * len(ids), pa.int64())})


@pytest.fixture(scope="module")
def shared(start_for_module: Start, tmp_path_factory: pytest.TempPathFactory) -> FleetProcesses:
    return FleetProcesses(start_for_module, tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Callable[[int], list[str]]:
    """Return a function that returns names of tables that no other test uses."""
    return lambda count: [f"{request.node.name[:40].replace('[', '_').rstrip(']')}_{n}" for n in range(count)]


def test_tables_are_created_found_and_listed_by_name(shared: FleetProcesses, names: Callable[[int], list[str]]) -> None:
    clients = {name: shared.connect(name, create=True) for name in names(8)}
    owners = set[str]()
    for number, (name, client) in enumerate(clients.items()):
        client.put(rows(1, 2, v=number))
        told = shared.told(name)
        owners |= set(told["owners"].values())
        assert (told["state"], told["address"]) == ("serving", str(shared.prefix / f"{name}.lance"))
    for number, name in enumerate(clients):
        assert shared.connect(name, create=True).get([2]).to_pylist() == [{"id": 2, "v": number}]
    assert owners == set(shared.endpoints), "both daemons have a share of the tables, which have one region each"


def test_a_name_that_no_table_has(shared: FleetProcesses, names: Callable[[int], list[str]]) -> None:
    (name,) = names(1)
    shared.connect(name, create=True)
    with raises(Invalid):
        shared.connect(name[:-1] + "1")
    with pytest.raises(Invalid, match="several tables"):
        memwal.connect(shared.endpoints)
    for wrong in ("", "../x", "a b", ".hidden", "x" * 200):
        with raises(Invalid):
            shared.connect(wrong, create=True)
    assert not [each for each in shared.prefix.parent.rglob("x*") if each.is_dir()]


def test_an_idle_table_is_released_read_without_a_claim_and_claimed_by_the_next_put(
    shared: FleetProcesses, names: Callable[[int], list[str]]
) -> None:
    (name,) = names(1)
    client = shared.connect(name, create=True)
    client.put(rows(1, 2, 3))
    epoch = shared.epoch(name)
    shared.until_idle(name)
    for _ in range(3):
        assert client.count() == 3
        assert client.get([2]).num_rows == 1
    assert shared.told(name)["owners"] == {}
    assert shared.epoch(name) == epoch, "a read claims nothing"
    client.put(rows(4))
    assert shared.epoch(name) == epoch + 1
    assert client.count() == 4
    shared.until_idle(name)
    assert client.count() == 4


def test_a_program_is_refused_while_a_daemon_of_the_fleet_has_the_table(
    shared: FleetProcesses, names: Callable[[int], list[str]]
) -> None:
    (name,) = names(1)
    client, uri = shared.connect(name, create=True), str(shared.prefix / f"{name}.lance")
    client.put(rows(1))
    with pytest.raises(Unavailable, match="served by"):
        memwal.open(uri)
    assert memwal.connect(uri).count() == 1, "the owner's note names the daemon and the table"
    shared.until_idle(name)
    with memwal.open(uri) as table:
        table.put(rows(2))
    assert client.count() == 2


class Writer:
    """Puts rows into one table until `end`, and remembers the acknowledged ones."""

    def __init__(self, name: str, client: Any) -> None:
        self.name, self.client, self.acked, self.errors = name, client, list[int](), list[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                self.client.put(rows(number), token=f"writer:{number + 1}", timeout=60)
            except MemWalError as error:
                self.errors.append(str(error))
                return
            self.acked.append(number)
            number += 1
            time.sleep(0.01)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        assert self.errors == []
        found = self.client.scan(columns=["id"]).read_all().column("id").to_pylist()
        assert sorted(found) == self.acked, "the table has each acknowledged row once"


def continued(writers: list[Writer], puts: int) -> None:
    """Return when each writer has `puts` more acknowledged puts."""
    before = [len(writer.acked) for writer in writers]
    until(lambda: all(len(writer.acked) >= then + puts for writer, then in zip(writers, before, strict=True)))


@pytest.fixture
def fleet(start: Start, tmp_path: Path) -> FleetProcesses:
    return FleetProcesses(start, tmp_path)


@pytest.fixture
def writers(fleet: FleetProcesses) -> Iterator[list[Writer]]:
    """Yield writers of ten tables; each has acknowledged a row."""
    found = [Writer(name, fleet.connect(name, create=True)) for name in (f"t{number}" for number in range(10))]
    until(lambda: all(writer.acked for writer in found))
    yield found
    for writer in found:
        writer.end()


def test_no_row_is_lost_or_doubled_when_daemons_are_killed_and_started(
    fleet: FleetProcesses, writers: list[Writer]
) -> None:
    """Three kills in turn; the idle table of a killed daemon is served by the other one at its next use."""
    idle = fleet.connect("idle", create=True)
    idle.put(rows(*range(100)))
    fleet.until_idle("idle")
    for turn in range(3):
        killed = fleet.endpoints[turn % 2]
        fleet.running[killed].process.kill()
        fleet.running[killed].wait()
        continued(writers, 3)
        assert idle.count() == 100
        fleet.begin(killed)
        until(lambda: len({owner for writer in writers for owner in fleet.told(writer.name)["owners"].values()}) == 2)


def test_a_daemon_that_ends_hands_its_regions_over(fleet: FleetProcesses, writers: list[Writer]) -> None:
    ended = fleet.endpoints[0]
    fleet.running[ended].process.terminate()
    assert fleet.running[ended].wait() == 0
    assert {owner for writer in writers for owner in fleet.told(writer.name)["owners"].values()} == {fleet.endpoints[1]}
    assert fleet.running[ended].errors == []


def test_a_broken_table_is_reported_and_served_again_after_its_repair(
    fleet: FleetProcesses, writers: list[Writer]
) -> None:
    client = fleet.connect("broken", create=True)
    client.put(rows(1))
    fleet.until_idle("broken")
    versions, away = fleet.prefix / "broken.lance/_versions", fleet.prefix.parent / "away"
    shutil.move(versions, away)
    with pytest.raises(MemWalError):
        fleet.connect("broken").count()
    told = fleet.told("broken")
    assert (told["state"], told["error"] is not None) == ("broken", True)
    continued(writers, 1)
    shutil.move(away, versions)
    time.sleep(1.5)
    assert fleet.connect("broken").count() == 1
