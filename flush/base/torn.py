"""Goes back from versions of the base table that a power cut left torn on a local disk.

Lance does not fsync. Between the moment when a version appears and the sync that follows it (`flush.base.fsync`), a
power cut may leave its manifest, or a file that it added, empty, cut off or missing; Lance then cannot open the table.
Nothing depends on such a version: SSTs are pruned, and loads and resizes are acknowledged, after the sync.

 1. Find the synced version: the first one that has committed every generation that the manifests of the regions list no
    more. It was synced before these were pruned. Looks back `RECENT` versions, as many as a sync covers.
 2. Find the newest version that is whole, this one or a later one: its manifest and transaction can be read, and every
    file that the synced version lacks is there, not shorter than recorded, and ends as Lance's files do.
 3. Rename the manifests of the newer versions, newest first, to `….manifest.torn`, and sync. *Crash here: the next
    opening goes on.* The next commit commits the SSTs again.

Without a version of 1 and 2, or where memwal has not set that version up, nothing is changed: then the table is another
program's, or a file was damaged in another way. All versions may go only if the table has no data file, and no region
was ever claimed: its creation was cut off.

A version that a live process commits at this moment is never torn: its files are written before its manifest gets its
name. One that a live process deletes at this moment may look torn; so the versions are listed again before 3.

Not found: blocks inside of a file of the right size that read as zeros, which POSIX allows and file systems avoid that
order data before sizes (ext4 by default).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import lance
import pyarrow as pa
from lance.file import LanceFileReader

from memwal.flush.base.existing_indexes import has_files
from memwal.flush.base.fsync import RECENT
from memwal.flush.base.lost_setup import has_claims
from memwal.flush.base.manifest import manifest_names
from memwal.flush.base.open import open_dataset
from memwal.flush.base.setup import REGIONS
from memwal.flush.base.state import Fragment, TableState, read_state, versions
from memwal.wal import Corrupt, ManifestStore, ObjectStore, regions
from memwal.wal.panics import panics_as_errors
from memwal.wal.store.local import sync_directory

TORN = ".torn"
"""Last letters of the names of manifests that were set aside."""
_HINT = "_versions/latest_version_hint.json"
_LEGACY_END = struct.pack("<HH", 0, 2) + b"LANC"
"""Major and minor version and the magic bytes, with which a data file ends."""
_LOG = logging.getLogger("memwal.opening")


def set_torn_versions_aside(store: ObjectStore, uri: str) -> list[int]:
    """Do that for the table at `uri`, the root of `store`; return the versions that were set aside, newest first.

    Thread safety. Any number of threads and processes. Raises StoreUnavailable, StoreRefused, OSError of storage.
    """
    torn = [] if store.remote else _torn(store, uri)
    if not torn:
        return []
    for version in torn:
        for name in manifest_names(version):
            path = Path(store.url(f"_versions/{name}"))
            if path.exists():
                path.rename(f"{path}{TORN}")
    Path(store.url(_HINT)).unlink(missing_ok=True)
    sync_directory(Path(store.url("_versions")))
    numbers = ", ".join(map(str, reversed(torn)))
    _LOG.warning("%s: a power cut left version %s torn; set aside, no acknowledged row is lost", uri, numbers)
    return torn


def _torn(store: ObjectStore, uri: str) -> list[int]:
    """Steps 1 and 2: the versions to set aside, newest first."""
    listed = versions(store)
    newest = listed[: -RECENT - 2 : -1]
    states = dict(_since_synced(store, newest))
    synced = next((state for state in reversed(states.values()) if state is not None), None)
    for place, state in enumerate(states.values()):
        if state is not None and synced is not None and _is_whole(store, uri, state, synced):
            is_safe = REGIONS.decode() in state.settings
            return newest[:place] if place and is_safe and versions(store) == listed else []
    vacant = len(newest) <= RECENT and not any(store.list("data/")) and not has_claims(store)
    return newest if vacant and versions(store) == listed else []


def _since_synced(store: ObjectStore, newest: Sequence[int]) -> Iterator[tuple[int, TableState | None]]:
    """Yield the versions `newest`, in descending order, down to the synced one; None where one cannot be read."""
    pruned = dict(_pruned(store)) if newest else {}
    for version in newest:
        try:
            state = read_state(store, version)
        except Corrupt:
            yield version, None
            continue
        if any(state.committed.get(region, 0) < generation for region, generation in pruned.items()):
            return
        yield version, state


def _pruned(store: ObjectStore) -> Iterator[tuple[UUID, int]]:
    """Yield the highest generation of each region that its manifest lists no more, nor any below it."""
    for region in regions(store):
        with suppress(Corrupt):  # `verify` reports it
            manifest = ManifestStore(store, region).latest()
            if manifest is not None:
                yield region, min((sst.generation for sst in manifest.ssts), default=manifest.current_generation) - 1


def _is_whole(store: ObjectStore, uri: str, state: TableState, synced: TableState) -> bool:
    """Step 2 for one version."""
    if state.transaction is not None and not store.get(state.transaction_key):
        return False
    if (dataset := open_dataset(store, uri, state.version)) is None:
        return False
    if state.version == synced.version:
        return True
    known = {uuid for segments in synced.indexes.values() for uuid in segments}
    files = all(_has_files(store, fragment, synced.fragments.get(id)) for id, fragment in state.fragments.items())
    return files and all(_index_files(dataset, store, known))


def _has_files(store: ObjectStore, fragment: Fragment, before: Fragment | None) -> bool:
    for key, recorded in fragment.files.items():
        if before is None or key not in before.files:
            path = Path(store.url(key))
            if not path.exists() or path.stat().st_size < recorded or not _has_footer(path):
                return False
    deletions = fragment.deletion_file
    if deletions is None or (before is not None and before.deletion_file == deletions):
        return True
    data = store.get(deletions)
    return bool(data) and (deletions.endswith(".bin") or _deleted_rows(data) == fragment.deleted)


def _has_footer(path: Path) -> bool:
    """Return whether a data file ends as Lance's do, and Lance can read the descriptions of its pages.

    pylance's reader takes the present format only; files of the legacy format (0.2) have the same last bytes.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(_LEGACY_END)))
        end = file.read()
    if end == _LEGACY_END:
        return True
    try:
        with panics_as_errors:
            LanceFileReader(str(path))
    except (OSError, ValueError, RuntimeError):
        return False
    return True


def _deleted_rows(data: bytes | None) -> int | None:
    """Return the number of rows in a deletion file; None where it cannot be read."""
    try:
        return int(pa.ipc.open_file(data).read_all().num_rows)
    except (pa.ArrowException, ValueError, OSError):
        return None


def _index_files(dataset: lance.LanceDataset, store: ObjectStore, known: set[UUID]) -> Iterator[bool]:
    """Yield whether the files of each index segment have at least the recorded size, without the segments `known`."""
    for index in dataset.describe_indices():
        for segment in index.segments:
            uuid = str(segment.uuid)
            if index.name.startswith("__lance_") or segment.base_id is not None or UUID(uuid) in known:
                continue
            if has_files(segment):
                sizes = [info.size for info in store.describe(f"_indices/{uuid}/")]
                yield bool(sizes) and sum(sizes) >= (segment.size_bytes or 0)
