"""The `foreachBatch` sink: a micro-batch of Spark into the regions of a table, exactly once.

    df.writeStream.foreachBatch(memwal.MemWalSink("config.toml")).option("checkpointLocation", …).start()

One micro-batch, in order:

1. Executors validate their rows and compute the region of each (`RouteTask`). A refused row ends the job here, before
   anything was sent; unless `dlq.mode` is another than "fail", by which it goes on as a dead letter. They count the
   rows of each region, and the counts travel with the rows (`ingest.source.whole_input`).
2. Spark shuffles rows by region and sorts each region's, oldest first. One task gets all dead letters, and writes them
   first (`ingest.dlq.table`).
3. One task per region streams its rows to the owner, tagged `(query id, batch_id)`, and waits until they are durable
   and visible (`SendTask`). It closes the stream only when all rows that were counted have come. Regions without rows
   get no stream. A region that moves meanwhile costs a second sending.
   A region that refuses rows names them, and applies nothing; the micro-batch is run again, with these rows among the
   dead letters, which are written by a job of their own then.
4. The driver collects one receipt per region, never a row. When a region fails, Spark replays the micro-batch and the
   regions that applied it already only ack it.

Of a micro-batch that is likely to be small one task does the first three steps (`ingest.sink.small`).

A replayed micro-batch must have the same rows: a query with `rand()` or `current_timestamp()` in a column of the key
does not, and may put a row into two regions; where there is no key, in a column of `regions.by`, or in any at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwal.flush import BaseTable
from memwal.ingest.client.retry import Attempts
from memwal.ingest.daemon.child import KeptChild
from memwal.ingest.dlq.bad_rows import BadRate, BadRow
from memwal.ingest.dlq.letters import Place, Rules, given, refused_in
from memwal.ingest.dlq.table import DeadLetters
from memwal.ingest.errors import NOT_OWNER, RESIZED, Invalid, MemWalError, Unavailable
from memwal.ingest.rpc.credentials import Access
from memwal.ingest.rpc.owner_notes import FromNotes, by_notes
from memwal.ingest.settings.endpoints import configured_endpoint
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.settings.paths import anywhere
from memwal.ingest.sink.prepared import PreparedTask
from memwal.ingest.sink.receipts import BatchReceipt, _added, receipt_of, receipt_schema, refuse_older
from memwal.ingest.sink.route import RouteTask
from memwal.ingest.sink.send import SendTask
from memwal.ingest.sink.small import MOST_BYTES, NAMELESS, TOO_MANY, OneTask
from memwal.ingest.source.columns import ADDED, BESIDE, BUCKET, COORDINATES, LETTER, LETTER_TYPE, OFFSET, PLACE, ROW
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.schema import spark_type
from memwal.wal import SystemClock, SystemIds
from memwal.wal.panics import panics_as_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_ROUNDS = 20
"""Attempts of one micro-batch whose regions refuse rows; each leaves out those that the one before named."""
_QUERY_ID = "sql.streaming.queryId"
"""Local property that Spark's micro-batch execution sets to the query id of the checkpoint."""

SMALL, SMALL_ON_FEW = 200_000, 1_000_000
"""Rows up to which a micro-batch is left to one task, since a shuffle and a second stage take longer than its rows; and
where no more than `FEW` tasks run at once, which together move fewer rows through a shuffle and a sort than one does
without them."""
FEW = 2
NAMELESS_FROM = 10_000
"""Rows from which on it is worth a column more in Spark's plan to leave the paths of files out."""
NAMED_FOR = 100
"""Micro-batches that come with paths after one that asked for them."""


