"""The two writes of a commit into a table without a key: append the rows, then set Lance's marker.

    invariant: the rows of a range of generations, and the record that the range is committed, are in one version, or in
    none.

No stored row is read. A load (flush.commits.load) appends its rows the same way. The steps before and after are those
of every commit (model: Append!ReadManifests, Append!OpenBase, Append!Prune).

 1. **Write** the rows of the SSTs as a stream into data files of the base. Memory holds a few batches, never a whole
    SST. No version refers to the files yet. *Crash here: orphans, see flush.garbage.orphans.*
    (model: Append!WriteFiles)
 2. **Append** by a compare-and-swap (`flush.base.swap`) that sets `memwal:committed` in the schema's metadata. A
    concurrent commit of the same range fails, whatever files it wrote. (A merge-insert carries Lance's own marker, but
    must match rows.) *Crash here: appended or not. The next commit reads `memwal:committed` in the manifest.*
    (model: Append!Swap)
 3. **Mark**: an empty merge-insert raises Lance's own marker to the same generations; Lance uses it to record how far
    its indexes are. *Crash before this step: the next commit does it. It is rejected, without loss, if another commit
    set the marker first.* (model: Append!Mark)

The cost of a commit depends on the rows that it appends, and on one listing of the base's fragments. Index builds and
changes of the table's config may happen in between; Lance rebases step 2 onto them and keeps them.

Other programs: an append or compaction planned on a version below the commit fails with Lance's "Retryable commit
conflict"; a delete or an update is rebased onto the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments
from lance.mem_wal import CompactedSsTable

from memwal.flush.base.manifest import COMMITTED, highest
from memwal.flush.base.shape import row_field_ids
from memwal.flush.base.swap import append_if_unchanged, as_new_fragments
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.merge_passes import Written
from memwal.flush.commits.plan import RegionPlan
from memwal.flush.errors import CountMismatch
from memwal.flush.sst.files import sst_batches
from memwal.wal import ObjectStore
from memwal.wal.panics import panics_as_errors


class AppendedRows:
    """Steps 1 and 2 for the rows of `source`.

    After a conflict with another program, the same files are appended again, not rewritten: only one append with a
    given marker ever succeeds. A process that loses a race, or crashes, leaves its files as orphans.
    Thread safety. One thread.
    """

    def __init__(
        self, base: BaseTable, marker: Mapping[UUID, int], source: Callable[[], Iterator[pa.RecordBatch]]
    ) -> None:
        """`marker`: the generations committed with the rows. `source`: returns the rows in base schema."""
        self._base, self._marker, self._source = base, dict(marker), source
        self._rows = 0
        self._error: BaseException | None = None
        self._fragments: list[FragmentMetadata] | None = None

    def fits(self, base: BaseTable) -> bool:
        """Return whether all rows are written, in the columns of `base`. False if `write` raised."""

        def form(table: BaseTable) -> tuple[object, ...]:
            return table.schema, tuple(row_field_ids(table.dataset, table.schema.names)), table.storage_version

        return self._fragments is not None and form(base) == form(self._base)

    def write(self) -> None:
        """Run step 1: write the files; no version refers to them yet.

        Raises what the source raises; OSError of storage.
        """
        base, version = self._base, self._base.storage_version
        version_of_files: Any = version  # pylance's type is a list of literals
        try:
            with panics_as_errors:
                written = write_fragments(
                    self._reader(),
                    base.dataset,
                    schema=base.schema,
                    mode="append",
                    data_storage_version=version_of_files,
                    storage_options=dict(base.storage_options),
                )
        except Exception as error:
            # Lance passes on only the text of an exception raised while reading.
            raise self._error or error from error
        assert not isinstance(written, lance.Transaction)
        rows = sum(fragment.physical_rows for fragment in written)
        if rows != self._rows:
            raise CountMismatch(
                f"{base.uri}: {rows} rows were written of {self._rows}; nothing was appended, commit again"
            )
        self._fragments = as_new_fragments(written)

    def append(self, base: BaseTable) -> Written:
        """Run step 2, on top of the version of `base`, whose dataset is not moved. Requires: `write`.

        Raises OSError (CommitConflictError is one) on a conflict; CountMismatch, after the append, if the new version
        does not hold exactly these additional rows.
        """
        if self._fragments is None:
            raise RuntimeError("the rows to append are not written")
        done = highest(base.committed, self._marker)
        committed = json.dumps({str(region): generation for region, generation in sorted(done.items())})
        made = append_if_unchanged(base.dataset, self._fragments, {COMMITTED: committed.encode()}, base.storage_options)
        before = base.dataset.count_rows()  # the swap succeeded, so no row has changed since
        if made.count_rows() != before + self._rows:
            raise CountMismatch(
                f"{base.uri}: version {made.version} holds {made.count_rows()} rows; {before} before and {self._rows} "
                f"appended make another number; compare it with version {base.version}, and stop other writers"
            )
        sizes = [file.file_size_bytes or 0 for fragment in self._fragments for file in fragment.files]
        return Written(inserted=self._rows, files=len(sizes), bytes=sum(sizes))

    def _reader(self) -> pa.RecordBatchReader:
        """Return the rows for Lance, which reads them in its own thread; the simulation replaces this."""
        return pa.RecordBatchReader.from_batches(self._base.schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._source():
                self._rows += batch.num_rows
                yield batch
        except GeneratorExit:  # Lance itself failed and reads no further
            raise
        except BaseException as error:
            self._error = error
            raise


class AppendedSsts(AppendedRows):
    """Steps 1 and 2 for the SSTs of `plans`.

    `write` raises Corrupt if an SST is missing or short; StoreUnavailable, StoreRefused.
    """

    def __init__(self, store: ObjectStore, base: BaseTable, plans: Sequence[RegionPlan]) -> None:
        super().__init__(base, {plan.region: plan.last for plan in plans}, self._ssts)
        self._store, self._plans = store, tuple(plans)
        self.failed_at: UUID | None = None
        """The region whose SSTs could not be read."""

    def serves(self, base: BaseTable, plans: Sequence[RegionPlan]) -> bool:
        """Return whether all rows of `plans` are written, in the columns of `base`. False if `write` raised."""

        def ssts(plans: Sequence[RegionPlan]) -> list[object]:
            return [(plan.region, plan.ssts) for plan in plans]

        return ssts(plans) == ssts(self._plans) and self.fits(base)

    def _ssts(self) -> Iterator[pa.RecordBatch]:
        for plan in self._plans:
            try:
                for sst in plan.ssts:
                    yield from sst_batches(self._store, plan.region, sst, self._base.schema, self._base.shape.rows)
            except GeneratorExit:
                raise
            except BaseException:
                self.failed_at = plan.region
                raise


def unmarked(base: BaseTable) -> dict[UUID, int]:
    """Return the generations that `base` holds above Lance's own marker; {} for a table with a key."""
    return {region: done for region, done in base.committed.items() if base.marked.get(region, 0) < done}


def mark(dataset: lance.LanceDataset, generations: Mapping[UUID, int]) -> None:
    """Run step 3. Moves `dataset` to the new version. Raises OSError on a conflict.

    The merge matches no rows, so any column can serve as its key.
    """
    done = [CompactedSsTable(str(region), generation) for region, generation in generations.items()]
    builder = dataset.merge_insert([dataset.schema.names[0]]).when_not_matched_insert_all().use_index(False)
    builder.conflict_retries(0).mark_sstables_as_compacted(done).execute(dataset.schema.empty_table())
