"""Files of a Spark checkpoint, on a local disk or where only Spark can access them: memwal's own small files, and the
source files of a micro-batch that is replayed.

Spark writes the files of a micro-batch into the checkpoint before it reads them:

    offsets/N      the last line is {"logOffset": K}: micro-batch N ends with entry K of the source's log
    commits/N      micro-batch N is done
    sources/0/K    the files of entry K, one JSON object a line: {"path": "file:///…", "timestamp": …, "batchId": K}
    sources/0/K.compact    the same, with the files of all earlier entries

A replay reads the files that still exist, and does not report the others; `log_deleted_files` does.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memwal.ingest.settings.sections import is_remote, local_path
from memwal.wal.store.local import sync_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class CheckpointFiles(Protocol):
    """The files of one checkpoint. Names are relative to it. Raises: OSError, or errors of Spark."""

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist."""

    def write(self, name: str, text: str) -> None:
        """Create or replace a file atomically. The file survives a crash once this returns."""

    def names(self, directory: str) -> list[str]:
        """Return the names of the files in `directory`, unordered; an empty list if it does not exist."""


def checkpoint_files(spark: SparkSession, checkpoint: str) -> CheckpointFiles:
    """Return access to the files of `checkpoint`, a local path or a Hadoop URL."""
    return SparkFiles(spark, checkpoint) if is_remote(checkpoint) else LocalFiles(local_path(checkpoint))


class LocalFiles:
    """A checkpoint on a local disk; see `CheckpointFiles`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> str | None:
        """See `CheckpointFiles`."""
        file = self._root / name
        return file.read_text(encoding="utf-8") if file.exists() else None

    def write(self, name: str, text: str) -> None:
        """See `CheckpointFiles`."""
        self._root.mkdir(parents=True, exist_ok=True)
        whole = self._root / f".{name}"
        with whole.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self._root / name)
        sync_path(self._root)

    def names(self, directory: str) -> list[str]:
        """See `CheckpointFiles`."""
        found = self._root / directory
        return [file.name for file in found.iterdir()] if found.is_dir() else []


class SparkFiles:
    """A checkpoint on a Hadoop file system, written as Spark writes its own files there; see `CheckpointFiles`."""

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm  # noqa: SLF001 - PySpark has no public access to JVM classes
        conf = context._jsc.hadoopConfiguration()  # noqa: SLF001
        self._path = self._jvm.org.apache.hadoop.fs.Path(checkpoint)
        self._files = self._path.getFileSystem(conf)
        managers = self._jvm.org.apache.spark.sql.execution.streaming.checkpointing
        self._manager = getattr(managers, "CheckpointFileManager$").__getattr__("MODULE$").create(self._path, conf)

    def read(self, name: str) -> str | None:
        """See `CheckpointFiles`."""
        if not self._files.exists(self._at(name)):
            return None
        stream = self._files.open(self._at(name))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """See `CheckpointFiles`."""
        self._manager.mkdirs(self._path)
        stream = self._manager.createAtomic(self._at(name), True)
        stream.write(bytearray(text.encode()))
        stream.close()

    def names(self, directory: str) -> list[str]:
        """See `CheckpointFiles`."""
        found = self._at(directory)
        statuses = self._files.listStatus(found) if self._files.exists(found) else []
        return [str(status.getPath().getName()) for status in statuses]

    def _at(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._path, name)


# ---- deleted files --------------------------------------------------------------------------------------------------


_LOG = logging.getLogger("memwal.pipeline")
_NAMED = 10
"""Maximum number of files named in a log line."""


def log_deleted_files(spark: SparkSession, table: str, files: CheckpointFiles) -> None:
    """Log one line that names the deleted files of the micro-batch that Spark is about to replay, if any.

    `files`: of the checkpoint. Raises: OSError and errors of Spark if the checkpoint or the source cannot be read.
    """
    begun = max(numbers(files, "offsets"), default=-1)
    if begun <= max(numbers(files, "commits"), default=-1):
        return
    gone = [path for path in _planned(files, begun) if not _exists(spark, path)]
    if gone:
        named = ", ".join(gone[:_NAMED]) + (f" and {len(gone) - _NAMED:,} more" if len(gone) > _NAMED else "")
        _LOG.warning(
            "%s: deleted since the last run, so the rows of these files are left out of micro-batch %d, which had "
            "failed: %s; to load a file, land it under another name",
            table,
            begun,
            named,
        )


def _planned(files: CheckpointFiles, batch_id: int) -> Iterator[str]:
    """Yield the URLs of the files of a micro-batch."""
    for entry in range(_end(files, batch_id - 1) + 1, _end(files, batch_id) + 1):
        text = files.read(f"sources/0/{entry}") or files.read(f"sources/0/{entry}.compact") or ""
        for line in text.splitlines()[1:]:
            file = json.loads(line)
            if file["batchId"] == entry:
                yield str(file["path"])


def _end(files: CheckpointFiles, batch_id: int) -> int:
    """Return the last log entry of a micro-batch; -1 if the checkpoint lacks its offsets."""
    text = files.read(f"offsets/{batch_id}")
    return -1 if text is None else int(json.loads(text.splitlines()[-1])["logOffset"])


def _exists(spark: SparkSession, url: str) -> bool:
    context: Any = spark.sparkContext
    jvm = context._jvm  # noqa: SLF001 - PySpark has no public access to JVM classes
    path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(url))
    return bool(path.getFileSystem(context._jsc.hadoopConfiguration()).exists(path))  # noqa: SLF001


def numbers(files: CheckpointFiles, directory: str) -> list[int]:
    """Return the numbers of the micro-batches that Spark has noted in `directory`, unordered."""
    return [int(name) for name in files.names(directory) if name.isdecimal()]
