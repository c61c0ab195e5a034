"""What Spark's Python workers keep from task to task, and how that stays out of their way.

After every task, and before it looks for the next one, a worker of Spark collects garbage. That goes through all that
pyarrow, Lance, pydantic and memwal have made when they were imported, 50 to 100 ms of processor time, and finds
nothing: it lives as long as the worker. A micro-batch is up to nine such tasks. `gc.freeze` takes what lives out of the
collector's sight; it is done again where a task has imported more.

A cycle of objects that lives at such a moment and is let go later stays: of memwal's nothing of a size, since all of a
task is over then; of other code in the same worker what its first task leaves behind.
"""

from __future__ import annotations

import gc
import sys

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
