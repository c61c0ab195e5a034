"""Derive changes from rows of the log: pure functions over the arrays of a group of rows.

A row of the log is whole, and the newest row of a key counts (`region.resolve`). The kind of its change
therefore depends only on the previous row of the same key: the previous one in the group, or else the stored one.

    row            before     change
    not a delete   none       insert
    not a delete   a row      update
    delete         a row      delete
    delete         none       none: the key was absent, nothing changed
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.ingest.engine.api.changes import CHANGE, POSITION, REGION, ROW
from memwal.ingest.engine.api.rows import Mask, Places, key_codes

NOWHERE = -1
"""In `befores`: the key has no row before this one."""
_INSERT, _UPDATE, _DELETE, _PREIMAGE, _POSTIMAGE = range(5)
_NAMES = pa.array(["insert", "update", "delete", "update_preimage", "update_postimage"])
Kinds = npt.NDArray[np.int8]


class KeyRuns:
    """The rows of a group sorted by key; rows of one key keep their order.

    Thread safety. Immutable. Shapes: n rows, m distinct keys.
    """

    def __init__(self, keys: pa.Table) -> None:
        """`keys`: the key columns of the rows, without nulls."""
        codes = key_codes(keys)
        self.order: Places = np.argsort(codes, kind="stable")
        """int64 [n]: the rows sorted by key."""
        self.begins: Mask = np.ones(len(codes), dtype=np.bool_)
        """bool [n], in sorted order: whether this is the first row of its key."""
        self.begins[1:] = codes[self.order][1:] != codes[self.order][:-1]
        self.first: Places = self.order[self.begins]
        """int64 [m]: the first row of each key."""


def befores(runs: KeyRuns, deletes: Mask, stored: Places) -> Places:
    """Return the row before each row: int64 [n], a row of the group, n + a stored row, or NOWHERE.

    `deletes`: bool [n]. `stored`: int64 [m], the live stored row of each key of `runs.first`, NOWHERE if it has none.
    """
    rows = len(runs.order)
    before = np.empty(rows, dtype=np.int64)
    before[1:] = runs.order[:-1]
    before[1:][deletes[runs.order[:-1]]] = NOWHERE
    before[runs.begins] = np.where(stored == NOWHERE, NOWHERE, stored + rows)
    found = np.empty(rows, dtype=np.int64)
    found[runs.order] = before
    return found


def after_images(before: Places, deletes: Mask) -> tuple[Places, Places, Kinds]:
    """Return the changes with after-images: for each its row, the row with its values, and its kind.

    `before`: int64 [n], of `befores`. Rows keep their order; a delete has the values of its own row: the key.
    """
    rows = np.flatnonzero(~deletes | (before != NOWHERE))
    kinds = np.where(deletes, _DELETE, np.where(before == NOWHERE, _INSERT, _UPDATE))[rows].astype(np.int8)
    return rows, rows, kinds


def both_images(before: Places, deletes: Mask) -> tuple[Places, Places, Kinds]:
    """As `after_images`, with before-images: an update has two rows, a delete has the values that it deletes."""
    rows, _, kinds = after_images(before, deletes)
    updates = kinds == _UPDATE
    repeated = np.repeat(np.arange(len(rows)), np.where(updates, 2, 1))
    second = np.zeros(len(repeated), dtype=np.bool_)
    second[1:] = repeated[1:] == repeated[:-1]
    row, kind = rows[repeated], kinds[repeated]
    is_before = (updates[repeated] & ~second) | (kind == _DELETE)
    kind[updates[repeated] & ~second] = _PREIMAGE
    kind[second] = _POSTIMAGE
    return row, np.where(is_before, before[row], row), kind


def change_schema(columns: pa.Schema) -> pa.Schema:
    """Return the schema of changes of a table whose columns are `columns`, without `_tombstone`."""
    head = [pa.field(CHANGE, pa.string()), pa.field(REGION, pa.string())]
    head += [pa.field(POSITION, pa.int64()), pa.field(ROW, pa.int64())]
    fields = (field.with_nullable(True).remove_metadata() for field in columns)
    return pa.schema([*head, *fields])


def change_table(
    schema: pa.Schema, values: pa.Table, region: str, positions: Places, numbers: Places, kinds: Kinds
) -> pa.Table:
    """Return changes as a table of `schema` (`change_schema`).

    `values`: the columns of the table. `positions`, `numbers`: int64 [n], by row. `kinds`: int8 [n].
    """
    head = [
        _NAMES.take(pa.array(kinds)),
        pa.repeat(pa.scalar(region, pa.string()), len(kinds)),
        pa.array(positions),
        pa.array(numbers),
    ]
    return pa.Table.from_arrays([*head, *(values.column(name) for name in schema.names[4:])], schema=schema)
