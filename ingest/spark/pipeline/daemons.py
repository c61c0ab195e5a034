"""The owners of a pipeline's regions: a child daemon, daemons on Spark executors, or configured daemons.

Daemons on executors either run already, or are started in a barrier job beside the stream.
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
from memwal.ingest.engine.table.owner_notes import NotesFinder
from memwal.ingest.errors import PROTOCOL, UNAUTHENTICATED, Invalid, MemWalError
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.client.tables import RemoteFleet
from memwal.ingest.service.daemon.child import RestartingDaemon
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.settings.endpoints import configured_endpoint
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.fleet.driver import LOOK_EVERY, SparkDaemons, check_configuration, session_of, slots_now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOUND_WITHIN = 2.0
"""Seconds within which a daemon named by owner notes must answer."""


def check_room(pipelines: Sequence[Settings]) -> None:
    """Raise Invalid if Spark has too few slots for the daemons and the streams of these pipelines."""
    for settings in (each for each in pipelines if each.daemon.on_spark):
        try:
            check_configuration(session_of(settings), settings.daemon.on_spark, beside=beside(settings, pipelines))
        except Invalid:
            if _found(settings) is None:
                raise


def beside(settings: Settings, pipelines: Sequence[Settings]) -> int:
    """Return the slots needed beside the daemons of `settings`: one per stream, and one per daemon of another table."""
    others = {each.table.uri: each.daemon.on_spark for each in pipelines if each.table.uri != settings.table.uri}
    return len(pipelines) + sum(others.values())


def sending_tasks(slots: int, settings: Settings, pipelines: Sequence[Settings]) -> int:
    """Return how many tasks of one stream may send at the same time.

    If the daemons are lost, sending tasks wait for them in their slots, and the other slots must suffice to start the
    daemons again. The result is half of the spare slots, since Spark may rerun a stage while tasks of its first attempt
    remain.
    """
    streams = len(pipelines)
    spare = slots - settings.daemon.on_spark - (beside(settings, pipelines) - streams)
    return max(1, spare // (2 * streams))


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a table's regions: a child daemon, daemons on Spark executors, or configured ones."""

    table: RemoteTable | RemoteFleet
    daemons: RestartingDaemon | SparkDaemons | None = None
    """Daemons that were started here."""
    tasks: int | None = None
    """How many tasks may send at once, if they share their slots with daemons on Spark; None: no limit."""

    def check(self) -> None:
        """Raise the failure of daemons that were started here, if they are not restarted."""
        if self.daemons is not None and self.daemons.failure is not None:
            raise self.daemons.failure


@contextmanager
def daemons_for(settings: Settings, starting: Future[SparkSession], pipelines: Sequence[Settings]) -> Iterator[Owner]:
    """Yield the owner of `settings` on Spark: running ones, or new ones in this Spark, which end with the context.

    `pipelines`: all pipelines of this Spark. Raises: Invalid if Spark has too few slots; the error of a daemon that
    does not start.
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
        yield Owner(stack.enter_context(table), daemons, tasks)


def _finder(settings: Settings) -> NotesFinder:
    options = settings.table.storage_options
    base = flush.BaseTable.open(settings.table.uri, settings.storage_options(os.environ))
    return NotesFinder(base.uri, tuple((name, each.get_secret_value()) for name, each in options.items()), base.regions)


def _found(settings: Settings) -> RemoteTable | None:
    """Return a client of the daemons that serve the table; None if none answers."""
    options = settings.storage_options(os.environ)
    if flush.BaseTable.find(settings.table.uri, options, to_write=True) is None:
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
        if error.details.get("reason") in (UNAUTHENTICATED, PROTOCOL):
            raise
        return None


@contextmanager
def owner_of(
    settings: Settings, replaying: Callable[[str], None], starting: Future[SparkSession], every: Sequence[Settings]
) -> Iterator[Owner]:
    """Yield the owner of the table's regions. If none is configured or runs on Spark, start one and stop it at the end.

    `replaying`: see `start_child`. `starting`: the Spark that may host daemons. `every`: the pipelines of that Spark.
    """
    with ExitStack() as stack:
        if settings.daemon.on_spark:
            yield stack.enter_context(daemons_for(settings, starting, every))
            return
        endpoint, child = configured_endpoint(settings), None
        if endpoint is None:
            child = RestartingDaemon(settings, replaying)
            stack.callback(child.stop, settings.daemon.drain_timeout)
            endpoint = child.endpoint
        sink, shown = settings.sink, Access.of(settings).options()
        # A daemon that does not answer at the start is an error; a daemon that ends later is awaited.
        given = {"in_flight_max": sink.in_flight_max, "restarts": sink.stream_timeout, **shown}
        if settings.route.table:
            yield Owner(RemoteFleet(endpoint, settings.place, **given), child)
            return
        yield Owner(stack.enter_context(RemoteTable(endpoint, **given)), child)
