"""`memwal run`: source -> regions -> base table, for each pipeline of a file.

1. Check everything that can be checked: Java, the sources, the tables; Kafka is asked for its topics through Spark,
   which is started for that. Nothing has been written until here.
2. Create the tables that are absent; start the daemons, one each, while Spark starts.
3. Start the streaming queries, and a feed once Spark's workers are warm. Daemons commit at intervals by themselves.
4. Watch until the sources are drained (`--once`), a signal comes, or something fails.
5. `--once`: flush, commit, report. Stop the queries, the daemons and Spark.

Whatever ends a run, the next one goes on from Spark's checkpoint; what it sends twice is applied once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JError
from rich.console import Console

from flush import BaseTable
from ingest.checkpoint import check_checkpoint, held, mark_checkpoint, refuse_old_checkpoint
from ingest.daemon import check_addresses
from ingest.dead_letters import DeadLetters
from ingest.drift import Drift, Grown
from ingest.edge import at_the_edge
from ingest.elsewhere import anywhere
from ingest.errors import Invalid, MemWalError, Unavailable
from ingest.feed import Feed
from ingest.http_pages import RunPages, listening
from ingest.kafka_checks import KAFKA, record_mapping
from ingest.kafka_source import check_reachable, check_topics, read_kafka
from ingest.kafka_topics import note_topics
from ingest.listening import check_address
from ingest.logs import configure_logs
from ingest.metrics import Scrape
from ingest.on_spark_run import check_room
from ingest.on_spark_slots import wait_for_executors
from ingest.opening import find_or_create
from ingest.outage import Outage
from ingest.progress import Progress, Screen
from ingest.report import print_report
from ingest.run_metrics import RunMeter
from ingest.security import Guard
from ingest.settings import Settings
from ingest.source import check_source, is_remote, local_path, read_stream, reads_local
from ingest.spark_master import check_master
from ingest.spark_session import check_java, configuration, start_session
from ingest.spark_sink import MemWalSink
from ingest.table_owner import Owner, owner_of
from ingest.tally import Tally
from ingest.task_errors import of_spark
from wal import Clock, SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_EVERY = 0.1
_SHOW_EVERY = 5  # looks between two status calls to the daemon


@at_the_edge
def run(pipelines: Mapping[str, Settings], *, once: bool, console: Console) -> int:
    """Run pipelines in one Spark, each with a query of its own; returns the exit code.

    `pipelines`: settings by where they came from, for hints to the user.
    `once`: process what is there, commit, print a report. Without it, run until SIGINT or SIGTERM.
    Raises: Invalid before anything was written; Unavailable when a daemon or Spark ends; what a sink raises. What ends
    one pipeline ends all.
    """
    every = list(pipelines.values())
    configure_logs(every[0].log.level, every[0].log.format)
    found = [check(settings, os.environ) for settings in every]
    check_room(every)
    clock = SystemClock()
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        pages = [RunPages(Scrape(), RunMeter(), Tally(clock), settings.table.uri) for settings in every]
        for settings, shown in zip(every, pages, strict=True):
            stack.enter_context(_http(settings, shown, console))
        screen = stack.enter_context(Screen(console, [settings.table.uri for settings in every], clock))
        screen.phase("starting Spark and the daemon" if len(every) == 1 else "starting Spark and the daemons")
        starting = stack.enter_context(spark_of(every, _regions(every, found), once=once, stop=stop))
        topics = {n: check_topics(starting.result(), s) for n, s in enumerate(every) if s.source.format == KAFKA}
        stack.enter_context(held([settings.checkpoint for settings in every]))
        bases = [base or find_or_create(each, os.environ)[0] for each, base in zip(every, found, strict=True)]
        for number, read in topics.items():
            note_topics(every[number], read)
        owners: dict[str, Owner] = {}  # two pipelines into one table have one
        for settings, board in zip(every, screen.boards, strict=True):
            if settings.table.uri not in owners:
                owners[settings.table.uri] = stack.enter_context(owner_of(settings, board.note, starting, every))
        runs = [
            _Run(settings, base, Services(owners[settings.table.uri], starting), shown, clock, board)
            for settings, base, shown, board in zip(every, bases, pages, screen.boards, strict=True)
        ]
        drained = stream(runs, once=once, stop=stop)
        if drained:
            for each in runs:
                each.finish()
        screen.__exit__(None, None, None)
        if drained:
            _report(runs, list(pipelines), console)
    if not drained:
        console.out(_stopped(pages), highlight=False)
    return 0


def _report(runs: Sequence[_Run], sources: Sequence[str], console: Console) -> None:
    """What came of pipelines that are drained; `sources`: where their settings are."""
    for each, source in zip(runs, sources, strict=True):
        each.report(console)
        console.out(f"query it: {_program()} query {source} --help", highlight=False)


def _stopped(pages: Sequence[RunPages]) -> str:
    """The last line of a run that a signal ended."""
    rows = sum(each.tally.figures().rows for each in pages)
    return f"stopped after {rows:,} rows of finished micro-batches, all durable; the same command goes on from there"


def _regions(pipelines: Sequence[Settings], found: Sequence[BaseTable | None]) -> int:
    """Regions of one table at most."""
    both = zip(pipelines, found, strict=True)
    return max(settings.regions.count if base is None else base.buckets for settings, base in both)


@contextmanager
def _http(settings: Settings, pages: RunPages, console: Console) -> Iterator[None]:
    """Serve a pipeline's pages, and say where; see `http_pages.listening`."""
    sink, guard = settings.sink, Guard.of(settings.daemon, os.environ)
    with listening(sink.http_host, sink.http_port, pages, guard, setting="sink.http_port") as url:
        if url is not None:
            console.out(f"metrics, health and status at {url}", highlight=False)
        yield


