"""The report of one commit, and the sums it is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memwal.flush.commits.merge_passes import Written
from memwal.flush.commits.plan import RegionPlan


@dataclass(frozen=True)
class CommitReport:
    """What one commit did. All numbers but `version` are 0 where nothing was published.

    Rows taken from SSTs are inserted, updated, skipped, or tombstones that deleted a row.
    """

    version: int
    """Base-table version afterwards, index catch-up included."""
    regions: dict[str, int]
    """Region id -> highest generation this commit added."""
    rows_inserted: int
    rows_updated: int
    rows_deleted: int
    ssts: int
    seconds: float
    rows_skipped: int = 0
    """Rows of SSTs that a newer row of their key replaces, and tombstones of keys that the base does not hold."""
    rows_repaired: int = 0
    """Rows deleted because another program merged the same key while a commit ran, so that the key stood twice."""
    files_written: int = 0
    """Data files of the versions made; index files are not counted."""
    bytes_written: int = 0
    """Bytes of these files."""
    versions: int = 0
    """Base-table versions made, index catch-up included."""


@dataclass
class CommitTotals:
    """Sums over the rounds of one commit. Thread safety. One thread only."""

    regions: dict[str, int] = field(default_factory=dict)
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    taken: int = 0
    """Rows read from SSTs whose generations are committed."""
    repaired: int = 0
    ssts: int = 0
    files: int = 0
    bytes: int = 0
    versions: int = 0

    def wrote(self, pass_: Written) -> None:
        """Add what one pass wrote to the base table."""
        self.inserted += pass_.inserted
        self.updated += pass_.updated
        self.deleted += pass_.deleted
        self.files += pass_.files
        self.bytes += pass_.bytes
        self.versions += 1

    def committed(self, plans: Iterable[RegionPlan], rows: int) -> None:
        """Add `plans`, whose SSTs hold `rows` rows and whose progress is in the base table now."""
        for plan in plans:
            self.regions[str(plan.region)] = plan.last
            self.ssts += len(plan.ssts)
        self.taken += rows

    def report(self, version: int, seconds: float) -> CommitReport:
        """Return the report of the whole commit."""
        return CommitReport(
            version=version,
            regions=self.regions,
            rows_inserted=self.inserted,
            rows_updated=self.updated,
            rows_deleted=self.deleted,
            ssts=self.ssts,
            seconds=seconds,
            rows_skipped=max(0, self.taken - self.inserted - self.updated - self.deleted),
            rows_repaired=self.repaired,
            files_written=self.files,
            bytes_written=self.bytes,
            versions=self.versions,
        )
