"""The models read from Lance's vector indexes: decoded vectors, search results, and the indexes that are left out."""

import logging
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from memwal.flush import BaseTable
from memwal.flush.base.vector_models import vector_models
from memwal.memtable import IndexSpec, row_schema, with_tombstone
from memwal.memtable.vector.column import unit_length
from tests.index_modes import memtable_in
from tests.s3_fixtures import S3Table

WIDTH = 32
TYPES = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}


def topics(rows: int, seed: int) -> np.ndarray:
    """Return vectors of 6 topics with various lengths."""
    numbers = np.random.default_rng(seed)
    centres = 3 * np.random.default_rng(0).standard_normal((6, WIDTH))
    return (centres[numbers.integers(0, 6, rows)] + numbers.standard_normal((rows, WIDTH))).astype(np.float32)


def table_of(vectors: np.ndarray, kind: pa.DataType = pa.float32()) -> pa.Table:  # noqa: B008 - immutable
    flat = pa.array(vectors.ravel().astype(kind.to_pandas_dtype()), kind)
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.list_(kind, WIDTH))]
    column = pa.FixedSizeListArray.from_arrays(flat, WIDTH)
    return pa.Table.from_arrays([pa.array(np.arange(len(vectors))), column], schema=pa.schema(fields))


def indexed(uri: str, vectors: np.ndarray, metric: str, **how: Any) -> lance.LanceDataset:
    kind, storage_options = how.pop("type", pa.float32()), how.pop("storage_options", None)
    dataset = lance.write_dataset(table_of(vectors, kind), uri, storage_options=storage_options)
    settings = {"num_partitions": 4, "num_sub_vectors": 4, **how}
    return dataset.create_index("v", settings.pop("kind", "IVF_PQ"), name="v_idx", metric=metric, **settings)


def spec(metric: str) -> IndexSpec:
    return IndexSpec("v", "ivf_pq", {"metric": metric})


