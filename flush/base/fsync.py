"""Fsync what pylance wrote on a local disk, so that it survives a power cut.

pylance does not fsync. A published SST moves `replay_after`, after which its rows are never replayed from the log: its
bytes must be on disk before the manifest edit. A base-table version must be on disk before the SSTs that it replaces
are pruned. Object stores need none of this: a finished PUT is durable.

`_mem_wal/synced.json` holds the number of the newest synced version. Rows, columns and markers of this version and of
earlier ones are relied upon; `flush.base.torn` never goes back beyond it.

`_mem_wal/unsynced.json` lists the files whose fsync failed. A version with one of these files is not relied upon: the
kernel reports a lost write once, so a second fsync of the same file proves nothing. The SSTs of that version are kept.
A copy of the file counts as another file, because it has a different inode. Source of the rule: "Can Applications
Recover from fsync Failures?", Rebello et al., USENIX ATC 2020.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import lance

from memwal.flush.base.manifest import manifest_names
from memwal.wal.layout import SYNCED_KEY, UNSYNCED_KEY
from memwal.wal.parallel_map import each
from memwal.wal.store.local import TEMPORARY, sync_names, sync_path

RECENT = 32
"""Versions. A commit and the maintenance after it create fewer."""
_PARALLEL_FROM, _WORKERS = 32, 4
"""Files, and threads. A disk takes several fsyncs at once: a version of 64 new fragments of 260 KB is synced in 92 ms,
but in 406 ms one file after the other; a version of 8 fragments takes 22 ms either way.
"""
Refused = Callable[[Path, OSError], None]
Lost = dict[str, list[int]]
"""Files and directories whose fsync failed: path in the table -> identity."""
_LOST_HERE: dict[Path, Lost] = {}
"""Lost files that could not be noted on disk either, by the directory of the table: known to this process only."""
_DATA, _DELETIONS, _INDICES, _VERSIONS, _TRANSACTIONS = "data", "_deletions", "_indices", "_versions", "_transactions"


def sync_tree(path: str) -> None:
    """Fsync every file and directory below `path`, then the directory that holds it.

    `path`: what pylance opens. A URL is skipped: no local directory has that name. Raises OSError.
    """
    root = Path(path)
    if not root.is_dir():
        return
    for path_below in [*root.rglob("*"), root, root.absolute().parent]:
        sync_path(path_below)


def sync_files(path: str) -> None:
    """Fsync the files in the local directory `path`, including files being written. Raises OSError."""
    for file in Path(path).glob("*"):
        with suppress(FileNotFoundError):  # it was renamed
            sync_path(file)


def sync_new_table(dataset: lance.LanceDataset) -> None:
    """Fsync a table that was just created or set up, and its parent directories.

    Call it before any region of the table is claimed: rows put into the log can only be found through the base table.
    Raises OSError.
    """
    sync_table(dataset)
    if (root := local_root(dataset)) is not None:
        sync_names(root)


def sync_table(dataset: lance.LanceDataset) -> None:
    """Fsync the open version of a Lance table and the manifests of the RECENT versions up to it; record its number.

    Files of older versions were synced after the commits that made them. Files are synced first, several at once, then
    the directories that list them. Skips a table on an object store, and files that are removed in the meantime. Raises
    OSError, also for a file whose fsync failed before.
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
        _expect_none_lost(root, [*files, *directories])  # another process may have noted a failure meanwhile
        if synced_version(root) < dataset.version:
            _write(root / SYNCED_KEY, {"version": dataset.version})


def synced_version(root: Path) -> int:
    """Return the number of the newest synced version of the table in the directory `root`; 0 if none.

    Raises OSError.
    """
    try:
        return int(json.loads((root / SYNCED_KEY).read_bytes())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def _write(path: Path, note: Mapping[str, Any]) -> None:
    """Write a note so that a power cut leaves either the new or the previous one. Requires: the table's lock."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    path.parent.mkdir(exist_ok=True)
    temporary.write_bytes(json.dumps(note).encode())
    sync_path(temporary)
    temporary.replace(path)
    for directory in (path.parent, path.parent.parent):
        sync_path(directory)


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the lock of the table in the directory `root` briefly, exclusive among all processes.

    Raises OSError.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def local_root(dataset: lance.LanceDataset) -> Path | None:
    """Return the directory of a table; None if it is on an object store."""
    uri = dataset.uri
    root = Path(unquote(urlsplit(uri).path) if uri.startswith("file://") else uri)
    return root if root.is_dir() else None


def _sync_each(paths: Sequence[Path], refused: Refused) -> None:
    """Fsync `paths`; call `refused` for each whose fsync fails. Raises OSError if one cannot be opened."""
    for path in paths:
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                refused(path, error)
            finally:
                os.close(descriptor)


# ---- files whose fsync failed ---------------------------------------------------------------------------------------


def _sync_or_note(root: Path, files: Sequence[Path], directories: Sequence[Path]) -> None:
    """Fsync the files of a version. Raises OSError if an fsync fails, or has failed before."""
    failed: dict[Path, OSError] = {}

    def refused(path: Path, error: OSError) -> None:
        failed[path] = error
        if not (identity := _identity(path)):
            return
        lost = {_name(root, path): identity}
        try:
            with alone(root):
                _write(root / UNSYNCED_KEY, {"files": _lost(root) | lost})
        except OSError:
            _LOST_HERE.setdefault(root, {}).update(lost)

    _expect_none_lost(root, [*files, *directories])
    # In any order. Each thread takes a share: a task costs more than the fsync of a clean file.
    workers = 1 if len(files) < _PARALLEL_FROM else _WORKERS
    shares = [files[start::workers] for start in range(workers)]
    list(each(lambda share: _sync_each(share, refused), shares, workers))
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


def _lost(root: Path) -> Lost:
    try:
        return dict(json.loads((root / UNSYNCED_KEY).read_bytes())["files"])
    except FileNotFoundError:
        return {}


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _identity(path: Path) -> list[int]:
    """Return the identity of a file: its inode and, except for directories, its modification time.

    A copy has another identity. [] if the file was deleted.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return []
    return [found.st_ino, 0 if path.is_dir() else found.st_mtime_ns]
