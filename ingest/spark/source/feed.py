"""The feed: copy ("land") existing files one by one into the directory that a file source reads.

Landing one file, in order:

1. Copy it under a name that Spark's file source ignores (a leading `.`), and fsync it.
2. Set its modification time to now, and later than that of every file in the directory: Spark reads files in the order
   of their modification times, with a resolution of milliseconds.
3. Rename it to its own name and fsync the directory, so that the source sees the whole file or nothing.

*Crash before 3: the source ignores the hidden copy, and the next feed writes it again.* A file that already exists with
the same name and size is skipped, so an interrupted feed continues where it stopped.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

from memwal.ingest.errors import Invalid, MemWalError, classify
from memwal.wal import Clock
from memwal.wal.store.local import sync_path

_STEP_NS = 1_000_000
_HIDDEN = (".", "_")


class Feed:
    """Lands the files of `source` in `target` in name order, one every `every` seconds, in its own thread.

    Thread safety. `start`, `stop`, `finished` and `failure` from any thread.
    Durability. A landed file is completely on disk before the next one is begun.
    Invariants. (1) Modification times of landed files ascend strictly. (2) No file is landed twice.
    """

    def __init__(self, source: Path, target: Path, every: float, clock: Clock) -> None:
        """Raises: Invalid if `source` is not a readable directory, or contains no files."""
        self._target, self._every, self._clock = target, every, clock
        self._files = feed_files(source)
        self._stopped = threading.Event()
        self.finished = threading.Event()
        """Set when every file has landed, the feed has failed, or it was stopped."""
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self.failure: MemWalError | None = None
        self.landed = 0

    @property
    def files(self) -> int:
        """Number of files of the feed."""
        return len(self._files)

    def start(self) -> None:
        """Start landing files."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the file that is being landed."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self.land_all()
        except Exception as error:  # noqa: BLE001 - kept in `failure`
            self.failure = classify(error)
        finally:
            self.finished.set()

    def land_all(self) -> None:
        """Land the files that have not landed yet; return early if stopped.

        Raises: Invalid if the target has a file of the same name and another size; OSError of the file system.
        """
        self._target.mkdir(parents=True, exist_ok=True)
        for file in self._files:
            if self._stopped.is_set():
                return
            there = self._target / file.name
            if not there.exists():
                if self.landed and self._stopped.wait(self._every):
                    return
                self._land(file)
            elif there.stat().st_size != file.stat().st_size:
                raise Invalid(
                    f"source.feed: {there} exists already with {there.stat().st_size} bytes, {file} has "
                    f"{file.stat().st_size}; give a changed file a new name"
                )
            self.landed += 1

    def _land(self, file: Path) -> None:
        hidden = self._target / f".{file.name}.landing"
        with file.open("rb") as data, hidden.open("wb") as copy:
            shutil.copyfileobj(data, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        landed_at = max(int(self._clock.now() * 1e9), self._newest() + _STEP_NS)
        os.utime(hidden, ns=(landed_at, landed_at))
        hidden.rename(self._target / file.name)
        sync_path(self._target)

    def _newest(self) -> int:
        """Return the latest modification time in the target, in nanoseconds; 0 if it is empty."""
        return max((entry.stat().st_mtime_ns for entry in visible_files(self._target)), default=0)


def feed_files(directory: Path) -> list[Path]:
    """Return the files of a feed in name order. Raises: Invalid naming `source.feed`."""
    try:
        files = sorted(visible_files(directory))
    except OSError as error:
        raise Invalid(f"source.feed: {directory}: {error.strerror}; name a directory that can be read") from None
    if not files:
        raise Invalid(f"source.feed: {directory} holds no files; name the directory of your files")
    return files


def visible_files(directory: Path) -> list[Path]:
    """Return the files directly in `directory` that a file source of Spark reads, unordered. Raises: OSError."""
    return [entry for entry in directory.iterdir() if entry.is_file() and not entry.name.startswith(_HIDDEN)]
