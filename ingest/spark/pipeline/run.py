"""`memwal run`: source -> regions -> base table, for each pipeline of a file. The README has the steps of a run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from memwal.flush import BaseTable
from memwal.ingest.engine.table.create import find_or_create
from memwal.ingest.errors import MemWalError, translate_errors
from memwal.ingest.service.ops.logs import configure_logs
from memwal.ingest.service.ops.skew import by_key
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import KAFKA, is_remote
from memwal.ingest.spark.fleet.driver import wait_for_executors
from memwal.ingest.spark.pipeline.checkpoint import locked
from memwal.ingest.spark.pipeline.checks import check, columns_of_source
from memwal.ingest.spark.pipeline.daemons import Owner, check_room, owner_of
from memwal.ingest.spark.pipeline.metrics import RunMeter
from memwal.ingest.spark.pipeline.pages import RunPages, RunSource
from memwal.ingest.spark.pipeline.pausing import refuse_paused
from memwal.ingest.spark.pipeline.screen import Screen
from memwal.ingest.spark.pipeline.stream import PipelineStream
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.source.files import reads_local
from memwal.ingest.spark.source.kafka.stream import check_topics
from memwal.ingest.threads import stop_signals
from memwal.wal import Clock, SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_EVERY = 0.1
_SHOW_EVERY = 5  # iterations between two status calls to the daemon


@translate_errors
def run(pipelines: Mapping[str, Settings], *, once: bool, console: Console, notes: Console | None = None) -> int:
    """Run pipelines in one Spark, each with its own query; return the exit code.

    `pipelines`: settings by the FILE or FILE:NAME that they were loaded from, which hints print.
    `notes`: console for progress, hints and the last line of a run; None: `console`.
    `once`: process the data that is available now, commit, print a report. Otherwise run until SIGINT or SIGTERM.

    Raises: Invalid before anything was written; Unavailable if a daemon or Spark ends; errors of a sink. An error of
    one pipeline ends all.
    """
    every, notes = list(pipelines.values()), notes or console
    configure_logs(every[0].log.level, every[0].log.format)
    found, clock = [check(settings, os.environ) for settings in every], SystemClock()
    check_room(every)
    for settings, base in zip(every, found, strict=True):
        if text := by_key(settings, base):
            notes.out(f"{settings.place}: warning: {text}", highlight=False)
        if once and base is not None:
            refuse_paused(settings, os.environ, clock)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        pages = [RunPages(_meter(settings, clock, once=once), settings.place, clock) for settings in every]
        for number, (settings, shown) in enumerate(zip(every, pages, strict=True)):
            stack.enter_context(_http(settings, shown, console, storage=number == 0))
        screen = stack.enter_context(Screen(notes, [settings.place for settings in every], clock))
        screen.phase("starting Spark and the daemon" if len(every) == 1 else "starting Spark and the daemons")
        starting = stack.enter_context(spark_of(every, _regions(every, found), once=once, stop=stop))
        for settings in (each for each in every if each.source.format == KAFKA):
            check_topics(starting.result(), settings)
        stack.enter_context(locked([settings.checkpoint for settings in every]))
        bases = [
            base or find_or_create(each, os.environ, partial(columns_of_source, each))[0]
            for each, base in zip(every, found, strict=True)
        ]
        owners = _owners(every, screen, starting, stack)
        runs = [
            PipelineStream(settings, base, owners[settings.place], starting, shown, clock, board)
            for settings, base, shown, board in zip(every, bases, pages, screen.boards, strict=True)
        ]
        drained = stream(runs, once=once, stop=stop)
        if drained:
            for each in runs:
                each.finish()
        screen.__exit__(None, None, None)  # now, so that the report is printed below the panel
        if drained:
            _report(runs, list(pipelines), console, notes)
    if not drained:
        notes.out(_stopped(pages), highlight=False)
    return 0


def _meter(settings: Settings, clock: Clock, *, once: bool) -> RunMeter:
    """Return the meter of a pipeline. `run --once` has no freshness objective, since it reads old data."""
    source = settings.source
    return RunMeter(clock, source.trigger, 0.0 if once else source.freshness_max)


def _owners(
    pipelines: Sequence[Settings], screen: Screen, starting: Future[SparkSession], stack: ExitStack
) -> dict[str, Owner]:
    """Return the owner of each table's regions by uri. Pipelines into one table share it. Owners end with `stack`."""
    owners: dict[str, Owner] = {}
    for settings, board in zip(pipelines, screen.boards, strict=True):
        if settings.place not in owners:
            owners[settings.place] = stack.enter_context(owner_of(settings, board.note, starting, pipelines))
    return owners


