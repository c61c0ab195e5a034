"""A daemon's HTTP pages: metrics, health with reasons, status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.pauses import Paused
from memwal.ingest.errors import MemWalError, Unavailable
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.ops.health import Health, Reason, of_commits, of_regions, unclaimed_regions
from memwal.ingest.service.ops.metrics import COMMITTED, COUNTED, HELD, PAUSED, TABLE, Scrape, families
from memwal.ingest.service.ops.pages import Act, Render, pages_of, pausing_acts


class TableCollector(Collector):
    """The metrics of a table's regions, labelled by region id, and of its commits."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        meters = self._table.regions.context.meters
        yield from families(COUNTED, {str(region): meter for region, meter in meters.regions().items()}, "region")
        held = {writer.name: writer.status() for writer in self._table.regions.writers}
        yield from families(HELD, held, "region")
        yield from families(COMMITTED, {"": meters.commits})
        yield from families(TABLE, {"": self._table})
        yield from families(PAUSED, {"": self._table.pauses.last})


class DaemonPages:
    """The pages of a daemon, before and after it has opened its table.

    Thread safety. Any thread.
    """

    def __init__(self, scrape: Scrape) -> None:
        self.health = Health()
        self.health.hold("claiming", "the regions are being claimed and their logs replayed")
        self.scrape, self.events = scrape, RecentEvents()
        self.table: Table | None = None
        """The shown table; None before it is open."""
        self.share: Balancer | None = None
        """Maintains this daemon's share of the regions; None for a single daemon, and until the regions are claimed."""
        self._shown: TableCollector | None = None
        self._notice: Callable[[], None] = lambda: None

    def shows(self, table: Table, notice: Callable[[], None] = lambda: None) -> None:
        """Show `table`, which is open; its regions may still be claimed. It replaces a table shown before, which is
        closed.

        `notice`: called before this daemon reports itself ready, to detect that another writer has taken regions.
        """
        if self._shown is not None:
            self.scrape.remove(self._shown)
        self.table, self._shown, self._notice = table, TableCollector(table), notice
        self.scrape.add(self._shown)

    def serves(self, share: Balancer | None) -> None:
        """Record that the regions are claimed. `share`: maintains the daemon's share; None if it has all regions."""
        self.share = share
        self.health.release("claiming")

    def reasons(self) -> list[Reason]:
        """Return why this daemon is not ready; empty if it is. Sends one request to storage."""
        if self.table is None:
            return self.health.reasons()
        self._notice()
        found = self.known_reasons(self.table, [writer.status() for writer in self.table.regions.writers])
        try:
            self.table.ask_storage()
            resizing = self.table.resizing.under_way()
            found += [] if resizing is None else [{"reason": "resizing", "text": resizing}]
        except MemWalError as error:
            found.append({"reason": "storage", "text": str(error)})
        return found

    def known_reasons(self, table: Table, held: Sequence[Mapping[str, Any]]) -> list[Reason]:
        """Return the reasons without a request to storage. `held`: the status of each region of this daemon."""
        unclaimed = [] if self.share is None else unclaimed_regions(self.share.missing())
        return [*self.health.reasons(), *of_regions(held), *of_commits(table.upkeep.failures), *unclaimed]

    def status(self) -> dict[str, Any]:
        """Return the output of `memwal status --json`, without events. Raises: errors of reading the table."""
        if self.table is None:
            return {"regions": [], "not_ready": self.health.reasons()}
        return self.table.status()

    def pages(self) -> dict[str, Render]:
        """Return the pages by path."""
        return pages_of(self.scrape, self.reasons, self.status, self.paused)

    def acts(self) -> dict[str, Act]:
        """Return the actions by path. A flush covers the regions of this daemon, a commit all regions."""

        def flush(*_: Any) -> dict[str, Any]:
            regions = [writer.status() for writer in self._open().regions.writers]
            self._open().flush()
            return {"rows": sum(region["memtable_rows"] for region in regions), "regions": len(regions)}

        pauses = pausing_acts(lambda: self._open().pauses, lambda: self._open().look_at_commits())
        return pauses | {"/flush": flush, "/commit": lambda *_: asdict(self._open().commit())}

    def paused(self) -> Paused:
        """Return what an operator has paused, as of the last read."""
        return {} if self.table is None else self.table.pauses.last

    def _open(self) -> Table:
        if self.table is None:
            raise Unavailable("the regions are being claimed; ask again in a moment")
        return self.table
