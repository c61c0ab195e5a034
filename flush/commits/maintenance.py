"""Maintain the base table after commits: merge index segments, compact fragments, delete old versions.

A commit adds a fragment and, per index, a segment (`flush.commits.index_catchup`), and leaves deleted rows in older
fragments. The steps run in this order, each at its own interval, in the committing process and never during one of its
own commits:

1. **Merge** the newest segments of an index if at least `segments_min` of them qualify. If all segments of a vector
   index become one, the index is rebuilt instead, up to `TRAINED_ROWS_MAX` rows.
2. **Compact** fragments that are in the same segments (Lance merges no others) if at least `fragments_min` of them
   qualify, and any fragment with more than `deleted_min` of its rows deleted. A run reads at most `bytes_max` bytes;
   the next run continues. A fragment of that size is only rewritten for its deleted rows, and alone.
3. **Clean up** versions that `flush.commits.thinning` does not keep. Tagged versions stay, and so do versions from
   before the table was set up: they are another program's history. With `changes_age_min`, versions that readers of
   changes need stay too. Lance deletes the versions, with the files that no other version refers to.

`worth_merging` selects by size: as many as possible while the largest is no larger than the sum of the others. A
rewrite therefore at least doubles the size, and a row is rewritten at most log2(rows / rows of a batch of
`fragments_min` commits) times. Fragments of `rows_max` rows or more are never rewritten for their size. The number of
unmerged fragments is at most `fragments_min` plus that logarithm.

Invariant of step 3: **above every deleted version there is a kept version made by Merge**, the *barrier*. Lance checks
a write from an old handle against the versions since, but only those that still exist. Without the barrier, a write
planned on a version older than the deleted ones would restore rows that they had deleted, and insert keys twice that
they had inserted. With the barrier, Lance reports a conflict: it plans an update, a delete or a merge anew on the
newest version, and rejects an append, a compaction or a change of columns until the program reopens the table. Every
run that deletes versions therefore first creates a barrier above all of them, a version that changes nothing.

Crash points. Steps 1 and 2 each create one Lance version, which exists or does not. Step 3 creates the barrier, syncs
it, and deletes what no kept version refers to, manifests first. *Crash before the first deletion: one more version.
Crash later: the next run deletes the rest.* The sync is required: a power cut takes back unsynced versions, including
the barrier, and could leave no version at all (model: Commit!CleanUp). Two concurrent runs each create a barrier above
what they delete; the later barrier is above what both delete. Every run depends only on the state of the table. After a
conflict with another writer, the step runs again at its next interval.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate

import lance
from lance.optimize import Compaction, CompactionOptions

from memwal.flush.base.fsync import sync_table
from memwal.flush.base.manifest import MEM_WAL_INDEX
from memwal.flush.base.swap import BARRIER, append_if_unchanged
from memwal.flush.base.version_files import VersionFiles, stored_versions, tagged_versions
from memwal.flush.commits.index_catchup import train_anew
from memwal.flush.commits.thinning import VersionRules, kept_by_age, recent_versions, within_space
from memwal.memtable import IndexSpec
from memwal.wal import ObjectStore

BATCH_BYTES, _BATCH_ROWS, _READ_BUFFER = 4 << 20, 8192, 128 << 20
"""Limits of one read of a compaction: bytes (by the mean row size), rows, and bytes read ahead from files, where
Lance's default is 2 GiB.
"""
TRAINED_ROWS_MAX = 1 << 16
"""Lance trains 256 codes on at most 256 rows each: more rows do not improve the training of an index."""
_BARRIERS = 5
"""Attempts to create a barrier; an attempt fails only if another writer commits within milliseconds."""


def worth_merging(sizes: Sequence[int]) -> int:
    """Return how many of `sizes`, from the first on, are worth merging.

    This is the largest count whose last size is no larger than the sum of those before it; 1 if no such count exists, 0
    if `sizes` is empty. Pure.
    """
    total, most = 0, min(len(sizes), 1)
    for count, size in enumerate(sizes, 1):
        if count > 1 and size <= total:
            most = count
        total += size
    return most


@dataclass(frozen=True, slots=True)
class _Size:
    """Rows of a fragment, with and without deleted ones; bytes of its data files, 0 if not recorded."""

    physical: int
    live: int
    bytes: int

    @staticmethod
    def of(fragment: lance.LanceFragment) -> _Size:
        data = fragment.metadata
        size = sum(file.file_size_bytes or 0 for file in data.files)
        return _Size(data.physical_rows, data.physical_rows - data.num_deletions, size)


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    """Limits of step 2.

    Merge `fragments_min` or more fragments of similar size, and rewrite those with more than `deleted_min` of their
    rows deleted. One run reads at most `bytes_max` bytes, but at least one fragment.
    """

    fragments_min: int = 8
    rows_max: int = 1 << 20
    deleted_min: float = 0.25
    bytes_max: int = 1 << 30

    def chosen(self, fragments: Mapping[int, _Size], groups: Iterable[Sequence[int]]) -> set[int]:
        """Return the fragments to compact. `groups`: fragment numbers that may be merged with each other. Pure."""
        deleted = [n for n, size in fragments.items() if size.physical - size.live > self.deleted_min * size.physical]
        sets = [[number] for number in sorted(deleted, key=lambda number: fragments[number].bytes)]
        for group in groups:
            small = (n for n in group if fragments[n].live < self.rows_max and fragments[n].bytes < self.bytes_max)
            ordered = sorted(small, key=lambda number: fragments[number].live)
            ordered = ordered[: self._fitting(fragments[number].bytes for number in ordered)]
            count = worth_merging([fragments[number].live for number in ordered])
            if count >= self.fragments_min:
                sets.append(ordered[:count])
        taken = self._fitting(sum(fragments[number].bytes for number in each) for each in sets)
        return {number for each in sets[: max(taken, 1)] for number in each}

    def _fitting(self, sizes: Iterable[int]) -> int:
        """Return how many of `sizes`, from the first on, total at most `bytes_max` bytes."""
        return sum(total <= self.bytes_max for total in accumulate(sizes))


@dataclass(frozen=True, slots=True)
class MaintenanceRules:
    """When to run each step. Intervals and ages in seconds; 0 = never."""

    optimize_interval: float = 10.0
    segments_min: int = 8
    compact_interval: float = 10.0
    compaction: CompactionLimits = field(default_factory=CompactionLimits)
    versions_interval: float = 600.0
    versions: VersionRules = field(default_factory=VersionRules)
    changes_age_min: float = 0.0
    """Versions that were the newest within this time are kept for readers of changes. 0: none is kept for them."""


def merge_segments(
    dataset: lance.LanceDataset, names: Iterable[str], segments_min: int, vectors: Iterable[IndexSpec] = ()
) -> list[str]:
    """Run step 1 for the indexes `names`; return the merged ones. Moves `dataset` to the newest version.

    `vectors`: the vector indexes among them that may be rebuilt.
    Raises OSError, RuntimeError of Lance, also on a conflict with another writer.
    """
    wanted, specs, rebuilt = set(names), {spec.name: spec for spec in vectors}, list[str]()
    merged: dict[int, list[str]] = defaultdict(list)
    rows = {fragment.fragment_id: fragment.metadata.physical_rows for fragment in dataset.get_fragments()}
    for index in dataset.describe_indices():
        if index.name in wanted:
            sizes = [sum(rows.get(fragment, 0) for fragment in segment.fragment_ids) for segment in index.segments]
            if (count := worth_merging(sizes[::-1])) < segments_min:
                continue
            small = count == len(sizes) and sum(sizes) <= TRAINED_ROWS_MAX
            if small and index.name in specs and train_anew(dataset, specs[index.name]):
                rebuilt.append(index.name)
            else:
                merged[count].append(index.name)
    for count, indexes in merged.items():
        dataset.optimize.optimize_indices(index_names=indexes, num_indices_to_merge=count)
    return [*rebuilt, *(name for indexes in merged.values() for name in indexes)]


def compact(dataset: lance.LanceDataset, limits: CompactionLimits) -> tuple[int, int]:
    """Run step 2; return the numbers of fragments removed and added. Moves `dataset` to the newest version.

    Memory: a few batches of BATCH_BYTES and Lance's pages, whatever the size of a row. Raises as `merge_segments`.
    """
    fragments = {fragment.fragment_id: _Size.of(fragment) for fragment in dataset.get_fragments()}
    chosen = limits.chosen(fragments, _same_segments(dataset, fragments))
    if not chosen:
        return 0, 0
    rows, size = (sum(getattr(fragments[number], name) for number in chosen) for name in ("physical", "bytes"))
    options = CompactionOptions(
        target_rows_per_fragment=limits.rows_max,
        max_bytes_per_file=limits.bytes_max,
        materialize_deletions_threshold=limits.deleted_min,
        excluded_fragment_ids=[number for number in fragments if number not in chosen],
        batch_size=max(1, min(_BATCH_ROWS, rows * BATCH_BYTES // max(size, 1))),
        io_buffer_size=_READ_BUFFER,
        num_threads=1,  # each thread reads and writes a separate fragment
    )
    done = Compaction.execute(dataset, options)
    return done.fragments_removed, done.fragments_added


def clean_up(
    store: ObjectStore,
    dataset: lance.LanceDataset,
    rules: VersionRules,
    now: float,
    changes_since: float | None = None,
) -> int:
    """Run step 3; return the number of deleted versions. Moves `dataset` to the barrier, if one is created.

    `store`: of the table. `dataset`: at the newest version. `now`: Unix seconds.
    `changes_since`: Unix seconds; the version that was the newest then, and all later ones, are kept for readers of
    changes. In an idle table that version may be much older.

    Lists the versions. If some exceed their age, also reads the manifests of the others to add up their bytes.
    Raises OSError, RuntimeError, ValueError of Lance; Corrupt, StoreUnavailable, StoreRefused.
    """
    gone = _to_delete(store, dataset, rules, now, changes_since)
    if not gone:
        return 0
    _raise_barrier(store, dataset)
    sync_table(dataset)  # the newest versions may all be unsynced, and a power cut would leave none
    done = dataset.cleanup_old_versions(
        older_than=timedelta(seconds=rules.age_min),
        retain_versions=rules.newest,
        versions=gone,
        error_if_tagged_old_versions=False,
    )
    return int(done.old_versions)


def _to_delete(
    store: ObjectStore, dataset: lance.LanceDataset, rules: VersionRules, now: float, changes_since: float | None
) -> list[int]:
    """Return the versions to delete, ascending."""
    present = [each for each in stored_versions(store) if each.version <= dataset.version]
    recent = recent_versions(present, rules, now)
    if len(recent) == len(present):
        return []
    # Version numbers ascend with time, and no later version lacks the MemWAL index.
    first = bisect_left(
        present, True, key=lambda each: dataset.checkout_version(each.version).mem_wal_index_details() is not None
    )
    protected = {each.version for each in present[:first]} | tagged_versions(dataset)
    if changes_since is not None:
        # A reader of changes also needs the version before the one that was the newest then, to detect that the latter
        # was the first with its progress.
        superseded = sum(each.written <= changes_since for each in present) - 1
        protected |= {each.version for each in present[max(superseded - 1, 0) :]}
    kept = kept_by_age(present, protected, rules, now)
    kept = within_space(kept, protected, recent, VersionFiles(store).of, rules.space_max)
    return sorted({each.version for each in present}.difference(kept))


def _raise_barrier(store: ObjectStore, dataset: lance.LanceDataset) -> None:
    """Create a version that changes nothing and conflicts with writes planned on older versions.

    Moves `dataset` to it. Raises OSError after _BARRIERS conflicts in a row.
    """
    for attempt in range(1, _BARRIERS + 1):
        dataset.checkout_latest()  # type: ignore[no-untyped-call]
        try:
            append_if_unchanged(dataset, (), {}, store.storage_options, message=BARRIER)
            break
        except OSError:
            if attempt == _BARRIERS or dataset.latest_version == dataset.version:
                raise
    dataset.checkout_latest()  # type: ignore[no-untyped-call]


def _same_segments(dataset: lance.LanceDataset, fragments: Mapping[int, object]) -> Iterable[Sequence[int]]:
    """Group the fragments: two belong together if every index covers both with the same segments, or covers neither."""
    segments: dict[int, list[str]] = {number: [] for number in fragments}
    for index in dataset.describe_indices():
        if index.name == MEM_WAL_INDEX:
            continue
        for segment in index.segments:
            for number in segment.fragment_ids:
                if number in segments:
                    segments[number].append(str(segment.uuid))
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, covered_by in segments.items():
        groups[tuple(covered_by)].append(number)
    return groups.values()