def _report(runs: Sequence[PipelineStream], sources: Sequence[str], console: Console, notes: Console) -> None:
    """Print the reports of drained pipelines. `sources`: the keys of `run`'s `pipelines`."""
    for each, source in zip(runs, sources, strict=True):
        each.report(console)
        # The command as the user typed it, such as .venv/bin/memwal, so that the hint can be copied.
        program = sys.argv[0] if Path(sys.argv[0]).name == "memwal" else "memwal"
        notes.out(f"query it: {program} query {source} --help", highlight=False)


def _stopped(pages: Sequence[RunPages]) -> str:
    """Return the last line of a run that was ended by a signal."""
    rows = sum(each.meter.rows for each in pages)
    return f"stopped after {rows:,} rows of finished micro-batches, all durable; the same command continues from here"


def _regions(pipelines: Sequence[Settings], found: Sequence[BaseTable | None]) -> int:
    """Return the largest number of regions of a table."""
    both = zip(pipelines, found, strict=True)
    return max(settings.regions.first if base is None else base.buckets for settings, base in both)


@contextmanager
def _http(settings: Settings, pages: RunPages, console: Console, *, storage: bool) -> Iterator[None]:
    """Serve a pipeline's pages over HTTP, unless the port is -1, and print the address.

    `storage`: include the storage requests of this process in its metrics. Only one of several pipelines does so, so
    that sums count the requests once.
    """
    sink, guard, clock = settings.sink, Guard.of(settings.daemon, os.environ), SystemClock()
    if sink.http_port < 0:
        yield
        return
    from memwal.ingest.service.ops.events import RecentEvents
    from memwal.ingest.service.ops.http_server import HttpServer
    from memwal.ingest.service.ops.live import Live
    from memwal.ingest.service.ops.metrics import RefusedCollector
    from memwal.ingest.service.ops.storage import StorageCollector

    if storage:
        pages.scrape.add(StorageCollector(settings.cost))
    pages.scrape.add(RefusedCollector(guard.refused))
    host, port, setting = sink.http_host, sink.http_port, "sink.http_port"
    with RecentEvents() as events:
        live = Live("run", RunSource(pages, settings, clock), events, clock)
        acts = pages.acts()
        with closing(HttpServer(host, port, pages.pages(), guard, setting=setting, live=live, acts=acts)) as server:
            live.start()
            console.out(f"page, metrics, health and status at {server.url}", highlight=False)
            try:
                yield
            finally:
                live.stop()


# ---- 2: Spark -----------------------------------------------------------------------------------------------------


@contextmanager
def spark_of(
    pipelines: Sequence[Settings], tasks: int, *, once: bool, stop: threading.Event
) -> Iterator[Future[SparkSession]]:
    """Start Spark in the background, and stop it at the end. `tasks`: the largest number of regions of a table."""
    local = {
        "local_checkpoints": not any(is_remote(settings.checkpoint) for settings in pipelines),
        "local_sources": all(reads_local(settings.source) for settings in pipelines),
    }
    # Connectors load when Spark starts, so it starts with the settings of a Kafka pipeline if there is one.
    settings = next((each for each in pipelines if each.source.format == KAFKA), pipelines[0])
    conf = configuration(settings, tasks, once=once, **local)

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
            with suppress(Exception):
                starting.result().stop()


# ---- 3, 4: the streams ----------------------------------------------------------------------------------------------


def stream(runs: Sequence[PipelineStream], *, once: bool, stop: threading.Event) -> bool:
    """Stream until every source is drained (return True) or a signal arrives (False).

    Raises: the error that ended a query.
    """
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
        for each in runs if stop.is_set() else ():
            each.phase("stopping")
        # In parallel: a query whose source does not answer takes as long as Spark waits for it.
        with ThreadPoolExecutor(len(runs), "stopping") as stopping:
            for each in runs:
                stopping.submit(each.stop)
