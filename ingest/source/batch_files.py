"""The files of a micro-batch, and the options by which Spark finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from memwal.ingest.settings.load import SourceSettings
from memwal.ingest.source.columns import FILE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NO_GLOB = ("__globPaths__", "false")
"""Option of a reader: paths are names of files, whatever these are made of; Spark's file stream reads them so too."""
_FAR = "36500d"  # Spark's default of 7 days makes it leave out, in silence, files older than that beside newer ones


def file_limits(source: SourceSettings) -> dict[str, str]:
    """Options of a stream of files: how many a micro-batch has, and that none is too old."""
    return {"maxFilesPerTrigger": str(source.files_per_trigger), "maxFileAge": _FAR}


def files_of(frame: DataFrame) -> list[str]:
    """The paths of the files of a micro-batch, as readers take them: Spark tells them with odd letters as %20."""
    return [unquote(row[0]) for row in frame.select(FILE).distinct().collect()]
