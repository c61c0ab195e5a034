"""A region passes from memwal to Lance's ShardWriter and back repeatedly, in arrow format: the rows stay the same.

ShardWriter ends without `close`, as in a crash: its acknowledged rows are only in the log, and the next writer must
replay them. When it is closed, it flushes its own SST.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import ShardWriter

import memwal
from memwal import wal
from memwal.ingest.engine.table.create import initialise
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.settings.load import load
from tests.lance_scan import scanned
from tests.messages import raises
from tests.shard_writers import PRIMARY_KEY, SharedTable
from tests.support.clock import FakeClock

WIDTH = 4
ARROW = {"wal": {"format": "arrow"}, "commit": {"interval": "0s"}}
Row = dict[str, Any]


def row(id: int, version: int) -> Row:
    """Return one row; every column is a function of (id, version)."""
    vector = None if id % 7 == 3 else [float(id), float(version), 0.5, -1.0]
    name = None if version % 5 == 4 else f"row {id} v{version} ż"
    return {"id": id, "code": f"code {id:03}", "name": name, "n": id * version, "vector": vector}


SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("n", pa.int64()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)


class World(SharedTable):
    """A table, a dict with its expected rows, and its two writers in turn."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.epochs: dict[Any, int] = {}

    def rows(self, ids: Iterable[int], version: int) -> pa.Table:
        return pa.Table.from_pylist([row(id, version) for id in ids], schema=self.base.schema)

    # ---- memwal --------------------------------------------------------------------------------------------------

    @contextmanager
    def ours(self) -> Iterator[Table]:
        """Open the table with memwal; check it at the beginning and the end, and close it without a flush."""
        with memwal.open(self.uri, settings=ARROW, take_over=True) as table:
            self.check(table)
            self.check_epochs_rose()
            yield table
            self.check(table)
        self.check(StoredTable(self.base.latest(), self.store))

    def check(self, table: Any) -> None:
        """Check memwal's reader by a scan, a count and lookups."""
        assert self.same(table.scan().read_all())
        assert table.count() == len(self.oracle)
        ids = [*sorted(self.oracle)[:3], 999]
        assert {each["id"] for each in table.get(self.keys(ids)).to_pylist()} == set(ids) & set(self.oracle)

    # ---- ShardWriter ---------------------------------------------------------------------------------------------

    @contextmanager
    def theirs(self, *, close: bool = False) -> Iterator[list[ShardWriter]]:
        """Open ShardWriters of all regions; check them at the beginning and the end by Lance's own scan."""
        writers = self.writers()
        self.check_theirs(writers)
        self.check_epochs_rose()
        yield writers
        self.check_theirs(writers)
        if close:
            for writer in writers:
                writer.close()

    def check_theirs(self, writers: Sequence[ShardWriter]) -> None:
        """Check ShardWriter's scan: it finds the base, and the rows of its own region above it."""
        for bucket, writer in enumerate(writers):
            expected = self.of_bucket(bucket)
            assert by_id(self.found_by(bucket, writer).to_pylist()) == by_id(row(*each) for each in expected.items())

    # ---- both ----------------------------------------------------------------------------------------------------

    def same(self, found: pa.Table) -> bool:
        return by_id(found.to_pylist()) == by_id(row(*each) for each in self.oracle.items())

    def collect(self) -> None:
        """Delete all entries of the logs that no reader or writer needs."""
        for region in self.base.regions:
            done = wal.WalCollector(self.store, region, self.base.codec, wal.SystemClock()).collect(-1)
            assert done.entries > 0

    def check_epochs_rose(self) -> None:
        for manifest in self.manifests():
            assert manifest.writer_epoch > self.epochs.get(manifest.region_id, 0)
            self.epochs[manifest.region_id] = manifest.writer_epoch

    def check_flushed_by_lance(self) -> None:
        """Check Lance's scan of base and SSTs, without a log, when everything is flushed."""
        assert self.same(scanned(self.uri, self.manifests()))


