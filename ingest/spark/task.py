"""What every Python task of memwal does around its work: errors, jobs that only look, and garbage collection.

**Jobs that only look.** `drift` reads the records of a micro-batch without mapping them. A plan of Spark cannot leave
out a function over Arrow batches, so a property of the job tells the function to pass the bytes on and to map nothing.

**Garbage collection.** After every task, a Python worker of Spark collects garbage. This visits all objects that
pyarrow, Lance, pydantic and memwal have made at import, which takes 50 to 100 ms of CPU and frees nothing: they live as
long as the worker. A micro-batch has up to nine such tasks. `gc.freeze` hides these objects from the collector; it is
repeated when a task has imported more modules.

A cycle of objects that is alive at that moment and released later is never freed. Of memwal these are small, since the
task is over then; of other code in the same worker it is what the first task leaves behind.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from memwal.ingest.errors import Invalid, MemWalError, classify, to_wire
from memwal.ingest.secret_refs import UNRESOLVED
from memwal.ingest.spark.job_property import JobProperty

MARK = "memwal-task-error:"
LOOKING = JobProperty("memwal.look")
"""The job only looks at records."""

_WORKER = "pyspark.worker"
"""The module that only Spark's Python workers import; the driver and tests are left alone."""
_frozen_with = 0


def freeze_imports() -> None:
    """Freeze imported objects. Call it at the end of a task; it is free unless the task has imported modules.

    Thread safety. One thread, as a worker has one task at a time.
    """
    global _frozen_with  # noqa: PLW0603 - one per process, as the collector is
    modules = len(sys.modules)
    if modules != _frozen_with and _WORKER in sys.modules:
        _frozen_with = modules
        gc.collect()
        gc.freeze()


class TaskError(Exception):
    """A `MemWalError` that leaves a Spark task. Its message is the marked line, see `ingest.spark.errors`."""


def as_task_error(error: BaseException) -> TaskError:
    """Return `error`, classified and packed for the driver."""
    return TaskError(MARK + json.dumps(to_wire(on_executor(error)), default=str))


def on_executor(error: BaseException) -> MemWalError:
    """Return `error`, classified; with the host if a secret cannot be resolved there, since the driver could resolve
    it.
    """
    found = classify(error)
    if found.details.get("reason") != UNRESOLVED:
        return found
    return Invalid(f"{found.message} (on the executor {socket.gethostname()})", found.details)


@contextmanager
def task_edge() -> Iterator[None]:
    """Turn every error of a task into `TaskError`, and freeze what it imported. GeneratorExit, by which Spark cancels a
    task, passes unchanged."""
    try:
        yield
    except TaskError:
        raise
    except GeneratorExit:
        raise
    except BaseException as error:
        from memwal.wal.panics import as_exception  # not above: few tasks need the storage packages

        raise as_task_error(as_exception(error)) from error
    finally:
        freeze_imports()


@contextmanager
def source_edge() -> Iterator[None]:
    """As `task_edge`, for a Python data source: errors become one of the six kinds, which Spark shows."""
    try:
        yield
    except GeneratorExit:  # Spark has enough rows
        raise
    except BaseException as error:
        from memwal.wal.panics import as_exception

        raise on_executor(classify(as_exception(error))) from error
    finally:
        freeze_imports()
