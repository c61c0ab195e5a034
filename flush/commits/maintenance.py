"""Merges index segments, compacts fragments and deletes old versions of the base table after commits.

A commit adds a fragment and, per index, a segment (`flush.commits.index_catchup`), and leaves deleted rows behind in
older fragments. The steps run in this order, each at its own interval, in the process that commits and never during a
commit of its own:

1. **Merge** the newest segments of an index once at least `segments_min` belong together. A vector index all of whose
   segments become one is built anew instead, up to `TRAINED_ROWS_MAX` rows.
2. **Compact** fragments that are in the same segments (Lance puts no others together) once at least `fragments_min` of
   them belong together, and any fragment with more than `deleted_min` of its rows deleted.
3. **Clean up** versions that are older than `versions_age_min` and not among the newest `versions_min`. Tagged versions
   stay, and so do versions from before the table was set up: they are another program's history. The minimum age does
   more than save disk space: Lance checks a write from an old handle against the versions since, as far as they exist.
   From a handle that is older than all of them deleted rows come back (`flush.verification.history`). With
   `changes_age_min` versions that readers of changes need stay too.

What belongs together is decided by size (`worth_merging`): as many as possible while the largest is no larger than the
sum of the others. So a rewrite at least doubles the size, and a row is rewritten at most log2(rows / rows of a batch of
`fragments_min` commits) times. Fragments of `rows_max` rows and more are never rewritten for their size. At most
`fragments_min` plus that logarithm of fragments are left unmerged.

Crash points. 1 and 2 each make one version of Lance's: it exists or not. 3 deletes what no kept version refers to,
manifests first; the next run deletes the rest. It syncs the newest version before that: a power cut, which takes back
versions that nobody has synced, then leaves one (model: Commit!CleanUp). Every run decides from the state of the
table. After a conflict with another writer the step is tried again at its next interval.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lance

from memwal.flush.base.fsync import sync_table
from memwal.flush.base.manifest import MEM_WAL_INDEX
from memwal.flush.commits.index_catchup import train_anew
from memwal.memtable import IndexSpec

TRAINED_ROWS_MAX = 1 << 16
"""Lance trains 256 codes on at most 256 rows each: an index of more rows is no better trained."""


@dataclass(frozen=True, slots=True)
class MaintenanceRules:
    """When to run which step. Intervals and ages in seconds, 0 = never."""

    optimize_interval: float = 10.0
    segments_min: int = 8
    compact_interval: float = 10.0
    fragments_min: int = 8
    rows_max: int = 1 << 20
    deleted_min: float = 0.25
    versions_interval: float = 3600.0
    versions_age_min: float = 604_800.0
    versions_min: int = 10
    changes_age_min: float = 0.0
    """Versions that were the newest in this time stay for readers of changes. 0: none stays for them."""


def worth_merging(sizes: Sequence[int]) -> int:
    """Return how many of `sizes`, from the first on, belong together.

    That is the largest count whose last size is no larger than the sum of those before it; 1 where there is no such
    count, 0 for no sizes. Pure.
    """
    total, most = 0, min(len(sizes), 1)
    for count, size in enumerate(sizes, 1):
        if count > 1 and size <= total:
            most = count
        total += size
    return most


def merge_segments(
    dataset: lance.LanceDataset, names: Iterable[str], segments_min: int, vectors: Iterable[IndexSpec] = ()
) -> list[str]:
    """Step 1 for the indexes `names`; returns those merged. Moves `dataset` to the newest version.

    `vectors`: vector indexes among them that may be built anew.
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


def compact(dataset: lance.LanceDataset, fragments_min: int, rows_max: int, deleted_min: float) -> tuple[int, int]:
    """Step 2; returns the numbers of fragments removed and added. Moves `dataset` to the newest version.

    Raises as `merge_segments`.
    """
    fragments = {fragment.fragment_id: fragment.metadata for fragment in dataset.get_fragments()}
    live = {number: one.physical_rows - one.num_deletions for number, one in fragments.items()}
    chosen = {number for number, one in fragments.items() if one.num_deletions > deleted_min * one.physical_rows}
    for group in _same_segments(dataset, fragments):
        small = sorted((n for n in group if live[n] < rows_max), key=live.__getitem__)
        count = worth_merging([live[number] for number in small])
        if count >= fragments_min:
            chosen.update(small[:count])
    if not chosen:
        return 0, 0
    done = dataset.optimize.compact_files(
        target_rows_per_fragment=rows_max,
        materialize_deletions_threshold=deleted_min,
        excluded_fragment_ids=[number for number in fragments if number not in chosen],
    )
    return done.fragments_removed, done.fragments_added


def clean_up(dataset: lance.LanceDataset, age_min: float, versions_min: int, changes_since: float | None = None) -> int:
    """Step 3; returns the number of versions deleted. `age_min` in seconds. Reads the manifest of every version.

    `dataset`: at the newest version, which is synced to the disk before, and stays.

    `changes_since`: Unix seconds; the version that was the newest then, and all after it, stay for readers of changes.
    It may be much older than that, where the table was idle.

    Raises OSError, RuntimeError, ValueError of Lance.
    """
    present = sorted(ref["version"] for ref in dataset.version_refs())
    # Version numbers ascend with time, and no later version lacks the MemWAL index.
    own = present[bisect_left(present, True, key=lambda version: _is_set_up(dataset, version)) :]
    if len(own) <= versions_min:
        return 0
    if changes_since is not None and not (own := own[: _superseded(dataset, own, changes_since)]):
        return 0
    sync_table(dataset)  # the newest versions may all be unsynced, and a power cut would leave none
    done = dataset.cleanup_old_versions(
        older_than=timedelta(seconds=age_min),
        retain_versions=versions_min,
        versions=[version for version in own if version < dataset.version],
        error_if_tagged_old_versions=False,
    )
    return int(done.old_versions)


def _superseded(dataset: lance.LanceDataset, versions: Sequence[int], since: float) -> int:
    """Return how many of `versions`, ascending, were no longer the newest at `since`, in Unix seconds, less one: by
    the version before it a reader of changes tells that it was the first with its progress.
    """
    written: dict[int, float] = {}
    for each in dataset.versions():
        moment: Any = each["timestamp"]  # pylance's type is a union
        written[int(each["version"])] = moment.timestamp()
    superseded = sum(written.get(version, since) <= since for version in versions) - 1
    return max(superseded - 1, 0)


def _is_set_up(dataset: lance.LanceDataset, version: int) -> bool:
    return dataset.checkout_version(version).mem_wal_index_details() is not None


def _same_segments(dataset: lance.LanceDataset, fragments: Mapping[int, object]) -> Iterable[Sequence[int]]:
    """Group the fragments: two are together where every index has both in the same segments, or neither."""
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
