"""What a planned query reads of each table: columns, conditions, and how many rows are enough."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BARRIER = 2**62
"""A limit that no table reaches. DataFusion moves no condition below a limit. See the room's README.md, *Decisions*."""
_LIMIT = re.compile(r"Limit: skip=(\d+), fetch=(\d+)")


@dataclass(frozen=True, slots=True)
class Scan:
    """One place where a plan reads a table. `columns`: None for all. `enough`: how many of the rows that pass all
    conditions the plan needs; None for all.
    """

    table: str
    columns: tuple[str, ...] | None
    conditions: tuple[Any, ...]
    enough: int | None


def scans_of(plan: Any) -> list[Scan]:
    """Return the scans of an optimized logical plan, in its order."""
    return list(_scans(plan, (), None))


def reads_again(plan: Any, scans: Sequence[Scan]) -> bool:
    """Whether the plan may read a table at more places, or oftener, than `scans`: recursion, and sub-queries that
    DataFusion did not turn into joins.
    """
    text = plan.display_indent()
    return text.count("TableScan: ") != len(scans) or "RecursiveQuery" in text


def _scans(plan: Any, conditions: tuple[Any, ...], enough: int | None) -> Iterator[Scan]:
    """`conditions`, `enough`: of the nodes above, while only nodes stand between that keep rows and names."""
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
        above, enough_above = (*conditions, node.predicate()), enough
    elif kind == "SubqueryAlias":
        above, enough_above = conditions, enough
    elif kind == "Projection":
        above, enough_above = (), None if conditions else enough
    elif kind == "Limit":
        above, enough_above = _below_limit(plan.display(), conditions, enough)
    else:
        above, enough_above = (), None
    for below in plan.inputs():
        yield from _scans(below, above, enough_above)


def _below_limit(shown: str, conditions: tuple[Any, ...], enough: int | None) -> tuple[tuple[Any, ...], int | None]:
    parsed = _LIMIT.fullmatch(shown)
    if parsed is None:
        return (), None
    skip, fetch = map(int, parsed.groups())
    if fetch >= BARRIER and not skip:
        return conditions, enough
    # Rows of this limit: a condition above it applies after it, so it can stop neither the conditions nor the rows.
    return (), fetch + skip
