"""A look at the records of a micro-batch, without the rows that they would be mapped to.

A plan of Spark cannot leave out a function over Arrow batches, so the look would have every record mapped once more,
for nothing. A property of the job tells the function instead: it passes the bytes on, and maps none.

What Spark's Python workers keep from task to task, and how that stays out of their way.

After every task, and before it looks for the next one, a worker of Spark collects garbage. That goes through all that
pyarrow, Lance, pydantic and memwal have made when they were imported, 50 to 100 ms of processor time, and finds
nothing: it lives as long as the worker. A micro-batch is up to nine such tasks. `gc.freeze` takes what lives out of the
collector's sight; it is done again where a task has imported more.

A cycle of objects that lives at such a moment and is let go later stays: of memwal's nothing of a size, since all of a
task is over then; of other code in the same worker what its first task leaves behind.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memwal.ingest.errors import Invalid, MemWalError, classify, to_wire
from memwal.ingest.secret_refs import UNRESOLVED

MARK = "memwal-task-error:"

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


_WORKER = "pyspark.worker"
"""The module that only Spark's Python workers import: what the driver or a test has is none of our business."""
_frozen_with = 0


def keep_what_is_imported() -> None:
    """Call it at the end of a task; costs something only where the task has imported modules.

    Thread safety. One thread, as a worker has one task at a time.
    """
    global _frozen_with  # noqa: PLW0603 - one per process, as the collector is
    modules = len(sys.modules)
    if modules != _frozen_with and _WORKER in sys.modules:
        _frozen_with = modules
        gc.collect()
        gc.freeze()


class TaskError(Exception):
    """A `MemWalError` on its way out of a Spark task. Its message is the marked line."""


def carried(error: BaseException) -> TaskError:
    """`error`, classified and packed for the way from a task to the driver."""
    return TaskError(MARK + json.dumps(to_wire(on_executor(error)), default=str))


def on_executor(error: BaseException) -> MemWalError:
    """`error`, classified, with the place where that is what must be known: the driver had what is missing there."""
    found = classify(error)
    if found.details.get("reason") != UNRESOLVED:
        return found
    return Invalid(f"{found.message} (this is said by an executor, on {socket.gethostname()})", found.details)


@contextmanager
def task_edge() -> Iterator[None]:
    """Let a task's code raise only `TaskError`, and leave the worker ready for the next task (`task_memory`). A task
    that Spark cancels (GeneratorExit) passes untouched."""
    try:
        yield
    except TaskError:
        raise
    except GeneratorExit:
        raise
    except BaseException as error:
        from memwal.wal.panics import as_exception  # not above: few tasks have use for the storage packages

        raise carried(as_exception(error)) from error
    finally:
        keep_what_is_imported()
