"""Check arguments of public methods: each is converted to one form, or rejected with the correct form in the message.

A wrong argument raises Invalid like any other wrong request, never an error that looks like a fault of this program.

`check_encoding` rejects Arrow data with text that is not UTF-8, or with offsets outside their buffers. Arrow checks
neither by itself. A cast of an invalid array reads memory outside its buffers, and an invalid value would
be durable before the first reader fails on it. Therefore nothing reads values before validation: the daemon validates
data from the wire (`rpc.wire`), a client the data that it sends, and a region the rows of a whole group of puts.
(Arrow validates without the GIL: one validation per put costs a quarter of the throughput of 32 callers.)
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from memwal.ingest.errors import Invalid, MemWalError
from memwal.ingest.values.type_names import parse_type
from memwal.wal.errors import first_line

T = TypeVar("T")

MIN_BOOST, MAX_BOOST = 0.001, 1000
COUNT_MAX, ROWS_MAX = 2**31 - 1, 2**61
"""Lance and gRPC accept no larger numbers; ROWS_MAX twice fits, because a limit and an offset are added."""
_FOR_EVER = 1e9
"""Seconds. Locks wait at most 9e9, and a large integer does not fit into a float."""


def listed(columns: Any, name: str = "columns") -> list[str] | None:
    """Return names of columns as a list; a single name is allowed. Raises: Invalid."""
    if columns is None or isinstance(columns, str):
        return columns if columns is None else [columns]
    names = None if isinstance(columns, Mapping | bytes) else elements(name, columns)
    if names is None or not all(isinstance(each, str) for each in names):
        raise Invalid(f"{name} = {shown(columns)}: write a list of column names, such as {name}=['id']")
    return names


def elements(name: str, value: Any) -> list[Any] | None:
    """Return the elements of an argument, None if it is not iterable.

    Raises: Invalid, with the error of the argument's own code: callers pass generators, and classes with their own
    `__iter__`.
    """
    try:
        return given_by(name, value, list)
    except TypeError:
        return None


def given_by(name: str, value: Any, take: Callable[[Any], T]) -> T:
    """Return `take(value)`, which runs the caller's code, such as `__iter__`, `__len__` or `__arrow_c_stream__`.

    Raises: Invalid, with the error of that code; TypeError, and errors of Arrow and storage, unchanged.
    """
    try:
        return take(value)
    except (MemWalError, OSError, ImportError, MemoryError, pa.ArrowException, TypeError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error):.200}"
        raise Invalid(f"{name}: cannot read the {type(value).__name__}: {said}") from error


def sql(filter: Any) -> str | None:
    """Return a filter as text. Raises: Invalid."""
    if filter is None or isinstance(filter, str):
        return filter
    raise Invalid(f"filter = {shown(filter)}: write SQL as text, such as filter=\"price > 5 AND name = 'web'\"")


def text(name: str, value: Any, such: str) -> str:
    """Return an argument that must be a string. Raises: Invalid."""
    if isinstance(value, str):
        return value
    raise Invalid(f"{name} = {shown(value)}: write a text, such as {name}={such!r}")


def text_columns(name: str, value: Any) -> dict[str, float]:
    """Return the columns of a match, each with its boost: one column, a list of them, or a dict of boosts.

    A boost is a number from MIN_BOOST to MAX_BOOST; scores are float32, which loses a smaller part of a sum. Raises:
    Invalid.
    """
    if isinstance(value, str):
        return {value: 1.0}
    if isinstance(value, Mapping):
        pairs = elements(name, value.items()) or []
    else:
        pairs = [(each, 1.0) for each in ([] if isinstance(value, bytes) else elements(name, value) or [])]
    columns = [column for column, _ in pairs]
    if not columns or not all(isinstance(column, str) for column in columns):
        raise Invalid(
            f"{name} = {shown(value)}: write a column, a list of columns, or a boost for each, such as"
            f" {name}={{'title': 3.0, 'body': 1.0}}"
        )
    if twice := next((column for at, column in enumerate(columns) if column in columns[:at]), None):
        raise Invalid(f"{name}: column '{twice}' is named twice; name it once")
    for column, boost in pairs:
        if not _is_number(boost) or not MIN_BOOST <= boost <= MAX_BOOST:  # false for NaN
            where = f"{name}: the boost of column '{column}' is {brief(boost)}"
            raise Invalid(f"{where}; give a number from {MIN_BOOST} to {MAX_BOOST}")
    return {column: float(boost) for column, boost in pairs}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def at_least_one(value: Any, name: str = "k") -> int:
    """Return the argument `name`. Raises: Invalid unless it is an integer from 1 to COUNT_MAX."""
    return whole(name, value, 1, COUNT_MAX)


def not_negative(name: str, value: Any) -> int:
    """Return the argument `name`. Raises: Invalid unless it is an integer from 0 to ROWS_MAX."""
    return whole(name, value, 0, ROWS_MAX)


def checked_limit(limit: Any, offset: int = 0) -> int | None:
    """Return how many rows a scan must find: `limit` after the first `offset`, None for all.

    Raises: Invalid unless `limit` is None or an integer from 0 to ROWS_MAX.
    """
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 0:
        raise Invalid(f"limit is {brief(limit)}; give a whole number of rows, or omit it for all")
    if limit > ROWS_MAX:
        raise Invalid(f"limit is {brief(limit)}; give at most {ROWS_MAX}, or omit it for all")
    return int(limit) + offset


def best(k: Any, offset: Any) -> int:
    """Return how many rows a search must find: `k` after the first `offset`. Raises: Invalid."""
    return at_least_one(at_least_one(k) + not_negative("offset", offset), "k + offset")


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Return the argument `name`. Raises: Invalid unless it is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise Invalid(f"{name} is {brief(value)}; write a whole number, at least {least}")
    if value > most:
        raise Invalid(f"{name} is {brief(value)}; write at most {most}")
    return int(value)


def seconds(name: str, value: Any) -> float | None:
    """Return the argument `name`: seconds above 0, None for no limit. Raises: Invalid."""
    if value is None:
        return None
    if not _is_number(value) or not value > 0:  # true for NaN
        raise Invalid(f"{name} = {brief(value)}: give seconds above 0, or None to wait for as long as it takes")
    return float(min(value, _FOR_EVER))


def yes_or_no(name: str, value: Any) -> bool:
    """Return the argument `name`. Raises: Invalid unless it is True or False.

    An array is neither, and a string such as 'no' would count as True.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise Invalid(f"{name} = {shown(value)}: write True or False")


