"""Read JSON and CSV values as strictly as Kafka records: no guessing, no truncation, no rounding.

Values that Spark's readers would guess (README, *Decisions*) are read as text (`read_type`). Spark expressions convert
a text to a value if it has the right form (`columns`). A row with any other text has the reason in `PROBLEM`, and the
row as JSON in `RAW_VALUE`.

JSON: times, decimals and uint64 are read as text, floats as float64, everything else with its own type. CSV: every
value is text, and an empty value is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.errors import Invalid
from memwal.ingest.spark.schema import quoted, spark_type, widened
from memwal.ingest.values.values import FLOAT_MAX, WHOLE

if TYPE_CHECKING:
    from pyspark.sql import Column

STRICT = ("json", "csv")
"""File formats that are read strictly."""
ALL_TEXT = ("csv",)
"""Strict formats that have text values only."""
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
    from pyspark.sql import functions as F  # noqa: N812 - the name in Spark's documentation

    texts = _Texts(form, {name.lower(): value for name, value in options.items()})
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


def as_read(schema: pa.Schema) -> Column:
    """Return a row of the file as JSON in bytes, from columns of `read_type`."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.to_json(F.struct(*(F.col(quoted(name)) for name in schema.names))).cast("binary")


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
        from pyspark.sql import functions as F  # noqa: N812

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
            return taken, F.coalesce(F.exists(given, lambda each: _sure(self.value(each, inner)[1])), F.lit(False))
        return given, None

    def _is_nan(self, number: Column) -> Column:
        """Return whether Spark read a number from the text "NaN" or from NaN; false if an option permits NaN."""
        from pyspark.sql import functions as F  # noqa: N812

        return F.lit(False) if "allownonnumericnumbers" in self._options else F.isnan(number)

    def _struct(self, given: Column, kind: pa.StructType) -> tuple[Column, Column | None]:
        from pyspark.sql import functions as F  # noqa: N812

        below = {field.name: self.value(given.getField(field.name), field.type) for field in kind}
        bad = [each for _, each in below.values() if each is not None]
        if not bad:
            return given, None
        fields = F.struct(*(value.alias(name) for name, (value, _) in below.items()))
        return F.when(given.isNotNull(), fields), reduce(lambda one, two: one | two, bad)

    def _of_text(self, text: Column, kind: pa.DataType) -> Column:
        """Return the value of a text; null if it has none."""
        from pyspark.sql import functions as F  # noqa: N812

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
        from pyspark.sql import functions as F  # noqa: N812

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
    from pyspark.sql import functions as F  # noqa: N812

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


def _sure(bad: Column | None) -> Column:
    assert bad is not None
    return bad


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
