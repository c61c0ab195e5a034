"""Delete SST directories that no reader or writer can need again.

A collection lists the directories (model: Commit!ListSsts), *then* reads the newest region manifest
(model: Commit!ReadManifest), *then* opens the base table and judges (model: Commit!Judge). It therefore sees SSTs that
are published, committed or pruned in between in that order, and keeps nothing for a wrong reason. Safety does not
depend on the order: every reason to delete below, once true, stays true.

The rules. Only the name, `{8 hex}_gen_{generation}`, decides, never the content:

 1. In the manifest: kept, for every reader.
 2. Not in the manifest, of the current generation or a later one: a flush may be running. Kept, however old: the flush
    may be suspended. Rule 3 applies once its generation is published under another name. The directory is also deleted
    if the region was claimed after the directory was seen: its writer is older than the claim, and the manifest rejects
    its publishing edit (`SstCollector.note_older_than_claim`). Otherwise a region whose flush always kills its process
    would fill the disk with leftovers, and never publish.
 3. Not in the manifest, but another directory of the same generation is, and that generation is not committed: left by
    a flush that crashed or was rejected. It can no longer be published: the edit requires the current generation, which
    is higher by now, and the manifest version of a late edit already exists. Deleted.
    No other directory of the generation in the manifest: no protocol causes this. The base table was put back to an
    older version, and the directory may be the only copy of its rows. Kept and reported.
 4. Committed, so pruned, or a double of a committed one. Deleted when no running read, no lagging index and no tagged
    version needs it (`BaseNeeds`). A tagged version needs what was published while it was the newest; this
    equals what had been published when the first generation above it was pruned. The old region manifests have it, and
    it never grows. A time limit alone would not be safe, and "everything above a tag" would be all later SSTs.
 5. Garbage waits for a minimum age, counted from its newest object. Time only delays; it decides nothing.

Deleting one directory, in steps (model: Commit!DeleteSst):

 1. Delete the dataset's manifests in `_versions/`, oldest version first. From the first deletion on, the directory is
    either a whole dataset of its newest version or no dataset. With the newest first, an SST of Lance would fall back
    to the version before its deletion vector, with rows that it masks; with data first, it would open and then fail.
 2. Delete everything else, in any order; on a local disk temporary files of killed puts, then the empty directories.

A crash in between leaves a directory of the same name, which the next collection judges the same. Two concurrent
collectors may delete the same object, which is not an error. A collector owns nothing and fences no writer.

Old region manifests and commit plans (`flush.commits.plan`) are slots that are taken once: a suspended writer or
committer may still aim at one, and would find it free after a deletion. Their collectors explain why that is safe:
`wal.manifest_garbage`, `flush.garbage.plans`. Rule 4 reads old manifests; `needed_for_tags` selects those that it
needs.

What is needed beside the base table (`BaseNeeds`). An SST that is committed and pruned is in no newest manifest, but
three kinds of readers may still use it:

 * A running read. It took a region manifest, then the base version that was newest at that moment, and reads
   generations that this version had not committed from SSTs. A read that began within the grace time holds the version
   that was newest when the grace time began, or a newer one. A version is newest until the next one, so its own age
   does not matter: the newest one at that moment may be a year old.
 * A lagging index. Lance's readers search an SST's own index for rows that the base's index does not cover yet. Lance
   records per index and region the last generation that the index includes (`index_catchup`); a rebuilt index has no
   record, and is complete when it covers every fragment.
 * A tagged version, which is kept forever: see rule 4.

Versions that are neither recent nor tagged need no SST: each is complete by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from uuid import UUID

import lance

from memwal.flush.base.existing_indexes import is_behind
from memwal.flush.base.manifest import indexed_generations, read_progress
from memwal.flush.base.table import BaseTable
from memwal.flush.base.version_files import stored_versions, tagged_versions
from memwal.wal import Clock, Corrupt, ManifestStore, ObjectInfo, ObjectStore, RegionManifest, WalOptions
from memwal.wal.layout import parse_sst_dir, region_prefix, sst_key
from memwal.wal.parallel_map import each

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
            yield read_progress(store, version).committed
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
            return read_progress(store, version).committed
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
    # An index that is not built needs nothing.
    built = [index for index in base.dataset.describe_indices() if index.name in promised]
    lagging = sorted(index.name for index in built if is_behind(base.dataset, index))
    recorded = indexed_generations(store, base.version) if lagging else {}
    return {name: recorded.get(name, {}) for name in lagging}


_VERSIONS = "/_versions/"


class Verdict(Enum):
    """State of a directory by the rules of the module docstring."""

    LISTED = "listed"
    UNPUBLISHED = "unpublished"
    OUTLIVED = "outlived"
    ABANDONED = "abandoned"
    UNACCOUNTED = "unaccounted"
    NEEDED = "needed"
    COMMITTED = "committed"


_GARBAGE = (Verdict.COMMITTED, Verdict.ABANDONED, Verdict.OUTLIVED)


@dataclass(frozen=True)
class SstGarbage:
    """The result of one collection of a region's SST directories; with `dry_run`, what would be deleted."""

    region: UUID
    committed: int = 0
    """Deleted directories whose rows are in the base table."""
    abandoned: int = 0
    """Deleted directories that were never published."""
    bytes: int = 0
    """Total size of what was deleted."""
    abandoned_bytes: int = 0
    """Size of the abandoned directories in `bytes`."""
    listed: int = 0
    """Directories kept because the newest manifest lists them."""
    unpublished: int = 0
    """Directories kept because a flush may still publish them."""
    needed: int = 0
    """Committed directories kept for a running read, a lagging index, or a tagged version."""
    unaccounted: int = 0
    """Directories kept because their generation is neither published nor committed; memwal itself leaves none."""
    too_young: int = 0
    """Garbage below the minimum age."""
    dry_run: bool = False


