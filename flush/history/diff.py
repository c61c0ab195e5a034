"""Find the rows that differ between two versions of the base table, by key: `memwal log --diff`.

A row that has the same address in both versions, in a fragment with the same files, is unchanged.

 1. Skip fragments that both versions have with the same files and the same deletions.
 2. In the other fragments, read the row addresses, and skip rows that both versions have in files that both have.
 3. Read the remaining rows with every column that both versions have, hold them in memory, and compare them by key
    (`compare_rows`). After a commit these are few; after a compaction, which moves rows, they are all moved
    rows.

`compare_rows` is pure and vectorised: one hash join matches the keys, then whole columns are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.state import TableState, read_state
from memwal.flush.sst.key_encoding import one_array
from memwal.flush.sst.read_back import bitwise_differs
from memwal.memtable.arrays import Positions
from memwal.wal import Corrupt, ObjectStore


@dataclass(frozen=True)
class RowDiff:
    """Positions of rows, int64, ascending in their table."""

    removed: Positions
    """In `before`: keys that `after` lacks."""
    added: Positions
    """In `after`: keys that `before` lacks."""
    changed: Positions
    """In `after`: keys in both, with a different value."""
    same: int
    """Number of equal rows."""
    columns: Mapping[str, int]
    """Column -> number of changed rows with a difference in it; columns without a difference are absent."""

    def __bool__(self) -> bool:
        return bool(len(self.removed) or len(self.added) or len(self.changed))


def compare_rows(before: pa.Table, after: pa.Table, key: Sequence[str]) -> RowDiff:
    """Return the rows that differ. Each table has each key at most once, without nulls.

    Compares the columns that both have; their types may differ if one can be cast to the other.
    """
    left, right = match(before.select(list(key)), after.select(list(key)))
    differs, columns = np.zeros(len(left), dtype=bool), {}
    for name in before.column_names:
        if name in after.column_names and name not in key and len(left):
            old, new = before.column(name).take(pa.array(left)), after.column(name).take(pa.array(right))
            in_column = bitwise_differs(one_array(old), one_array(new))
            if in_column.any():
                differs, columns[name] = differs | in_column, int(in_column.sum())
    return RowDiff(
        removed=_rest(before.num_rows, left),
        added=_rest(after.num_rows, right),
        changed=np.sort(right[differs]),
        same=int(len(left) - differs.sum()),
        columns=columns,
    )


def match(left: pa.Table, right: pa.Table) -> tuple[Positions, Positions]:
    """Return the positions of rows with equal keys, as pairs. Both tables have only key columns, each key once."""
    names = [f"k{column}" for column in range(left.num_columns)]
    one = left.rename_columns(names).append_column("_left", pa.array(np.arange(left.num_rows)))
    kinds = pa.schema([pa.field(name, one.schema.field(name).type) for name in names])
    two = right.rename_columns(names).cast(kinds).append_column("_right", pa.array(np.arange(right.num_rows)))
    pairs = one.join(two, keys=names, join_type="inner")
    return pairs.column("_left").to_numpy().astype(np.int64), pairs.column("_right").to_numpy().astype(np.int64)


def repeated(keys: pa.Table) -> Positions:
    """Return the positions of rows whose key an earlier row has too. `keys`: only key columns."""
    names = [f"k{column}" for column in range(keys.num_columns)]
    numbered = keys.rename_columns(names).append_column("_row", pa.array(np.arange(keys.num_rows)))
    firsts = numbered.group_by(names).aggregate([("_row", "min")]).column("_row_min").to_numpy()
    return _rest(keys.num_rows, firsts.astype(np.int64))


def _rest(rows: int, taken: Positions) -> Positions:
    left = np.ones(rows, dtype=bool)
    left[taken] = False
    return np.flatnonzero(left).astype(np.int64)


_ADDRESS = "_rowaddr"
Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class VersionDiff:
    """Keys added, removed and changed from version `before` to `after`. The tables hold the key columns."""

    before: int
    after: int
    added: pa.Table
    removed: pa.Table
    changed: pa.Table
    same: int
    """Rows that are equal in every column that both versions have."""
    columns: Mapping[str, int]
    """Column -> number of changed rows with a difference in it."""
    columns_added: tuple[str, ...]
    columns_dropped: tuple[str, ...]


def diff_versions(store: ObjectStore, before: int, after: int, key: Sequence[str]) -> VersionDiff:
    """Compare versions `before` and `after`, in either order, of the table at the root of `store`.

    Raises Corrupt if a version does not exist, or holds a key twice; StoreUnavailable, StoreRefused, OSError.
    """
    old, new = read_state(store, before), read_state(store, after)
    old_names, new_names = _names(old), _names(new)
    shared = [name for name in old_names if name in new_names]
    kept = [id for id in old.fragments if id in new.fragments and old.fragments[id].files == new.fragments[id].files]
    whole = [id for id in kept if old.fragments[id].deletion_file == new.fragments[id].deletion_file]
    partly = [id for id in kept if id not in whole]
    opened = _Version(store, old), _Version(store, new)
    both = np.intersect1d(opened[0].addresses(partly), opened[1].addresses(partly), assume_unique=True)
    tables = []
    for version in opened:
        rows = version.rows([id for id in version.state.fragments if id not in whole], shared, both)
        if len(repeated(rows.select(list(key)))):
            raise Corrupt(f"version {version.state.version} holds a key twice; see memwal verify --deep")
        tables.append(rows)
    diff = compare_rows(tables[0], tables[1], key)
    keys_before, keys_after = (rows.select(list(key)) for rows in tables)
    return VersionDiff(
        before=before,
        after=after,
        added=keys_after.take(pa.array(diff.added)),
        removed=keys_before.take(pa.array(diff.removed)),
        changed=keys_after.take(pa.array(diff.changed)),
        same=diff.same + len(both) + sum(old.fragments[id].live for id in whole),
        columns=diff.columns,
        columns_added=tuple(name for name in new_names if name not in old_names),
        columns_dropped=tuple(name for name in old_names if name not in new_names),
    )


class _Version:
    """Reads parts of one version. Thread safety. One thread."""

    def __init__(self, store: ObjectStore, state: TableState) -> None:
        self.state = state
        self._dataset = lance.dataset(store.url(""), version=state.version, storage_options=store.storage_options)

    def addresses(self, fragments: Sequence[int]) -> Addresses:
        """Return the addresses of the live rows of `fragments`."""
        parts = [batch.column(_ADDRESS).to_numpy() for batch in self._scan([], fragments)]
        return np.concatenate([np.zeros(0, dtype=np.uint64), *parts])

    def rows(self, fragments: Sequence[int], columns: Sequence[str], excluded: Addresses) -> pa.Table:
        """Return the live rows of `fragments` except those at the addresses `excluded`, which ascend."""
        tables = [self._dataset.schema.empty_table().select(list(columns))]
        for batch in self._scan(columns, fragments):
            addresses = batch.column(_ADDRESS).to_numpy()
            # `np.isin` would sort `excluded` again for every batch.
            kept = np.searchsorted(excluded, addresses, "left") == np.searchsorted(excluded, addresses, "right")
            if kept.any():
                tables.append(pa.Table.from_batches([batch]).filter(pa.array(kept)).select(list(columns)))
        return pa.concat_tables(tables)

    def _scan(self, columns: Sequence[str], fragments: Sequence[int]) -> Iterable[pa.RecordBatch]:
        chosen = [one for one in self._dataset.get_fragments() if one.fragment_id in fragments]
        if not chosen:
            return []
        scanner = self._dataset.scanner(columns=list(columns), fragments=chosen, with_row_address=True)
        batches: Iterable[pa.RecordBatch] = scanner.to_batches()
        return batches


def _names(state: TableState) -> list[str]:
    return [name for name, _ in state.columns.values()]
