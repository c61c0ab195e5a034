"""Fsyncs what pylance wrote on a local disk, so that it survives a power cut.

pylance does not fsync. A published SST moves `replay_after`, and its rows are never replayed from the log again: its
bytes must be on the disk before the manifest edit. A base-table version must be on the disk before the SSTs that it
replaces are pruned. Object stores need none of this: a finished PUT is durable.

The number of the newest version that was synced is kept in `_mem_wal/synced.json`: rows, columns and markers of this
version and the ones before it are relied upon. `flush.base.torn` never goes back behind it.

A file whose fsync failed is kept in `_mem_wal/unsynced.json`, and no version that has it is relied upon any more: the
kernel reports a lost write once, so that a second fsync of the same file proves nothing. Its SSTs stay. A copy of the
file is another one, with an inode of its own. Source of the rule: "Can Applications Recover from fsync Failures?",
Rebello et al., USENIX ATC 2020.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import lance

from memwal.flush.base.manifest import manifest_names
from memwal.wal.layout import SYNCED_KEY, UNSYNCED_KEY
from memwal.wal.store.local import TEMPORARY, sync_names

RECENT = 32
"""Versions. A commit and the maintenance after it make fewer."""
_PARALLEL_FROM, _WORKERS = 32, 4
"""Files, and threads. A disk takes several fsyncs at once: a version of 64 new fragments of 260 KB is synced in 92 ms,
one file after the other in 406 ms; one of 8 fragments takes 22 ms either way."""
Refused = Callable[[Path, OSError], None]
Lost = dict[str, list[int]]
"""Files and directories whose fsync failed: what identifies each, by its path in the table."""
_LOST_HERE: dict[Path, Lost] = {}
"""Those of which the disk took no note either, by the directory of the table: known to this process only."""
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
    Raises OSError, also for a file whose fsync failed before.
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
    _sync_or_note(root, files, directories)
    with alone(root):
        _expect_none_lost(root, [*files, *directories])  # another process may have been told meanwhile
        if synced_version(root) < dataset.version:
            _write(root / SYNCED_KEY, {"version": dataset.version})


def synced_version(root: Path) -> int:
    """Return the number of the newest version that was synced of the table in the directory `root`; 0 for none.

    Raises OSError.
    """
    try:
        return int(json.loads((root / SYNCED_KEY).read_bytes())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def _write(path: Path, note: Mapping[str, Any]) -> None:
    """Write a note so that a power cut leaves the new one or the former one. Requires: the table's lock."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    path.parent.mkdir(exist_ok=True)
    temporary.write_bytes(json.dumps(note).encode())
    _sync(temporary)
    temporary.replace(path)
    for directory in (path.parent, path.parent.parent):
        _sync(directory)


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


def _sync_all(paths: Sequence[Path], refused: Refused) -> None:
    """Fsync `paths` in any order. Each thread takes a share: a task costs more than the fsync of a clean file."""
    if len(paths) < _PARALLEL_FROM:
        _sync_each(paths, refused)
        return
    with ThreadPoolExecutor(_WORKERS, "memwal-sync") as pool:
        list(pool.map(lambda share: _sync_each(share, refused), (paths[start::_WORKERS] for start in range(_WORKERS))))


def _sync_each(paths: Sequence[Path], refused: Refused) -> None:
    """Fsync `paths`, and call `refused` for those that the disk does not take. Raises OSError where one cannot be
    opened.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                refused(path, error)
            finally:
                os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- what the disk did not take ------------------------------------------------------------------------------------


def _sync_or_note(root: Path, files: Sequence[Path], directories: Sequence[Path]) -> None:
    """Fsync what a version is made of. Raises OSError if the disk does not take it, or did not take it before."""
    failed: dict[Path, OSError] = {}

    def refused(path: Path, error: OSError) -> None:
        failed[path] = error
        _note_lost(root, path)

    _expect_none_lost(root, [*files, *directories])
    _sync_all(files, refused)
    _sync_each(directories, refused)
    for path, error in failed.items():
        raise OSError(error.errno, f"{path}: its sync to the disk failed: {error.strerror}") from error


def _expect_none_lost(root: Path, paths: Sequence[Path]) -> None:
    """Raise OSError if the fsync of one of `paths` has failed before."""
    lost = _lost(root) | _LOST_HERE.get(root, {})
    for path in paths if lost else ():
        if (identity := lost.get(_name(root, path))) and identity == _identity(path):
            raise OSError(
                errno.EIO,
                f"{path}: a sync of it to the disk failed before, so its bytes may be lost. Nothing relies on this "
                f"version: rows stay in the log and in SSTs. Copy the table, without {UNSYNCED_KEY}, to a sound disk, "
                "and verify the copy",
            )


def _note_lost(root: Path, path: Path) -> None:
    if not (identity := _identity(path)):
        return
    found = {_name(root, path): identity}
    try:
        with alone(root):
            _write(root / UNSYNCED_KEY, {"files": _lost(root) | found})
    except OSError:
        _LOST_HERE.setdefault(root, {}).update(found)


def _lost(root: Path) -> Lost:
    try:
        return dict(json.loads((root / UNSYNCED_KEY).read_bytes())["files"])
    except FileNotFoundError:
        return {}


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _identity(path: Path) -> list[int]:
    """Return what tells a file from a copy of it: its inode and, as directories change, the time of change of a file;
    [] where it is gone.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return []
    return [found.st_ino, 0 if path.is_dir() else found.st_mtime_ns]