class MemWalSink:
    """Writes micro-batches into the table of a configuration. See the module for the steps.

    Without `endpoint` and without `daemon.endpoints` it starts a child daemon at the first micro-batch and keeps it
    for as long as this process lives, or until `close`; one that ends is started again, under a micro-batch too. With
    `daemon.on_spark` it uses those that `memwal serve` or `memwal run` has started, and finds them again where they are
    started anew.

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
        tasks: int | None = None,
    ) -> None:
        """`config`: TOML path, a dict of its sections, or settings. `endpoint`: of the daemons, with commas between
        them, instead of `daemon.endpoints`. `on_batch`: told of every finished micro-batch. `tasks`: that send at
        the same time at most.

        Raises: Invalid for a configuration that is wrong.
        """
        self._settings = anywhere(config if isinstance(config, Settings) else load(config, os.environ))
        self._endpoint = endpoint or configured_endpoint(self._settings)
        self._on_batch, self._tasks, self._clock = on_batch, tasks, SystemClock()
        self._child: KeptChild | None = None
        self._base: BaseTable | None = None
        dlq = self._settings.dlq
        self._bad_rate = BadRate(dlq.max_bad_percent, dlq.bad_window)
        self._last: int | None = None  # rows of the newest micro-batch: the next is likely to have about as many
        self._small: int | None = None
        self._too_many = False
        self._named = 0
        self._prepared: PreparedTask | None = None
        self._goes_on = False  # the micro-batch before was done by this sink
        self.failure: MemWalError | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write one micro-batch; Spark calls this."""
        try:
            receipt = self._written(frame, batch_id)
        except Exception as error:  # noqa: BLE001 - raised again as one of the six kinds
            self.failure, self._goes_on = self._explained(error), False
            raise self.failure from None
        self.failure, self._goes_on = None, True
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

    @panics_as_errors
    def _written(self, frame: DataFrame, batch_id: int) -> BatchReceipt:
        """The micro-batch, begun anew by the routing of that moment where the table was resized meanwhile."""
        attempts = Attempts(self._clock, SystemIds(), self._settings.sink.stream_timeout, repeatable=True)
        while True:
            try:
                return self._write(frame, batch_id)
            except Exception as error:
                self._base = None
                found = self._explained(error)
                if found.details.get("reason") != RESIZED:
                    raise
                self._goes_on = False
                attempts.after(Unavailable(found.message, {"reason": NOT_OWNER}), alone=False)

    def _write(self, frame: DataFrame, batch_id: int) -> BatchReceipt:
        producer = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        if not producer:
            raise Invalid("MemWalSink is called outside a streaming query; use it with writeStream.foreachBatch(...)")
        endpoint, base = self._owner(), self._table()
        sink, letters = self._settings.sink, self._letters()
        routing, limits = base.routing_version, (sink.stream_timeout, sink.in_flight_max)
        access = Access.of(self._settings)
        found = (self._find(), base.table_id or None)
        send = SendTask(endpoint, base.regions, producer, batch_id, *limits, access, routing, letters, *found)
        refused: dict[Place, BadRow] = {}
        if not self._goes_on:
            send, refused = self._where_it_came_to(send)
        letters_added = 0
        for _ in range(_ROUNDS):
            rows = None if refused else self._by_one_task(frame, send)
            if rows is None:
                rows, added = self._by_regions(frame, send, refused)
                letters_added += added
            letters_added += _added(rows)
            told = [row["said"] for row in rows if row["letters"] is None and row["said"] is not None]
            if not told:
                receipt = receipt_of(batch_id, rows, letters_added)
                refuse_older(batch_id, max((each.newest or 0 for each in receipt.regions), default=None))
                self._learn(receipt.rows + receipt.bad)
                self._refuse_too_bad(receipt, send)
                return receipt
            for packed in told:
                refused |= refused_in(packed)
        reason = next(reversed(refused.values())).reason
        raise Invalid(f"regions refused {len(refused):,} rows of a micro-batch, and more after these; {reason}")

    def _where_it_came_to(self, send: SendTask) -> tuple[SendTask, dict[Place, BadRow]]:
        """How a micro-batch is sent that may have been begun before, by another mapping maybe: rows that are letters
        stay letters; and none is written any more once every region has applied it. Raises: Invalid.
        """
        applied = send.applied()
        # Regions that are behind would take rows that others have under other numbers.
        refuse_older(send.sequence, applied.newest)
        if applied.everywhere == send.sequence:
            mode = "skip" if send.letters.mode == "table" else send.letters.mode
            return replace(send, letters=replace(send.letters, mode=mode)), {}
        options = self._settings.storage_options(os.environ)
        letters = DeadLetters.find(self._settings.dead_letters, options, self._clock)
        return send, given(letters, send.producer, send.sequence)

    def _by_one_task(self, frame: DataFrame, send: SendTask) -> list[dict[str, Any]] | None:
        """The receipts of a micro-batch that one task took; None where that is not for it, and nothing was sent."""
        if self._small is None:
            few = frame.sparkSession.sparkContext.defaultParallelism <= FEW
            self._small = SMALL_ON_FEW if few else SMALL
        if self._last is None or self._last > self._small:
            return None
        task = OneTask(self._route(), send, tuple(self._settings.source.order_by), MOST_BYTES)
        schema = frame.schema
        if not fits_one_task(schema, task):
            return None
        rows = self._nameless(frame, schema, task)
        if rows is None:
            rows = self._taken(frame, schema, task)
        if any(row["said"] == TOO_MANY for row in rows):
            self._too_many = True
            return None
        return rows

    def _nameless(self, frame: DataFrame, schema: StructType, task: OneTask) -> list[dict[str, Any]] | None:
        """As `_taken`, of rows without the paths of their files; None where these are asked for, or not worth it.

        A source whose rows asked for them is likely to again, so the next ones come with them at once.
        """
        self._named = max(0, self._named - 1)
        if self._named or not set(PLACE) <= set(schema.names) or (self._last or 0) < NAMELESS_FROM:
            return None
        rows = self._taken(frame, schema, replace(task, nameless=True))
        if not any(row["said"] == NAMELESS for row in rows):
            return rows
        self._named = NAMED_FOR
        return None

    def _taken(self, frame: DataFrame, schema: StructType, task: OneTask) -> list[dict[str, Any]]:
        """What one task answered that took all rows."""
        if self._prepared is None or not self._prepared.serves(task, schema, frame):
            self._prepared = PreparedTask(task, schema, frame)
        return self._prepared.collected(frame, task.send.sequence)

    def _learn(self, rows: int) -> None:
        """A micro-batch had so many rows."""
        if self._too_many:  # they are wide: of half as many all may fit into one task
            self._small, self._too_many = min(self._small or rows, rows // 2), False
        self._last = rows

    def _by_regions(
        self, frame: DataFrame, send: SendTask, refused: Mapping[Place, BadRow]
    ) -> tuple[list[dict[str, Any]], int]:
        """The receipts of a micro-batch that was shuffled, and the letters that rows of `refused` became before."""
        buckets = self._table().buckets
        most = min(buckets, self._tasks or buckets)
        routed = routed_frame(frame, self._route(refused), most, self._settings.source.order_by)
        letters = 0
        if refused:
            # Their letters are durable before any region applies the micro-batch without these rows: once it has,
            # it refuses nothing any more, and a replay would not know of them.
            letters = _added(_collected(routed.where(f"{BUCKET} < 0"), send))
        return _collected(routed, send), letters

    def _refuse_too_bad(self, receipt: BatchReceipt, send: SendTask) -> None:
        """Raises: Invalid where too many of the newest rows were bad; nothing of the micro-batch is lost by then.

        It comes again, with other rows maybe: the source may have been mended. What is a letter now stays one, so
        regions that got no rows of it are to take none either.
        """
        rate = self._bad_rate.with_more(receipt.rows + receipt.bad, receipt.bad)
        if rate is None:
            return
        if self._settings.dlq.mode == "table":
            told = {each.region for each in receipt.regions}
            send.note(region for region in send.regions if str(region) not in told)
        kept = f"they are in {self._settings.dead_letters}" if self._settings.dlq.mode == "table" else "left out"
        raise Invalid(
            f"{rate}, more than dlq.max_bad_percent = {self._settings.dlq.max_bad_percent}; {kept}, most of them: "
            f"{receipt.reasons or 'see memwal dlq list'}; mend the source, or allow more",
            {"bad": receipt.bad},
        )

    def _route(self, refused: Mapping[Place, BadRow] | None = None) -> RouteTask:
        """The first step's task; secrets travel as the references they are in the configuration."""
        # The base table's own address: an executor has another working directory.
        base = self._table()
        return RouteTask(base.uri, self._options(), base.routing_version, self._settings.dlq.mode, refused or {})

    def _letters(self) -> Rules:
        return Rules(self._settings.dlq.mode, self._settings.dead_letters, self._options())

    def _options(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, value.get_secret_value()) for name, value in self._settings.table.storage_options.items())

    def _owner(self) -> str:
        """The endpoints to send to; a child daemon that was given up is replaced (the epoch keeps that safe)."""
        if self._endpoint is not None:
            return self._endpoint
        if (find := self._find()) is not None:
            self._endpoint = by_notes(find)
            return self._endpoint
        if self._child is None or self._child.failure is not None:
            self.close()
            self._child = KeptChild(self._settings)
        return self._child.endpoint

    def _find(self) -> FromNotes | None:
        if not self._settings.daemon.on_spark:
            return None
        base = self._table()
        return FromNotes(base.uri, self._options(), base.regions)

    def _table(self) -> BaseTable:
        if self._base is None:
            options = self._settings.storage_options(os.environ)
            self._base = BaseTable.open(self._settings.table.uri, options)
        return self._base

    def _explained(self, error: Exception) -> MemWalError:
        """The kind of an error; a child daemon that is gone for good is the reason for whatever its clients met."""
        gone = None if self._child is None else self._child.failure
        return gone or of_spark(error)


