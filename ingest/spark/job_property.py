"""A boolean property of Spark jobs: the driver sets it, tasks on executors read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class JobProperty:
    """A property that is off by default. `name`: name of the Spark local property."""

    name: str

    @contextmanager
    def on(self, spark: SparkSession) -> Iterator[None]:
        """Set the property for the jobs of this thread while the context is open."""
        context = spark.sparkContext
        context.setLocalProperty(self.name, "true")
        try:
            yield
        finally:
            context.setLocalProperty(self.name, None)  # type: ignore[arg-type] # None removes a property

    def is_on(self) -> bool:
        """Return, on an executor, whether the job of this task has the property. False outside of Spark."""
        from pyspark import TaskContext

        context = TaskContext.get()
        return context is not None and context.getLocalProperty(self.name) == "true"
