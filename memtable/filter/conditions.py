"""Conditions on single columns: a superset of the rows that a predicate selects, or exactly these.

Arrow evaluates exact conditions: 0.05 ms for 100,000 integers, whereas planning the filter in DataFusion takes a
millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.arrays import Mask
from memwal.memtable.filter.scalar_index import Asked

Columns: TypeAlias = Callable[[str], pa.ChunkedArray]


@dataclass(frozen=True, eq=False)
class Condition:
    """The values that one column must have. `exact`: no others may pass, and all of these do."""

    column: str
    asked: Asked
    exact: bool

    @property
    def columns(self) -> list[str]:
        """The column."""
        return [self.column]


@dataclass(frozen=True, eq=False)
class Joined:
    """Conditions that must all hold, or one of them (`any_of`). `exact`: each is exact, and nothing else must hold."""

    parts: tuple[Narrowing, ...]
    any_of: bool
    exact: bool

    @property
    def columns(self) -> list[str]:
        """The columns of all conditions, each once."""
        return list(dict.fromkeys(column for part in self.parts for column in part.columns))


Narrowing: TypeAlias = Condition | Joined


def satisfied(conditions: Narrowing, column: Columns) -> Mask:
    """Return which rows satisfy exact conditions: bool [rows]. `column`: the values of a column by name."""
    if isinstance(conditions, Condition):
        found: Mask = _within(column(conditions.column), conditions.asked).fill_null(False).to_numpy()
        return found
    joined = np.logical_or if conditions.any_of else np.logical_and
    return reduce(joined, (satisfied(part, column) for part in conditions.parts))


def _within(values: pa.ChunkedArray, asked: Asked) -> pa.ChunkedArray:
    """Return whether each value is wanted: bool, or null for a null value."""
    if asked.low is None and asked.high is None:
        return pc.is_null(values) if asked.nulls else pc.is_valid(values)
    if asked.low is asked.high and asked.low is not None:
        wanted = asked.low.cast(values.type)
        return pc.equal(values, wanted[0]) if len(wanted) == 1 else pc.is_in(values, value_set=wanted)
    ends = []
    if asked.low is not None:
        ends.append((pc.greater_equal if asked.low_inclusive else pc.greater)(values, asked.low.cast(values.type)[0]))
    if asked.high is not None:
        ends.append((pc.less_equal if asked.high_inclusive else pc.less)(values, asked.high.cast(values.type)[0]))
    return ends[0] if len(ends) == 1 else pc.and_(*ends)
