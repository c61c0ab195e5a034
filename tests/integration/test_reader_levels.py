"""Reads over every level, compared with a dict: the newest version of a key is returned, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable

from memwal import flush, wal
from memwal.ingest.engine.read.levels import CaptureOvertaken, RegionView
from memwal.ingest.engine.read.reader import Captured, Reader
from memwal.memtable import IndexSpec, MemTable, Snapshot, row_schema, tombstones, with_tombstone
from tests.support.clock import SeededIds

WIDTH = 8
WORDS = ("archive", "network", "library", "python", "kernel", "font", "game")
INDEXES = (
    IndexSpec("vec", "ivf_pq", {"num_sub_vectors": 4, "num_partitions": 4}),
    IndexSpec("text", "fts"),
    IndexSpec("size", "btree"),
)
SINGLE = pa.schema([pa.field("name", pa.string(), nullable=False)])
COMPOSITE = pa.schema(
    [
        pa.field("day", pa.int16(), nullable=False),
        pa.field("raw", pa.binary(), nullable=False),
        pa.field("no", pa.uint64(), nullable=False),
    ]
)
VALUES = pa.schema(
    {"size": pa.int64(), "text": pa.string(), "vec": pa.list_(pa.float32(), WIDTH), "Odd Name": pa.float64()}
)
Key = tuple[Any, ...]
Row = dict[str, Any]


@dataclass
class World:
    """A table whose levels are built by hand, and the rows that a reader must see."""

    base: flush.BaseTable
    store: wal.ObjectStore
    rng: np.random.Generator
    ids: wal.Ids
    memtables: dict[int, list[MemTable]] = field(default_factory=dict)
    ssts: dict[int, list[wal.SsTable]] = field(default_factory=dict)
    generation: dict[int, int] = field(default_factory=dict)
    truth: dict[Key, Row] = field(default_factory=dict)

    @staticmethod
    def create(path: Path, key: pa.Schema, seed: int = 0) -> World:
        schema = pa.schema([*key, *VALUES])
        base = flush.BaseTable.create(str(path / "table"), schema, key.names, 2, INDEXES)
        ids = SeededIds(seed)
        return World(base, wal.open_store(base.uri), np.random.default_rng(seed), ids)

    @property
    def key(self) -> tuple[str, ...]:
        return self.base.key

    @property
    def rows(self) -> pa.Schema:
        return row_schema(self.base.schema, self.key)

    # ---- changes -----------------------------------------------------------------------------------------------------

    def keys(self, numbers: Iterable[int]) -> list[Row]:
        """Return keys by number; text keys contain quotes."""
        if len(self.key) == 1:
            return [{"name": f'it\'s "{number}"'} for number in numbers]
        return [{"day": n % 60 - 30, "raw": bytes([n % 7, 39, 0]), "no": 2**63 + n // 2} for n in map(int, numbers)]

    def fresh(self, numbers: Iterable[int]) -> list[Row]:
        """Return rows with random values for the keys of `numbers`; some values are null."""
        return [
            {
                **key,
                "size": int(self.rng.integers(0, 100)),
                "text": None if self.rng.random() < 0.1 else " ".join(self.rng.choice(WORDS, 3)),
                "vec": None if self.rng.random() < 0.1 else self.rng.normal(size=WIDTH).astype("f4").tolist(),
                "Odd Name": None if self.rng.random() < 0.5 else float(self.rng.random()),
            }
            for key in self.keys(numbers)
        ]

    def table(self, rows: list[Row]) -> pa.Table:
        return pa.Table.from_pylist(rows, schema=self.base.schema)

    def into_base(self, rows: list[Row]) -> None:
        """Upsert like another program: no generation is marked as committed."""
        dataset = lance.dataset(self.base.uri)
        upsert = dataset.merge_insert(list(self.key)).when_matched_update_all().when_not_matched_insert_all()
        upsert.execute(self.table(rows))
        self.remember(rows)

    def put(self, rows: list[Row]) -> None:
        """Put rows into the active memtables."""
        self._apply(with_tombstone(self.table(rows), self.rows))
        self.remember(rows)

    def delete(self, numbers: Iterable[int]) -> None:
        keys = self.keys(numbers)
        table = pa.Table.from_pylist(keys, schema=pa.schema([self.base.schema.field(name) for name in self.key]))
        self._apply(tombstones(table, self.rows))
        for key in keys:
            self.truth.pop(tuple(key.values()), None)

    def freeze(self) -> None:
        """Freeze every active memtable."""
        for bucket, tables in self.memtables.items():
            if tables and tables[0].rows:
                tables[0].freeze()
                self.generation[bucket] += 1
                tables.insert(0, MemTable(self.rows, self.key, INDEXES, self.generation[bucket]))

    def flush(self) -> None:
        """Turn every memtable into a listed SST."""
        self.freeze()
        for bucket, tables in self.memtables.items():
            for table in reversed(tables[1:]):
                self.ssts.setdefault(bucket, []).append(self._sst(bucket, table.snapshot()))
            del tables[1:]

    def commit(self) -> None:
        """Write everything into the base; the SSTs stay listed, as after a crash between commit and prune."""
        self.flush()
        dataset = lance.dataset(self.base.uri)
        dataset.delete("true")
        markers = [
            CompactedSsTable(str(wal.bucket_region(bucket)), ssts[-1].generation) for bucket, ssts in self.ssts.items()
        ]
        upsert = dataset.merge_insert(list(self.key)).when_matched_update_all().when_not_matched_insert_all()
        upsert.mark_sstables_as_compacted(markers).execute(self.table(list(self.truth.values())))

    def index_base(self) -> None:
        lance.dataset(self.base.uri).create_index("vec", "IVF_PQ", name="vec_idx", num_partitions=4, num_sub_vectors=4)

    def remember(self, rows: list[Row]) -> None:
        self.truth.update({tuple(row[name] for name in self.key): row for row in rows})

    def _apply(self, rows: pa.Table) -> None:
        buckets = self.base.route(rows)
        for bucket in np.unique(buckets).tolist():
            self.generation.setdefault(bucket, 1)
            tables = self.memtables.setdefault(bucket, [MemTable(self.rows, self.key, INDEXES, 1)])
            tables[0].apply(rows.filter(pa.array(buckets == bucket)))

    def _sst(self, bucket: int, snapshot: Snapshot) -> wal.SsTable:
        return flush.write_sst(
            self.store,
            wal.bucket_region(bucket),
            snapshot,
            flush.SstFormat.of(self.base),
            generation=snapshot.generation,
            ids=self.ids,
        )

    # ---- reads -------------------------------------------------------------------------------------------------------

    def views(self) -> Captured:
        views = [
            RegionView(
                wal.bucket_region(bucket),
                tuple(table.snapshot() for table in tables if table.rows),
                tuple(self.ssts.get(bucket, ())),
            )
            for bucket, tables in self.memtables.items()
        ]
        return Captured(views)

    def reader(self) -> Reader:
        return Reader(self.base, self.store)

    def by_key(self, rows: pa.Table) -> dict[Key, Row]:
        """Return rows by key; fail if a key occurs twice."""
        found = {tuple(row[name] for name in self.key): row for row in rows.to_pylist()}
        assert len(found) == rows.num_rows, "a row came twice"
        return found


def build(world: World) -> World:
    """Fill every level: rows of another program, committed rows whose SST is still listed, SSTs, frozen and active
    memtables.
    """
    draw = world.rng.choice
    world.into_base(world.fresh(range(400)))
    world.put(world.fresh(draw(450, 60, replace=False)))
    world.delete(draw(450, 30, replace=False))
    world.commit()
    world.into_base(world.fresh(draw(list(range(450)), 40, replace=False)))
    for finish in (world.flush, world.flush, world.freeze, world.freeze, lambda: None):
        world.put(world.fresh(draw(500, 50, replace=False)))
        world.delete(draw(500, 40, replace=False))
        world.put(world.fresh(draw(500, 20, replace=False)))
        finish()
    return world


@pytest.fixture(
    scope="module",
    params=["single key, IVF-PQ in the base", "single key, no vector index", "composite key"],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Build one world per kind; the tests that use it only read."""
    key = COMPOSITE if "composite" in request.param else SINGLE
    made = build(World.create(tmp_path_factory.mktemp("world"), key, seed=len(request.param)))
    if "IVF-PQ" in request.param:
        made.index_base()
    return made


