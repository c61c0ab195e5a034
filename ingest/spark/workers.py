"""The Python of Spark's workers: it must have memwal, as tasks of the sink and of the data source run in it.

PySpark runs `python3` of the PATH unless PYSPARK_PYTHON is set. If a program is started by the Python of a virtual
environment that is not activated, that is another Python, without memwal.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from memwal.ingest.errors import Invalid
from memwal.ingest.spark.errors import of_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("memwal.spark")
_VARIABLE = "PYSPARK_PYTHON"


def use_own_python(spark: SparkSession) -> None:
    """Let workers run the Python of this process, if Spark runs on this host and PYSPARK_PYTHON is not set.

    A session of Spark Connect is left alone: its workers belong to a server.
    """
    context: Any = getattr(spark, "sparkContext", None)
    if context is None or _VARIABLE in os.environ or not str(context.master).startswith("local"):
        return
    if context.pythonExec != sys.executable:
        _LOG.info("Spark's Python workers run %s; set %s for another Python", sys.executable, _VARIABLE)
        context.pythonExec = sys.executable


def check_workers(spark: SparkSession) -> None:
    """As `use_own_python`; if workers run another Python, or are on other hosts, run a task that looks for memwal.

    Raises: Invalid if memwal is not there, or the Python cannot be used; Internal if Spark cannot run the task.
    """
    use_own_python(spark)
    context: Any = getattr(spark, "sparkContext", None)
    if context is None or (context.pythonExec == sys.executable and str(context.master).startswith("local")):
        return
    try:
        # Functions of the standard library: a worker without memwal could not import one of ours.
        (found,) = context.parallelize(["memwal"], 1).map(find_spec).map(bool).collect()
    except Exception as error:
        raise of_spark(error) from error
    if not found:
        raise Invalid(
            f"Spark's Python workers run {context.pythonExec}, which cannot import memwal: set {_VARIABLE} to a Python "
            f"that has it on every host ({sys.executable} has it here), or bring it by spark.submit.pyFiles or "
            "spark.archives"
        )
