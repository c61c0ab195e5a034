"""Check that the indexes of a table find the rows that a scan shows: B-tree, full text and vectors, base and SSTs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.power_cuts.workloads import vector

_NEAREST = 3
_ALL = 1000
"""Larger than the number of partitions, and than the number of rows by _NEAREST: every row is compared exactly."""


def unlike_searches(table: Any, rows: Sequence[tuple[int, int]], level: str) -> str:
    """Return the first search whose answer differs from `rows`, the id and value of all rows at `level`; "" for none.

    Searches for the lowest, the middle and the highest value, and for the vector of a row of each.
    """
    values = sorted({value for _, value in rows})
    for value in sorted({values[0], values[len(values) // 2], values[-1]}) if values else ():
        ids = sorted(id for id, its in rows if its == value)
        if (counted := table.count(filter=f"n = {value}", level=level)) != len(ids):
            return f"n = {value} counts {counted} rows, not {len(ids)}"
        text = f"word{value}"
        if (found := sorted(table.match("v", text, k=_ALL, level=level)["id"].to_pylist())) != ids:
            return f"{text} matches ids {found}, not {ids}"
        if "e" in table.schema.names and (wrong := _unlike_nearest(table, rows, (ids[0], value), level)):
            return wrong
    return ""


def _unlike_nearest(table: Any, rows: Sequence[tuple[int, int]], at: tuple[int, int], level: str) -> str:
    there = vector(*at)
    found = table.search("e", there, k=_NEAREST, nprobes=_ALL, refine_factor=_ALL, level=level).to_pylist()
    distances = [sum((a - b) ** 2 for a, b in zip(there, vector(*row), strict=True)) for row in rows]
    nearest = sorted(zip(distances, rows, strict=True))[:_NEAREST]
    if sorted((each["_distance"], (each["id"], each["n"])) for each in found) != nearest:
        return f"nearest to {at} are {[(each['_distance'], each['id'], each['n']) for each in found]}, not {nearest}"
    return ""
