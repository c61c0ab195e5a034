"""Input that could break a memtable is accepted as documented, or rejected with the row number and without an effect.

After each input the memtable must be unchanged or hold the rows, and must accept and find other rows as before. The
tests run once with rows that are indexed at the put, and once with rows that are indexed after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import IndexSpec, InvalidRows, MemTable, row_schema, tombstones, with_tombstone
from tests.index_modes import memtable_in
from tests.messages import raises

pytestmark = pytest.mark.usefixtures("quantised")  # the tests detect a row that poisons the quantiser
WIDTH = 2
NAN, INF = float("nan"), float("inf")
GOOD = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]


@pytest.fixture(params=["sync", "async"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def settled(table: MemTable) -> None:
    """Index all waiting rows."""
    while table.index_step():
        pass


# ---- vectors -------------------------------------------------------------------------------------------------------

KINDS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}


def of_vectors(metric: str, mode: str, kind: str = "float32") -> MemTable:
    """Return a memtable with forty good vectors, trained on the first of them."""
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("vector", pa.list_(KINDS[kind], WIDTH))]
    spec = IndexSpec("vector", "ivf_pq", {"metric": metric, "train_rows": 4})
    table = memtable_in(mode, row_schema(pa.schema(fields), ["id"]), ["id"], [spec], 1)
    angles = np.linspace(0.1, 1.4, 40)
    put_vectors(table, range(100, 140), np.stack([np.cos(angles), np.sin(angles)], axis=1).tolist())
    return table


def vector_rows(table: MemTable, ids: Any, vectors: Any) -> pa.Table:
    column = pa.array(list(vectors), pa.list_(pa.float64(), WIDTH))
    return with_tombstone(pa.table({"id": list(ids), "vector": column}), table.schema)


def put_vectors(table: MemTable, ids: Any, vectors: Any) -> None:
    table.apply(vector_rows(table, ids, vectors))


def nearest(table: MemTable, query: list[float], k: int = 100) -> list[int]:
    snapshot = table.snapshot()
    positions, distances = snapshot.search("vector", query, k, snapshot.live())
    assert np.isfinite(distances).all()
    return snapshot.take(positions, ["id"]).column("id").to_pylist()


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize(
    ("kind", "vector"),
    [
        *((kind, vector) for kind in KINDS for vector in ([NAN, 0.0], [0.0, INF], [-INF, INF])),
        ("float32", [1e39, 0.0]),  # beyond the type: it becomes infinite
        ("float64", [1e300, 0.0]),
        ("float32", [3e38, 3e38]),  # finite, but its length is not
        ("float16", [70_000.0, 0.0]),
        ("float32", [None, 1.0]),
    ],
)
def test_a_vector_without_a_distance_is_refused_with_its_row(
    metric: str, kind: str, vector: list[Any], mode: str
) -> None:
    table = of_vectors(metric, mode, kind)
    settled(table)
    found = nearest(table, [1.0, 0.1])
    usage = table.usage()
    for place in (0, 2):
        vectors = [list(each) for each in GOOD]
        vectors[place] = vector
        for refusing in (table.check, table.apply):
            with pytest.raises(InvalidRows) as refused:
                refusing(vector_rows(table, range(3), vectors))
            assert (refused.value.column, refused.value.row) == ("vector", place)
    assert table.usage() == usage
    assert nearest(table, [1.0, 0.1]) == found
    put_vectors(table, range(3), GOOD)
    settled(table)
    assert set(nearest(table, [1.0, 0.1])) == {*range(3), *range(100, 140)}


@pytest.mark.parametrize(("metric", "found"), [("cosine", False), ("l2", True), ("dot", True)])
def test_a_zero_vector_is_kept_and_found_where_it_has_a_distance(metric: str, found: bool, mode: str) -> None:
    table = of_vectors(metric, mode)
    put_vectors(table, [1, 2], [[0.0, 0.0], [-0.0, 0.0]])
    put_vectors(table, range(10, 13), GOOD)
    settled(table)
    assert ({1, 2} <= set(nearest(table, [1.0, 0.0]))) == found
    assert {10, 11, 12} <= set(nearest(table, [1.0, 0.0]))
    snapshot = table.snapshot()
    assert snapshot.take(snapshot.lookup(pa.table({"id": [1]}))).to_pylist() == [{"id": 1, "vector": [0.0, 0.0]}]
    assert nearest(table, [0.0, 0.0]) == [] or metric != "cosine"


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_nothing_but_zero_and_null_vectors_breaks_no_search(metric: str, mode: str) -> None:
    table = of_vectors(metric, mode)
    deleted = tombstones(pa.table({"id": np.arange(100, 140)}), table.schema)
    table.apply(deleted)
    put_vectors(table, range(300), [[0.0, 0.0] if n % 2 else None for n in range(300)])
    settled(table)
    found = nearest(table, [1.0, 0.0], 1_000)
    assert sorted(found) == ([] if metric == "cosine" else list(range(1, 300, 2)))


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_null_vectors_are_kept_and_never_found(metric: str, mode: str) -> None:
    table = of_vectors(metric, mode)
    put_vectors(table, range(50), [None] * 50)
    put_vectors(table, range(50, 53), GOOD)
    settled(table)
    assert set(nearest(table, [1.0, 0.0])) == {50, 51, 52, *range(100, 140)}
    snapshot = table.snapshot()
    assert snapshot.take(snapshot.lookup(pa.table({"id": [7]}))).to_pylist() == [{"id": 7, "vector": None}]
    assert snapshot.where("vector IS NULL", snapshot.live()).sum() == 50


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_the_smallest_and_the_largest_numbers_do_not_disturb_the_others(metric: str, mode: str) -> None:
    table = of_vectors(metric, mode)
    extreme = [[1e-45, 0.0], [1e-30, -1e-30], [1e18, 1e18], [-4e18, 1.0]]
    put_vectors(table, range(4), extreme)
    put_vectors(table, range(10, 13), GOOD)
    settled(table)
    # Under cosine a vector whose squared length is zero in float32 counts as zero; Lance finds it at distance -inf.
    missing = {0, 1} if metric == "cosine" else set()
    assert set(nearest(table, [1.0, 0.0])) == {*range(4), 10, 11, 12, *range(100, 140)} - missing


@pytest.mark.parametrize("width", [1, 3])
def test_a_vector_of_another_width_is_refused_with_its_row(width: int, mode: str) -> None:
    table = of_vectors("l2", mode)
    vectors = [[1.0, 2.0], [1.0] * width]
    with raises(InvalidRows) as refused:
        with_tombstone(pa.table({"id": [1, 2], "vector": vectors}), table.schema)
    assert (refused.value.column, refused.value.row) == ("vector", 1)
    fixed = pa.array([[1.0] * width], pa.list_(pa.float32(), width))
    with raises(InvalidRows):
        with_tombstone(pa.table({"id": [1], "vector": fixed}), table.schema)
    smuggled = pa.table([pa.array([1]), fixed, pa.array([False])], names=table.schema.names)
    with raises(InvalidRows):
        table.apply(smuggled)
    assert table.rows == 40


# ---- texts ---------------------------------------------------------------------------------------------------------


def of_texts(mode: str) -> MemTable:
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("body", pa.string())]
    table = memtable_in(mode, row_schema(pa.schema(fields), ["id"]), ["id"], [IndexSpec("body", "fts")], 1)
    put_texts(table, [100, 101], ["harbor", "harbor copper"])
    return table


def put_texts(table: MemTable, ids: Any, texts: Any) -> None:
    column = texts if isinstance(texts, pa.Array) else pa.array(list(texts), pa.string())
    table.apply(with_tombstone(pa.table({"id": list(ids), "body": column}), table.schema))


def matching(table: MemTable, text: str) -> set[int]:
    snapshot = table.snapshot()
    positions, scores = snapshot.match("body", text, 1_000, snapshot.live())
    assert np.isfinite(scores).all()
    return set(snapshot.take(positions, ["id"]).column("id").to_pylist())


def not_utf8(texts: list[bytes]) -> pa.Array:
    """Return bytes as an array of text, which Arrow accepts without a check."""
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


@pytest.mark.parametrize(
    "bad", [b"\xff", b"harbor \xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"], ids=["ff", "cut", "surrogate", "long"]
)
def test_text_that_is_not_utf8_harms_no_row_beside_it(bad: bytes, mode: str) -> None:
    """A table rejects this text before its memtable gets it (tests/integration/test_bad_input.py); a memtable accepts
    it."""
    table = of_texts(mode)
    put_texts(table, [1, 2, 3], not_utf8([b"harbor", bad, b"copper harbor"]))
    assert {1, 3, 100, 101} <= matching(table, "harbor") <= {1, 2, 3, 100, 101}
    settled(table)
    put_texts(table, [4], ["harbor again"])
    assert {1, 3, 4, 100, 101} <= matching(table, "harbor") <= {1, 2, 3, 4, 100, 101}
    assert matching(table, "copper") == {3, 101}
    table.freeze()
    assert matching(table, "copper") == {3, 101}


TEXTS = {
    "empty": "",
    "blank": "   \t\n",
    "nul": "\x00",
    "signs": "?!... --",
    "stop words": "the of and",
    "1 MB": "needle " + "alpha beta " * 95_000,
    "token of 1 MB": "x" * 1_000_000 + " needle",
    "token of 10,000": "needle " + "y" * 10_000 + " end",
    "token of 70,000": "z" * 70_000,
    "accents": "é" * 10_000 + " needle",
    "nul inside": "needle\x00tail",
    "emoji": "🙂" * 1_000 + " needle \u202e",
    "100,000 words": " ".join(f"word{n}" for n in range(100_000)) + " needle",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text_is_kept_and_found_by_the_words_it_has(text: str, mode: str) -> None:
    table = of_texts(mode)
    put_texts(table, [1, 2, 3], ["copper", text, "copper harbor"])
    settled(table)
    put_texts(table, [4], ["harbor"])
    assert matching(table, "harbor") == {100, 101, 3, 4}
    assert matching(table, "copper") == {101, 1, 3}
    assert matching(table, "needle") == ({2} if "needle" in text else set())
    snapshot = table.snapshot()
    assert snapshot.take(snapshot.lookup(pa.table({"id": [2]})), ["body"]).to_pylist() == [{"body": text}]


def test_null_and_empty_texts_alone_break_no_match(mode: str) -> None:
    table = of_texts(mode)
    put_texts(table, range(50), [None, ""] * 25)
    settled(table)
    assert matching(table, "harbor") == {100, 101}
    assert matching(table, "") == set()
    assert matching(table, "w" * 60_000) == set()
    snapshot = table.snapshot()
    assert snapshot.where("body IS NULL", snapshot.live()).sum() == 25
    assert snapshot.where("body = ''", snapshot.live()).sum() == 25


# ---- indexed columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "equal"),
    [
        (pa.int64(), [-(2**63), 2**63 - 1, 0, -1], {"price = -9223372036854775808": 0, "price > 5": 1}),
        (pa.uint64(), [2**64 - 1, 2**63, 0, 7], {"price = 18446744073709551615": 0, "price = 7": 3}),
        (pa.float64(), [NAN, INF, -INF, -0.0], {"price > 1e300 AND price = price": 1, "price < -1e300": 2}),
        (pa.string(), ["", "a\0b", "é", "it's"], {"price = ''": 0, "price = 'it''s'": 3}),
    ],
    ids=["int64", "uint64", "float64", "string"],
)
def test_null_and_extreme_values_of_a_btree_column(
    kind: pa.DataType, values: list[Any], equal: dict[str, int], mode: str
) -> None:
    schema = row_schema(pa.schema([pa.field("id", pa.int64(), nullable=False), ("price", kind)]), ["id"])
    table = memtable_in(mode, schema, ["id"], [IndexSpec("price", "btree")], 1)
    # Enough other rows that the memtable uses the index.
    others = pa.array([None] * 9_000, kind)
    table.apply(with_tombstone(pa.table({"id": np.arange(9_000) + 100, "price": others}), schema))
    table.apply(with_tombstone(pa.table({"id": np.arange(4), "price": pa.array(values, kind)}), schema))
    for _ in range(2):
        snapshot = table.snapshot()
        live = snapshot.live()
        assert snapshot.where("price IS NULL", live).sum() == 9_000
        assert snapshot.where("price IS NOT NULL", live).sum() == 4
        for filter, place in equal.items():
            wanted = snapshot.lookup(pa.table({"id": [place]})).tolist()
            assert set(wanted) <= set(np.flatnonzero(snapshot.where(filter, live)).tolist()), filter
            if "=" in filter and ">" not in filter:
                assert np.flatnonzero(snapshot.where(filter, live)).tolist() == wanted
        settled(table)


# ---- keys ----------------------------------------------------------------------------------------------------------

KEYS: dict[str, tuple[list[pa.DataType], list[tuple[Any, ...]]]] = {
    "int64": ([pa.int64()], [(n,) for n in (-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1)]),
    "uint64": ([pa.uint64()], [(n,) for n in (0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)]),
    "int8": ([pa.int8()], [(n,) for n in range(-128, 128)]),
    "bool": ([pa.bool_()], [(False,), (True,)]),
    "string": (
        [pa.string()],
        [
            (text,)
            for text in ("", "\0", "\0\0", "a", "a\0", "A", "é", "e\u0301", " ", "-1", "x" * 2**20, "x" * 2**20 + "y")
        ],
    ),
    "binary": (
        [pa.binary()],
        [(raw,) for raw in (b"", b"\0", b"\xff", b"\xff\xff", b"\0" * 2**20, b"\0" * (2**20 + 1))],
    ),
    "strings": (
        [pa.string(), pa.string()],
        [
            ("a", "bc"),
            ("ab", "c"),
            ("abc", ""),
            ("", "abc"),
            ("", ""),
            ("\0", ""),
            ("", "\0"),
            ("a\0", "b"),
            ("a", "\0b"),
        ],
    ),
    "binary and string": (
        [pa.binary(), pa.string()],
        [(b"", "a"), (b"a", ""), (b"\0", "\0"), (b"\0\0", ""), (b"", "\0\0"), (b"\x01", "a"), (b"x" * 2**20, "y")],
    ),
    "integers": (
        [pa.int32(), pa.int64()],
        [(low, high) for low in (-(2**31), -1, 0, 1, 2**31 - 1) for high in (-(2**63), -1, 0, 1, 2**63 - 1)],
    ),
    "mixed": (
        [pa.string(), pa.bool_(), pa.uint64(), pa.int8()],
        [(a, b, c, d) for a in ("", "a") for b in (False, True) for c in (0, 2**64 - 1) for d in (-1, 97)],
    ),
}


def key_table(kinds: list[pa.DataType], keys: list[tuple[Any, ...]]) -> pa.Table:
    columns = [pa.array([key[place] for key in keys], kind) for place, kind in enumerate(kinds)]
    return pa.Table.from_arrays(columns, names=[f"k{place}" for place in range(len(kinds))])


@pytest.mark.parametrize("one_batch", [True, False], ids=["one batch", "a batch each"])
@pytest.mark.parametrize("name", KEYS)
def test_keys_that_look_alike_are_different_keys(name: str, one_batch: bool) -> None:
    kinds, keys = KEYS[name]
    assert len(set(keys)) == len(keys)
    fields = [pa.field(f"k{place}", kind, nullable=False) for place, kind in enumerate(kinds)]
    schema = row_schema(pa.schema([*fields, ("v", pa.int64())]), [field.name for field in fields])
    table = MemTable(schema, [field.name for field in fields], [], 1)

    def put(some: list[tuple[Any, ...]], values: list[int]) -> None:
        rows = key_table(kinds, some).append_column("v", pa.array(values, pa.int64()))
        table.apply(with_tombstone(rows, schema))

    for version in range(2):
        values = [version * 1_000 + n for n in range(len(keys))]
        if one_batch:
            put(keys, values)
        else:
            for key, value in zip(keys, values, strict=True):
                put([key], [value])
        snapshot = table.snapshot()
        found = snapshot.take(snapshot.lookup(key_table(kinds, keys)), ["v"]).column("v").to_pylist()
        assert found == values
        names = snapshot.schema.names[len(kinds) - 1 :: -1]
        assert (
            snapshot.lookup(key_table(kinds, keys).select(names)).tolist()
            == snapshot.lookup(key_table(kinds, keys)).tolist()
        )
        assert snapshot.live().sum() == len(keys)
    table.apply(tombstones(key_table(kinds, keys[::2]), schema))
    snapshot = table.snapshot()
    positions = snapshot.lookup(key_table(kinds, keys))
    assert snapshot.tombstone()[positions].tolist() == [n % 2 == 0 for n in range(len(keys))]
    assert snapshot.live().sum() == len(keys) // 2
    kept = snapshot.keys(snapshot.live())
    assert [tuple(row.values()) for row in kept.to_pylist()] == keys[1::2]


def test_a_key_of_text_that_is_not_utf8_harms_no_key_beside_it(mode: str) -> None:
    schema = row_schema(pa.schema([pa.field("k", pa.string(), nullable=False)]), ["k"])
    table = memtable_in(mode, schema, ["k"], [], 1)
    table.apply(with_tombstone(pa.table({"k": not_utf8([b"a", b"\xff", b"b"])}), schema))
    table.apply(with_tombstone(pa.table({"k": ["a"]}), schema))
    assert table.snapshot().lookup(pa.table({"k": ["a", "b", "c"]})).tolist() == [3, 2, -1]
