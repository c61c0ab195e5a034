"""Objects as files below a directory.

Steps of put-if-absent:

 1. Write the bytes to a temporary file beside the final name, and fsync it.
 2. Check that the directory is still in its place.
 3. link(2) the file to the final name. It fails atomically with EEXIST if the name is taken.
 4. Unlink the temporary name.
 5. Check again that the directory is in its place: it may have been moved between 2 and 3.
 6. Fsync the directory.

A crash before 3 leaves nothing under the name, and a crash after 3 leaves the whole object. No intermediate state
exists, and nothing is ever renamed over an object. An error in 1 or 2 means that nothing was written. Any error from 3
on (ESTALE, EACCES, ETIMEDOUT, …) leaves the outcome unknown, because the object may exist. The only refusal is a link
that the file system rejected and that left the file with one name. Source of the rule that a failed fsync must not be
retried: "Can Applications Recover from fsync Failures?", Rebello et al., USENIX ATC 2020.

Speed: an append costs two fsyncs and seven other system calls. Directories are created, their names synced up to the
mount point, and opened once; after that they are used by descriptor.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from itertools import islice
from pathlib import Path

from memwal.wal.errors import StoreRefused, StoreUnavailable
from memwal.wal.layout import is_in_sst
from memwal.wal.store.port import ObjectInfo, PutOutcome
from memwal.wal.store.requests import REQUESTS

_TRY_AGAIN = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EBUSY,
    # Of file systems on a network or in another process:
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOLCK,
}
NOT_LINKED = {
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EXDEV,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EDQUOT,
}
"""Errors that show that a file system rejected link(2). After any other error the link may exist."""
_REMEDY = {
    errno.ENOSPC: "free space on this file system",
    errno.EDQUOT: "raise the disk quota or free space",
    errno.EROFS: "the file system is read-only: remount it writable, or give another path",
    errno.EACCES: "give this user read, write and search permission",
    errno.EPERM: "use a file system that has hard links, and a directory this user may write",
    errno.EOPNOTSUPP: "use a file system that has hard links",
    errno.ENOSYS: "use a file system that has hard links",
    errno.EEXIST: "a part of the path is a file: give a directory",
    errno.ENOTDIR: "a part of the path is a file: give a directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def failed(path: str, error: OSError) -> StoreUnavailable | StoreRefused:
    """Return the store's error for `error` at `path`: unavailable if a later attempt may succeed, else refused."""
    remedy = _REMEDY.get(error.errno or 0)
    message = f"{path}: {error.strerror or error}" + (f"; {remedy}" if remedy else "")
    return (StoreUnavailable if error.errno in _TRY_AGAIN else StoreRefused)(message)


TEMPORARY = ".memwal-put-"
"""Prefix of the names of files that are not objects."""
_MOST_DIRECTORIES = 64


def sync_path(path: Path) -> None:
    """Fsync one file, or the names in one directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(path: Path) -> None:
    """Make the name of the directory `path` durable, and those of the directories above it in the same file system.

    Any of them may be new: Lance creates the directories of a table that it writes, and does not sync them. A directory
    that this process must not read existed before, and is skipped. Raises OSError.
    """
    path = path.resolve()
    device = path.stat().st_dev
    for above in path.parents:
        if above.stat().st_dev != device:
            return
        with suppress(PermissionError):
            sync_path(above)


def _identity(path: str) -> tuple[int, int]:
    """Return the identity of the directory at `path`, which changes if it is replaced. Raises FileNotFoundError."""
    found = os.stat(path)  # noqa: PTH116 - on the put path
    return found.st_dev, found.st_ino


class _Directory:
    """An open directory; its descriptor is closed with the last reference."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.identity = _identity(path)
        self.sync_failed = False

    def check_in_place(self) -> None:
        """Raise FileNotFoundError if the directory was removed, or was moved and replaced by another."""
        if _identity(self.path) != self.identity:
            raise FileNotFoundError(errno.ENOENT, "another directory is in its place", self.path)

    def __del__(self) -> None:
        if (fd := getattr(self, "fd", None)) is not None:
            with suppress(OSError):  # no caller to report to
                os.close(fd)


