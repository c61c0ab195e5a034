"""Plan a filter for one schema, and evaluate it over rows with DataFusion.

Plans are cached, since readers apply one filter to many memtables. Arrow leaves the value of a field inside a null
struct undefined, mostly 0 or an empty text. DataFusion's `st.a` shows that value; Lance, and readers of the column,
show null. Therefore the fields of null structs are set to null before DataFusion reads them (`null_inside`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Mask, Positions
from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter.conditions import Narrowing, narrowing
from memwal.memtable.filter.expression import LONG, SHOWN, shown
from memwal.memtable.filter.translation import checked, context, translate
from memwal.memtable.schema import TOMBSTONE


def null_inside(rows: pa.Table) -> pa.Table:
    """Return `rows` with null fields in every null struct, at any depth."""
    for place, column in enumerate(rows.columns):
        if pa.types.is_nested(column.type):
            chunks = [with_null_fields(chunk) for chunk in column.chunks]
            rows = rows.set_column(place, rows.field(place), pa.chunked_array(chunks, column.type))
    return rows


def with_null_fields(array: pa.Array) -> pa.Array:
    """Return `array` with null fields in every null struct, at any depth."""
    kind = array.type
    if pa.types.is_struct(kind) and kind.num_fields:
        fields = [with_null_fields(field) for field in array.flatten()]  # null where the struct is
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_nested(kind.value_type):
        return array
    if array.offset:  # a mask is allowed only without an offset
        array = pa.concat_arrays([array.slice(0, 0), array])
    of = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return of.from_arrays(array.offsets, with_null_fields(array.values), type=kind, mask=array.is_null())


@dataclass(eq=False)
class FilterPlan:
    """A filter as DataFusion's SQL, the columns it may mention, and the conditions for indexes (None without any).

    `exact`: conditions that make up the whole filter, for Arrow; None if DataFusion must evaluate it. `valid`:
    DataFusion accepted it once, so that it need not be evaluated on an empty selection.
    """

    sql: str
    columns: tuple[str, ...]
    narrowing: Narrowing | None
    exact: Narrowing | None
    valid: bool = False


def plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    """Return the plan of `predicate` for rows of the row schema, narrowed by the columns `indexed`.

    Thread safety: any thread. Raises InvalidRows for a filter with too many operators.
    """
    return (_kept if len(predicate) <= LONG else _long_kept)(predicate, schema, indexed)


def _plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    base = pa.schema([field for field in schema if field.name != TOMBSTONE])
    tree, every = checked(predicate, base.names), {field.name: field.type for field in base}
    conditions, whole = narrowing(tree, {name: every[name] for name in indexed}), narrowing(tree, every)
    exact = whole if whole is not None and whole.exact else None
    return FilterPlan(translate(predicate, base), tuple(referenced(predicate, base)), conditions, exact)


# Few plans of long texts are kept: together they bound the memory, which no memtable counts.
_kept = lru_cache(maxsize=128)(_plan)
_long_kept = lru_cache(maxsize=4)(_plan)


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


def computed(name: str, expression: str, rows: pa.Table, kind: pa.DataType) -> pa.ChunkedArray:
    """Return the values of an SQL expression over `rows`, in the notation of filters, as the type `kind`.

    `name`: the column that takes the values. Raises InvalidRows for an expression that is invalid or fails on a row,
    and for a value that does not fit.
    """
    batches = null_inside(rows).to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]
    try:
        frame = context().read_batches(batches)
        found = frame.select(frame.parse_sql_expr(translate(expression, rows.schema)).alias("value")).to_arrow_table()
    except InvalidRows:
        raise
    except Exception as error:  # noqa: BLE001 - DataFusion raises bare Exception
        raise InvalidRows(f"column {name!r}: {shown(expression)} is not valid: {_reason(error)}; correct it") from None
    try:
        return found.column("value").cast(kind)
    except pa.ArrowException as error:
        reason = f"column {name!r} ({kind}): a value of {shown(expression)} does not fit: {_reason(error)}"
        raise InvalidRows(reason, column=name) from None


def _reason(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reason = line.removeprefix("DataFusion error: ").rstrip(".")
    return reason.replace('"?table?".', "").replace("?table?.", "")[:SHOWN]  # DataFusion's name for the rows


def referenced(predicate: str, schema: pa.Schema) -> list[str]:
    """Return the columns that the predicate may mention: those whose name occurs anywhere in its text. Never misses
    one.
    """
    text = predicate.lower()
    return [name for name in schema.names if name.lower() in text or "`" in name]
