"""Evaluate a filter over rows with DataFusion."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Mask, Positions
from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter.expression import SHOWN, shown
from memwal.memtable.filter.struct_nulls import null_inside
from memwal.memtable.filter.translation import context

POSITION = "_memtable_position"
# Up to this many rows are evaluated with all their columns: planning the projection takes longer.
FEW = 8_192


def evaluate(predicate: str, sql: str, rows: pa.Table, positions: Positions, n: int) -> Mask:
    """Return which of the n rows satisfy the predicate; `rows` holds the rows at `positions`, all others are false.

    Raises InvalidRows naming the predicate and DataFusion's error.
    """
    rows = null_inside(rows).append_column(POSITION, pa.array(positions))
    # read_batches needs a batch for the schema.
    batches = rows.to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]
    mask = np.zeros(n, dtype=bool)
    try:
        frame = context().read_batches(batches).filter(sql)
        found = (frame if len(positions) <= FEW else frame.select(POSITION)).collect()
    except Exception as error:  # noqa: BLE001 - DataFusion raises bare Exception
        raise InvalidRows(f"filter {shown(predicate)} is not valid: {_reason(error)}; correct it") from None
    for batch in found:
        mask[batch.column(POSITION).to_numpy()] = True
    return mask


def referenced(predicate: str, schema: pa.Schema) -> list[str]:
    """Return the columns that the predicate may mention: those whose name occurs anywhere in its text. Never misses
    one.
    """
    text = predicate.lower()
    return [name for name in schema.names if name.lower() in text or "`" in name]


def _reason(error: Exception) -> str:
    """Return DataFusion's message on one line, without its internal name for the rows."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.removeprefix("DataFusion error: ").rstrip(".")
    return line.replace('"?table?".', "").replace("?table?.", "")[:SHOWN]
