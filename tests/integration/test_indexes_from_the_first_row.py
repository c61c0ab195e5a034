"""Indexes on a table that begins empty: every read is right at every size, and the base index is built as soon as
possible.
"""

from __future__ import annotations

from typing import Any

import lance
import numpy as np
import pytest

from memwal.flush.commits.index_catchup import PQ_ROWS_MIN
from tests.conftest import WORDS, Cli, Made, OpenSmall, SmallConfig

NAMES = {"vector_idx", "body_idx", "price_idx"}


def indexed(uri: str) -> dict[str, int]:
    """Return the rows in each base index."""
    return {each.name: each.num_rows_indexed for each in lance.dataset(uri).describe_indices() if each.name in NAMES}


def check_every_read(table: Any, made: Made, alive: dict[int, int], level: str) -> None:
    """Compare every read with an exact answer without an index. `alive`: the current version of each row."""
    rows = {id: made.row(id, version) for id, version in alive.items()}
    probe = made.row(5)["vector"]
    exact = {id: float(np.sum((np.float32(row["vector"]) - np.float32(probe)) ** 2)) for id, row in rows.items()}
    found = table.search("vector", probe, 5, columns=["id"], level=level).to_pylist()
    assert [row["id"] for row in found] == sorted(exact, key=exact.__getitem__)[:5]
    np.testing.assert_allclose([row["_distance"] for row in found], sorted(exact.values())[:5], rtol=1e-4, atol=1e-5)
    for word in WORDS[:2]:
        matching = {id for id, row in rows.items() if word in row["body"].split()}
        answered = table.match("body", word, 1000, columns=["id"], level=level)["id"].to_pylist()
        assert sorted(answered) == sorted(matching)
    cheap = table.scan(["id"], filter="price < 200", level=level).read_all()["id"].to_pylist()
    assert sorted(cheap) == sorted(id for id, row in rows.items() if row["price"] < 200)


def test_from_nothing_over_10_rows_to_300(open_small: OpenSmall, uri: str, made: Made) -> None:
    alive: dict[int, int] = {}
    with open_small() as table:
        assert table.search("vector", [0.0] * 8, 3).num_rows == table.match("body", WORDS[0]).num_rows == 0
        assert "vector_idx" not in indexed(uri)
        for ids, version, trained in ((range(10), 0, False), (range(5, 240), 1, False), (range(200, 300), 2, True)):
            table.put(made.rows(ids, version))
            table.delete([ids[0]])
            alive |= dict.fromkeys(ids, version)
            alive.pop(ids[0])
            check_every_read(table, made, alive, "latest")  # from the memtable on
            table.flush()
            check_every_read(table, made, alive, "flushed")
            table.commit()
            assert len(alive) >= PQ_ROWS_MIN or not trained
            for level in ("committed", "latest"):
                check_every_read(table, made, alive, level)
            assert set(indexed(uri)) == (NAMES if trained else NAMES - {"vector_idx"})
            assert set(indexed(uri).values()) == {len(alive)}
        table.put(made.rows(range(300, 330)))
        alive |= dict.fromkeys(range(300, 330), 0)
        check_every_read(table, made, alive, "latest")  # a memtable that begins with the model of the base
        table.flush()
        table.commit()
        check_every_read(table, made, alive, "committed")
        assert set(indexed(uri).values()) == {len(alive)}


def test_init_makes_the_indexes_of_an_empty_table(
    cli: Cli, small_config: SmallConfig, uri: str, made: Made, open_small: OpenSmall
) -> None:
    ran = cli("init", small_config())
    assert (ran.code, ran.err) == (0, "")
    assert "indexes: vector (ivf_pq), body (fts), price (btree)" in ran.out
    assert indexed(uri) == {"body_idx": 0, "price_idx": 0}
    with open_small() as table:
        table.put(made.rows(range(10)))
        check_every_read(table, made, dict.fromkeys(range(10), 0), "latest")


@pytest.mark.parametrize("nulls", [True, False])
def test_rows_without_a_vector_do_not_train(open_small: OpenSmall, uri: str, made: Made, nulls: bool) -> None:
    rows = [row | ({"vector": None} if nulls and row["id"] % 2 else {}) for row in made.rows(range(300))]
    with open_small() as table:
        table.put(rows)
        table.flush()
        table.commit()
        assert ("vector_idx" in indexed(uri)) is not nulls
        probe = made.row(8)["vector"]
        assert table.search("vector", probe, 1, columns=["id"])["id"].to_pylist() == [8]
