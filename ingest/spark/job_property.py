"""A property of Spark's jobs that tells the tasks how to run: the driver sets it, the executors read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class JobProperty:
    """Off by default. `name`: of Spark's local property."""

    name: str

    @contextmanager
    def on(self, spark: SparkSession) -> Iterator[None]:
        """Set it for the jobs of this thread, until the end of the `with`."""
        context = spark.sparkContext
        context.setLocalProperty(self.name, "true")
        try:
            yield
        finally:
            context.setLocalProperty(self.name, None)  # type: ignore[arg-type] # None removes a property

    def is_on(self) -> bool:
        """Return, on an executor, whether the job of this task has it. False outside of Spark."""
        from pyspark import TaskContext

        context = TaskContext.get()
        return context is not None and context.getLocalProperty(self.name) == "true"
