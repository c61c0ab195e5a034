"""Vector search: exact distances equal to Lance's, recall on real embeddings, and bad input."""

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, InvalidRows, MemTable, Snapshot, row_schema, with_tombstone
from memwal.memtable.vector import index as vector_index
from tests.messages import raises

WIDTH = 8


@pytest.fixture
def all_indexed(quantised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits as for a memtable of a million rows: the quantiser is used for any number of rows and holds nearly
    all of them."""
    monkeypatch.setattr(vector_index, "ADD_BLOCK", 10)
    monkeypatch.setattr(vector_index, "FETCH", 200)


def filled(vectors: Any, width: int = WIDTH, batch: int = 500, **parameters: Any) -> MemTable:
    base = pa.schema([pa.field("id", pa.int64(), nullable=False), ("vector", pa.list_(pa.float32(), width))])
    schema = row_schema(base, ["id"])
    table = MemTable(schema, ["id"], [IndexSpec("vector", "ivf_pq", parameters)], 1)
    column = pa.array(list(vectors), pa.list_(pa.float32(), width))
    for at in range(0, len(column), batch):
        put(table, column.slice(at, batch), at)
    return table


def put(table: MemTable, vectors: Any, first: int) -> None:
    """Put rows with the ids first, first+1, ... and these vectors."""
    column = pa.array(list(vectors), table.schema.field("vector").type) if isinstance(vectors, np.ndarray) else vectors
    rows = pa.table({"id": np.arange(first, first + len(column)), "vector": column})
    table.apply(with_tombstone(rows, table.schema))


def build(vectors: Any, width: int = WIDTH, batch: int = 500, **parameters: Any) -> Snapshot:
    """Return a snapshot of rows with these vectors, after all index steps."""
    table = filled(vectors, width, batch, **parameters)
    while table.index_step():
        pass
    return table.snapshot()


def exact(vectors: np.ndarray, query: np.ndarray, metric: str) -> np.ndarray:
    if metric == "l2":
        return ((vectors - query) ** 2).sum(axis=1)
    if metric == "dot":
        return 1 - vectors @ query
    return 1 - vectors @ query / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query))


@pytest.mark.usefixtures("share_indexed")
@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize("train_rows", [64, 10_000])
def test_distances_are_exact_and_ascending_before_and_after_training(metric: str, train_rows: int) -> None:
    generator = np.random.default_rng(1)
    vectors = generator.standard_normal((3_000, WIDTH)).astype(np.float32)
    snapshot = build(vectors, metric=metric, train_rows=train_rows)
    for query in generator.standard_normal((20, WIDTH)).astype(np.float32):
        rows, distances = snapshot.search("vector", query, 10, snapshot.live())
        true = exact(vectors, query, metric)
        assert rows.dtype == np.int64
        assert distances.dtype == np.float32
        assert len(set(rows.tolist())) == 10
        np.testing.assert_allclose(distances, true[rows], rtol=1e-4, atol=1e-5)
        assert (np.diff(distances) >= 0).all()
        if len(vectors) < vector_index.EXACT_ROWS:
            assert set(rows.tolist()) == set(np.argsort(true, kind="stable")[:10].tolist())


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_distances_and_left_out_vectors_are_those_of_lance(tmp_path: Path, metric: str) -> None:
    vectors = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], None, [0.0, 2.0, 0.0], [-1.0, 0.0, 0.5]]
    column = pa.array(vectors, pa.list_(pa.float32(), 3))
    dataset = lance.write_dataset(pa.table({"id": range(5), "vector": column}), tmp_path / "t")
    snapshot = build(vectors, width=3, metric=metric)
    for query in ([1.0, 0.2, 0.0], [0.0, 0.0, 0.0]):
        wanted = dataset.to_table(
            nearest={"column": "vector", "q": np.array(query, np.float32), "k": 10, "metric": metric}
        )
        rows, distances = snapshot.search("vector", query, 10, snapshot.live())
        found = dict(zip(rows.tolist(), distances.tolist(), strict=True))
        truth = dict(zip(wanted["id"].to_pylist(), wanted["_distance"].to_pylist(), strict=True))
        assert found == pytest.approx(truth)


@pytest.fixture(params=["as it is", "all indexed"])
def share_indexed(request: pytest.FixtureRequest) -> None:
    if request.param == "all indexed":
        request.getfixturevalue("all_indexed")


@pytest.mark.usefixtures("all_indexed")
def test_recall_on_real_embeddings(real_packages: pa.Table) -> None:
    vectors = real_packages["embedding"].combine_chunks().flatten().to_numpy().reshape(real_packages.num_rows, -1)
    snapshot = build(real_packages["embedding"].to_pylist(), width=384, batch=1_000, metric="cosine")
    found = 0
    queries = range(0, real_packages.num_rows, 20)
    for query in queries:
        rows, _ = snapshot.search("vector", vectors[query], 10, snapshot.live())
        best = np.argsort(-(vectors @ vectors[query]), kind="stable")[:10]
        found += len(set(rows.tolist()) & set(best.tolist()))
    assert found / (10 * len(queries)) >= 0.98


@pytest.mark.usefixtures("all_indexed")
@pytest.mark.parametrize("width", [1, 3, 7, 12])
def test_any_width_can_be_trained(width: int) -> None:
    vectors = np.random.default_rng(4).standard_normal((1_500, width)).astype(np.float32)
    snapshot = build(vectors, width=width, train_rows=100)
    assert snapshot.search("vector", vectors[7], 1, snapshot.live())[0].tolist() == [7]


@pytest.mark.usefixtures("all_indexed")
def test_training_on_one_row_and_on_extreme_numbers_works() -> None:
    vectors = [[1e18, -1e18], [1e-40, 0.0], [0.0, 1e-40]] * 600
    snapshot = build(vectors, width=2, train_rows=1)
    rows, distances = snapshot.search("vector", [0.0, 0.0], 3, snapshot.live())
    assert len(rows) == 3
    assert np.isfinite(distances).all()


def test_in_async_mode_a_put_never_trains_nor_encodes_and_searches_lend_a_hand() -> None:
    vectors = np.random.default_rng(6).standard_normal((5_000, WIDTH)).astype(np.float32)
    table = filled(vectors, train_rows=64)
    waiting = table.usage()["vector"]
    assert waiting == len(vectors) * (4 * WIDTH + 1)  # vectors and flags: no code, no codebook
    snapshot = table.snapshot()
    sizes = [waiting]
    for row, query in enumerate(vectors[:80]):
        assert snapshot.search("vector", query, 5, snapshot.live())[0][0] == row
        sizes.append(table.usage()["vector"])
    # The first step trains. 71 blocks of 64 leave 456 rows waiting: fewer than 8 x 64 rows are searched exactly.
    assert (np.diff(sizes) > 0).tolist() == 72 * [True] + 8 * [False]
    assert sizes[-1] - sizes[1] == 71 * 64 * 3 // 2 * (2 + 8)


def test_null_vectors_do_not_stop_the_indexing() -> None:
    vectors = np.random.default_rng(8).standard_normal((6_000, WIDTH)).astype(np.float32)
    column = [None if at < 2_000 else vector for at, vector in enumerate(vectors.tolist())]
    table = filled(column, train_rows=64)
    while table.index_step():
        pass
    snapshot = table.snapshot()
    for query in vectors[2_000:2_020]:
        assert snapshot.search("vector", query, 1, snapshot.live())[0] >= 2_000
    quantiser = table.usage()["vector"] - len(column) * (4 * WIDTH + 1)
    added = 6_000 // 64 * 64 - 2_000
    assert quantiser == added * 3 // 2 * (2 + 8) + 4 * WIDTH * (16 + 16)  # codes with room to grow; centroids and codes


def test_a_query_may_be_a_strided_view() -> None:
    vectors = np.random.default_rng(9).standard_normal((100, WIDTH)).astype(np.float32)
    snapshot = build(vectors)
    strided = np.repeat(vectors[42], 2)[::2]
    assert snapshot.search("vector", strided, 1, snapshot.live())[0].tolist() == [42]


@pytest.mark.usefixtures("all_indexed")
def test_the_same_puts_and_searches_give_the_same_answers() -> None:
    vectors = np.random.default_rng(5).standard_normal((3_000, 32)).astype(np.float32)
    answers = []
    for _ in range(2):
        snapshot = build(vectors, width=32, train_rows=512)
        answers.append([snapshot.search("vector", vectors[i], 10, snapshot.live()) for i in range(0, 3_000, 300)])
    for (rows, distances), (rows_again, distances_again) in zip(*answers, strict=True):
        assert rows.tolist() == rows_again.tolist()
        assert distances.tolist() == distances_again.tolist()


@pytest.mark.parametrize(
    "query", [[1.0], [[1.0] * WIDTH], [float("nan")] * WIDTH, [float("inf")] * WIDTH, [1e300] * WIDTH, "text"]
)
def test_a_bad_query_is_refused(query: Any) -> None:
    snapshot = build(np.ones((3, WIDTH)))
    with raises(InvalidRows):
        snapshot.search("vector", query, 1, snapshot.live())


def test_a_column_without_index_is_refused_with_the_remedy() -> None:
    snapshot = build(np.ones((3, WIDTH)))
    with raises(InvalidRows):
        snapshot.search("id", [1.0], 1, snapshot.live())
    with raises(InvalidRows):
        snapshot.search("vectro", [1.0], 1, snapshot.live())


def test_k_of_zero_gives_nothing() -> None:
    snapshot = build(np.ones((3, WIDTH)))
    assert len(snapshot.search("vector", np.ones(WIDTH), 0, snapshot.live())[0]) == 0
