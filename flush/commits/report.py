"""The report of one commit, its totals, and the regions that it holds back.

An unreadable SST, a gap in the generations, a damaged plan, or a key with two rows in the base concerns one region,
which is held back. Its SSTs stay published, so readers see its rows as before, and every later commit tries it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

import pyarrow as pa

from memwal.flush.base.open import LanceCaches
from memwal.flush.base.swap import ConflictRetries
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.merge_passes import Written
from memwal.flush.commits.plan import RegionPlan
from memwal.flush.errors import FlushError
from memwal.wal import Clock, Ids, ObjectStore, WalError, WalOptions


@dataclass(frozen=True)
class CommitReport:
    """The result of one commit. All numbers except `version` are 0 if nothing was published.

    A row taken from an SST is counted as inserted, updated, skipped, or as a tombstone that deleted a row.
    """

    version: int
    """Base-table version afterwards, index catch-up included."""
    regions: dict[str, int]
    """Region id -> highest generation that this commit added."""
    rows_inserted: int
    rows_updated: int
    rows_deleted: int
    ssts: int
    seconds: float
    rows_skipped: int = 0
    """SST rows that a newer row of their key replaces, and tombstones of keys that the base does not hold."""
    rows_repaired: int = 0
    """Rows deleted because another program merged the same key during a commit, so that the key had two rows."""
    files_written: int = 0
    """Data files of the created versions, without index files."""
    bytes_written: int = 0
    """Bytes of these files."""
    versions: int = 0
    """Base-table versions created, index catch-up included."""


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
        """Add `plans`, whose SSTs hold `rows` rows and whose progress is now recorded in the base table."""
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


FAILURES = (WalError, FlushError, OSError, RuntimeError, ValueError)
"""Errors of storage, of memwal, and of Lance, whose panics are RuntimeErrors inside of `panics_as_errors`."""


@dataclass
class HeldBack:
    """What the last commit could not take. A process that commits repeatedly passes it from commit to commit.

    Thread safety. One commit at a time writes; any thread reads `regions`, which is replaced as a whole.
    """

    regions: Mapping[UUID, BaseException] = field(default_factory=dict)
    """The error that kept a region from being committed, or the error about a key that has two rows and is not
    written by an SST.
    """
    doubled: pa.Table | None = None
    """Keys that had two rows in the base; each commit looks them up until the duplicates are gone."""

    def raise_first(self) -> None:
        """Raise the error of the first region, if any."""
        for error in self.regions.values():
            raise error


@dataclass
class CommitRun:
    """What all steps of one commit, or of one load, use.

    Thread safety. One thread only.
    """

    uri: str
    storage_options: dict[str, str]
    store: ObjectStore
    clock: Clock
    ids: Ids | None
    conflict_retries: ConflictRetries
    caches: LanceCaches
    options: WalOptions | None
    totals: CommitTotals = field(default_factory=CommitTotals)

    def opened(self) -> BaseTable:
        """Return the newest view of the base table."""
        return BaseTable.open(self.uri, self.storage_options, caches=self.caches)
