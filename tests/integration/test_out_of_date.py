"""Clients and owners that have not heard of a resize, of a newer owner, or of another table at their address."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush import resize
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.engine.region.writer import RegionWriter
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.refusals import expect_routing
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.settings.load import Settings, load
from memwal.memtable import TOMBSTONE
from memwal.wal import LocalStore, SystemClock, SystemIds
from tests.messages import raises
from tests.opened import open_table
from tests.support.clock import FakeClock

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
QUIET = {"commit": {"interval": 0}, "gc": {"interval": 0}}


def opened(uri: str, regions: int | None = None, **table: str) -> Table:
    new = {"schema": SCHEMA, "key": "id", "regions": regions} if regions else {}
    return memwal.open(uri, settings={**QUIET, **({"table": table} if table else {})}, take_over=True, **new)


def send(table: Table, rows: pa.Table, regions: int | None = None) -> None:
    """Send a micro-batch as the sink's tasks do; with `regions`, only to that number of regions."""
    buckets = table.base.route(rows)
    for bucket, region in enumerate(table.base.regions[:regions]):
        part = rows.filter(pa.array(buckets == bucket))
        if part.num_rows:
            table.put_region(region, part, memwal.Token("query", 7), table.base.routing_version)


def shown(table: Table) -> dict[int, int]:
    return {row["id"]: row["n"] for row in table.scan().read_all().to_pylist()}


def test_a_micro_batch_with_deletes_that_a_resize_met_half_applied_is_completed(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    gone = pa.array([id % 3 == 0 for id in range(40)])
    rows = pa.table({"id": list(range(40)), "n": [None if id % 3 == 0 else 2 for id in range(40)], TOMBSTONE: gone})
    with opened(uri, 2) as table:
        table.put([{"id": id, "n": 1} for id in range(50)])
        send(table, rows, regions=1)
    resized(uri, 3)
    with opened(uri) as table:
        for _ in range(2):
            send(table, rows)
            assert shown(table) == {id: 1 if id >= 40 else 2 for id in range(50) if id >= 40 or id % 3}


@pytest.mark.parametrize("rules", [{"upsert": "insert"}, {"version": "n"}])
def test_a_put_that_changes_nothing_is_not_acked_by_an_owner_that_was_overtaken(
    tmp_path: Path, rules: dict[str, str]
) -> None:
    """The older owner finds the key, which the newer owner has deleted. If it acked the put, no owner would have the
    row.
    """
    uri = str(tmp_path / "t.lance")
    with opened(uri, 1, **rules) as older:
        older.put([{"id": 1, "n": 9}], token="b:1")
        with opened(uri) as newer:
            newer.delete([1], token="b:2")
            with pytest.raises(memwal.FencedError):
                older.put([{"id": 1, "n": 3}], token="b:3")
            assert newer.put([{"id": 1, "n": 3}], token="b:3").skipped == 0
            assert shown(newer) == {1: 3}


def served_by_two(settings: Settings, ends: ExitStack) -> list[FlightService]:
    """Serve the table by two daemons, each with every second of its regions."""
    places = [Place(), Place()]
    services = [
        FlightService(OneTable(open_share(settings, share, ends)), "grpc://127.0.0.1:0", place)
        for share, place in enumerate(places)
    ]
    for place, service in zip(places, services, strict=True):
        place.endpoint, place.endpoints = endpoint(service), list(map(endpoint, services))
        ends.callback(service.shutdown)
    return services


def endpoint(service: FlightService) -> str:
    return f"grpc://127.0.0.1:{service.port}"


def resized(uri: str, regions: int) -> None:
    resize(uri, {}, LocalStore(uri), regions, clock=FakeClock(), ids=SystemIds())


READS: dict[str, Callable[[Any], int]] = {
    "count": lambda client: client.count("id < 6"),
    "scan": lambda client: client.scan(["id"], filter="id < 6").read_all().num_rows,
    "get": lambda client: client.get(list(range(6))).num_rows,
}


def test_a_reader_that_missed_a_resize_is_not_given_half_of_the_rows(tmp_path: Path) -> None:
    """Regions keep their ids, so daemons restarted at their addresses have the regions that the client requests."""
    uri, settings = str(tmp_path / "t.lance"), load({"table": {"uri": str(tmp_path / "t.lance")}, **QUIET}, {})
    with opened(uri, 2) as table:
        table.put([{"id": id, "n": 1} for id in range(100)])
    with ExitStack() as ends:
        services = served_by_two(settings, ends)
        clients = {read: ends.enter_context(memwal.connect([*map(endpoint, services)])) for read in READS}
        assert {client.count() for client in clients.values()} == {100}
        for service in services:
            service.tables.table.close()
        resized(uri, 4)
        for bucket, service in enumerate(services):
            service.tables.table = open_share(settings, bucket, ends)
        for read, client in clients.items():
            assert READS[read](client) == 6, read


RESIZING = ("resized", "not_owner")
"""Reasons of a rejection by a daemon that has opened the resized table, and by one that is about to."""


def at_once(_table: RemoteTable, _attempts: Any, error: Exception, _seen: int) -> None:
    """Raise the error in place of another attempt."""
    raise error


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_owners_that_have_not_heard_of_a_resize_do_not_give_half_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal_format: str
) -> None:
    """Without a write the owners do not detect the loss of their claims; the client uses the previous routing."""
    uri, stored = str(tmp_path / "t.lance"), {"wal": {"format": wal_format}, **QUIET}
    settings = load({"table": {"uri": uri}, **stored}, {})
    with memwal.open(uri, settings=stored, schema=SCHEMA, key="id", regions=2) as table:
        table.put([{"id": id, "n": 1} for id in range(100)])
        table.flush()
        table.commit()
    with ExitStack() as ends:
        services = served_by_two(settings, ends)
        client = ends.enter_context(memwal.connect([*map(endpoint, services)]))
        assert client.count() == 100
        resized(uri, 4)
        monkeypatch.setattr(RemoteTable, "_before_next", at_once)
        for read in READS.values():
            with pytest.raises(memwal.Unavailable) as refused:
                read(client)
            assert refused.value.details["reason"] in RESIZING
        for service in services:  # the check that a daemon makes every second: here it opens the table anew
            assert service.tables.table.resizing.done() is not None


