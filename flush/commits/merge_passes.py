"""The two writes of a commit into a table with a key: a version of deletes, then a version of upserts.

They are two versions because Lance's `when_matched_delete` takes no condition. Both start from the version read and are
never retried inside Lance: a retry would apply rows planned for an older state. A conflict surfaces as OSError, and the
committer plans again.

The counts that Lance reports are checked twice, by metadata only: against the number of keys given to the pass, and
against the difference in rows between the new version and the version below it.

`use_index(False)`: Lance's probe for an index on the key fails on the MemWAL index, which has no columns, and prints
"Index __lance_mem_wal has no fields". The key has no index, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

import lance
import pyarrow as pa
from lance.dataset import MergeInsertBuilder
from lance.mem_wal import CompactedSsTable

from memwal.flush.errors import CountMismatch
from memwal.wal.codec.lance_arrays import importable_table


class Written(NamedTuple):
    """Rows changed by one pass, and the number and bytes of the data files of its version."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    files: int = 0
    bytes: int = 0


def delete_pass(dataset: lance.LanceDataset, keys: pa.Table, marker: Mapping[UUID, int] | None = None) -> Written:
    """Delete the rows of `keys`. Moves `dataset` to the new version.

    `marker`: given if no upserts follow. Raises OSError on a conflict; CountMismatch, after the write, if more rows
    were deleted than `keys` has, or if the version does not hold the expected number of rows.
    """
    builder = dataset.merge_insert(keys.column_names).when_matched_delete()
    done = _execute(dataset, builder, keys, marker)
    if done.deleted > keys.num_rows:
        raise CountMismatch(
            f"{dataset.uri}: {done.deleted} rows were deleted for {keys.num_rows} keys: the table held keys twice "
            f"before; compare version {dataset.version - 1} and append through memwal only"
        )
    return done


def rows_to_delete(dataset: lance.LanceDataset, keys: pa.Table) -> int:
    """Return how many rows `delete_pass` would delete. Commits nothing.

    Raises OSError. Lance's clean-up removes the deletion files that this call writes.
    """
    builder = dataset.merge_insert(keys.column_names).when_matched_delete()
    _, counts = builder.use_index(False).conflict_retries(0).execute_uncommitted(keys)
    return int(counts["num_deleted_rows"])


def upsert_pass(
    dataset: lance.LanceDataset,
    rows: pa.Table | pa.RecordBatchReader,
    key: Sequence[str],
    marker: Mapping[UUID, int],
    number: int | None = None,
) -> Written:
    """Insert or replace `rows` and record the marker. Moves `dataset` to the new version.

    `rows`: in base schema, one per key. Table columns that are missing in them keep their values, and are null in new
    rows.
    `number`: the row count if `rows` is a reader. Lance reads a reader once, batch by batch, and holds the keys of the
    table in memory meanwhile.
    Raises OSError on a conflict; CountMismatch, after the write, if the table did not change by exactly these rows.
    """
    builder = dataset.merge_insert(list(key)).when_matched_update_all().when_not_matched_insert_all()
    if isinstance(rows, pa.Table):
        if "*" in dataset.schema.names and "*" not in rows.column_names:  # Lance reads a missing "*" as all columns
            star = dataset.schema.field("*")
            rows = rows.append_column(star, pa.nulls(rows.num_rows, star.type))
        rows, number = importable_table(rows), rows.num_rows
    done = _execute(dataset, builder, rows, marker)
    if done.inserted + done.updated != number:
        raise CountMismatch(
            f"{dataset.uri}: version {dataset.version} inserted {done.inserted} rows and replaced {done.updated} for "
            f"{number} keys: the table holds keys twice; remove them, and append through memwal only"
        )
    return done


def _execute(
    dataset: lance.LanceDataset,
    builder: MergeInsertBuilder,
    rows: pa.Table | pa.RecordBatchReader,
    marker: Mapping[UUID, int] | None,
) -> Written:
    read = dataset.version
    rows_before: int | None = dataset.count_rows()
    builder = builder.use_index(False).conflict_retries(0)
    if marker:
        done = [CompactedSsTable(str(region), generation) for region, generation in marker.items()]
        builder = builder.mark_sstables_as_compacted(done)
    counts: Mapping[str, int] = builder.execute(rows)
    if dataset.version != read + 1:  # Lance rebased it onto versions that touch other rows
        rows_before = _rows_of(dataset, dataset.version - 1)
    written = _written(dataset, counts)
    rows_after = dataset.count_rows()
    if rows_before is not None and rows_after != rows_before + written.inserted - written.deleted:
        raise CountMismatch(
            f"{dataset.uri}: version {dataset.version} holds {rows_after} rows; {rows_before} before, "
            f"{written.inserted} inserted and {written.deleted} deleted make another number; compare it with version "
            f"{dataset.version - 1}, and stop other writers"
        )
    return written


def _rows_of(dataset: lance.LanceDataset, version: int) -> int | None:
    """Return the number of rows of an older version; None if it was cleaned up, so that no check is possible."""
    try:
        return int(dataset.checkout_version(version).count_rows())
    except (OSError, ValueError):
        if version in {ref["version"] for ref in dataset.version_refs()}:
            raise
        return None


def _written(dataset: lance.LanceDataset, counts: Mapping[str, int]) -> Written:
    transaction = dataset.read_transaction(dataset.version)
    fragments = getattr(transaction.operation, "new_fragments", ()) if transaction else ()
    sizes = [file.file_size_bytes or 0 for fragment in fragments for file in fragment.files]
    return Written(
        inserted=int(counts["num_inserted_rows"]),
        updated=int(counts["num_updated_rows"]),
        deleted=int(counts["num_deleted_rows"]),
        files=len(sizes),
        bytes=sum(sizes),
    )