def _program() -> str:
    """The command as it was typed, such as .venv/bin/memwal, so that it can be typed again."""
    return sys.argv[0] if Path(sys.argv[0]).name == "memwal" else "memwal"


# ---- 1: checks -----------------------------------------------------------------------------------------------------


def check(settings: Settings, environ: Mapping[str, str]) -> BaseTable | None:
    """The table as it is, None when it is to be created. Reads only. Raises: Invalid."""
    check_java(environ)
    check_master(settings.source.spark)
    check_checkpoint(settings)
    guard = _guard(settings, environ)
    if settings.sink.http_port >= 0:
        check_address("sink.http_port", settings.sink.http_host, settings.sink.http_port, guard)
    base = BaseTable.find(settings.table.uri, settings.storage_options(environ))
    if base is not None:
        base, _ = find_or_create(settings, environ)
    refuse_old_checkpoint(settings, base)
    schema = settings.arrow_schema() if base is None else written_schema(settings, base)
    if not schema.names:
        raise Invalid(f"{settings.table.uri}: no table is there; write its columns and key in [table] to create it")
    check_source(settings.source, schema)
    if settings.dlq.mode == "table":
        DeadLetters.find(settings.dead_letters, settings.storage_options(environ), SystemClock())
    if settings.source.format == KAFKA:
        record_mapping(settings.source, schema, tuple(settings.table.key) if base is None else base.key)
        check_reachable(settings.source)
    return base


def _guard(settings: Settings, environ: Mapping[str, str]) -> Guard:
    """What our own edges ask of callers; the addresses of a child daemon are looked at too."""
    if not settings.daemon.endpoints and not settings.daemon.on_spark:
        return check_addresses(settings, environ)
    return Guard.of(settings.daemon, environ)


def written_schema(settings: Settings, base: BaseTable) -> pa.Schema:
    """The columns that a file source is read with: the table's.

    Where upserts merge, only those that [table] columns names, if it does: Spark reads a column that a file does not
    have as null, and a null takes the place of what is stored.
    """
    named = settings.table.columns
    if base.rules.upsert != "merge" or not named:
        return base.schema
    return pa.schema([field for field in base.schema if field.name in named])


# ---- 2: services ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Services:
    """What a pipeline needs beside itself; Spark may still be starting."""

    owner: Owner
    starting: Future[SparkSession]

    @property
    def spark(self) -> SparkSession:
        """Spark, once it has started. Raises: what kept it from starting."""
        return self.starting.result()


