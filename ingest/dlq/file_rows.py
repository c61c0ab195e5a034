"""Rows of files as JSON, value by value: the content of a dead letter, and why Spark could not read a record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from memwal.ingest.dlq.bad_rows import BadRow
from memwal.ingest.mapping.documents import object_of
from memwal.ingest.mapping.json_parts import Written, expect_names_once
from memwal.ingest.mapping.values import ANY_TEXT, from_text, is_text, typed
from memwal.ingest.source.columns import RAW_VALUE
from memwal.ingest.source.files import UNREADABLE


def fields_of(raw: bytes | None) -> dict[str, Any] | BadRow:
    """Return the fields of a JSON object, or why it is none."""
    try:
        given = json.loads(raw or b"", parse_float=Written, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        return BadRow("parse", None, f"not JSON: {error}")
    try:
        expect_names_once(given)
    except ValueError as error:
        return BadRow("parse", None, str(error))
    return given if isinstance(given, dict) else BadRow("parse", None, "not a JSON object")


def read_json(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """Convert a value to type `kind`. Like `bad_rows.as_json` it allows NaN and infinite floats, and like Spark it
    takes any value for a text column. Raises: ValueError.
    """
    if isinstance(value, float) and pa.types.is_floating(kind) and not math.isfinite(value):
        return value
    return typed(value, kind, ANY_TEXT if is_text(kind) else "")


def read_text(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """As `read_json`, for a file in which all values are texts."""
    return from_text(value, kind) if isinstance(value, str) else read_json(value, kind)


def failure(field: pa.Field, reason: str) -> BadRow:
    """Return the problem of a row with a value that does not fit its column."""
    return BadRow("parse", field.name, f"column {field.name!r} cannot become {field.type} ({reason})")


def explained(bad: Mapping[int, BadRow], batch: pa.RecordBatch, schema: pa.Schema) -> dict[int, BadRow]:
    """Return `bad`, with column and reason of JSON records that Spark could not read; reads these records again.

    `schema`: of the table.
    """
    found = dict(bad)
    for row, why in bad.items():
        if f"{why.stage}: {why.reason}" == UNREADABLE and RAW_VALUE in batch.schema.names:
            found[row] = _reason(batch[RAW_VALUE][row].as_py(), schema) or why
    return found


def _reason(raw: bytes | None, schema: pa.Schema) -> BadRow | None:
    given = fields_of(raw)
    if isinstance(given, BadRow):
        return replace(given, reason=f"malformed: {given.reason}")
    for field in schema:
        try:
            read_json(given.get(field.name), field.type)
        except ValueError as error:
            return failure(field, str(error))
    return None
