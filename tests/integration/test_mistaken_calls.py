"""A mistake in a call raises Invalid with the correct form, never Internal, whichever form of a table is called."""

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
from memwal.ingest.service.daemon.service import FlightService
from tests.conftest import WIDTH

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


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "where": (lambda t: t.scan(where="price > 5"), r"scan\(\) has no argument 'where'; write filter"),
    "select": (lambda t: t.scan(select=["id"]), r"scan\(\) has no argument 'select'; write columns"),
    "a slip": (lambda t: t.get([1], colums=["id"]), r"get\(\) has no argument 'colums'; did you mean 'columns'\?"),
    "nothing to search": (lambda t: t.search("vector"), r"search\(\): missing .*'vector'; its arguments are column, v"),
    "a column in quotes": (
        lambda t: t.count("\"name\" != 'x'"),
        '"name" is a text, as in Lance: write `name` for the c',
    ),
    "in other letters": (lambda t: t.scan(filter='price = 1 OR "NAME" IS NULL'), "write `NAME` for the column"),
    "no column in quotes": (lambda t: t.count("\"nope\" = 'nope'"), '"nope" is a text, as in Lance'),
    "a number of a level": (lambda t: t.count(level=np.array([1, 2])), r"level = ndarray .*: write one of committed, "),
    "a frame for a level": (lambda t: t.scan(level=pa.table({"id": [1]})), "level = Table .*: write one of committed"),
    "columns that are one": (lambda t: t.scan(np.array(5)), "columns = ndarray .*: write a list of column names"),
    "a rerank by name": (lambda t: t.hybrid(VECTOR, "a", rerank="rrf"), "rerank = str 'rrf': give a function"),
    "a number of a position": (
        lambda t: t.changes(since=np.int64(3)),
        "since = int64 .* is no position: write 'earliest', 'latest'",
    ),
    "an array of images": (
        lambda t: t.changes(images=np.array([1, 2])),
        "images = ndarray .*: write 'after', or 'both'",
    ),
    "a placeholder": (lambda t: t.count("price = ?"), "'\\?' begins a placeholder, for which a filter has no value"),
    "a number of one": (lambda t: t.scan(filter="price > $1"), "'\\$' begins a placeholder"),
    "a name of one": (lambda t: t.scan(filter="price IN (1, :x)"), "':' begins a placeholder"),
    "a quoted text in dollars": (lambda t: t.count("name = $$x$$"), "'\\$' begins a placeholder"),
    "a national text": (lambda t: t.count("name = N'x'"), "N'x' is no text that Lance knows: write 'x'"),
    "scan by expression": (lambda t: t.scan(filter=CHEAP), "filter = Expression .*: write SQL as text"),
    "count by expression": (lambda t: t.count(CHEAP), "filter = Expression .*: write SQL as text"),
    "search by expression": (lambda t: t.search("vector", VECTOR, filter=CHEAP), "filter = Expression"),
    "match by expression": (lambda t: t.match("body", "a", filter=CHEAP), "filter = Expression"),
    "bytes": (lambda t: t.scan(filter=b"price > 5"), "filter = bytes"),
    "a list for a filter": (lambda t: t.scan(filter=["price > 5"]), "filter = list"),
    "a number of columns": (lambda t: t.scan(5), r"columns = int 5: write a list of column names"),
    "swapped": (lambda t: t.search(VECTOR, "vector"), "column = list .*: write a text"),
    "match of no column": (
        lambda t: t.match([], "a"),
        "column = list .*: write a column, a list of columns, or a boost",
    ),
    "match of a number": (lambda t: t.match(5, "a"), "column = int 5: write a column"),
    "match of numbers": (lambda t: t.match([5], "a"), "column = list .*: write a column"),
    "match of bytes": (lambda t: t.match(b"body", "a"), "column = bytes .*: write a column"),
    "a column twice": (lambda t: t.match(["body", "body"], "a"), "column 'body' is named twice"),
    "a boost below zero": (lambda t: t.match({"body": -1}, "a"), "boost of column 'body' is -1; give a number from"),
    "a boost of zero": (lambda t: t.match({"body": 0}, "a"), "boost of column 'body' is 0"),
    "a boost of nothing": (lambda t: t.match({"body": float("nan")}, "a"), "boost of column 'body' is nan"),
    "a boost without end": (lambda t: t.match({"body": float("inf")}, "a"), "boost of column 'body' is inf"),
    "a boost in words": (lambda t: t.match({"body": "3"}, "a"), "boost of column 'body' is '3'"),
    "a boost yes": (lambda t: t.match({"body": True}, "a"), "boost of column 'body' is True"),
    "several, one not there": (
        lambda t: t.match(["body", "bodi"], "a"),
        "column 'bodi' does not exist; did you mean 'body'",
    ),
    "several, one not indexed": (lambda t: t.match(["body", "name"], "a"), "column 'name' .* has no fts index"),
    "hybrid boost": (
        lambda t: t.hybrid(VECTOR, "a", text_column={"body": -2}),
        "text_column: the boost of column 'body'",
    ),
    "delete where": (lambda t: t.delete(where="price > 5"), r"delete\(\) has no argument 'where'; write filter"),
    "delete nothing": (lambda t: t.delete(), r"delete\(\): give keys, .* or filter"),
    "delete both": (lambda t: t.delete([1], filter="price > 5"), r"delete\(\) takes keys or filter, not both"),
    "delete by expression": (lambda t: t.delete(filter=CHEAP), "filter = Expression .*: write SQL as text"),
    "put slip": (lambda t: t.put([], durible=True), r"put\(\) has no argument 'durible'; did you mean 'durable'\?"),
    "keys of no such column": (lambda t: t.get([{LONG: 1}]), "keys: {'xxx.*… does not name exactly the key"),
    "keys that raise": (lambda t: t.get(Raising()), "keys: cannot read the Raising: KeyError: 'by the caller'"),
    "rows that raise": (lambda t: t.get(RaisingStream()), "keys: cannot read the RaisingStream: KeyError: 'by the"),
    "columns that raise": (lambda t: t.scan(Raising()), "columns: cannot read the Raising: KeyError: 'by the caller'"),
    "columns of a generator": (lambda t: t.scan(raising()), "columns: cannot read the generator: ValueError: by the c"),
    "a match that raises": (lambda t: t.match(Raising(), "a"), "column: cannot read the Raising: KeyError"),
    "an order that raises": (lambda t: t.scan(order_by=Raising()), "order_by: cannot read the Raising: KeyError"),
    "weights that raise": (lambda t: t.hybrid(VECTOR, "a", weights=Raising()), "weights: cannot read the Raising: Ke"),
    "a range that raises": (
        lambda t: t.search("vector", VECTOR, distance_range=Raising()),
        "distance_range: cannot read the Raising: KeyError",
    ),
    "a frame for a limit": (lambda t: t.scan(limit=FRAME), "limit is id 0 1; give a whole number of rows"),
    "an array for an offset": (lambda t: t.scan(offset=ARRAY), r"offset is <pyarrow.*; write a whole number"),
    "a frame for k": (lambda t: t.match("body", "a", k=FRAME), "k is id 0 1; write a whole number"),
    "an array for explain": (lambda t: t.count(explain=ARRAY), "explain = <pyarrow.*: give a function"),
    "a frame for an order": (lambda t: t.scan(order_by=pa.table({"n": [1]})), "order_by = pyarrow.Table n: .*: write"),
    "a number for an order": (lambda t: t.scan(order_by=np.array(5)), r"order_by = array\(5\): write a column"),
    "a direction in a list": (lambda t: t.scan(order_by=[("id", ["desc"])]), "order_by = .*: write a column"),
    "arrays for weights": (lambda t: t.hybrid(VECTOR, "a", weights=ARRAY), "weights = <pyarrow.*: write two numbers"),
    "a weight beyond floats": (
        lambda t: t.hybrid(VECTOR, "a", weights=(10**400, 1)),
        "weights = .*: write two numbers",
    ),
    "a limit of many digits": (lambda t: t.scan(limit=10**5000), "limit is …; give at most"),
    "an array to follow": (lambda t: t.changes(follow=np.array([1, 2])), "follow = ndarray .*: write True or False"),
    "an array of tables": (lambda t: t.sql("select 1", tables=np.array([1])), "tables is a ndarray; write a dict"),
    "a frame of parameters": (lambda t: t.sql("select 1", parameters=FRAME), "parameters is a DataFrame; write a dict"),
    "a time of a query": (lambda t: t.sql("select $a", parameters={"a": ODD}), "a has .*its UTC offset has microsec"),
    "a long column": (lambda t: t.scan(LONG), "columns: column 'x{200}' does not exist"),
    "a long column of a filter": (lambda t: t.count(f"{LONG} = 1"), "filter 'x{200}.*column 'x{200}' does not exist"),
    "a long column to search": (lambda t: t.search(LONG, VECTOR), "column 'x{200}' does not exist"),
    "a long metric": (lambda t: t.search("vector", VECTOR, metric=LONG), "metric 'x{60}' is unknown"),
    "a text for a vector": (lambda t: t.search("vector", LONG), "vector"),
    "a long order": (lambda t: t.scan(order_by=LONG), "order_by: column 'x{200}' does not exist"),
    "a long key": (lambda t: t.get([LONG]), "key column 'id' is .*: Failed to parse string: 'x+"),
    "a long position": (lambda t: t.changes(since=LONG), "since = 'x+…: write 'earliest'"),
    "a long name of images": (lambda t: t.changes(images=LONG), "images = 'x+…: write 'after'"),
    "a long query": (lambda t: t.sql(LONG), "sql: "),
    "a long table of a query": (lambda t: t.sql(f"select * from {LONG}"), "sql: table 'x{200}' does not exist"),
    "a long argument": (lambda t: t.scan(**{LONG: 1}), r"scan\(\) has no argument 'x{199}"),
    "flush what": (lambda t: t.flush(1), r"flush\(\): too many .*; it has no arguments"),
    "commit what": (lambda t: t.commit(wait=True), r"commit\(\) has no argument 'wait'; it has none"),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, made: Any) -> Iterator[list[Any]]:
    """Yield one table in this process, through a daemon, and from storage."""
    uri = str(tmp_path_factory.mktemp("mistakes") / "t.lance")
    with ExitStack() as ends:
        table = ends.enter_context(memwal.open(uri, schema=made.schema, key="id", indexes={"body": "fts"}))
        service = FlightService(table, "grpc://127.0.0.1:0")
        ends.callback(service.shutdown)
        client = ends.enter_context(memwal.connect(f"grpc://127.0.0.1:{service.port}"))
        yield [table, client, memwal.open(uri, read_only=True)]


