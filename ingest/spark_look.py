"""A look at the records of a micro-batch, without the rows that they would be mapped to.

A plan of Spark cannot leave out a function over Arrow batches, so the look would have every record mapped once more,
for nothing. A property of the job tells the function instead: it passes the bytes on, and maps none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROPERTY = "memwal.look"


@contextmanager
def only_looking(spark: SparkSession) -> Iterator[None]:
    """Jobs of this thread only look, until the end of the `with`."""
    context = spark.sparkContext
    context.setLocalProperty(_PROPERTY, "true")
    try:
        yield
    finally:
        context.setLocalProperty(_PROPERTY, None)  # type: ignore[arg-type] # what takes a property away


def is_looking() -> bool:
    """On an executor: whether the job only looks. False outside of Spark."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.getLocalProperty(_PROPERTY) == "true"