def decoded(dataset: lance.LanceDataset, centroids: np.ndarray, codebook: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row ids and the vectors that the index's codes decode to; `centroids` is zero if codes are not
    residual."""
    (index,) = dataset.describe_indices()
    file = LanceFileReader(f"{dataset.uri}/_indices/{index.segments[0].uuid}/auxiliary.idx")
    rows = file.read_all().to_table()
    codes = rows["__pq_code"].combine_chunks().flatten().to_numpy()
    sizes = [each["size"] for each in dataset.stats.index_stats("v_idx")["indices"][0]["partitions"]]
    vectors, at = [], 0
    for centroid, size in zip(centroids, sizes, strict=True):
        part = codes[at * len(codebook) : (at + size) * len(codebook)].reshape(len(codebook), size)  # by sub-vector
        vectors.append(centroid + np.hstack([codebook[m][part[m]] for m in range(len(codebook))]))
        at += size
    return rows["_rowid"].to_numpy(), np.concatenate(vectors)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_rows_decode_to_themselves_by_the_model(tmp_path: Path, metric: str, kind: str) -> None:
    """This shows that memwal reads the layout correctly: residual or not, of unit length or not, order of the codes."""
    vectors = topics(2_000, 1)
    dataset = indexed(str(tmp_path / "t"), vectors, metric, type=TYPES[kind])
    model = vector_models(dataset, [spec(metric)], {})["v"]
    assert model.residual == (metric != "dot")
    assert (model.centroids.shape, model.codebook.shape) == ((4, WIDTH), (4, 256, WIDTH // 4))
    ids, found = decoded(dataset, model.centroids if model.residual else 0 * model.centroids, model.codebook)
    true = unit_length(vectors)[ids] if metric == "cosine" else vectors[ids]
    spread = ((true - true.mean(axis=0)) ** 2).sum()
    assert ((found - true) ** 2).sum() < 0.1 * spread


@pytest.mark.parametrize("how", [{}, {"num_bits": 4}, {"num_partitions": 100}])
@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_a_memtable_that_begins_with_the_model_finds_what_is_near(
    tmp_path: Path, metric: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.memtable.vector.index.EXACT_ROWS", 0)
    monkeypatch.setattr("memwal.memtable.vector.index.FETCH", 500)
    dataset = indexed(str(tmp_path / "t"), topics(3_000, 1), metric, **how)
    models = vector_models(dataset, [spec(metric)], {})
    monkeypatch.setattr("memwal.memtable.vector.index.Quantiser.trained", None)  # the memtable trains nothing
    schema = row_schema(dataset.schema, ["id"])
    table, vectors = memtable_in("sync", schema, ["id"], [spec(metric)], 1, models=models), topics(5_000, 2)
    table.apply(with_tombstone(table_of(vectors), schema))
    snapshot, found = table.snapshot(), 0
    assert snapshot.way("v", 10, snapshot.live()) == (500 + 5_000 % 512, "quantiser")
    for query in topics(40, 3):
        rows, _ = snapshot.search("v", query, 10, snapshot.live())
        near = -vectors @ query if metric == "dot" else ((vectors - query) ** 2).sum(axis=1)
        if metric == "cosine":
            near = -unit_length(vectors) @ query
        found += len(set(rows.tolist()) & set(np.argsort(near)[:10].tolist()))
    assert found / 400 >= 0.95


def test_an_extended_index_keeps_its_model(tmp_path: Path) -> None:
    dataset = indexed(str(tmp_path / "t"), topics(1_000, 1), "l2")
    before = vector_models(dataset, [spec("l2")], {})["v"]
    dataset = lance.write_dataset(table_of(topics(500, 2)), dataset.uri, mode="append")
    dataset.optimize.optimize_indices(index_names=["v_idx"])
    after = vector_models(lance.dataset(dataset.uri), [spec("l2")], {})["v"]
    assert np.array_equal(before.codebook, after.codebook)  # Lance may have split or joined lists


def test_an_index_of_another_metric_or_kind_is_left_out_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memwal.models")
    dataset = indexed(str(tmp_path / "cosine"), topics(1_000, 1), "cosine")
    assert vector_models(dataset, [spec("l2")], {}) == {}
    assert "IVF_PQ with the metric cosine, not IVF_PQ with l2" in caplog.text
    flat = lance.write_dataset(table_of(topics(1_000, 1)), tmp_path / "flat")
    flat = flat.create_index("v", "IVF_FLAT", name="v_idx", num_partitions=2)
    assert vector_models(flat, [spec("l2")], {}) == {}
    assert "IVF_FLAT" in caplog.text
    bare = lance.write_dataset(table_of(topics(10, 1)), tmp_path / "bare")
    assert vector_models(bare, [spec("l2"), IndexSpec("id", "btree")], {}) == {}


@pytest.mark.parametrize("name", ["index.idx", "auxiliary.idx"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "noise"])
def test_a_damaged_index_is_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    dataset = indexed(str(tmp_path / "t"), topics(1_000, 1), "l2")
    (path,) = (tmp_path / "t").glob(f"_indices/*/{name}")
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "noise": bytes(len(data))}[damage])
    assert vector_models(lance.dataset(dataset.uri), [spec("l2")], {}) == {}
    assert "cannot read the model of index v_idx" in caplog.text


def test_a_base_table_gives_its_models_on_any_store(tmp_path: Path, s3_table: S3Table) -> None:
    vectors = topics(1_000, 1)
    for uri, options in ((str(tmp_path / "t"), {}), (s3_table.uri, s3_table.storage_options)):
        indexes = [spec("cosine"), IndexSpec("id", "btree")]
        BaseTable.create(uri, table_of(vectors[:1]).schema, ["id"], 1, indexes, options)
        assert BaseTable.open(uri, options).vector_models() == {}
        dataset = lance.dataset(uri, storage_options=options)
        dataset = lance.write_dataset(table_of(vectors), dataset, mode="append", storage_options=options)
        dataset.create_index("v", "IVF_PQ", name="v_idx", metric="cosine", num_partitions=2, num_sub_vectors=4)
        assert BaseTable.open(uri, options).vector_models()["v"].centroids.shape == (2, WIDTH)
