"""Write a filter as DataFusion's SQL with the meaning that Lance gives it. Lance has the same release of DataFusion.

Changes that Lance makes before DataFusion plans a filter (from its sources, and from running pylance 14.0.2):

    price = 0.1         a number beside a column of float32 or float16 gets the column's type, whereas DataFusion alone
                        would widen the column. The same applies to numbers that arithmetic joins, also for integers:
                        `u = 2 - 3` wraps around in an unsigned column. Only in comparisons, IN and BETWEEN that AND, OR
                        and brackets join to the whole.
    price = 0           0.0 and -0.0 are equal beside a zero, at any place. Here 0.0 is added to the other side, which
                        makes 0.0 of -0.0.
    timestamp '...'     has microseconds, but nanoseconds among the arguments of a function
    regexp_match(...)   as a truth value: whether there is a match, never null; elsewhere its list
    "text"              a text, like 'text'
    l[1].a              a field of an element
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter.allowed import CASTS
from memwal.memtable.filter.expression import COMPARISONS, Node, parse, shown

if TYPE_CHECKING:
    from datafusion import SessionContext

Kinds = Mapping[str, pa.DataType]
_NARROW = {pa.float32(): "Float32", pa.float16(): "Float16"}
_WHOLE = {
    getattr(pa, f"{sign}int{bits}")(): f"{sign.upper()}Int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_ARITHMETIC = frozenset(("+", "-", "*", "/", "%", "<<", ">>"))
_COMPUTED = frozenset(("prefix", "cast", "chain", "call"))
_CONSTANT = _COMPUTED | {"number", "text", "double", "word", "hex", "group"}
_FRACTION = re.compile(r"\d\.(\d+)")
_DIGITS = {"nano": 9, "micro": 6, "milli": 3, "second": 0}
_TIMES = ("timestamp", "datetime")
_FORMS = {
    **dict.fromkeys(("like", "distinct"), "{0} {text} {1}"),
    "between": "{0} {text} {1} AND {2}",
    "in": "{0} {text} ({rest})",
    "is": "{0} {text}",
    "prefix": "{text} {0}",
    "group": "({0})",
    "index": "{0}[{1}]",
    "call": "{text}({all})",
    "array": "[{all}]",
    "field": "{0}[{quoted}]",
}
_CASTS = {"cast": "cast({0} as {text})", "try_cast": "try_cast({0} as {text})", "::": "{0}::{text}", "": "{text} {0}"}


def translate(filter: str, schema: pa.Schema) -> str:
    """Return a Lance filter as DataFusion's SQL: every column quoted exactly, every text in single quotes.

    Raises: InvalidRows as `checked`.
    """
    tree = checked(filter, schema.names)
    return _Writer(tree, {field.name: field.type for field in schema}).truth(tree)


def checked(filter: str, columns: Sequence[str]) -> Node:
    """Return the tree of a filter. `columns`: of the table.

    Raises: InvalidRows if it is not allowed, or has a timestamp that Lance would truncate.
    """
    tree = parse(filter, columns)
    if reason := next(_cut_short(tree), ""):
        raise InvalidRows(f"filter {shown(filter)}: {reason}")
    return tree


@cache
def context() -> SessionContext:
    """Return the shared session: creating one takes as long as a small filter. read_batches() leaves no state in it.

    One partition: a memtable is small, and the cores belong to the region writers.
    """
    from datafusion import SessionConfig, SessionContext

    return SessionContext(SessionConfig().with_target_partitions(1))


class _Writer:
    def __init__(self, tree: Node, kinds: Kinds) -> None:
        self._kinds, self._casts = kinds, dict[Node, str]()
        self._resolve(tree)

    # ---- numbers get the type of their column --------------------------------------------------------------------

    def _resolve(self, node: Node) -> None:
        node = node.bare
        if not {"and", "or"}.isdisjoint(node.operators):
            for part in node.parts:
                self._resolve(part)
        elif node.kind == "between" or (node.kind == "in" and node.parts[0].bare.kind == "column"):
            for value in node.parts[1:]:
                self._cast(value, self._type(node.parts[0]), every=False)
        elif node.kind == "distinct" or (len(node.parts) == 2 and not COMPARISONS.isdisjoint(node.operators)):
            left, right = node.parts
            if self._type(left) is not None:
                self._cast(right, self._type(left), every=True)
            elif _number(left):
                self._cast(left, self._type(right), every=True)

    def _type(self, node: Node) -> pa.DataType | None:
        """Return the type of a column, or of a field of one; None for anything else."""
        node = node.bare
        if node.kind != "field":
            return self._kinds.get(node.text) if node.kind == "column" else None
        struct = self._type(node.parts[0]) or pa.null()
        inside = pa.types.is_struct(struct) and struct.get_field_index(node.text) >= 0
        return struct.field(node.text).type if inside else None

    def _cast(self, value: Node, kind: pa.DataType | None, *, every: bool) -> None:
        """Give a number, or the numbers that arithmetic joins, the type `kind`.

        `every`: only if arithmetic joins nothing but numbers.
        """
        operands = list(_joined(value))
        name = _NARROW.get(kind) or (_WHOLE.get(kind) if len(operands) > 1 else None)
        numbers = [number for number in map(_number, operands) if number]
        if name and (len(numbers) == len(operands) or not every):
            self._casts |= dict.fromkeys(numbers, name)

    # ---- text ----------------------------------------------------------------------------------------------------

    def truth(self, node: Node) -> str:
        """Return the text of a node that is used as a truth value."""
        if node.kind == "call" and node.text == "regexp_match":
            return f"({self._text(node)} IS NOT NULL)"
        if node.kind == "group" or (node.kind == "prefix" and node.text == "not"):
            return _FORMS[node.kind].format(self.truth(node.parts[0]), text=node.text)
        if {"and", "or"}.isdisjoint(node.operators):
            return self._text(node)
        return _chained([self.truth(part) for part in node.parts], node.operators)

    def _text(self, node: Node, inside: bool = False) -> str:
        """Return the text of a node. `inside`: among the arguments of a function."""
        kind, text = node.kind, node.text
        if node in self._casts:
            return f"arrow_cast({text}, '{self._casts[node]}')"
        if kind == "column":
            return '"' + text.replace('"', '""') + '"'
        if kind in ("text", "double"):
            return _quoted(node.literal or "")
        if not node.parts and kind not in ("call", "array"):
            return f"X{text}" if kind == "hex" else text
        parts = list[str]()
        for part in node.parts:
            parts.append(self._text(part, inside or kind == "call"))
        if kind in ("in", "between", "distinct", "chain") and (compared := self._with_zeros(node, parts)):
            return compared
        if kind == "cast" and not inside and text.startswith(_TIMES):
            text = text.replace("datetime", "timestamp") + ("" if "(" in text else "(6)")
        if kind == "chain":
            return _chained(parts, node.operators)
        form = _CASTS[node.operators[0]] if kind == "cast" else _FORMS[kind]
        return form.format(*parts, text=text, quoted=_quoted(text), all=", ".join(parts), rest=", ".join(parts[1:]))

    def _with_zeros(self, node: Node, parts: Sequence[str]) -> str:
        """Return the text of a comparison with a zero, maybe of floats; "" for others. `parts`: their texts."""
        if node.kind == "chain" and (len(parts) != 2 or COMPARISONS.isdisjoint(node.operators)):
            return ""
        zeros = [self._is_zero(part, text) for part, text in zip(node.parts, parts, strict=True)]
        others = [part for part, is_zero in zip(node.parts, zeros, strict=True) if not is_zero]
        kind = self._type(others[0]) if others else pa.float64()
        if not any(zeros) or (node.kind == "in" and zeros[0]) or not _as_floats(kind, node, zeros):
            return ""
        numbers = ["0.0" if is_zero else f"({text} + 0.0)" for text, is_zero in zip(parts, zeros, strict=True)]
        negated = node.text.startswith("not ")
        if node.kind == "in":
            joined, operator = ("AND", "<>") if negated else ("OR", "=")
            return f"({parts[0]} {node.text} ({', '.join(parts[1:])}) {joined} {numbers[0]} {operator} 0.0)"
        if node.kind == "between":
            low, high = (numbers if zeros[0] or zeros[place] else parts for place in (1, 2))
            joined, *operators = ("OR", "<", ">") if negated else ("AND", ">=", "<=")
            return f"({low[0]} {operators[0]} {low[1]} {joined} {high[0]} {operators[1]} {high[2]})"
        return f"{numbers[0]} {node.text or node.operators[0]} {numbers[1]}"

    def _is_zero(self, node: Node, text: str) -> bool:
        """Return whether a node is a number that is zero, or is computed from constants and zero."""
        if number := _number(node):
            return float(number.text) == 0
        if node.bare.kind not in _COMPUTED or not all(each.kind in _CONSTANT for each in node.walk()):
            return False
        try:
            (value,) = context().sql(f"SELECT {text}").to_arrow_table()[0].to_pylist()
        except Exception:  # noqa: BLE001 - DataFusion raises bare exceptions, and raises this one again for the filter
            return False
        return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _chained(parts: Sequence[str], operators: Sequence[str]) -> str:
    return " ".join([parts[0], *(f"{each} {part}" for each, part in zip(operators, parts[1:], strict=True))])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _number(node: Node) -> Node | None:
    """Return the number that a node is, with a sign or not; None for anything else."""
    node = node.bare
    number = node.parts[0] if node.kind == "prefix" and node.text == "-" else node
    return number if number.kind == "number" else None


def _as_floats(kind: pa.DataType | None, node: Node, zeros: Sequence[bool]) -> bool:
    """Return whether zeros may be compared as floats with a value of type `kind`, None if it is computed."""
    if kind is None or pa.types.is_floating(kind):
        return True
    numbers = [_number(part) for part, is_zero in zip(node.parts, zeros, strict=True) if is_zero]
    whole = all(number and number.text.isdecimal() for number in numbers)
    return not whole and bool(pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def _joined(node: Node) -> Iterator[Node]:
    """Yield the operands that arithmetic joins; of anything else, the node."""
    node = node.bare
    if _ARITHMETIC.isdisjoint(node.operators):
        yield node
    else:
        for part in node.parts:
            yield from _joined(part)


# ---- timestamps that would lose nanoseconds --------------------------------------------------------------------------


def _cut_short(tree: Node) -> Iterator[str]:
    """Yield the reasons to refuse a filter for timestamps that Lance would truncate.

    Lance truncates the text of a TIMESTAMP to microseconds, so `t = timestamp '... 00:00:00.000000001'` would find, and
    delete, the row at 00:00:00. It truncates the values of IN and BETWEEN to the coarsest unit among them.
    """
    for node in tree.walk(calls=False):
        text = node.parts[0].literal if node.kind == "cast" and node.text in _TIMES else None
        if text and is_finer(text):
            yield (
                f"the timestamp '{text}' has nanoseconds, and TIMESTAMP only microseconds; "
                f"write to_timestamp_nanos('{text}')"
            )
        values = node.parts[1:] if node.kind in ("in", "between") else ()
        units = [unit for value in values if (unit := _unit(value.bare)) is not None]
        for value in values if units else ():
            for text in (each.literal for each in value.walk()):
                if text and min(_digits(text), _unit(value.bare) or 0) > min(units):
                    yield (
                        f"the timestamp '{text}' would be cut to the unit of another one in the same IN list or "
                        "BETWEEN; write all of them with to_timestamp_nanos('...')"
                    )


def _unit(node: Node) -> int | None:
    """Return the digits of a second in a timestamp, None for another value or one that is not a literal."""
    if node.kind == "cast" and node.text.startswith(_TIMES):
        return int(node.text[-2]) if "(" in node.text else 6
    into = (node.parts[-1].literal or "").lower() if node.text in CASTS else node.text
    if node.kind != "call" or "timestamp" not in into:
        return None
    return next((digits for unit, digits in _DIGITS.items() if unit in into), 9)


def is_finer(text: str) -> bool:
    """Return whether the text of a time has digits beyond microseconds that are not zeros."""
    return _digits(text) > 6


def _digits(text: str) -> int:
    """Return the digits of a second in the text of a time, without zeros at its end."""
    fraction = _FRACTION.search(text)
    return len(fraction[1].rstrip("0")) if fraction else 0