def fits_one_task(schema: StructType, task: OneTask) -> bool:
    """Whether one task may take rows of these columns."""
    from pyspark.sql import types as spark

    # In one task rows without a place would not be told apart by the task that read them, as their letters are.
    if task.route.letters != "fail" and not _places(schema.names):
        return False
    ordered_alike = (
        *(spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType, spark.FloatType, spark.DoubleType),
        *(spark.DecimalType, spark.BinaryType, spark.BooleanType),
        *(spark.DateType, spark.TimestampType, spark.TimestampNTZType),
    )
    kinds = {field.name: field.dataType for field in schema.fields if field.name in task.order_by}
    alike = all(isinstance(kind, ordered_alike) or kind == spark.StringType() for kind in kinds.values())
    return alike and len(kinds) == len(task.order_by)


def _places(columns: Sequence[str]) -> list[str]:
    """Those of `columns` that say where a row lies, most significant first."""
    return [name for name in (COORDINATES if OFFSET in columns else PLACE) if name in columns]


def routed_frame(frame: DataFrame, route: RouteTask, most: int, order_by: Sequence[str]) -> DataFrame:
    """Steps 1 and 2: rows with the columns `ADDED`, one region's rows together, oldest first.

    `most`: tasks after the shuffle; more than regions are of no use.
    A source without files and without `order_by` is ordered by Spark partition and then arrival.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import IntegerType, LongType, StructField, StructType

    if not _places(frame.columns):
        frame = frame.withColumn(PLACE[2], functions.spark_partition_id().cast("long"))
    kinds = zip(ADDED, (LongType(), IntegerType()), strict=True)
    added = [StructField(name, kind, True) for name, kind in kinds]
    if route.letters != "fail":
        added.append(StructField(LETTER, spark_type(LETTER_TYPE), True))
    passing = [StructField(each.name, each.dataType, True) for each in frame.schema.fields if each.name not in BESIDE]
    routed = frame.mapInArrow(route, StructType([*passing, *added]))
    tasks = min(most, int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or most))
    by_region = functions.pmod(functions.col(BUCKET), functions.lit(tasks))
    place = _places(frame.columns)
    placed = routed.repartitionById(tasks, by_region)
    return placed.sortWithinPartitions(BUCKET, *(f"`{name}`" for name in order_by), *place, ROW)


def _collected(frame: DataFrame, task: SendTask) -> list[dict[str, Any]]:
    """Steps 3 and 4: what the tasks of a job answered, one dict per row of `RECEIPT`."""
    return [row.asDict() for row in frame.mapInArrow(task, receipt_schema()).collect()]
