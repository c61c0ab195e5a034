"""A resize keeps every row once and at its acknowledged version, at whichever step it is killed, and no writer can use
the old routing afterwards."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import lance
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush import BaseTable, ResizeReport, is_being_resized, resize
from memwal.flush.resizing import routing, steps
from memwal.flush.resizing.routing import routing_key
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table import open as opening
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.stored import status_from_storage
from memwal.wal import LocalStore, ManifestStore, RegionStatus, SystemIds
from tests.clean import assert_clean, assert_collected
from tests.conftest import wait_until
from tests.failure_matrix import FAULTS, WRITES, Call, FaultyStore, Killed
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.interpose import Once, killed_at

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
QUIET: dict[str, Any] = {"commit": {"interval": 0}, "gc": {"interval": 0}, "wal": {"retry_budget": "10s"}}


@dataclass
class Resized:
    """A table and the rows that it must hold, resized by another process."""

    uri: str
    wal_format: str = "lance"
    append: bool = False
    oracle: dict[int, int] = field(default_factory=dict)

    def open(self, regions: int | None = None) -> Table:
        new: dict[str, Any] = {"schema": SCHEMA, "key": () if self.append else "id"} if regions else {}
        settings = QUIET | {"wal": QUIET["wal"] | ({"format": self.wal_format} if regions else {})}
        return memwal.open(self.uri, regions=regions, settings=settings, **new)

    def put(self, table: Table, ids: range, n: int, token: str | None = None) -> bool:
        self.oracle |= dict.fromkeys(ids, n)
        return table.put([{"id": id, "n": n} for id in ids], token=token).applied

    def resize(self, buckets: int, store: wal.ObjectStore | None = None, **more: Any) -> ResizeReport:
        options = {"clock": FakeClock(), "ids": SystemIds(), "at_once": 1} | more
        return resize(self.uri, {}, store or self.store, buckets, **options)

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.uri)

    @property
    def base(self) -> BaseTable:
        return BaseTable.open(self.uri)

    def manifests(self) -> list[wal.RegionManifest]:
        found = (ManifestStore(self.store, region).latest() for region in wal.regions(self.store))
        return [each for each in found if each is not None]

    def expect(self, table: Table | None = None) -> None:
        """Assert that the base table, or a read of `table`, returns every expected row once."""
        rows = (lance.dataset(self.uri).to_table() if table is None else table.scan().read_all()).to_pylist()
        assert sorted((row["id"], row["n"]) for row in rows) == sorted(self.oracle.items())


def copied(world: Resized, to: Path) -> Resized:
    shutil.copytree(world.uri, to)
    return Resized(str(to), world.wal_format, world.append, dict(world.oracle))


def opened_once(path: Path, wal_format: str = "lance", *, append: bool = False) -> Resized:
    """Return a table of two regions with ten rows."""
    world = Resized(str(path / "table"), wal_format, append)
    with world.open(2) as table:
        world.put(table, range(10), 1, "a:1")
    return world


@pytest.fixture(params=["lance", "arrow", "append"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Resized:
    if request.param == "append":
        return Resized(str(tmp_path / "table"), append=True)
    return Resized(str(tmp_path / "table"), request.param)


def test_grown_shrunk_and_grown_again(world: Resized) -> None:
    with world.open(2) as table:
        world.put(table, range(50), 1, "a:1")
    n = 1
    for version, buckets in enumerate((5, 3, 1, 4), 2):
        before = world.base.buckets
        report = world.resize(buckets)
        assert (report.routing, report.before, report.regions) == (version, before, buckets)
        world.expect()
        assert (world.base.routing_version, world.base.buckets) == (version, buckets)
        assert_clean(world.store, world.uri)
        n += 1
        with world.open() as table:
            assert table.status()["routing"] == version
            assert len(table.status()["regions"]) == buckets
            assert not world.append or not world.put(table, range(50), 1, "a:1")
            world.put(table, range(100 * n, 100 * n + 40) if world.append else range(30 * n), n, f"a:{n}")
            world.expect(table)
            table.flush()
            table.commit()
        world.expect()
    sealed = {each.region_id for each in world.manifests() if each.status is RegionStatus.SEALED}
    assert sealed == {wal.bucket_region(4)}
    assert_collected(world.store, world.uri)


def test_a_long_map_is_in_snapshots_over_a_resize_and_what_was_retired_stays_so(world: Resized) -> None:
    """Without snapshots every sentinel of a resize would hold the whole map."""
    with patch("memwal.wal.applied._INLINE_MAX", 200), patch("memwal.wal.applied.NAMES_MAX", 60):
        with world.open(2) as table:
            for number in range(90):
                world.put(table, range(100 * number, 100 * number + 6), number, f"file {number:03}:1")
        world.resize(5)
        assert max(each.size for each in world.store.describe("_mem_wal/") if "/wal/" in each.key) < 20_000
        assert b'"retired"' in (world.store.get(routing_key(2)) or b"")
        world.expect()
        with world.open() as table:
            assert not world.put(table, range(8900, 8906), 89, "file 089:1")  # each row was applied
            with raises(memwal.Invalid):
                table.put([{"id": id, "n": 0} for id in range(6)], token="file 000:1")
            world.put(table, range(20_000, 20_040), 7, "file 090:1")
            world.expect(table)
        world.resize(2)
        world.expect()
        with world.open() as table, raises(memwal.Invalid):
            table.put([{"id": id, "n": 0} for id in range(6)], token="file 000:1")
        assert_clean(world.store, world.uri)


def test_no_more_bytes_of_logs_are_drained_at_once_than_memory_max(tmp_path: Path) -> None:
    world = Resized(str(tmp_path / "table"))
    with world.open(6) as table:
        world.put(table, range(3000), 1)
    held, most, lock = [0], [0], threading.Lock()

    def holding(change: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            answer = call(*args, **more)
            with lock:
                held[0] += change
                most[0] = max(most[0], held[0])
            return answer

        return counted

    size = max(each.size for each in world.store.describe("_mem_wal/") if "/wal/" in each.key)
    counted = SimpleNamespace(**vars(wal) | {"claim": holding(1, wal.claim)})
    with patch.object(steps, "wal", counted), patch.object(steps, "flush", holding(-1, steps.flush)):
        world.resize(3, at_once=6, memory_max=2 * size + 10)
    assert most[0] <= 2
    world.expect()


def test_the_sharding_spec_that_lance_reads_is_the_new_one(tmp_path: Path) -> None:
    world = Resized(str(tmp_path / "table"), "arrow")
    with world.open(2) as table:
        world.put(table, range(50), 1)
    world.resize(3)
    dataset = lance.dataset(world.uri)
    (spec,) = dataset.mem_wal_index_details()["sharding_specs"]
    assert (spec["spec_id"], spec["fields"][0]["parameters"]) == (2, {"num_buckets": "3"})
    region = world.base.regions[2]
    with dataset.mem_wal_writer(str(region)) as writer:  # Lance's writer continues the log of the region
        keys = [id for id in range(500, 600) if world.base.route(pa.table({"id": [id]}))[0] == 2]
        writer.put(pa.table({"id": keys, "n": [7] * len(keys)}, schema=dataset.schema))
    world.oracle |= dict.fromkeys(keys, 7)
    with world.open() as table:
        world.expect(table)
    world.resize(2)
    with raises(OSError):
        lance.dataset(world.uri).mem_wal_writer(str(region))
    world.expect()


# ---- killed, overtaken, beside writers -----------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path) -> Resized:
    """Return a table of two regions with rows in base, SSTs and log, and with a batch that one of the regions lacks."""
    world = Resized(str(tmp_path / "prepared"), append=True)
    with world.open(2) as table:
        world.put(table, range(20), 1, "a:1")
        table.flush()
        table.commit()
        world.put(table, range(20, 40), 1, "a:2")
        table.flush()
        world.put(table, range(40, 60), 1, "a:3")
        send(table, HALF, first_only=True)
    world.oracle |= dict.fromkeys(range(100, 130), 2)
    return world


HALF = pa.table({"id": list(range(100, 130)), "n": [2] * 30}, schema=SCHEMA)


def send(table: Table, rows: pa.Table, *, first_only: bool = False) -> int:
    """Send batch 7 of a query as its tasks do, or only the first task; return the number of regions that applied it."""
    buckets, applied = table.base.route(rows), 0
    for bucket, region in enumerate(table.base.regions[: 1 if first_only else None]):
        part = rows.filter(pa.array(buckets == bucket))
        if part.num_rows:
            ack = table.put_region(region, part, memwal.Token("query", 7), table.base.routing_version)
            applied += ack.applied
    return applied


def finished(world: Resized, buckets: int | None) -> None:
    """Recover as the next process does: resize to `buckets` unless that is None, then open and check the table."""
    assert_clean(world.store, world.uri, deep=False)
    if buckets is not None and world.base.buckets != buckets:
        world.resize(buckets)
    elif buckets is not None:
        with suppress(flush.InvalidResize):  # the killed resize had finished, or had not begun
            world.resize(buckets)
    with world.open() as table:
        for number, first in enumerate((0, 20, 40), 1):
            assert not table.put([{"id": first + id, "n": 1} for id in range(20)], token=f"a:{number}").applied
        send(table, HALF)
        assert send(table, HALF) == 0
        world.expect(table)
        world.put(table, range(200, 220), 3, "a:4")
        table.flush()
        table.commit()
    world.expect()
    assert_collected(world.store, world.uri)


def writes_of_a_resize(world: Resized) -> list[Call]:
    """Return the writes of a resize, without the version hints and the parts of an SST.

    The loss of a hint has no effect, and a separate test kills the resize between the parts of an SST.
    """
    store = FaultyStore(world.store, FakeClock())
    world.resize(3, store)
    calls = [call for call in dict.fromkeys(store.calls) if call.method in WRITES]
    return [call for call in calls if "hint" not in call.key and "_gen_" not in call.key]


@pytest.mark.usefixtures("only_process")
def test_killed_after_any_write_of_the_store(prepared: Resized, tmp_path: Path) -> None:
    calls = writes_of_a_resize(copied(prepared, tmp_path / "clean"))
    assert {call.key.split("/")[2] for call in calls} == {"manifest", "wal", "commits", "routing"}
    decision = next(number for number, call in enumerate(calls) if "/routing/" in call.key)
    for number, call in enumerate(calls):
        world = copied(prepared, tmp_path / str(number))
        store = FaultyStore(world.store, FakeClock())
        store.arm(FAULTS["killed after"], call)
        with pytest.raises(Killed):
            world.resize(3, store)
        assert world.base.buckets == (2 if number <= decision else 3)
        finished(world, (3, None if number >= decision else 2)[number % 2])
        shutil.rmtree(world.uri)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_killed_at_the_switch(tmp_path: Path, wal_format: str, after: bool) -> None:
    world = opened_once(tmp_path, wal_format)
    with killed_at(lance.LanceDataset, "commit", after=after):
        world.resize(3)
    assert (world.base.routing_version, world.base.buckets) == ((2, 3) if after else (1, 2))
    assert_clean(world.store, world.uri)
    with world.open() as table:
        assert len(table.status()["regions"]) == 3
        assert not table.put([{"id": 0, "n": 9}], token="a:1").applied
        world.expect(table)
    assert_clean(world.store, world.uri)


class Interrupted:
    """A store that runs `act` just before call number `at`."""

    def __init__(self, inner: wal.ObjectStore, at: int, act: Callable[[], Any]) -> None:
        self._inner, self._at, self._act, self.calls = inner, at, act, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in {"put_if_absent", "get", "list"}:
            return found

        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                self._act()
            return found(*args)

        return call


def test_two_resizes_at_once(prepared: Resized, tmp_path: Path) -> None:
    ends = set()
    for at in range(3, 400, 37):
        world = copied(prepared, tmp_path / str(at))
        other = Interrupted(world.store, at, partial(world.resize, 4))
        try:
            report = world.resize(3, cast("wal.ObjectStore", other))
            ends.add(report.regions)
            assert report.regions == 3
            # This resize ran alone, before the other one, or after it (the other one began before this one wrote).
            assert (world.base.routing_version, world.base.buckets) in ((2, 3), (3, 4), (3, 3))
        except flush.CommitConflict:
            ends.add(world.base.buckets)
            assert world.base.buckets == 4
        finished(world, world.base.buckets)
        shutil.rmtree(world.uri)
        if other.calls < at:
            break
    assert ends == {3, 4}


def test_beside_a_writer(tmp_path: Path) -> None:
    world, acked, stop = Resized(str(tmp_path / "table"), append=True), list[int](), threading.Event()
    world.open(2).close()

    def write() -> None:
        number = 0
        while not stop.is_set():
            with suppress(memwal.MemWalError), world.open() as table:
                while not stop.is_set():
                    rows = [{"id": 10 * number + each, "n": number} for each in range(10)]
                    table.put(rows, token=f"writer:{number}")  # repeat the put after any error
                    acked.append(number)
                    number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for buckets in (4, 1, 3):
            before = len(acked)
            wait_until(lambda before=before: len(acked) > before + 20)
            assert world.resize(buckets, clock=wal.SystemClock(), at_once=3).regions == buckets
        before = len(acked)
        wait_until(lambda: len(acked) > before + 20)
    finally:
        stop.set()
        writer.join()
    assert acked == list(range(len(acked)))
    with world.open() as table:
        found = sorted(row["id"] for row in table.scan().read_all().to_pylist())
        assert found == list(range(len(found)))  # each row once, and at most one put more than were acknowledged
        assert len(found) - 10 * len(acked) in (0, 10)
    assert_clean(world.store, world.uri)


def test_a_writer_that_was_open_is_told(tmp_path: Path) -> None:
    world = Resized(str(tmp_path / "table"))
    with world.open(2) as old:
        world.put(old, range(10), 1, "a:1")
        world.resize(3)
        with pytest.raises(memwal.FencedError):
            old.put([{"id": 1, "n": 9}])
        assert "routing version 2 holds, not 1" in str(old.resizing.done())
    with world.open() as table:
        assert table.resizing.done() is None
        with pytest.raises(memwal.Unavailable) as told:
            table.put_region(table.base.regions[0], HALF, memwal.Token("query", 7), 1)
        assert told.value.details == {"reason": "resized", "routing": 2}
        world.expect(table)


def test_a_table_read_before_the_resize_and_claimed_after_it(tmp_path: Path, once: Once) -> None:
    world = opened_once(tmp_path)
    once(opening, "find_or_create", lambda: world.resize(3), after=True)
    with world.open() as table:
        assert table.status()["routing"] == 2
        world.put(table, range(5, 40), 2, "a:2")
        world.expect(table)
    assert_clean(world.store, world.uri)


@pytest.mark.parametrize("buckets", [2, 0, 4097])
def test_a_number_that_cannot_be_had_fences_nobody(tmp_path: Path, buckets: int) -> None:
    world = Resized(str(tmp_path / "table"))
    with world.open(2) as table:
        with raises(flush.InvalidResize):
            world.resize(buckets)
        world.put(table, range(10), 1)
        world.expect(table)


def test_verify_tells_a_resize_that_broke_off_from_a_region_of_another_routing(tmp_path: Path) -> None:
    world = opened_once(tmp_path)
    before = world.base.version
    world.resize(3)
    assert_clean(world.store, world.uri)
    lance.dataset(world.uri, version=before).restore()  # the old routing, with the regions of the new one
    found = verify_table(world.store, world.uri).findings
    assert {each.check for each in found} >= {"routing"}
    assert "open for routing version 2, the table has version 1" in str(found[0]) + str(found[-1])
    with world.open() as table:  # opening the table restores the routing that was decided
        assert len(table.status()["regions"]) == 3


def broken_off(path: Path, *, append: bool = False) -> Resized:
    """Return the table of two regions after a resize to three that was killed before its decision."""
    world = opened_once(path, append=append)
    store = FaultyStore(world.store, FakeClock())
    store.arm(FAULTS["killed before"], Call("put_if_absent", routing_key(2), 1))
    with pytest.raises(Killed):
        world.resize(3, store)
    return world


def test_a_resize_that_broke_off_before_its_decision_is_waited_for_and_taken_back(tmp_path: Path) -> None:
    world = broken_off(tmp_path)
    assert_clean(world.store, world.uri)
    assert "sealed" in json.dumps(status_from_storage(world.base, world.store))
    with raises(memwal.Unavailable) as refused:
        memwal.open(world.uri, settings=QUIET | {"wal": {"retry_budget": "100ms", "put_timeout": "100ms"}})
    assert refused.value.details["reason"] == "resized"
    assert world.resize(2).regions == 2
    with world.open() as table:
        assert not world.put(table, range(10), 1, "a:1")
        world.expect(table)


def test_a_resize_that_broke_off_is_taken_back_though_a_column_was_dropped_since(tmp_path: Path) -> None:
    """The table routes by whole rows, so after the drop no row can be moved. Going back to two regions moves no row."""
    world = broken_off(tmp_path, append=True)
    lance.dataset(world.uri).drop_columns(["n"])
    with raises(flush.InvalidResize):
        world.resize(3)
    assert world.resize(2).regions == 2
    with world.open() as table:
        table.put([{"id": 10}])
        assert sorted(table.scan().read_all()["id"].to_pylist()) == list(range(11))
    with raises(flush.InvalidResize):
        world.resize(3)


def test_a_resize_that_broke_off_after_its_switch_is_finished_by_the_next(tmp_path: Path) -> None:
    world = opened_once(tmp_path)
    with killed_at(routing, "_open"):
        world.resize(3)
    assert is_being_resized(world.base, world.store, clock=FakeClock())
    report = world.resize(3)
    assert (report.resumed, report.regions, report.routing) == (True, 3, 2)
    assert not is_being_resized(world.base, world.store, clock=FakeClock())
    with world.open() as table:
        world.expect(table)


def test_a_switch_of_another_process_is_on_the_disk_before_a_region_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut may undo the switch, and regions would accept writes by a routing that the table lacks."""
    world = opened_once(tmp_path)
    with killed_at(lance.LanceDataset, "commit", after=True):
        world.resize(3)
    order: list[object] = []
    monkeypatch.setattr(routing, "sync_table", lambda dataset: order.append(dataset.version))
    claims = wal.claim

    def claiming(*args: Any, **more: Any) -> Any:
        order.append("opened")
        return claims(*args, **more)

    with patch.object(wal, "claim", claiming):
        assert world.resize(3).resumed
    assert order == [world.base.version, *["opened"] * 3]
    order.clear()
    with world.open() as table:
        world.expect(table)
    assert order == []
