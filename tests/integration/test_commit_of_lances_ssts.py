"""memwal commits SSTs that Lance's ShardWriter flushed like its own: same rows, progress, indexes, garbage.

A generation of ShardWriter keeps superseded rows behind a deletion vector, whereas memwal leaves them out, and has
indexes that Lance built. The oracle is a dict without regions, generations and SSTs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import ShardWriter

import memwal
from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table.create import initialise
from memwal.ingest.engine.table.garbage import Ages, TableCollector
from memwal.ingest.settings.load import load
from memwal.wal.layout import parse_sst_dir, region_prefix
from tests.conftest import INDEXES, SCHEMA, WIDTH, toml
from tests.lance_scan import scanned
from tests.shard_writers import PRIMARY_KEY, SharedTable

BY_HAND = {"wal": {"format": "arrow"}, "commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
FIRST = range(300)
"""Enough rows for a vector index."""


def rows(ids: Iterable[int], version: int) -> pa.Table:
    """Return rows; every column is a function of (id, version)."""
    listed = [
        {
            "id": id,
            "name": None if (id + version) % 5 == 4 else f"row {id} v{version} ż",
            "price": version,
            "body": f"harbor word{version}",
            "vector": np.random.default_rng([id, version]).random(WIDTH, dtype=np.float32).tolist(),
        }
        for id in ids
    ]
    return pa.Table.from_pylist(listed, schema=SCHEMA)


class World(SharedTable):
    """A table, its expected rows, and Lance's writers of its regions."""

    def rows(self, ids: Iterable[int], version: int) -> pa.Table:
        return rows(ids, version)

    @contextmanager
    def ours(self) -> Any:
        with memwal.open(self.uri, settings=BY_HAND) as table:
            yield table

    def three_generations(self) -> None:
        """Open and close each writer three times; keys repeat within a generation and across generations."""
        writers = self.writers()
        self.their_put(writers, range(280, 340), 2)
        self.their_put(writers, range(285, 300), 3)  # superseded within the generation
        self.their_delete(writers, [1, 2, 286, 999])  # in the base, in this generation, nowhere
        self.their_put(writers, [2], 4)  # deleted and put again
        close(writers)
        writers = self.writers()
        self.their_put(writers, [1, *range(4, 8)], 5)  # deleted by the generation before
        self.their_delete(writers, [310, 287])
        self.their_put(writers, [310, 310 + 1], 6)
        close(writers)
        writers = self.writers()
        self.their_delete(writers, [*range(320, 330), 5, 310])
        self.their_put(writers, [500, 501, 502], 7)
        self.their_delete(writers, [501])
        close(writers)

    # ---- looking -------------------------------------------------------------------------------------------------

    def listed(self) -> int:
        return sum(len(manifest.ssts) for manifest in self.manifests())

    def directories(self) -> list[str]:
        regions = (self.store.children(region_prefix(region)) for region in self.base.regions)
        return [name for names in regions for name in names if parse_sst_dir(name)]

    def check_clean(self) -> None:
        assert verify_table(self.store, self.uri, deep=True).findings == ()

    def check_lance_over_ssts(self) -> None:
        """Check Lance's scan of base and SSTs when everything is flushed."""
        self.same(scanned(self.uri, self.manifests()))

    def same(self, found: pa.Table) -> None:
        """Check that `found` has the oracle's rows, with every column."""
        expected = pa.concat_tables([SCHEMA.empty_table(), *(rows([id], v) for id, v in self.oracle.items())])
        by_id = found.select(SCHEMA.names).cast(pa.schema(list(SCHEMA))).sort_by("id").combine_chunks()
        assert by_id.equals(expected.sort_by("id").combine_chunks())

    def check_committed(self) -> None:
        """Check that the base table has everything (rows, progress, indexes), and that no SST is listed."""
        dataset = lance.dataset(self.uri)
        self.same(dataset.to_table())
        committed = BaseTable.open(self.uri).committed
        assert committed == {each.region_id: each.current_generation - 1 for each in self.manifests()}
        assert self.listed() == 0
        fragments = {fragment.fragment_id for fragment in dataset.get_fragments()}
        indexes = {index.name: index for index in dataset.describe_indices()}
        for spec in self.base.indexes:
            covered = {each for segment in indexes[spec.name].segments for each in segment.fragment_ids}
            assert covered.issuperset(fragments), spec.name
        self.check_clean()

    def check_collected(self) -> None:
        """Check that a collection deletes every directory, and that memwal's readers, Lance's readers and Lance's
        writer still work.
        """
        collector = TableCollector(self.store, self.base.codec, wal.SystemClock(), self.base.regions)
        found = collector.collect(self.base, Ages(wal=-1.0, sst=-1.0, orphan=604_800.0))
        assert (found.committed > 0, found.abandoned, found.unaccounted, found.unreadable) == (True, 0, 0, 0)
        assert self.directories() == []
        self.check_clean()
        self.check_lance_over_ssts()
        writers = self.writers()
        for bucket, writer in enumerate(writers):
            assert set(self.found_by(bucket, writer)["id"].to_pylist()) == self.of_bucket(bucket).keys()
        with self.ours() as table:
            self.same(table.scan().read_all())


