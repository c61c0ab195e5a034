"""The newest row of each key over several generations, as masks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memtable import TOMBSTONE

Mask = npt.NDArray[np.bool_]
_ROW = "_row"


@dataclass(frozen=True)
class Newest:
    """Which rows of one SST count. `deletes` and `upserts` are disjoint masks over its rows."""

    deletes: Mask
    upserts: Mask


def newest_per_key(generations: Sequence[pa.Table], key: Sequence[str]) -> list[Newest]:
    """For each table the rows that no later row, in it or in a later table, replaces.

    `generations`: ascending, each with the key columns and `_tombstone`. A newest row that is a tombstone is
    a delete, any other an upsert; keys of distinct tables never count twice.
    """
    if not generations:
        return []
    rows = pa.concat_tables([table.select([*key, TOMBSTONE]) for table in generations])
    newest = _last_of_each(rows.select(list(key)))
    tombstone = rows.column(TOMBSTONE).to_numpy().astype(bool)
    bounds = np.cumsum([table.num_rows for table in generations])[:-1]
    deletes = np.split(newest & tombstone, bounds)
    upserts = np.split(newest & ~tombstone, bounds)
    return [Newest(d, u) for d, u in zip(deletes, upserts, strict=True)]


def _last_of_each(keys: pa.Table) -> Mask:
    """True at the last row of each distinct key."""
    names = [f"k{column}" for column in range(keys.num_columns)]
    numbered = keys.rename_columns(names).append_column(_ROW, pa.array(np.arange(keys.num_rows)))
    last = numbered.group_by(names).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
    mask = np.zeros(keys.num_rows, dtype=bool)
    mask[last.to_numpy()] = True
    return mask
