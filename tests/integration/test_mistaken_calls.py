"""A mistake in a call is Invalid and says how it is written, whichever form of a table is called; never Internal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import memwal
from memwal.ingest.daemon.service import FlightService
from tests.conftest import WIDTH

CHEAP = pc.field("price") > 5
VECTOR = [0.5] * WIDTH
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
    "flush what": (lambda t: t.flush(1), r"flush\(\): too many .*; it has no arguments"),
    "commit what": (lambda t: t.commit(wait=True), r"commit\(\) has no argument 'wait'; it has none"),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, made: Any) -> Iterator[list[Any]]:
    """One table as it is in this process, through a daemon, and on storage."""
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
    ("location", "arguments"), [(None, {}), (5, {}), ("grpc://h:1", {"tls_ca": 5}), ("grpc://h:1", {"tokn": "a"})]
)
def test_connecting(location: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(memwal.Invalid):
        memwal.connect(location, **arguments)
