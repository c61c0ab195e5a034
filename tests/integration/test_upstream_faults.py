"""The faults of Lance's own writer in the format notes, one test each, and memwal's behaviour.

A proxy between memwal and a real S3 server causes the faults of the storage. "Upstream" means Lance's writer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal.flush import FlushOutOfOrder, SstInvalid
from memwal.memtable import IndexSpec, MemTable, row_schema, with_tombstone
from memwal.wal import LocalStore, StoreRefused, open_store
from memwal.wal.layout import manifest_key
from tests.failure_matrix import FAULTS, Call, FaultyStore
from tests.fault_proxy import (
    Fault,
    FaultProxy,
    answers,
    lands_then_answers,
    lands_then_hangs,
    lands_then_resets,
    swallows,
)
from tests.messages import raises
from tests.s3_fixtures import S3Table
from tests.s3_server import S3Server
from tests.support.clock import FakeClock
from tests.table_stages import REGION, SCHEMA, Owner, read

ENTRY = r"/wal/[01]{64}\."
MANIFEST = r"/manifest/[01]{64}\."
LOST = [lands_then_resets(), lands_then_hangs(), lands_then_answers(500, "InternalError")]
TABLE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])


@pytest.fixture
def open_through(s3_table_through_proxy: S3Table) -> Iterator[Callable[..., Any]]:
    """Return a function that opens one table on S3 through the proxy, any number of times."""
    opened: list[Any] = []

    def open_table(**sections: Any) -> Any:
        uri, options = s3_table_through_proxy.uri, s3_table_through_proxy.storage_options
        settings = {"commit": {"interval": 0}, "gc": {"interval": 0}, **sections}
        new = {"schema": TABLE, "key": "id", "regions": 1, "storage_options": options, "settings": settings}
        opened.append(memwal.open(uri, take_over=bool(opened), **new))
        return opened[-1]

    yield open_table
    for table in opened:
        table.close()


def impatient(fault: Fault) -> dict[str, Any]:
    """Return settings with a short time-out if the fault leaves a request without an answer."""
    return {"wal": {"put_timeout": "1s"}} if fault.hangs else {}


def values(table: Any) -> dict[int, str]:
    found = table.scan().read_all().to_pylist()
    assert len({row["id"] for row in found}) == len(found), "a row twice"
    return {row["id"]: row["v"] for row in found}


def test_http_409_on_a_wal_put_retries_the_same_slot_with_the_same_bytes(
    open_through: Callable[..., Any], fault_proxy: FaultProxy
) -> None:
    """Upstream takes the next slot and continues; its replay stops at the hole, and old values come back."""
    table = open_through()
    table.put([{"id": 1, "v": "old"}])
    fault_proxy.forget()
    fault_proxy.inject(answers(409, "ConditionalRequestConflict"), method="PUT", key=ENTRY)
    table.put([{"id": 1, "v": "new"}])
    first, second = [each for each in fault_proxy.requests if each.method == "PUT"]
    assert (first.status, second.status) == (409, 200)
    assert (first.key, first.crc) == (second.key, second.crc)
    table.put([{"id": 2, "v": "next"}])
    table.close()
    assert values(open_through()) == {1: "new", 2: "next"}


@pytest.mark.parametrize("lost", LOST, ids=lambda fault: fault.name)
def test_an_answer_lost_after_a_wal_put_landed_does_not_write_the_entry_again(
    open_through: Callable[..., Any], fault_proxy: FaultProxy, lost: Any
) -> None:
    """Upstream writes the rows a second time, at the next slot."""
    table = open_through(**impatient(lost))
    fault_proxy.forget()
    fault_proxy.inject(lost, method="PUT", key=ENTRY)
    assert table.put([{"id": 1, "v": "once"}]).applied
    puts = [each for each in fault_proxy.requests if each.method == "PUT"]
    assert len({each.key for each in puts}) == len({each.crc for each in puts}) == 1
    (region,) = table.status()["regions"]
    assert region["wal_position"] == 1
    table.close()
    assert values(open_through()) == {1: "once"}


@pytest.mark.parametrize("lost", LOST, ids=lambda fault: fault.name)
def test_an_answer_lost_on_the_epoch_claim_is_recognised_as_our_own_claim(
    open_through: Callable[..., Any], fault_proxy: FaultProxy, lost: Any
) -> None:
    """Upstream reports that another writer claimed the region, although it was its own claim."""
    for epoch in (1, 2):
        fault_proxy.inject(lost, method="PUT", key=MANIFEST)
        table = open_through(**impatient(lost))
        assert [region["epoch"] for region in table.status()["regions"]] == [epoch]
        table.put([{"id": epoch, "v": "mine"}])
        table.close()
    assert values(open_through()) == {1: "mine", 2: "mine"}


def test_a_failed_flush_of_a_generation_is_never_skipped(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Upstream publishes the next generation, and replay passes over the rows of the failed one."""
    uri = str(shutil.copytree(prepared["flush"], tmp_path / "table.lance"))
    owner = Owner(uri, {}, LocalStore(uri))
    first = owner.claim().entries
    second = owner.append({9: 9})
    away = FaultyStore(owner.store, FakeClock())
    away.arm(FAULTS["permanent failure"], Call("exists", "", 1), lasting=True)
    with pytest.raises(StoreRefused):
        away.exists("")
    owner.store = away
    with pytest.raises(StoreRefused):
        owner.flush(first)
    away.heal()
    with raises(FlushOutOfOrder):
        owner.flush([second], generation=2)
    again = Owner(uri, {}, LocalStore(uri), seed=9)
    claimed = again.claim()
    assert claimed.manifest.replay_after == 0
    assert read(again, claimed) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 9: 9}


