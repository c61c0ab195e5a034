"""The two writes of a commit. `when_matched_delete` takes no condition, so deletes and upserts are two
versions.

Both run from the version read and are never retried inside Lance: a retry there would apply rows planned for
an older state. A conflict surfaces as OSError, and the committer plans anew.

`use_index(False)`: the probe for an index on the key trips over the MemWAL index, which has no columns, and
prints "Index __lance_mem_wal has no fields"; the key has no index here, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

import lance
import pyarrow as pa
from lance.dataset import MergeInsertBuilder
from lance.mem_wal import CompactedSsTable

from flush.errors import CountMismatch


def delete_pass(dataset: lance.LanceDataset, keys: pa.Table, marker: Mapping[UUID, int] | None = None) -> int:
    """Delete the rows of `keys`; returns how many there were. Moves `dataset` to the new version.

    `marker`: set where no upserts follow. Raises OSError on a conflict; CountMismatch, after the deed, where
    more rows went than there are keys.
    """
    builder = dataset.merge_insert(keys.column_names).when_matched_delete()
    deleted = int(_execute(builder, keys, marker)["num_deleted_rows"])
    if deleted > keys.num_rows:
        raise CountMismatch(
            f"{dataset.uri}: {deleted} rows were deleted for {keys.num_rows} keys: the table held keys twice "
            f"before; compare version {dataset.version - 1} and append through memwal only"
        )
    return deleted


def rows_to_delete(dataset: lance.LanceDataset, keys: pa.Table) -> int:
    """How many rows `delete_pass` would delete; commits nothing.

    Raises OSError. Deletion files it wrote are left to Lance's clean-up.
    """
    builder = dataset.merge_insert(keys.column_names).when_matched_delete()
    _, counts = builder.use_index(False).conflict_retries(0).execute_uncommitted(keys)
    return int(counts["num_deleted_rows"])


def upsert_pass(
    dataset: lance.LanceDataset, rows: pa.Table, key: Sequence[str], marker: Mapping[UUID, int]
) -> tuple[int, int]:
    """Insert or replace `rows` (base schema, one per key) and record the marker; returns (inserted, updated).

    Moves `dataset` to the new version. Raises OSError on a conflict; CountMismatch, after the deed, where the
    table did not change by exactly these rows.
    """
    builder = dataset.merge_insert(list(key)).when_matched_update_all().when_not_matched_insert_all()
    done = _execute(builder, rows, marker)
    inserted, updated = int(done["num_inserted_rows"]), int(done["num_updated_rows"])
    if inserted + updated != rows.num_rows:
        raise CountMismatch(
            f"{dataset.uri}: version {dataset.version} inserted {inserted} rows and replaced {updated} for "
            f"{rows.num_rows} keys: the table holds keys twice; remove them, and append through memwal only"
        )
    return inserted, updated


def _execute(builder: MergeInsertBuilder, rows: pa.Table, marker: Mapping[UUID, int] | None) -> Mapping[str, int]:
    builder = builder.use_index(False).conflict_retries(0)
    if marker:
        done = [CompactedSsTable(str(region), generation) for region, generation in marker.items()]
        builder = builder.mark_sstables_as_compacted(done)
    counts: Mapping[str, int] = builder.execute(rows)
    return counts
