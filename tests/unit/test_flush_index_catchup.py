"""The parameters of the base table's vector index."""

from __future__ import annotations

import pyarrow as pa
import pytest

from memwal.flush.commits.index_catchup import ivf_pq_parameters, sub_vectors
from memwal.memtable import IndexSpec


@pytest.mark.parametrize(
    ("width", "count"),
    [(384, 24), (64, 4), (32, 4), (16, 4), (8, 4), (4, 4), (100, 25), (7, 7), (2, 2), (1, 1)],
)
def test_a_vector_is_cut_into_at_least_four_parts_where_it_can_be(width: int, count: int) -> None:
    assert sub_vectors(width) == count
    assert width % count == 0


def test_what_the_user_gave_is_taken() -> None:
    schema = pa.schema([pa.field("v", pa.list_(pa.float32(), 384))])
    given = {"metric": "cosine", "num_sub_vectors": 48, "num_partitions": 3, "train_rows": 99}
    wanted = {"metric": "cosine", "num_sub_vectors": 48, "num_partitions": 3}
    assert ivf_pq_parameters(IndexSpec("v", "ivf_pq", given), schema) == wanted
    assert ivf_pq_parameters(IndexSpec("v", "ivf_pq"), schema) == {"metric": "l2", "num_sub_vectors": 24}