FILTERS: dict[str, Callable[[Row], bool]] = {
    "size < 50": lambda row: row["size"] < 50,
    "SIZE BETWEEN 10 AND 12": lambda row: 10 <= row["size"] <= 12,
    "text LIKE '%python%' AND `Odd Name` IS NOT NULL": lambda row: (
        "python" in (row["text"] or "") and row["Odd Name"] is not None
    ),
    'text = "font font font" OR NOT (`Odd Name` > 0.5)': lambda row: (
        row["text"] == "font font font" or (row["Odd Name"] is not None and not row["Odd Name"] > 0.5)
    ),
    "size > 1000": lambda row: False,
}


def test_every_read_answers_from_the_newest_versions_only(world: World) -> None:
    views, reader = world.views(), world.reader()

    assert world.by_key(reader.scan(views).read_all()) == world.truth
    assert reader.count(views) == len(world.truth)
    for filter, passes in FILTERS.items():
        expected = {key: row for key, row in world.truth.items() if passes(row)}
        assert world.by_key(reader.scan(views, filter=filter).read_all()) == expected, filter
        assert reader.count(views, filter) == len(expected), filter


@pytest.mark.parametrize("limit", [0, 1, 7, 100, 10_000])
def test_a_limit_is_met_with_live_rows_whenever_there_are_enough(world: World, limit: int) -> None:
    found = world.by_key(world.reader().scan(world.views(), limit=limit).read_all())

    assert len(found) == min(limit, len(world.truth))
    assert found.items() <= world.truth.items()


