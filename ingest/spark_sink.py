"""The `foreachBatch` sink: a micro-batch of Spark into the regions of a table, exactly once.

    df.writeStream.foreachBatch(ingest.MemWalSink("config.toml")).option("checkpointLocation", …).start()

One micro-batch, in order:

1. Executors validate their rows and compute the region of each (`RouteTask`). A refused row ends the job here, before
   anything was sent.
2. Spark shuffles rows by region and sorts each region's, oldest first.
3. One task per region streams its rows to the owner, tagged `(query id, batch_id)`, and waits until they are durable
   and visible (`SendTask`). Regions without rows get no stream. A region that moves meanwhile costs a second sending.
4. The driver collects one receipt per region, never a row. When a region fails, Spark replays the micro-batch and the
   regions that applied it already only ack it.

A replayed micro-batch must have the same rows: a query with `rand()` or `current_timestamp()` in a column of the key
does not, and may put a row into two regions; where there is no key, in a column of `regions.by`, or in any at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flush import BaseTable
from ingest.access import Access
from ingest.addresses import expanded
from ingest.child import ChildDaemon, start_child
from ingest.errors import Invalid, MemWalError, Unavailable
from ingest.settings import Settings, load
from ingest.source import PLACE, spark_type
from ingest.spark_tasks import ADDED, BUCKET, RECEIPT, ROW, RouteTask, SendTask
from ingest.task_errors import of_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_QUERY_ID = "sql.streaming.queryId"
"""Local property that Spark's micro-batch execution sets to the query id of the checkpoint."""


@dataclass(frozen=True, slots=True)
class RegionReceipt:
    """What one region answered to one micro-batch; times in unix seconds, see `spark_tasks.RECEIPT`."""

    region: str
    rows: int
    applied: bool
    position: int
    ack_seconds: float
    landed_first: float | None
    landed_last: float | None
    acked_at: float


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """A micro-batch that every one of its regions has made durable; empty when it had no rows."""

    batch_id: int
    regions: tuple[RegionReceipt, ...]
    bad: int = 0
    """Rows that no region got: left out, or dead letters now."""
    letters: int = 0
    """Dead letters that were written for it; fewer than `bad` where they were there already."""

    @property
    def rows(self) -> int:
        """Rows of the micro-batch that its regions got."""
        return sum(each.rows for each in self.regions)


class MemWalSink:
    """Writes micro-batches into the table of a configuration. See the module for the steps.

    Without `endpoint` and without `daemon.endpoints` it starts a child daemon at the first micro-batch and keeps it
    for as long as this process lives, or until `close`.

    Thread safety. One query at a time, as Spark calls it.
    Durability. A call returns only after every row is on storage.
    Errors. A call raises `ingest.errors` kinds only; the last one stays in `failure`, because Spark ends the query
    with an exception of its own.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Settings,
        *,
        endpoint: str | None = None,
        on_batch: Callable[[BatchReceipt], None] | None = None,
    ) -> None:
        """`config`: TOML path, a dict of its sections, or settings. `endpoint`: of the daemons, with commas between
        them, instead of `daemon.endpoints`. `on_batch`: told of every finished micro-batch.

        Raises: Invalid for a configuration that is wrong.
        """
        self._settings = config if isinstance(config, Settings) else load(config, os.environ)
        self._endpoint = endpoint or configured_endpoint(self._settings)
        self._on_batch = on_batch
        self._child: ChildDaemon | None = None
        self._base: BaseTable | None = None
        self.failure: MemWalError | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write one micro-batch; Spark calls this."""
        try:
            receipt = BatchReceipt(batch_id, self._write(frame, batch_id))
        except Exception as error:  # noqa: BLE001 - raised again as one of the six kinds
            self.failure = self._explained(error)
            raise self.failure from None
        self.failure = None
        if self._on_batch is not None:
            self._on_batch(receipt)

    def warm_up(self, spark: SparkSession) -> None:
        """Start Spark's Python workers and let them open the table, so that the first micro-batch need not."""
        route, base = self._route(), self._table()
        spark.range(base.buckets).mapInArrow(route.warm_up, "id long").groupBy().count().collect()

    def close(self) -> None:
        """End the child daemon, if there is one; acknowledged rows stay."""
        if self._child is not None:
            self._child.stop(self._settings.daemon.drain_timeout)
            self._child = None

    def _write(self, frame: DataFrame, batch_id: int) -> tuple[RegionReceipt, ...]:
        producer = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        if not producer:
            raise Invalid("MemWalSink is called outside a streaming query; use it with writeStream.foreachBatch(...)")
        endpoint, base = self._owner(), self._table()
        routed = routed_frame(frame, self._route(), base.buckets, self._settings.source.order_by)
        sink, access = self._settings.sink, Access.of(self._settings)
        send = SendTask(endpoint, base.regions, producer, batch_id, sink.stream_timeout, sink.in_flight_max, access)
        sent = routed.mapInArrow(send, _receipt_schema())
        return tuple(RegionReceipt(**row.asDict()) for row in sent.collect())

    def _route(self) -> RouteTask:
        """The first step's task; secrets travel as the references they are in the configuration."""
        table = self._settings.table
        return RouteTask(
            table.uri, tuple((name, value.get_secret_value()) for name, value in table.storage_options.items())
        )

    def _owner(self) -> str:
        """The endpoints to send to; a child daemon that is gone is replaced (the epoch keeps that safe)."""
        if self._endpoint is not None:
            return self._endpoint
        if self._child is None or self._child.exit_code() is not None:
            self._child = start_child(self._settings)
        return self._child.endpoint

    def _table(self) -> BaseTable:
        if self._base is None:
            options = self._settings.storage_options(os.environ)
            self._base = BaseTable.open(self._settings.table.uri, options)
        return self._base

    def _explained(self, error: Exception) -> MemWalError:
        """The kind of an error; a child daemon that ended is the reason for whatever its clients met."""
        code = None if self._child is None else self._child.exit_code()
        if code is not None:
            return daemon_ended(code)
        return of_spark(error)


def routed_frame(frame: DataFrame, route: RouteTask, buckets: int, order_by: Sequence[str]) -> DataFrame:
    """Steps 1 and 2: rows with the columns `ADDED`, one region's rows together, oldest first.

    A source without files and without `order_by` is ordered by Spark partition and then arrival.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import IntegerType, LongType, StructField, StructType

    if not any(name in frame.columns for name in PLACE):
        frame = frame.withColumn(PLACE[2], functions.spark_partition_id().cast("long"))
    types = (LongType(), IntegerType())
    added = [StructField(name, kind, True) for name, kind in zip(ADDED, types, strict=True)]
    routed = frame.mapInArrow(route, StructType([*frame.schema.fields, *added]))
    tasks = min(buckets, int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or buckets))
    placed = routed.repartitionById(tasks, functions.col(BUCKET) % tasks)
    place = [name for name in PLACE if name in frame.columns]
    return placed.sortWithinPartitions(BUCKET, *(f"`{name}`" for name in order_by), *place, ROW)


def configured_endpoint(settings: Settings) -> str | None:
    """The configured daemons, in the form that `ingest.connect` takes; None for a child daemon."""
    return ",".join(expanded(settings.daemon.endpoints, settings.daemon.workers)) or None


def daemon_ended(code: int) -> Unavailable:
    """What to say when the child daemon is gone; `code` as from `ChildDaemon.exit_code`."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Unavailable(
        f"the daemon ended ({how}); nothing acknowledged is lost; run the same command again", {"exit_code": code}
    )


def _receipt_schema() -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, spark_type(field.type), field.nullable) for field in RECEIPT])
