r"""Read CSV files by the rules of RFC 4180: Spark parses the values, and the text of each record proves them right.

By default Spark ends a record at each line break and uses `\` to escape quotes, so that `"a ""b"" c"` keeps its quotes.
`options_of` sets the rules of RFC 4180 instead. But where quotes do not match, Spark's parser guesses and reports
nothing: an unclosed quote takes the following lines into its value. Therefore each record is checked:

1. The read schema has one column more than the files. Every record then lacks a value, and Spark returns the text of
   such records (`columnNameOfCorruptRecord`) beside the values that it has parsed.
2. A record is unreadable if its text does not match the pattern for as many values as the files have columns
   (`record_pattern`).
3. A record with exactly one value too many lacks none, so Spark returns no text for it. It is unreadable, and its
   values are written as CSV again for the dead letter.

An unclosed quote makes one unreadable record with all lines up to the next quote or the end of the file.

Lines end with `\n` or `\r\n`. `lineSep` is set to `\n`: without it Spark uses the line end of a file's first line, and
changes line breaks within values. With `\n`, Spark leaves the `\r` of a line end in the last value, and
`_without_line_end` removes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.spark.schema import quoted, spark_schema
from memwal.ingest.spark.source.strict_texts import read_type

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

RECORD, UNREADABLE = "_memwal_record", "_memwal_unreadable"
"""Columns: the text of a record, and whether its values are unreliable."""
_MORE, _UNREAD = "_memwal_more", "_memwal_unread"
_BLANK = " \t\r"
_OF_SPARKS_PARSER = (
    "mode",
    "columnnameofcorruptrecord",
    "enforceschema",
    "singlevariantcolumn",
    "unescapedquotehandling",
    "chartoescapequoteescaping",
)
"""Options, in lower case, that turn off the check of record texts.

They ask for the interpretation of Spark's parser, or cannot be combined with the additional column.
"""
_ESCAPES = {"t": "\t", "r": "\r", "b": "\b", "f": "\f"}
"""Spark's meaning of a letter behind a backslash in a separator."""


def is_checked(options: Mapping[str, str]) -> bool:
    """Return whether quotes follow RFC 4180 with these `options` of a CSV reader."""
    given = _lowered(options)
    quote = given.get("quote", '"')
    return given.get("escape", quote) == quote and not any(name in given for name in _OF_SPARKS_PARSER)


def options_of(options: Mapping[str, str]) -> dict[str, str]:
    """Return `options` of a CSV reader, with the rules of RFC 4180 for options that are not given."""
    given = _lowered(options)
    rules = {"escape": given.get("quote", '"'), "multiLine": "true"}
    if is_checked(options) and given.get("multiline", "true").strip().lower() == "true":
        rules["lineSep"] = "\n"
    return {name: value for name, value in rules.items() if name.lower() not in given} | dict(options)


def record_pattern(columns: int, options: Mapping[str, str]) -> str:
    """Return a regular expression, for Java and Python, that matches the text of a record of `columns` values.

    A value is quoted as a whole, with inner quotes doubled, or it does not begin with a quote and contains no line
    break. Quantifiers are possessive: each part has one way to match, and Java needs no stack for long texts.
    """
    given = _lowered(options)
    separator, quote = _separator(given), re.escape(given.get("quote", '"'))
    value = plain = rf"(?:(?!{re.escape(separator)})[^\r\n])*+"
    if len(separator) == 1:
        value = plain = rf"[^{re.escape(separator)}\r\n]*+"
    if quote:
        trimmed = any(given.get(f"ignore{side}whitespace", "").lower() == "true" for side in ("leading", "trailing"))
        blank = r"[ \t]*+" if trimmed else ""
        value = (
            rf"(?:{blank}{quote}[^{quote}]*+(?:{quote}{quote}[^{quote}]*+)*+{quote}{blank}|(?!{blank}{quote}){plain})"
        )
    end = rf"(?:\r|{re.escape(given['linesep'])})?+" if given.get("linesep") else r"\r?+"
    return rf"\A{value}(?:{re.escape(separator)}{value}){{{columns - 1}}}+{end}(?![\s\S])"


def rows_of_records(
    reader: Any, options: Mapping[str, str], path: Any, stored: pa.Schema
) -> tuple[DataFrame, Column, Column]:
    """Return the rows of files, a column that marks unreadable rows, and the record text.

    The rows have the columns `stored`, as text. `reader`: a Spark CSV reader, streaming or not. `options`: its options,
    as `options_of` returns them.
    """
    from pyspark.sql import functions as F  # noqa: N812 - the name in Spark's documentation

    texts = [pa.field(name, read_type(stored.field(name).type, "csv")) for name in stored.names]
    asked = pa.schema([*texts, *(pa.field(name, pa.string()) for name in (_MORE, _UNREAD))])
    reader = reader.schema(spark_schema(asked)).options(mode="PERMISSIVE", columnNameOfCorruptRecord=_UNREAD)
    # Without column pruning Spark parses all columns: a record pruned to fewer columns might lack no value.
    frame: DataFrame = reader.options(**options).options(columnPruning="false").load(path)
    # Partition columns, which are named by directories, follow the columns of the files.
    inside = frame.columns[: frame.columns.index(_MORE)]
    text, first, last = F.col(_UNREAD), F.col(quoted(inside[0])), F.col(quoted(inside[-1]))
    # The first value is tested too: Spark rejects a query that needs only the record texts of a file.
    blank = (F.btrim(text, F.lit(_BLANK)) == "") & (F.btrim(F.coalesce(first, F.lit("")), F.lit(_BLANK)) == "")
    said = frame.where(~F.coalesce(blank, F.lit(False)))
    plain = {"ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false", "nullValue": ""}
    again = F.to_csv(F.struct(*(F.col(quoted(name)) for name in (*inside, _MORE))), _of_writer(options) | plain)
    wrong = text.isNull() | ~text.rlike(record_pattern(len(inside), options))
    # A separate select, so that Spark evaluates the pattern once per record.
    rows = said.select(
        *(F.col(quoted(name)) for name in frame.columns if name not in (inside[-1], _MORE, _UNREAD)),
        _without_line_end(last, text, options).alias(inside[-1]),
        F.coalesce(text, again).alias(RECORD),
        F.coalesce(wrong, F.lit(True)).alias(UNREADABLE),
    )
    return rows, F.col(UNREADABLE), F.col(RECORD).cast("binary")


def _without_line_end(value: Column, text: Column, options: Mapping[str, str]) -> Column:
    r"""Return the last value of a record without the `\r` of its line end; a quoted value may end with its own `\r`."""
    from pyspark.sql import functions as F  # noqa: N812

    given = _lowered(options)
    own = F.coalesce(F.rtrim(text, F.lit("\r")).endswith("\r" + (given.get("quote", '"') or "\r")), F.lit(False))
    bare = F.nullif(F.left(value, F.length(value) - 1), F.lit(""))
    return F.when(value.endswith("\r") & ~own, F.nullif(bare, F.lit(given.get("nullvalue", "")))).otherwise(value)


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def _separator(given: Mapping[str, str]) -> str:
    separator = given.get("sep", given.get("delimiter", ","))
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), separator)


def _of_writer(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a reader that also apply to writing CSV."""
    return {name: value for name, value in options.items() if name.lower() in ("sep", "delimiter", "quote", "escape")}