def close(writers: Iterable[ShardWriter]) -> None:
    """Close the writers; each flushes its rows as one generation."""
    for writer in writers:
        writer.close()


# ---- tables --------------------------------------------------------------------------------------------------------


def created(uri: str, **indexes: str) -> None:
    """Create the table with memwal."""
    memwal.open(uri, schema=SCHEMA, key="id", regions=2, indexes=indexes, settings=BY_HAND).close()


def initialised(uri: str, indexes: Sequence[str] | None, **sharding: Any) -> None:
    """Create the table with Lance, with `indexes` that its writers maintain, and adopt it with `memwal init`."""
    keyed = SCHEMA.set(0, SCHEMA.field("id").with_metadata(PRIMARY_KEY))
    dataset = lance.write_dataset(keyed.empty_table(), uri, schema=keyed)
    if indexes:
        dataset.create_scalar_index("price", "BTREE", name="price_idx")
        dataset.create_scalar_index("body", "INVERTED", name="body_idx")
    dataset.initialize_mem_wal(maintained_indexes=indexes, **sharding)
    asked = {"price": "btree", "body": "fts"} if indexes else {}
    assert initialise(load({"table": {"uri": uri, "indexes": asked}}, {}), {})[1] == "adopted (arrow)"


TABLES: dict[str, Callable[[str], None]] = {
    "ours": created,
    "ours, with indexes": lambda uri: created(uri, **INDEXES),
    "Lance's": lambda uri: initialised(uri, None, bucket_column="id", num_buckets=2),
    "Lance's, with indexes": lambda uri: initialised(uri, ["price_idx", "body_idx"], bucket_column="id", num_buckets=2),
    "Lance's, unsharded": lambda uri: initialised(uri, None, unsharded=True),
}


@pytest.fixture(params=TABLES)
def world(request: pytest.FixtureRequest, uri: str) -> World:
    """Yield a table that has committed rows only."""
    TABLES[request.param](uri)
    world = World(uri)
    with world.ours() as table:
        world.put(table, FIRST, 1)
        table.flush()
        table.commit()
    world.check_committed()
    return world


# ---- tests ---------------------------------------------------------------------------------------------------------


def test_what_shard_writer_flushed_is_committed(world: World) -> None:
    world.three_generations()
    assert world.listed() == 3 * len(world.base.regions)
    world.check_clean()
    world.check_lance_over_ssts()
    with world.ours() as table:
        world.same(table.scan().read_all())
        assert table.commit().ssts == 3 * len(world.base.regions)
        world.same(table.scan(level="committed").read_all())
    world.check_committed()
    world.check_collected()


def test_by_the_command(uri: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    created(uri, **INDEXES)
    world = World(uri)
    world.three_generations()
    config = tmp_path / "table.toml"
    gc = {"interval": "0s", "wal_age_min": "0s", "sst_age_min": "0s"}
    config.write_text(toml({"table": {"uri": uri}, "gc": gc, "commit": {"interval": "0s"}}))
    for command in (["verify", "--deep"], ["commit"], ["verify", "--deep"], ["gc"], ["verify", "--deep"]):
        done = cli(command[0], str(config), *command[1:])
        assert done.code == 0, (command, done.out, done.err)
    assert world.directories() == []
    world.same(lance.dataset(uri).to_table())
    world.check_clean()


def test_generations_of_both_in_one_commit(world: World) -> None:
    """ShardWriter, memwal, ShardWriter, memwal: each overwrites and deletes rows that the other one wrote."""
    writers = world.writers()
    world.their_put(writers, range(290, 320), 2)
    world.their_delete(writers, [3, 4])
    close(writers)
    with world.ours() as table:
        world.put(table, [3, *range(300, 310)], 3)
        world.delete(table, [295, 311])
        table.flush()
        world.put(table, [295], 4)  # only in the log when the other writer claims
    writers = world.writers()
    world.their_delete(writers, [300, 3])
    world.their_put(writers, [311, 400], 5)
    world.their_put(writers, [311], 6)
    close(writers)
    with world.ours() as table:
        world.delete(table, [400])
        world.put(table, [300, 600], 7)
        table.flush()
        world.same(table.scan().read_all())
        world.check_lance_over_ssts()
        report = table.commit()
    assert report.ssts > 2 * len(world.base.regions)
    world.check_committed()
    world.check_collected()


@pytest.mark.parametrize("world", ["ours, with indexes", "Lance's, unsharded"], indirect=True)
def test_a_commit_beside_a_shard_writer_that_goes_on(world: World, wait_until: Callable[..., Any]) -> None:
    """ShardWriter's next publication must keep what is committed and pruned meanwhile, and memwal must keep
    ShardWriter's rows.
    """
    writers = world.writers(max_memtable_rows=32)
    for turn in range(3):
        for first in range(turn, turn + 200, 20):
            world.their_put(writers, range(first, first + 20), 2 + turn)
        wait_until(lambda: world.listed() >= len(writers))
        assert flush.commit(world.uri, {}, world.store, clock=wal.SystemClock()).ssts >= len(writers)
    world.their_delete(writers, [5, 7])
    close(writers)
    world.check_lance_over_ssts()
    flush.commit(world.uri, {}, world.store, clock=wal.SystemClock())
    world.check_committed()
    world.check_collected()
