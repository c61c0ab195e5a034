"""Who owns the regions of a pipeline's table: a child daemon, those that Spark has placed, or those configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingest.access import Access
from ingest.client import RemoteTable
from ingest.kept_child import KeptChild
from ingest.on_spark import SparkDaemons
from ingest.on_spark_run import daemons_for
from ingest.settings import Settings
from ingest.spark_sink import configured_endpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