@pytest.mark.parametrize("count", [1, 3, 600])
def test_get_finds_what_is_live_in_the_order_asked(world: World, count: int) -> None:
    for _ in range(5):
        asked = world.keys(world.rng.choice(600, count, replace=False))
        rows = world.reader().get(world.views(), asked + asked[:1])

        live = [tuple(key.values()) for key in asked if tuple(key.values()) in world.truth]
        assert rows.to_pylist() == [world.truth[key] for key in dict.fromkeys(live)]


def test_columns_come_as_asked_with_the_types_of_the_table(world: World) -> None:
    views, reader = world.views(), world.reader()
    asked = world.keys(range(20))
    wanted = ["vec", "size"]

    for rows in (
        reader.get(views, asked, wanted),
        reader.scan(views, wanted).read_all(),
        reader.search(views, "vec", [0.0] * WIDTH, 5, columns=wanted),
        reader.match(views, "text", "python", 5, columns=wanted),
        reader.scan(views, wanted, "size > 1000").read_all(),
        reader.get(views, [], wanted),
    ):
        assert rows.column_names[:2] == wanted
        assert [field.type for field in rows.schema][:2] == [VALUES.field(name).type for name in wanted]
    assert reader.scan(views).read_all().column_names == world.base.schema.names


def nearest(world: World, vector: np.ndarray, passes: Callable[[Row], bool]) -> list[float]:
    vectors = [row["vec"] for row in world.truth.values() if row["vec"] is not None and passes(row)]
    return sorted(((np.array(vectors, "f4").reshape(-1, WIDTH) - vector) ** 2).sum(axis=1).tolist())


@pytest.mark.parametrize("k", [1, 10, 200, 10_000])
def test_a_search_gives_the_k_nearest_live_rows_and_their_true_distances(world: World, k: int) -> None:
    views, reader = world.views(), world.reader()
    for filter, passes in {"": lambda row: True, **FILTERS}.items():
        vector = world.rng.normal(size=WIDTH).astype("f4")
        rows = reader.search(views, "vec", vector, k, filter or None)
        found, true = world.by_key(rows), nearest(world, vector, passes)

        assert rows.num_rows == min(k, len(true)), filter
        distances = rows.column("_distance").to_pylist()
        assert distances == sorted(distances)
        for key, row in found.items():
            assert passes(row)
            assert {**world.truth[key], "_distance": row["_distance"]} == row
            assert row["_distance"] == pytest.approx(((np.array(row["vec"], "f4") - vector) ** 2).sum(), rel=1e-4)
        # an IVF-PQ index may miss a near row, but not many
        near_enough = sum(distance <= true[len(found) - 1] * (1 + 1e-4) for distance in distances)
        assert near_enough >= 0.9 * len(found)


@pytest.mark.parametrize("k", [1, 10, 10_000])
@pytest.mark.parametrize("text", ["python", "kernel fonts nothing", "zebra"])
def test_a_match_gives_live_rows_that_hold_a_word(world: World, k: int, text: str) -> None:
    views, reader = world.views(), world.reader()
    stems = [word.removesuffix("s") for word in text.split()]
    for filter, passes in {"": lambda row: True, **FILTERS}.items():
        holding = {
            key: row
            for key, row in world.truth.items()
            if passes(row) and any(stem in (row["text"] or "").split() for stem in stems)
        }
        rows = reader.match(views, "text", text, k, filter or None)

        scores = rows.column("_score").to_pylist()
        assert rows.num_rows == min(k, len(holding)), filter
        assert scores == sorted(scores, reverse=True)
        for key, row in world.by_key(rows).items():
            assert {**holding[key], "_score": row["_score"]} == row


def test_views_captured_before_a_commit_of_their_memtables_are_given_back(tmp_path: Path) -> None:
    """Only the region's owner knows whether the committed generation has exactly their rows."""
    world = World.create(tmp_path, SINGLE)
    world.put(world.fresh(range(50)))
    world.flush()
    world.put(world.fresh(range(25, 75)))
    world.freeze()
    world.put(world.fresh(range(70, 80)))
    reader, views, truth = world.reader(), world.views(), dict(world.truth)

    world.commit()

    for read in (reader.scan, reader.count):
        with pytest.raises(CaptureOvertaken):
            read(views)
    assert world.by_key(reader.scan(world.views()).read_all()) == truth
    assert reader.count(world.views()) == 80


def test_a_committed_sst_that_is_still_listed_does_not_hide_newer_base_rows(tmp_path: Path) -> None:
    world = World.create(tmp_path, SINGLE)
    world.put(world.fresh([1]))
    world.commit()
    newer = world.fresh([1])
    world.into_base(newer)

    assert world.reader().scan(world.views()).read_all().to_pylist() == newer
