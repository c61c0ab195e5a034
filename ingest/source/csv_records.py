r"""CSV files as RFC 4180 has them: Spark reads the values, and the text of each record says whether they are right.

By itself Spark ends a record at each line break, and takes `\` for what escapes a quote, so that `"a ""b"" c"` keeps
its quotes. `options_of` has the rules of RFC 4180 instead. But Spark's parser also guesses where quotes do not match,
and tells nothing: a quote that never closes takes the lines behind it into its value. So each record is checked:

 1. Spark is asked for one column more than the files have. Every record lacks a value then, and Spark hands over the
    text of what lacks a value (`columnNameOfCorruptRecord`), beside the values that it has read.
 2. A record is unreadable if its text is not that of as many values as the files have columns (`record_pattern`).
 3. A record of just one value more lacks none, so it comes without its text. It is unreadable, and its values are
    written as CSV again, for the dead letter.

A quote that never closes makes one unreadable record with all the lines up to the next quote, or the end of the file.
Lines end with `\n` or `\r\n`. Spark is told `\n`: told nothing, it goes by the first line of a file, and changes line
breaks within values. It then leaves the `\r` in front with the last value, from which it is taken away here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.source.strict_texts import read_type
from memwal.ingest.spark.schema import quoted, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

RECORD, UNREADABLE = "_memwal_record", "_memwal_unreadable"
"""The text of a record, and whether its values cannot be relied upon."""
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
"""Options, in lower case, with which the text of a record is not checked: they ask for what Spark's parser makes of it,
or cannot be had with the column that files lack."""
_ESCAPES = {"t": "\t", "r": "\r", "b": "\b", "f": "\f"}
"""What Spark takes a letter behind a backslash for, in a separator of values."""


def is_checked(options: Mapping[str, str]) -> bool:
    """Return whether `options` of a reader of CSV leave it to RFC 4180 what a quote means."""
    given = _lowered(options)
    quote = given.get("quote", '"')
    return given.get("escape", quote) == quote and not any(name in given for name in _OF_SPARKS_PARSER)


def options_of(options: Mapping[str, str]) -> dict[str, str]:
    """Return `options` of a reader of CSV, with the rules of RFC 4180 where they say nothing."""
    given = _lowered(options)
    rules = {"escape": given.get("quote", '"'), "multiLine": "true"}
    if is_checked(options) and given.get("multiline", "true").strip().lower() == "true":
        rules["lineSep"] = "\n"
    return {name: value for name, value in rules.items() if name.lower() not in given} | dict(options)


def record_pattern(columns: int, options: Mapping[str, str]) -> str:
    """Return a regular expression, of Java and of Python, for the text of a record of `columns` values.

    A value is quoted as a whole, with doubled quotes inside, or does not begin with a quote and has no line break.
    Possessive quantifiers: each part has one way to match, and Java needs no stack for a long one.
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
    """Return the rows of files with the columns `stored`, all text; whether one is unreadable; and its text.

    `reader`: Spark's, of CSV, streaming or not; `options`: of it, as `options_of` returns them.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's documentation calls it

    texts = [pa.field(name, read_type(stored.field(name).type, "csv")) for name in stored.names]
    asked = pa.schema([*texts, *(pa.field(name, pa.string()) for name in (_MORE, _UNREAD))])
    reader = reader.schema(spark_schema(asked)).options(mode="PERMISSIVE", columnNameOfCorruptRecord=_UNREAD)
    # Columns that a query does not need are read too: a record without them may lack no value.
    frame: DataFrame = reader.options(**options).options(columnPruning="false").load(path)
    # Columns that are names of directories stand behind those of the files.
    inside = frame.columns[: frame.columns.index(_MORE)]
    text, first, last = F.col(_UNREAD), F.col(quoted(inside[0])), F.col(quoted(inside[-1]))
    # The first value as well: Spark refuses a query that needs nothing of a file but the texts of its records.
    blank = (F.btrim(text, F.lit(_BLANK)) == "") & (F.btrim(F.coalesce(first, F.lit("")), F.lit(_BLANK)) == "")
    said = frame.where(~F.coalesce(blank, F.lit(False)))
    plain = {"ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false", "nullValue": ""}
    again = F.to_csv(F.struct(*(F.col(quoted(name)) for name in (*inside, _MORE))), _of_writer(options) | plain)
    wrong = text.isNull() | ~text.rlike(record_pattern(len(inside), options))
    # A step of its own, so that Spark matches the text once.
    rows = said.select(
        *(F.col(quoted(name)) for name in frame.columns if name not in (inside[-1], _MORE, _UNREAD)),
        _without_line_end(last, text, options).alias(inside[-1]),
        F.coalesce(text, again).alias(RECORD),
        F.coalesce(wrong, F.lit(True)).alias(UNREADABLE),
    )
    return rows, F.col(UNREADABLE), F.col(RECORD).cast("binary")


def _without_line_end(value: Column, text: Column, options: Mapping[str, str]) -> Column:
    r"""Return the last value of a record without the `\r` of its line's end; it may have one of its own in quotes."""
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
    """Return those of a reader's options that say how CSV is written."""
    return {name: value for name, value in options.items() if name.lower() in ("sep", "delimiter", "quote", "escape")}
