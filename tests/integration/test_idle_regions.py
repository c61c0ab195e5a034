"""Regions that are claimed at their first use and released when they are idle.

Nothing is lost, and reads of a region at rest claim nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.engine.table import owner_notes
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.settings.load import load
from memwal.wal.layout import parse_manifest_key
from tests.messages import raises
from tests.opened import open_table
from tests.support.golden import golden

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
LEVELS: tuple[Level, ...] = ("latest", "durable", "flushed", "committed")
Open = Callable[..., Table]


class Recorded:
    """A store that lists its calls."""

    def __init__(self, inner: wal.ObjectStore, calls: list[str]) -> None:
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._inner, name)
        if name not in ("get", "exists", "list", "list_some", "put", "put_if_absent", "delete", "describe"):
            return made

        def call(key: str, *rest: Any) -> Any:
            version = parse_manifest_key(key)
            self._calls.append(f"{name} {key if version is None else f'manifest/{version.version}'}")
            return made(key, *rest)

        return call


@pytest.fixture
def opened(uri: str) -> Iterator[Open]:
    """Return a function that opens the table as a process that claims its regions at their first use."""
    with ExitStack() as ends:

        def opens(regions: int = 1, **sections: Any) -> Table:
            given = {"table": {"uri": uri, "key": ["id"]}, "regions": {"count": regions}} | sections
            for section in ("commit", "gc"):
                given.setdefault(section, {"interval": "0s"})
            return ends.enter_context(open_table(load(given, {}), {}, SCHEMA, claim=False, lazy=True))

        yield opens


def rows(*ids: int, v: int = 0) -> list[dict[str, int]]:
    return [{"id": id, "v": v} for id in ids]


def committed(table: Table) -> int:
    """Commit all rows and release the idle regions; return how many were released."""
    table.flush()
    table.commit()
    return table.regions.rest_idle(0.0)


def newest(table: Table, bucket: int = 0) -> wal.RegionManifest:
    found = wal.ManifestStore(table.regions.context.store, table.base.regions[bucket]).latest()
    assert found is not None
    return found


def test_a_table_that_was_never_used_is_claimed_by_its_first_put(opened: Open) -> None:
    table = opened(regions=3)
    assert not table.regions.writers
    table.put(rows(1))
    assert len(table.regions.writers) == 1
    table.put(rows(*range(100)))
    assert len(table.regions.writers) == 3
    assert committed(table) == 3
    assert not table.regions.writers


def test_a_region_without_a_row_comes_to_rest_after_a_read_has_claimed_it(opened: Open) -> None:
    table = opened()
    assert table.count() == 0
    assert len(table.regions.writers) == 1
    assert table.regions.rest_idle(0.0) == 1
    assert table.count() == 0
    assert not table.regions.writers
    table.put(rows(1))
    assert table.count() == 1


def test_a_put_whose_second_claim_fails_tells_that_other_regions_applied_it(opened: Open) -> None:
    table = opened(regions=2)
    table.put(rows(*range(20)))
    committed(table)
    table.put(rows(*range(20)))
    table.flush()
    table.commit()
    serving, region = table.regions.serving, table.base.regions[1]

    def rested(wanted: Any) -> Any:
        if wanted == region and not table.regions.has(writer):
            raise wal.StoreUnavailable("no answer")
        found = serving(wanted)
        if wanted == region:
            assert table.regions.rest(region)
        return found

    writer = table.regions.writer(region)
    with patch.object(table.regions, "serving", rested), raises(memwal.UnknownOutcome):
        table.put(rows(*range(20), v=1))
    assert 0 < table.count("v = 1") < 20


@pytest.mark.parametrize("level", LEVELS)
def test_a_read_of_a_region_at_rest_claims_nothing(opened: Open, level: Level) -> None:
    table = opened(regions=2)
    table.put(rows(*range(20)))
    committed(table)
    manifests = [newest(table, bucket) for bucket in (0, 1)]
    assert table.count(level=level) == 20
    assert table.get([7], level=level)["v"].to_pylist() == [0]
    assert table.only(table.base.regions[:1]).count(level=level) < 20
    assert not table.regions.writers
    assert [newest(table, bucket) for bucket in (0, 1)] == manifests
    assert all(manifest.at_rest for manifest in manifests)


def test_a_read_of_a_region_at_rest_looks_once_at_its_manifest(opened: Open) -> None:
    calls: list[str] = []
    open_store, latest = wal.open_store, flush.BaseTable.latest

    def looked(base: flush.BaseTable) -> flush.BaseTable:
        calls.append("the newest version of the base table")
        return latest(base)

    with (
        patch.object(wal, "open_store", lambda *given, **how: Recorded(open_store(*given, **how), calls)),
        patch.object(flush.BaseTable, "latest", looked),
    ):
        table = opened()
        table.put(rows(1))
        committed(table)
        calls.clear()
        assert table.count() == 1
    text = "\n".join([*calls, ""])
    assert text == golden("wal/read_at_rest.txt", text).decode()


def test_the_next_claim_knows_the_tokens_from_before_the_rest(opened: Open) -> None:
    table = opened()
    assert table.put(rows(1, v=1), token="loader:1").applied
    table.put(rows(1, v=2))
    assert committed(table) == 1
    assert not table.put(rows(1, v=1), token="loader:1").applied
    assert table.get([1])["v"].to_pylist() == [2]


@pytest.mark.parametrize("step", ["put", "put without durability", "flush", "token"])
def test_a_region_with_rows_outside_of_the_base_table_stays(opened: Open, step: str) -> None:
    table = opened(wal={"linger_max": "1h"})
    table.put(rows(1))
    table.flush()
    table.commit()
    if step == "token":
        table.writes.record(Token("loader", 1), durable=False, timeout=None)
    else:
        table.put(rows(2), durable=step != "put without durability")
    if step == "flush":
        table.flush()
    assert table.regions.rest_idle(0.0) == 0
    assert not table.regions.rest(table.base.regions[0])
    assert len(table.regions.writers) == 1
    assert not newest(table).at_rest
    assert table.count() == (1 if step == "token" else 2)


def test_a_region_that_was_used_a_moment_ago_stays(opened: Open) -> None:
    table = opened()
    table.put(rows(1))
    table.flush()
    table.commit()
    assert table.regions.rest_idle(60.0) == 0
    assert table.regions.rest_idle(0.0) == 1


@pytest.mark.parametrize("durable", [True, False])
def test_puts_and_reads_beside_rests_fail_and_lose_nothing(opened: Open, durable: bool) -> None:
    table, ended, rests = opened(regions=2, wal={"linger_max": "1ms"}), threading.Event(), [0]
    both_wait = threading.Barrier(2)

    def rest() -> None:
        while not ended.is_set():
            rests[0] += committed(table)

    def put(first: int) -> None:
        for id in range(first, first + 40):
            if id % 10 == 0:
                both_wait.wait(60.0)
                seen = rests[0]
                while rests[0] == seen and not resting.done():
                    ended.wait(0.01)
            table.put(rows(id, -id), durable=durable)
            assert table.get([id, -id], level="durable" if id % 2 else "latest").num_rows == 2

    with ThreadPoolExecutor() as pool:
        resting = pool.submit(rest)
        try:
            list(pool.map(put, (1, 101)))
        finally:
            ended.set()
        resting.result()
    assert rests[0] >= 4
    assert table.count() == 160
    committed(table)
    assert table.count(level="committed") == 160


def test_a_write_for_a_writer_that_came_to_rest_is_sent_to_the_next_claim(opened: Open) -> None:
    table = opened()
    table.put(rows(1))
    table.flush()
    table.commit()
    serving = table.regions.serving

    def rested(region: Any) -> Any:
        writer = serving(region)
        if writer.guard.epoch == 1:
            assert table.regions.rest(region)
        return writer

    with patch.object(table.regions, "serving", rested):
        receipt = table.put(rows(2))
    assert receipt.applied
    assert [writer.guard.epoch for writer in table.regions.writers] == [2]
    assert table.count() == 2


@pytest.mark.parametrize("level", ["latest", "durable"])
def test_a_read_whose_writer_came_to_rest_and_was_claimed_again_is_answered(opened: Open, level: Level) -> None:
    table = opened(wal={"read_lease": "0s"})
    table.put(rows(1))
    table.flush()
    table.commit()
    of = table.regions.sources

    def rested(regions: Any, at_once: int, *, flushed: bool) -> Any:
        found = of(regions, at_once, flushed=flushed)
        if table.regions.writers[0].guard.epoch == 1:
            assert table.regions.rest_idle(0.0) == 1
            table.put(rows(2))
        return found

    with patch.object(table.regions, "sources", rested):
        assert table.count(level=level) == 2


def test_a_put_that_came_before_the_end_of_the_writer_gives_the_rest_up(opened: Open) -> None:
    """The release looks again after the last write was served."""
    table, original = opened(), RegionCore.close

    def closed(core: RegionCore) -> None:
        core.serve([write])
        original(core)

    table.put(rows(1))
    table.flush()
    table.commit()
    write = Write(pa.table({"id": [2], "v": [0]}, schema=SCHEMA), shape=table.regions.context.shape)
    with patch.object(RegionCore, "close", closed):
        assert not table.regions.rest(table.base.regions[0])
    assert write.done.result().applied
    assert not newest(table).at_rest
    assert table.count() == 2
    assert table.regions.writers


def test_a_newer_claim_ends_the_rest_for_every_process(opened: Open) -> None:
    one, other = opened(), opened()
    one.put(rows(1))
    committed(one)
    assert other.count() == 1
    assert not other.regions.writers
    other.put(rows(2))
    assert newest(one).released == 0
    assert one.count(level="flushed") == 1  # any manifest suffices, and nothing is claimed
    assert not one.regions.writers
    assert one.count() == 2
    assert [writer.guard.epoch for writer in one.regions.writers] == [3]


def test_a_region_that_belongs_to_another_process_is_neither_claimed_nor_read(opened: Open) -> None:
    table = opened()
    table.put(rows(1))
    committed(table)
    table.regions.belongs = lambda _: False
    for call in (table.count, lambda: table.count(level="flushed"), lambda: table.put(rows(2))):
        with raises(memwal.Unavailable) as refused:
            call()
        assert refused.value.details["reason"] == "not_owner"
    assert table.count(level="committed") == 1
    assert not table.regions.writers


def test_a_writer_that_failed_is_replaced_at_the_next_use(opened: Open) -> None:
    one, other = opened(), opened()
    one.put(rows(1))
    other.put(rows(2))
    with pytest.raises(memwal.FencedError):
        one.put(rows(3))
    one.put(rows(3))
    assert one.count() == 3
    assert not one.regions.rest(one.base.regions[0])  # rows are not committed


def test_a_claim_after_a_rest_waits_for_no_lease(opened: Open) -> None:
    table = opened(wal={"read_lease": "60s"})
    table.put(rows(1))
    assert table.count() == 1
    committed(table)
    table.put(rows(2))
    assert table.count() == 2


def test_the_owners_note_goes_with_the_region(opened: Open) -> None:
    table = opened()
    store, regions = table.regions.context.store, table.base.regions
    table.put(rows(1))
    assert owner_notes.read(store, regions)
    committed(table)
    assert not owner_notes.read(store, regions)
    table.put(rows(1))
    assert owner_notes.read(store, regions)


def test_storage_that_refuses_the_mark_leaves_a_region_that_is_claimed_again(opened: Open) -> None:
    table = opened()
    table.put(rows(1))
    table.flush()
    table.commit()

    def refused(*_: Any, **__: Any) -> None:
        raise wal.StoreUnavailable("no answer")

    with patch.object(wal.ManifestStore, "edit", refused):
        assert not table.regions.rest(table.base.regions[0])
    assert not newest(table).at_rest
    assert table.count() == 1
    assert table.regions.writers


def test_a_table_that_is_closed_leaves_its_regions_at_rest(opened: Open) -> None:
    one = opened(regions=2)
    one.put(rows(*range(20)))
    one.flush()
    one.commit()
    one.close()
    other = opened(regions=2)
    assert other.count() == 20
    assert not other.regions.writers
    with memwal.open(other.base.uri) as whole:  # claims all regions at once, and keeps them
        assert whole.count() == 20
    assert not newest(other).at_rest


def test_a_resize_ends_the_rest(opened: Open, uri: str) -> None:
    table = opened(regions=2)
    table.put(rows(*range(20)))
    committed(table)
    store, context = table.regions.context.store, table.regions.context
    flush.resize(uri, None, store, 3, clock=context.clock, ids=context.ids)
    assert not any(newest(table, bucket).at_rest for bucket in (0, 1))
    for call in (table.count, lambda: table.put(rows(1))):
        with pytest.raises(memwal.Unavailable):
            call()


def test_a_manifest_of_an_older_epoch_is_not_at_rest(opened: Open) -> None:
    """Another program's claim may keep memwal's fields."""
    table = opened()
    table.put(rows(1))
    committed(table)
    manifests = wal.ManifestStore(table.regions.context.store, table.base.regions[0])
    found = newest(table)
    claimed = replace(found, version=found.version + 1, writer_epoch=found.writer_epoch + 1)
    assert manifests.create(found, claimed) is not None
    assert newest(table).released
    assert not newest(table).at_rest
    assert table.count() == 1
    assert table.regions.writers