@pytest.mark.parametrize("file", ["page_data", "page_lookup"])
def test_an_sst_without_its_key_index_is_not_published(
    s3_table_through_proxy: S3Table,
    s3_server: S3Server,
    fault_proxy: FaultProxy,
    prepared: dict[str, Path],
    file: str,
) -> None:
    """Upstream publishes before the index exists. Here storage acknowledges the index, but does not store it."""
    uri, options = s3_table_through_proxy.uri, s3_table_through_proxy.storage_options
    s3_server.upload(prepared["flush"], uri)
    owner = Owner(uri, options, open_store(uri, options))
    entries = owner.claim().entries
    fault_proxy.inject(swallows(), method="PUT", key=f"_pk_index/{file}")
    with raises(SstInvalid):
        owner.flush(entries)
    assert read(owner, owner.claim()) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert owner.claimed.manifest.ssts == ()
    owner.flush(entries)
    assert [sst.generation for sst in owner.claim().manifest.ssts] == [1]


def test_a_durable_put_does_not_wait_for_a_timer(open_through: Callable[..., Any], fault_proxy: FaultProxy) -> None:
    """Upstream answers when its timer fires. In memwal an idle region writes at once, and makes no request without
    rows.
    """
    table = open_through(wal={"linger_max": "1h"})
    fault_proxy.forget()
    for number in range(5):
        table.put([{"id": number, "v": "x"}])
    asked = [(each.method, each.status) for each in fault_proxy.requests]
    assert asked == [("PUT", 200)] * 5
    assert fault_proxy.falls_silent(0.5)


def test_the_memory_of_indexes_counts_and_age_freezes(open_small: Callable[..., Any], wait_until: Any) -> None:
    """Upstream freezes by the bytes of its rows alone, and never by their age."""
    base = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("word", pa.string())])
    rows = pa.table({"id": range(5000), "word": [f"word {number}" for number in range(5000)]}, schema=base)
    schema = row_schema(base, ["id"])
    plain, indexed = (MemTable(schema, ["id"], specs, 1) for specs in ([], [IndexSpec("word", "fts")]))
    for table in (plain, indexed):
        table.apply(with_tombstone(rows, schema))
    assert indexed.bytes > 1.2 * plain.bytes

    with open_small(memtable={"age_max": "50ms"}) as table:
        table.put([{"id": 1}], missing="null")
        assert wait_until(lambda: sum(len(region["ssts"]) for region in table.status()["regions"]) == 1)


def test_one_call_reaches_every_bucket_and_deletes_reach_fresh_rows(open_small: Callable[..., Any], made: Any) -> None:
    """Upstream accepts one bucket per call, and its deletes do not reach rows that are not flushed yet."""
    with open_small(regions=4) as table:
        table.put(made.rows(range(40)))
        assert all(region["memtable_rows"] for region in table.status()["regions"])
        table.delete([{"id": id} for id in range(0, 40, 2)])
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == list(range(1, 40, 2))
        assert table.get([0, 1])["id"].to_pylist() == [1]


@pytest.mark.parametrize("level", ["flushed", "durable", "latest"])
def test_a_committed_sst_still_listed_does_not_shadow_a_newer_base_row(
    prepared: dict[str, Path], tmp_path: Path, level: str
) -> None:
    uri = str(shutil.copytree(prepared["commit"], tmp_path / "table.lance"))
    store = FaultyStore(LocalStore(uri), FakeClock())
    owner = Owner(uri, {}, store)
    owner.claim()
    prune = manifest_key(REGION, owner.claimed.manifest.version + 1)
    store.arm(FAULTS["permanent failure"], Call("put_if_absent", prune, 1))
    with pytest.raises(StoreRefused):
        owner.commit()
    assert [sst.generation for sst in owner.claim().manifest.ssts] == [2, 3]  # committed, and still listed
    stranger = lance.dataset(uri).merge_insert("id").when_matched_update_all()
    stranger.execute(pa.table({"id": [3, 5], "n": [300, 500]}, schema=SCHEMA))
    with memwal.open(uri, settings={"commit": {"interval": 0}, "gc": {"interval": 0}}) as table:
        found = {row["id"]: row["n"] for row in table.scan(level=level).read_all().to_pylist()}
        assert {id: found[id] for id in (3, 5)} == {3: 300, 5: 500}
        table.commit()
        assert {row["id"]: row["n"] for row in table.scan(level="committed").read_all().to_pylist()}[3] == 300
