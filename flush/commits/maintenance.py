"""Keeping the base table in shape after commits: few index segments, few fragments, no versions that nobody wants.

A commit adds a fragment and, per index, a segment (`flush.commits.index_catchup`), and leaves deleted rows behind in
older fragments. In this order, each step at its own interval, by the one who commits and never beside a commit of its
own:

1. **Merge** the newest segments of an index once at least `segments_min` belong together.
2. **Compact** fragments that are in the same segments (Lance puts no others together) once at least `fragments_min` of
   them belong together, and any fragment of which `deleted_min` of the rows are deleted.
3. **Clean up** versions that are older than `versions_age_min` and not among the newest `versions_min`. Tagged
   versions stay, and those from before the table was set up: they are somebody else's history. The age is no matter of
   disk space alone: Lance refuses a write from an old handle by the versions since, where they are there. From a
   handle that is older than all of them rows come back that were deleted (`flush.verification.history`).

What belongs together is decided by size (`together`): as many as there are while the largest is no larger than all the
others. So what is rewritten at least doubles, a row is rewritten no more than log2(rows / rows of a batch of
`fragments_min` commits) times, fragments of `rows_max` and more never for their size, and no more than `fragments_min`
and that logarithm are left behind.

Crash points. Each of 1 and 2 is one version of Lance's: there or not. 3 deletes what no version refers to that is kept,
manifests first; the next one deletes what is left. Everything is decided from the table, so the next one begins anew.
A conflict with another writer costs the step, which is tried again at its next interval.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import lance

from memwal.flush.base.manifest import MEM_WAL_INDEX


@dataclass(frozen=True, slots=True)
class MaintenanceRules:
    """When which step is worth its while. Intervals and ages in seconds, 0 = never."""

    optimize_interval: float = 10.0
    segments_min: int = 8
    compact_interval: float = 10.0
    fragments_min: int = 8
    rows_max: int = 1 << 20
    deleted_min: float = 0.25
    versions_interval: float = 3600.0
    versions_age_min: float = 604_800.0
    versions_min: int = 10


def together(sizes: Sequence[int]) -> int:
    """How many of `sizes`, from the first on, belong together: the most of which the last is no larger than the sum of
    those before it; 1 where none do, 0 of none. Pure.
    """
    total, found = 0, min(len(sizes), 1)
    for count, size in enumerate(sizes, 1):
        if count > 1 and size <= total:
            found = count
        total += size
    return found


def merge_segments(dataset: lance.LanceDataset, names: Iterable[str], segments_min: int) -> list[str]:
    """Step 1 for the indexes `names`; returns those it merged. Moves `dataset` to the newest version.

    Raises OSError, RuntimeError of Lance, on a conflict with another writer too.
    """
    wanted = set(names)
    merged: dict[int, list[str]] = defaultdict(list)
    rows = {each.fragment_id: each.metadata.physical_rows for each in dataset.get_fragments()}
    for index in dataset.describe_indices():
        if index.name in wanted:
            sizes = [sum(rows.get(fragment, 0) for fragment in segment.fragment_ids) for segment in index.segments]
            if (count := together(sizes[::-1])) >= segments_min:
                merged[count].append(index.name)
    for count, indexes in merged.items():
        dataset.optimize.optimize_indices(index_names=indexes, num_indices_to_merge=count)
    return [name for indexes in merged.values() for name in indexes]


def compact(dataset: lance.LanceDataset, fragments_min: int, rows_max: int, deleted_min: float) -> tuple[int, int]:
    """Step 2; returns how many fragments were replaced, and by how many. Moves `dataset` to the newest version.

    Raises as `merge_segments`.
    """
    fragments = {each.fragment_id: each.metadata for each in dataset.get_fragments()}
    live = {number: each.physical_rows - each.num_deletions for number, each in fragments.items()}
    chosen = {n for n, each in fragments.items() if each.num_deletions > deleted_min * each.physical_rows}
    for group in _same_segments(dataset, fragments):
        small = sorted((n for n in group if live[n] < rows_max), key=live.__getitem__)
        count = together([live[number] for number in small])
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


def clean_up(dataset: lance.LanceDataset, age_min: float, versions_min: int) -> int:
    """Step 3; returns how many versions went. `age_min` in seconds. Reads the manifest of every version.

    Raises OSError, RuntimeError, ValueError of Lance.
    """
    present = sorted(each["version"] for each in dataset.version_refs())
    # Version numbers ascend with time, and no version loses the MemWAL index again.
    own = present[bisect_left(present, True, key=lambda version: _is_set_up(dataset, version)) :]
    if len(own) <= versions_min:
        return 0
    done = dataset.cleanup_old_versions(
        older_than=timedelta(seconds=age_min),
        retain_versions=versions_min,
        versions=own,
        error_if_tagged_old_versions=False,
    )
    return int(done.old_versions)


def _is_set_up(dataset: lance.LanceDataset, version: int) -> bool:
    return dataset.checkout_version(version).mem_wal_index_details() is not None


def _same_segments(dataset: lance.LanceDataset, fragments: Mapping[int, object]) -> Iterable[Sequence[int]]:
    """The fragments in groups of those which every index has in one segment, or has not at all."""
    segments: dict[int, list[str]] = {number: [] for number in fragments}
    for index in dataset.describe_indices():
        if index.name == MEM_WAL_INDEX:
            continue
        for segment in index.segments:
            for number in segment.fragment_ids:
                if number in segments:
                    segments[number].append(str(segment.uuid))
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, found in segments.items():
        groups[tuple(found)].append(number)
    return groups.values()
