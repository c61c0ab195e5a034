"""Delete files that no base-table version refers to, and small files left by killed puts and probes.

A commit writes its data files, deletion files, index files and its transaction first, then the version that refers to
them. A commit that crashed in between, or lost against another one, leaves files without a version. Lance lists them
(`explain_cleanup_old_versions`, keeping versions of every age), because only Lance knows the references of branches and
other tables. It lists a deletion file or a transaction only once it is older than the oldest version kept.

The files of a running commit look the same, so here, and nowhere else, age decides: `gc.orphan_age_min` must be longer
than any commit or index build. Lance's own clean-up has the same rule with 7 days, which is the default here too.

Three kinds of memwal's own files are treated the same: temporary files on a local disk, left by a process killed inside
a put; start-up probes; and rows staged by a crashed micro-batch of Spark. If a writer's temporary file was deleted
while the writer was suspended, its put raises an error. A micro-batch whose staged rows were deleted sends nothing, and
Spark replays it.

Deleting is one call per file, in any order; a crash in between and two concurrent collectors are harmless. Below
`_mem_wal` only the files above are touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import lance

from memwal.wal import Clock, ObjectInfo, ObjectStore
from memwal.wal.layout import PROBE_PREFIX, ROOT, STAGED_PREFIX

_EVERY_VERSION = timedelta(days=36_500)
"""Versions younger than this are kept, which is all of them."""
_FILES_MAX = 100_000
"""Files per collection; the next one takes the rest."""
_FOLDERS: Mapping[str, str] = {
    "data": "data/",
    "deletion": "_deletions/",
    "index": "_indices/",
    "transaction": "_transactions/",
}
"""Lance's kinds of files -> their directory below the table's root."""


@dataclass(frozen=True)
class OrphanGarbage:
    """The result of one collection of orphan files: deleted files, or files to delete with `dry_run`."""

    files: tuple[str, ...] = ()
    """Keys of the deleted files, ascending."""
    bytes: int = 0
    """Total size of these files."""
    too_young: int = 0
    """Unreferenced files below the minimum age; most belong to running commits."""
    kept: tuple[str, ...] = ()
    """Keys of the unreferenced files that were not deleted, ascending."""
    dry_run: bool = False


def collect_orphans(
    store: ObjectStore, dataset: lance.LanceDataset, clock: Clock, min_age: float, *, dry_run: bool = False
) -> OrphanGarbage:
    """Delete unreferenced files that are at least `min_age` seconds old; with `dry_run` only report them.

    `dataset`: the base table, at any version. Reads the manifest of every version. Thread safety. Any number of threads
    and processes. Raises StoreUnavailable, StoreRefused, OSError (some files may be deleted by then).
    """
    leftovers = [*store.describe(PROBE_PREFIX), *store.describe(STAGED_PREFIX), *store.leftovers(ROOT)]
    found = [*_unreferenced(store, dataset), *leftovers]
    old = [each for each in found if each.modified <= clock.now() - min_age]
    if not dry_run:
        for each in old:
            store.delete(each.key)
    return OrphanGarbage(
        files=tuple(sorted(each.key for each in old)),
        bytes=sum(each.size for each in old),
        too_young=len(found) - len(old),
        kept=tuple(sorted({each.key for each in found} - ({each.key for each in old} if not dry_run else set()))),
        dry_run=dry_run,
    )


def _unreferenced(store: ObjectStore, dataset: lance.LanceDataset) -> Iterator[ObjectInfo]:
    """Yield the unreferenced files of every age, with size and time from storage."""
    explained = dataset.explain_cleanup_old_versions(
        older_than=_EVERY_VERSION,
        delete_unverified=True,
        error_if_tagged_old_versions=False,
        include_files=True,
        max_files=_FILES_MAX,
    )
    keys = set()
    for each in explained.candidate_files:  # Lance names files by their path from the root of the storage
        folder = _FOLDERS.get(each.kind)
        if folder is not None and f"/{ROOT}" not in each.path:
            _, found, name = each.path.rpartition(f"/{folder}")
            keys |= {folder + name} if found else set()
    for folder in sorted({folder for folder in _FOLDERS.values() if any(key.startswith(folder) for key in keys)}):
        yield from (info for info in store.describe(folder) if info.key in keys)
