"""One pipeline while it streams: start, watch, restart and stop its feed and its streaming query.

The query is restarted from its checkpoint after columns were added for new fields (`drift.detect`), after an
outage of its source (`pipeline.outage`) and after a pause (`pipeline.pausing`). Any other end of the
query ends the run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from rich.console import Console

from memwal.flush import BaseTable
from memwal.ingest.engine.table.pauses import text_of
from memwal.ingest.errors import MemWalError, Unavailable
from memwal.ingest.service.client.tables import RemoteFleet
from memwal.ingest.settings.configuration import with_absolute_paths
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import KAFKA, local_path
from memwal.ingest.spark.checkpoint_files import checkpoint_files, log_deleted_files
from memwal.ingest.spark.drift.detect import ColumnsAdded, Drift
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.names import FILE_FORMATS
from memwal.ingest.spark.pipeline.checkpoint import mark_checkpoint, refuse_set_back
from memwal.ingest.spark.pipeline.checks import written_schema
from memwal.ingest.spark.pipeline.daemons import Owner
from memwal.ingest.spark.pipeline.outage import Outage
from memwal.ingest.spark.pipeline.pages import RunPages
from memwal.ingest.spark.pipeline.pausing import Pausing
from memwal.ingest.spark.pipeline.report import print_report
from memwal.ingest.spark.pipeline.screen import Progress
from memwal.ingest.spark.reading import SourceRows
from memwal.ingest.spark.sink.foreach_batch import MemWalSink
from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.ingest.spark.source.feed import Feed
from memwal.ingest.spark.source.files import has_header
from memwal.ingest.spark.source.kafka.stream import read_kafka, topic_guard
from memwal.ingest.spark.source.kafka.topics import TopicGuard
from memwal.ingest.spark.source.stream import ByHeader, read_stream
from memwal.wal import Clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class PipelineStream:
    """The feed and the streaming query of one pipeline, watched by the main thread of the run."""

    def __init__(
        self,
        settings: Settings,
        base: BaseTable,
        owner: Owner,
        starting: Future[SparkSession],
        pages: RunPages,
        clock: Clock,
        progress: Progress,
    ) -> None:
        """`starting`: Spark, which may still be starting."""
        self._settings, self._base, self._owner, self._starting = settings, base, owner, starting
        self._clock, self._pages, self._progress = clock, pages, progress
        pages.serves(base, owner.table)
        self._sink = MemWalSink(settings, endpoint=owner.table.endpoint, on_batch=self._add, tasks=owner.tasks)
        self._drift = Drift(settings, base, self._sink)
        self._by_header: ByHeader | None = None
        self._feed_started = False
        source = settings.source
        self._feed = (
            Feed(local_path(source.feed), local_path(source.path), source.feed_every, clock) if source.feed else None
        )
        self._query: StreamingQuery | None = None
        self._guard: TopicGuard | None = None
        self._outage = Outage(settings.place, source.outage_max, pages.health, clock)
        self._pausing = pages.pausing = Pausing(settings, os.environ, clock)
        self._pausing.start()
        self.drained = threading.Event()

    def start(self, *, once: bool) -> None:
        """Start the query, unless its ingestion is paused. `once`: set `drained` when the source is drained.

        Raises: the error if the query did not start.
        """
        self._once = once
        if (told := self._pausing.told) is not None:
            self._stand_still(told)
            return
        self._pausing.stands = False
        self._pausing.gate.open()
        self._query = self._start(available_now=once and self._feed is None)
        if once:
            threading.Thread(target=self._drain, args=(self._query,), name="drain", daemon=True).start()

    def phase(self, text: str) -> None:
        """Show that the pipeline enters another phase."""
        self._progress.phase(text)

    def look(self, *, show: bool) -> None:
        """Check that the pipeline still runs; with `show`, update its progress.

        Raises: the error that ended the query.
        """
        if self.drained.is_set():
            return
        self._owner.check()
        try:
            if not self._is_paused():
                self._go_on()
        except ColumnsAdded as added:
            self._progress.phase(f"new columns: {added}")
            self._base = self._base.latest()
            self._pages.serves(self._base, self._owner.table)
            self._stop_query(self._query)
            self.start(once=self._once)
        if show or self.drained.is_set():
            if self._query is not None:  # first, because the daemon may take long to answer
                self._pages.look(self._query)
                with suppress(Py4JError, OSError):  # the JVM has ended, which `_check` reports
                    if self._query.isActive:
                        self._outage.look(self._query.status)
            self._show()

    def finish(self) -> None:
        """Flush and commit the rows of the drained query, and show its last figures.

        No commit if an operator has paused commits.
        """
        self._show()
        self._progress.phase("flushing")
        self._owner.table.flush()
        held = self._pausing.held("commits")
        if held is not None:
            self._progress.phase(f"{text_of('commits', held)}; the rows stay in SSTs, where reads find them")
            return
        self._progress.phase("committing")
        self._owner.table.commit()

    def _add(self, receipt: BatchReceipt) -> None:
        self._pages.add(receipt)
        if isinstance(self._owner.table, RemoteFleet):
            self._owner.table.written.update(str(each.table) for each in receipt.regions)

    def report(self, console: Console) -> None:
        """Print the report of the pipeline."""
        print_report(console, self._owner.table, self._base.indexes, self._pages.meter.figures(), self._clock)

    def stop(self) -> None:
        """Stop the feed and the query, if they still run."""
        self._pausing.stop()
        if self._feed is not None:
            self._feed.stop()
        self._stop_query(self._query)

    def _is_paused(self) -> bool:
        """Return whether the query is stopped by a pause.

        Stops the query if the ingestion is paused and no micro-batch is in progress.
        """
        told = self._pausing.told
        if told is None:
            if not self._pausing.stands:  # otherwise `_go_on` starts the query again
                self._pausing.gate.open()
            return False
        with suppress(Py4JError, OSError):  # the JVM has ended, which `_check` reports
            if not self._pausing.stands and (self._outage.waits or self._pausing.may_stop(self._query)):
                query, self._query = self._query, None
                self._stop_query(query)
                self._stand_still(told)
        return self._pausing.stands

    def _stand_still(self, told: str) -> None:
        self._pausing.stands = True
        self._outage.forget()
        self._pages.health.release("starting")
        self._progress.phase(told)

    def _go_on(self) -> None:
        """Check the query, and restart it after an outage or a pause.

        Raises: the error that ended the query, unless it is an outage.
        """
        if self._outage.waits:
            return
        try:
            if self._outage.due or self._pausing.stands:
                self._sink.failure = None
                self._outage.started()
                self.start(once=self._once)
            self._check()
        except MemWalError as error:
            self._outage.failed(error)
            self._progress.phase("waiting for the source")
            self._stop_query(self._query)

    def _stop_query(self, query: StreamingQuery | None) -> None:
        self._sink.give_up()
        self._pausing.gate.leave()
        with suppress(Exception):
            if query is not None:
                query.stop()
        self._end_guard()

    def _start(self, *, available_now: bool) -> StreamingQuery:
        source = self._settings.source
        try:
            if self._feed is not None:
                local_path(source.path).mkdir(parents=True, exist_ok=True)
            rows = self._rows()
            if not has_header(source):  # for these the frame has only file names
                self._sink.expect_columns(rows.frame.columns)
                self._sink.named(rows.frame)
            self._sink.small = rows.small
            writer = rows.frame.writeStream.foreachBatch(self._pausing.gate.before(self._writer()))
            writer = writer.queryName(f"memwal {self._settings.checkpoint}")
            writer = writer.option("checkpointLocation", self._settings.checkpoint)
            every = f"{source.trigger * 1e3:.0f} milliseconds"
            writer = writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime=every)
            if self._feed is not None:
                self._progress.phase("warming up")
                self._sink.warm_up(self._starting.result())
            refuse_set_back(self._settings, lambda query: self._owner.table.applied(query).newest)
            mark_checkpoint(self._settings, self._base)
            self._check_replay()
            self._pages.meter.begin()
            query = writer.start()
        except Exception as error:
            raise of_spark(error) from error
        self._pages.health.release("starting")
        self._progress.phase("streaming")
        if self._feed is not None and not self._feed_started:
            self._feed_started = True
            self._feed.start()
        return query

    def _check_replay(self) -> None:
        """Start the checks that precede a replay: compare Kafka's topics, or log the names of deleted files.

        For Kafka, the sink then compares the topics in each micro-batch. Raises: as `TopicGuard`.
        """
        self._end_guard()
        spark, source = self._starting.result(), self._settings.source
        if source.format == KAFKA:
            self._guard = self._sink.guard = topic_guard(spark, self._settings)
            self._guard.start()
        elif source.format in FILE_FORMATS:
            files = checkpoint_files(spark, self._settings.checkpoint)
            log_deleted_files(spark, self._settings.place, files)

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _writer(self) -> Callable[[DataFrame, int], None]:
        self._drift = Drift(self._settings, self._base, self._sink, self._drift.told)
        if has_header(self._settings.source):
            schema = written_schema(self._settings, self._base)
            self._by_header = ByHeader(with_absolute_paths(self._settings).source, schema, self._sink)
            return self._by_header
        return self._sink if self._settings.source.schema_drift == "ignore" else self._drift

    def _rows(self) -> SourceRows:
        source, dlq = with_absolute_paths(self._settings).source, self._settings.dlq
        spark, schema = self._starting.result(), written_schema(self._settings, self._base)
        if source.format == KAFKA:
            raw = dlq.mode == "table" or source.schema_drift != "ignore"
            return read_kafka(spark, source, schema, self._base.key, raw=raw)
        return read_stream(spark, source, schema)

    def _drain(self, query: StreamingQuery) -> None:
        """Set `drained` once the query has processed all data of the source. `_check` reports failures."""
        with suppress(Exception):
            if self._feed is None:
                query.awaitTermination()
            else:
                self._feed.finished.wait()
                query.processAllAvailable()
            paused = query is not self._query  # after a pause, another query drains the source
            if not paused and query.exception() is None and self._feed_failure() is None:
                self.drained.set()

    def _check(self) -> None:
        """Raise the error that ended the feed or the query.

        The loss of a daemon has precedence over its consequences.
        """
        failure = self._feed_failure()
        if failure is not None:
            raise failure
        query = self._query
        try:
            if query is None or query.isActive:
                return
            error = query.exception()
        except (Py4JError, OSError) as lost:
            raise Unavailable("Spark's JVM ended; nothing acknowledged is lost; run the same command again") from lost
        if error is None:
            self.drained.set()
            return
        self._owner.check()
        by_header = None if self._by_header is None else self._by_header.failure
        raise by_header or self._drift.failure or self._sink.failure or of_spark(error)

    def _feed_failure(self) -> MemWalError | None:
        return None if self._feed is None else self._feed.failure

    def _show(self) -> None:
        status: dict[str, Any] = {}
        try:
            status = self._owner.table.status()
            self._pages.saw(status)
            self._pages.health.release("no_daemon")
        except MemWalError as error:
            self._pages.health.hold("no_daemon", str(error))
        files = "" if self._feed is None else f"{self._feed.landed}/{self._feed.files}"
        self._progress.show(self._pages.meter.figures(), status, files)
