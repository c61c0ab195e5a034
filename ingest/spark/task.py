"""What every Python task of memwal does besides its work: convert errors, skip mapping, limit garbage collection.

**Properties of jobs.** The driver sets a `JobProperty`, tasks on executors read it.

**Jobs that skip mapping.** `drift` reads the records of a micro-batch without mapping them. A Spark plan cannot leave
out a function over Arrow batches, so a job property makes the function return its input unchanged.

**Garbage collection.** After every task, Spark's Python worker collects garbage. The collector visits all objects that
pyarrow, Lance, pydantic and memwal created at import, which takes 50 to 100 ms of CPU and frees nothing, because these
objects live as long as the worker. A micro-batch has up to nine such tasks. `gc.freeze` hides these objects from the
collector; it runs again when a task has imported more modules.

A reference cycle that is alive at the moment of `gc.freeze` is never freed. memwal leaves small cycles only, since the
task has ended by then; other code in the same worker may leave what its first task created.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal.ingest.errors import Invalid, MemWalError, classify, to_wire
from memwal.ingest.secret_refs import UNRESOLVED

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


MARK = "memwal-task-error:"
LOOKING = JobProperty("memwal.look")
"""The job reads records without mapping them."""

_WORKER = "pyspark.worker"
"""A module that only Spark's Python workers import. The driver and tests are not frozen."""
_frozen_with = 0


def freeze_imports() -> None:
    """Freeze imported objects. Call it at the end of a task; it does nothing unless modules were imported since.

    Thread safety. One thread, as a worker runs one task at a time.
    """
    global _frozen_with  # noqa: PLW0603 - one per process, as the collector is
    modules = len(sys.modules)
    if modules != _frozen_with and _WORKER in sys.modules:
        _frozen_with = modules
        gc.collect()
        gc.freeze()


class TaskError(Exception):
    """A `MemWalError` that leaves a Spark task. Its message is the marked line; see `ingest.spark.errors`."""


def as_task_error(error: BaseException) -> TaskError:
    """Return `error`, classified and packed for the driver."""
    return TaskError(MARK + json.dumps(to_wire(on_executor(error)), default=str))


def on_executor(error: BaseException) -> MemWalError:
    """Return `error`, classified.

    If a secret cannot be resolved, the message names this host, because the driver could resolve the secret.
    """
    found = classify(error)
    if found.details.get("reason") != UNRESOLVED:
        return found
    return Invalid(f"{found.message} (on the executor {socket.gethostname()})", found.details)


def task_edge() -> AbstractContextManager[None]:
    """Return a context that converts every error of a task into `TaskError`, then freezes imported objects.

    GeneratorExit, which Spark raises to cancel a task, passes unchanged.
    """
    return _edge(as_task_error)


def source_edge() -> AbstractContextManager[None]:
    """As `task_edge`, for a Python data source: errors become one of the six kinds, which Spark shows."""
    return _edge(on_executor)


@contextmanager
def _edge(converted: Callable[[BaseException], Exception]) -> Iterator[None]:
    try:
        yield
    except (TaskError, GeneratorExit):
        raise
    except BaseException as error:
        from memwal.wal.panics import as_exception  # imported here: few tasks need the storage packages

        raise converted(as_exception(error)) from error
    finally:
        freeze_imports()