@contextmanager
def spark_of(
    pipelines: Sequence[Settings], tasks: int, *, once: bool, stop: threading.Event
) -> Iterator[Future[SparkSession]]:
    """Begin to start Spark; it is stopped at the end. `tasks`: regions of one table at most."""
    local = {
        "local_checkpoints": not any(is_remote(settings.checkpoint) for settings in pipelines),
        "local_sources": all(reads_local(settings.source) for settings in pipelines),
    }
    conf = configuration(_of_session(pipelines), tasks, once=once, **local)

    def started() -> SparkSession:
        spark = start_session(conf)
        try:
            wait_for_executors(spark.sparkContext, SystemClock(), stop)
        except MemWalError:
            spark.stop()
            raise
        return spark

    with ThreadPoolExecutor(1, "spark-start") as starter:
        starting = starter.submit(started)
        try:
            yield starting
        finally:
            _stop_spark(starting)


def _of_session(pipelines: Sequence[Settings]) -> Settings:
    """Whose settings Spark starts with: its connectors are taken in at the start."""
    return next((each for each in pipelines if each.source.format == KAFKA), pipelines[0])


def _stop_spark(starting: Future[SparkSession]) -> None:
    with suppress(Exception):
        starting.result().stop()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set for as long as the context lasts; the handlers before come back after."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- 3, 4: the stream ----------------------------------------------------------------------------------------------


def stream(runs: Sequence[_Run], *, once: bool, stop: threading.Event) -> bool:
    """Stream until every source is drained (`once`: True) or a signal came (False). Raises: what ended a query."""
    try:
        for each in runs:
            if stop.is_set():
                return False
            each.start(once=once)
        looks = 0
        while not stop.wait(_LOOK_EVERY):
            for each in runs:
                each.look(show=looks % _SHOW_EVERY == 0)
            if all(each.drained.is_set() for each in runs):
                return True
            looks += 1
        return False
    finally:
        _stop_all(runs, told_to=stop.is_set())


def _stop_all(runs: Sequence[_Run], *, told_to: bool) -> None:
    """Side by side: a query whose source does not answer takes as long as Spark waits for it."""
    for each in runs if told_to else ():
        each.phase("stopping")
    with ThreadPoolExecutor(len(runs), "stopping") as stopping:
        for each in runs:
            stopping.submit(each.stop)


