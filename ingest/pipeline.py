"""`memwal run`: source -> regions -> base table.

1. Check everything that can be checked: Java, the source, the table. Nothing has been written until here.
2. Create the table when it is absent; start the daemon and Spark, at the same time.
3. Start the streaming query, and the feed once Spark's workers are warm. The daemon commits at intervals by itself.
4. Watch until the source is drained (`--once`), a signal comes, or something fails.
5. `--once`: flush, commit, report. Stop the query, Spark and the daemon, in this order.

Whatever ends a run, the next one goes on from Spark's checkpoint; what it sends twice is applied once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JError
from rich.console import Console

from flush import BaseTable
from ingest.access import Access
from ingest.child import ChildDaemon, start_child
from ingest.client import RemoteTable, connect
from ingest.daemon import check_addresses
from ingest.edge import at_the_edge
from ingest.errors import Invalid, MemWalError, Unavailable
from ingest.feed import Feed
from ingest.http_pages import RunPages, listening
from ingest.listening import check_address
from ingest.metrics import Scrape
from ingest.opening import find_or_create
from ingest.progress import Progress
from ingest.report import print_report
from ingest.run_metrics import RunMeter
from ingest.security import Guard
from ingest.settings import Settings
from ingest.source import check_source, is_remote, local_path, read_stream
from ingest.spark_session import check_java, configuration, start_session
from ingest.spark_sink import MemWalSink, configured_endpoint, daemon_ended
from ingest.tally import Tally
from ingest.task_errors import of_spark
from wal import Clock, SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MARKER = "memwal-table"
"""File in a checkpoint that holds the id of the table it belongs to; Spark leaves files it does not know alone."""
_LOOK_EVERY = 0.1
_SHOW_EVERY = 5  # looks between two status calls to the daemon
_DEATH_NOTICE = 20  # looks in which a query that failed may still turn out to have lost its daemon


@at_the_edge
def run(settings: Settings, *, once: bool, console: Console, settings_source: str) -> int:
    """Run the pipeline of `settings`; returns the exit code.

    `once`: process what is there, commit, print a report. Without it, run until SIGINT or SIGTERM.
    `settings_source`: where the settings came from, for hints to the user.
    Raises: Invalid before anything was written; Unavailable when the daemon or Spark ends; what the sink raises.
    """
    base = check(settings, os.environ)
    clock = SystemClock()
    pages = RunPages(Scrape(), RunMeter(), Tally(clock), settings.table.uri)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        sink, guard = settings.sink, Guard.of(settings.daemon, os.environ)
        http = listening(sink.http_host, sink.http_port, pages, guard, setting="sink.http_port")
        if (url := stack.enter_context(http)) is not None:
            console.print(f"metrics, health and status at {url}", highlight=False, soft_wrap=True)
        progress = stack.enter_context(Progress(console, settings.table.uri, clock))
        progress.phase("starting Spark and the daemon")
        base = base or find_or_create(settings, os.environ)[0]
        services = stack.enter_context(services_of(settings, base, once=once, replaying=progress.note))
        running = _Run(settings, base, services, pages, clock, progress)
        ended = running.stream(once, stop)
        if once and ended:
            for step, act in (("flushing", services.table.flush), ("committing", services.table.commit)):
                progress.phase(step)
                act()
        progress.__exit__(None, None, None)
        if once and ended:
            print_report(console, services.table, base.indexes, pages.tally.figures(), clock)
            console.print(f"query it: {_program()} query {settings_source} --help", highlight=False, soft_wrap=True)
    return 0


def _program() -> str:
    """The command as it was typed, such as .venv/bin/memwal, so that it can be typed again."""
    return sys.argv[0] if Path(sys.argv[0]).name == "memwal" else "memwal"


# ---- 1: checks -----------------------------------------------------------------------------------------------------


def check(settings: Settings, environ: Mapping[str, str]) -> BaseTable | None:
    """The table as it is, None when it is to be created. Reads only. Raises: Invalid."""
    check_java(environ)
    _check_checkpoint(settings)
    guard = _guard(settings, environ)
    if settings.sink.http_port >= 0:
        check_address("sink.http_port", settings.sink.http_host, settings.sink.http_port, guard)
    base = BaseTable.find(settings.table.uri, settings.storage_options(environ))
    if base is not None:
        base, _ = find_or_create(settings, environ)
    _refuse_old_checkpoint(settings, base)
    schema = settings.arrow_schema() if base is None else written_schema(settings, base)
    if not schema.names:
        raise Invalid(f"{settings.table.uri}: no table is there; write its columns and key in [table] to create it")
    check_source(settings.source, schema)
    return base


def _guard(settings: Settings, environ: Mapping[str, str]) -> Guard:
    """What our own edges ask of callers; the addresses of a child daemon are looked at too."""
    if not settings.daemon.endpoints:
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


def _check_checkpoint(settings: Settings) -> None:
    """Raises: Invalid where the default would lie beside a table that only a storage URL reaches."""
    if not settings.sink.checkpoint and is_remote(settings.table.uri):
        raise Invalid(
            "sink.checkpoint is not set, and Spark keeps none beside a table on object storage by itself; "
            "write a local directory, or a Hadoop URL such as s3a:// for a Spark that has its file system"
        )


def _refuse_old_checkpoint(settings: Settings, base: BaseTable | None) -> None:
    """A checkpoint of another table would skip, in silence, every row that it counts as done.

    `base`: None when the table is to be created. Raises: Invalid.
    """
    if is_remote(settings.checkpoint):
        return
    checkpoint = local_path(settings.checkpoint)
    offsets, marker = checkpoint / "offsets", checkpoint / MARKER
    begun = offsets.is_dir() and any(offsets.iterdir())
    if begun and (base is None or not marker.exists() or marker.read_text().strip() != base.table_id):
        raise Invalid(
            f"sink.checkpoint: {settings.checkpoint} belongs to another table than the one at {settings.table.uri}; "
            "delete it to read the source from its beginning, or put its table back"
        )


def _mark_checkpoint(settings: Settings, base: BaseTable) -> None:
    """Note in the checkpoint which table it belongs to, before Spark writes its first offset."""
    if not is_remote(settings.checkpoint):
        checkpoint = local_path(settings.checkpoint)
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / MARKER).write_text(f"{base.table_id}\n")


# ---- 2: services ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Services:
    """What a run needs beside itself: owners of the regions (a child, or those configured) and Spark."""

    child: ChildDaemon | None
    table: RemoteTable
    spark: SparkSession

    def check(self) -> None:
        """Raises: Unavailable when the child daemon has ended."""
        code = None if self.child is None else self.child.exit_code()
        if code is not None:
            raise daemon_ended(code)


@contextmanager
def services_of(
    settings: Settings, base: BaseTable, *, once: bool, replaying: Callable[[str], None]
) -> Iterator[Services]:
    """Start the daemon and Spark side by side; stop both at the end. `replaying`: see `start_child`."""
    conf = configuration(settings, base.buckets, once=once)
    with ExitStack() as stack:
        starter = stack.enter_context(ThreadPoolExecutor(1, "spark-start"))
        starting: Future[SparkSession] = starter.submit(start_session, conf)
        stack.callback(_stop_spark, starting)
        endpoint, child = configured_endpoint(settings), None
        if endpoint is None:
            child = start_child(settings, replaying)
            stack.callback(child.stop, settings.daemon.drain_timeout)
            endpoint = child.endpoint
        shown = Access.of(settings).options()
        table = stack.enter_context(connect(endpoint, in_flight_max=settings.sink.in_flight_max, **shown))
        yield Services(child, table, starting.result())


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


class _Run:
    """The feed and the streaming query of one run, watched by its main thread."""

    def __init__(
        self, settings: Settings, base: BaseTable, services: Services, pages: RunPages, clock: Clock, progress: Progress
    ) -> None:
        self._pages = pages
        self._settings, self._base, self._services, self._progress = settings, base, services, progress
        self._sink = MemWalSink(settings, endpoint=services.table.endpoint, on_batch=pages.add)
        source = settings.source
        self._feed = (
            Feed(local_path(source.feed), local_path(source.path), source.feed_every, clock) if source.feed else None
        )

    def stream(self, once: bool, stop: threading.Event) -> bool:
        """Stream until the source is drained (`once`: True) or a signal came (False). Raises: what ended the query."""
        query = self._start(available_now=once and self._feed is None)
        drained = threading.Event()
        if once:
            threading.Thread(target=self._drain, args=(query, drained), name="drain", daemon=True).start()
        try:
            looks = 0
            while not stop.wait(_LOOK_EVERY):
                self._services.check()
                self._check(query, drained, stop)
                if looks % _SHOW_EVERY == 0:
                    self._show()
                    self._pages.look(query)
                if drained.is_set():
                    self._show()
                    return True
                looks += 1
            return False
        finally:
            self._stop(query)

    def _start(self, *, available_now: bool) -> StreamingQuery:
        source = self._settings.source
        try:
            if self._feed is not None:
                local_path(source.path).mkdir(parents=True, exist_ok=True)
            frame = read_stream(self._services.spark, source, written_schema(self._settings, self._base))
            writer = frame.writeStream.foreachBatch(self._sink).queryName("memwal")
            writer = writer.option("checkpointLocation", self._settings.checkpoint)
            timed = (
                {"availableNow": True}
                if available_now
                else {"processingTime": f"{source.trigger * 1e3:.0f} milliseconds"}
            )
            if self._feed is not None:
                self._progress.phase("warming up")
                self._sink.warm_up(self._services.spark)
            _mark_checkpoint(self._settings, self._base)
            self._pages.tally.begin()
            query = writer.trigger(**timed).start()
        except Exception as error:
            raise of_spark(error) from error
        self._pages.health.release("starting")
        self._progress.phase("streaming")
        if self._feed is not None:
            self._feed.start()
        return query

    def _drain(self, query: StreamingQuery, drained: threading.Event) -> None:
        """Set `drained` once the query has processed all that the source holds. Failures are found by `_check`."""
        with suppress(Exception):
            if self._feed is None:
                query.awaitTermination()
            else:
                self._feed.wait()
                query.processAllAvailable()
            if query.exception() is None and self._feed_failure() is None:
                drained.set()

    def _check(self, query: StreamingQuery, drained: threading.Event, stop: threading.Event) -> None:
        """Raises: what ended the feed or the query; a lost daemon before what its loss brought about."""
        failure = self._feed_failure()
        if failure is not None:
            raise failure
        try:
            if query.isActive:
                return
        except (Py4JError, OSError) as lost:
            raise Unavailable("Spark's JVM ended; nothing acknowledged is lost; run the same command again") from lost
        error = query.exception()
        if error is None:
            drained.set()
            return
        for _ in range(_DEATH_NOTICE if self._services.child is not None else 0):
            self._services.check()
            stop.wait(_LOOK_EVERY / 2)
        raise self._sink.failure or of_spark(error)

    def _feed_failure(self) -> MemWalError | None:
        return None if self._feed is None else self._feed.failure

    def _show(self) -> None:
        status: dict[str, Any] = {}
        with suppress(MemWalError):
            status = self._services.table.status()
        files = "" if self._feed is None else f"{self._feed.landed}/{self._feed.files}"
        self._progress.show(self._pages.tally.figures(), status, files)

    def _stop(self, query: StreamingQuery) -> None:
        if self._feed is not None:
            self._feed.stop()
        with suppress(Exception):
            query.stop()
