"""The rows of a source: a streaming frame, a faster way to read few rows, and a check before rows are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SmallReader = Callable[["DataFrame"], pa.RecordBatch | None]
"""Reads all rows of a small micro-batch in the driver, without a Spark job (`ingest.spark.driver_read`).

Returns a batch without columns for an empty micro-batch; None if there are many rows, or if the driver cannot read
them.
"""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """What a streaming query reads."""

    frame: DataFrame
    small: SmallReader | None = None
    """Reads small micro-batches of `frame`."""


class SourceGuard(Protocol):
    """Checks in each micro-batch that the source is still the one that the checkpoint refers to. Raises: MemWalError.

    The sink calls `check` once all rows are read and before it sends any. Rows that are read again are checked again.
    """

    def begin(self, batch_id: int) -> None:
        """Prepare micro-batch `batch_id`, before its rows are read."""

    def check(self) -> None:
        """Raise an error unless the rows that were read since `begin` may be sent."""
