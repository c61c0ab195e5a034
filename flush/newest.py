"""The newest row of each key over several generations, as masks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memtable import TOMBSTONE

Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]


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


def all_newest(generation: pa.Table) -> Newest:
    """As `newest_per_key` of one table that holds every key once, without a look at its keys."""
    tombstone = generation.column(TOMBSTONE).to_numpy().astype(bool)
    return Newest(tombstone, ~tombstone)


def _last_of_each(keys: pa.Table) -> Mask:
    """True at the last row of each distinct key."""
    mask = np.zeros(keys.num_rows, dtype=bool)
    if keys.num_rows:
        codes, count = _coded(keys)
        last = np.empty(count, dtype=np.int64)
        last[codes] = np.arange(keys.num_rows)  # of several with one code NumPy keeps the last
        mask[last] = True
    return mask


def _coded(keys: pa.Table) -> tuple[Codes, int]:
    """A number below the count for every row, the same for equal keys. At least one row.

    Arrow's hash of one column takes a third of the time of its `group_by`; further columns are folded in one by one,
    the numbers coded anew each time, so that they stay below rows squared.
    """
    first, *others = (_codes(column) for column in keys.columns)
    codes, count = first
    for more, width in others:
        codes, count = _codes(pa.chunked_array([pa.array(codes * width + more)]))
    return codes, count


def _codes(column: pa.ChunkedArray) -> tuple[Codes, int]:
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)
