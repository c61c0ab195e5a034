r"""Read JSON and CSV files as strictly as Kafka records: no guessing, no truncation, no rounding.

Values that Spark's readers would guess (README, *Decisions*) are read as text (`read_type`). Spark expressions convert
a text to a value if it has the right form (`columns`). A row with any other text has the reason in `PROBLEM`, and the
row as JSON in `RAW_VALUE`. JSON: times, decimals and uint64 are read as text, floats as float64, everything else with
its own type. CSV: every value is text, and an empty value is null.

**JSON with one object per line.** Spark's own JSON reader takes the first value of a line and silently ignores the
rest. Therefore lines are read as text, and Spark's JSON function parses `{"text": TEXT, "end": true}` with the options
of its reader: if a line contains more than one value, the object ends before `end`. Spark also changes some values
without a message. Hence a line is also unreadable if its text is not strict JSON with each name once, or if it may
contain a number that a double cannot represent, bytes that are not UTF-8, or half a surrogate pair. `dlq.bad_rows`
parses unreadable lines again exactly: some are valid rows, the others get a reason. The line travels with its row, and
a dead letter contains it byte for byte.

**CSV by the rules of RFC 4180.** By default Spark ends a record at each line break and uses `\` to escape quotes, so
that `"a ""b"" c"` keeps its quotes. `options_of` sets the rules of RFC 4180 instead. But where quotes do not match,
Spark's parser guesses and reports nothing: an unclosed quote takes the following lines into its value. Therefore each
record is checked:

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
from decimal import Decimal
from functools import reduce
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name in Spark's documentation
from pyspark.sql import types as spark

from memwal.ingest.errors import Invalid
from memwal.ingest.spark.schema import quoted, spark_schema, spark_type, widened
from memwal.ingest.spark.source.files import ALL_TEXT, has_lines
from memwal.ingest.values.values import FLOAT_MAX, WHOLE, holds, is_text

TEXT, UNREADABLE = "_memwal_text", "_memwal_unreadable"
"""Columns: the text of a line or record, and whether Spark has no reliable values for it."""
_UNREAD = "_memwal_unread"
_BLANK = " \t\r"
_SHOWN = 40
_INFINITE = float("inf")
_WHOLE_TEXT = r"^[+-]?[0-9]+$"
_BITS = {16: 11, 32: 24}
"""Bits of precision of floats narrower than float64, by their width."""
_DAY = r"\d{4,}-\d\d-\d\d"
_TIME = _DAY + r"[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?"
_ZONE = r" ?(Z|[+-]\d\d(:?\d\d)?)"
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(?i:nan|inf|infinity)"
_FORMATS = {"date": "dateformat", "timestamp": "timestampformat", "timestamp_ntz": "timestampntzformat"}


def read_type(kind: pa.DataType, form: str) -> pa.DataType:
    """Return the type that Spark uses to read a column of type `kind` from a file of format `form`.

    Raises: Invalid for a list or struct in CSV.
    """
    if form in ALL_TEXT:
        if pa.types.is_nested(kind):
            raise Invalid(f"CSV files have no values of the type {kind}; use JSON or Parquet, or another column type")
        return pa.string()
    if _is_guessed(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(read_type(kind.value_type, form))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(read_type(field.type, form)) for field in kind])
    return widened(kind)


def columns(schema: pa.Schema, form: str, options: Mapping[str, str]) -> tuple[list[Column], Column]:
    """Return the Spark columns of `schema`, and a column with each row's problem or null.

    The input has columns of `read_type`. `options`: of the reader; its time formats are applied.
    """
    texts = _Texts(form, _lowered(options))
    found, problems = [], [F.lit(None).cast("string")]
    for field in schema:
        given = F.col(quoted(field.name))
        value, bad = texts.value(given, field.type)
        found.append(value.alias(field.name))
        if bad is not None:
            shown = F.to_json(given) if pa.types.is_nested(field.type) and not _is_text(field.type, form) else given
            text = F.substring(shown.cast("string"), 1, _SHOWN)
            said = F.concat(F.lit(f"map: column '{field.name}': '"), text, F.lit(f"' is no {field.type}; "))
            problems.append(F.when(bad, F.concat(said, texts.remedy(given, field.type))))
    return found, F.coalesce(*problems)


def _as_read(schema: pa.Schema) -> Column:
    """Return a row of the file as JSON in bytes, from columns of `read_type`."""
    return F.to_json(F.struct(*(F.col(quoted(name)) for name in schema.names))).cast("binary")


def rows_of_texts(
    reader: Any, form: str, options: Mapping[str, str], path: Any, schema: pa.Schema, stored: pa.Schema
) -> tuple[DataFrame, Column, Column]:
    """Return the rows of JSON or CSV files with `read_type` types, whether a row is unreadable, and its raw bytes."""
    unreadable, text = F.col(UNREADABLE), F.col(TEXT).cast("binary")
    if has_lines(form, options):
        return rows_of_lines(reader, options, path, schema), unreadable, text
    if form == "csv":
        options = options_of(options)
        if is_checked(options):
            rows = rows_of_records(reader, options, path, stored)
            return rows, unreadable, F.when(unreadable, text).otherwise(_as_read(stored))
    stored = pa.schema([field.with_type(read_type(field.type, form)) for field in stored])
    read = spark_schema(stored.append(pa.field(_UNREAD, pa.string())))
    reader = reader.schema(read).options(mode="PERMISSIVE", columnNameOfCorruptRecord=_UNREAD)
    unread = F.col(_UNREAD)
    return reader.options(**options).load(path), unread.isNotNull(), F.coalesce(unread.cast("binary"), _as_read(stored))


def _is_guessed(kind: pa.DataType) -> bool:
    # Spark represents uint64 as a decimal, and rounds values to it.
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or kind == pa.uint64())


def _is_text(kind: pa.DataType, form: str) -> bool:
    return form in ALL_TEXT or _is_guessed(kind)


class _Texts:
    """Spark expressions, by type, that convert texts to values and detect bad texts."""

    def __init__(self, form: str, options: Mapping[str, str]) -> None:
        self._form, self._options = form, options

    def value(self, given: Column, kind: pa.DataType) -> tuple[Column, Column | None]:
        """Return the value of `given`, and whether it is bad: not null but without a value. None if it is never bad."""
        if _is_text(kind, self._form):
            if pa.types.is_string(kind) or pa.types.is_large_string(kind):
                return given, None
            value = self._of_text(given, kind)
            return value, given.isNotNull() & value.isNull()
        if pa.types.is_struct(kind):
            return self._struct(given, kind)
        if pa.types.is_floating(kind):  # JSON has no infinity: Spark reads 1e309 as infinity
            return given, given.isNotNull() & ((F.abs(given) == _INFINITE) | self._is_nan(given))
        if pa.types.is_nested(kind) and pa.types.is_floating(kind.value_type):
            infinite = F.array_contains(given, _INFINITE) | F.array_contains(given, -_INFINITE)
            return given, F.coalesce(infinite | F.exists(given, self._is_nan), F.lit(False))
        if pa.types.is_nested(kind):
            inner = kind.value_type
            if self.value(F.lit(None), inner)[1] is None:
                return given, None
            taken = F.transform(given, lambda each: self.value(each, inner)[0])
            bad = F.exists(given, lambda each: cast("Column", self.value(each, inner)[1]))
            return taken, F.coalesce(bad, F.lit(False))
        return given, None

    def _is_nan(self, number: Column) -> Column:
        """Return whether Spark read a number from the text "NaN" or from NaN; false if an option permits NaN."""
        return F.lit(False) if "allownonnumericnumbers" in self._options else F.isnan(number)

    def _struct(self, given: Column, kind: pa.StructType) -> tuple[Column, Column | None]:
        below = {field.name: self.value(given.getField(field.name), field.type) for field in kind}
        bad = [each for _, each in below.values() if each is not None]
        if not bad:
            return given, None
        fields = F.struct(*(value.alias(name) for name, (value, _) in below.items()))
        return F.when(given.isNotNull(), fields), reduce(lambda one, two: one | two, bad)

    def _of_text(self, text: Column, kind: pa.DataType) -> Column:
        """Return the value of a text; null if it has none."""
        into = spark_type(widened(kind))
        form = self._options.get(_FORMATS.get(into.typeName(), ""))
        if form is not None:
            return F.try_to_timestamp(text, F.lit(form)).cast(into)
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return F.try_to_binary(text, F.lit("base64"))
        value = text.try_cast(into)
        fits = text.rlike(f"^({_pattern(kind)})$")
        if pa.types.is_floating(kind):  # Spark reads 1e309 as infinity, and rounds 9007199254740993
            fits = fits & ((F.abs(value) != _INFINITE) | F.lower(text).contains("inf"))
            rounded = (F.abs(value) >= WHOLE[kind.bit_width]) & text.rlike(_WHOLE_TEXT)
            fits = fits & (~rounded | _exactly(value, text, kind))
        return F.when(fits, value)

    def remedy(self, given: Column, kind: pa.DataType) -> Column:
        """Return the remedy for a text that has no value."""
        leaf = kind
        while pa.types.is_list(leaf) or pa.types.is_fixed_size_list(leaf):
            leaf = leaf.value_type
        if pa.types.is_timestamp(leaf) and leaf.tz is None:
            zoned = F.lit(f"it has a time zone, declare the column timestamp[{leaf.unit}, UTC]")
            plain = F.lit("write ISO 8601 without an offset, a number needs a unit")
            return F.when(given.rlike(f"^{_TIME}{_ZONE}$"), zoned).otherwise(plain) if leaf is kind else plain
        said = F.lit(next((said for of, said in _REMEDIES if of(leaf)), "correct the value"))
        if pa.types.is_floating(kind) and _is_text(kind, self._form):
            finite = F.abs(given.try_cast("double")) <= FLOAT_MAX[kind.bit_width]
            finite &= F.abs(given.try_cast("double")) != _INFINITE
            rounded = F.lit("it would be rounded, store it as a decimal or an integer")
            return F.when(given.rlike(_WHOLE_TEXT) & finite, rounded).otherwise(said)
        return said


_REMEDIES: tuple[tuple[Any, str], ...] = (
    (pa.types.is_timestamp, "write ISO 8601 with an offset, such as Z, a number needs a unit"),
    (pa.types.is_date, "write ISO 8601, such as 2020-01-31, a number needs a unit"),
    (pa.types.is_decimal, "no number of so many digits"),
    (pa.types.is_floating, "no finite number in range"),
    (pa.types.is_integer, "no whole number in range"),
)


def _exactly(value: Column, text: Column, kind: pa.DataType) -> Column:
    """Return whether a float of type `kind` equals the number in a text of digits. `value`: the nearest float64."""
    # Without the sign, since negating a decimal in Spark rounds it to 34 digits. Null for more than 38 digits.
    written = F.ltrim(text, F.lit("+-")).try_cast("decimal(38, 0)")
    # Split a float64 into three parts that Spark casts without loss; a direct cast uses the shortest digits.
    size = F.abs(value)
    high = F.floor(size / 2.0**64)
    rest = size - high.cast("double") * 2.0**64
    middle = F.floor(rest / 2.0**32)
    low = (rest - middle.cast("double") * 2.0**32).try_cast("bigint")
    held = F.lit(Decimal(0)).cast("decimal(38, 0)")
    for part, power in ((high, 2**64), (middle, 2**32), (low, 1)):
        held = held + F.try_multiply(part.cast("decimal(19, 0)"), F.lit(Decimal(power)).cast("decimal(20, 0)"))
    same = F.coalesce(held.cast("decimal(38, 0)") == written, F.lit(False))
    if kind.bit_width == 64:
        return same
    # Round to the precision of a narrower float (Veltkamp's splitting): Spark has no float16.
    scaled = value * (2.0 ** (53 - _BITS[kind.bit_width]) + 1)
    return same & (scaled - (scaled - value) == value)


def _pattern(kind: pa.DataType) -> str:
    """Return a regular expression for the texts of values of `kind`; it does not check their range."""
    types = pa.types
    if types.is_timestamp(kind):
        return _TIME + (_ZONE if kind.tz is not None else "")
    if types.is_date(kind):
        return _DAY
    if types.is_decimal(kind):
        return rf"[+-]?0*\d{{0,{kind.precision - kind.scale}}}(\.\d{{0,{kind.scale}}}0*)?"
    if types.is_integer(kind):
        return r"[+-]?\d+"
    return "(?i:true|false)" if types.is_boolean(kind) else _NUMBER


# ---- JSON lines ------------------------------------------------------------------------------------------------------


_VALUE = "value"  # the column that Spark's text reader yields
_READ, _END = "_memwal_read", "_memwal_end"
_SURROGATES = ("\\ud", "\\uD")  # also matches some escapes that are not surrogates
_LONG = r"(?=[0-9.]{17})[0-9]*\.[0-9]"  # a fraction of more than 15 digits, the precision that every double has
_WITH_EXPONENT = r"[:\[,]\s*-?[0-9.]+[eE][+-]?[0-9]"


def rows_of_lines(reader: Any, options: Mapping[str, str], path: Any, schema: pa.Schema) -> DataFrame:
    """Return the rows of files: the columns of `schema` with `read_type` types, `TEXT` and `UNREADABLE`.

    The values of an unreadable line are null.

    `reader`: a Spark reader, streaming or not. Directory names may also contain columns (`day=2020-01-31/`).
    """
    stored = pa.schema([field.with_type(read_type(field.type, "json")) for field in schema])
    lines = _lines(reader.format("text").options(**options), path, stored)
    inside = [name for name in stored.names if name not in lines.columns]
    kind = spark.StructType(
        [
            spark.StructField(TEXT, spark_schema(pa.schema([stored.field(name) for name in inside]))),
            spark.StructField(_END, spark.BooleanType()),
            spark.StructField(_UNREAD, spark.StringType()),
        ]
    )
    # The line break ends a comment, if an option allows comments.
    wrapped = F.concat(F.lit(f'{{"{TEXT}":'), F.col(TEXT), F.lit(f'\n,"{_END}":true}}'))
    how = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNREAD}
    # Separate selects, so that Spark evaluates each expression once and not once per column.
    read = lines.select("*", F.from_json(wrapped, kind, how).alias(_READ))
    found = F.col(_READ)
    whole = found[_UNREAD].isNull() & found[TEXT].isNotNull() & F.coalesce(found[_END], F.lit(False))
    whole &= ~F.col(TEXT).contains(_END)
    # With these options Spark reads values differently from an exact reader.
    names = [name.lower() for name in options]
    lenient = any(name.startswith("allow") or name.endswith("format") or name == "primitivesasstring" for name in names)
    doubtful = F.lit(False) if lenient else _doubtful(found[TEXT], [schema.field(name) for name in inside])
    marked = read.select("*", (~whole | doubtful).alias(UNREADABLE))
    values = [F.when(~F.col(UNREADABLE), found[TEXT][name]).alias(name) for name in inside]
    return marked.select("*", *values)


def _lines(reader: Any, path: Any, stored: pa.Schema) -> DataFrame:
    """Return the lines that are not blank as `TEXT`, and the columns of `stored` that directory names contain."""
    frame: DataFrame = reader.load(path)
    named = [name for name in frame.columns if name in stored.names and name != _VALUE]
    if named:  # otherwise Spark would guess their types
        kinds = pa.schema([pa.field(_VALUE, pa.string()), *(stored.field(name) for name in named)])
        frame = reader.schema(spark_schema(kinds)).load(path)
    # The filter is below everything else: Spark would evaluate the columns of a filter above it twice.
    said = frame.where(F.btrim(F.col(_VALUE), F.lit(_BLANK)) != "")
    return said.select(F.col(_VALUE).alias(TEXT), *(F.col(quoted(name)) for name in named))


def _doubtful(read: Column, fields: list[pa.Field]) -> Column:
    """Return whether Spark may have changed a value of a line; never null. `read`: the struct of the line's values."""
    line = F.col(TEXT)
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
    if pa.types.is_floating(kind):
        return (F.abs(value) >= WHOLE[kind.bit_width]) & (F.abs(value) != _INFINITE)
    if (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)) and pa.types.is_floating(kind.value_type):
        return _rounded(F.array_max(value), kind.value_type) | _rounded(F.array_min(value), kind.value_type)
    return F.lit(False)


