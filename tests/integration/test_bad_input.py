"""Input that could break a memtable, put into a table: rejected in one line with column and row, or accepted and found.

After each case later puts work and every read does, in both index modes; accepted rows are the same after a flush and a
commit, and after the table is opened again. tests/unit/test_memtable_bad_input.py tests the memtable alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from tests.messages import raises

WIDTH = 4
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.int64()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
GOOD = [{"id": n, "price": n, "body": f"word{n} harbor", "vector": [float(n), 1.0, 0.0, 0.0]} for n in range(100, 120)]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["sync", "async"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"commit": {"interval": "0s"}, "memtable": {"index_mode": request.param, "vector_train_rows": 256}}


@pytest.fixture
def table(settings: dict[str, Any], tmp_path: Path) -> Iterator[Any]:
    indexes = {"vector": {"type": "ivf_pq", "metric": "cosine"}, "body": "fts", "price": "btree"}
    with memwal.open(
        tmp_path / "t.lance", schema=SCHEMA, key="id", regions=1, indexes=indexes, settings=settings
    ) as opened:
        opened.put(GOOD)
        yield opened


def not_utf8(rows: int) -> pa.Array:
    """Return text that Arrow accepts without validation: its last value is the byte FF."""
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(b"a" * (rows - 1) + b"\xff")])


def vectors(bad: list[float], kind: pa.DataType | None = None) -> pa.Table:
    good = [1.0] * WIDTH
    return pa.table({"id": [1, 2, 3], "vector": pa.array([good, good, bad], kind or pa.list_(pa.float64()))})


REFUSED: dict[str, tuple[pa.Table | list[dict[str, Any]], str]] = {
    "NaN": (vectors([NAN, 0.0, 0.0, 0.0]), "vector"),
    "infinite": (vectors([0.0, 0.0, 0.0, -INF]), "vector"),
    "beyond float32": (vectors([1e300, 0.0, 0.0, 0.0]), "vector"),
    "too long": (vectors([3e38, 3e38, 0.0, 0.0]), "vector"),
    "too narrow": (vectors([1.0, 0.0, 0.0]), "vector"),
    "too wide": (vectors([1.0] * 5), "vector"),
    "empty": (vectors([]), "vector"),
    "NaN, as a dict": ([{"id": 1}, {"id": 3}, {"id": 2, "vector": [NAN] * WIDTH}], "vector"),
    "not UTF-8": (pa.table({"id": [1, 2, 3], "body": not_utf8(3)}), "body"),
    "null key": (pa.table({"id": pa.array([1, 2, None], pa.int64())}), "id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_found_again_are_refused_with_column_and_row(case: str, table: Any) -> None:
    rows, column = REFUSED[case]
    with pytest.raises(memwal.Invalid) as refused:
        table.put(rows, missing="null")
    said = str(refused.value)
    assert len(said.splitlines()) == 1
    assert f"'{column}'" in said
    assert "2" in said.replace("table wants", "").replace("float32", ""), "the row at fault is the third"
    reads_as_before(table, {})
    table.put([{"id": 1, "price": 1, "body": "copper", "vector": [1.0] * WIDTH}])
    reads_as_before(table, {1: "copper"})


def reads_as_before(table: Any, more: dict[int, str | None]) -> None:
    """Check that every read finds all good rows, and finds `more` rows (id: body) by their keys."""
    known = {row["id"]: row["body"] for row in GOOD}
    found = table.scan(["id", "body"]).read_all().to_pylist()
    assert {row["id"]: row["body"] for row in found} == known | more
    assert table.get([101, *more], columns=["body"]).to_pylist() == [{"body": known[101]}] + [
        {"body": body} for body in more.values()
    ]
    assert set(known) <= set(table.match("body", "harbor", k=1_000)["id"].to_pylist())
    searched = table.search("vector", [1.0, 1.0, 0.0, 0.0], k=1_000)
    assert set(known) <= set(searched["id"].to_pylist())
    assert np.isfinite(searched["_distance"].to_numpy()).all()
    assert set(table.scan(["id"], filter="price >= 100").read_all()["id"].to_pylist()) == set(known)


def test_the_row_named_is_the_callers_however_the_rows_are_chunked(table: Any) -> None:
    good = pa.table({"id": [1, 2, 3], "body": ["a", "b", "c"]})
    with raises(memwal.Invalid):
        table.put(pa.concat_tables([good, pa.table({"id": [4, 5, 6], "body": not_utf8(3)})]))
    good, bad = vectors([1.0] * WIDTH), vectors([NAN] * WIDTH)
    with raises(memwal.Invalid):
        table.put(pa.concat_tables([good, bad]), missing="null")
    reads_as_before(table, {})


TAKEN: dict[str, str | None] = {
    "null": None,
    "empty": "",
    "nul": "\0",
    "blank": " \n\t ",
    "1 MB of words": "alpha beta needle " * 60_000,
    "1 MB without a space": "x" * 1_000_000,
    "token of 10,000": "y" * 10_000 + " needle",
    "token of 70,000": "z" * 70_000 + " needle",
    "signs": "?!-- \u202e 🙂 needle",
}


@pytest.mark.parametrize("case", TAKEN)
def test_any_text_is_taken_and_found_at_every_level(case: str, table: Any, settings: Any, tmp_path: Path) -> None:
    text = TAKEN[case]
    table.put([{"id": 1, "body": text}, {"id": 2, "body": "needle copper"}], missing="null")
    wanted = [1, 2] if text is not None and "needle" in text else [2]
    for step in (lambda: None, table.flush, table.commit):
        step()
        reads_as_before(table, {1: text, 2: "needle copper"})
        assert sorted(table.match("body", "needle")["id"].to_pylist()) == wanted
    table.close()
    with memwal.open(tmp_path / "t.lance", settings=settings) as again:
        reads_as_before(again, {1: text, 2: "needle copper"})


@pytest.mark.parametrize("vector", [None, [0.0] * WIDTH, [-0.0] * WIDTH], ids=["null", "zero", "negative zero"])
def test_a_vector_that_is_near_nothing_is_taken_and_found_by_key(vector: Any, table: Any) -> None:
    table.put([{"id": n, "vector": vector} for n in range(50)], missing="null")
    for step in (lambda: None, table.flush, table.commit):
        step()
        assert table.get(7, columns=["vector"]).to_pylist() == [{"vector": vector}]
        found = table.search("vector", [1.0, 1.0, 0.0, 0.0], k=1_000)["id"].to_pylist()
        assert sorted(found) == list(range(100, 120))
        assert table.count() == 70


def test_rows_that_are_null_in_every_indexed_column(table: Any) -> None:
    table.put([{"id": n} for n in range(50)], missing="null")
    for step in (lambda: None, table.flush, table.commit):
        step()
        reads_as_before(table, dict.fromkeys(range(50)))
        assert table.count("price IS NULL") == 50
        assert table.count("body IS NULL AND vector IS NULL") == 50


KEYS: dict[str, list[tuple[Any, ...]]] = {
    "int64": [(n,) for n in (-(2**63), -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1)],
    "uint64": [(n,) for n in (0, 1, 2**63 - 1, 2**63, 2**64 - 1)],
    "bool": [(False,), (True,)],
    "string": [(text,) for text in ("", "\0", "\0\0", "a", "a\0", "é", "e\u0301", "x" * 2**16, "x" * 2**16 + "y")],
    "two strings": [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("", ""), ("a\0", "b"), ("a", "\0b")],
    "string and int64": [(text, n) for text in ("", "a") for n in (-(2**63), -1, 0, 97, 2**63 - 1)],
}
KINDS = {
    "int64": [pa.int64()],
    "uint64": [pa.uint64()],
    "bool": [pa.bool_()],
    "string": [pa.string()],
    "two strings": [pa.string(), pa.string()],
    "string and int64": [pa.string(), pa.int64()],
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_look_alike_are_different_keys_at_every_level(name: str, settings: Any, tmp_path: Path) -> None:
    keys = KEYS[name]
    columns = [f"k{place}" for place in range(len(KINDS[name]))]
    fields = [pa.field(column, kind, nullable=False) for column, kind in zip(columns, KINDS[name], strict=True)]
    schema = pa.schema([*fields, ("v", pa.int64())])
    asked: Any = (
        [key[0] for key in keys] if len(columns) == 1 else [dict(zip(columns, key, strict=True)) for key in keys]
    )

    def rows(first: int) -> pa.Table:
        parts = [pa.array([key[place] for key in keys], field.type) for place, field in enumerate(fields)]
        return pa.table([*parts, pa.array(range(first, first + len(keys)))], schema=schema)

    with memwal.open(tmp_path / "k.lance", schema=schema, key=columns, regions=2, settings=settings) as table:
        for version, step in enumerate((lambda: None, table.flush, table.commit)):
            table.put(rows(version * 100))
            step()
            found = table.get(asked, columns=["v"]).column("v").to_pylist()
            assert found == list(range(version * 100, version * 100 + len(keys)))
            assert table.count() == len(keys)
        table.delete(asked[::2])
        assert table.count() == len(keys) // 2
        table.flush()
        table.commit()
        assert sorted(table.scan(["v"]).read_all()["v"].to_pylist()) == list(range(201, 200 + len(keys), 2))