def by_id(rows: Iterable[Row]) -> dict[int, Row]:
    """Return the rows by id, with only the columns that all tables of this module have."""
    listed = [{name: each[name] for name in SCHEMA.names} for each in rows]
    assert len({each["id"] for each in listed}) == len(listed)
    return {each["id"]: each for each in listed}


# ---- tables --------------------------------------------------------------------------------------------------------


def created(uri: str, key: Sequence[str], regions: int) -> None:
    """Create the table with memwal."""
    memwal.open(uri, schema=SCHEMA, key=list(key), regions=regions, settings=ARROW).close()


def gapped(uri: str, first: str = "id") -> lance.LanceDataset:
    """Create the table with Lance; its field ids have gaps, and its columns are not in the order of their ids."""
    schema = pa.schema(
        [pa.field("gone", pa.int64()), *list(SCHEMA)[:2], pa.field("went", pa.string()), *list(SCHEMA)[3:]]
    )
    keyed = schema.set(schema.get_field_index(first), schema.field(first).with_metadata(PRIMARY_KEY))
    dataset = lance.write_dataset(keyed.empty_table(), uri, schema=keyed)
    dataset.drop_columns(["gone", "went"])
    dataset.add_columns(pa.schema([SCHEMA.field("name")]))
    return dataset


def init(uri: str, **sections: Any) -> str:
    """Run `memwal init`; return its message."""
    return initialise(load({"table": {"uri": uri}, **sections}, {}), {})[1]


@pytest.fixture(
    params=[
        pytest.param((["id"], 1), id="int64"),
        pytest.param((["code"], 2), id="string, two regions"),
        pytest.param((["code", "id"], 2), id="composite, two regions"),
        pytest.param("adopted", id="gapped"),
        pytest.param("initialised", id="gapped, initialised by Lance"),
        pytest.param("unsharded", id="gapped, initialised by Lance, unsharded"),
    ]
)
def world(request: pytest.FixtureRequest, uri: str) -> World:
    if isinstance(request.param, tuple):
        created(uri, *request.param)
    elif request.param == "adopted":
        gapped(uri)
        sections = {"table": {"uri": uri, "key": ["id"]}, "regions": {"count": 2}, "wal": {"format": "arrow"}}
        assert init(uri, **sections) == "adopted (arrow)"
    else:
        sharding = {"unsharded": True} if request.param == "unsharded" else {"bucket_column": "id", "num_buckets": 2}
        gapped(uri).initialize_mem_wal(**sharding)
        assert init(uri) == "adopted (arrow)"
    return World(uri)


# ---- tests ---------------------------------------------------------------------------------------------------------


def test_rows_are_the_same_at_each_hand_over(world: World) -> None:
    with world.ours() as table:
        world.put(table, range(40), 1, token=("loader", 5))
        world.put(table, range(10, 20), 2)
        world.delete(table, [3, 4, 15])
    with world.theirs() as writers:
        world.their_put(writers, [4, 15, *range(30, 50)], 3)
        world.their_delete(writers, [5, 31, 77])
        world.their_put(writers, [5], 4)
        world.their_put(writers, [5, 6], 5)
    with world.ours() as table:
        world.put(table, range(40), 99, token=("loader", 5))  # applied before ShardWriter claimed the region
        world.put(table, [3, *range(20, 32)], 6, token=("loader", 6))  # rows of every region
        world.delete(table, [6])
    with world.theirs(close=True) as writers:
        world.their_put(writers, [6, 50], 7)
        world.their_delete(writers, [7])
    assert all(manifest.ssts for manifest in world.manifests())
    world.check_flushed_by_lance()
    with world.ours() as table:
        world.put(table, [7, 8], 8)
        world.put(table, [9], 99, token=("loader", 6))
        table.flush()
        world.check_flushed_by_lance()
        world.delete(table, [8])
        world.put(table, [60], 9)
    world.collect()
    with world.theirs() as writers:
        world.their_put(writers, [61], 10)
    with world.ours() as table:
        world.put(table, range(40), 99, token=("loader", 6))
        table.flush()
        table.commit()
        assert world.same(table.scan(level="committed").read_all())
    assert world.same(lance.dataset(world.uri).to_table())
    with world.theirs():
        pass


