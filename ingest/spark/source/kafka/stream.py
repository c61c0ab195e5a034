"""Kafka as the source: Spark's own Kafka source, the mapping of its records, and checks before the start.

The README of `source` has the steps of a record. SQL that fails for one row must not fail other rows, but Spark's ANSI
SQL ends a whole job at the first `1 / 0`. Spark's `try_` functions use an internal expression, `TryEval`, which is null
if anything below it throws. SQL and PySpark do not offer it, so it is created in the JVM. A struct around the value
distinguishes a null result from a failure.

Requires. `spark.sql.subexpressionElimination.enabled = false`: otherwise Spark evaluates common subexpressions first,
outside of `TryEval`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import KAFKA, SourceSettings
from memwal.ingest.spark.checkpoint_files import checkpoint_files
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.reading import DriverRead, SourceRows
from memwal.ingest.spark.schema import spark_type
from memwal.ingest.spark.session import check_java, configuration, start_session
from memwal.ingest.spark.source import columns as col
from memwal.ingest.spark.source.kafka.rows import (
    KEY_PROBLEM,
    MapTask,
    column_name,
    nested,
    record_mapping,
    rows_without_sql,
)
from memwal.ingest.spark.source.kafka.topics import Admin, TopicGuard, check_places
from memwal.ingest.values.spec import KEY, PLAIN, VALUE, Column, RecordMapping

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_HELD = "_memwal_held"
_CONNECT_WITHIN = 5.0
_POLL_RECORDS = ("kafka.max.poll.records", "100000")
"""After each poll, Spark asks the broker twice for the end of the partition and drops records fetched beyond the poll.

Kafka's default limits a poll to 500 records. Fetches are also limited in bytes (max.partition.fetch.bytes).
"""
_FETCH_WAIT = ("kafka.fetch.max.wait.ms", "0")
"""Time that the broker holds a fetch while it has no new records.

Spark fetches only existing records. But after a poll the client fetches ahead, and the broker answers Spark's next
request for the end of the partition only after it has answered that fetch. Kafka's default of 500 ms adds half a second
for each partition of a quiet topic.
"""
_COMMITTED = ("kafka.isolation.level", "read_committed")
"""Skip records of aborted transactions; by default Spark reads them."""


# ---- checks --------------------------------------------------------------------------------------------------------


def check_reachable(source: SourceSettings) -> None:
    """Raise Unavailable if no broker accepts a connection. A quick check before anything is started."""
    reasons = []
    for broker in source.brokers.split(","):
        host, _, port = broker.strip().rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_WITHIN):
                return
        except (OSError, OverflowError) as error:
            reasons.append(f"{broker.strip()}: {getattr(error, 'strerror', None) or error}")
    raise Unavailable(
        f"source.brokers: no broker answers ({'; '.join(reasons)}); start Kafka, or correct the address; "
        "nothing was read or written"
    )


def check_topics(spark: SparkSession, settings: Settings) -> None:
    """Connect to the brokers as Spark's source does, and check the topics to read. Reads only.

    Raises: Invalid for a topic that does not exist or differs from the checkpoint's topic, and for rejected
    credentials; Unavailable if no broker answers.
    """
    with closing(Admin(spark, settings.source)) as admin:
        check_places(settings, admin.wanted(), checkpoint_files(spark, settings.checkpoint))


def first_values(settings: Settings, most: int) -> list[bytes]:
    """Return the values of the first records of a topic, at most `most`, without tombstones. Starts Spark.

    Raises: as `check_topics`; Invalid if no record has a value.
    """
    source = settings.source
    check_reachable(source)
    check_java(os.environ)
    try:
        spark = start_session(configuration(settings, 1, once=True))
        with closing(Admin(spark, source)) as admin:
            admin.wanted()
        reader = spark.read.format(KAFKA).options(**resolve(source.options, os.environ, "[source] options"))
        records = reader.options(**_reader_options(source, headers=False)).load()
        values = [bytes(row.value) for row in records.where("value is not null").select("value").limit(most).collect()]
    except Exception as error:
        raise of_spark(error) from error
    if not values:
        raise Invalid(f"source.topics: no record of {', '.join(source.topics)} has a value; send one, then try again")
    return values


def topic_guard(spark: SparkSession, settings: Settings) -> TopicGuard:
    """Return the guard of a streaming query. Close it with the query. Raises: as `Admin`."""
    return TopicGuard(settings, Admin(spark, settings.source), checkpoint_files(spark, settings.checkpoint))


# ---- the stream ----------------------------------------------------------------------------------------------------


def read_kafka(
    spark: SparkSession, source: SourceSettings, schema: pa.Schema, key: tuple[str, ...], *, raw: bool = False
) -> SourceRows:
    """Return the rows of `source`: the columns of `schema`, LANDED, COORDINATES, DELETE and PROBLEM.

    `raw`: add the bytes of the records. If the mapping contains SQL, every micro-batch needs a job, since Spark
    evaluates the SQL.
    """
    mapping = record_mapping(source, schema, key)
    reader = spark.readStream.format(KAFKA).options(**resolve(source.options, os.environ, "[source] options"))
    records = reader.options(**_reader_options(source, headers=raw or mapping.headers)).load()
    driver = DriverRead(scan=records)

    def small(frame: DataFrame) -> pa.RecordBatch | None:
        found = driver.read(frame)
        return rows_without_sql(found, mapping, raw=raw) if found is not None and found.num_rows else found

    # At most as many tasks as cores if Spark runs in this process, since each further task wakes two Python workers. No
    # limit on a cluster, where the number of cores changes.
    context = spark.sparkContext
    few = records.coalesce(context.defaultParallelism) if str(context.master).startswith("local[") else records
    return SourceRows(rows_of(few, mapping, raw=raw), None if mapping.has_sql else small)


def _reader_options(source: SourceSettings, *, headers: bool) -> dict[str, str]:
    where = {"subscribe": ",".join(source.topics)} if source.topics else {"subscribePattern": source.topic_pattern}
    limit = source.max_offsets_per_trigger
    given = {name.lower() for name in source.options}
    return {
        **{name: value for name, value in (_POLL_RECORDS, _FETCH_WAIT, _COMMITTED) if name not in given},
        "kafka.bootstrap.servers": source.brokers,
        **where,
        "startingOffsets": source.starting_offsets,
        "failOnDataLoss": str(source.fail_on_data_loss).lower(),
        "includeHeaders": str(headers).lower(),
        **({"maxOffsetsPerTrigger": str(limit)} if limit else {}),
    }


def rows_of(records: DataFrame, mapping: RecordMapping, *, raw: bool = False) -> DataFrame:
    """Return the rows of records from Spark's Kafka source (streaming or not)."""
    from pyspark.sql import functions as F  # noqa: N812 - the name in Spark's documentation

    wanted = [KEY, VALUE, *PLAIN, *(["headers"] if raw or mapping.headers else [])]
    mapped = records.select(*wanted).mapInArrow(MapTask(mapping, raw), _schema(mapping, raw=raw))
    delete, problem = F.col(col.DELETE), F.col(col.PROBLEM)
    if mapping.delete_when:
        asked = F.when(F.col(KEY_PROBLEM).isNull() & ~delete, F.coalesce(F.expr(mapping.delete_when), F.lit(False)))
        mapped, held = mapped.select("*", tried(asked).alias(_HELD)), F.col(_HELD)
        odd = F.when(held.isNull(), F.lit(f"map: delete_when cannot be evaluated: {mapping.delete_when}"))
        delete = delete | F.coalesce(held[TRIED], F.lit(False))
        problem = F.when(delete, F.col(KEY_PROBLEM)).otherwise(F.coalesce(problem, odd))
    usable = problem.isNull()
    # SQL is not evaluated for an unusable row: a failure would hide the first reason.
    sql = {number: column for number, column in enumerate(mapping.columns) if column.sql}
    values = {n: F.when(usable, F.expr(each.sql).cast(spark_type(each.kind))) for n, each in sql.items()}
    mapped = mapped.select("*", *(tried(value).alias(column_name(number)) for number, value in values.items()))
    columns = []
    for number, column in enumerate(mapping.columns):
        found = F.col(column_name(number))
        if column.sql:
            counts = F.lit(column.key) | ~delete
            problem = F.coalesce(problem, F.when(counts, _problem_of(column, found)))
            found = found[TRIED]
        emptied = mapping.has_sql and not column.key
        columns.append((F.when(~delete, found) if emptied else found).alias(column.name))
    place = (col.LANDED, *col.COORDINATES, *(col.RAW if raw else ()))
    return mapped.select(*columns, *place, delete.alias(col.DELETE), problem.alias(col.PROBLEM))


