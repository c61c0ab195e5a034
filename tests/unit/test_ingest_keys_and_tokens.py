"""Keys and tokens in every form that a caller may pass."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.ingest.engine.api.keys import normalise_keys, parse_key
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.errors import Invalid
from tests.messages import raises

ONE = pa.schema([pa.field("id", pa.int32(), nullable=False), pa.field("value", pa.string())])
NAMED = pa.schema([pa.field("name", pa.string(), nullable=False), pa.field("blob", pa.binary())])
BLOB = pa.schema([pa.field("id", pa.large_binary(), nullable=False)])
TWO = pa.schema(
    [
        pa.field("day", pa.date32(), nullable=False),
        pa.field("flight", pa.int64(), nullable=False),
        pa.field("value", pa.string()),
    ]
)
DAY = datetime.date(2013, 1, 31)


@pytest.mark.parametrize(
    "keys",
    [
        [3, 1],
        (3, 1),
        ["3", "1"],
        [{"id": 3}, {"id": 1}],
        [(3,), (1,)],
        np.array([3, 1]),
        pa.array([3, 1], pa.int64()),
        pa.chunked_array([[3], [1]]),
        pa.table({"id": pa.array([3, 1], pa.uint8())}),
        pa.record_batch({"id": pa.array([3, 1])}),
        pa.table({"id": [3, 1]}).to_reader(),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_every_form_of_one_key_column_gives_the_same_table(keys: Any) -> None:
    table = normalise_keys(keys, ONE, ["id"])

    assert table.schema.field("id").type == pa.int32()
    assert table.to_pydict() == {"id": [3, 1]}


@pytest.mark.parametrize(("keys", "schema", "want"), [(7, ONE, 7), (["x"], NAMED, "x"), (b"\0'", BLOB, b"\0'")])
def test_a_scalar_is_one_key(keys: Any, schema: pa.Schema, want: Any) -> None:
    name = schema.names[0]

    assert normalise_keys(keys, schema, [name]).to_pydict() == {name: [want]}


@pytest.mark.parametrize(
    "keys",
    [
        [(DAY, 5)],
        (DAY, 5),
        {"flight": 5, "day": DAY},
        [{"flight": 5, "day": DAY}],
        [["2013-01-31", "5"]],
        pa.table({"flight": [5], "day": [DAY]}),
    ],
    ids=["tuples", "tuple", "dict", "dicts", "texts", "table"],
)
def test_every_form_of_two_key_columns_gives_the_same_table(keys: Any) -> None:
    table = normalise_keys(keys, TWO, ["day", "flight"])

    assert table.to_pydict() == {"day": [DAY], "flight": [5]}


def test_large_unsigned_keys_keep_every_digit() -> None:
    schema = pa.schema([pa.field("id", pa.uint64(), nullable=False)])

    assert normalise_keys([2**64 - 1, np.int64(3)], schema, ["id"]).to_pydict() == {"id": [2**64 - 1, 3]}


def test_no_keys_are_no_error() -> None:
    assert normalise_keys([], TWO, ["day", "flight"]).num_rows == 0


@pytest.mark.parametrize(
    ("keys", "schema", "key"),
    [
        ([1, None], ONE, ["id"]),
        (["x"], ONE, ["id"]),
        ([2**40], ONE, ["id"]),
        ([1.5], ONE, ["id"]),
        ([True], ONE, ["id"]),
        ([5], NAMED, ["name"]),
        ([(datetime.datetime(2013, 1, 31, 5, tzinfo=datetime.UTC), 5)], TWO, ["day", "flight"]),
        (pa.table({"name": [5]}), NAMED, ["name"]),
        (pa.table({"id": [1], "idd": [1]}), ONE, ["id"]),
        (pa.table({"day": [DAY]}), TWO, ["day", "flight"]),
        ([5], TWO, ["day", "flight"]),
        ([(DAY,)], TWO, ["day", "flight"]),
        ([{"day": DAY}], TWO, ["day", "flight"]),
    ],
)
def test_what_is_no_key_is_refused_in_one_line(keys: Any, schema: pa.Schema, key: list[str]) -> None:
    with raises(Invalid):
        normalise_keys(keys, schema, key)


def test_a_typed_key_is_split_at_commas_only_when_the_key_has_several_columns() -> None:
    assert parse_key("a,b", ["name"]) == ("a,b",)
    assert parse_key('"a,b",5', ["name", "number"]) == ("a,b", "5")
    assert parse_key('"a\nb",5', ["name", "number"]) == ("a\nb", "5")
    for text in ("a\nb,5", '"a,5', '"a"b,5'):
        with raises(Invalid):
            parse_key(text, ["name", "number"])
    with raises(Invalid):
        parse_key("a", ["name", "number"])


@pytest.mark.parametrize("given", ["loader:17", ("loader", 17), ("loader", np.int64(17)), Token("loader", 17)])
def test_every_form_means_the_same(given: object) -> None:
    assert Token.parse(given) == Token("loader", 17)  # type: ignore[arg-type]


def test_a_name_may_hold_colons() -> None:
    assert Token.parse("a:b:3") == Token("a:b", 3)


def test_no_token_is_no_token() -> None:
    assert Token.parse(None) is None


@pytest.mark.parametrize(
    "given", ["loader", "loader:x", ":3", "loader:-1", ("loader",), 7, ("a", 1.5), ("a", 1.0), ("a", True), (1, 1)]
)
def test_what_is_no_token_is_refused_with_the_forms(given: object) -> None:
    with raises(Invalid):
        Token.parse(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["\udcff", "file \ud800 a", "\ude00\ud83d"])
def test_a_name_that_is_no_utf8_is_refused_in_one_line(name: str) -> None:
    """A file name that is not valid UTF-8 gives this name; a region could not retire it."""
    with raises(Invalid) as refused:
        Token(name, 1)
    refused.value.message.encode()
    assert Token("😀", 1).producer == "😀"


@pytest.mark.parametrize("sequence", [2**63, 10**5000], ids=["2**63", "10**5000"])
def test_a_number_that_no_entry_can_hold_is_refused_by_every_way_in(sequence: int) -> None:
    assert Token.parse(("loader", 2**63 - 1)) == Token.parse("loader:9223372036854775807")
    with raises(Invalid):
        Token("loader", sequence)
    with pytest.raises(Invalid):
        Token.parse(("loader", sequence))