@pytest.mark.parametrize("world", [pytest.param((["code"], 2), id="string"), "adopted"], indirect=True)
def test_the_one_who_is_fenced_is_told(world: World) -> None:
    ours = memwal.open(world.uri, settings=ARROW)
    world.put(ours, [1, 2], 1)
    writers = world.writers()
    with raises(memwal.FencedError):
        ours.put(world.rows(range(40), 99))
    with suppress(memwal.FencedError):
        ours.close()
    world.their_put(writers, range(8), 2)
    with world.ours() as again:
        with pytest.raises(OSError, match="fenced"):
            world.their_put(writers, range(40), 99)
        world.put(again, [1, 3], 4)
    with world.theirs() as newest:
        world.their_put(newest, [1], 5)


@pytest.mark.parametrize("world", [pytest.param((["code"], 2), id="string"), "adopted"], indirect=True)
def test_several_claims_of_each_in_a_row(world: World) -> None:
    """Sentinels of memwal and Lance follow each other; no reader takes one for the end of the log or for rows."""
    for version in (1, 3):
        for step in range(2):
            with world.ours() as table:
                world.put(table, [step, 2], version)
        for step in range(2):
            with world.theirs() as writers:
                world.their_put(writers, [step, 3], version + 1)
    with ExitStack() as claims:
        deposed = claims.enter_context(memwal.open(world.uri, settings=ARROW))
        claims.enter_context(world.theirs())
        claims.enter_context(world.ours())
        with pytest.raises(memwal.FencedError):
            deposed.scan()


@pytest.mark.parametrize("world", [pytest.param((["code"], 2), id="string"), "adopted"], indirect=True)
def test_many_batches_in_one_entry_of_shard_writer(world: World) -> None:
    region = world.base.regions[0]
    with world.theirs() as writers:
        rows = world.rows(range(60), 1)
        mine = rows.filter(pa.array(world.base.route(rows) == 0))
        writers[0].put(pa.concat_tables([mine.slice(at, 1) for at in range(mine.num_rows)]))
        world.oracle |= dict.fromkeys(mine["id"].to_pylist(), 1)
    tip = wal.find_tip(world.store, region, "arrow", 0)
    data = world.store.get(wal.layout.entry_key(region, tip, "arrow"))
    assert data is not None
    assert len(list(pa.ipc.open_stream(data))) > 10
    with world.ours() as table:
        world.put(table, [1], 2)
    with world.theirs():
        pass


def test_rows_that_shard_writer_left_in_the_log_before_the_table_was_adopted(uri: str) -> None:
    gapped(uri).initialize_mem_wal(bucket_column="id", num_buckets=1)
    writer = lance.dataset(uri).mem_wal_writer(str(wal.bucket_region(0)))
    rows = pa.Table.from_pylist([row(id, 1) for id in range(9)], schema=lance.dataset(uri).schema)
    writer.put(rows)
    assert init(uri) == "adopted (arrow)"
    world = World(uri)
    world.oracle = dict.fromkeys(range(9), 1)
    with world.theirs() as writers:  # the adopted table still has its own log
        world.their_put(writers, [1], 2)
    with world.ours() as table:
        world.put(table, [2], 3)


def test_more_rows_than_shard_writer_opens_in_one_generation(uri: str) -> None:
    created(uri, ["id"], 1)
    region = str(wal.bucket_region(0))
    with memwal.open(uri, settings=ARROW) as table:
        for start in (0, 60_000):
            ids = pa.array(range(start, start + 60_000), pa.int64())
            table.put(pa.table({"id": ids, "code": ids.cast(pa.string())}), missing="null")
    with lance.dataset(uri).mem_wal_writer(region) as writer:
        assert writer.lsm_scanner().project(["id"]).to_table().num_rows == 120_000


