"""The rows of a source: a streaming frame, a faster way to few of them, and a check that they may be sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


class SourceGuard(Protocol):
    """Checks, in each micro-batch, that the source is still the one that the checkpoint knows. Errors. MemWalError.

    Rows are sent only after `check`, which is called once all of them were read; rows that are read again are checked
    again.
    """

    def begin(self, batch_id: int) -> None:
        """Prepare micro-batch `batch_id`, before its rows are read."""

    def check(self) -> None:
        """Raise an error unless the rows that were read since `begin` may be sent."""