def test_a_read_that_a_daemon_begins_anew_under_is_of_the_regions_that_it_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resized table replaces the old one after the owner read the routing and before it read the regions."""
    uri, settings = str(tmp_path / "t.lance"), load({"table": {"uri": str(tmp_path / "t.lance")}, **QUIET}, {})
    with opened(uri, 2) as table:
        table.put([{"id": id, "n": 1} for id in range(100)])
    with ExitStack() as ends:
        service = FlightService(OneTable(open_share(settings, 0, ends)), "grpc://127.0.0.1:0")
        ends.callback(service.shutdown)
        connection = Connection(endpoint(service))
        region = str(service.tables.table.base.regions[0])
        asked = {"regions": [region], "routing": 1, "level": "latest", "filter": None}
        before = connection.read("count", asked)
        assert 0 < before < 100
        resized(uri, 4)
        anew = open_share(settings, 0, ends)

        def begins_anew(*routing: Any) -> None:
            expect_routing(*routing)
            service.tables.table = anew

        monkeypatch.setattr("memwal.ingest.engine.table.resize.expect_routing", begins_anew)
        with pytest.raises(memwal.Unavailable) as refused:
            connection.read("count", asked)
        assert refused.value.details["reason"] in RESIZING


@pytest.mark.parametrize("daemons", [1, 2])
def test_a_daemon_of_another_table_at_the_address_of_before_takes_and_shows_nothing(
    tmp_path: Path, wait_until: Callable[..., Any], daemons: int
) -> None:
    """Ports are reused, and the regions of all tables have the same ids."""
    with ExitStack() as ends:
        ours, theirs = (ends.enter_context(opened(str(tmp_path / name), 2)) for name in ("ours", "theirs"))
        place = Place()
        before = FlightService(OneTable(ours), "grpc://127.0.0.1:0", place)
        at = place.endpoint = endpoint(before)
        place.endpoints = [at, "grpc://127.0.0.1:1"][:daemons]
        client = ends.enter_context(memwal.connect(at))
        client.put([{"id": 1, "n": 1}])
        before.shutdown()
        after = wait_until(lambda: listening(theirs, at))
        ends.callback(after.shutdown)
        theirs.put([{"id": 1, "n": 2}])
        rows, token = pa.table({"id": [1, 2], "n": [3, 3]}, schema=SCHEMA), memwal.Token("query", 1)
        buckets = ours.base.route(rows)
        with pytest.raises(memwal.MemWalError):
            client.put(rows, token=token, timeout=0.5)
        with pytest.raises(memwal.MemWalError):
            client.open_stream(ours.base.regions[buckets[0]], token, timeout=0.5).finish()
        with raises(memwal.Unavailable):
            RemoteTable(at, id=ours.id)
        assert theirs.applied("query") == (None, None)
        assert shown(theirs) == {1: 2}
        with raises(memwal.Unavailable):
            client.router.connection(at).read("count", {"filter": None, "level": "latest"})
        with raises(memwal.Unavailable):
            client.router.connection(at).read("scan", {"level": "latest"})


def listening(table: Table, at: str) -> FlightService | None:
    """Return a service of `table` at `at`; None while the port is still in use."""
    try:
        return FlightService(OneTable(table), at)
    except OSError:
        return None


def test_a_stale_note_does_not_lead_to_another_tables_daemon(tmp_path: Path) -> None:
    """Both tables have the same region ids; the owner note of the first names the port of the second's daemon."""
    uris = [str(tmp_path / name) for name in ("a", "b")]
    with opened(uris[0], 2) as table:
        table.put([{"id": 1, "n": 0}])
    with ExitStack() as ends:
        other = ends.enter_context(opened(uris[1], 2))
        other.put([{"id": 1, "n": 1}])
        service = FlightService(OneTable(other), "grpc://127.0.0.1:0")
        ends.callback(service.shutdown)
        other.announce(endpoint(service))
        for bucket in range(2):
            owners.announce(LocalStore(uris[0]), wal.bucket_region(bucket), 2, endpoint(service))
        for number, uri in enumerate(uris):
            found = open_for_reading(Call(load({"table": {"uri": uri}}, {}), {}))
            assert found.get([1])["n"].to_pylist() == [number]
            assert isinstance(found, RemoteTable) == bool(number)


