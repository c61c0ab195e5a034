"""The `foreachBatch` sink: writes micro-batches of Spark into the regions of a table, each exactly once.

    df.writeStream.foreachBatch(memwal.MemWalSink("config.toml")).option("checkpointLocation", …).start()

The README has the steps of a micro-batch with their crash points. In short: executors validate and route the rows
(`RouteTask`), Spark shuffles them by region, and one task per region streams them to the owner (`SendTask`). For a
micro-batch that is likely to be small, one task does all of this (`OneTask`). The driver collects one receipt per
region.

A replayed micro-batch must have the same rows (README, *Decisions*).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwal.flush import BaseTable
from memwal.ingest import tracing
from memwal.ingest.caller import Caller
from memwal.ingest.engine.api.missing import SETTING
from memwal.ingest.engine.api.tokens import Applied
from memwal.ingest.engine.table.create import of_template
from memwal.ingest.engine.table.owner_notes import NotesFinder, by_notes
from memwal.ingest.errors import NOT_OWNER, RESIZED, Invalid, MemWalError, Unavailable
from memwal.ingest.service.client.retry import Attempts
from memwal.ingest.service.client.target import OF_TEMPLATE
from memwal.ingest.service.daemon.child import RestartingDaemon
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.settings.configuration import with_absolute_paths
from memwal.ingest.settings.endpoints import configured_endpoint
from memwal.ingest.settings.fleet import of_route
from memwal.ingest.settings.load import Settings, load, load_tables
from memwal.ingest.spark.dlq.bad_rows import BadRate, BadRow, Place, Rules, given_before, refused_in
from memwal.ingest.spark.dlq.table import DeadLetters
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.reading import MOST_ROWS, READ_AGAIN, WITHOUT_READING, SmallReader, rows_read
from memwal.ingest.spark.schema import quoted, spark_type
from memwal.ingest.spark.session import use_own_python
from memwal.ingest.spark.sink.receipts import BatchReceipt, added_by, receipt_of, receipt_schema, refuse_older
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask, nulls_of
from memwal.ingest.spark.sink.small import MOST_BYTES, PATHS_NEEDED, TOO_MANY, OneTask, PreparedTask, fits_one_task
from memwal.ingest.spark.source import columns as col
from memwal.ingest.spark.source.kafka.stream import TRIED, tried
from memwal.wal import SystemClock, SystemIds
from memwal.wal.panics import panics_as_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from memwal.ingest.spark.source.kafka.topics import TopicGuard

_ROUNDS = 20
"""Maximum attempts of a micro-batch whose regions refuse rows. Each attempt leaves out the rows refused before."""
_QUERY_ID = "sql.streaming.queryId"
"""Local property that Spark's micro-batch execution sets to the query id of the checkpoint."""

SMALL, SMALL_ON_FEW = 200_000, 1_000_000
"""Most rows of a micro-batch for one task.

A shuffle and a second stage take longer than so few rows take in one task. With at most `FEW` concurrent tasks the
limit is higher, because a shuffle and a sort in so few tasks are slower than one task.
"""
FEW = 2
WITHOUT_PATHS_FROM = 10_000
"""Fewest rows for which omitting the paths of files is worth another column in Spark's plan."""
WITH_PATHS_FOR = 100
"""Number of micro-batches that are read with paths after one that needed them."""
BY_JOBS_FOR = 20
"""Number of micro-batches that are read by jobs after one that the driver could not read or hold."""


