"""Rows between the sink's tasks: in the form that a source produces, and in the form that Spark passes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.spark.source.columns import (
    BLOCK,
    BUCKET,
    COORDINATES,
    FILE,
    LANDED,
    OFFSET,
    PLACE,
    ROW,
    place_column,
)


def placed(
    rows: pa.Table, file: str = "file:///in/a.parquet", block: int = 0, landed: int = 1_000_000
) -> pa.RecordBatch:
    """Return rows in the form that a file source gives to the sink."""
    n = rows.num_rows
    rows = rows.append_column(LANDED, pa.array([landed] * n, pa.timestamp("us", "UTC")))
    rows = rows.append_column(FILE, pa.array([file] * n)).append_column(BLOCK, pa.array([block] * n, pa.int64()))
    return rows.combine_chunks().to_batches()[0]


def ended(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield a micro-batch in the form of the one task: after its rows a row that ends it."""
    batch = None
    for batch in batches:
        yield batch
    columns = [pa.field(BLOCK, pa.int64())] if batch is None else batch.schema
    schema = pa.schema([field.with_nullable(True) for field in columns])
    yield pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)


def shuffled(batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """Do what Spark does between the two tasks."""
    rows = pa.concat_tables(map(pa.table, batches), promote_options="default")
    place = COORDINATES if OFFSET in rows.column_names else PLACE
    order = [name for name in (BUCKET, *place, ROW) if name in rows.column_names]
    by = pc.sort_indices(rows, [(name, "ascending", "at_start") for name in order])
    return rows.take(by).combine_chunks().to_batches()[0]


def uncounted(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the result of `RouteTask` without its count rows."""
    rows = pa.concat_tables(map(pa.table, batches), promote_options="default").combine_chunks().to_batches()[0]
    return rows.filter(pc.is_valid(rows[place_column(rows.schema.names)]))
