"""Index definitions: those that a schema allows, and the messages for all others."""

from typing import Any

import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, InvalidRows, MemTable, check_indexes, row_schema
from tests.messages import raises

BASE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("body", pa.string()),
        pa.field("price", pa.float64()),
        pa.field("vector", pa.list_(pa.float32(), 6)),
        pa.field("words", pa.list_(pa.string())),
    ]
)


def test_fitting_indexes_pass_and_are_named_as_lance_names_them() -> None:
    specs = [
        IndexSpec("vector", "ivf_pq", {"metric": "cosine", "num_sub_vectors": 3}),
        IndexSpec("body", "fts", {"stem": False, "max_token_length": None}),
        IndexSpec("price", "btree"),
    ]
    check_indexes(BASE, specs)
    assert [spec.name for spec in specs] == ["vector_idx", "body_idx", "price_idx"]


@pytest.mark.parametrize(
    ("column", "kind", "parameters"),
    [
        ("bdoy", "fts", {}),
        ("body", "hnsw", {}),
        ("body", "ivf_pq", {}),
        ("price", "fts", {}),
        ("vector", "btree", {}),
        ("words", "fts", {}),
        ("vector", "ivf_pq", {"metrik": "l2"}),
        ("vector", "ivf_pq", {"metric": "hamming"}),
        ("vector", "ivf_pq", {"num_sub_vectors": 4}),
        ("vector", "ivf_pq", {"train_rows": 0}),
        ("vector", "ivf_pq", {"train_rows": True}),
        ("body", "fts", {"stem": 1}),
        ("body", "fts", {"language": "Klingon"}),
        ("body", "fts", {"base_tokenizer": "icu"}),
        ("price", "btree", {"stem": True}),
    ],
)
def test_unfitting_indexes_are_refused_with_the_remedy(column: str, kind: Any, parameters: dict[str, Any]) -> None:
    with raises(InvalidRows) as caught:
        check_indexes(BASE, [IndexSpec(column, kind, parameters)])
    assert caught.value.column == column


def test_one_column_carries_one_index() -> None:
    with raises(InvalidRows):
        check_indexes(BASE, [IndexSpec("price", "btree"), IndexSpec("price", "btree")])


def test_a_memtable_checks_its_indexes() -> None:
    with raises(InvalidRows):
        MemTable(row_schema(BASE, ["id"]), ["id"], [IndexSpec("bdoy", "fts")], 1)


def test_a_language_without_stemmer_or_stop_words_is_refused_with_the_remedy() -> None:
    spec = IndexSpec("body", "fts", {"language": "Tamil"})
    with raises(InvalidRows):
        MemTable(row_schema(BASE, ["id"]), ["id"], [spec], 1)
