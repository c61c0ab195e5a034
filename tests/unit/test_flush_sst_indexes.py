"""The indexes inside an SST equal those of the base table, and a flush never depends on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from memwal.flush import BaseTable, SstFormat, SstIndexes, read_sst, write_sst
from memwal.flush.base.vector_models import vector_models
from memwal.flush.commits.index_catchup import catch_up
from memwal.memtable import IndexSpec, MemTable, VectorModel, row_schema, tombstones, with_tombstone
from memwal.wal import LocalStore, SsTable, bucket_region
from tests.support.clock import SeededIds

REGION, WIDTH = bucket_region(0), 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
        pa.field("body", pa.string()),
        pa.field("price", pa.int64()),
    ]
)
SPECS = (
    IndexSpec("vector", "ivf_pq", {"num_partitions": 2}),
    IndexSpec("body", "fts", {"with_position": True, "stem": False}),
    IndexSpec("price", "btree"),
)
NAMES = {"vector_idx": "IVF_PQ", "body_idx": "Inverted", "price_idx": "BTree"}


def rows(ids: range, schema: pa.Schema = SCHEMA) -> pa.Table:
    vectors = np.random.default_rng(ids.start).standard_normal((len(ids), WIDTH)).astype(np.float32)
    columns = {"id": ids, "vector": list(vectors), "body": [f"running {i}" for i in ids], "price": ids}
    return pa.table(columns, schema=SCHEMA).cast(schema)


class World:
    """A base table whose indexes are built, and SSTs over it."""

    def __init__(self, uri: str, schema: pa.Schema = SCHEMA, specs: tuple[IndexSpec, ...] = SPECS) -> None:
        created = BaseTable.create(uri, schema, ["id"], 1, specs)
        dataset = lance.dataset(uri)
        dataset.insert(rows(range(400), schema))
        catch_up(dataset, specs)
        self.base, self.store = created.latest(), LocalStore(uri)
        self.schema, self.models = row_schema(self.base.schema, ["id"]), self.base.vector_models()
        self.indexes = SstIndexes(specs, lambda: self.models)
        self._ids = SeededIds(1)

    def flush(self, table: pa.Table, field_ids: tuple[int, ...] | None = None) -> tuple[SsTable, lance.LanceDataset]:
        memtable = MemTable(self.schema, ["id"], [], generation=1)
        memtable.apply(table)
        sst = write_sst(
            self.store,
            REGION,
            memtable.snapshot(),
            SstFormat(["id"], self.base.storage_version, field_ids, indexes=self.indexes),
            generation=1,
            ids=self._ids,
        )
        return sst, lance.dataset(self.store.url(f"_mem_wal/{REGION}/{sst.path}"))

    def put(self, ids: range, field_ids: tuple[int, ...] | None = None) -> tuple[SsTable, lance.LanceDataset]:
        return self.flush(with_tombstone(rows(ids).cast(self.base.schema), self.schema), field_ids)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(str(tmp_path / "table"))


def kinds(dataset: lance.LanceDataset) -> dict[str, str]:
    return {index.name: index.index_type for index in dataset.describe_indices()}


def nearest(dataset: lance.LanceDataset, query: npt.NDArray[Any], **more: Any) -> list[int]:
    asked = {"column": "vector", "q": query, "k": 10, "nprobes": 2, **more}
    found: list[int] = dataset.scanner(columns=["id"], nearest=asked, fast_search=True).to_table()["id"].to_pylist()
    return found


def test_all_of_the_tables_indexes_are_there_and_cover_every_row(world: World) -> None:
    sst, dataset = world.put(range(1000, 1300))
    assert kinds(dataset) == NAMES
    assert all(index.num_rows_indexed == sst.physical_rows == 300 for index in dataset.describe_indices())
    assert len(read_sst(world.store, REGION, sst)) == 300


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize("number", [pa.float32(), pa.float16(), pa.float64()], ids=str)
def test_the_vector_index_is_the_bases_own(tmp_path: Path, metric: str, number: pa.DataType) -> None:
    """The index has the base's centroids and codebook, and ranks rows by the same distances as a direct computation."""
    schema = SCHEMA.set(1, pa.field("vector", pa.list_(number, WIDTH)))
    specs = (IndexSpec("vector", "ivf_pq", {"num_partitions": 2, "metric": metric, "num_sub_vectors": 4}),)
    world = World(str(tmp_path / "table"), schema, specs)
    _, dataset = world.put(range(1000, 1300))
    theirs, ours = world.models["vector"], vector_models(dataset, specs, {})["vector"]
    assert np.array_equal(ours.centroids, theirs.centroids)
    assert np.array_equal(ours.codebook, theirs.codebook)
    vectors = np.stack(dataset.to_table(columns=["vector"])["vector"].to_numpy(zero_copy_only=False)).astype(np.float64)
    hits = 0
    for query in vectors[:20]:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        distance = {"l2": ((vectors - query) ** 2).sum(1), "cosine": -(unit @ query), "dot": -(vectors @ query)}[metric]
        exact = (1000 + np.argsort(distance)[:10]).tolist()
        assert set(nearest(dataset, query, refine_factor=30)) == set(exact)
        hits += len(set(nearest(dataset, query)) & set(exact))
    assert hits > 100, "the codes alone find little: they are not of these vectors"