def test_shard_writer_that_sleeps_is_fenced_after_a_collection_however_large_its_fence(uri: str) -> None:
    """The applied map in memwal's sentinels was large before a resize, and is small now."""
    created(uri, ["id"], 1)
    world, clock, region = World(uri), wal.SystemClock(), wal.bucket_region(0)
    codec, ids = world.base.codec, wal.SystemIds()

    def ours(applied: dict[str, int]) -> int:
        claimed = wal.claim(world.store, region, spec_id=1, codec=codec, ids=ids, clock=clock)
        log = wal.WalAppender(world.store, region, claimed.guard, codec, claimed.next_position, ids, clock)
        return log.append(None, generation=1, applied=applied)

    with patch("memwal.wal.applied._INLINE_MAX", 1 << 20):  # as releases without snapshots of the map do
        ours({f"query {number:060}": 1 for number in range(2000)})
        sleeper = lance.dataset(uri).mem_wal_writer(str(region))
        newest = ours({"query": 1})
    wal.ManifestStore(world.store, region).edit_unowned(lambda current: replace(current, replay_after=newest))
    later = FakeClock(clock.now() + 86_400)
    assert wal.WalCollector(world.store, region, codec, later).collect(600.0).entries > 0
    with pytest.raises(OSError, match=r"(?i)fenced"):
        sleeper.put(pa.Table.from_pylist([row(1, 1)], schema=lance.dataset(uri).schema))


def test_shard_writer_replays_a_log_whose_map_is_in_snapshots(uri: str) -> None:
    created(uri, ["id"], 2)
    world = World(uri)
    with patch("memwal.wal.applied._INLINE_MAX", 200):
        for turn in range(3):
            with world.ours() as table:
                for number in range(20):
                    world.put(table, range(number, 40 + number), turn, token=f"file {turn} {number:03}:1")
            with world.theirs() as writers:
                world.their_put(writers, range(5), turn + 10)
        assert any("/applied/" in key for key in world.store.list("_mem_wal/"))
        with world.ours() as table:
            again = world.rows(range(40), 99)
            assert not table.put(again, token="file 0 000:1").applied


# ---- one format per table ------------------------------------------------------------------------------------------


def test_a_setting_that_contradicts_the_table_is_refused(uri: str) -> None:
    created(uri, ["id"], 1)
    with raises(memwal.Invalid):
        memwal.open(uri, settings={"wal": {"format": "lance"}})
    memwal.open(uri).close()  # the setting's default is for new tables


def test_shard_writer_in_a_region_of_lance_entries_is_refused_before_anything_is_written(uri: str) -> None:
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings={"commit": {"interval": "0s"}}) as table:
        table.put([row(1, 1)])
    region = wal.bucket_region(0)
    writer = lance.dataset(uri).mem_wal_writer(str(region))
    writer.put(pa.Table.from_pylist([row(2, 1)], schema=lance.dataset(uri).schema))
    before = wal.ManifestStore(wal.open_store(uri), region).latest()
    with raises(memwal.Corrupted):
        memwal.open(uri)
    assert wal.ManifestStore(wal.open_store(uri), region).latest() == before


def test_init_adopts_a_lance_table_in_the_format_of_the_setting(uri: str) -> None:
    lance.write_dataset(pa.table({"id": [1], "n": [1]}), uri)
    sections = {"table": {"uri": uri, "key": ["id"]}, "regions": {"count": 3}}
    assert init(uri, **sections) == "adopted (lance)"
    with raises(memwal.Invalid):
        init(uri, **sections, wal={"format": "arrow"})
    assert init(uri, **sections) == "found"