def _problem_of(column: Column, found: SparkColumn) -> SparkColumn:
    """Return the problem of the value of `column`, or null. `found`: the result of `tried`."""
    from pyspark.sql import functions as F  # noqa: N812

    failed = F.when(found.isNull(), F.lit(f"map: column {column.name!r} (sql) cannot be evaluated: {column.sql}"))
    if not column.required:
        return failed
    null = f"map: column {column.name!r} (sql) is null; it must have a value, write coalesce(…, …)"
    return F.coalesce(failed, F.when(found[TRIED].isNull(), F.lit(null)))


def _schema(mapping: RecordMapping, *, raw: bool) -> StructType:
    """Return the schema of `MapTask`'s output, which Spark requires beforehand."""
    from pyspark.sql import types as spark

    found: dict[str, Any] = {
        column_name(n): spark_type(c.kind) for n, c in enumerate(mapping.columns) if c.leaf is not None
    }
    found |= nested((leaf, spark_type(leaf.kind)) for leaf in mapping.inputs)
    ours: dict[str, DataType] = {
        col.LANDED: spark.TimestampType(),
        col.TOPIC: spark.StringType(),
        col.PARTITION: spark.IntegerType(),
        col.OFFSET: spark.LongType(),
        col.DELETE: spark.BooleanType(),
        col.PROBLEM: spark.StringType(),
        KEY_PROBLEM: spark.StringType(),
    }
    if raw:
        ours |= {
            col.RAW_KEY: spark.BinaryType(),
            col.RAW_VALUE: spark.BinaryType(),
            col.RAW_HEADERS: spark_type(col.HEADERS_TYPE),
        }
    return _struct(found | ours)


def _struct(fields: Mapping[str, Any]) -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType(
        [StructField(name, _struct(kind) if isinstance(kind, dict) else kind, True) for name, kind in fields.items()]
    )


TRIED = "value"


def tried(value: SparkColumn) -> SparkColumn:
    """Return a struct with `value` as its field TRIED; null if the value cannot be evaluated."""
    from pyspark import SparkContext
    from pyspark.sql import functions
    from pyspark.sql.classic.column import Column as ClassicColumn

    active: Any = SparkContext._active_spark_context  # noqa: SLF001 - PySpark has no public access to JVM classes
    sql = active._jvm.org.apache.spark.sql  # noqa: SLF001
    utils, packed = sql.classic.ExpressionUtils, functions.struct(value.alias(TRIED))
    return ClassicColumn(utils.column(sql.catalyst.expressions.TryEval(utils.expression(packed._jc))))  # noqa: SLF001
