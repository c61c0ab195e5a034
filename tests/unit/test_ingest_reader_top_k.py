"""The merge of the best rows of several levels, tested as a pure function of constructed levels."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.ingest.engine.read.top_k import Candidates, HiddenShare, Visible, best_visible, merge

ROWS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("level", pa.int64())])


def level(number: int, scores: dict[int, float]) -> Callable[[int], tuple[Candidates, pa.Table]]:
    """Return a level that returns its nearest ids, smallest score first, and their keys."""
    ranked = sorted(scores.items(), key=lambda item: item[1])

    def fetch(n: int) -> tuple[Candidates, pa.Table]:
        ids = np.array([id for id, _ in ranked[:n]], np.int64)
        rows = pa.table({"id": ids, "level": np.full(len(ids), number)})
        found = np.array([score for _, score in ranked[:n]], np.float32)
        return Candidates(
            ids, found, lambda at: rows.take(pa.array(at)), lambda at: rows.select(["id"]).take(pa.array(at))
        ), rows.select(["id"])

    return fetch


def hiding(newer: set[int]) -> Callable[[pa.Table], np.ndarray]:
    return lambda keys: np.isin(keys.column("id").to_numpy(), list(newer))


@given(
    st.dictionaries(st.integers(0, 30), st.floats(0, 1, width=32), max_size=20),
    st.dictionaries(st.integers(0, 30), st.floats(0, 1, width=32), max_size=20),
    st.integers(1, 12),
)
def test_the_best_of_two_levels_is_the_best_of_the_newest_versions(
    new: dict[int, float], old: dict[int, float], k: int
) -> None:
    newest = {**old, **new}
    levels = [
        best_visible(level(1, new), hiding(set()), k, 0, HiddenShare()),
        best_visible(level(0, old), hiding(set(new)), k, len(new), HiddenShare()),
    ]

    found = merge(levels, k, ascending=True, name="_distance", schema=ROWS, keyed=True)

    assert found.column("_distance").to_pylist() == pytest.approx(sorted(newest.values())[:k])
    assert len(set(found.column("id").to_pylist())) == min(k, len(newest))
    for row in found.to_pylist():
        assert row["_distance"] == pytest.approx(newest[row["id"]])
        assert row["level"] == (1 if row["id"] in new else 0)


def test_a_level_whose_best_rows_are_all_hidden_is_asked_for_more() -> None:
    scores = {id: id / 1000 for id in range(1000)}

    visible = best_visible(level(0, scores), hiding(set(range(990))), 5, 990, HiddenShare())

    assert visible.scores.tolist() == pytest.approx([0.99, 0.991, 0.992, 0.993, 0.994])


def test_a_base_that_nothing_lies_above_is_asked_once_and_no_key_is_looked_up() -> None:
    asked: list[int] = []

    def looked_up(_: pa.Table) -> np.ndarray:
        raise AssertionError("keys were looked up")

    def counting(n: int) -> tuple[Candidates, pa.Table]:
        asked.append(n)
        return level(0, {id: float(id) for id in range(100)})(n)

    visible = best_visible(counting, looked_up, 10, 0, HiddenShare())

    assert asked == [10]
    assert visible.scores.tolist() == list(range(10))


def test_descending_scores_put_the_highest_first_and_nan_last() -> None:
    found = merge(
        [
            Visible(level(1, {1: 0.5, 2: 0.9})(2)[0], np.array([0, 1])),
            Visible(level(0, {3: 0.7, 4: float("nan")})(2)[0], np.array([0, 1])),
        ],
        4,
        ascending=False,
        name="_score",
        schema=ROWS,
        keyed=True,
    )

    assert found.column("id").to_pylist() == [2, 3, 1, 4]


def test_no_levels_give_no_rows_but_all_columns() -> None:
    assert merge([], 3, ascending=True, name="_distance", schema=ROWS, keyed=True).schema.names == [
        "id",
        "level",
        "_distance",
    ]


def test_the_base_is_asked_for_more_rows_by_the_share_that_was_hidden() -> None:
    share = HiddenShare()
    assert share.wanted(10) == 20
    for _ in range(100):
        share.saw(100, 0)
    assert share.wanted(50) == 51
    for _ in range(100):
        share.saw(100, 20)
    assert 63 < share.wanted(50) < 75
    for _ in range(100):
        share.saw(100, 100)
    assert share.wanted(50) == 100
    share.saw(0, 0)
    assert share.wanted(50) == 100


def test_reads_whose_best_rows_are_hidden_are_asked_again_and_taught_by_it() -> None:
    asked: list[int] = []
    rows = level(0, {id: float(id) for id in range(1000)})

    def counting(n: int) -> tuple[Candidates, pa.Table]:
        asked.append(n)
        return rows(n)

    share = HiddenShare()
    for _ in range(100):
        share.saw(100, 0)
    visible = best_visible(counting, hiding(set(range(15))), 10, 500, share)
    assert visible.scores.tolist() == list(range(15, 25))
    assert asked == [11, 44]
    assert share.wanted(10) > 11
