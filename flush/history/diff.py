"""What lies between two versions of the base table, by key: `memwal log --diff`.

A row that has the same address in both versions, in a fragment of the same files, was not touched.

 1. Fragments that both versions have, with the same files and the same deletions, are left out altogether.
 2. Of the others the row addresses are read, and what both versions have in files that both have is left out.
 3. What is left is read with every column that both versions have, held in memory, and compared by key
    (`flush.history.row_diff`): after a commit that is little; after a compaction, which moves rows, all that it moved.
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
    """What `after` has that `before` has not, and the other way round. The tables hold the key columns."""

    before: int
    after: int
    added: pa.Table
    removed: pa.Table
    changed: pa.Table
    same: int
    """Rows that are equal in every column that both versions have."""
    columns: Mapping[str, int]
    """Changed rows by column that differs."""
    columns_added: tuple[str, ...]
    columns_dropped: tuple[str, ...]


def diff_versions(store: ObjectStore, before: int, after: int, key: Sequence[str]) -> VersionDiff:
    """What changed from version `before` to version `after`, in either order, of the table at the root of `store`.

    Raises Corrupt where a version is not there, or holds a key twice; StoreUnavailable, StoreRefused, OSError.
    """
    old, new = read_state(store, before), read_state(store, after)
    old_names, new_names = _names(old), _names(new)
    shared = [name for name in old_names if name in new_names]
    rows_before, rows_after, untouched = _touched(_Version(store, old), _Version(store, new), shared, key)
    found = compare_rows(rows_before, rows_after, key)
    keys_before, keys_after = rows_before.select(list(key)), rows_after.select(list(key))
    return VersionDiff(
        before=before,
        after=after,
        added=keys_after.take(pa.array(found.added)),
        removed=keys_before.take(pa.array(found.removed)),
        changed=keys_after.take(pa.array(found.changed)),
        same=found.same + untouched,
        columns=found.columns,
        columns_added=tuple(name for name in new_names if name not in old_names),
        columns_dropped=tuple(name for name in old_names if name not in new_names),
    )


class _Version:
    """One version, to be read in part. Thread safety. One thread."""

    def __init__(self, store: ObjectStore, state: TableState) -> None:
        self.state = state
        self._dataset = lance.dataset(store.url(""), version=state.version, storage_options=store.storage_options)

    def addresses(self, fragments: Sequence[int]) -> Addresses:
        """Of the live rows of `fragments`."""
        parts = [batch.column(_ADDRESS).to_numpy() for batch in self._scan([], fragments)]
        return np.concatenate([np.zeros(0, dtype=np.uint64), *parts])

    def rows(self, fragments: Sequence[int], columns: Sequence[str], but: Addresses) -> pa.Table:
        """The live rows of `fragments` but those at the addresses `but`, which ascend."""
        tables = [self._dataset.schema.empty_table().select(list(columns))]
        for batch in self._scan(columns, fragments):
            addresses = batch.column(_ADDRESS).to_numpy()
            # By hand: `np.isin` would sort `but` again for every batch.
            kept = np.searchsorted(but, addresses, "left") == np.searchsorted(but, addresses, "right")
            if kept.any():
                tables.append(pa.Table.from_batches([batch]).filter(pa.array(kept)).select(list(columns)))
        return pa.concat_tables(tables)

    def _scan(self, columns: Sequence[str], fragments: Sequence[int]) -> Iterable[pa.RecordBatch]:
        chosen = [each for each in self._dataset.get_fragments() if each.fragment_id in fragments]
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
    """The rows of each version that the other has not as they are, and how many it has."""
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
