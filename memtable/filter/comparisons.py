"""Conditions that are all of a filter, evaluated by Arrow: 0.05 ms for 100,000 integers, where planning the filter in
DataFusion takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.arrays import Mask
from memwal.memtable.filter.conditions import AllOf, Condition, Narrowing
from memwal.memtable.filter.scalar_index import Asked

Columns = Callable[[str], pa.ChunkedArray]


def satisfied(conditions: Narrowing, column: Columns) -> Mask:
    """Which rows satisfy exact conditions: bool [rows]. `column`: the values of a column by name."""
    if isinstance(conditions, Condition):
        values = column(conditions.column)
        found = _within(values, conditions.asked)
        mask: Mask = found.fill_null(False).to_numpy()
        return mask
    joined = np.logical_and if isinstance(conditions, AllOf) else np.logical_or
    return reduce(joined, (satisfied(part, column) for part in conditions.parts))


def _within(values: pa.ChunkedArray, asked: Asked) -> pa.ChunkedArray:
    """Whether each value is wanted: bool, or null where it is null."""
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
