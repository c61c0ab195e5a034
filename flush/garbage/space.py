"""The bytes of a table on storage, by what they are for.

    newest   the files of the newest version of the base table
    older    further files of the base table: those that only older versions have
    ssts     SSTs, committed ones that a reader may still need among them
    log      WAL entries, region manifests, plans of commits and notes
    orphans  files of the base table that no version has, rows staged by Spark tasks, probes

Measured by one listing of the table and one manifest, so not for each scrape of metrics. Which files no version has is
known from the last collection of orphans (`orphans`), which reads every manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memwal.flush.base.table import BaseTable
from memwal.flush.base.version_files import VersionFiles, stored_bytes
from memwal.wal import ObjectStore
from memwal.wal.layout import ROOT, kind_of

KINDS = ("newest", "older", "ssts", "log", "orphans")


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes on storage by kind (`KINDS`), measured at `time`, unix seconds."""

    bytes: Mapping[str, int]
    time: float

    @property
    def total(self) -> int:
        """All bytes of the table."""
        return sum(self.bytes.values())

    @property
    def factor(self) -> float:
        """All bytes divided by those of the newest version; at least 1."""
        return self.total / max(1, self.bytes["newest"])


def measured(store: ObjectStore, newest: BaseTable, orphans: Iterable[str], now: float) -> Space:
    """Return the bytes of the table of `newest`, its newest version. `orphans`: keys of files that no version has.

    Raises: Corrupt, StoreUnavailable, StoreRefused.
    """
    files = VersionFiles(store)
    sizes = files.everything()
    kept = files.of(newest.version)
    without_version = {_entry(key) for key in orphans} - set(kept)
    found: Counter[str] = Counter({"newest": stored_bytes([kept])})
    for key in sizes.keys() - kept.keys():
        found["orphans" if key in without_version else "older"] += sizes[key]
    for each in store.describe(ROOT):
        found[_KINDS.get(kind_of(each.key), "log")] += each.size
    return Space({kind: found[kind] for kind in KINDS}, now)


_KINDS = {"sst": "ssts", "staged": "orphans", "other": "orphans"}


def _entry(key: str) -> str:
    """Return the key of `VersionFiles` for a file: that of its directory for files of index segments."""
    return "/".join(key.split("/")[:2])
