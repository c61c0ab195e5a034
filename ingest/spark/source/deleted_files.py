"""Report files of a failed micro-batch that were deleted before Spark replays the micro-batch.

Spark writes the files of a micro-batch into the checkpoint before it reads them:

    offsets/N      the last line is {"logOffset": K}: micro-batch N ends with entry K of the source's log
    commits/N      micro-batch N is done
    sources/0/K    the files of entry K, one JSON object a line: {"path": "file:///…", "timestamp": …, "batchId": K}
    sources/0/K.compact    the same, with the files of all earlier entries

A replay reads the files that still exist, and does not report the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memwal.ingest.spark.checkpoint_files import CheckpointFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("memwal.pipeline")
_NAMED = 10
"""Maximum number of files named in a log line."""


def log_deleted_files(spark: SparkSession, table: str, files: CheckpointFiles) -> None:
    """Log one line that names the deleted files of the micro-batch that Spark is about to replay, if any.

    `files`: of the checkpoint. Raises: OSError and errors of Spark if the checkpoint or the source cannot be read.
    """
    begun = max(_numbers(files, "offsets"), default=-1)
    if begun <= max(_numbers(files, "commits"), default=-1):
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


def _numbers(files: CheckpointFiles, directory: str) -> list[int]:
    return [int(name) for name in files.names(directory) if name.isdecimal()]
