"""Daemons on Spark's executors for `memwal run`: those that run already, or a barrier job beside the stream.

Who owns the regions of a pipeline's table: a child daemon, those that Spark has placed, or those configured.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal import flush, wal
from memwal.ingest.client.remote import RemoteTable
from memwal.ingest.daemon.child import KeptChild
from memwal.ingest.errors import UNAUTHENTICATED, Invalid, MemWalError
from memwal.ingest.fleet.driver import LOOK_EVERY, SparkDaemons, session_of
from memwal.ingest.fleet.slots import check_configuration, slots_now
from memwal.ingest.rpc.credentials import Access
from memwal.ingest.rpc.owner_notes import FromNotes
from memwal.ingest.settings.endpoints import configured_endpoint
from memwal.ingest.settings.load import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOUND_WITHIN = 2.0
"""Seconds that daemons which a note names have to answer."""


def check_room(pipelines: Sequence[Settings]) -> None:
    """Refuse a Spark that cannot run the daemons of these tables and their streams. Raises: Invalid."""
    for settings in (each for each in pipelines if each.daemon.on_spark):
        try:
            check_configuration(session_of(settings), settings.daemon.on_spark, beside=beside(settings, pipelines))
        except Invalid:
            if _found(settings) is None:
                raise


def beside(settings: Settings, pipelines: Sequence[Settings]) -> int:
    """Slots that are needed beside the daemons of `settings`: one per stream, and other tables' daemons."""
    others = {each.table.uri: each.daemon.on_spark for each in pipelines if each.table.uri != settings.table.uri}
    return len(pipelines) + sum(others.values())


def sending_tasks(slots: int, settings: Settings, pipelines: Sequence[Settings]) -> int:
    """Tasks of one stream that may send at the same time.

    Where the daemons are lost, tasks that send wait for them in their slots; what is left must be enough to start the
    daemons again. Half of it, since Spark may run a stage again beside what is left of it.
    """
    streams = len(pipelines)
    spare = slots - settings.daemon.on_spark - (beside(settings, pipelines) - streams)
    return max(1, spare // (2 * streams))


@contextmanager
def daemons_for(settings: Settings, starting: Future[SparkSession], pipelines: Sequence[Settings]) -> Iterator[Placed]:
    """The daemons of `settings` that run already, or those that are started in this Spark and end with the context.

    `pipelines`: all that this Spark runs. Raises: Invalid for a Spark without room; what a daemon says that does
    not start.
    """
    find, table = _finder(settings), _found(settings)
    with ExitStack() as stack:
        daemons: SparkDaemons | None = None
        tasks = None
        if table is None:
            clock, told, room = wal.SystemClock(), threading.Event(), beside(settings, pipelines)
            spark = starting.result().sparkContext
            daemons = SparkDaemons(spark, settings, lambda _: told.set(), clock, wal.SystemIds(), beside=room)
            stack.callback(daemons.stop)
            while not told.wait(LOOK_EVERY) and not daemons.ended:
                pass
            if daemons.failure is not None:
                raise daemons.failure
            shown, most = Access.of(settings).options(), settings.sink.in_flight_max
            tasks = sending_tasks(slots_now(spark), settings, pipelines)
            table = RemoteTable(daemons.endpoints, in_flight_max=most, find=find, **shown)
        yield Placed(stack.enter_context(table), daemons, tasks)


@dataclass(frozen=True, slots=True)
class Placed:
    """A client of daemons on Spark; where they were started here, the daemons, and see `sending_tasks`."""

    table: RemoteTable
    daemons: SparkDaemons | None
    tasks: int | None


def _finder(settings: Settings) -> FromNotes:
    options = settings.table.storage_options
    base = flush.BaseTable.open(settings.table.uri, settings.storage_options(os.environ))
    return FromNotes(base.uri, tuple((name, each.get_secret_value()) for name, each in options.items()), base.regions)


def _found(settings: Settings) -> RemoteTable | None:
    """A client of the daemons that serve the table; None where none answers."""
    options = settings.storage_options(os.environ)
    if flush.BaseTable.find(settings.table.uri, options) is None:
        return None
    find, store = _finder(settings), wal.open_store(settings.table.uri, options)
    noted = find()
    if not noted:
        return None
    shown, most = Access.of(settings).options(), settings.sink.in_flight_max
    table = store.url("")
    try:
        return RemoteTable(noted, patience=FOUND_WITHIN, table=table, in_flight_max=most, find=find, **shown)
    except MemWalError as error:
        if error.details.get("reason") == UNAUTHENTICATED:
            raise
        return None


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns the regions of a table: a child, daemons on Spark's executors, or those that are configured."""

    child: KeptChild | None
    table: RemoteTable
    on_spark: SparkDaemons | None = None
    tasks: int | None = None
    """So many send at once at most, where they share their slots with daemons; None for no limit."""

    def check(self) -> None:
        """Raises: why the child daemon, or those on Spark, are gone for good."""
        for daemons in (self.child, self.on_spark):
            if daemons is not None and daemons.failure is not None:
                raise daemons.failure


@contextmanager
def owner_of(
    settings: Settings, replaying: Callable[[str], None], starting: Future[SparkSession], every: Sequence[Settings]
) -> Iterator[Owner]:
    """Start the daemon, or daemons in the Spark that is `starting`, unless some are configured or run there already;
    stop them at the end. `replaying`: see `start_child`; `every`: the pipelines of that Spark.
    """
    with ExitStack() as stack:
        if settings.daemon.on_spark:
            placed = stack.enter_context(daemons_for(settings, starting, every))
            yield Owner(None, placed.table, placed.daemons, placed.tasks)
            return
        endpoint, child = configured_endpoint(settings), None
        if endpoint is None:
            child = KeptChild(settings, replaying)
            stack.callback(child.stop, settings.daemon.drain_timeout)
            endpoint = child.endpoint
        sink, shown = settings.sink, Access.of(settings).options()
        # One that is not there now is told at once; one that ends later is waited for.
        table = RemoteTable(endpoint, in_flight_max=sink.in_flight_max, restarts=sink.stream_timeout, **shown)
        yield Owner(child, stack.enter_context(table))