class LocalStore:
    """Keys are paths below `root`, which is created with the first object.

    Thread safety. Any thread, any number of processes.
    Durability. CREATED and ALREADY_EXISTS are returned after the file and its directory are synced.
    Invariants. (1) An object's name appears with the whole object. (2) After a failed fsync of a directory this store
    never again reports anything in it as durable. (3) The root, and a directory that was used once, are never created
    again, except an SST's: a directory at their path may belong to another table.
    """

    remote = False

    def __init__(self, root: str | Path, storage_options: Mapping[str, str] | None = None) -> None:
        self.root = str(Path(root).absolute())
        self.storage_options = dict(storage_options or {})
        self._lock = threading.Lock()
        self._directories: OrderedDict[str, _Directory] = OrderedDict()
        self._used: dict[str, tuple[int, int]] = {}
        self._named: set[str] = set()
        """Directories whose names are durable, without those of SSTs."""
        self._root_identity: tuple[int, int] | None = None
        self._numbers = itertools.count()

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        """Create `key`; see the module docstring.

        Raises: StoreUnavailable (no space, I/O error), StoreRefused.
        """
        REQUESTS.add("put", key)
        folder, _, name = key.rpartition("/")
        try:
            return self._create(self._directory(folder), name, data)
        except FileNotFoundError as error:
            # The open directory is gone: the table was removed, or replaced by another. Creating it again would
            # acknowledge rows that are lost, or write them into another table's log.
            raise StoreRefused(
                f"{self.root}/{folder}: the directory was removed or replaced while it was in use; open the table again"
            ) from error
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._forget(folder)  # the descriptor stays stale; the path may work again
            raise failed(f"{self.root}/{key}", error) from error

    def put(self, key: str, data: bytes) -> None:
        """Create or overwrite `key`, atomically but without any fsync: for hints only."""
        REQUESTS.add("put", key)
        folder, _, name = key.rpartition("/")
        try:
            directory = self._directory(folder)
            temporary = self._write_temporary(directory, data, sync=False)
            try:
                os.replace(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            except OSError:
                with suppress(OSError):  # the rename may have succeeded nevertheless
                    os.unlink(temporary, dir_fd=directory.fd)
                raise
        except OSError as error:
            self._forget(folder)
            raise failed(f"{self.root}/{key}", error) from error

    def get(self, key: str) -> bytes | None:
        """Return the object's bytes, or None. Raises StoreUnavailable, StoreRefused."""
        REQUESTS.add("get", key)
        try:
            with FileIO(f"{self.root}/{key}") as file:
                return file.readall()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(f"{self.root}/{key}", error) from error

    def exists(self, key: str) -> bool:
        """Return whether `key` is a file. Raises StoreUnavailable, StoreRefused."""
        REQUESTS.add("head", key)
        try:
            Path(self.root, key).stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise failed(f"{self.root}/{key}", error) from error
        return True

    def children(self, prefix: str) -> list[str]:
        """Return the names of the directories directly below `prefix`. Raises StoreUnavailable, StoreRefused."""
        REQUESTS.add("list", prefix)
        try:
            with os.scandir(f"{self.root}/{prefix}") as found:
                return sorted(each.name for each in found if each.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failed(f"{self.root}/{prefix}", error) from error

    def describe(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key begins with `prefix`. Raises StoreUnavailable, StoreRefused."""
        return self._described(prefix, self.list(prefix))

    def leftovers(self, prefix: str) -> list[ObjectInfo]:
        """Return the temporary files below `prefix`. Raises StoreUnavailable, StoreRefused."""
        REQUESTS.add("list", prefix)
        return self._described(prefix, self._walk(prefix, temporary=True))

    def _described(self, prefix: str, keys: Iterable[str]) -> list[ObjectInfo]:
        found = []
        try:
            for key in keys:
                with suppress(FileNotFoundError):  # removed meanwhile, or a put has finished
                    status = Path(self.root, key).stat()
                    found.append(ObjectInfo(key, status.st_size, status.st_mtime))
        except OSError as error:
            raise failed(f"{self.root}/{prefix}", error) from error
        return found

    def remove_leftovers(self, prefix: str) -> None:
        """Delete the temporary files and the empty directories below `prefix`, and `prefix` itself if it is empty.

        A directory that is not empty, or is gone, is skipped: another process uses it.
        Raises: StoreUnavailable, StoreRefused.
        """
        for leftover in self.leftovers(prefix):
            self.delete(leftover.key)
        for folder, _, _ in os.walk(f"{self.root}/{prefix}", topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()

    def list_some(self, prefix: str, most: int) -> list[str]:
        """Return any `most` keys that begin with `prefix`. Raises StoreUnavailable, StoreRefused."""
        REQUESTS.add("list", prefix)
        folder, slash, _ = prefix.rpartition("/")
        try:
            return [*islice((key for key in self._walk(folder + slash) if key.startswith(prefix)), most)]
        except OSError as error:
            raise failed(f"{self.root}/{prefix}", error) from error

    def list(self, prefix: str) -> list[str]:
        """Return every key that begins with `prefix`. Raises StoreUnavailable, StoreRefused."""
        return self.list_some(prefix, sys.maxsize)

    def delete(self, key: str) -> None:
        """Delete `key` if it exists; directories are kept. Raises StoreUnavailable, StoreRefused."""
        REQUESTS.add("delete", key)
        try:
            Path(self.root, key).unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise failed(f"{self.root}/{key}", error) from error

    def url(self, key: str) -> str:
        """Return the absolute path of `key`."""
        return f"{self.root}/{key}" if key else self.root

    def _create(self, directory: _Directory, name: str, data: bytes) -> PutOutcome:
        """Create an object. Raises OSError only if nothing was or will be written."""
        if directory.sync_failed:
            return PutOutcome.OUTCOME_UNKNOWN
        temporary = self._write_temporary(directory, data, sync=True)
        try:
            directory.check_in_place()
            outcome = self._link(directory, temporary, name)
        finally:
            # A temporary file that cannot be removed does not make the put fail.
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory.fd)
        return outcome if outcome is PutOutcome.OUTCOME_UNKNOWN else self._confirmed(directory, outcome)

    def _link(self, directory: _Directory, temporary: str, name: str) -> PutOutcome:
        """Do step 3. Raises OSError only if the file system rejected the link and created none."""
        try:
            os.link(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        except FileExistsError:
            return PutOutcome.ALREADY_EXISTS
        except OSError as error:
            if error.errno in NOT_LINKED and self._has_one_name(directory, temporary):
                raise
            return PutOutcome.OUTCOME_UNKNOWN
        return PutOutcome.CREATED

    @staticmethod
    def _has_one_name(directory: _Directory, temporary: str) -> bool:
        """Return whether the temporary file has no second name; False also if that is unknown."""
        try:
            return os.stat(temporary, dir_fd=directory.fd).st_nlink == 1
        except OSError:
            return False

    def _confirmed(self, directory: _Directory, outcome: PutOutcome) -> PutOutcome:
        """Return `outcome` once the name is known to be in the table and on disk (steps 5 and 6), else OUTCOME_UNKNOWN.

        This applies to ALREADY_EXISTS too: the name may be from this writer's earlier attempt and not synced yet.
        """
        try:
            directory.check_in_place()
        except OSError:
            return PutOutcome.OUTCOME_UNKNOWN
        try:
            os.fsync(directory.fd)
        except OSError:
            # The kernel reports a lost write once and then treats the page as clean, so a second fsync proves nothing.
            directory.sync_failed = True
            return PutOutcome.OUTCOME_UNKNOWN
        return outcome

    def _write_temporary(self, directory: _Directory, data: bytes, *, sync: bool) -> str:
        """Write `data` to a new file in `directory` and return its name. Raises OSError, and then leaves no file."""
        name, fd = self._open_temporary(directory)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            if sync:
                os.fsync(fd)
        except BaseException:
            with suppress(OSError):  # the first error is more useful
                os.unlink(name, dir_fd=directory.fd)
            raise
        finally:
            os.close(fd)
        return name

    def _open_temporary(self, directory: _Directory) -> tuple[str, int]:
        """Open a temporary file named by process id and counter; skip names left by a dead process with the same id."""
        while True:
            name = f"{TEMPORARY}{os.getpid()}-{next(self._numbers)}"
            try:
                return name, os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666, dir_fd=directory.fd)
            except FileExistsError:
                continue

    def _directory(self, folder: str) -> _Directory:
        """Return the open directory of `folder`. The first call creates it and syncs it into its parents.

        Raises FileNotFoundError if it, or the root, was removed or replaced since.
        """
        with self._lock:
            if (known := self._directories.get(folder)) is not None:
                self._directories.move_to_end(folder)
                return known
            if self._root_identity is not None and self._root_identity != _identity(self.root):
                raise FileNotFoundError(errno.ENOENT, "another directory is in its place", self.root)
            # An SST's directory is not recorded: its name is never used again, and a record per flush would stay
            # forever.
            noted = not is_in_sst(folder)
            if not (noted and folder in self._used):
                self._make(folder)
            opened = _Directory(f"{self.root}/{folder}" if folder else self.root)
            if noted and self._used.setdefault(folder, opened.identity) != opened.identity:
                raise FileNotFoundError(errno.ENOENT, "another directory is in its place", opened.path)
            self._directories[folder] = opened
            self._root_identity = self._root_identity or _identity(self.root)
            if len(self._directories) > _MOST_DIRECTORIES:
                self._evict()
            return opened

    def _make(self, folder: str) -> None:
        """Create the missing parts of the path and sync every name in it.

        Existing names are synced too, once: another process may have created one and crashed.
        """
        path = Path(self.root)
        for missing in reversed([each for each in (path, *path.parents) if not each.is_dir()]):
            missing.mkdir(exist_ok=True)
        if self._root_identity is None:
            sync_names(path)
        parts = folder.split("/") if folder else []
        for depth, name in enumerate(parts, 1):
            parent, path, part = path, path / name, "/".join(parts[:depth])
            if part in self._named:
                continue
            path.mkdir(exist_ok=True)
            sync_path(parent)
            if not is_in_sst(part):
                self._named.add(part)

    def _evict(self) -> None:
        """Close the least recently used directory, but never one whose sync failed: that must be remembered."""
        oldest = next((name for name, known in self._directories.items() if not known.sync_failed), None)
        if oldest is not None:
            del self._directories[oldest]

    def _forget(self, folder: str) -> None:
        with self._lock:
            if (known := self._directories.get(folder)) is not None and not known.sync_failed:
                del self._directories[folder]

    def _walk(self, folder: str, *, temporary: bool = False) -> Iterator[str]:
        try:
            with os.scandir(f"{self.root}/{folder}") as found:
                for each in found:
                    if each.is_dir():
                        yield from self._walk(f"{folder}{each.name}/", temporary=temporary)
                    elif each.name.startswith(TEMPORARY) == temporary:
                        yield folder + each.name
        except (FileNotFoundError, NotADirectoryError):
            return
