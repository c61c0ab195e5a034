"""Derive what a planned query reads of each table: columns, conditions as a filter, and how many rows suffice.

A filter may pass more rows than the conditions, never fewer: DataFusion applies the conditions again. A condition of an
AND without a translation is therefore left out, an OR needs a translation of every part, and NOT an exact one. Lance
also plans its filters with DataFusion; only a comparison of a whole column with a value of the column's own type is
translated, because it means the same in both. Everything else (casts, functions, arithmetic, two columns) is left to
the query, and so is a filter that the filter parser rejects, for example for its length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter.translation import checked

BARRIER = 2**62
"""A limit that no table reaches. DataFusion moves no condition below a limit. See README.md, *Decisions*."""
_LIMIT = re.compile(r"Limit: skip=(\d+), fetch=(\d+)")
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_IS = ("IsNull", "IsNotNull", "IsTrue", "IsFalse", "IsNotTrue", "IsNotFalse")
_FORMS = {
    **dict.fromkeys(_IS, "{0} {operator}"),
    **dict.fromkeys(("BinaryExpr", "Like"), "{0} {operator} {1}"),
    "Column": "{0}",
    "InList": "{0} {negated}IN ({rest})",
}
_UNITS = {"s": "Second", "ms": "Millisecond", "us": "Microsecond", "ns": "Nanosecond"}
_SINGLE_MAX = float(np.finfo(np.float32).max)
_Types: TypeAlias = Mapping[str, pa.DataType]
Filter: TypeAlias = tuple[str | None, bool]
"""A text (None: all rows), and whether it passes exactly the rows that pass the conditions."""
_ALL: Filter = (None, False)


@dataclass(frozen=True, slots=True)
class Scan:
    """One place where a plan reads a table.

    `columns`: None for all. `enough`: how many of the rows that pass all conditions the plan needs; None for all.
    """

    table: str
    columns: tuple[str, ...] | None
    conditions: tuple[Any, ...]
    enough: int | None


def scans_of(plan: Any) -> list[Scan]:
    """Return the scans of an optimized logical plan, in its order."""
    return list(_scans(plan, (), None))


def reads_again(plan: Any, scans: Sequence[Scan]) -> bool:
    """Return whether the plan may read a table at more places, or more often, than `scans`.

    Reasons are recursion, and sub-queries that DataFusion did not turn into joins.
    """
    text = plan.display_indent()
    return text.count("TableScan: ") != len(scans) or "RecursiveQuery" in text


def _scans(plan: Any, conditions: tuple[Any, ...], enough: int | None) -> Iterator[Scan]:
    """Yield the scans of `plan`.

    `conditions`, `enough`: of the nodes above, while all nodes in between keep rows and names.
    """
    node = plan.to_variant()
    kind = type(node).__name__
    if kind == "TableScan":
        columns = tuple(name for _, name in node.projection()) if "projection=" in plan.display() else None
        fetch = node.fetch()
        if fetch is not None and fetch < BARRIER:
            enough = fetch if enough is None else min(enough, fetch)
        yield Scan(node.table_name(), columns, conditions, enough)
        return
    if kind == "Filter":
        conditions = (*conditions, node.predicate())
    elif kind == "Projection":
        enough = None if conditions else enough
        conditions = ()
    elif kind == "Limit":
        limit = _LIMIT.fullmatch(plan.display())
        if limit is None or int(limit[1]) or int(limit[2]) < BARRIER:
            # A condition above a limit applies after it, so it can reduce neither its conditions nor its rows.
            conditions, enough = (), None if limit is None else int(limit[1]) + int(limit[2])
    elif kind != "SubqueryAlias":
        conditions, enough = (), None
    for below in plan.inputs():
        yield from _scans(below, conditions, enough)


# ---- conditions as a filter ------------------------------------------------------------------------------------------


def filter_of(conditions: Sequence[Any], schema: pa.Schema) -> Filter:
    """Return a filter that passes every row that passes all of `conditions`.

    `conditions`: DataFusion's analysed expressions over the columns of `schema`: types are equal on both sides of a
    comparison.
    """
    types = {field.name: field.type for field in schema}
    filters = [_filter(part, types) for condition in conditions for part in _parts(condition, "AND")]
    return _accepted(_joined(filters, "AND"))


def any_of(filters: Sequence[str | None]) -> str | None:
    """Return a filter that passes the rows of all `filters`; None for all rows."""
    return _accepted(_joined([(text, True) for text in dict.fromkeys(filters)], "OR"))[0]


def _accepted(filter: Filter) -> Filter:
    try:
        checked(filter[0] or "true", ())
    except InvalidRows:
        return _ALL
    return filter


def _joined(filters: Sequence[Filter], operator: str) -> Filter:
    texts = [text for text, _ in filters if text is not None]
    if not texts or (operator == "OR" and len(texts) < len(filters)):
        return None, not filters
    text = texts[0] if len(texts) == 1 else f" {operator} ".join(f"({text})" for text in texts)
    return text, all(exact for _, exact in filters)


def _filter(condition: Any, types: _Types) -> Filter:
    kind = condition.variant_name()
    if kind == "Not":
        text, exact = _filter(condition.rex_call_operands()[0], types)
        return (f"NOT ({text})", True) if exact else _ALL
    if kind not in _FORMS:
        return _ALL
    column, *values = [condition] if kind == "Column" else condition.rex_call_operands()
    operator = "" if kind == "Column" else condition.rex_call_operator().upper()
    if operator in ("AND", "OR"):
        return _joined([_filter(part, types) for part in _parts(condition, operator)], operator)
    if kind == "BinaryExpr" and column.variant_name() == "Literal":
        column, values, operator = values[0], [column], _MIRRORED.get(operator, "")
    if kind == "BinaryExpr" and operator not in _MIRRORED:
        return _ALL
    if column.variant_name() == "Cast":
        return _single_precision(column.rex_call_operands()[0], operator, values, types)
    name = _column(column, types)
    texts = [_value(value, types[column.to_variant().name()]) for value in values] if name else []
    if name is None or None in texts:
        return _ALL
    if kind == "Like" and ("\\" in str(texts[0]) or condition.to_variant().escape_char() is not None):
        return _ALL
    negated = "NOT " if kind == "InList" and condition.to_variant().negated() else ""
    rest = ", ".join(map(str, texts))
    return _FORMS[kind].format(name, *texts, operator=operator, negated=negated, rest=rest), True


def _single_precision(column: Any, operator: str, values: Sequence[Any], types: _Types) -> Filter:
    """Return a filter for a float32 column compared as float64.

    Lance compares it as float32, so the filter passes the rows up to the next float32 number.
    """
    name, literal = _column(column, types), values[0] if len(values) == 1 else None
    value = literal.python_value() if literal is not None and literal.variant_name() == "Literal" else None
    if name is None or types[column.to_variant().name()] != pa.float32() or not isinstance(value, pa.DoubleScalar):
        return _ALL
    if not value.is_valid or not abs(value.as_py()) < _SINGLE_MAX:
        return _ALL
    low, high = (float(np.nextafter(np.float32(value.as_py()), np.float32(end))) for end in (-np.inf, np.inf))
    above, below = f"{name} >= {low!r}", f"{name} <= {high!r}"
    text = {">": above, "<": below, "=": f"{above} AND {below}"}.get(operator[:1])
    return (text, False) if math.isfinite(low) and math.isfinite(high) else _ALL


def _parts(condition: Any, operator: str) -> Iterator[Any]:
    """Yield the parts of a chain of AND or OR, which may be deeper than Python recurses."""
    waiting = [condition]
    while waiting:
        part = waiting.pop()
        if part.variant_name() == "BinaryExpr" and part.rex_call_operator() == operator:
            waiting.extend(reversed(part.rex_call_operands()))
        else:
            yield part


def _column(expression: Any, types: _Types) -> str | None:
    name = expression.to_variant().name() if expression.variant_name() == "Column" else "`"
    return f"`{name}`" if name in types and "`" not in name else None


def _value(literal: Any, kind: pa.DataType) -> str | None:
    """Return a literal of the type `kind` as SQL; None if it is null, of another type or has no exact text."""
    scalar = literal.python_value() if literal.variant_name() == "Literal" else None
    if not isinstance(scalar, pa.Scalar) or not scalar.is_valid or _family(kind) != _family(scalar.type):
        return None
    types = pa.types
    if types.is_timestamp(kind):
        zone = "None" if kind.tz is None else f'Some("{kind.tz}")'
        return f"arrow_cast({scalar.value}, 'Timestamp({_UNITS[kind.unit]}, {zone})')"
    if types.is_date32(kind):
        return f"arrow_cast({scalar.value}, 'Date32')"
    value = scalar.as_py()
    if types.is_boolean(kind):
        return str(value).lower()
    if types.is_integer(kind):
        return str(value) if value != -(2**63) else None  # its digits without the sign overflow int64
    if types.is_float64(kind):
        # DataFusion distinguishes 0.0 from -0.0, a filter does not.
        return repr(value) if math.isfinite(value) and value != 0 else None
    if types.is_decimal128(kind):
        return f"cast('{value:f}' as decimal({kind.precision}, {kind.scale}))"
    if _family(kind) == "string":
        escaped = value.replace("'", "''")
        return f"'{escaped}'"
    return f"X'{value.hex()}'" if _family(kind) == "binary" else None


def _family(kind: pa.DataType) -> Any:
    """Return the family of a type: texts are equal whatever their offsets, other values only in one type."""
    name = str(kind).removeprefix("large_").removesuffix("_view")
    return name if name in ("string", "binary") else kind
