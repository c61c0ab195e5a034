"""Receipts: what tasks return for each region, and the receipt of a micro-batch made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal.ingest.errors import Invalid
from memwal.ingest.spark.schema import spark_type

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

RECEIPT = pa.schema(
    [
        pa.field("region", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("applied", pa.bool_(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("ack_seconds", pa.float64(), nullable=False),
        pa.field("landed_first", pa.float64()),
        pa.field("landed_last", pa.float64()),
        pa.field("acked_at", pa.float64(), nullable=False),
        pa.field("skipped", pa.int64(), nullable=False),
        pa.field("newest", pa.int64()),
        pa.field("letters", pa.int64()),
        pa.field("said", pa.string()),
        pa.field("table", pa.string()),
    ]
)
"""Everything that tasks return to the driver: one row per region and micro-batch.

Times are in unix seconds; `landed_*` is null if the source has no files. `table`: its name if rows go to many tables;
the same region id is in all of them.

Two other kinds of rows are not the ack of a region. (1) `letters` is not null: a summary of bad rows. `rows` is their
number, `letters` the number of newly written dead letters, `said` the most frequent reasons. (2) Only `said` is set:
rows that the region refused, encoded by `bad_rows.Refusals`; the region has applied nothing.
"""


def without_ack(now: float, **values: object) -> pa.RecordBatch:
    """Return a receipt that is not the ack of a region."""
    counts = dict.fromkeys(("rows", "position", "skipped"), 0)
    nothing = {"region": "", "applied": False, "ack_seconds": 0.0, "acked_at": now, **counts}
    return pa.RecordBatch.from_pylist([nothing | values], schema=RECEIPT)


@dataclass(frozen=True, slots=True)
class RegionReceipt:
    """The answer of one region to one micro-batch; for times see `RECEIPT`.

    `skipped`: rows that the table's rules left out. `newest`: as in an `Ack`.
    """

    region: str
    rows: int
    applied: bool
    position: int
    ack_seconds: float
    landed_first: float | None
    landed_last: float | None
    acked_at: float
    skipped: int = 0
    newest: int | None = None
    table: str | None = None


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """The receipt of a micro-batch that all its regions have made durable; empty if it had no rows."""

    batch_id: int
    regions: tuple[RegionReceipt, ...]
    bad: int = 0
    """Rows that no region received: left out, or stored as dead letters."""
    letters: int = 0
    """Newly written dead letters; fewer than `bad` if some existed already."""
    reasons: str = ""
    """The most frequent reasons of bad rows."""
    seconds: float = 0.0
    """From the call of the sink, before the rows are read, until every region has acknowledged its rows."""

    @property
    def rows(self) -> int:
        """Number of rows of the micro-batch that regions received."""
        return sum(each.rows for each in self.regions)


def added_by(rows: Sequence[dict[str, Any]]) -> int:
    """Return the number of dead letters that tasks wrote, from their answers (`RECEIPT`)."""
    return sum(row["letters"] or 0 for row in rows)


def receipt_of(batch_id: int, rows: Sequence[dict[str, Any]], letters: int) -> BatchReceipt:
    """Return the receipt of a micro-batch from the answers of its tasks (`RECEIPT`).

    `letters`: newly written dead letters of all attempts.
    """
    names = [each.name for each in fields(RegionReceipt)]
    regions = tuple(RegionReceipt(**{name: row[name] for name in names}) for row in rows if row["letters"] is None)
    bad = [row for row in rows if row["letters"] is not None]
    return BatchReceipt(
        batch_id,
        regions,
        sum(row["rows"] for row in bad),
        letters,
        "; ".join(row["said"] for row in bad),
    )


def refuse_older(batch_id: int, newest: int | None) -> None:
    """Raise Invalid if the checkpoint was set back: the rows of this micro-batch may differ from those applied before.

    `newest`: the highest batch_id of the query that a region has applied.
    """
    if newest is not None and newest > batch_id:
        raise older(batch_id, newest)


def older(batch_id: int, newest: int) -> Invalid:
    """Return the error for a checkpoint that was set back.

    `batch_id`: its next micro-batch. `newest`: the highest one that a region has applied.
    """
    return Invalid(
        f"the checkpoint is older than the table: regions have micro-batches up to {newest} of this query, so rows "
        f"of its micro-batch {batch_id} would be left out as applied before; restore the newest checkpoint, "
        "or set sink.checkpoint to a new one, which reads the source from its start"
    )


def receipt_schema() -> StructType:
    """Return `RECEIPT` as a Spark type."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, spark_type(field.type), field.nullable) for field in RECEIPT])
