"""The query box of the page: execute one read given as JSON and return a few rows as texts. It only reads.

A request has any of `filter` (SQL condition), `words` (full text) and `near` (the key of a row whose vector is
searched, in the form of `memwal query --key`). `words` and `near` together are a hybrid search. Programs can do more
than the page can show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.keys import parse_key
from memwal.ingest.engine.api.reads import Reads, check_level
from memwal.ingest.engine.api.results import python_rows
from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import suggestion
from memwal.memtable import IndexSpec
from memwal.wal import Clock

ROWS_MAX = 100
CELL = 200
"""Maximum characters of a cell."""
_LISTED = 3
_NAMES = ("filter", "words", "words_column", "near", "near_column", "level", "limit")


def describe(schema: pa.Schema, key: Sequence[str], indexes: Sequence[IndexSpec]) -> dict[str, Any]:
    """Return what a query may name: `columns` with their types, `key`, `texts` (with a full-text index), `vectors`."""
    vectors = [field.name for field in schema if _is_vector(field.type)]
    return {
        "columns": [{"name": field.name, "type": _type(field.type)} for field in schema],
        "key": list(key),
        "texts": [spec.column for spec in indexes if spec.kind == "fts"],
        "vectors": vectors,
        "rows_max": ROWS_MAX,
    }


def answer(table: Reads, request: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """Return the rows of one query: `read` (its kind), `columns` (`name`, `type`, `number`), `rows` of texts (None is
    null), and `seconds`.

    Raises: Invalid for a request that is not a query of this table; errors of reading.
    """
    if unknown := next((name for name in request if name not in _NAMES), None):
        raise Invalid(f"unknown field '{unknown}'{suggestion(unknown, _NAMES)}; a query has {', '.join(_NAMES)}")
    filter, words, near = (_text(request, name) for name in ("filter", "words", "near"))
    level, limit = str(request.get("level") or "latest"), _limit(request.get("limit", 20))
    check_level(level)
    common: dict[str, Any] = {"filter": filter, "level": level}
    began = clock.monotonic()
    if near is not None:
        column = _column(request, "near_column", "vector")
        values = parse_key(near, table.key)
        found = table.get([values] if len(values) > 1 else [values[0]], [column], level=level)
        if not found.num_rows:
            raise Invalid(f"no row has the key {near!r} at level {level}")
        vector: Any = found.column(column)[0].as_py()
        if not isinstance(vector, list):
            raise Invalid(f"column '{column}' of the row with key {near!r} holds no vector")
        if words is not None:
            common |= {"vector_column": column, "text_column": _column(request, "words_column", "text")}
            read, rows = "hybrid", table.hybrid(vector, words, limit, **common)
        else:
            read, rows = "search", table.search(column, vector, limit, **common)
    elif words is not None:
        read, rows = "match", table.match(_column(request, "words_column", "text"), words, limit, **common)
    else:
        read, rows = "scan", table.scan(limit=limit, **common).read_all()
    return {"read": read, "level": level, "seconds": clock.monotonic() - began, **_shown(rows)}


def _text(request: Mapping[str, Any], name: str) -> str | None:
    """Return a text of the request; None if it is missing or empty. Raises: Invalid for another type."""
    value = request.get(name)
    if value is not None and not isinstance(value, str):
        raise Invalid(f"{name} is a {type(value).__name__}; write a text")
    return (value or "").strip() or None


def _limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= ROWS_MAX:
        raise Invalid(f"limit is {value!r}; write a number from 1 to {ROWS_MAX}")
    return value


def _column(request: Mapping[str, Any], name: str, what: str) -> str:
    column = _text(request, name)
    if column is None:
        raise Invalid(f"{name} is missing; name the {what} column to search")
    return column


# ---- rows for people ------------------------------------------------------------------------------------------------


def _shown(rows: pa.Table) -> dict[str, Any]:
    columns = [
        {"name": field.name, "type": _type(field.type), "number": _is_number(field.type)} for field in rows.schema
    ]
    narrow = [pa.types.is_float32(kind) or pa.types.is_float16(kind) for kind in rows.schema.types]
    texts = [list(map(_cell, row.values(), narrow)) for row in python_rows(rows)]
    return {"columns": columns, "rows": texts}


def _cell(value: Any, narrow: bool = False) -> str | None:
    """Return a value as text. `narrow`: it was a float32, which has fewer digits than Python's float shows."""
    if value is None:
        return None
    if isinstance(value, float):
        return str(np.float32(value)) if narrow else repr(value)
    if isinstance(value, bytes):
        return _cut(value[:CELL].hex())
    if isinstance(value, list):
        listed = ", ".join(
            f"{each:.3g}" if isinstance(each, float) else _cut(str(each), 40) for each in value[:_LISTED]
        )
        return f"[{listed}, … {len(value):,} values]" if len(value) > _LISTED else f"[{listed}]"
    return _cut(str(value))


def _cut(text: str, most: int = CELL) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _type(kind: pa.DataType) -> str:
    return f"vector[{kind.list_size}]" if _is_vector(kind) else str(kind)


def _is_vector(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
