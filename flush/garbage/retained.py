"""What the base table still asks of SSTs whose rows it holds: the lower bound of what a collection may delete.

An SST that is committed and pruned is in no newest manifest, but somebody may look at it all the same:

 * A reader under way. It took a region manifest, then the base version that was newest at that moment; what that
   version had not committed it reads from SSTs. A reader that began within the grace time holds the version that was
   newest when the grace time began, or a newer one. A version is superseded by the next one, so its own age says
   nothing: the one that was newest then may be a year old.
 * An index that lags. Lance's readers ask an SST's own index for rows that the base's index does not cover yet. Lance
   records per index and region up to which generation it was extended (`index_catchup`); an index that was built anew
   has no record, and is complete when every fragment is in it.
 * A tagged version, which stays for ever: see `BaseNeeds.tagged` and `flush.garbage.ssts`.

Versions that are neither recent nor tagged ask for nothing: each is whole without any SST.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

import lance

from memwal.flush.base.manifest import compacted_generations, indexed_generations, manifest_version
from memwal.flush.base.table import BaseTable
from memwal.wal import Corrupt, ObjectStore

_LISTINGS = 3
"""Tries to read a version before it is cleaned up, or the tags before one is deleted; more than one in a row takes two
cleanings within milliseconds."""

Generations = Mapping[UUID, int]


@dataclass(frozen=True)
class BaseNeeds:
    """Per region, generations that the base table holds, from several points of view; absent = none.

    Thread safety. Immutable.
    """

    committed: Generations
    """By the newest version."""
    opened: Generations
    """By the oldest version that a reader under way may have opened."""
    indexed: Mapping[str, Generations]
    """By each index that lags, by its name."""
    tagged: tuple[Generations, ...]
    """By each tagged version."""

    def settled(self, region: UUID) -> int:
        """The highest generation of `region` that is committed, and that no reader under way and no index needs."""
        views = (self.committed, self.opened, *self.indexed.values())
        return min(view.get(region, 0) for view in views)


def base_needs(store: ObjectStore, base: BaseTable, since: float) -> BaseNeeds:
    """The needs of the table as `base`, its newest version, which was opened after the manifests were read.

    `since`: Unix seconds; readers that began later count as under way. Costs a listing of the versions and of the tags,
    and two objects. Raises Corrupt; StoreUnavailable, StoreRefused, OSError of storage.
    """
    return BaseNeeds(
        committed=base.committed,
        opened=_opened(store, since),
        indexed=_indexed(store, base),
        tagged=tuple(compacted_generations(store, version) for version in sorted(_tags(base.dataset))),
    )


def _tags(dataset: lance.LanceDataset) -> set[int]:
    """The tagged versions. Lance lists the tags and then reads each, and fails where one was deleted in between."""
    for attempt in range(1, _LISTINGS + 1):
        try:
            return {int(tag["version"]) for tag in dataset.tags.list().values() if tag.get("branch") is None}
        except (OSError, ValueError):
            if attempt == _LISTINGS:
                raise
    raise AssertionError("unreachable")


def _opened(store: ObjectStore, since: float) -> Generations:
    for attempt in range(1, _LISTINGS + 1):
        ages = _version_times(store)
        old = [version for version, modified in ages.items() if modified <= since]
        # Where all are younger, the older ones are cleaned up, and with them the files of whoever reads them.
        version = max(old, default=min(ages))
        try:
            return compacted_generations(store, version)
        except Corrupt:
            if attempt == _LISTINGS or version in _version_times(store):
                raise
    raise AssertionError("unreachable")


def _version_times(store: ObjectStore) -> dict[int, float]:
    """When each version was written, by the storage's clock."""
    found = {}
    for each in store.describe("_versions/"):
        if (version := manifest_version(each.key)) is not None:
            found[version] = each.modified
    return found


def _indexed(store: ObjectStore, base: BaseTable) -> dict[str, Generations]:
    details = base.dataset.mem_wal_index_details() or {}
    promised = {*(spec.name for spec in base.indexes), *details.get("maintained_indexes", ())}
    lagging = set(_lagging(base.dataset, promised))
    if not lagging:
        return {}
    recorded = indexed_generations(store, base.version)
    return {name: recorded.get(name, {}) for name in sorted(lagging)}


def _lagging(dataset: lance.LanceDataset, names: Iterable[str]) -> Iterable[str]:
    """Those of the indexes `names` that a fragment is in no segment of; one that is not built needs nothing."""
    wanted = set(names)
    fragments = {fragment.fragment_id for fragment in dataset.get_fragments()}
    for index in dataset.describe_indices():
        covered = {fragment for segment in index.segments for fragment in segment.fragment_ids}
        if index.name in wanted and not covered.issuperset(fragments):
            yield index.name
