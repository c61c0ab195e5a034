"""Conformance at every stage of a row: Lance's own readers and LanceDB return the same rows as memwal's reader.

    tail        rows only in the log and the memtable, older ones in the base
    flushed     in SSTs over the base, of several generations and regions
    mid-commit  between the two passes of a commit: deleted keys gone from the base, SSTs still listed
    committed   in the base, SSTs dropped from the manifests
    collected   SSTs and log entries deleted
    closed      no process owns the regions

Lance's readers get a region's SSTs, and LanceDB finds them itself, so both are compared with level `flushed`. LanceDB's
reads of the base alone are compared with `committed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, LsmVectorSearchPlanner, ShardSnapshot

import memwal
import memwal.flush.commits.rounds
from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.table.garbage import Ages
from memwal.ingest.engine.table.stored import StoredTable
from tests.lance_scan import snapshots

WIDTH = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("price", pa.int64()),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
INDEXES = {"vector": "ivf_pq", "body": "fts", "price": "btree"}
KEYS = {"int64": ["id"], "composite": ["name", "id"]}
PLACES = ("harbor", "copper", "violet", "meadow", "tunnel")


def rows(ids: Sequence[int], price: int) -> pa.Table:
    vectors = [np.random.default_rng([id, price]).random(WIDTH, dtype=np.float32) for id in ids]
    return pa.table(
        [
            pa.array(ids, pa.int64()),
            pa.array([f"name {id}" for id in ids]),
            pa.array([price] * len(ids), pa.int64()),
            pa.array([f"{PLACES[id % 5]} {PLACES[(id + price) % 5]}" for id in ids]),
            pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(vectors)), WIDTH),
        ],
        schema=SCHEMA,
    )


def content(found: pa.Table) -> pa.Table:
    """Return the columns in the table's order and the rows by id."""
    return found.select(SCHEMA.names).cast(pa.schema(list(SCHEMA))).sort_by("id").combine_chunks()


class Readers:
    """memwal's readers beside those of Lance and LanceDB, for the table at `uri` with the key columns `key`."""

    def __init__(self, uri: Path, key: Sequence[str]) -> None:
        self.uri, self.key = str(uri), key
        self.lancedb = lancedb.connect(str(uri.parent)).open_table(uri.stem)

    def snapshots(self) -> list[ShardSnapshot]:
        store = wal.open_store(self.uri, {})
        manifests = [wal.ManifestStore(store, region).latest() for region in wal.regions(store)]
        assert None not in manifests
        return snapshots(manifests)

    def agree(self, table: Any, *, base_alone: bool = False) -> None:
        """Compare the readers. `table`: a memwal table of any form. `base_alone`: all rows are in the base, so all
        levels are equal.
        """
        flushed = content(table.scan(level="flushed").read_all())
        self._lance_agrees(table, flushed)
        committed = content(table.scan(level="committed").read_all())
        self._lancedb_agrees(table, flushed, committed)
        if base_alone:
            assert flushed == committed == content(table.scan().read_all())

    def _lance_agrees(self, table: Any, expected: pa.Table) -> None:
        base, snapshots = lance.dataset(self.uri), self.snapshots()
        assert content(LsmScanner.from_snapshots(base, snapshots).to_table()) == expected
        cheap = LsmScanner.from_snapshots(base, snapshots).filter("price < 2").to_table()
        assert content(cheap) == expected.filter(pc.field("price") < 2)
        lookups = LsmPointLookupPlanner(base, snapshots)
        for id in (0, 3, 12, 299, 305, 360, 411, 9_999):
            found = lookups.plan_lookup(self._key(id), columns=SCHEMA.names).to_table()
            assert content(found) == expected.filter(pc.field("id") == id), id
        near = np.random.default_rng(1).random(WIDTH, dtype=np.float32)
        searches = LsmVectorSearchPlanner(base, snapshots, "vector")
        # The search requests all rows: with a small k it sometimes misses a row that the trained index codes badly.
        columns = ["id", "price", "_distance"]
        plan = searches.plan_search(
            pa.array(near), k=1_000, columns=columns, refine_base_table=True, overfetch_factor=2.0
        )
        ours = table.search("vector", near, k=1_000, columns=["id", "price"], level="flushed")
        assert pairs(plan.to_table()) == pairs(ours)

    def _lancedb_agrees(self, table: Any, flushed: pa.Table, committed: pa.Table) -> None:
        self.lancedb.checkout_latest()
        assert content(self.lancedb.to_arrow()) == flushed
        assert content(self.lancedb.search().where("price >= 2").limit(1_000).to_arrow()) == flushed.filter(
            pc.field("price") >= 2
        )
        assert self.lancedb.count_rows("price >= 2") == committed.filter(pc.field("price") >= 2).num_rows
        near = np.random.default_rng(2).random(WIDTH, dtype=np.float32)
        nearest = self.lancedb.search(near).use_lsm(False).limit(10).refine_factor(100).nprobes(20)
        assert pairs(nearest.to_arrow()) == pairs(table.search("vector", near, k=10, level="committed"))
        worded = self.lancedb.search("violet", query_type="fts", fts_columns="body").use_lsm(False).limit(1_000)
        ours = table.match("body", "violet", k=1_000, level="committed")
        assert sorted(pairs(worded.to_arrow())) == sorted(pairs(ours))
        # LanceDB searches above the base only if the index is listed by name, and the list would have to be written
        # before the vector index exists. If the search succeeds, the README promises too little.
        with pytest.raises(RuntimeError, match="maintained by the write spec"):
            self.lancedb.search(near).limit(10).to_arrow()

    def _key(self, id: int) -> pa.Array:
        values = {"id": pa.array([id]), "name": pa.array([f"name {id}"])}
        if len(self.key) == 1:
            return values[self.key[0]]
        return pa.StructArray.from_arrays([values[each] for each in self.key], names=list(self.key))


