"""Guarantees of the vector index at 100,000 rows: recall, masks that lose no result, no poisoned quantiser, memory."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from memwal.memtable import IndexSpec, InvalidRows, VectorModel
from memwal.memtable.vector import index as vector_index
from memwal.memtable.vector.column import VectorBatch, unit_length
from memwal.memtable.vector.index import VectorIndex
from memwal.memtable.vector.quantiser import Quantiser
from tests.messages import raises

ROWS, WIDTH, K = 100_000, 128, 10
METRICS = ["l2", "cosine", "dot"]


def random_numbers(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def clusters(rows: int, seed: int, in_order: bool = False) -> np.ndarray:
    """Return vectors of 200 topics; `in_order`: one topic after the other."""
    topic = np.random.default_rng(seed).integers(0, 200, rows)
    centres = random_numbers(200, 1_000)
    return centres[np.sort(topic) if in_order else topic] + np.float32(0.3) * random_numbers(rows, seed + 1)


def filled(vectors: np.ndarray, metric: str, model: VectorModel | None = None, *, steps: bool = True) -> VectorIndex:
    """Return an index with these vectors, added 1,000 at a time."""
    index = VectorIndex(IndexSpec("v", "ivf_pq", {"metric": metric}), vectors.shape[1], model)
    for at in range(0, len(vectors), 1_000):
        part = vectors[at : at + 1_000]
        index.add(VectorBatch(part, np.ones(len(part), dtype=bool)))
        while steps and index.index_step():
            pass
    return index


def added(index: VectorIndex, rows: int) -> int:
    """Return how many of `rows` rows the quantiser holds. A search compares its candidates and all other rows."""
    compared, way = index.way(1, np.ones(rows, dtype=bool))
    assert way == "quantiser"
    return rows + vector_index.FETCH - compared


def exact(vectors: np.ndarray, query: np.ndarray, metric: str, mask: np.ndarray) -> np.ndarray:
    """Return exact distances, inf outside the mask; with cosine the vectors have unit length."""
    if metric == "l2":
        distances = ((vectors - query) ** 2).sum(axis=1)
    else:
        distances = 1 - vectors @ (query / np.linalg.norm(query) if metric == "cosine" else query)
    return np.where(mask, distances, np.inf)


def recall(index: VectorIndex, vectors: np.ndarray, queries: np.ndarray, mask: np.ndarray | None = None) -> float:
    """Return the share of the nearest K rows that a search finds. Rows as near as the K-th one count too."""
    mask = np.ones(len(vectors), dtype=bool) if mask is None else mask
    found = 0
    for query in queries:
        rows, _ = index.search(query, K, mask)
        assert len(rows) == K
        assert mask[rows].all()
        distances = exact(vectors, query, index.metric, mask)
        found += int((distances[rows] <= np.partition(distances, K - 1)[K - 1] + 1e-5).sum())
    return found / (K * len(queries))


@pytest.mark.parametrize(
    ("make", "metric"), [(random_numbers, "l2"), (random_numbers, "cosine"), (clusters, "l2"), (clusters, "dot")]
)
def test_recall_at_100_000_rows(make: Callable[[int, int], np.ndarray], metric: str) -> None:
    vectors = make(ROWS, 1)
    vectors = unit_length(vectors) if metric == "cosine" else vectors
    index = filled(vectors, metric)
    assert added(index, ROWS) > ROWS - vector_index.ADD_BLOCK  # by codes, not by computing
    queries = make(10, 2)
    assert recall(index, vectors, queries) >= 0.98
    tenth = np.random.default_rng(3).random(ROWS) < 0.1
    assert recall(index, vectors, queries[:5], tenth) >= 0.98


@pytest.mark.parametrize(
    "first", ["zeros", "ones", "three kinds", "half of the numbers", "most of them", "topics in order"]
)
def test_what_comes_first_does_not_spoil_what_follows(first: str) -> None:
    """A quantiser trained on placeholders would give all rows the same code."""
    vectors = random_numbers(40_000, 4) + np.float32(3)
    if first == "topics in order":
        vectors = clusters(40_000, 4, in_order=True)
    elif first == "half of the numbers":
        vectors[:9_000, WIDTH // 2 :] = 0
    elif first == "most of them":
        vectors[:9_000] = 0
        vectors[9_000:][np.arange(31_000) % 3 > 0] = 0
    elif first == "three kinds":
        vectors[:9_000] = vectors[np.arange(9_000) % 3]
    else:
        vectors[:9_000] = float(first == "ones")
    index = filled(vectors, "l2")
    assert added(index, 40_000) > 40_000 - vector_index.ADD_BLOCK
    assert recall(index, vectors, vectors[9_999::1_500] + np.float32(0.1) * random_numbers(21, 5)) >= 0.95


@pytest.mark.parametrize("kind", ["half of them long", "heavy tails"])
@pytest.mark.parametrize("first", [0, 9_000])
def test_rows_that_no_code_tells_apart_are_searched_exactly(kind: str, first: int) -> None:
    """The lengths of the vectors differ a thousandfold, after `first` ordinary rows."""
    vectors = random_numbers(30_000, 4)
    if kind == "heavy tails":
        vectors[first:] = np.random.default_rng(2).standard_cauchy((30_000 - first, WIDTH))
    else:
        vectors[first::2] *= 1_000
    index = filled(vectors, "l2")
    assert recall(index, vectors, vectors[9_999::1_500] + np.float32(0.1) * random_numbers(14, 5)) >= 0.98


def test_a_quantiser_that_does_not_fit_serves_until_the_next_one_holds_as_many_rows() -> None:
    same = 20 * vector_index.ADD_BLOCK
    vectors = random_numbers(30_000, 6)
    vectors[:same] = 1
    index = filled(vectors[:same], "l2")
    assert added(index, same) == same
    index.add(VectorBatch(vectors[same:], np.ones(30_000 - same, dtype=bool)))
    assert index.index_step()  # trains another one: 20,000 rows wait
    assert index.index_step()  # moves the first block into it
    assert added(index, 30_000) == same
    assert recall(index, vectors, vectors[same::2_000]) == 1  # exact search: the first quantiser lacks these rows
    steps = 0
    while index.index_step():
        steps += 1
    assert steps < 30_000 // vector_index.ADD_BLOCK + 5  # each row once: the second quantiser is not discarded
    assert added(index, 30_000) > 30_000 - vector_index.ADD_BLOCK
    assert recall(index, vectors, vectors[same::2_000]) >= 0.98


def masks(distances: np.ndarray, added: int) -> dict[str, np.ndarray]:
    rows, order = len(distances), np.argsort(distances)

    def only(positions: np.ndarray) -> np.ndarray:
        mask = np.zeros(rows, dtype=bool)
        mask[positions] = True
        return mask

    return {
        "none": only(order[:0]),
        "one, the farthest": only(order[-1:]),
        "fewer than k": only(order[-K // 2 :]),
        "the farthest 9,000": only(order[-9_000:]),
        "the farthest 20": only(order[-20:]),
        "not yet added": only(np.arange(added, rows)),
        "the newest 20": only(np.arange(rows - 20, rows)),
        "one indexed, the rest not": only(np.r_[order[order < added][:1], added:rows]),
        "all but the nearest 2,000": ~only(order[:2_000]),
        "every seventh": only(np.arange(0, rows, 7)),
    }


@pytest.mark.parametrize("metric", METRICS)
def test_no_mask_costs_a_result(metric: str) -> None:
    vectors = clusters(70_300, 7)
    vectors = unit_length(vectors) if metric == "cosine" else vectors
    index = filled(vectors, metric)
    assert 0 < added(index, len(vectors)) < len(vectors)
    query = clusters(1, 8)[0]
    everything = exact(vectors, query, metric, np.ones(len(vectors), dtype=bool))
    for name, mask in masks(everything, added(index, len(vectors))).items():
        for k in (1, K, 400):
            rows, distances = index.search(query, k, mask)
            assert len(rows) == len(set(rows.tolist())) == min(k, int(mask.sum())), name
            assert mask[rows].all(), name
            np.testing.assert_allclose(distances, everything[rows], rtol=1e-3, atol=1e-3, err_msg=name)
            if mask.sum() <= vector_index.EXACT_ROWS:
                best = np.sort(everything[mask])[: len(rows)]
                np.testing.assert_allclose(distances, best, rtol=1e-3, atol=1e-3, err_msg=name)


def test_the_mode_changes_no_answer() -> None:
    """The vectors have topics, so the candidates by codes include all nearest rows: both modes return the same rows."""
    vectors = clusters(20_000, 9)
    indexed, waiting = filled(vectors, "l2"), filled(vectors, "l2", steps=False)
    mask = np.random.default_rng(10).random(20_000) < 0.6
    for query in clusters(20, 11):
        rows, distances = waiting.search(query, K, mask)
        also, as_far = indexed.search(query, K, mask)
        assert (rows.tolist(), distances.tolist()) == (also.tolist(), as_far.tolist())


def test_rows_that_wait_are_found_beside_those_indexed() -> None:
    vectors = clusters(20_300, 9)
    index = filled(vectors, "l2")
    everything = np.ones(len(vectors), dtype=bool)
    assert vector_index.EXACT_ROWS < added(index, len(vectors)) < len(vectors)
    for row in range(added(index, len(vectors)) - 3, len(vectors)):
        assert index.search(vectors[row], 1, everything)[0].tolist() == [row]


def test_no_search_waits_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    training, searched = threading.Event(), threading.Event()
    train = Quantiser.trained

    def slow(metric: str, sample: np.ndarray) -> Quantiser:
        training.set()
        assert searched.wait(60)
        return train(metric, sample)

    monkeypatch.setattr(Quantiser, "trained", staticmethod(slow))
    vectors = clusters(20_000, 12)
    index = filled(vectors, "l2", steps=False)
    steps = threading.Thread(target=index.index_step)
    steps.start()
    assert training.wait(60)
    assert recall(index, vectors, vectors[:3]) == 1
    searched.set()
    steps.join()
    assert index.index_step()


def test_a_model_spares_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quantiser, "trained", None)
    vectors = clusters(20_000, 13)
    model = VectorModel(
        random_numbers(200, 1_000), (np.float32(0.3) * random_numbers(256, 14)).reshape(256, 8, 16).transpose(1, 0, 2)
    )
    few = vectors[:1_024]  # without a model the index would wait for 8,192 rows
    assert filled(few, "l2", model).bytes > filled(few, "l2", model, steps=False).bytes
    index = filled(vectors, "l2", model)
    assert added(index, 20_000) > 20_000 - vector_index.ADD_BLOCK
    assert recall(index, vectors, vectors[::1_000]) >= 0.98


def test_a_model_of_other_rows_gives_way_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    train, trainings = Quantiser.trained, list[int]()

    def counting(metric: str, sample: np.ndarray) -> Quantiser:
        trainings.append(len(sample))
        return train(metric, sample)

    monkeypatch.setattr(Quantiser, "trained", staticmethod(counting))
    vectors = random_numbers(20_000, 15)
    model = VectorModel(np.zeros((1, WIDTH), np.float32), np.zeros((8, 256, 16), np.float32))
    index = filled(vectors, "l2", model)
    assert trainings
    assert recall(index, vectors, vectors[::1_000]) >= 0.98


@pytest.mark.parametrize(
    ("centroids", "codebook"),
    [
        (np.zeros((2, WIDTH + 1)), np.zeros((8, 256, 16))),
        (np.zeros((2, WIDTH)), np.zeros((8, 256, 8))),
        (np.zeros((0, WIDTH)), np.zeros((8, 256, 16))),
        (np.zeros(WIDTH), np.zeros((8, 256, 16))),
        (np.full((2, WIDTH), np.nan), np.zeros((8, 256, 16))),
        (np.zeros((2, WIDTH)), np.full((8, 256, 16), np.inf)),
    ],
)
def test_a_model_that_cannot_be_one_is_refused(centroids: np.ndarray, codebook: np.ndarray) -> None:
    model = VectorModel(centroids.astype(np.float32), codebook.astype(np.float32))
    with raises(InvalidRows):
        VectorIndex(IndexSpec("v", "ivf_pq"), WIDTH, model)
