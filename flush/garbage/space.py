"""The bytes of a table on storage, by purpose.

    newest   the files of the newest version of the base table
    older    further files of the base table: those that only older versions have
    ssts     SSTs, including committed ones that a reader may still need
    log      WAL entries, region manifests, plans of commits and notes
    orphans  files of the base table without a version, rows staged by Spark tasks, probes

A measurement costs one listing of the table and one manifest, so it is not made for each scrape of metrics. The files
without a version are known from the last collection of orphans (`orphans`), which reads every manifest.
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
    """Bytes on storage by kind (`KINDS`), measured at `time`, Unix seconds."""

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
    """Return the bytes of the table of `newest`, its newest version. `orphans`: keys of files without a version.

    Raises: Corrupt, StoreUnavailable, StoreRefused.
    """
    files = VersionFiles(store)
    sizes = files.sizes
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
    """Return the key of `VersionFiles` for a file; for a file of an index segment, the key of its directory."""
    return "/".join(key.split("/")[:2])
