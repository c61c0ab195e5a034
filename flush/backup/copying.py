"""Copy objects from one store to another, several at once, in bounded memory.

An object of up to `WHOLE_MAX` bytes is read whole and created by one conditional put. A larger one is streamed: between
local directories from file to file, from and to S3 by Lance's own transfer (`LanceFileSession`), which sends it in
parts; from S3 to S3 it passes through a temporary file. In each case it appears whole under its name, or not at all, so
an object that already exists in the destination is a copy; its bytes are still read for the checksum.

A local destination is synced: small objects by the put, large ones here, names of new directories by `sync_tree` at the
end of a backup or restore.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from lance.file import LanceFileSession

from memwal.flush.backup.contents import Piece, Vanished
from memwal.flush.backup.record import Copied
from memwal.flush.errors import InvalidBackup
from memwal.wal import Clock, Corrupt, Ids, ObjectStore, WalOptions
from memwal.wal.panics import panics_as_errors
from memwal.wal.parallel_map import each
from memwal.wal.retries import with_retried_reads
from memwal.wal.slot import put_until_known
from memwal.wal.store.local import TEMPORARY, sync_path

WHOLE_MAX = 8 << 20
"""Bytes of the largest object that is read whole."""
AT_ONCE = 8
"""Objects copied concurrently; memory holds this number of objects of up to `WHOLE_MAX` bytes."""


Progress = Callable[[int, int, int, int], None]
"""Called with the number of objects copied, of all objects, and the bytes of both."""
Check = Callable[[Piece, str], None]
"""Called with a piece and the SHA-256 of the bytes read, before they are written; raises Corrupt to reject them."""


def accept(_piece: Piece, _sha256: str) -> None:
    """Accept every piece."""


@dataclass
class CopyRun:
    """One backup or restore: it copies from the root of `source` to the root of `dest`. Thread safety. One thread."""

    source: ObjectStore
    dest: ObjectStore
    clock: Clock
    ids: Ids
    options: WalOptions
    on_progress: Progress | None = None
    at_once: int = AT_ONCE

    def __post_init__(self) -> None:
        self.source = with_retried_reads(self.source, self.clock, self.options)
        self.dest = with_retried_reads(self.dest, self.clock, self.options)

    def create(self, key: str, data: bytes) -> bool:
        """Create an object in the destination; return whether the key was free, or held the same bytes."""
        return put_until_known(self.dest, key, data, clock=self.clock, options=self.options) is None

    def mark(self, key: str, note: Mapping[str, Any], *, replace: bool) -> bool:
        """Create the marker at `key`, or replace that of an earlier run. Return whether the marker is this run's."""
        data = json.dumps(note).encode()
        if not replace:
            return self.create(key, data)
        self.dest.remove_leftovers("")
        self.dest.put(key, data)
        return self.dest.get(key) == data


@dataclass
class Copier:
    """Copies pieces from the source of `run` to its destination, which has no other writer.

    Thread safety. One thread calls it; it copies in several.
    Errors. Raises Vanished if an object is missing in the source; InvalidBackup if another program wrote to the
    destination; what `check` raises; OutcomeUnknown, StoreUnavailable, StoreRefused, OSError. Objects copied before the
    error stay.
    """

    run: CopyRun
    before_replacing: Callable[[], None] | None = None
    """Called before a piece with `data` replaces a different object of an earlier attempt; raises if that object must
    stay. None: no object is replaced.
    """
    _lock: Lock = field(default_factory=Lock)

    def copy(self, pieces: Sequence[Piece], present: Mapping[str, int], check: Check = accept) -> list[Copied]:
        """Copy `pieces`, in this order up to `at_once` objects. `present`: size of each object in the destination."""
        done, size, total = 0, 0, sum(piece.size for piece in pieces)

        def one(piece: Piece) -> Copied:
            nonlocal done, size
            copied = self._copied(piece, present.get(piece.key), check)
            with self._lock:
                done, size = done + 1, size + piece.size
                if self.run.on_progress is not None:
                    self.run.on_progress(done, len(pieces), size, total)
            return copied

        return list(each(one, pieces, self.run.at_once))

    def _copied(self, piece: Piece, present: int | None, check: Check) -> Copied:
        if piece.data is None and present == piece.size and (kept := self._kept(piece, check)) is not None:
            return kept
        if piece.data is None and piece.size > WHOLE_MAX:
            return self._streamed(piece, check)
        data = self.run.source.get(piece.key) if piece.data is None else piece.data
        if data is None:
            raise Vanished(piece.key)
        sha256 = sha256_of(data)
        check(piece, sha256)
        self._put(piece.key, data, replaces=piece.data is not None)
        return Copied(piece.key, len(data), sha256)

    def _put(self, key: str, data: bytes, *, replaces: bool) -> None:
        """Create an object. `replaces`: whether an earlier attempt may have written other bytes under its key."""
        created = self.run.create(key, data)
        if not created and replaces and self.before_replacing is not None:
            self.before_replacing()
            self.run.dest.delete(key)
            created = self.run.create(key, data)
        if not created:
            raise InvalidBackup(f"{self.run.dest.url(key)}: another program wrote to the destination; give another one")

    def _kept(self, piece: Piece, check: Check) -> Copied | None:
        """Return the object that an earlier attempt copied; None if it must be copied again."""
        with self._as_file(self.run.dest, piece) as path:
            sha256 = None if path is None else _sha256(path)
        if sha256 is None:
            return None
        try:
            check(piece, sha256)
        except Corrupt:  # of the object in the destination
            self.run.dest.delete(piece.key)
            return None
        return Copied(piece.key, piece.size, sha256)

    @panics_as_errors
    def _streamed(self, piece: Piece, check: Check) -> Copied:
        with self._as_file(self.run.source, piece) as path:
            if path is None:
                raise Vanished(piece.key)
            sha256, size = _sha256(path), path.stat().st_size
            check(piece, sha256)
            if self.run.dest.remote:
                self._session(self.run.dest).upload_file(path, piece.key)
            else:
                to = Path(self.run.dest.url(piece.key))
                to.parent.mkdir(parents=True, exist_ok=True)
                written = to.parent / f"{TEMPORARY}{os.getpid()}-{self.run.ids.token()}"
                try:
                    shutil.copyfile(path, written)
                    sync_path(written)
                    written.replace(to)  # the name appears when all bytes are on disk
                except BaseException:
                    with suppress(OSError):  # the first error is more useful
                        written.unlink()
                    raise
        return Copied(piece.key, size, sha256)

    @contextmanager
    def _as_file(self, store: ObjectStore, piece: Piece) -> Iterator[Path | None]:
        """Yield the object as a local file, a temporary one for S3; None if it is missing."""
        if not store.remote:
            path = Path(store.url(piece.key))
            yield path if path.exists() else None
            return
        with tempfile.TemporaryDirectory(prefix="memwal-copy-") as directory:
            path = Path(directory) / "object"
            try:
                self._session(store).download_file(piece.key, path)
            except OSError:
                if store.exists(piece.key):
                    raise
                yield None
                return
            yield path

    def _session(self, store: ObjectStore) -> LanceFileSession:
        return LanceFileSession(store.url(""), dict(store.storage_options))


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 of `data`, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
