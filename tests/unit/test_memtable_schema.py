"""Row schemas and index definitions: what is rejected, with the column and the row, and what is converted."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from memwal.memtable import (
    TOMBSTONE,
    IndexSpec,
    InvalidRows,
    MemTable,
    check_indexes,
    key_columns,
    required_columns,
    row_schema,
    tombstones,
    with_tombstone,
)
from tests.messages import raises

BASE = pa.schema(
    [
        pa.field("id", pa.int32(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("price", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
ROWS = row_schema(BASE, ["id"])


def refused(rows: pa.Table, required: tuple[str, ...] = ()) -> InvalidRows:
    with raises(InvalidRows) as caught:
        with_tombstone(rows, ROWS, required)
    return caught.value


def test_row_schema_makes_all_but_the_key_nullable_and_adds_the_tombstone() -> None:
    assert ROWS.names == ["id", "name", "price", "vector", TOMBSTONE]
    assert [field.nullable for field in ROWS] == [False, True, True, True, False]


def test_columns_are_reordered_cast_and_filled() -> None:
    rows = with_tombstone(pa.table({"vector": [[1, 2], None], "id": pa.array([7, 8], pa.int64())}), ROWS)
    assert rows.schema == ROWS
    assert rows.to_pylist()[0] == {
        "id": 7,
        "name": None,
        "price": None,
        "vector": [1.0, 2.0],
        TOMBSTONE: False,
    }
    assert rows.column("vector").to_pylist() == [[1.0, 2.0], None]


REFUSED: dict[str, tuple[pa.Table, str, int | None]] = {
    "a null key": (pa.table({"id": pa.array([1, 2, None], pa.int32())}), "id", 2),
    "no key": (pa.table({"name": ["x"]}), "id", None),
    "an unknown column": (pa.table({"id": [1], "nmae": ["x"]}), "nmae", None),
    "a column twice": (pa.table([pa.array([1]), pa.array([2])], names=["id", "id"]), "id", None),
    "another type": (pa.table({"id": ["1"]}), "id", None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_do_not_fit_are_refused_by_column_and_row(case: str) -> None:
    rows, column, row = REFUSED[case]
    error = refused(rows)
    assert (error.column, error.row) == (column, row)


def test_required_columns_may_be_neither_null_nor_missing() -> None:
    required = required_columns(BASE, ["id"])
    assert required == ("price",)
    assert refused(pa.table({"id": [1]}), required).column == "price"
    error = refused(pa.table({"id": [1, 2], "price": [1, None]}), required)
    assert (error.column, error.row) == ("price", 1)


def test_tombstones_carry_the_key_and_nothing_else() -> None:
    rows = tombstones(pa.table({"id": [5, 6]}), ROWS)
    assert rows.schema == ROWS
    assert rows.to_pylist()[1] == {"id": 6, "name": None, "price": None, "vector": None, TOMBSTONE: True}


def test_a_delete_takes_only_key_columns() -> None:
    with raises(InvalidRows):
        tombstones(pa.table({"id": [5], "name": ["x"]}), ROWS)


@pytest.mark.parametrize(
    ("base", "key"),
    [
        (BASE, ["nmae"]),
        (BASE, ["name"]),
        (BASE, ["id", "id"]),
        (pa.schema([pa.field("at", pa.timestamp("us"), nullable=False)]), ["at"]),
        (pa.schema([pa.field("day", pa.date32(), nullable=False)]), ["day"]),
        (pa.schema([pa.field("id", pa.int8(), nullable=False), (TOMBSTONE, pa.bool_())]), ["id"]),
    ],
)
def test_unusable_keys_are_refused(base: pa.Schema, key: list[str]) -> None:
    with raises(InvalidRows):
        row_schema(base, key)


def test_key_columns_come_from_the_field_metadata_in_their_order() -> None:
    marked = {"lance-schema:unenforced-primary-key": "true"}
    first = {**marked, "lance-schema:unenforced-primary-key:position": "1"}
    second = {**marked, "lance-schema:unenforced-primary-key:position": "2"}
    schema = pa.schema(
        [
            pa.field("b", pa.int8(), metadata=second),
            ("x", pa.int8()),
            pa.field("a", pa.int8(), metadata=first),
        ]
    )
    assert key_columns(schema) == ("a", "b")
    assert key_columns(BASE) == ()


@pytest.mark.parametrize(
    "kind",
    [
        pa.map_(pa.string(), pa.int64()),
        pa.dictionary(pa.int32(), pa.string()),
        pa.string_view(),
        pa.month_day_nano_interval(),
        pa.run_end_encoded(pa.int32(), pa.int64()),
        pa.dense_union([pa.field("a", pa.int64())]),
        pa.json_(),
        pa.list_(pa.map_(pa.string(), pa.int64())),
        pa.struct([pa.field("inner", pa.int64(), nullable=False)]),
        pa.list_(pa.field("item", pa.float32(), nullable=False), 4),
        pa.binary(0),
        pa.list_(pa.binary(0)),
        pa.list_(pa.string(), 2),
        pa.list_(pa.list_(pa.int32()), 2),
        pa.list_(pa.struct([("a", pa.int32())]), 2),
        pa.list_(pa.null(), 2),
        pa.list_(pa.float32(), 0),
        pa.null(),
        pa.list_(pa.null()),
        pa.large_list(pa.list_(pa.null())),
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.struct([("c", pa.null())])))]),
        pa.list_(pa.uuid(), 2),
        pa.list_(pa.uuid()),
        pa.struct([("a", pa.int64()), ("u", pa.uuid())]),
        pa.struct([("tags", pa.list_(pa.string())), ("a", pa.int64())]),
        pa.list_(pa.struct([("a", pa.int64()), ("b", pa.struct([("tags", pa.large_list(pa.string()))]))])),
        pa.struct([]),
    ],
    ids=str,
)
def test_a_type_that_lance_does_not_give_back_is_refused_by_name(kind: pa.DataType) -> None:
    base = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("odd", kind)])
    with raises(InvalidRows) as raised:
        row_schema(base, ["id"])
    assert raised.value.column == "odd" or str(raised.value.column).startswith("odd.")


@pytest.mark.parametrize(
    "name", ["a`b", "a.b", "", "*", "a\x00b", "_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version"]
)
def test_a_name_that_lance_reads_as_something_else_is_refused(name: str) -> None:
    base = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field(name, pa.int64())])
    with raises(InvalidRows) as raised:
        row_schema(base, ["id"])
    assert raised.value.column == name


def test_a_key_that_no_merge_could_name_is_refused() -> None:
    base = pa.schema([pa.field('a"b', pa.int64(), nullable=False), pa.field('c"d', pa.int64())])
    with raises(InvalidRows) as raised:
        row_schema(base, ['a"b'])
    assert raised.value.column == 'a"b'
    assert 'c"d' in row_schema(base.set(0, pa.field("id", pa.int64(), nullable=False)), ["id"]).names


def test_lists_and_structs_of_nullable_fields_are_columns_like_others() -> None:
    odd = pa.struct([pa.field("a", pa.list_(pa.float16(), 3)), pa.field("b", pa.list_(pa.decimal128(9, 2)))])
    base = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("nested", odd)])
    assert row_schema(base, ["id"]).field("nested").type == odd


INDEXABLE = pa.schema(
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
    check_indexes(INDEXABLE, specs)
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
        check_indexes(INDEXABLE, [IndexSpec(column, kind, parameters)])
    assert caught.value.column == column


def test_one_column_carries_one_index() -> None:
    with raises(InvalidRows):
        check_indexes(INDEXABLE, [IndexSpec("price", "btree"), IndexSpec("price", "btree")])


def test_a_memtable_checks_its_indexes() -> None:
    with raises(InvalidRows):
        MemTable(row_schema(INDEXABLE, ["id"]), ["id"], [IndexSpec("bdoy", "fts")], 1)


def test_a_language_without_stemmer_or_stop_words_is_refused_with_the_remedy() -> None:
    spec = IndexSpec("body", "fts", {"language": "Tamil"})
    with raises(InvalidRows):
        MemTable(row_schema(INDEXABLE, ["id"]), ["id"], [spec], 1)
