"""Decide the effect of puts on existing keys: pure functions over all rows of a group of writes.

A group of writes is resolved to whole rows before it is logged, as if its writes came one after the other. Sorted by
key (and within a key by order of writing; the sort is stable) this takes a few passes over arrays:

    key   a a a a a | b b | c     one segment for each key; the stored row counts as its first version
    op    p p d p p | p p | d     p a row of a put, d of a delete
    run   1 1 2 3 3 | 1 4 | 2     consecutive rows of one write and key that are all puts or all deletes

insert: a run of puts is accepted if the run before it is a delete, or if it is the first run and the key is not stored.
All rows of an accepted run are written; the last one counts, as everywhere. For two puts of a new key in one group, the
first is accepted, and the second finds its row.

version: a row is accepted if no row before it in its segment, nor the stored row, has a higher version. A delete
without a version starts a new segment. Other rows are left out before the merge.

merge: each column of a row comes from the last row whose write has the column, since the segment's beginning or the
last delete. This is a forward fill that starts with the stored row (after a delete: with nulls).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from memwal.ingest.engine.api.rows import KeyRuns, Mask, Places

NOWHERE = -1
"""A source in `merged_from`: no value, the column is null."""


class Group(KeyRuns):
    """The rows of a group of writes, in their order and sorted by key. Thread safety. Immutable."""

    def __init__(self, keys: pa.Table, rows: Sequence[int], deletes: Mask) -> None:
        """`keys`: the key columns of all rows, without nulls. `rows`: number of rows by write. `deletes`: bool [n]."""
        super().__init__(keys)
        self.writes: Places = np.repeat(np.arange(len(rows)), rows)
        """int64 [n]: the write of each row."""
        self.count = len(rows)
        """Number of writes."""
        self.deletes: Mask = deletes
        """bool [n]: whether the row deletes its key."""
        self.key: Places = np.cumsum(self.begins) - 1
        """int64 [n], in sorted order: the number of the row's key."""


def inserted(group: Group, stored: Mask) -> Mask:
    """Return which rows are written under upsert = "insert", bool [n]; deletes always are.

    `stored`: bool [m], whether the key is stored before the group; ignored if its first row is a delete.
    """
    if not len(group.order):
        return np.ones(0, dtype=np.bool_)
    writes, deletes = group.writes[group.order], group.deletes[group.order]
    begins = group.begins.copy()
    begins[1:] |= (writes[1:] != writes[:-1]) | (deletes[1:] != deletes[:-1])
    runs = np.flatnonzero(begins)
    deleting = deletes[runs]
    gone = np.concatenate([[False], deleting[:-1]])
    exists = np.where(group.begins[runs], stored[group.key[runs]], ~gone)
    taken = np.empty(len(group.order), dtype=np.bool_)
    taken[group.order] = np.repeat(deleting | ~exists, np.diff(runs, append=len(begins)))
    return taken


def merged_from(group: Group, given: Mask, stored: Places) -> Places:
    """Return the source of each row's value in a column: int64 [n], a row of the group, n + a stored row, or NOWHERE.

    `given`: bool [number of writes], which writes have the column. `stored`: int64 [m], the stored row of each key,
    NOWHERE if it has none or was not looked up; ignored if the key's first row is a delete.
    """
    rows, place = len(group.order), np.arange(len(group.order))
    deletes = group.deletes[group.order]
    since = np.maximum.accumulate(np.where(group.begins | deletes, place, 0))
    has = given[group.writes[group.order]] & ~deletes
    last = np.maximum.accumulate(np.where(has, place, -1))
    before = stored[group.key]
    fallback = np.where(deletes[since] | (before == NOWHERE), NOWHERE, before + rows)
    sources = np.empty(rows, dtype=np.int64)
    sources[group.order] = np.where(last >= since, group.order[last], fallback)
    return sources


def timely(group: Group, versions: pa.ChunkedArray, stored: pa.ChunkedArray, at: Places) -> Mask:
    """Return which rows are not older than any earlier row of their key, stored or in the group: bool [n].

    A row without a version (a delete by key only) is never older, and no row after it is older than it. `versions`: of
    the n rows. `stored`: of the stored rows; null is older than any version. `at`: int64 [m], the stored row of each
    key, NOWHERE if it has none; ignored if the key's first row has no version.
    """
    order, known = group.order, versions.is_valid().to_numpy()
    kept, has = _ordered(stored), stored.is_valid().to_numpy()
    # Dense ranks from 1; 0 is older than any. A per-segment offset above the highest rank keeps segments apart.
    _, ranks = np.unique(np.concatenate([_ordered(versions), kept]), return_inverse=True)
    ranks = ranks.astype(np.int64) + 1
    own = np.where(known, ranks[: len(order)], 0)[order]
    before = np.concatenate([np.where(has, ranks[len(order) :], 0), [0]])[at]  # NOWHERE is the last element
    floor = np.where(group.begins & (own > 0), before[group.key], 0)
    segment = np.cumsum(group.begins | (own == 0)) * (len(ranks) + 1)
    highest = np.maximum.accumulate(segment + np.maximum(own, floor)) - segment
    taken = np.empty(len(order), dtype=np.bool_)
    taken[order] = own == highest
    return taken


def _ordered(versions: pa.ChunkedArray) -> Places:
    """Return the values of a version column as int64 in the same order, nulls as 0."""
    if pa.types.is_uint64(versions.type):
        signed: Places = (versions.fill_null(0).to_numpy() ^ np.uint64(1 << 63)).view(np.int64)
        return signed
    if pa.types.is_date32(versions.type):
        versions = versions.cast(pa.int32())
    values: Places = versions.cast(pa.int64()).fill_null(0).to_numpy()
    return values


def merged(rows: pa.Table, stored: pa.Table, sources: Mapping[str, Places]) -> pa.Table:
    """Return `rows` with the columns that `sources` names taken from these sources; see `merged_from`."""
    for name, places in sources.items():
        at, field = rows.schema.get_field_index(name), rows.schema.field(name)
        kept = stored.column(name)
        kept = kept if kept.type == field.type else kept.cast(field.type)
        values = pa.chunked_array([*rows.column(name).chunks, *kept.chunks], field.type)
        values = values.take(pa.array(places, mask=places == NOWHERE))
        rows = rows.set_column(at, field, values)
    return rows
