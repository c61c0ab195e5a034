"""Order rows by columns: the callers' notation, and the sort that every level and every owner uses. Pure.

The order is Lance's, so that rows of the base table and those above it agree. Nulls come last in both directions.
Numbers: -0.0 before 0.0, NaN above infinity, NaN with the sign bit below negative infinity. Text and bytes: by their
bytes.

Rows with equal scores are ordered by key, or without a key by a hash of the returned columns. That order depends on the
rows alone, so it stays the same when rows are flushed or committed, and does not depend on which owner answers first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.row_hash import row_hashes
from memwal.ingest.engine.api.arguments import brief, elements
from memwal.ingest.errors import Invalid

Order = list[tuple[str, bool]]
"""Columns, the most significant first; true: ascending."""
_DIRECTIONS = {"ascending": True, "asc": True, "descending": False, "desc": False}
_ALL_BUT_THE_SIGN = np.iinfo(np.int64).max


def checked_order(order_by: Any, names: Sequence[str]) -> Order:
    """Return `order_by`: text such as "price desc, id", or a list of such texts and of pairs ("price", "descending").

    `names`: the table's columns, which may have spaces and commas. Only the first occurrence of a column counts: rows
    that are equal in it stay equal.
    Raises: Invalid for any other form; the read checks whether the columns exist.
    """
    if isinstance(order_by, str):
        order_by = [order_by] if order_by in names else order_by.split(",")
    parts = [None] if isinstance(order_by, Mapping) else elements("order_by", order_by)
    if parts is None or (isinstance(order_by, Sequence) and _is_pair(parts)):
        parts = [parts]
    order = [_part(part, order_by, names) for part in parts]
    if not order:
        raise Invalid("order_by: the list is empty; name at least one column, or omit it")
    first: dict[str, bool] = {}
    for name, ascending in order:
        first.setdefault(name, ascending)
    return list(first.items())


def check_orderable(order: Order, schema: pa.Schema, what: str = "order_by") -> None:
    """Raise Invalid for a column (all are in `schema`) whose values have no order."""
    for name, _ in order:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind) or pa.types.is_dictionary(kind):
            raise Invalid(f"{what}: column '{name}' is of type {kind}, whose values have no order")


def first_rows(rows: pa.Table, order: Order, limit: int | None) -> pa.Array:
    """Return the positions of the first `limit` rows (None: all) in `order`; equal rows keep their order."""
    keys = pa.table({f"{at}": _sortable(rows.column(name)) for at, (name, _) in enumerate(order)})
    by = [(f"{at}", "ascending" if ascending else "descending") for at, (_, ascending) in enumerate(order)]
    if limit is None or limit >= rows.num_rows:
        return pc.sort_indices(keys, sort_keys=by)  # a stable sort
    # A selection sorts less, but places nulls of a descending column first.
    if any(column.null_count for column in keys.columns):
        return pc.sort_indices(keys, sort_keys=by).slice(0, limit)
    keys = keys.append_column("row", pa.array(np.arange(rows.num_rows)))  # makes the selection stable
    return pc.select_k_unstable(keys, limit, [*by, ("row", "ascending")])


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Return floats as integers of the same total order, and uuid and bool8 as their storage; other columns unchanged.

    Arrow does not sort extension types, and its selection of their first rows ends the process.
    """
    if isinstance(column.type, pa.BaseExtensionType):
        return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if not pa.types.is_floating(column.type):
        return column
    values = column.cast(pa.float64()).combine_chunks()
    bits = values.fill_null(0.0).to_numpy(zero_copy_only=False).view(np.int64)
    keys = bits ^ ((bits >> 63) & _ALL_BUT_THE_SIGN)
    return pa.array(keys, mask=np.asarray(values.is_null()))


def _is_pair(part: Any) -> bool:
    two = isinstance(part, Sequence) and not isinstance(part, str) and len(part) == 2
    if not two or not isinstance(part[0], str):
        return False
    return isinstance(part[1], bool) or (isinstance(part[1], str) and part[1] in _DIRECTIONS)


def _part(part: Any, whole: Any, names: Sequence[str]) -> tuple[str, bool]:
    if isinstance(part, str):
        column, _, direction = part.strip().rpartition(" ")
        known = _DIRECTIONS.get(direction.lower())
        return (part.strip(), True) if part.strip() in names or known is None else (column.strip(), known)
    if not _is_pair(part):
        raise Invalid(
            f"order_by = {brief(whole)}: write a text such as 'price desc, id', or a list of columns and of pairs such "
            "as ('price', 'descending')"
        )
    column, direction = part
    return column, direction if isinstance(direction, bool) else _DIRECTIONS[direction]


Scores = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


def in_rank(
    scores: Sequence[Scores], ties: Callable[[Places], pa.Table], *, keyed: bool, k: int | None = None
) -> Places:
    """Return the places of the first `k` rows (None: all) by `scores`, the most significant first; NaN comes last.

    `ties(places)`: the key of these rows, or without a key their returned columns; called only if rows tie. `keyed`:
    whether it returns the key.
    """
    order = np.lexsort(scores[::-1]) if len(scores) > 1 else np.argsort(scores[0], kind="stable")
    most = len(order) if k is None else min(k, len(order))
    # tied[n]: whether the row at n equals the previous one. NaN ties with nothing.
    tied = np.zeros(len(order) + 1, dtype=np.bool_)
    tied[1:-1] = True
    for each in scores:
        sorted_scores = each[order]
        tied[1:-1] &= sorted_scores[1:] == sorted_scores[:-1]
    if not tied[: most + 1].any():
        return order[:most]
    # Rows after the k-th that tie with it compete with it; other later rows do not matter.
    last = most + int(np.argmin(tied[most:]))
    at = np.flatnonzero(tied[:last] | tied[1 : last + 1])
    ranks = np.zeros(last, dtype=np.int64)
    rows = ties(order[at])
    if keyed:
        by_tie = first_rows(rows, [(name, True) for name in rows.column_names], None).to_numpy()
    else:
        columns = enumerate(column.combine_chunks() for column in rows.columns)
        by_tie = np.argsort(row_hashes(columns, rows.num_rows), kind="stable")
    ranks[at[by_tie]] = np.arange(len(at))
    order = order[:last]
    by: list[npt.NDArray[Any]] = [ranks, *(each[order] for each in scores[::-1])]
    return order[np.lexsort(by)][:most]
