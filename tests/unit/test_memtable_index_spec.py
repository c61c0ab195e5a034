"""Index definitions: those that a schema allows, and the messages for all others."""

from typing import Any

import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, InvalidRows, MemTable, check_indexes, row_schema

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
    ("column", "kind", "parameters", "named"),
    [
        ("bdoy", "fts", {}, "'body'"),
        ("body", "hnsw", {}, "ivf_pq, fts, btree"),
        ("body", "ivf_pq", {}, "fixed_size_list"),
        ("price", "fts", {}, "double"),
        ("vector", "btree", {}, "fixed_size_list"),
        ("words", "fts", {}, "list<"),
        ("vector", "ivf_pq", {"metrik": "l2"}, "'metric'"),
        ("vector", "ivf_pq", {"metric": "hamming"}, "l2, cosine, dot"),
        ("vector", "ivf_pq", {"num_sub_vectors": 4}, "divide the vector width 6"),
        ("vector", "ivf_pq", {"train_rows": 0}, "at least 1"),
        ("vector", "ivf_pq", {"train_rows": True}, "at least 1"),
        ("body", "fts", {"stem": 1}, "true or false"),
        ("body", "fts", {"language": "Klingon"}, "English"),
        ("body", "fts", {"base_tokenizer": "icu"}, "whitespace"),
        ("price", "btree", {"stem": True}, "unknown parameter"),
    ],
)
def test_unfitting_indexes_are_refused_with_the_remedy(
    column: str, kind: Any, parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRows, match=named) as caught:
        check_indexes(BASE, [IndexSpec(column, kind, parameters)])
    assert caught.value.column == column
    assert "\n" not in str(caught.value)


def test_one_column_carries_one_index() -> None:
    with pytest.raises(InvalidRows, match="two indexes"):
        check_indexes(BASE, [IndexSpec("price", "btree"), IndexSpec("price", "btree")])


def test_a_memtable_checks_its_indexes() -> None:
    with pytest.raises(InvalidRows, match="'body'"):
        MemTable(row_schema(BASE, ["id"]), ["id"], [IndexSpec("bdoy", "fts")], 1)


def test_a_language_without_stemmer_or_stop_words_is_refused_with_the_remedy() -> None:
    spec = IndexSpec("body", "fts", {"language": "Tamil"})
    with pytest.raises(InvalidRows, match="remove_stop_words = false"):
        MemTable(row_schema(BASE, ["id"]), ["id"], [spec], 1)