def test_text_and_numbers_are_indexed_with_the_tables_parameters(world: World) -> None:
    _, dataset = world.put(range(1000, 1300))

    def matches(words: str) -> int:
        return len(dataset.scanner(columns=["id"], full_text_query=words, fast_search=True, limit=1000).to_table())

    assert (matches("running"), matches("run"), matches('"running 1005"')) == (300, 0, 1)  # not stemmed, positions kept
    plan = dataset.scanner(columns=["id"], filter="price = 1007")
    assert "ScalarIndexQuery" in plan.explain_plan()
    assert plan.to_table()["id"].to_pylist() == [1007]


def test_a_vector_index_that_the_base_lacks_is_left_out(world: World) -> None:
    world.models = {}
    _, dataset = world.put(range(1000, 1300))
    assert set(kinds(dataset)) == {"body_idx", "price_idx"}
    world.indexes = SstIndexes()
    assert world.put(range(5))[1].version == 1


def test_one_row_tombstones_and_nulls(world: World) -> None:
    """An SST with too few rows to train an index, and an SST with no row to index."""
    assert kinds(world.put(range(1000, 1001))[1]) == NAMES
    deleting = tombstones(pa.table({"id": [1, 2]}), world.schema)
    sst, dataset = world.flush(deleting)
    assert set(kinds(dataset)) == {"body_idx", "price_idx"}
    assert sst.physical_rows == 2
    rest = with_tombstone(pa.table({"id": [7, 8], "vector": [None, [1.0] * WIDTH]}), world.schema)
    sst, dataset = world.flush(pa.concat_tables([rest, deleting]))
    assert kinds(dataset) == NAMES
    assert nearest(dataset, np.ones(WIDTH)) == [8]


def test_the_columns_of_an_index_are_named_by_the_base_tables_field_ids(world: World) -> None:
    _, dataset = world.put(range(1000, 1300), field_ids=(3, 9, 4, 7, 10))
    fields = {index.name: index.fields for index in dataset.describe_indices()}
    assert fields == {"vector_idx": [9], "body_idx": [4], "price_idx": [7]}
    assert nearest(dataset, rows(range(1000, 1300))["vector"][4].as_py(), refine_factor=30)[0] == 1004


def test_a_failing_index_fails_no_flush_and_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = lance.LanceDataset.create_scalar_index

    def failing(dataset: lance.LanceDataset, *given: Any, name: str, **more: Any) -> Any:
        if name == "body_idx":
            raise OSError("disk on fire\nat line 7")
        return real(dataset, *given, name=name, **more)

    caplog.set_level(logging.WARNING, "memwal.flush")
    monkeypatch.setattr(lance.LanceDataset, "create_scalar_index", failing)
    for start in (1000, 2000):
        sst, dataset = world.put(range(start, start + 20))
        assert set(kinds(dataset)) == {"vector_idx", "price_idx"}
        assert sst.physical_rows == 20
    monkeypatch.undo()
    assert kinds(world.put(range(10))[1]) == NAMES
    (told,) = [record.getMessage() for record in caplog.records]
    assert "body_idx" in told
    assert told.endswith("disk on fire")
    monkeypatch.setattr(lance.LanceDataset, "create_scalar_index", failing)
    world.put(range(10))
    assert len(caplog.records) == 2, "after a success it is news again"


def test_a_model_that_does_not_fit_is_a_failing_index(world: World, caplog: pytest.LogCaptureFixture) -> None:
    model = world.models["vector"]
    world.models = {"vector": VectorModel(model.centroids[:, :4], model.codebook, model.residual)}
    sst, dataset = world.put(range(1000, 1300))
    assert set(kinds(dataset)) == {"body_idx", "price_idx"}
    assert sst.physical_rows == 300
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(("indexes", "rows_min"), [(True, 20), (True, 21), (False, 20)])
def test_a_table_keeps_its_indexes_in_ssts_where_that_is_set(
    open_small: Callable[..., Any],
    made: Any,
    uri: str,
    indexes: bool,
    rows_min: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memwal.ingest.engine.table.open.SCALAR_ROWS_MIN", rows_min)
    table = open_small(regions=1, flush={"indexes": indexes})
    table.put(made.table(range(300)))
    table.flush()
    table.commit()  # the base table's vector index
    table.put(made.table(range(290, 310), version=1))
    table.flush()
    (sst,) = [each["path"] for each in table.status()["regions"][0]["ssts"]]
    (directory,) = Path(uri).glob(f"_mem_wal/*/{sst}")
    found = {"vector_idx": "IVF_PQ", "body_idx": "Inverted", "price_idx": "BTree"}
    if rows_min > 20:  # more than the rows of the SST
        found = {"vector_idx": "IVF_PQ"}
    assert kinds(lance.dataset(str(directory))) == (found if indexes else {})
