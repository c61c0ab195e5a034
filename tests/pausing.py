"""Code of the tests of interrupted tasks that runs inside Spark's Python workers.

`Pausing` is a stage that passes a number of batches on and then waits, so that its task can be ended exactly at that
boundary. `WatchedOne` and `WatchedSend` are the sink's own tasks, which record where they run and how they ended. All
of them communicate with the driver through files in one directory, `place`.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa

from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.sink.small import OneTask

_LONGEST = 120.0
"""Maximum seconds that a stage waits: its driver may be gone."""


@dataclass(frozen=True)
class Pausing:
    """A function for `mapInArrow`: passes batches on until the next worker has `after` of them, then waits for
    `release`.

    The JVM sends a batch only once it has the first row of the next one, so one more is passed on; without a further
    batch this waits after the last. Only one task waits so, the first that gets this far. The other tasks, and
    repeated attempts, wait there for `let_others` only: a copy that Spark runs beside the first could otherwise end
    the query before the test saw the first wait.
    """

    after: int
    place: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        handed = 0
        for batch in batches:
            yield batch
            handed += 1
            if handed == self.after + 1:
                self._wait(handed)
        if handed <= self.after:
            self._wait(handed)

    def waits(self) -> Waiting | None:
        """Return where this waits; None if it does not wait yet."""
        told = Path(self.place) / "waits"
        if not told.exists():
            return None
        pid, handed = map(int, told.read_text().split())
        return Waiting(psutil.Process(pid), max(0, handed - 1))

    def let_others(self) -> None:
        """Let the other tasks continue."""
        (Path(self.place) / "others").touch()

    def release(self) -> None:
        """Let the waiting task and the others continue."""
        self.let_others()
        (Path(self.place) / "released").touch()

    def _wait(self, handed: int) -> None:
        told, mine = Path(self.place) / "waits", Path(self.place) / f"wait-{os.getpid()}"
        if not told.exists():
            hand_over()
            mine.write_text(f"{os.getpid()} {handed}")
            with suppress(FileExistsError):
                os.link(mine, told)
                self._wait_for("released")
                return
        self._wait_for("others")

    def _wait_for(self, name: str) -> None:
        until = time.monotonic() + _LONGEST
        while time.monotonic() < until and not (Path(self.place) / name).exists():
            time.sleep(0.01)


@dataclass(frozen=True)
class Waiting:
    """The worker that waits, and the number of batches that the next one gets."""

    worker: psutil.Process
    handed: int


def hand_over() -> None:
    """Send the JVM what this worker has written so far: PySpark keeps back up to the size of its buffer."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(stream := frame.f_locals.get("stream"), io.BufferedWriter):
            stream.flush()
            return
    raise RuntimeError("PySpark writes its batches in another way; see dump_stream of ArrowStreamSerializer")


# ---- tasks that are watched ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchedOne(OneTask):
    """`OneTask`, watched."""

    place: str = ""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return watched("OneTask", self.place, partial(OneTask.__call__, self), batches)


@dataclass(frozen=True, slots=True)
class WatchedSend(SendTask):
    """`SendTask`, watched."""

    place: str = ""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return watched("SendTask", self.place, partial(SendTask.__call__, self), batches)


Function = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def watched(name: str, place: str, task: Function, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the results of `task` for `batches`, and record its progress for `seen`."""
    own = f"{name}-{os.getpid()}-{time.monotonic_ns()}"
    came, note = Path(place) / f"came-{own}", Path(place) / f"task-{own}"
    came.touch()
    note.touch()
    how = "was closed"
    try:
        yield from task(_counted(batches, came))
        how = "ended"
    except Exception as error:
        how = f"raised {error}"
        raise
    finally:
        note.write_text(how)


def _counted(batches: Iterator[pa.RecordBatch], came: Path) -> Iterator[pa.RecordBatch]:
    """Yield `batches`, and write a byte for each to the file `came`."""
    for batch in batches:
        with came.open("ab") as file:
            file.write(b".")
        yield batch


@dataclass(frozen=True)
class Seen:
    """One watched task: its name, its worker, the batches that it received, and how it ended.

    `how`: "" if it has not ended, or its worker has died.
    """

    name: str
    pid: int
    came: int
    how: str

    @property
    def over(self) -> bool:
        """Whether the task cannot produce anything more."""
        if self.how:
            return True
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        return True


def seen(place: Path) -> list[Seen]:
    """Return the watched tasks of a directory."""
    found = []
    for note in place.glob("task-*"):
        _, name, pid, _ = note.name.split("-")
        came = note.with_name(note.name.replace("task", "came", 1)).stat().st_size
        found.append(Seen(name, int(pid), came, note.read_text()))
    return found
