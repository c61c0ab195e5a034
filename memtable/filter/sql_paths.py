"""Paths to fields and elements, and those that Lance's filters have and DataFusion's SQL does not: `l[1].a`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from memwal.memtable.filter.sql_places import closing
from memwal.memtable.filter.tokens import Token


def access_paths(tokens: Sequence[Token], written: list[str]) -> None:
    """Rewrite each `column…[…].field…` as function calls, in the texts `written` of the `tokens`.

    Paths without a field behind an element stay as they are.
    """
    place = 0
    while place < len(tokens):
        steps = _steps(tokens, place) if tokens[place].kind == "column" else []
        brackets = [at for at, (first, _) in enumerate(steps) if tokens[first].text == "["]
        if brackets and any(tokens[first].text == "." for first, _ in steps[brackets[0] :]):
            _as_calls(tokens, written, place, steps)
            place = steps[0][0]  # the index in brackets may be another path
        place += 1


def typed_path(tokens: Sequence[Token], place: int, kinds: Mapping[str, pa.DataType]) -> tuple[pa.DataType, int]:
    """Type and last place of the column, field or element that begins at `place`; the type null where it is none.

    `kinds`: types of the columns.
    """
    begins = place < len(tokens) and tokens[place].kind == "column"
    kind, last = kinds.get(tokens[place].column, pa.null()) if begins else pa.null(), place
    for first, last in _steps(tokens, place) if begins else []:
        if tokens[first].text == "[":
            kind = kind.value_type if _is_list(kind) else pa.null()
        else:
            name = tokens[last].column
            kind = kind.field(name).type if pa.types.is_struct(kind) and kind.get_field_index(name) >= 0 else pa.null()
    return kind, last


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _steps(tokens: Sequence[Token], place: int) -> list[tuple[int, int]]:
    """First and last place of each `.field` and `[…]` behind the column at `place`."""
    if place and tokens[place - 1].text == ".":
        return []
    steps, after = [], place + 1
    while after < len(tokens):
        if tokens[after].text == "." and after + 1 < len(tokens) and tokens[after + 1].kind == "column":
            last = after + 1
        elif tokens[after].text == "[" and (end := closing(tokens, after)) < len(tokens):
            last = end
        else:
            break
        steps.append((after, last))
        after = last + 1
    return steps


def _as_calls(tokens: Sequence[Token], written: list[str], place: int, steps: Sequence[tuple[int, int]]) -> None:
    calls = ""
    for first, last in steps:
        if tokens[first].text == "[":
            calls = "array_element(" + calls
            written[first], written[last] = ", ", ")"
        else:
            name = tokens[last].column.replace("'", "''")
            calls = "get_field(" + calls
            written[first], written[last] = ", ", f"'{name}')"
    written[place] = calls + written[place]
