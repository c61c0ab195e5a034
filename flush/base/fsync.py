"""Fsyncs what pylance wrote on a local disk, so that it survives a power cut.

pylance does not fsync. A published SST moves `replay_after`, and its rows are never replayed from the log again: its
bytes must be on the disk before the manifest edit. A base-table version must be on the disk before the SSTs that it
replaces are pruned. Object stores need none of this: a finished PUT is durable.

The number of the newest version that was synced is kept in `_mem_wal/synced.json`: rows, columns and markers of this
version and the ones before it are relied upon. `flush.base.torn` never goes back behind it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import lance

from memwal.flush.base.manifest import manifest_names
from memwal.wal.layout import SYNCED_KEY
from memwal.wal.store.local import TEMPORARY, sync_names

RECENT = 32
"""Versions. A commit and the maintenance after it make fewer."""
_PARALLEL_FROM, _WORKERS = 32, 4
"""Files, and threads. A disk takes several fsyncs at once: a version of 64 new fragments of 260 KB is synced in 92 ms,
one file after the other in 406 ms; one of 8 fragments takes 22 ms either way."""
_DATA, _DELETIONS, _INDICES, _VERSIONS, _TRANSACTIONS = "data", "_deletions", "_indices", "_versions", "_transactions"


def sync_tree(path: str) -> None:
    """Fsync every file and directory below `path`, then the directory that holds it.

    `path`: what pylance opens. A URL is left alone: no local directory has that name. Raises OSError.
    """
    root = Path(path)
    if not root.is_dir():
        return
    for path_below in [*root.rglob("*"), root, root.absolute().parent]:
        _sync(path_below)


def sync_files(path: str) -> None:
    """Fsync the files in the local directory `path`, also those being written. Raises OSError."""
    for file in Path(path).glob("*"):
        with suppress(FileNotFoundError):  # it was renamed
            _sync(file)


def sync_new_table(dataset: lance.LanceDataset) -> None:
    """Fsync a table that was just created or set up, and the names of the directories that it is in.

    Call it before any region of the table is claimed: what is put into the log can be found only with the base table.
    Raises OSError.
    """
    sync_table(dataset)
    if (root := local_root(dataset)) is not None:
        sync_names(root)


def sync_table(dataset: lance.LanceDataset) -> None:
    """Fsync the files of the open version of a Lance table, and the manifests of the RECENT versions up to it; note it.

    Files of older versions only were synced after the commits that made them. Files first, several at once, then the
    directories that list them. A table on an object store is left alone, and so is a file that is removed meanwhile.
    Raises OSError.
    """
    if (root := local_root(dataset)) is None:
        return
    files, directories = [], [root / name for name in (_DATA, _DELETIONS, _INDICES, _VERSIONS, _TRANSACTIONS, "")]
    for fragment in dataset.get_fragments():
        files += [root / _DATA / file.path for file in fragment.metadata.files]
        if deletions := fragment.deletion_file():
            files.append(root / deletions)
    for index in dataset.describe_indices():
        for segment in index.segments:
            directory = root / _INDICES / str(segment.uuid)
            files += directory.glob("*")
            directories.insert(0, directory)
    recent = range(max(1, dataset.version - RECENT), dataset.version + 1)
    manifests = (root / _VERSIONS / name for version in recent for name in manifest_names(version))
    files += [path for path in manifests if path.exists()]
    files += [path for path in (root / _TRANSACTIONS).glob("*-*.txn") if int(path.name.split("-")[0]) + 1 in recent]
    _sync_all(files)
    _sync_each(directories)
    with alone(root):
        if synced_version(root) < dataset.version:
            _note(root, dataset.version)


def synced_version(root: Path) -> int:
    """Return the number of the newest version that was synced of the table in the directory `root`; 0 for none.

    Raises OSError.
    """
    try:
        return int(json.loads((root / SYNCED_KEY).read_bytes())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def _note(root: Path, version: int) -> None:
    """Write the note so that a power cut leaves the new one or the former one. Requires: the table's lock."""
    path = root / SYNCED_KEY
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    path.parent.mkdir(exist_ok=True)
    temporary.write_bytes(json.dumps({"version": version}).encode())
    _sync(temporary)
    temporary.replace(path)
    _sync_each([path.parent, root])


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the lock of the table in the directory `root`, for moments: no other process does what is done inside.

    Raises OSError.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def local_root(dataset: lance.LanceDataset) -> Path | None:
    """Return the directory of a table; None where it is on an object store."""
    uri = dataset.uri
    root = Path(unquote(urlsplit(uri).path) if uri.startswith("file://") else uri)
    return root if root.is_dir() else None


def _sync_all(paths: Sequence[Path]) -> None:
    """Fsync `paths` in any order. Each thread takes a share: a task costs more than the fsync of a clean file."""
    if len(paths) < _PARALLEL_FROM:
        _sync_each(paths)
        return
    with ThreadPoolExecutor(_WORKERS, "memwal-sync") as pool:
        list(pool.map(_sync_each, (paths[start::_WORKERS] for start in range(_WORKERS))))


def _sync_each(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
