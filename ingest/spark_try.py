"""SQL that fails for one row must not fail the others: Spark's ANSI SQL ends a whole job at the first `1 / 0`.

Spark has `try_` forms of some functions; behind them is one expression, `TryEval`, which is null where anything below
it throws. It is no SQL and has no place in PySpark, so it is made in the JVM. A null that SQL itself gives is told from
a failure by a struct around the value. It takes `spark.sql.subexpressionElimination.enabled = false`: what two
expressions share would be evaluated before either of them otherwise, outside of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

TRIED = "value"
CONFIGURATION = {"spark.sql.subexpressionElimination.enabled": "false"}


def tried(value: Column) -> Column:
    """A struct with `value` as its field TRIED; null where the value cannot be evaluated."""
    from pyspark import SparkContext
    from pyspark.sql import functions
    from pyspark.sql.classic.column import Column as ClassicColumn

    active: Any = SparkContext._active_spark_context  # noqa: SLF001 - PySpark has no public way to a class of the JVM
    sql = active._jvm.org.apache.spark.sql  # noqa: SLF001
    utils, packed = sql.classic.ExpressionUtils, functions.struct(value.alias(TRIED))
    return ClassicColumn(utils.column(sql.catalyst.expressions.TryEval(utils.expression(packed._jc))))  # noqa: SLF001