def pairs(found: pa.Table) -> list[tuple[int, int]]:
    return list(zip(found.column("id").to_pylist(), found.column("price").to_pylist(), strict=True))


@pytest.fixture
def between_passes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Yield a list of functions that run between a commit's deletes pass and its upserts pass."""
    calls: list[Callable[[], None]] = []
    upsert = memwal.flush.commits.rounds.upsert_pass

    def upsert_pass(*given: Any, **more: Any) -> Any:
        for call in calls:
            call()
        return upsert(*given, **more)

    monkeypatch.setattr(memwal.flush.commits.rounds, "upsert_pass", upsert_pass)
    return calls


@pytest.mark.parametrize(("key", "wal_format"), [*((each, "lance") for each in KEYS), ("composite", "arrow")])
def test_all_readers_agree_at_every_stage(
    key: str, wal_format: str, tmp_path: Path, between_passes: list[Callable[[], None]]
) -> None:
    uri, columns = tmp_path / "goods.lance", KEYS[key]
    settings = {
        "wal": {"format": wal_format},
        "commit": {"interval": "0s"},
        "gc": {"interval": "0s", "wal_age_min": "0s", "sst_age_min": "0s"},
    }
    with memwal.open(uri, schema=SCHEMA, key=columns, regions=2, indexes=INDEXES, settings=settings) as table:
        table.put(rows(range(400), 1))
        table.flush()
        table.commit()
        readers = Readers(uri, columns)
        readers.agree(table, base_alone=True)
        table.put(rows(range(300, 420), 2))
        table.delete(keys(columns, range(10, 20)))
        readers.agree(table)  # tail
        table.flush()
        readers.agree(table)  # flushed
        table.put(rows([12, *range(350, 370)], 3))
        table.delete(keys(columns, [305, 411]))
        table.flush()
        readers.agree(table)  # flushed, several generations
        seen: list[int] = []
        between_passes.append(lambda: readers.agree(table))  # mid-commit
        between_passes.append(lambda: seen.append(table.count(level="committed")))
        table.commit()
        assert seen == [400 - 9 - 1], "10 to 19 but 12, and 305, were gone from the base"
        readers.agree(table, base_alone=True)  # committed
        table.upkeep.collect(Ages(0.0, 0.0, 0.0))
        assert not list(uri.glob("_mem_wal/*/*_gen_*")), "collected"
        readers.agree(table, base_alone=True)
    base = BaseTable.open(str(uri))
    readers.agree(StoredTable(base, wal.open_store(str(uri), {})), base_alone=True)  # closed


def keys(key: Sequence[str], ids: Sequence[int]) -> pa.Table:
    values = {"id": pa.array(ids, pa.int64()), "name": pa.array([f"name {id}" for id in ids])}
    return pa.table({name: values[name] for name in key})