class _Run:
    """The feed and the streaming query of one pipeline, watched by the main thread of the run."""

    def __init__(
        self, settings: Settings, base: BaseTable, services: Services, pages: RunPages, clock: Clock, progress: Progress
    ) -> None:
        self._settings, self._base, self._services, self._progress = settings, base, services, progress
        self._clock, self._pages = clock, pages
        owner = services.owner
        self._sink = MemWalSink(settings, endpoint=owner.table.endpoint, on_batch=self._pages.add, tasks=owner.tasks)
        self._drift = Drift(settings, base, self._sink)
        self._feed_started = False
        source = settings.source
        self._feed = (
            Feed(local_path(source.feed), local_path(source.path), source.feed_every, clock) if source.feed else None
        )
        self._query: StreamingQuery | None = None
        self._outage = Outage(settings.table.uri, source.outage_max, pages.health, clock)
        self.drained = threading.Event()

    def start(self, *, once: bool) -> None:
        """Start the query. `once`: `drained` is set when the source is. Raises: what kept it from starting."""
        self._once = once
        self._query = self._start(available_now=once and self._feed is None)
        if once:
            threading.Thread(target=self._drain, args=(self._query,), name="drain", daemon=True).start()

    def phase(self, text: str) -> None:
        """Say that the pipeline goes on to something else."""
        self._progress.phase(text)

    def look(self, *, show: bool) -> None:
        """See whether it still runs, and `show` how far it is. Raises: what ended the query."""
        if self.drained.is_set():
            return
        self._services.owner.check()
        try:
            self._go_on()
        except Grown as grown:
            self._progress.phase(f"new columns: {grown}")
            self._base = self._base.latest()
            self._stop_query()
            self.start(once=self._once)
        if show or self.drained.is_set():
            self._show()
            if self._query is not None:
                self._pages.look(self._query)
                self._look_at_source(self._query)

    def _go_on(self) -> None:
        """Raises: what ended the query, unless that passes by itself (`ingest.outage`)."""
        if self._outage.waits:
            return
        try:
            if self._outage.due:
                self._sink.failure = None
                self._outage.started()
                self.start(once=self._once)
            self._check()
        except MemWalError as error:
            self._outage.met(error)
            self._progress.phase("waiting for the source")
            self._stop_query()

    def finish(self) -> None:
        """Flush and commit what the query has put, once it is drained; its last figures are shown before."""
        self._show()
        for step, act in (
            ("flushing", self._services.owner.table.flush),
            ("committing", self._services.owner.table.commit),
        ):
            self._progress.phase(step)
            act()

    def report(self, console: Console) -> None:
        """Print what came of it."""
        print_report(console, self._services.owner.table, self._base.indexes, self._pages.tally.figures(), self._clock)

    def stop(self) -> None:
        """End the feed and the query, which may have ended."""
        if self._feed is not None:
            self._feed.stop()
        self._stop_query()

    def _stop_query(self) -> None:
        with suppress(Exception):
            if self._query is not None:
                self._query.stop()

    def _start(self, *, available_now: bool) -> StreamingQuery:
        source = self._settings.source
        try:
            if self._feed is not None:
                local_path(source.path).mkdir(parents=True, exist_ok=True)
            writer = self._frame().writeStream.foreachBatch(self._writer())
            writer = writer.queryName(f"memwal {self._settings.checkpoint}")
            writer = writer.option("checkpointLocation", self._settings.checkpoint)
            timed = (
                {"availableNow": True}
                if available_now
                else {"processingTime": f"{source.trigger * 1e3:.0f} milliseconds"}
            )
            if self._feed is not None:
                self._progress.phase("warming up")
                self._sink.warm_up(self._services.spark)
            mark_checkpoint(self._settings, self._base)
            self._pages.tally.begin()
            query = writer.trigger(**timed).start()
        except Exception as error:
            raise of_spark(error) from error
        self._pages.health.release("starting")
        self._progress.phase("streaming")
        if self._feed is not None and not self._feed_started:
            self._feed_started = True
            self._feed.start()
        return query

    def _writer(self) -> Callable[[DataFrame, int], None]:
        self._drift = Drift(self._settings, self._base, self._sink, self._drift.told)
        return self._sink if self._settings.source.schema_drift == "ignore" else self._drift

    def _frame(self) -> DataFrame:
        source, dlq = anywhere(self._settings).source, self._settings.dlq
        spark, schema = self._services.spark, written_schema(self._settings, self._base)
        if source.format == KAFKA:
            raw = dlq.mode == "table" or source.schema_drift != "ignore"
            return read_kafka(spark, source, schema, self._base.key, raw=raw)
        return read_stream(spark, source, schema, keep_bad=dlq.mode != "fail")

    def _drain(self, query: StreamingQuery) -> None:
        """Set `drained` once the query has processed all that the source holds. Failures are found by `_check`."""
        with suppress(Exception):
            if self._feed is None:
                query.awaitTermination()
            else:
                self._feed.wait()
                query.processAllAvailable()
            if query.exception() is None and self._feed_failure() is None:
                self.drained.set()

    def _check(self) -> None:
        """Raises: what ended the feed or the query; a lost daemon before what its loss brought about."""
        failure = self._feed_failure()
        if failure is not None:
            raise failure
        query = self._query
        try:
            if query is None or query.isActive:
                return
        except (Py4JError, OSError) as lost:
            raise Unavailable("Spark's JVM ended; nothing acknowledged is lost; run the same command again") from lost
        error = query.exception()
        if error is None:
            self.drained.set()
            return
        self._services.owner.check()
        raise self._drift.failure or self._sink.failure or of_spark(error)

    def _look_at_source(self, query: StreamingQuery) -> None:
        with suppress(Py4JError, OSError):  # the JVM is gone, which others find out
            if query.isActive:
                self._outage.look(query.status)

    def _feed_failure(self) -> MemWalError | None:
        return None if self._feed is None else self._feed.failure

    def _show(self) -> None:
        status: dict[str, Any] = {}
        try:
            status = self._services.owner.table.status()
            self._pages.health.release("no_daemon")
        except MemWalError as error:
            self._pages.health.hold("no_daemon", str(error))
        files = "" if self._feed is None else f"{self._feed.landed}/{self._feed.files}"
        self._progress.show(self._pages.tally.figures(), status, files)
