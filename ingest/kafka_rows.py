"""Rows of Kafka that cannot be used end their micro-batch, named by topic, partition and offset."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from ingest.errors import Invalid
from ingest.source import COORDINATES, OFFSET, PROBLEM


def refuse_unusable(batch: pa.RecordBatch) -> None:
    """Raises: Invalid for the first row that the mapping found a problem in."""
    if PROBLEM not in batch.schema.names or batch[PROBLEM].null_count == batch.num_rows:
        return
    row = pc.index(pc.is_valid(batch[PROBLEM]), True).as_py()
    raise Invalid(
        f"source: {at_coordinates(batch, row)}: {batch[PROBLEM][row].as_py()}",
        {name.removeprefix("_memwal_"): batch[name][row].as_py() for name in COORDINATES},
    )


def at_coordinates(batch: pa.RecordBatch, row: int) -> str:
    """Where a row of a batch with `COORDINATES` lies."""
    topic, partition, offset = (batch[name][row].as_py() for name in (*COORDINATES[:2], OFFSET))
    return f"topic {topic}, partition {partition}, offset {offset}"
