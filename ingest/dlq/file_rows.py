"""Rows of files as JSON, value by value: what a letter holds, and why Spark could not read a record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from memwal.ingest.dlq.bad_rows import BadRow
from memwal.ingest.mapping.values import ANY_TEXT, is_text, of_text, typed
from memwal.ingest.source.columns import RAW_VALUE
from memwal.ingest.source.files import UNREADABLE


def fields_of(raw: bytes | None) -> dict[str, Any] | BadRow:
    """The fields of a row as JSON, or why it is none."""
    try:
        given = json.loads(raw or b"")
    except ValueError as error:
        return BadRow("parse", None, f"not JSON: {error}")
    return given if isinstance(given, dict) else BadRow("parse", None, "not a JSON object")


def read_json(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """A value as `bad_rows.as_json` writes it, which has floats that are no numbers, or as Spark reads it, which takes
    any value for text. Raises: ValueError.
    """
    if isinstance(value, float) and pa.types.is_floating(kind) and not math.isfinite(value):
        return value
    return typed(value, kind, ANY_TEXT if is_text(kind) else "")


def read_text(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """As `read_json`, of a file in which all values are texts."""
    return of_text(value, kind) if isinstance(value, str) else read_json(value, kind)


def failure(field: pa.Field, reason: str) -> BadRow:
    """A row with a value that is none of its column."""
    return BadRow("parse", field.name, f"column {field.name!r} cannot become {field.type} ({reason})")


def explained(bad: Mapping[int, BadRow], batch: pa.RecordBatch, schema: pa.Schema) -> dict[int, BadRow]:
    """`bad` with the column and the reason of records of JSON that Spark could not read, found by reading them again.

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
