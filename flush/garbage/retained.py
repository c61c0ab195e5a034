"""Determine which committed SSTs are still needed beside the base table; a collection must not delete those.

An SST that is committed and pruned is in no newest manifest, but three kinds of readers may still use it:

 * A running read. It took a region manifest, then the base version that was newest at that moment, and reads
   generations that this version had not committed from SSTs. A read that began within the grace time holds the version
   that was newest when the grace time began, or a newer one. A version is newest until the next one, so its own age
   does not matter: the newest one at that moment may be a year old.
 * A lagging index. Lance's readers search an SST's own index for rows that the base's index does not cover yet. Lance
   records per index and region the last generation that the index includes (`index_catchup`); a rebuilt index has no
   record, and is complete when it covers every fragment.
 * A tagged version, which is kept forever: see `BaseNeeds.tagged` and `flush.garbage.ssts`.

Versions that are neither recent nor tagged need no SST: each is complete by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

import lance

from memwal.flush.base.manifest import compacted_generations, indexed_generations
from memwal.flush.base.table import BaseTable
from memwal.flush.base.version_files import stored_versions, tagged_versions
from memwal.wal import Corrupt, ObjectStore

_LISTINGS = 3
"""Attempts to read a version before it is cleaned up; two in a row fail only if two clean-ups follow within
milliseconds.
"""

Generations = Mapping[UUID, int]


@dataclass(frozen=True)
class BaseNeeds:
    """Per region, generations that several versions and indexes of the base table hold; absent = none.

    Thread safety. Immutable.
    """

    committed: Generations
    """Held by the newest version."""
    opened: Generations
    """Held by the oldest version that a running read may have opened."""
    indexed: Mapping[str, Generations]
    """Covered by each lagging index, by its name."""
    tagged: tuple[Generations, ...]
    """Held by each tagged version."""

    def settled(self, region: UUID) -> int:
        """Return the highest committed generation of `region` that no running read and no index needs."""
        views = (self.committed, self.opened, *self.indexed.values())
        return min(view.get(region, 0) for view in views)


def base_needs(store: ObjectStore, base: BaseTable, since: float) -> BaseNeeds:
    """Return the needs of the table. `base`: its newest version, opened after the manifests were read.

    `since`: Unix seconds; reads that began later count as running. Lists the versions and the tags, and reads two
    objects. Raises Corrupt; StoreUnavailable, StoreRefused, OSError of storage.
    """
    return BaseNeeds(
        committed=base.committed,
        opened=held_at(store, since),
        indexed=_indexed(store, base),
        tagged=tuple(_tagged(store, base.dataset)),
    )


def _tagged(store: ObjectStore, dataset: lance.LanceDataset) -> Iterator[Generations]:
    """Yield the generations held by each tagged version.

    A tag created while its version was being deleted needs nothing.
    """
    for version in sorted(tagged_versions(dataset)):
        try:
            yield compacted_generations(store, version)
        except Corrupt:
            if version in _version_times(store):
                raise


def held_at(store: ObjectStore, since: float) -> Generations:
    """Return the generations held by the version that was newest at `since` (Unix seconds).

    If that version was deleted, use the oldest remaining one. Raises Corrupt; StoreUnavailable, StoreRefused.
    """
    for attempt in range(1, _LISTINGS + 1):
        ages = _version_times(store)
        old = [version for version, modified in ages.items() if modified <= since]
        # If all are younger, older ones were cleaned up, and with them the files of any read that holds them.
        version = max(old, default=min(ages))
        try:
            return compacted_generations(store, version)
        except Corrupt:
            if attempt == _LISTINGS or version in _version_times(store):
                raise
    raise AssertionError("unreachable")


def _version_times(store: ObjectStore) -> dict[int, float]:
    """Return when each version was written, by the storage's clock."""
    return {each.version: each.written for each in stored_versions(store)}


def _indexed(store: ObjectStore, base: BaseTable) -> dict[str, Generations]:
    details = base.dataset.mem_wal_index_details() or {}
    promised = {*(spec.name for spec in base.indexes), *details.get("maintained_indexes", ())}
    lagging = set(_lagging(base.dataset, promised))
    if not lagging:
        return {}
    recorded = indexed_generations(store, base.version)
    return {name: recorded.get(name, {}) for name in sorted(lagging)}


def _lagging(dataset: lance.LanceDataset, names: Iterable[str]) -> Iterable[str]:
    """Yield the indexes in `names` that leave a fragment uncovered; an index that is not built needs nothing."""
    wanted = set(names)
    fragments = {fragment.fragment_id for fragment in dataset.get_fragments()}
    for index in dataset.describe_indices():
        covered = {fragment for segment in index.segments for fragment in segment.fragment_ids}
        if index.name in wanted and not covered.issuperset(fragments):
            yield index.name