@dataclass(frozen=True)
class RegionListing:
    """A listing of a region: its SST directories, and its newest manifest, read after the directories were listed."""

    names: tuple[str, ...]
    manifest: RegionManifest | None


class SstCollector:
    """Collects the SST directories of one region; may be called repeatedly.

    Thread safety. One thread at a time; any number of collectors, in any number of processes.
    Invariants. See the module docstring. The needs of a tagged version are looked up once.
    """

    def __init__(
        self,
        store: ObjectStore,
        region_id: UUID,
        clock: Clock,
        workers: int = 8,
        options: WalOptions | None = None,
    ) -> None:
        """`workers`: objects deleted concurrently; 1 starts no thread."""
        self._store = store
        self._region_id = region_id
        self._clock = clock
        self._workers = workers
        self._manifests = ManifestStore(store, region_id, clock=clock, options=options)
        self._outlived: dict[str, int] = {}
        self._published_under: dict[int, int] = {}

    def names(self) -> tuple[str, ...]:
        """Return the region's SST directories, published or not. Raises StoreUnavailable, StoreRefused."""
        children = self._store.children(region_prefix(self._region_id))
        return tuple(name for name in children if parse_sst_dir(name) is not None)

    def note_older_than_claim(self, names: Iterable[str], epoch: int) -> None:
        """Remember that the directories `names` existed before writer epoch `epoch` was claimed."""
        self._outlived |= dict.fromkeys(names, epoch)

    def list_region(self) -> RegionListing:
        """List the directories, then read the newest manifest; open the base table after this.

        Raises Corrupt, StoreUnavailable, StoreRefused.
        """
        return RegionListing(self.names(), self._manifests.latest())

    def collect(self, listing: RegionListing, needs: BaseNeeds, min_age: float, *, dry_run: bool = False) -> SstGarbage:
        """Delete garbage that is at least `min_age` seconds old; with `dry_run` only report it.

        `needs`: of a base version opened after `listing` was taken. Raises StoreUnavailable, StoreRefused (some
        directories may be deleted by then; collect again); Corrupt if an old manifest cannot be decoded.
        """
        if (newest := listing.manifest) is None:
            verdicts = dict.fromkeys(listing.names, Verdict.UNPUBLISHED)
        else:
            verdicts = {name: self.verdict(name, newest, needs) for name in listing.names}
        counts = Counter(verdicts.values())
        young: Counter[Verdict] = Counter()
        freed: Counter[Verdict] = Counter()
        for name in (name for name, verdict in verdicts.items() if verdict in _GARBAGE):
            objects = self._store.describe(sst_key(self._region_id, name) + "/")
            if max((info.modified for info in objects), default=0.0) > self._clock.now() - min_age:
                young[verdicts[name]] += 1
                continue
            freed[verdicts[name]] += sum(info.size for info in objects)
            if not dry_run:
                self._remove(name, objects)
        counts -= young
        return SstGarbage(
            region=self._region_id,
            committed=counts[Verdict.COMMITTED],
            abandoned=counts[Verdict.ABANDONED] + counts[Verdict.OUTLIVED],
            bytes=freed.total(),
            abandoned_bytes=freed.total() - freed[Verdict.COMMITTED],
            listed=counts[Verdict.LISTED],
            unpublished=counts[Verdict.UNPUBLISHED],
            needed=counts[Verdict.NEEDED],
            unaccounted=counts[Verdict.UNACCOUNTED],
            too_young=young.total(),
            dry_run=dry_run,
        )

    # ---- judging -------------------------------------------------------------------------------------------------

    def verdict(self, name: str, manifest: RegionManifest, needs: BaseNeeds) -> Verdict:
        """Return the verdict on a directory by rules 1 to 4."""
        parsed = parse_sst_dir(name)
        assert parsed is not None
        generation = parsed.generation
        if any(sst.path == name for sst in manifest.ssts):
            return Verdict.LISTED
        if generation >= manifest.current_generation:
            outlived = self._outlived.get(name, manifest.writer_epoch + 1) <= manifest.writer_epoch
            return Verdict.OUTLIVED if outlived else Verdict.UNPUBLISHED
        if generation > needs.committed.get(self._region_id, 0):
            double = any(sst.generation == generation for sst in manifest.ssts)
            return Verdict.ABANDONED if double else Verdict.UNACCOUNTED
        tagged = (view.get(self._region_id, 0) for view in needs.tagged)
        needed = generation > needs.settled(self._region_id) or any(
            below < generation <= self._published_while(below, manifest) for below in tagged
        )
        return Verdict.NEEDED if needed else Verdict.COMMITTED

    def _published_while(self, committed: int, manifest: RegionManifest) -> int:
        """Return an upper bound of the highest generation published while `committed` was the highest committed one.

        By bisection of the manifest versions up to `manifest`: the first version without generation `committed` + 1 was
        written after the commit of that generation.
        """
        if committed not in self._published_under:
            low, high, first = 1, manifest.version, manifest
            while low < high:
                middle = (low + high) // 2
                version = self._manifests.read(middle)
                if version is None:  # pruned, so older than any possible answer: see `needed_for_tags`
                    low = middle + 1
                elif _dropped(version, committed + 1):
                    high, first = middle, version
                else:
                    low = middle + 1
            if not _dropped(first, committed + 1):
                return first.current_generation - 1
            self._published_under[committed] = first.current_generation - 1
        return self._published_under[committed]

    # ---- deleting ------------------------------------------------------------------------------------------------

    def _remove(self, name: str, objects: Sequence[ObjectInfo]) -> None:
        keys = [info.key for info in objects]
        manifests = [key for key in keys if _VERSIONS in key]
        for key in sorted(manifests, key=_age_of_version):
            self._store.delete(key)
        list(each(self._store.delete, [key for key in keys if _VERSIONS not in key], self._workers))
        self._store.remove_leftovers(f"{sst_key(self._region_id, name)}/")


def needed_for_tags(settled: int) -> Callable[[RegionManifest], bool]:
    """Return a predicate for manifest versions that rule 4 may read, if every retained base version holds `settled`.

    These are the versions from the first one on that dropped the generation above `settled`. Anything published earlier
    is below every answer.
    """
    return lambda manifest: _dropped(manifest, settled + 1)


def _dropped(manifest: RegionManifest, generation: int) -> bool:
    """Return whether `generation` was published and is no longer listed."""
    lowest = manifest.ssts[0].generation if manifest.ssts else manifest.current_generation
    return lowest > generation


def _age_of_version(key: str) -> tuple[int, int]:
    """Return the sort key of an object in `_versions/`: hints first, then manifests from oldest to newest.

    Lance names manifests by 20 digits that count down, so that the newest lists first; older releases counted up.
    """
    number = key.rpartition("/")[2].partition(".")[0]
    if not number.isdigit():
        return 0, 0
    return 1, -int(number) if len(number) == len(str(2**64)) else int(number)
