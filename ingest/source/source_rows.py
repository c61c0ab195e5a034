"""The rows of a source: a streaming frame, and a faster way to few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SmallReader = Callable[["DataFrame"], pa.RecordBatch | None]
"""Returns all rows of a micro-batch, read by the driver without a Spark job, where they are few: a batch without
columns if there are none. None where they are many, or it cannot (`ingest.spark.driver_read`)."""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """What a streaming query reads."""

    frame: DataFrame
    small: SmallReader | None = None
    """For micro-batches of `frame`."""
