"""Set aside versions of the base table that a power cut left torn on a local disk.

Lance does not fsync. Between the creation of a version and the sync that follows it (`flush.base.fsync`), a power cut
may leave its manifest, or a file that it added, empty, truncated or missing; Lance then cannot open the table. Nothing
depends on an unsynced version: SSTs are pruned, and loads, resizes and rows in new columns are acknowledged, after the
sync, which records the version's number.

When a process opens the table to write, under the table's lock:

 1. Examine the versions above the recorded one, newest first, until one is whole. The recorded version and earlier ones
    are relied upon and not examined: a fault in them is damage, which only a backup repairs.
 2. A version is torn if its manifest or its transaction cannot be parsed, or if a file that the recorded version lacks
    is missing, shorter than recorded, ends without the last bytes of its format, or does not hold the recorded number
    of deletions. Any other failure, such as a read error or a manifest of a later Lance, proves nothing, and the
    version counts as whole.
 3. Below the whole version, only versions whose manifest or transaction cannot be parsed are set aside: no reader needs
    them, but a collection reads every manifest and would fail forever.
 4. Rename the manifests of the torn versions, newest first, to `….manifest.torn`, and sync. *Crash here: the next
    opening continues.* The next commit commits the SSTs again.
 5. Rename tags that are not JSON in the same way: Lance lists no tags while one is invalid, so collections and backups
    fail. Lance does not fsync tags, and renames them to their final name when they are whole.

Without a recorded version, no row was ever acknowledged, or an older memwal wrote the table. Versions are then set
aside only if the table has no data files and no claimed regions: its creation by memwal was interrupted.

A version that a live process is committing is never torn: its files are written before its manifest gets its name. Not
detected: zeros in place of blocks within a data or index file of the right size. POSIX allows this; file systems that
order data before sizes avoid it (ext4 by default).

A deletion file (`is_whole`) has no checksum, but a version's manifest records how many rows it deletes:

    ….arrow   Arrow IPC file of one column: uint32 offset of each row, no two the same
    ….bin     Roaring bitmap, little-endian: u32 12346, u32 number of containers; or u32 12347 + (number - 1) * 65536,
              then one bit per container, set if it holds runs. Per container u16 upper half of offsets, u16 rows - 1.
              Per container u32 position; beside containers of runs only where there are 4 or more. Per container:
              of runs: u16 number, then per run u16 first, u16 length - 1
              of up to 4,096 rows: u16 lower half of each offset
              of more: 65,536 bits

This detects a truncated file, and blocks of zeros, which remove rows or make two equal. Source: the Roaring bitmap
format specification; checked against files of pylance 14.0.2.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal.flush.base.existing_indexes import has_files, own_segments
from memwal.flush.base.fsync import alone, synced_version
from memwal.flush.base.manifest import manifest_names
from memwal.flush.base.open import open_dataset
from memwal.flush.base.setup import REGIONS, has_claims
from memwal.flush.base.state import Fragment, TableState, read_state, versions
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.store.local import sync_path

TORN = ".torn"
"""Suffix of the names of manifests that were set aside."""
_HINT = "_versions/latest_version_hint.json"
_TAGS = "_refs/tags"
_DATA_END = b"LANC"
_LOG = logging.getLogger("memwal.opening")


def set_torn_versions_aside(store: ObjectStore, uri: str) -> list[int]:
    """Set aside the torn versions of the table at `uri`, the root of `store`; return their numbers, newest first.

    Thread safety. Any number of threads and processes. Raises StoreUnavailable, StoreRefused, OSError of storage.
    """
    root = Path(store.url(""))
    if store.remote or not (root / "_versions").is_dir():
        return []
    with alone(root):
        torn = _torn(store, uri, synced_version(root))
        for path in (root / "_versions" / name for version in torn for name in manifest_names(version)):
            if path.exists():
                path.rename(_unused(path))
        if torn:
            (root / _HINT).unlink(missing_ok=True)
            sync_path(root / "_versions")
        _set_torn_tags_aside(root / _TAGS)
    if torn:
        numbers = ", ".join(map(str, reversed(torn)))
        _LOG.warning(
            "%s: a power cut left version %s of the base table torn; its manifest was renamed to *%s, and rows that "
            "no other version has are committed again from the SSTs", uri, numbers, TORN,
        )  # fmt: skip
    return torn


def _set_torn_tags_aside(tags: Path) -> None:
    """Run step 5."""
    for path in sorted(tags.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except FileNotFoundError:  # it was deleted just now
            continue
        except ValueError:
            path.rename(_unused(path))
            sync_path(tags)
            _LOG.warning(
                "%s: a power cut left this tag torn, and no tag could be listed; it was renamed to *%s. A tag that is "
                "still needed must be made again", path, TORN,
            )  # fmt: skip


def _torn(store: ObjectStore, uri: str, noted: int) -> list[int]:
    """Run steps 1 to 3: return the versions to set aside, newest first."""
    listed = versions(store)[::-1]
    newer = [version for version in listed if version > noted]
    if noted and noted not in listed:
        return []
    if not noted and (any(store.list("data/")) or has_claims(store)):
        return []
    before = read_state(store, noted) if noted and newer else None
    for place, version in enumerate(newer):
        state = _state(store, version)
        if state is not None and not _is_torn(store, uri, state, before):
            torn = newer[:place] + [below for below in newer[place + 1 :] if _state(store, below) is None]
            return torn if noted or REGIONS.decode() in state.settings else []
    return newer


def _state(store: ObjectStore, version: int) -> TableState | None:
    try:
        return read_state(store, version)
    except Corrupt:
        return None


def _is_torn(store: ObjectStore, uri: str, state: TableState, before: TableState | None) -> bool:
    """Return whether a version with a parsable manifest is torn (step 2). `before`: the recorded version."""
    if state.transaction is not None and not store.get(state.transaction_key):
        return True
    known = {} if before is None else before.fragments
    if any(_lacks_files(store, fragment, known.get(id)) for id, fragment in state.fragments.items()):
        return True
    segments = frozenset[UUID]() if before is None else frozenset[UUID]().union(*before.indexes.values())
    return any(_lacking_segments(store, uri, state.version, segments))


def _lacks_files(store: ObjectStore, fragment: Fragment, before: Fragment | None) -> bool:
    known = {} if before is None else before.files
    if any(_is_cut_off(store, key, size, _DATA_END) for key, size in fragment.files.items() if key not in known):
        return True
    key = fragment.deletion_file
    if key is None or (before is not None and before.deletion_file == key):
        return False
    deletions = store.get(key)
    return deletions is None or not is_whole(key, deletions, fragment.deleted)


def _is_cut_off(store: ObjectStore, key: str, size: int, end: bytes) -> bool:
    """Return whether a file is missing, has fewer than `size` bytes, or does not end with `end`. Raises OSError."""
    try:
        with Path(store.url(key)).open("rb") as file:
            length = file.seek(0, 2)
            file.seek(max(0, length - len(end)))
            return length < size or file.read() != end
    except FileNotFoundError:
        return True


def _lacking_segments(store: ObjectStore, uri: str, version: int, known: frozenset[UUID]) -> Iterator[bool]:
    """Yield, per index segment not in `known`, whether its files have fewer bytes than recorded."""
    dataset = open_dataset(store, uri, version)
    for _, segment in own_segments(dataset) if dataset is not None else ():
        if UUID(str(segment.uuid)) not in known and has_files(segment):
            files = store.describe(f"_indices/{segment.uuid}/")
            # Lance writes a file under a temporary name before renaming it.
            sizes = [info.size for info in files if not info.key.rpartition("/")[2].startswith(".tmp")]
            yield not sizes or sum(sizes) < (segment.size_bytes or 0)


def _unused(path: Path) -> Path:
    """Return a free name for a manifest to set aside: a version of that number may have been set aside before."""
    names = (Path(f"{path}{suffix}{TORN}") for suffix in chain([""], map(".{}".format, count(2))))
    return next(name for name in names if not name.exists())


_WITHOUT_RUNS, _WITH_RUNS = 12346, 12347
_ARRAY_MAX = 4096
_BITS = 8192
"""Bytes of a container of bits."""


def is_whole(key: str, data: bytes, deleted: int) -> bool:
    """Return whether `data` is a whole deletion file with the key `key`.

    `deleted`: rows that it deletes, 0 if not recorded.
    """
    try:
        found = _rows_of_bitmap(data) if key.endswith(".bin") else _rows_of_arrow(data)
    except (ValueError, OSError, struct.error, pa.ArrowException):  # OSError: it cannot be decompressed
        return False
    return found == (deleted or found)


def _rows_of_arrow(data: bytes) -> int:
    offsets = pa.ipc.open_file(data).read_all().column(0)
    if offsets.null_count:
        raise ValueError("an offset is null")
    return len(np.unique(offsets.to_numpy()))


def _rows_of_bitmap(data: bytes) -> int:
    """Return the number of rows. Raises ValueError, struct.error."""
    (cookie,) = struct.unpack_from("<I", data)
    if cookie == _WITHOUT_RUNS:
        (number,), at = struct.unpack_from("<I", data, 4), 8
        of_runs = np.zeros(number, bool)
    elif cookie & 0xFFFF == _WITH_RUNS:
        number = (cookie >> 16) + 1
        flags = np.frombuffer(data, np.uint8, -(-number // 8), 4)
        of_runs, at = np.unpackbits(flags, bitorder="little")[:number].astype(bool), 4 + len(flags)
    else:
        raise ValueError(f"it begins with {cookie}")
    headers = np.frombuffer(data, "<u2", 2 * number, at)
    if len(np.unique(headers[::2])) != number:
        raise ValueError("two containers are of the same rows")
    sizes = headers[1::2].astype(np.int64) + 1
    at += 4 * number if of_runs.any() and number < 4 else 8 * number
    for size, is_of_runs in zip(sizes.tolist(), of_runs.tolist(), strict=True):
        found, length = _rows_of_container(data, at, size, is_of_runs)
        if found != size:
            raise ValueError(f"a container has {found} rows, {size} are recorded")
        at += length
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, not {at}")
    return int(sizes.sum())


def _rows_of_container(data: bytes, at: int, size: int, is_of_runs: bool) -> tuple[int, int]:
    """Return the number of rows in the container at `at`, and its length in bytes."""
    if is_of_runs:
        (runs,) = struct.unpack_from("<H", data, at)
        lengths = np.frombuffer(data, "<u2", 2 * runs, at + 2)[1::2]
        return int(lengths.astype(np.int64).sum()) + runs, 2 + 4 * runs
    if size <= _ARRAY_MAX:
        return len(np.unique(np.frombuffer(data, "<u2", size, at))), 2 * size
    return int(np.unpackbits(np.frombuffer(data, np.uint8, _BITS, at)).sum()), _BITS