@pytest.mark.parametrize("name", CALLS)
def test_each_form_of_a_table_says_how_it_is_written(name: str, tables: list[Any]) -> None:
    call, text = CALLS[name]
    for table in tables:
        with pytest.raises(memwal.Invalid, match=text) as told:
            call(table)
        assert len(str(told.value).splitlines()) == 1
        assert len(str(told.value)) < 1100


WRITES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "durable of an array": (lambda t: t.put([], durable=np.array([1, 2])), "durable = ndarray .*: write True or False"),
    "durable of a frame": (lambda t: t.delete([1], durable=FRAME), "durable = DataFrame id 0 1: write True or False"),
    "durable by filter": (lambda t: t.delete(filter="price > 5", durable=FRAME), "durable = DataFrame .*: write True"),
    "durable in words": (lambda t: t.put([], durable="no"), "durable = str 'no': write True or False"),
    "an array for a token": (lambda t: t.put([], token=ARRAY), r"token <pyarrow.*: a token is 'name:number'"),
    "a frame for a token": (lambda t: t.put([], token=FRAME), r"token id 0 1: a token is 'name:number'"),
    "a token that raises": (lambda t: t.put([], token=Raising()), "token: cannot read the Raising: KeyError"),
    "a long token": (lambda t: t.put([], token=LONG), "token 'x{58}…: a token is"),
    "a frame for a timeout": (lambda t: t.put([], timeout=FRAME), "timeout = id 0 1: give seconds above 0"),
    "rows that raise": (lambda t: t.put(Raising()), "rows: cannot read the Raising: KeyError: 'by the caller'"),
    "a stream that raises": (lambda t: t.put(RaisingStream()), "rows: cannot read the RaisingStream: KeyError: 'by"),
    "a series": (lambda t: t.put(FRAME["id"]), "rows: cannot read a Series; pass an Arrow table .* or a list of dicts"),
    "a column of pandas": (lambda t: t.put(FRAME.index), "rows: cannot read a RangeIndex; pass an Arrow table"),
    "a series of Polars": (lambda t: t.put(pl.Series([1])), "rows: cannot read a Series; pass an Arrow table"),
    "a column of Arrow": (lambda t: t.put(pa.chunked_array([[1]])), "rows: cannot read a ChunkedArray; pass an Arrow"),
    "a long column of rows": (lambda t: t.put([{"id": 1, LONG: 1}]), "column 'x{199} is not in the table"),
    "a long column to index": (
        lambda t: t.create_index(LONG, "btree"),
        "index btree on column 'x{199}: no such column",
    ),
    "a long kind of index": (lambda t: t.create_index("id", LONG), "kind 'x{60}' is unknown"),
    "a long parameter": (lambda t: t.create_index("name", "fts", **{LONG: 1}), "unknown parameter 'x{199};"),
    "a long name of an index": (lambda t: t.drop_index(LONG), "no index is called 'x{199}"),
}


