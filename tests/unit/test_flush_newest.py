"""The newest row of each key over all generations, compared with a dict."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from memwal.flush.commits.changes import newest_per_key
from memwal.memtable import TOMBSTONE

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 6), st.sampled_from("ab"), st.booleans()), max_size=8), max_size=5)


def generation(rows: list[tuple[int, str, bool]]) -> pa.Table:
    ids, names, dead = ([row[i] for row in rows] for i in range(3))
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pa.array(names, pa.string()),
            TOMBSTONE: pa.array(dead, pa.bool_()),
        }
    )


@given(ROWS)
def test_equals_a_dict(generations: list[list[tuple[int, str, bool]]]) -> None:
    oracle = {}
    for g, rows in enumerate(generations):
        for r, (id, name, dead) in enumerate(rows):
            oracle[id, name] = (g, r, dead)
    found = newest_per_key([generation(rows) for rows in generations], ["id", "name"])
    marked = {
        (g, int(r), dead)
        for g, n in enumerate(found)
        for dead, m in ((True, n.deletes), (False, n.upserts))
        for r in np.flatnonzero(m)
    }
    assert marked == set(oracle.values())
    assert [len(each.upserts) for each in found] == [len(rows) for rows in generations]
