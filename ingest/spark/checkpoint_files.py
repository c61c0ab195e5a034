"""memwal's own small files in a Spark checkpoint, on a local disk or on a file system that only Spark can access."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memwal.ingest.settings.paths import is_remote, local_path

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
        directory = os.open(self._root, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

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