@pytest.mark.parametrize("name", WRITES)
def test_each_form_that_writes_says_how_it_is_written(name: str, tables: list[Any]) -> None:
    call, text = WRITES[name]
    for table in tables[:2]:
        with pytest.raises(memwal.Invalid, match=text) as told:
            call(table)
        assert len(str(told.value).splitlines()) == 1
        assert len(str(told.value)) < 1100


def test_a_series_of_polars_is_keys(tables: list[Any]) -> None:
    for table in tables[:2]:
        deleted = table.delete(pl.Series([1, 2]))
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
    ("arguments", "text"),
    [
        ({"schema": "id int64"}, "schema = str 'id int64'.*write a pyarrow.Schema or a dict"),
        ({"schema": {"id": "int65"}}, "did you mean 'int64'"),
        ({"schema": {"id": int}}, "schema = dict .*write a pyarrow.Schema or a dict"),
        ({"indexes": ["body"]}, "indexes is a list; write a dict, such as"),
        ({"indexes": "body"}, "indexes is a str; write a dict, such as"),
        ({"key": 5}, "key = int 5: write a list of column names"),
        ({"key": {"id"}}, "key = set .*: write a list"),
        ({"settings": 5}, "settings is a int; write the path of a TOML file"),
        ({"storage_options": ["a"]}, "storage_options is a list"),
        ({"ky": "id"}, r"open\(\) has no argument 'ky'; did you mean 'key'\?"),
        ({"index": {}}, r"open\(\) has no argument 'index'; write indexes"),
        ({"read_only": np.array([1, 2])}, "read_only = ndarray .*: write True or False"),
        ({"take_over": "no"}, "take_over = str 'no': write True or False"),
        ({"schema": Raising()}, "schema: cannot read the Raising: KeyError: 'by the caller'"),
        ({"schema": {"id": LONG}}, "schema = dict .*…: .*write a pyarrow.Schema"),
        ({"uri": None}, "uri = NoneType None: write the path of the table"),
    ],
)
def test_opening(arguments: dict[str, Any], text: str, uri: str, made: Any) -> None:
    given = {"uri": uri, "schema": made.schema, "key": "id", **arguments}
    with pytest.raises(memwal.Invalid, match=text) as told:
        memwal.open(**given)
    assert len(str(told.value).splitlines()) == 1
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