def keys_or_filter(keys: Any, filter: Any) -> str | None:
    """Return the filter of a delete, None if keys are given. Raises: Invalid unless exactly one is given."""
    if keys is not None and filter is not None:
        raise Invalid("delete() takes keys or filter, not both")
    if keys is None and filter is None:
        raise Invalid('delete(): give keys, such as [17, 18], or filter="price > 5"')
    return sql(filter)


def distance_range(given: Any) -> tuple[float | None, float | None]:
    """Return the lowest distance (inclusive) and the upper limit (exclusive), None for no limit. Raises: Invalid."""
    try:
        low, high = (None if end is None else float(end) for end in elements("distance_range", given) or ())
    except (TypeError, ValueError, OverflowError):
        low = high = math.nan
    if any(end is not None and math.isnan(end) for end in (low, high)):
        raise Invalid(
            f"distance_range = {shown(given)}: write the lowest distance and the one to stay below, None for no "
            "limit, such as distance_range=(None, 0.5)"
        )
    if low is not None and high is not None and low >= high:
        raise Invalid(f"distance_range = {shown(given)}: no distance is at least {low:g} and below {high:g}")
    return low, high


def address(uri: Any) -> str:
    """Return the location of a table as text. Raises: Invalid."""
    if isinstance(uri, str | os.PathLike):
        return str(os.fspath(uri))
    raise Invalid(f"uri = {shown(uri)}: write the path of the table or its s3:// URL")


def mapping(name: str, value: Any, such: str) -> dict[str, Any]:
    """Return an argument that must be a dict with names as keys. Raises: Invalid."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in elements(name, value) or ()):
        return dict(value)
    raise Invalid(
        f"{name} is a {type(value).__name__}; write a dict, such as {name}={such}"
    )  # its values may be secrets


def key_columns(key: Any) -> list[str]:
    """Return the columns of a key. Raises: Invalid."""
    if isinstance(key, set | frozenset):
        raise Invalid(f"key = {shown(key)}: write a list, because the columns of a key have an order")
    columns = listed(key, "key") or []
    if not columns:
        raise Invalid("key is empty; name the columns that identify a row, or give key=() for a table without a key")
    return columns


def arrow_schema(schema: Any) -> pa.Schema | None:
    """Return a schema, given as Arrow's, a list of fields, or types by name (Arrow's, or texts as in [table] columns).

    Raises: Invalid.
    """
    if schema is None or isinstance(schema, pa.Schema):
        return schema
    if isinstance(found := getattr(schema, "schema", None), pa.Schema):  # a table, batch or reader
        return found
    pairs = elements("schema", schema.items() if isinstance(schema, Mapping) else schema)
    try:
        if pairs is None or isinstance(schema, str):
            raise TypeError(f"a {type(schema).__name__} has no fields")
        return pa.schema([pair if isinstance(pair, pa.Field) else _field(*pair) for pair in pairs])
    except (TypeError, ValueError, pa.ArrowException) as error:
        such = "{'id': 'int64', 'body': 'string'}"
        raise Invalid(
            f"schema = {shown(schema)}: {first_line(error):.200}; write a pyarrow.Schema or a dict such as {such}"
        ) from None


def _field(name: Any, kind: Any) -> pa.Field:
    return pa.field(name, parse_type(kind) if isinstance(kind, str) else kind)


def shown(value: Any) -> str:
    """Return a value with its type for a message: short, and in one line."""
    return f"{type(value).__name__} {brief(value)}"


def brief(value: Any) -> str:
    """Return the `repr` of a value for a message: short, and in one line."""
    try:
        whole = repr(value[:_BRIEF] if isinstance(value, str | bytes) else value)
    except Exception:  # noqa: BLE001 - the caller's own `__repr__` raises, or an int has too many digits
        return "…"
    text = " ".join(whole.split())
    return text if len(text) <= _BRIEF else text[: _BRIEF - 1] + "…"


_BRIEF = 60
"""Characters of a value in a message, which travels as a response header of at most 8 KiB."""


def check_encoding(rows: pa.Table | pa.RecordBatch) -> None:
    """Raise Invalid with the first column and row whose value is not valid. 10 MB of text take about 1 ms."""
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid as error:
        whole = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        for name, column in zip(whole.column_names, whole.columns, strict=True):
            if reason := _fault(column):
                row = bisect_left(range(len(column)), True, key=lambda row: bool(_fault(column.slice(0, row + 1))))
                text = f"column '{name:.200}': row {row}: {reason:.300}; correct the value, text must be UTF-8"
                raise Invalid(text) from None
        raise Invalid(f"rows are not valid Arrow data: {str(error).splitlines()[0]:.300}; correct them") from None


def _fault(column: pa.ChunkedArray) -> str:
    """Return Arrow's reason why a column is invalid, without the place; "" if it is valid."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error).splitlines()[0].rpartition("Invalid: ")[2].partition(" at string index")[0]
    return ""