# ---- CSV -------------------------------------------------------------------------------------------------------------


_MORE = "_memwal_more"
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
    separator, quote = given.get("sep", given.get("delimiter", ",")), re.escape(given.get("quote", '"'))
    separator = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), separator)
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


def rows_of_records(reader: Any, options: Mapping[str, str], path: Any, stored: pa.Schema) -> DataFrame:
    """Return the rows of files: the columns `stored` as text, `TEXT` and `UNREADABLE`.

    `reader`: a Spark CSV reader, streaming or not. `options`: its options, as `options_of` returns them.
    """
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
    for_writer = {name: options[name] for name in options if name.lower() in ("sep", "delimiter", "quote", "escape")}
    again = F.to_csv(F.struct(*(F.col(quoted(name)) for name in (*inside, _MORE))), for_writer | plain)
    wrong = text.isNull() | ~text.rlike(record_pattern(len(inside), options))
    # A separate select, so that Spark evaluates the pattern once per record.
    return said.select(
        *(F.col(quoted(name)) for name in frame.columns if name not in (inside[-1], _MORE, _UNREAD)),
        _without_line_end(last, text, options).alias(inside[-1]),
        F.coalesce(text, again).alias(TEXT),
        F.coalesce(wrong, F.lit(True)).alias(UNREADABLE),
    )


def _without_line_end(value: Column, text: Column, options: Mapping[str, str]) -> Column:
    r"""Return the last value of a record without the `\r` of its line end; a quoted value may end with its own `\r`."""
    given = _lowered(options)
    own = F.coalesce(F.rtrim(text, F.lit("\r")).endswith("\r" + (given.get("quote", '"') or "\r")), F.lit(False))
    bare = F.nullif(F.left(value, F.length(value) - 1), F.lit(""))
    return F.when(value.endswith("\r") & ~own, F.nullif(bare, F.lit(given.get("nullvalue", "")))).otherwise(value)


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}
