"""Collect garbage for `memwal gc` and, at intervals, for an open table: delete objects that no reader, replay or fence
needs.

The deciding modules document what stays and why: WAL entries in `wal.garbage`, old region manifests in
`wal.manifest_garbage`, SST directories in `flush.garbage.ssts`, commit plans in `flush.garbage.plans`, base table files
that no version refers to in `flush.garbage.orphans`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from rich.filesize import decimal

from memwal import flush, wal
from memwal.flush.garbage.ssts import RegionListing
from memwal.ingest import tracing
from memwal.ingest.settings.sections import GcSettings
from memwal.wal import ManifestGarbage

_MANIFESTS_EVERY = 3600.0
"""Maximum seconds between two searches for old manifests of an open table; each search lists all kept manifests.
Shorter if manifests are kept for a shorter time.
"""
_ORPHANS_EVERY = 86_400.0
"""Seconds between two searches for orphan files of an open table: each reads the manifest of every version, and deletes
only files that are a week old.
"""


_SPACE_EVERY = 3600.0
"""Seconds between two measurements of the bytes on storage by an open table: each lists every file."""


@dataclass(frozen=True, slots=True)
class Ages:
    """The minimum age of garbage when it is deleted, in seconds. See the section [gc]."""

    wal: float
    sst: float
    orphan: float
    manifest: float = 86_400.0
    changes: float = 0.0

    @staticmethod
    def of(settings: GcSettings) -> Ages:
        """Return the ages of the section [gc]."""
        return Ages(
            settings.wal_age_min,
            settings.sst_age_min,
            settings.orphan_age_min,
            settings.manifest_age_min,
            settings.changes_age_min,
        )


@dataclass(frozen=True, slots=True)
class RegionGarbage:
    """The garbage that one collection found in a region."""

    region: UUID
    wal: wal.WalGarbage
    ssts: flush.SstGarbage
    plans: flush.PlanGarbage
    manifests: ManifestGarbage
    """Empty if the collection did not search for them."""

    @property
    def bytes(self) -> int:
        """Size of everything deleted."""
        return self.wal.bytes + self.ssts.bytes + self.plans.bytes + self.manifests.bytes


@dataclass(frozen=True, slots=True)
class TableGarbage:
    """The garbage that one collection of a table found, and deleted unless it was a dry run."""

    regions: tuple[RegionGarbage, ...]
    orphans: flush.OrphanGarbage
    """Empty if the collection did not search for them."""
    space: flush.Space | None = None
    """The bytes on storage after the collection; None if they were not measured."""
    dry_run: bool = False

    @property
    def entries(self) -> int:
        """Number of WAL entries deleted."""
        return sum(each.wal.entries for each in self.regions)

    @property
    def committed(self) -> int:
        """Number of committed SSTs deleted."""
        return sum(each.ssts.committed for each in self.regions)

    @property
    def abandoned(self) -> int:
        """Number of SST directories deleted that were never published."""
        return sum(each.ssts.abandoned for each in self.regions)

    @property
    def manifests(self) -> int:
        """Number of old manifest versions deleted."""
        return sum(each.manifests.versions for each in self.regions)

    @property
    def bytes(self) -> int:
        """Size of everything deleted."""
        return sum(each.bytes for each in self.regions) + self.orphans.bytes

    @property
    def unreadable(self) -> int:
        """Number of WAL entries that were kept because they cannot be read."""
        return sum(each.wal.unreadable for each in self.regions)

    @property
    def unaccounted(self) -> int:
        """Number of SST directories that were kept because no protocol explains them."""
        return sum(each.ssts.unaccounted for each in self.regions)

    def summary(self) -> str:
        """Return the numbers in one line."""
        plans = sum(each.plans.plans for each in self.regions)
        counts = (
            (self.entries, "WAL entries", "WAL entry"),
            (self.committed, "SSTs", "SST"),
            (self.abandoned, "abandoned SSTs", "abandoned SST"),
            (len(self.orphans.files), "orphan files", "orphan file"),
            *([(plans, "commit plans", "commit plan")] if plans else []),
            *([(self.manifests, "old manifests", "old manifest")] if self.manifests else []),
        )
        said = ", ".join(f"{count:,} {one if count == 1 else many}" for count, many, one in counts)
        return f"{'would delete' if self.dry_run else 'deleted'} {said}: {decimal(self.bytes)}"


class TableCollector:
    """Collect the garbage of a table on each call.

    Thread safety. One thread at a time; any number of collectors, in any number of processes.
    """

    def __init__(
        self,
        store: wal.ObjectStore,
        codec: wal.EntryCodec,
        clock: wal.Clock,
        regions: Iterable[UUID],
        options: wal.WalOptions | None = None,
    ) -> None:
        self._store, self._codec, self._clock, self._options = store, codec, clock, options
        self._wals: dict[UUID, wal.WalCollector] = {}
        self._ssts: dict[UUID, flush.SstCollector] = {}
        self._manifests: dict[UUID, wal.ManifestCollector] = {}
        self._manifests_due: dict[UUID, float] = {}
        self.know(regions)
        self._plans = flush.PlanCollector(store)
        self._orphans_due = self._space_due = clock.monotonic()
        self._kept_orphans: tuple[str, ...] = ()

    def names(self, region: UUID) -> tuple[str, ...]:
        """Return the SST directories of `region`. Raises: wal errors."""
        return self._ssts[region].names()

    def note_older_than_claim(self, region: UUID, names: Iterable[str], epoch: int) -> None:
        """Record that the SST directories `names` are older than the claim of `region` with the epoch `epoch`."""
        self._ssts[region].note_older_than_claim(names, epoch)

    def collect(
        self,
        base: flush.BaseTable,
        ages: Ages,
        *,
        dry_run: bool = False,
        plans_min: int = 1,
        regions: Iterable[UUID] | None = None,
        orphans: bool = True,
    ) -> TableGarbage:
        """Delete objects that are not needed; with `dry_run` only return them. Raises: wal and flush errors, OSError.

        `base`: any version of the table; the newest is opened after the regions are listed. `regions`: None for all.
        `plans_min`: minimum number of a region's commit plans for comparing them with every version of the base table.
        `orphans`: whether to search for orphan files of the base table, and to measure the bytes on storage.
        """
        looked_at = list(self._ssts if regions is None else regions)
        with tracing.span("memwal.table.collect", dry_run=dry_run) if tracing.on else tracing.OFF as span:
            self.know(looked_at)
            listings = {region: self._ssts[region].list_region() for region in looked_at}
            newest, now = base.latest(), self._clock.now()
            needs = flush.base_needs(self._store, newest, now - ages.sst)
            held = flush.held_at(self._store, now - ages.changes) if ages.changes else newest.committed
            found = []
            for region, listing in listings.items():
                first, above = _first_needed(region, listing, held, ages), self._kept_above(region, listing, held)
                entries = self._wals[region].collect(ages.wal, dry_run=dry_run, most=above)
                ssts = self._ssts[region].collect(listing, needs, ages.sst, dry_run=dry_run)
                plans = self._plans.collect(region, at_least=plans_min, dry_run=dry_run)
                manifests = self._old_manifests(region, ages.manifest, first, dry_run=dry_run)
                found.append(RegionGarbage(region, entries, ssts, plans, manifests))
            files, space = self._files(newest, ages.orphan, dry_run=dry_run, due=orphans)
            garbage = TableGarbage(tuple(found), files, space, dry_run)
            tracing.note(span, regions=len(looked_at), bytes=garbage.bytes)
            return garbage

    def _kept_above(self, region: UUID, listing: RegionListing, held: Mapping[UUID, int]) -> int:
        """Return the WAL position after which all entries are kept.

        These are the entries of rows that the base table lacks, because a commit is the first to read every SST
        completely, and the entries for readers of changes. `held`: per region the generation that the base table holds,
        or held `changes_age_min` ago. Every change since then is above that generation in the log; the base version
        that begins with this generation has the rows stored before.
        """
        manifest, generation = listing.manifest, held.get(region, 0)
        if manifest is None:
            return 0
        if manifest.current_generation <= generation + 1:
            return manifest.replay_after
        kept = wal.ManifestHistory(self._store, region, self._clock)
        first = kept.first(lambda manifest: manifest.current_generation > generation)
        return 0 if first is None else first.replay_after

    def _old_manifests(self, region: UUID, min_age: float, first: int | None, *, dry_run: bool) -> wal.ManifestGarbage:
        if self._clock.monotonic() < self._manifests_due.get(region, float("inf")):
            return wal.ManifestGarbage(region, dry_run=dry_run)
        for_tags = flush.needed_for_tags(self._plans.settled(region))

        def needed(manifest: wal.RegionManifest) -> bool:
            return for_tags(manifest) or (first is not None and manifest.current_generation >= first)

        found = self._manifests[region].collect(needed, min_age, dry_run=dry_run)
        self._manifests_due[region] = self._clock.monotonic() + min(min_age, _MANIFESTS_EVERY)
        return found

    def know(self, regions: Iterable[UUID]) -> None:
        """Prepare to collect `regions`."""
        for region in regions:
            if region not in self._wals:
                self._wals[region] = wal.WalCollector(
                    self._store, region, self._codec, self._clock, options=self._options
                )
                self._ssts[region] = flush.SstCollector(self._store, region, self._clock, options=self._options)
                # Lance's own writer, which may own a region of the other format, does not follow the rule of
                # wal.manifest_garbage.
                if self._codec.suffix == "lance":
                    self._manifests[region] = wal.ManifestCollector(self._store, region, self._clock)
                    self._manifests_due[region] = self._clock.monotonic()

    def _files(
        self, base: flush.BaseTable, min_age: float, *, dry_run: bool, due: bool
    ) -> tuple[flush.OrphanGarbage, flush.Space | None]:
        """Collect orphan files of the table, and measure the bytes on storage; if `due`, each at its interval."""
        found, space = flush.OrphanGarbage(dry_run=dry_run), None
        if due and self._clock.monotonic() >= self._orphans_due:
            found = flush.collect_orphans(self._store, base.dataset, self._clock, min_age, dry_run=dry_run)
            self._orphans_due = self._clock.monotonic() + _ORPHANS_EVERY
            self._kept_orphans = found.kept
        if due and self._clock.monotonic() >= self._space_due:
            space = flush.measured(self._store, base.latest(), self._kept_orphans, self._clock.now())
            self._space_due = self._clock.monotonic() + _SPACE_EVERY
        return found, space


def _first_needed(region: UUID, listing: RegionListing, held: Mapping[UUID, int], ages: Ages) -> int | None:
    """Return the lowest current generation of the manifests to keep, which show where the previous one ends in the log.

    Returns None if nothing above `held` is published and no changes are kept.
    """
    first = held.get(region, 0) + 1
    published = listing.manifest is not None and listing.manifest.current_generation > first
    return first if published or ages.changes else None
