"""A table whose regions are spread over several owners: each answers for its own regions, and together they answer for
all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from threading import Event
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import memwal
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.service.daemon.placement import TableRegion
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.standby import Standby
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.service.rpc.wire import from_flight
from memwal.ingest.settings.load import load
from tests.conftest import SmallConfig, WaitUntil
from tests.messages import raises
from tests.opened import open_table
from tests.raw_calls import message_from
from tests.ways import served

REGIONS = 4


@pytest.fixture
def owners(small_config: SmallConfig) -> Iterator[tuple[Table, Table]]:
    """Yield two owners of one table with four regions, none of them claimed yet."""
    settings = load(small_config(regions={"count": REGIONS}), {})
    one, other = (open_table(settings, {}, claim=False), open_table(settings, {}, claim=False))
    yield one, other
    one.close()
    other.close()


def share(owners: tuple[Table, Table]) -> None:
    for bucket, region in enumerate(owners[0].base.regions):
        owners[bucket % 2].acquire(region)


def put(owners: tuple[Table, Table], rows: pa.Table, *, delete: bool = False) -> None:
    """Send each owner the rows of its regions, like a router."""
    buckets = owners[0].base.route(rows)
    for half, owner in enumerate(owners):
        part = rows.filter(pa.array(buckets % 2 == half))
        if part.num_rows:
            owner.delete(part.select(["id"])) if delete else owner.put(part)


def halves(owners: tuple[Table, Table]) -> list[Any]:
    return [owner.only(list(map_regions(owner))) for owner in owners]


def map_regions(owner: Table) -> list[Any]:
    return [writer.region for writer in owner.regions.writers]


def reason(error: memwal.MemWalError) -> Any:
    return error.details.get("reason")


def test_a_row_of_a_region_elsewhere_is_refused_and_nothing_is_written(owners: tuple[Table, Table], made: Any) -> None:
    share(owners)
    with pytest.raises(memwal.Unavailable) as refused:
        owners[0].put(made.table(range(50)))
    assert reason(refused.value) == "not_owner"
    assert refused.value.details["region"] in map(str, map_regions(owners[1]))
    assert halves(owners)[0].count() == 0
    with raises(memwal.Unavailable):
        owners[0].scan()
    with raises(memwal.Unavailable):
        owners[0].only(map_regions(owners[1])).count()


@pytest.mark.parametrize("flush", [False, True])
def test_a_region_handed_over_takes_its_rows_along(owners: tuple[Table, Table], made: Any, flush: bool) -> None:
    one, other = owners
    share(owners)
    put(owners, made.table(range(60)))
    rows = made.table(range(60, 90))
    lingering = rows.filter(pa.array(one.base.route(rows) == 0))
    one.put(lingering, durable=False)
    region = one.base.regions[0]
    epoch = one.release(region, flush=flush)
    with pytest.raises(memwal.Unavailable) as refused:
        one.put(lingering)
    assert reason(refused.value) == "not_owner"
    assert other.acquire(region) == epoch + 1
    assert other.acquire(region) == epoch + 1  # it owns the region
    assert {region} < set(map_regions(other))
    first, second = halves(owners)
    assert first.count() + second.count() == 60 + lingering.num_rows
    other.put(lingering, token="again:1")
    assert second.count() + first.count() == 60 + lingering.num_rows


def test_a_call_for_a_region_that_is_coming_waits_for_it(
    owners: tuple[Table, Table], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.ingest.engine.table.regions.COMING_WITHIN", 90.0)
    one, other = owners
    share(owners)
    region = one.base.regions[0]
    rows = made.table(range(40))
    its = rows.filter(pa.array(one.base.route(rows) == 0))
    with ThreadPoolExecutor() as pool:
        with other.regions.expecting(region):
            coming = [pool.submit(other.put, its), pool.submit(other.only([region]).count)]
            one.release(region)
            other.acquire(region)
            assert coming[0].result().rows == its.num_rows
            assert coming[1].result() in (0, its.num_rows)
        monkeypatch.setattr("memwal.ingest.engine.table.regions.COMING_WITHIN", 0.01)
        with one.regions.expecting(region), pytest.raises(memwal.Unavailable) as refused:
            one.put(its)
    assert reason(refused.value) == "not_owner"


def test_what_takes_long_to_replay_is_flushed_when_a_region_changes_hands(
    owners: tuple[Table, Table], made: Any, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr("memwal.ingest.engine.table.regions.REPLAYED_ENTRIES", 5)
    one, other = owners
    region = one.base.regions[0]
    one.acquire(region)
    rows = made.table(range(40))
    its = rows.filter(pa.array(one.base.route(rows) == 0))
    for number in range(6):
        one.put(its, token=f"one:{number}")
    one.release(region)
    other.acquire(region)
    writer = other.regions.writer(region)
    assert (writer.unflushed_entries(), writer.published) == (1, [1]), "the sentinel of the claim is all that is left"
    for number in range(4):
        other.put(its, token=f"other:{number}")
    other.release(region)
    monkeypatch.setattr("memwal.ingest.engine.table.regions.FLUSHED_ENTRIES", 5)
    one.acquire(region)
    wait_until(lambda: one.regions.writer(region).published == [1, 2])
    assert one.only([region]).count() == its.num_rows


def test_what_the_next_owner_has_read_is_not_flushed_for_it(
    owners: tuple[Table, Table], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.ingest.engine.table.regions.REPLAYED_ENTRIES", 5)
    one, other = owners
    region = one.base.regions[0]
    one.acquire(region)
    rows = made.table(range(40))
    its = rows.filter(pa.array(one.base.route(rows) == 0))
    for number in range(6):
        one.put(its, token=f"one:{number}")
    standby = Standby({"": other}, list, 0)
    assert standby.look(TableRegion("", region), 4) == 4
    read = standby.look(TableRegion("", region))
    assert read == 6
    one.put(its, token="one:6")
    _, released = one.give(region, read)
    other.regions.ahead = lambda region: standby.take(TableRegion("", region))
    other.acquire(region, replace(other.before_claim(region), released=released))
    writer = other.regions.writer(region)
    assert (writer.unflushed_entries(), writer.published) == (8, []), "seven and the sentinel of the claim"
    assert other.applied("one", [region]).everywhere == 6
    assert other.only([region]).count() == its.num_rows
    for number in range(6):
        other.put(its, token=f"other:{number}")
    other.give(region, read)
    assert one.acquire(region) == 3
    assert one.regions.writer(region).published == [1]


def test_the_owner_says_what_it_has(owners: tuple[Table, Table]) -> None:
    """A router requests this before it sends rows."""
    share(owners)
    one, _ = owners
    service = FlightService(OneTable(one), "grpc://127.0.0.1:0")
    client = flight.FlightClient(f"grpc://127.0.0.1:{service.port}")

    def ask(name: str, **request: Any) -> Any:
        return message_from(client, name, request)

    ids = [str(region) for region in one.base.regions]
    described = ask("schema")
    assert described["ids"] == ids
    assert described["append_by"] is None
    assert described["regions"] == ask("regions")["regions"] == {ids[0]: 1, ids[2]: 1}
    assert ask("release", region=ids[2]) == {"epoch": 1}
    assert ask("regions")["regions"] == {ids[0]: 1}
    with pytest.raises(flight.FlightError) as refused:
        ask("release", region=ids[2])
    error = from_flight(refused.value, "there")
    assert (error.kind, reason(error)) == ("UNAVAILABLE", "not_owner")
    client.close()
    service.shutdown()


def test_a_standby_reads_the_logs_that_it_may_take_over(owners: tuple[Table, Table], made: Any) -> None:
    """The standby has rows from before and after its read of the logs, and reads nothing of the other regions."""
    one, other = owners
    regions = one.base.regions
    for region in regions:
        one.acquire(region)
    standby = Standby({"": other}, lambda: [TableRegion("", region) for region in regions[:2]], 0.01)
    standby.start()
    one.put(made.table(range(100)))
    deadline = time.monotonic() + 30
    while sum(len(each.entries(each.codec)) for each in standby.read.values()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.put(made.table(range(50, 120), 1))
    found = {region: standby.take(TableRegion("", region)) for region in regions}
    standby.stop()
    assert [region for region, ahead in found.items() if ahead is not None] == list(regions[:2])
    other.regions.ahead = found.pop
    for region in regions:
        other.acquire(region)
    assert not found
    assert (
        other.scan()
        .read_all()
        .sort_by("id")
        .equals(pa.concat_tables([made.table(range(50)), made.table(range(50, 120), 1)]).cast(other.scan().schema))
    )


def flush(owner: Table, regions: Sequence[UUID]) -> None:
    """Ask a daemon of the table to flush some regions, as a client does."""
    with ExitStack() as ends:
        connection = Connection(served(owner, ends))
        ends.callback(connection.close)
        connection.act("flush", {"regions": [str(region) for region in regions], "routing": 1})


def test_a_flush_of_regions_that_are_not_all_here_says_so(owners: tuple[Table, Table], made: Any) -> None:
    """Otherwise a client that flushed at all known owners would treat all rows as flushed, although
    a region had moved.
    """
    share(owners)
    put(owners, made.table(range(50)))
    region = owners[0].base.regions[0]
    owners[0].release(region)
    with pytest.raises(memwal.Unavailable) as refused:
        flush(owners[0], owners[0].base.regions[::2])
    assert reason(refused.value) == "not_owner"
    flush(owners[0], [owners[0].base.regions[2]])
    owners[0].flush()


def test_a_flush_fails_if_a_region_leaves_meanwhile(owners: tuple[Table, Table], made: Any) -> None:
    share(owners)
    put(owners, made.table(range(50)))
    region = owners[0].base.regions[0]
    writer, (waits, left) = owners[0].regions.writer(region), (Event(), Event())
    freeze = writer.freeze

    def freeze_late() -> Callable[[], None]:
        waits.set()
        assert left.wait(30)
        return freeze()

    with patch.object(writer, "freeze", freeze_late), ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(flush, owners[0], [region])
        assert waits.wait(30)
        owners[0].release(region, flush=False)
        left.set()
        with pytest.raises(memwal.Unavailable) as refused:
            flushed.result()
    assert reason(refused.value) == "not_owner"
