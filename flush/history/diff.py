"""Find the rows that differ between two versions of the base table, by key: `memwal log --diff`.

A row that has the same address in both versions, in a fragment with the same files, is unchanged.

 1. Skip fragments that both versions have with the same files and the same deletions.
 2. In the other fragments, read the row addresses, and skip rows that both versions have in files that both have.
 3. Read the remaining rows with every column that both versions have, hold them in memory, and compare them by key
    (`flush.history.row_diff`). After a commit these are few; after a compaction, which moves rows, they are all moved
    rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.state import TableState, read_state
from memwal.flush.history.row_diff import compare_rows, repeated
from memwal.wal import Corrupt, ObjectStore

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
    rows_before, rows_after, untouched = _touched(_Version(store, old), _Version(store, new), shared, key)
    diff = compare_rows(rows_before, rows_after, key)
    keys_before, keys_after = rows_before.select(list(key)), rows_after.select(list(key))
    return VersionDiff(
        before=before,
        after=after,
        added=keys_after.take(pa.array(diff.added)),
        removed=keys_before.take(pa.array(diff.removed)),
        changed=keys_after.take(pa.array(diff.changed)),
        same=diff.same + untouched,
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


def _touched(
    old: _Version, new: _Version, columns: Sequence[str], key: Sequence[str]
) -> tuple[pa.Table, pa.Table, int]:
    """Return the rows of each version that may differ from the other, and the number of unchanged rows."""
    before, after = old.state.fragments, new.state.fragments
    kept = [id for id in before if id in after and before[id].files == after[id].files]
    whole = [id for id in kept if before[id].deletion_file == after[id].deletion_file]
    partly = [id for id in kept if id not in whole]
    both = np.intersect1d(old.addresses(partly), new.addresses(partly), assume_unique=True)
    tables = []
    for version in (old, new):
        rows = version.rows([id for id in version.state.fragments if id not in whole], columns, both)
        if len(repeated(rows.select(list(key)))):
            raise Corrupt(f"version {version.state.version} holds a key twice; see memwal verify --deep")
        tables.append(rows)
    return tables[0], tables[1], len(both) + sum(before[id].live for id in whole)