class MemWalSink:
    """Writes micro-batches into the table of a configuration, or into many tables. The README has the steps.

    Without `endpoint` and `daemon.endpoints` it starts a child daemon at the first micro-batch and keeps it until
    `close` or the end of this process; if the daemon exits it is restarted, also during a micro-batch. With
    `daemon.on_spark` it uses the daemons that `memwal serve` or `memwal run` has started, and finds them again after a
    restart.

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
        table: Column | str | None = None,
    ) -> None:
        """`config`: TOML path, a dict of its sections, or settings. `endpoint`: of the daemons, separated by
        commas, instead of `daemon.endpoints`. `on_batch`: called with the receipt of every finished micro-batch.
        `tasks`: how many may send at the same time. `table`: column, or SQL expression, with the name of each row's
        table below `fleet.prefix`, instead of `route.table`; its value must be the same in every replay.

        Raises: Invalid for a configuration that is wrong.
        """
        if not isinstance(config, Settings):
            whole = load_tables(config, os.environ)
            config = load(config, os.environ) if table is None and not whole.route.table else whole
        self._settings = with_absolute_paths(config)
        self._by = self._settings.route.table if table is None else table
        self._routes = not isinstance(self._by, str) or bool(self._by)
        if self._routes and (problem := next(of_route(self._settings), None)) is not None:
            raise Invalid(f"[{problem.section}] {problem.text}")
        tracing.begin("memwal-run", self._settings.tracing)
        self._endpoint = endpoint or configured_endpoint(self._settings)
        self._on_batch, self._tasks, self._clock = on_batch, tasks, SystemClock()
        self._base: BaseTable | None = None
        self._known: tuple[str, ...] = ()
        dlq = self._settings.dlq
        self._bad_rate = BadRate(dlq.max_bad_percent, dlq.bad_window)
        self._last: int | None = None  # rows of the last micro-batch, as an estimate for the next one
        self._small: int | None = None
        self._by_jobs = 0
        self._caller = Caller()
        self._too_many = False
        self._with_paths = 0
        self._prepared: PreparedTask | None = None
        self._named_by = ""
        self._previous: tuple[str, int] | None = None  # query and number of the last written micro-batch
        self.child: RestartingDaemon | None = None
        """The child daemon, after the first micro-batch; None if other daemons are used."""
        self.small: SmallReader | None = None
        """Reads the rows of small micro-batches faster."""
        self.guard: TopicGuard | None = None
        """Checks the source after the rows of a micro-batch were read, and before they are sent.

        Rows that are read again are checked again.
        """
        self.failure: MemWalError | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write one micro-batch; Spark calls this."""
        began = self._clock.monotonic()
        try:
            with tracing.span("memwal.micro_batch", batch_id=batch_id) if tracing.on else tracing.OFF as span:
                receipt = self._written(frame, batch_id)
                tracing.note(span, rows=receipt.rows, bad_rows=receipt.bad, regions=len(receipt.regions))
        except Exception as error:  # noqa: BLE001 - raised again as one of the six kinds
            self.failure, self._previous = self._explained(error), None
            raise self.failure from None
        self.failure = None
        if self._on_batch is not None:
            self._on_batch(replace(receipt, seconds=self._clock.monotonic() - began))

    def expect_columns(self, columns: Sequence[str]) -> None:
        """Raise Invalid if `columns` lack columns of the table, and `sink.missing` does not decide their values."""
        base = self._table()
        of = (columns, base.schema, base.key, base.required, base.rules.upsert)
        nulls_of(*of, known=self._known, missing=self._settings.sink.missing or None, form=SETTING)

    def named(self, frame: DataFrame) -> tuple[DataFrame, str]:
        """Return the rows, and the column with the names of their tables: null if not evaluated; "" for one table.

        Raises: Invalid for an expression that these columns do not allow, or that may differ in a replay.
        """
        from pyspark.sql import functions

        by = self._by
        if isinstance(by, str) and (not by or dict(frame.dtypes).get(by) == "string"):
            return frame, by
        try:
            value = functions.expr(by) if isinstance(by, str) else by
            found = frame.withColumn(col.TABLE, tried(value.cast("string"))[TRIED])
            plan: Any = found._jdf  # noqa: SLF001 - PySpark does not offer it
            if not plan.queryExecution().analyzed().projectList().last().deterministic():
                raise Invalid("its value may differ when Spark replays a micro-batch; use columns of the source")
        except Exception as error:
            raise Invalid(f"[route] table = {str(by)!r}: {of_spark(error).message}") from error
        return found, col.TABLE

    def warm_up(self, spark: SparkSession) -> None:
        """Start Spark's Python workers and let them open the table, to save this time in the first micro-batch."""
        route, base = self._route(), self._table()
        spark.range(base.buckets).mapInArrow(route.warm_up, "id long").groupBy().count().collect()

    def give_up(self) -> None:
        """End a micro-batch that this process is sending, as its query is being stopped. Spark replays it."""
        self._caller.leave()

    def close(self) -> None:
        """Stop the child daemon, if there is one. Acknowledged rows are kept."""
        if self.child is not None:
            self.child.stop(self._settings.daemon.drain_timeout)
            self.child = None

    @panics_as_errors
    def _written(self, frame: DataFrame, batch_id: int) -> BatchReceipt:
        """Write the micro-batch. If the table is resized or Spark loses rows meanwhile, start it again."""
        attempts = Attempts(self._clock, SystemIds(), self._settings.sink.stream_timeout, repeatable=True)
        while True:
            try:
                return self._write(frame, batch_id)
            except Exception as error:
                self._base = None
                found = self._explained(error)
                if found.details.get("reason") not in (RESIZED, READ_AGAIN):
                    raise
                self._previous = None
                attempts.after(Unavailable(found.message, {"reason": NOT_OWNER}), alone=False)

    def _write(self, frame: DataFrame, batch_id: int) -> BatchReceipt:
        producer = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        if not producer:
            raise Invalid("MemWalSink is called outside a streaming query; use it with writeStream.foreachBatch(...)")
        use_own_python(frame.sparkSession)
        frame, self._named_by = self.named(frame)
        endpoint, base = self._owner(), self._table()
        sink, letters = self._settings.sink, self._letters()
        routing, limits = base.routing_version, (sink.stream_timeout, sink.in_flight_max)
        access = Access.of(self._settings)
        found = (self._find(), base.table_id or None)
        trace, missing = tracing.headers() if tracing.on else (), (self._known, sink.missing or None)
        given = (endpoint, base.regions, producer, batch_id, *limits, access, routing, letters, *found, trace, *missing)
        send = SendTask(*given, SETTING, self._template())
        refused: dict[Place, BadRow] = {}
        if self.guard is not None:
            self.guard.begin(batch_id)
        # One sink may serve a query that is started again, even from an older checkpoint, or another query.
        if self._previous != (producer, batch_id - 1):
            send, refused = self._after_restart(send)
        letters_added = 0
        for _ in range(_ROUNDS):
            # The first way that this micro-batch allows; each returns None if it sent nothing.
            rows = None if refused else self._by_driver(frame, send)
            if rows is None and not refused:
                rows = self._by_one_task(frame, send)
            if rows is None:
                rows, added = self._by_regions(frame, send, refused)
                letters_added += added
            letters_added += added_by(rows)
            told = [row["said"] for row in rows if row["letters"] is None and row["said"] is not None]
            if not told:
                receipt = receipt_of(batch_id, rows, letters_added)
                refuse_older(batch_id, max((each.newest or 0 for each in receipt.regions), default=None))
                self._last = receipt.rows + receipt.bad
                if self._too_many:  # the rows are wide: half as many may fit into one task
                    self._small, self._too_many = min(self._small or self._last, self._last // 2), False
                self._refuse_too_bad(receipt, send)
                self._previous = producer, batch_id
                return receipt
            for packed in told:
                refused |= refused_in(packed)
        reason = next(reversed(refused.values())).reason
        raise Invalid(
            f"regions refused {len(refused):,} rows of a micro-batch, new ones in each of {_ROUNDS} attempts; {reason}"
        )

    def _after_restart(self, send: SendTask) -> tuple[SendTask, dict[Place, BadRow]]:
        """Return the task for a micro-batch that an earlier run may have begun, and its rows that are dead letters now.

        Rows that are dead letters stay dead letters, even if the mapping has changed. Once every region has applied the
        micro-batch, no more dead letters are written. Raises: Invalid.
        """
        # Of many tables, only those with rows in the micro-batch are asked, when these are sent.
        applied = Applied(None, None) if self._routes else send.applied()
        # With an older checkpoint, regions that are behind would apply rows that other regions have under other
        # numbers.
        refuse_older(send.sequence, applied.newest)
        if applied.everywhere == send.sequence:
            mode = "skip" if send.letters.mode == "table" else send.letters.mode
            return replace(send, letters=replace(send.letters, mode=mode)), {}
        options = self._settings.storage_options(os.environ)
        letters = DeadLetters.find(self._settings.dead_letters, options, self._clock)
        return send, given_before(letters, send.producer, send.sequence)

    def _by_driver(self, frame: DataFrame, send: SendTask) -> list[dict[str, Any]] | None:
        """Return the receipts of a micro-batch that this process reads, validates and sends.

        None if it cannot: nothing was sent.
        """
        self._by_jobs = max(0, self._by_jobs - 1)
        evaluated = self._routes and self._named_by == col.TABLE  # by Spark, in a job
        if self.small is None or evaluated or self._by_jobs or (self._last or 0) > MOST_ROWS:
            return None
        task = OneTask(self._route(), send, tuple(self._settings.source.order_by), MOST_BYTES)
        rows = self.small(frame) if not task.order_by or fits_one_task(frame.schema, task) else None
        if rows is None:
            # The first micro-batch may be an accumulated backlog.
            self._by_jobs = 0 if self._last is None else BY_JOBS_FOR
            return None
        if self.guard is not None:
            self.guard.check()
        if not rows.num_rows:
            return []
        self._caller = Caller()
        told = self._caller.run(lambda: [*task.receipts(iter([rows]))])
        receipts = [row for each in told for row in each.to_pylist()]
        if any(row["said"] == TOO_MANY for row in receipts):
            self._by_jobs = BY_JOBS_FOR
            return None
        return receipts

    def _by_one_task(self, frame: DataFrame, send: SendTask) -> list[dict[str, Any]] | None:
        """Return the receipts of a micro-batch written by one task; None if it needs a shuffle: nothing was sent."""
        if self._small is None:
            few = frame.sparkSession.sparkContext.defaultParallelism <= FEW
            self._small = SMALL_ON_FEW if few else SMALL
        if self._last is None or self._last > self._small:
            return None
        task = OneTask(self._route(), send, tuple(self._settings.source.order_by), MOST_BYTES)
        schema = frame.schema
        rows: list[dict[str, Any]] | None = None
        if not fits_one_task(schema, task):
            return None
        if self.guard is not None:
            with self._checked(frame.repartition(1)) as read:
                rows = self._taken(read, schema, task)
        else:
            self._with_paths = max(0, self._with_paths - 1)
            if not self._with_paths and set(col.PLACE) <= set(schema.names) and self._last >= WITHOUT_PATHS_FROM:
                rows = self._taken(frame, schema, replace(task, without_paths=True))
                # A source that needed paths once will probably need them again.
                if any(row["said"] == PATHS_NEEDED for row in rows):
                    self._with_paths, rows = WITH_PATHS_FOR, None
            if rows is None:
                rows = self._taken(frame, schema, task)
        if any(row["said"] == TOO_MANY for row in rows):
            self._too_many = True
            return None
        return rows

    def _taken(self, frame: DataFrame, schema: StructType, task: OneTask) -> list[dict[str, Any]]:
        """Return the receipts of the single task that processes all rows."""
        if self._prepared is None or not self._prepared.serves(task, schema, frame):
            self._prepared = PreparedTask(task, schema, frame)
        return self._prepared.collected(frame, task.send.sequence, task.send.trace)

    def _by_regions(
        self, frame: DataFrame, send: SendTask, refused: Mapping[Place, BadRow]
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the receipts of a shuffled micro-batch, and the number of dead letters written for `refused`."""
        buckets = frame.sparkSession.sparkContext.defaultParallelism if self._routes else self._table().buckets
        most = min(buckets, self._tasks or buckets)
        routed = routed_frame(frame, self._route(refused), most, self._settings.source.order_by)
        letters = 0
        with self._checked(routed) as rows:
            if refused:
                # The dead letters must be durable before any region applies the micro-batch without these rows:
                # afterwards no region refuses them, and a replay would not know them.
                letters = added_by(collected(rows.where(f"{col.BUCKET} < 0"), send))
            return collected(rows, send), letters

    @contextmanager
    def _checked(self, shuffled: DataFrame) -> Iterator[DataFrame]:
        """Yield the rows of a shuffled frame.

        With a guard, all rows are read and checked first, and while the context is open no row is read from the source
        again.
        """
        if self.guard is None:
            yield shuffled
            return
        rows = rows_read(shuffled)
        self.guard.check()
        with WITHOUT_READING.on(shuffled.sparkSession):
            yield rows

    def _refuse_too_bad(self, receipt: BatchReceipt, send: SendTask) -> None:
        """Raise Invalid if too many of the newest rows were bad. Nothing of the micro-batch is lost.

        Spark replays the micro-batch, possibly with other rows, since the source may be corrected meanwhile. Its dead
        letters stay dead letters, so regions that received no rows now must not apply any in the replay.
        """
        rate = self._bad_rate.with_more(receipt.rows + receipt.bad, receipt.bad)
        if rate is None:
            return
        kept = "they are left out"
        if self._settings.dlq.mode == "table":
            kept = f"they are in {self._settings.dead_letters}"
            told = {each.region for each in receipt.regions}
            send.note(region for region in send.regions if str(region) not in told and not self._routes)
        raise Invalid(
            f"{rate}, more than dlq.max_bad_percent = {self._settings.dlq.max_bad_percent}; {kept}; most frequent "
            f"reasons: {receipt.reasons or 'see memwal dlq list'}; correct the source, or raise dlq.max_bad_percent",
            {"bad": receipt.bad},
        )

    def _route(self, refused: Mapping[Place, BadRow] | None = None) -> RouteTask:
        """Return the task that routes rows. Secrets stay references, as in the configuration."""
        # The base table's absolute address: an executor has another working directory.
        base = self._table()
        mode = self._settings.dlq.mode
        given = (base.uri, self._options(), base.routing_version, mode, refused or {}, self._template())
        return RouteTask(*given, self._named_by)

    def _template(self) -> str:
        return self._settings.table.model_dump_json(include=OF_TEMPLATE, exclude_unset=True) if self._routes else ""

    def _letters(self) -> Rules:
        return Rules(self._settings.dlq.mode, self._settings.dead_letters, self._options())

    def _options(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, value.get_secret_value()) for name, value in self._settings.table.storage_options.items())

    def _owner(self) -> str:
        """Return the endpoints to send to.

        Replaces a child daemon that failed permanently, which the epoch makes safe.
        """
        if self._endpoint is not None:
            return self._endpoint
        if (find := self._find()) is not None:
            self._endpoint = by_notes(find)
            return self._endpoint
        if self.child is None or self.child.failure is not None:
            self.close()
            self.child = RestartingDaemon(self._settings)
        return self.child.endpoint

    def _find(self) -> NotesFinder | None:
        if not self._settings.daemon.on_spark:
            return None
        base = self._table()
        return NotesFinder(base.uri, self._options(), base.regions)

    def _table(self) -> BaseTable:
        if self._base is None and self._routes:
            self._base = of_template(self._settings.table)
        if self._base is None:
            options = self._settings.storage_options(os.environ)
            self._base = BaseTable.open(self._settings.table.uri, options)
            self._known = self._known or tuple(self._base.schema.names)
        return self._base

    def _explained(self, error: Exception) -> MemWalError:
        """Return the kind of an error; if the child daemon failed permanently, its failure, which caused the error."""
        gone = None if self.child is None else self.child.failure
        return gone or of_spark(error)


def routed_frame(frame: DataFrame, route: RouteTask, most: int, order_by: Sequence[str]) -> DataFrame:
    """Return the routed rows (steps 1 and 2) with the columns `ADDED`: the rows of a region together, oldest first.

    `most`: number of tasks after the shuffle; more tasks than regions are useless. A source without files and without
    `order_by` is ordered by Spark partition, then by arrival.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

    if not col.places(frame.columns):
        frame = frame.withColumn(col.PLACE[2], functions.spark_partition_id().cast("long"))
    kinds = zip(col.ADDED, (LongType(), IntegerType()), strict=True)
    added = [StructField(name, kind, True) for name, kind in kinds]
    if route.letters != "fail":
        added.append(StructField(col.LETTER, spark_type(col.LETTER_TYPE), True))
    passing = [
        StructField(each.name, each.dataType, True) for each in frame.schema.fields if each.name not in col.NOT_SHUFFLED
    ]
    if route.template and col.TABLE not in frame.columns:
        passing.append(StructField(col.TABLE, StringType(), True))
    routed = frame.mapInArrow(route, StructType([*passing, *added]))
    tasks = min(most, int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or most))
    by_region = functions.pmod(functions.col(col.BUCKET), functions.lit(tasks))
    place = col.places(frame.columns)
    placed = routed.repartitionById(tasks, by_region)
    return placed.sortWithinPartitions(col.BUCKET, *map(quoted, order_by), *place, col.ROW)


def collected(frame: DataFrame, task: SendTask) -> list[dict[str, Any]]:
    """Run the job (steps 3 and 4). Return the answers of its tasks, one dict per row of `RECEIPT`."""
    return [row.asDict() for row in frame.mapInArrow(task, receipt_schema()).collect()]
