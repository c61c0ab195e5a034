"""Read JSON files with one object per line: Spark parses the lines, and marks those that it may have misread.

Spark's own JSON reader takes the first value of a line and silently ignores the rest. Therefore lines are read as text,
and Spark's JSON function parses `{"line": LINE, "end": true}` with the options of its reader: if a line contains more
than one value, the object ends before `end`. Spark also changes some values without a message. Hence a line is also
unreadable if its text is not strict JSON with each name once, or if it may contain a number that a double cannot
represent, bytes that are not UTF-8, or half a surrogate pair. `dlq.bad_rows` parses unreadable lines again
exactly: some are valid rows, the others get a reason.

The line travels with its row, and a dead letter contains it byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.spark.schema import quoted, spark_schema
from memwal.ingest.spark.source.strict_texts import read_type
from memwal.ingest.values.values import WHOLE, holds, is_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LINE, UNREADABLE = "_memwal_line", "_memwal_unreadable"
"""Columns: the text of a line, and whether Spark has no reliable values for it; its values are null then."""
_VALUE = "value"  # the column that Spark's text reader yields
_READ, _END, _UNREAD = "_memwal_read", "_memwal_end", "_memwal_unread"
_BLANK = " \t\r"
_OF_SPARKS_READER = ("multiline", "encoding", "charset", "mode", "columnnameofcorruptrecord", "wholetext")
"""Options, in lower case, that Spark's text reader lacks or interprets differently."""
_SURROGATES = ("\\ud", "\\uD")  # also matches some escapes that are not surrogates
_LONG = r"(?=[0-9.]{17})[0-9]*\.[0-9]"  # a fraction of more than 15 digits, the precision that every double has
_WITH_EXPONENT = r"[:\[,]\s*-?[0-9.]+[eE][+-]?[0-9]"
_INFINITE = float("inf")


def has_lines(form: str, options: Iterable[str]) -> bool:
    """Return whether files of format `form` are read here: JSON, unless an option requires Spark's own reader."""
    return form == "json" and not any(name.lower() in _OF_SPARKS_READER for name in options)


def rows_of_lines(reader: Any, options: Mapping[str, str], path: Any, schema: pa.Schema) -> DataFrame:
    """Return the rows of files: the columns of `schema` with `read_type` types, `LINE` and `UNREADABLE`.

    `reader`: a Spark reader, streaming or not. Directory names may also contain columns (`day=2020-01-31/`).
    """
    from pyspark.sql import functions as F  # noqa: N812 - the name in Spark's documentation
    from pyspark.sql import types as spark

    stored = pa.schema([field.with_type(read_type(field.type, "json")) for field in schema])
    lines = _lines(reader.format("text").options(**options), path, stored)
    inside = [name for name in stored.names if name not in lines.columns]
    kind = spark.StructType(
        [
            spark.StructField(LINE, spark_schema(pa.schema([stored.field(name) for name in inside]))),
            spark.StructField(_END, spark.BooleanType()),
            spark.StructField(_UNREAD, spark.StringType()),
        ]
    )
    # The line break ends a comment, if an option allows comments.
    wrapped = F.concat(F.lit(f'{{"{LINE}":'), F.col(LINE), F.lit(f'\n,"{_END}":true}}'))
    how = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNREAD}
    # Separate selects, so that Spark evaluates each expression once and not once per column.
    read = lines.select("*", F.from_json(wrapped, kind, how).alias(_READ))
    found = F.col(_READ)
    whole = found[_UNREAD].isNull() & found[LINE].isNotNull() & F.coalesce(found[_END], F.lit(False))
    whole &= ~F.col(LINE).contains(_END)
    doubtful = F.lit(False) if _lenient(options) else _doubtful(found[LINE], [schema.field(name) for name in inside])
    marked = read.select("*", (~whole | doubtful).alias(UNREADABLE))
    values = [F.when(~F.col(UNREADABLE), found[LINE][name]).alias(name) for name in inside]
    return marked.select("*", *values)


def _lines(reader: Any, path: Any, stored: pa.Schema) -> DataFrame:
    """Return the lines that are not blank as `LINE`, and the columns of `stored` that directory names contain."""
    from pyspark.sql import functions as F  # noqa: N812

    frame: DataFrame = reader.load(path)
    named = [name for name in frame.columns if name in stored.names and name != _VALUE]
    if named:  # otherwise Spark would guess their types
        kinds = pa.schema([pa.field(_VALUE, pa.string()), *(stored.field(name) for name in named)])
        frame = reader.schema(spark_schema(kinds)).load(path)
    # The filter is below everything else: Spark would evaluate the columns of a filter above it twice.
    said = frame.where(F.btrim(F.col(_VALUE), F.lit(_BLANK)) != "")
    return said.select(F.col(_VALUE).alias(LINE), *(F.col(quoted(name)) for name in named))


def _lenient(options: Mapping[str, str]) -> bool:
    """Return whether options make Spark read values differently from an exact reader."""
    names = [name.lower() for name in options]
    return any(name.startswith("allow") or name.endswith("format") for name in names) or "primitivesasstring" in names


def _doubtful(read: Column, fields: list[pa.Field]) -> Column:
    """Return whether Spark may have changed a value of a line; never null. `read`: the struct of the line's values."""
    from pyspark.sql import functions as F  # noqa: N812

    line = F.col(LINE)
    found = F.try_parse_json(line).isNull() | ~F.is_valid_utf8(line)  # strict JSON, each name once at every depth
    found |= line.contains(_SURROGATES[0]) | line.contains(_SURROGATES[1])
    texts = any(holds(field.type, is_text) for field in fields)  # text columns accept numbers, as they are written
    if texts or any(holds(field.type, pa.types.is_decimal) for field in fields):
        found |= line.rlike(_LONG)
    if texts:
        found |= line.rlike(_WITH_EXPONENT)
    for field in fields:
        found |= F.coalesce(_rounded(read[field.name], field.type), F.lit(False))
    return found


def _rounded(value: Column, kind: pa.DataType) -> Column:
    """Return whether a float, or a float in a list, may be a whole number that a double rounds; null for null."""
    from pyspark.sql import functions as F  # noqa: N812

    if pa.types.is_floating(kind):
        return (F.abs(value) >= WHOLE[kind.bit_width]) & (F.abs(value) != _INFINITE)
    if (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)) and pa.types.is_floating(kind.value_type):
        return _rounded(F.array_max(value), kind.value_type) | _rounded(F.array_min(value), kind.value_type)
    return F.lit(False)
