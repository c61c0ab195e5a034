"""A mistake in a call raises Invalid with the correct form, never Internal, whichever form of a table is called.

Each row of a table of calls is one mistake; its message is in the golden file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import memwal
from tests.conftest import WIDTH
from tests.messages import raises
from tests.ways import entered

CHEAP = pc.field("price") > 5
VECTOR = [0.5] * WIDTH
LONG = "x" * 100_000
ARRAY, FRAME = pa.array(["a", "b"]), pd.DataFrame({"id": [1]})
ODD = datetime(2020, 1, 1, tzinfo=timezone(timedelta(microseconds=5)))


class Raising(list[Any]):
    """A caller's list whose own code raises."""

    def __iter__(self) -> Iterator[Any]:
        raise KeyError("by the caller")

    __len__ = __iter__  # type: ignore[assignment]


class RaisingStream:
    """Rows of another library that fails to export them."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        raise KeyError("by the caller")


def raising() -> Iterator[Any]:
    yield from ()
    raise ValueError("by the caller")


CALLS: dict[str, Callable[[Any], Any]] = {
    "where": lambda t: t.scan(where="price > 5"),
    "select": lambda t: t.scan(select=["id"]),
    "a slip": lambda t: t.get([1], colums=["id"]),
    "nothing to search": lambda t: t.search("vector", k=5),
    "a column in quotes": lambda t: t.count("\"name\" != 'x'"),
    "in other letters": lambda t: t.scan(filter='price = 1 OR "NAME" IS NULL'),
    "no column in quotes": lambda t: t.count("\"nope\" = 'nope'"),
    "a number of a level": lambda t: t.count(level=np.array([1, 2])),
    "a frame for a level": lambda t: t.scan(level=pa.table({"id": [1]})),
    "columns that are one": lambda t: t.scan(np.array(5)),
    "a rerank by name": lambda t: t.hybrid(VECTOR, "a", rerank="rrf"),
    "a number of a position": lambda t: t.changes(since=np.int64(3)),
    "an array of images": lambda t: t.changes(images=np.array([1, 2])),
    "a placeholder": lambda t: t.count("price = ?"),
    "a number of one": lambda t: t.scan(filter="price > $1"),
    "a name of one": lambda t: t.scan(filter="price IN (1, :x)"),
    "a quoted text in dollars": lambda t: t.count("name = $$x$$"),
    "a national text": lambda t: t.count("name = N'x'"),
    "scan by expression": lambda t: t.scan(filter=CHEAP),
    "count by expression": lambda t: t.count(CHEAP),
    "search by expression": lambda t: t.search("vector", VECTOR, filter=CHEAP),
    "match by expression": lambda t: t.match("body", "a", filter=CHEAP),
    "bytes": lambda t: t.scan(filter=b"price > 5"),
    "a list for a filter": lambda t: t.scan(filter=["price > 5"]),
    "a number of columns": lambda t: t.scan(5),
    "swapped": lambda t: t.search(VECTOR, "vector", k=5),
    "match of no column": lambda t: t.match([], "a"),
    "match of a number": lambda t: t.match(5, "a"),
    "match of numbers": lambda t: t.match([5], "a"),
    "match of bytes": lambda t: t.match(b"body", "a"),
    "a column twice": lambda t: t.match(["body", "body"], "a"),
    "a boost below zero": lambda t: t.match({"body": -1}, "a"),
    "a boost of zero": lambda t: t.match({"body": 0}, "a"),
    "a boost of nothing": lambda t: t.match({"body": float("nan")}, "a"),
    "a boost without end": lambda t: t.match({"body": float("inf")}, "a"),
    "a boost in words": lambda t: t.match({"body": "3"}, "a"),
    "a boost yes": lambda t: t.match({"body": True}, "a"),
    "several, one not there": lambda t: t.match(["body", "bodi"], "a"),
    "several, one not indexed": lambda t: t.match(["body", "name"], "a"),
    "hybrid boost": lambda t: t.hybrid(VECTOR, "a", text_column={"body": -2}),
    "delete where": lambda t: t.delete(where="price > 5"),
    "delete nothing": lambda t: t.delete(),
    "delete both": lambda t: t.delete([1], filter="price > 5"),
    "delete by expression": lambda t: t.delete(filter=CHEAP),
    "put slip": lambda t: t.put([], durible=True),
    "keys of no such column": lambda t: t.get([{LONG: 1}]),
    "keys that raise": lambda t: t.get(Raising()),
    "rows that raise": lambda t: t.get(RaisingStream()),
    "columns that raise": lambda t: t.scan(Raising()),
    "columns of a generator": lambda t: t.scan(raising()),
    "a match that raises": lambda t: t.match(Raising(), "a"),
    "an order that raises": lambda t: t.scan(order_by=Raising()),
    "weights that raise": lambda t: t.hybrid(VECTOR, "a", weights=Raising()),
    "a range that raises": lambda t: t.search("vector", VECTOR, distance_range=Raising()),
    "a frame for a limit": lambda t: t.scan(limit=FRAME),
    "an array for an offset": lambda t: t.scan(offset=ARRAY),
    "a frame for k": lambda t: t.match("body", "a", k=FRAME),
    "an array for explain": lambda t: t.count(explain=ARRAY),
    "a frame for an order": lambda t: t.scan(order_by=pa.table({"n": [1]})),
    "a number for an order": lambda t: t.scan(order_by=np.array(5)),
    "a direction in a list": lambda t: t.scan(order_by=[("id", ["desc"])]),
    "arrays for weights": lambda t: t.hybrid(VECTOR, "a", weights=ARRAY),
    "a weight beyond floats": lambda t: t.hybrid(VECTOR, "a", weights=(10**400, 1)),
    "a limit of many digits": lambda t: t.scan(limit=10**5000),
    "an array to follow": lambda t: t.changes(follow=np.array([1, 2])),
    "an array of tables": lambda t: t.sql("select 1", tables=np.array([1])),
    "a frame of parameters": lambda t: t.sql("select 1", parameters=FRAME),
    "a time of a query": lambda t: t.sql("select $a", parameters={"a": ODD}),
    "a long column": lambda t: t.scan(LONG),
    "a long column of a filter": lambda t: t.count(f"{LONG} = 1"),
    "a long column to search": lambda t: t.search(LONG, VECTOR),
    "a long metric": lambda t: t.search("vector", VECTOR, metric=LONG),
    "a text for a vector": lambda t: t.search("vector", LONG, 3),
    "a long order": lambda t: t.scan(order_by=LONG),
    "a long key": lambda t: t.get([LONG]),
    "a long position": lambda t: t.changes(since=LONG),
    "a long name of images": lambda t: t.changes(images=LONG),
    "a long query": lambda t: t.sql(LONG),
    "a long table of a query": lambda t: t.sql(f"select * from {LONG}"),
    "a long argument": lambda t: t.scan(**{LONG: 1}),
    "an unknown level": lambda t: t.scan(level="lastest"),
    "an unknown column": lambda t: t.scan(["prize"]),
    "an unknown column of get": lambda t: t.get(1, columns=["prize"]),
    "an unknown column of a filter": lambda t: t.scan(filter="prize > 3"),
    "half a filter": lambda t: t.count("price >"),
    "a text compared with a number": lambda t: t.scan(filter="price = 'x'"),
    "an unknown column to search": lambda t: t.search("vektor", VECTOR),
    "a text column to search": lambda t: t.search("body", VECTOR),
    "a vector that is too short": lambda t: t.search("vector", [0.0] * 5),
    "a k of zero": lambda t: t.search("vector", VECTOR, 0),
    "a k that is too large": lambda t: t.search("vector", VECTOR, 1 << 40),
    "an offset below zero": lambda t: t.search("vector", VECTOR, offset=-1),
    "an offset that is too large": lambda t: t.search("vector", VECTOR, offset=1 << 40),
    "an unknown metric": lambda t: t.search("vector", VECTOR, metric="cosin"),
    "no probes": lambda t: t.search("vector", VECTOR, nprobes=0),
    "a refine factor with a fraction": lambda t: t.search("vector", VECTOR, refine_factor=1.5),
    "a refine factor that is too large": lambda t: t.search("vector", VECTOR, refine_factor=1 << 33),
    "a range upside down": lambda t: t.search("vector", VECTOR, distance_range=(2, 1)),
    "a range of NaN": lambda t: t.search("vector", VECTOR, distance_range=(float("nan"), 1)),
    "a range of one number": lambda t: t.search("vector", VECTOR, distance_range=5),
    "an unknown column to match": lambda t: t.match("bodi", "a"),
    "match without an index": lambda t: t.match("name", "a"),
    "a number to match": lambda t: t.match("body", 5),
    "hybrid with a short vector": lambda t: t.hybrid([0.0] * 5, "a"),
    "hybrid with NaN": lambda t: t.hybrid([float("nan")] * WIDTH, "a"),
    "hybrid of an unknown column": lambda t: t.hybrid(VECTOR, "a", text_column="bodi"),
    "hybrid without an index": lambda t: t.hybrid(VECTOR, "a", text_column="name"),
    "hybrid with a boost of NaN": lambda t: t.hybrid(VECTOR, "a", text_column={"body": float("nan")}),
    "hybrid with a k of zero": lambda t: t.hybrid(VECTOR, "a", k=0),
    "hybrid without candidates": lambda t: t.hybrid(VECTOR, "a", candidates=0),
    "hybrid with a weight below zero": lambda t: t.hybrid(VECTOR, "a", weights=(1, -1)),
    "hybrid with an unknown column of a filter": lambda t: t.hybrid(VECTOR, "a", filter="prize > 3"),
    "hybrid with a number for a text": lambda t: t.hybrid(VECTOR, 7),
    "keys of another type": lambda t: t.get(["seven"]),
    "a text for keys": lambda t: t.get("seven"),
    "an order by a vector": lambda t: t.scan(order_by="vector"),
    "an order by an unknown column": lambda t: t.scan(order_by="prise"),
    "an order of nothing": lambda t: t.scan(order_by=[]),
    "an unknown direction": lambda t: t.scan(order_by=[("price", "up")]),
    "a limit that is too large": lambda t: t.scan(limit=1 << 63),
    "an offset of a scan that is too large": lambda t: t.scan(limit=1, offset=1 << 63),
    "an offset with a fraction": lambda t: t.scan(limit=3, offset=2.0),
    "flush what": lambda t: t.flush(1),
    "commit what": lambda t: t.commit(wait=True),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, made: Any) -> Iterator[list[Any]]:
    """Yield one table of three rows in this process, through a daemon, and from storage."""
    uri = str(tmp_path_factory.mktemp("mistakes") / "t.lance")
    with ExitStack() as ends:
        table = ends.enter_context(memwal.open(uri, schema=made.schema, key="id", indexes={"body": "fts"}))
        table.put(made.rows(range(3)))
        yield [entered(way, table, ends) for way in ("embedded", "flight", "storage")]


WRITES: dict[str, Callable[[Any], Any]] = {
    "durable of an array": lambda t: t.put([], durable=np.array([1, 2])),
    "durable of a frame": lambda t: t.delete([1], durable=FRAME),
    "durable by filter": lambda t: t.delete(filter="price > 5", durable=FRAME),
    "durable in words": lambda t: t.put([], durable="no"),
    "an array for a token": lambda t: t.put([], token=ARRAY),
    "a frame for a token": lambda t: t.put([], token=FRAME),
    "a token that raises": lambda t: t.put([], token=Raising()),
    "a long token": lambda t: t.put([], token=LONG),
    "a frame for a timeout": lambda t: t.put([], timeout=FRAME),
    "rows that raise": lambda t: t.put(Raising()),
    "a stream that raises": lambda t: t.put(RaisingStream()),
    "a series": lambda t: t.put(FRAME["id"]),
    "a column of pandas": lambda t: t.put(FRAME.index),
    "a series of Polars": lambda t: t.put(pl.Series([1])),
    "a column of Arrow": lambda t: t.put(pa.chunked_array([[1]])),
    "a long column of rows": lambda t: t.put([{"id": 1, LONG: 1}]),
    "a long column to index": lambda t: t.create_index(LONG, "btree"),
    "a long kind of index": lambda t: t.create_index("id", LONG),
    "a long parameter": lambda t: t.create_index("name", "fts", **{LONG: 1}),
    "a long name of an index": lambda t: t.drop_index(LONG),
    "keys with an unknown column": lambda t: t.delete([{"idd": 1}]),
    "an unknown column of a delete": lambda t: t.delete(filter="prize > 3"),
    "half a filter of a delete": lambda t: t.delete(filter="price >"),
    "a filter that fails for a row": lambda t: t.delete(filter="10 / (price - price) > 1"),
    "an empty filter of a delete": lambda t: t.delete(filter=""),
    "a timeout of zero": lambda t: t.delete(filter="true", timeout=0),
    "a token of a delete without a number": lambda t: t.delete(filter="true", token="loader"),
    "a token without a number": lambda t: t.put([{"id": 1}], missing="null", token="loader"),
}


@pytest.mark.parametrize("name", [*CALLS, *WRITES])
def test_a_mistake_is_refused_with_the_correct_form_and_changes_nothing(name: str, tables: list[Any]) -> None:
    call = CALLS.get(name) or WRITES[name]
    for table in tables if name in CALLS else tables[:2]:
        with raises(memwal.Invalid) as refused:
            call(table)
        assert len(str(refused.value)) < 1100
        assert table.count() == 3


def test_a_series_of_polars_is_keys(tables: list[Any]) -> None:
    for table in tables[:2]:
        deleted = table.delete(pl.Series([11, 12]))
        assert sum(counts.applied for counts in deleted.regions.values()) == 2


def test_one_column_is_a_list_of_columns(tables: list[Any]) -> None:
    for table in tables:
        assert table.scan("name").schema.names == ["name"]
        assert table.get([1], "name").column_names == ["name"]


@pytest.mark.parametrize(
    "schema",
    [
        {"id": "int64", "name": "string"},
        {"id": pa.int64(), "name": pa.string()},
        [pa.field("id", pa.int64()), pa.field("name", pa.string())],
        [("id", pa.int64()), ("name", "string")],
        pa.table({"id": [1], "name": ["a"]}),
    ],
)
def test_a_schema_in_any_of_its_forms(schema: Any, uri: str) -> None:
    with memwal.open(uri, schema=schema, key="id") as table:
        assert [(field.name, field.type) for field in table.schema] == [("id", pa.int64()), ("name", pa.string())]


@pytest.mark.parametrize(
    "arguments",
    [
        {"schema": "id int64"},
        {"schema": {"id": "int65"}},
        {"schema": {"id": int}},
        {"indexes": ["body"]},
        {"indexes": "body"},
        {"key": 5},
        {"key": {"id"}},
        {"settings": 5},
        {"storage_options": ["a"]},
        {"ky": "id"},
        {"index": {}},
        {"read_only": np.array([1, 2])},
        {"take_over": "no"},
        {"schema": Raising()},
        {"schema": {"id": LONG}},
        {"uri": None},
    ],
)
def test_opening(arguments: dict[str, Any], uri: str, made: Any) -> None:
    given = {"uri": uri, "schema": made.schema, "key": "id", **arguments}
    with raises(memwal.Invalid):
        memwal.open(**given)
    assert not Path(uri).exists()


@pytest.mark.parametrize(
    ("location", "arguments"),
    [
        (None, {}),
        (5, {}),
        ("grpc://h:1", {"tls_ca": 5}),
        ("grpc://h:1", {"tokn": "a"}),
        ("a", {"fallback": np.array(["a", "b"])}),
    ],
)
def test_connecting(location: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(memwal.Invalid):
        memwal.connect(location, **arguments)
