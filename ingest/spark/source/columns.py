"""Names of the columns that rows have in addition to the table's, on their way from a source to the regions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.ingest.engine.api.rows import split_deletes
from memwal.memtable import TOMBSTONE, emptied

ROW, BUCKET = "_memwal_row", "_memwal_bucket"
"""Columns of routed rows: number of the row within its part of the source (int64), region of the row (int32)."""
TABLE = "_memwal_table"
"""Name of the table of a row (text), if the rows of a source go to many tables (`sink.send`)."""
PART = "_memwal_part"
"""One number that replaces `PLACE` (`sink.small`)."""

LANDED, FILE, BLOCK = "_memwal_landed", "_memwal_file", "_memwal_block"
PLACE = (LANDED, FILE, BLOCK)
"""Columns that form the place of a row in a file source, most significant first."""
TOPIC, PARTITION, OFFSET = "_memwal_topic", "_memwal_partition", "_memwal_offset"
COORDINATES = (TOPIC, PARTITION, OFFSET)
"""Columns that form the place of a Kafka row, most significant first. `LANDED` does not order Kafka rows."""
DELETE = "_memwal_delete"
"""Optional boolean column: the row deletes its key (null = false), and needs no other values."""
PROBLEM = "_memwal_problem"
"""Why a row cannot be used, prefixed by the stage ("parse: …", "map: …"); null for a usable row."""
RAW_KEY, RAW_VALUE, RAW_HEADERS = "_memwal_raw_key", "_memwal_raw_value", "_memwal_raw_headers"
RAW = (RAW_KEY, RAW_VALUE, RAW_HEADERS)
"""The raw bytes of the record, for its dead letter; optional."""
NOT_SHUFFLED = (PROBLEM, *RAW)
"""Columns that `RouteTask` removes before the shuffle."""
NOT_OF_TABLE = (*PLACE, *COORDINATES, DELETE, *NOT_SHUFFLED)
"""Columns of a source that are not in the table."""
HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
NO_REGION = -1
LETTER = "_memwal_letter"
LETTER_TYPE = pa.struct(
    [
        pa.field("stage", pa.string()),
        pa.field("column", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("raw_key", pa.binary()),
        pa.field("raw_value", pa.binary()),
        pa.field("raw_headers", HEADERS_TYPE),
    ]
)
ADDED = (ROW, BUCKET)
"""Columns that `RouteTask` adds."""
_NOT_THE_USERS = {*NOT_OF_TABLE, *ADDED, TABLE, LETTER}


def of_table(columns: Sequence[str]) -> list[str]:
    """Return the user's columns among `columns`, in order."""
    return [name for name in columns if name not in _NOT_THE_USERS]


def rows_and_deletes(
    batch: pa.RecordBatch, key: Sequence[str], version: str
) -> tuple[pa.Table, npt.NDArray[np.bool_] | None]:
    """Return the user's columns of a batch, and which rows delete their key (None if no row does).

    Rows that delete keep only the values of their key and version. Raises: Invalid as `api.rows.split_deletes`.
    """
    rows = pa.Table.from_batches([batch.select(of_table(batch.schema.names))])
    if DELETE not in batch.schema.names:
        return rows, None
    _, deletes = split_deletes(pa.table({TOMBSTONE: batch[DELETE]}), key)
    return (rows, None) if isinstance(deletes, bool) else (emptied(rows, (*key, version), deletes), deletes)


def places(columns: Sequence[str]) -> list[str]:
    """Return the columns among `columns` that form the place of a row, most significant first."""
    return [name for name in (COORDINATES if OFFSET in columns else PLACE) if name in columns]


def place_column(columns: Sequence[str]) -> str:
    """Return the column among `columns` that is never null in a row of a source."""
    return next((name for name in (OFFSET, PART) if name in columns), BLOCK)


def runs(*columns: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Return the maximal ranges [start, end) of rows with equal values in all `columns`.

    `columns`: of equal lengths, at least 1 row.
    """
    changed = np.zeros(len(columns[0]) - 1, dtype=bool)
    for column in columns:
        changed |= column[1:] != column[:-1]
    cuts = [0, *(np.flatnonzero(changed) + 1).tolist(), len(columns[0])]
    return list(pairwise(cuts))
