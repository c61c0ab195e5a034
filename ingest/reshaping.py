"""Following a table whose columns somebody changes with Lance while it is open.

1. Whoever opens a newer base version notices (a read, a commit, a put with a column that nobody knows): its shape is
   not that of the regions.
2. Each region's own thread ends its generation: what lingers is appended as it was put, the memtable is frozen. From
   there on entries, memtables and SSTs have the new shape. *Crash here: some regions have it, others not; a replay
   brings every entry into the shape of the table by then, so nothing depends on it.*
3. Rows that were brought into the old shape before, and come to a region after, are fitted there, by field ids.
4. The frozen memtables are flushed as they are: an SST says by its own field ids what it holds. A read that meets one
   waits for that, so that no read ever looks at two shapes at once.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from flush import BaseTable
from flush.base.shape import Shape
from ingest.region_context import RegionContext
from memtable import TOMBSTONE, row_schema
from wal.codec.columns import EntryColumns


def reshaped(context: RegionContext, base: BaseTable) -> RegionContext:
    """`context` for rows of the shape of `base`."""
    return replace(
        context,
        codec=base.codec,
        schema=row_schema(base.schema, base.key),
        key=base.key,
        indexes=base.indexes,
        required=base.required,
        rules=base.rules,
        field_ids=base.row_field_ids,
        sst_indexes=context.sst_indexes.over(base.indexes),
        shape=base.shape,
        route_into=base.route_into,
    )


def fitted(rows: pa.Table, of: Shape, to: Shape, *, partly: bool = False) -> pa.Table:
    """Conforming rows (no `_tombstone`) of one shape in another: renamed columns follow, new ones are null.

    `partly`: `rows` may lack columns, which stay away, new ones too.
    Raises: Corrupt where a column that may not be null is missing.
    """
    whole = EntryColumns(to.rows).conform(rows, of.ids).drop_columns(TOMBSTONE)
    if not partly:
        return whole
    given = {of.ids[name] for name in rows.column_names}
    return whole.select([name for name in whole.column_names if to.ids[name] in given])


def said(name: str, now: str | None, version: int) -> str:
    """What to tell who asks for the column `name`, called `now` since the base version `version`; None: dropped."""
    if now is None:
        return f"column '{name}' was dropped from the table in version {version}"
    return f"column '{name}' is called '{now}' since version {version} of the table"


def difference(old: Shape, new: Shape) -> str:
    """The changes from one shape to another in one line; "" where the columns are the same."""
    gone, before = old.gone(new), set(old.ids.values())
    parts = [f"dropped {name}" if now is None else f"renamed {name} to {now}" for name, now in gone.items()]
    parts += [f"added {name}" for name, number in new.ids.items() if number not in before]
    return ", ".join(parts)
