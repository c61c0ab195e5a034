"""Who owns the regions of a pipeline's table: a child daemon, or the daemons that are configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ingest.access import Access
from ingest.client import RemoteTable
from ingest.kept_child import KeptChild
from ingest.settings import Settings
from ingest.spark_sink import configured_endpoint


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns the regions of a table: a child, or the daemons that are configured."""

    child: KeptChild | None
    table: RemoteTable

    def check(self) -> None:
        """Raises: why the child daemon is gone for good."""
        gone = None if self.child is None else self.child.failure
        if gone is not None:
            raise gone


@contextmanager
def owner_of(settings: Settings, replaying: Callable[[str], None]) -> Iterator[Owner]:
    """Start the daemon, unless one is configured; stop it at the end. `replaying`: see `start_child`."""
    with ExitStack() as stack:
        endpoint, child = configured_endpoint(settings), None
        if endpoint is None:
            child = KeptChild(settings, replaying)
            stack.callback(child.stop, settings.daemon.drain_timeout)
            endpoint = child.endpoint
        sink, shown = settings.sink, Access.of(settings).options()
        # One that is not there now is told at once; one that ends later is waited for.
        table = RemoteTable(endpoint, in_flight_max=sink.in_flight_max, restarts=sink.stream_timeout, **shown)
        yield Owner(child, stack.enter_context(table))
