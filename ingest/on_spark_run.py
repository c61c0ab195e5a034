"""Daemons on Spark's executors for `memwal run`: those that run already, or a barrier job beside the stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import flush
import wal
from ingest.access import Access
from ingest.client import RemoteTable
from ingest.errors import Invalid, MemWalError
from ingest.flight_wire import UNAUTHENTICATED
from ingest.on_spark import LOOK_EVERY, SparkDaemons, session_of
from ingest.on_spark_slots import check_configuration, slots_now
from ingest.owners import FromNotes
from ingest.settings import Settings

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
