"""Convert dead letters back to rows: read raw bytes as the stream of their source reads them.

Dead letters of files are rows as JSON. Dead letters of Kafka are records; they go through the mapping of `[source]` in
this process. A Spark session is started only if the mapping has SQL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import KAFKA
from memwal.ingest.spark.dlq.bad_rows import BadRow, columns_of, problems_of
from memwal.ingest.spark.source.columns import DELETE, OFFSET, PARTITION, TOPIC
from memwal.ingest.spark.source.files import ALL_TEXT, has_lines
from memwal.ingest.spark.source.kafka.rows import record_mapping, rows_without_sql
from memwal.ingest.values.spec import RecordMapping


@dataclass(frozen=True, slots=True)
class Mapped:
    """The rows of dead letters. `rows[n]` comes from letter number `of[n]`; letters without a row are in `failed`.

    The columns of `rows` are the table's, and `DELETE` if the source has deletes.
    """

    rows: pa.RecordBatch
    of: Sequence[int]
    failed: Mapping[int, BadRow]


Map = Callable[[pa.Table], Mapped]
"""A function from dead letters (`table.SCHEMA`, with raw bytes) to rows."""


def by_source(settings: Settings, schema: pa.Schema, key: tuple[str, ...]) -> Map:
    """Return the function that reads dead letters of the source of `settings` into columns of `schema`.

    Dead letters of another source fail. Raises: Invalid for a mapping that does not fit the table.
    """
    form, of_topics = settings.source.format, settings.source.format == KAFKA
    read: Map
    if of_topics:
        mapping = record_mapping(settings.source, schema, key)
        read = partial(rows_of_records, mapping=mapping, settings=settings)
    else:
        lines = has_lines(form, settings.source.options)
        read = partial(rows_of_json, schema=schema, texts=form in ALL_TEXT, lines=lines)
    other = "a file" if of_topics else "a Kafka topic"
    why = BadRow("map", None, f"it came from {other}; replay it with the configuration of that source")
    return lambda letters: _read_some(letters, np.asarray(letters["topic"].is_valid()) == of_topics, read, why)


def _read_some(letters: pa.Table, wanted: npt.NDArray[np.bool_], read: Map, why: BadRow) -> Mapped:
    """Read the letters in `wanted`; the others fail for the reason `why`."""
    numbers = np.flatnonzero(wanted)
    found = read(letters.take(pa.array(numbers)))
    failed = {int(numbers[at]): each for at, each in found.failed.items()}
    failed |= {int(at): why for at in np.flatnonzero(~wanted)}
    return Mapped(found.rows, [int(numbers[at]) for at in found.of], failed)


# ---- records of Kafka ----------------------------------------------------------------------------------------------


def rows_of_records(letters: pa.Table, mapping: RecordMapping, settings: Settings) -> Mapped:
    """Map records to rows. A mapping that reads headers fails dead letters of older versions, which have no headers."""
    kept = np.ones(letters.num_rows, dtype=bool)
    if mapping.headers:
        kept = np.asarray(letters["raw_headers"].is_valid()) if "raw_headers" in letters.column_names else ~kept
    old = BadRow(
        "map", None, "the mapping reads headers, which this dead letter does not have; produce the record again"
    )
    return _read_some(letters, kept, lambda some: _rows_of(some, mapping, settings), old)


def _rows_of(letters: pa.Table, mapping: RecordMapping, settings: Settings) -> Mapped:
    if not letters.num_rows:
        return Mapped(pa.RecordBatch.from_pydict({}), [], {})
    of_records = {"raw_key": "key", "raw_value": "value", "topic": "topic", "partition": "partition"}
    of_records |= {"offset": "offset", "landed": "timestamp"} | ({"raw_headers": "headers"} if mapping.headers else {})
    records = letters.select(list(of_records)).rename_columns(list(of_records.values()))
    if mapping.has_sql:
        rows = _by_spark(records, mapping, settings)
    else:
        rows = rows_without_sql(records.combine_chunks().to_batches()[0], mapping)
    failed = problems_of(rows)
    good = [row for row in range(rows.num_rows) if row not in failed]
    names = [*(each.name for each in mapping.columns), DELETE]
    return Mapped(rows.select(names).take(pa.array(good, pa.int64())), good, failed)


def _by_spark(records: pa.Table, mapping: RecordMapping, settings: Settings) -> pa.RecordBatch:
    """As `rows_without_sql`, with SQL, in a local Spark; in the order of `records`."""
    from memwal.ingest.spark.session import configuration, start_session
    from memwal.ingest.spark.source.kafka.stream import rows_of

    conf = configuration(settings, 1, once=True) | {"spark.master": "local[1]"}
    conf.pop("spark.jars.packages", None)  # Kafka is not read here
    rows = rows_of(start_session(conf).createDataFrame(records), mapping).toArrow()
    places = zip(*(rows[name].to_pylist() for name in (TOPIC, PARTITION, OFFSET)), strict=True)
    at = {each: row for row, each in enumerate(places)}
    wanted = zip(*(records[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True)
    order = pa.array([at[each] for each in wanted], pa.int64())
    return rows.take(order).combine_chunks().to_batches()[0]


@contextmanager
def ending_spark() -> Iterator[None]:
    """When the context exits, stop the Spark that was started inside it to read records with SQL."""
    before = _session()
    try:
        yield
    finally:
        if before is None and (started := _session()) is not None:
            started.stop()


def _session() -> Any:
    """Return the Spark session of this process; None without one. Does not import Spark."""
    sql = sys.modules.get("pyspark.sql")
    return None if sql is None else sql.SparkSession.getActiveSession()


# ---- rows as JSON --------------------------------------------------------------------------------------------------


def rows_of_json(letters: pa.Table, schema: pa.Schema, *, texts: bool = False, lines: bool = False) -> Mapped:
    """Read dead letters whose `raw_value` is a JSON object, as `columns_of`."""
    columns, failed = columns_of(letters["raw_value"].to_pylist(), schema, texts=texts, lines=lines)
    good = [row for row in range(letters.num_rows) if row not in failed]
    return Mapped(pa.RecordBatch.from_pydict(columns).take(pa.array(good, pa.int64())), good, failed)