class Jumping(SystemClock):
    """Clocks after a process was stopped, or after its machine was suspended, when the monotonic clock stood still."""

    def __init__(self, *, suspended: bool) -> None:
        self.ahead, self._suspended = 0.0, suspended

    def monotonic(self) -> float:
        return super().monotonic() + (0.0 if self._suspended else self.ahead)

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.mark.parametrize("suspended", [False, True])
def test_an_owner_that_slept_shows_no_rows_of_before_though_its_balancer_woke_first(
    tmp_path: Path, wait_until: Callable[..., Any], suspended: bool
) -> None:
    uri, clock = str(tmp_path / "t.lance"), Jumping(suspended=suspended)
    with opened(uri, 1) as asleep:
        asleep.put([{"id": 1, "n": 1}])
        balancer = Balancer("grpc://127.0.0.1:1", ["grpc://127.0.0.1:1"], clock)
        balancer.serve(asleep)
        balancer.start(asleep.identity["table"])
        try:
            with opened(uri) as newer:
                newer.put([{"id": 1, "n": 2}])
                clock.ahead = 30.0
                woke = clock.now()
                wait_until(lambda: balancer._stepped[1] > woke)
                with suppress(memwal.Unavailable, memwal.FencedError):  # unless the owner has taken the region back
                    assert asleep.get([1])["n"].to_pylist() == [2]
        finally:
            balancer.stop()


def test_an_owner_that_slept_and_cannot_look_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, clock = str(tmp_path / "t.lance"), Jumping(suspended=False)
    with opened(uri, 1) as asleep:
        asleep.put([{"id": 1, "n": 1}])
        Balancer("grpc://127.0.0.1:1", ["grpc://127.0.0.1:1"], clock).serve(asleep)
        with opened(uri) as newer:
            newer.put([{"id": 1, "n": 2}])
            clock.ahead = 30.0
            with monkeypatch.context() as away:
                away.setattr(RegionWriter, "refresh", storage_is_away)
                for _ in range(2):
                    with raises(memwal.Unavailable):
                        asleep.get([1])
            with pytest.raises((memwal.Unavailable, memwal.FencedError)):
                asleep.get([1])
            assert shown(newer) == {1: 2}


def storage_is_away(_: RegionWriter) -> None:
    raise wal.StoreUnavailable("storage is away")


def open_share(settings: Settings, share: int, ends: ExitStack) -> Table:
    """Open the table with every second of its regions, starting at number `share`."""
    table = ends.enter_context(open_table(settings, {}, claim=False))
    for region in table.base.regions[share::2]:
        table.acquire(region)
    return table
