"""Select and check the Python of Spark's workers: tasks of the sink and of the data source import memwal.

Unless PYSPARK_PYTHON is set, PySpark runs the `python3` on PATH. For a program started by the Python of a virtual
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
    """Make workers run the Python of this process, if Spark runs on this host and PYSPARK_PYTHON is not set.

    A Spark Connect session is not changed: its workers belong to a server.
    """
    context: Any = getattr(spark, "sparkContext", None)
    if context is None or _VARIABLE in os.environ or not str(context.master).startswith("local"):
        return
    if context.pythonExec != sys.executable:
        _LOG.info("Spark's Python workers run %s; set %s for another Python", sys.executable, _VARIABLE)
        context.pythonExec = sys.executable


def check_workers(spark: SparkSession) -> None:
    """Call `use_own_python`; if workers run another Python or on other hosts, run a task that checks for memwal.

    Raises: Invalid if memwal is missing or the Python cannot be used; Internal if Spark cannot run the task.
    """
    use_own_python(spark)
    context: Any = getattr(spark, "sparkContext", None)
    if context is None or (context.pythonExec == sys.executable and str(context.master).startswith("local")):
        return
    try:
        # The task uses the standard library only: a worker without memwal cannot import memwal's functions.
        (found,) = context.parallelize(["memwal"], 1).map(find_spec).map(bool).collect()
    except Exception as error:
        raise of_spark(error) from error
    if not found:
        raise Invalid(
            f"Spark's Python workers run {context.pythonExec}, which cannot import memwal: set {_VARIABLE} to a Python "
            f"that has it on every host ({sys.executable} has it here), or bring it by spark.submit.pyFiles or "
            "spark.archives"
        )
