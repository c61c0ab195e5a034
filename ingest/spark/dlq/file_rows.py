"""Rows of files as JSON, value by value: the content of a dead letter, and lines that Spark may have misread."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.spark.dlq.bad_rows import BadRow, problems_of
from memwal.ingest.spark.source.columns import RAW_VALUE, of_table
from memwal.ingest.spark.source.files import UNREADABLE
from memwal.ingest.values.documents import no_number, object_of
from memwal.ingest.values.json_parts import Written, expect_names_once
from memwal.ingest.values.values import ANY_TEXT, column, from_text, is_text, typed


def fields_of(raw: bytes | None, *, strict: bool = False) -> dict[str, Any] | BadRow:
    """Return the fields of a JSON object, or why the bytes are not one. `strict`: NaN and infinities are errors."""
    hooks: dict[str, Any] = {"parse_constant": no_number} if strict else {}
    try:
        given = json.loads((raw or b"").decode(), parse_float=Written, object_pairs_hook=object_of, **hooks)
        expect_names_once(given)
    except UnicodeDecodeError as error:
        return BadRow("parse", None, f"byte {error.start} is not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow("parse", None, f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos}")
    except RecursionError:
        return BadRow("parse", None, "JSON nested too deep")
    except ValueError as error:
        return BadRow("parse", None, str(error))
    return given if isinstance(given, dict) else BadRow("parse", None, "not a JSON object")


def read_json(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """Convert a value to type `kind`. Raises: ValueError.

    Like `bad_rows.as_json`, it allows NaN and infinite floats; like Spark, it accepts any value for a text column.
    """
    if isinstance(value, float) and pa.types.is_floating(kind) and not math.isfinite(value):
        return typed(value, kind) if isinstance(value, Written) else value  # 1e400 is not infinity
    return typed(value, kind, ANY_TEXT if is_text(kind) else "")


def read_text(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """As `read_json`, for a file format in which all values are text."""
    return from_text(value, kind) if isinstance(value, str) else read_json(value, kind)


def failure(field: pa.Field, reason: str) -> BadRow:
    """Return the problem of a row with a value that does not fit its column."""
    return BadRow("parse", field.name, f"column {field.name!r} cannot become {field.type} ({reason})")


def columns_of(
    raw: Sequence[bytes | None], schema: pa.Schema, *, texts: bool = False, lines: bool = False
) -> tuple[dict[str, pa.Array], dict[int, BadRow]]:
    """Read JSON objects as strictly as Kafka records.

    Return the columns of `schema`, in the types that they have in Spark, and why rows are bad. Other fields are
    ignored. `texts`: numbers may be text, as in CSV. `lines`: `raw` are lines of JSON files.
    """
    documents = [fields_of(each, strict=lines) for each in raw]
    bad = {row: each for row, each in enumerate(documents) if isinstance(each, BadRow)}
    objects = [{} if isinstance(each, BadRow) else each for each in documents]
    columns = {}
    for field in schema:
        given = [each.get(field.name) for each in objects]
        columns[field.name], problems = column(given, field.type, "", read_text if texts else read_json)
        for row, reason in problems.items():
            bad.setdefault(row, failure(field, reason))
    return columns, bad


def read_again(batch: pa.RecordBatch, schema: pa.Schema) -> tuple[pa.RecordBatch, dict[int, BadRow]]:
    """Read again, exactly, the JSON lines that Spark could not read or may have misread.

    Return the batch with their values, and its bad rows with their reasons. `schema`: of the table.
    """
    bad = problems_of(batch)
    rows = [row for row, why in bad.items() if f"{why.stage}: {why.reason}" == UNREADABLE]
    if not rows or RAW_VALUE not in batch.schema.names:
        return batch, bad
    wanted = [name for name in of_table(batch.schema.names) if name in schema.names]
    raw = batch[RAW_VALUE].take(pa.array(rows)).to_pylist()
    columns, still = columns_of(raw, pa.schema(map(schema.field, wanted)), lines=True)
    for at, row in enumerate(rows):
        del bad[row]
        if at in still:
            bad[row] = still[at]
    places = np.full(batch.num_rows, -1)
    places[rows] = np.arange(len(rows))
    spread = pa.array(places, mask=places < 0)
    for name, values in columns.items():
        given = batch[name]  # not null if a directory name contains the value
        exact = values.cast(given.type).take(spread)
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, batch.schema.field(at), pc.if_else(given.is_valid(), given, exact))
    return batch, dict(sorted(bad.items()))
