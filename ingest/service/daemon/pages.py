"""A daemon's HTTP pages: metrics, health with reasons, status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.pauses import Paused
from memwal.ingest.errors import MemWalError, Unavailable
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.ingest.service.daemon.fleet_metrics import FleetCollector
from memwal.ingest.service.daemon.tables import Tables
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.ops.health import Health, Reason, of_commits, of_regions, unclaimed_regions
from memwal.ingest.service.ops.metrics import COMMITTED, COUNTED, HELD, LIMITED, PAUSED, TABLE, Scrape, families
from memwal.ingest.service.ops.pages import Act, OfTable, Page, Render, pages_of, pausing_acts
from memwal.wal import SystemClock


class TableCollector(Collector):
    """The metrics of the regions of an only table, labelled by region id, and of its commits."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        table = self._tables.open()[""]
        meters = table.regions.context.meters
        yield from families(COUNTED, {str(region): meter for region, meter in meters.regions().items()}, "region")
        held = {writer.name: writer.status() for writer in table.regions.writers}
        yield from families(HELD, held, "region")
        yield from families(COMMITTED, {"": meters.commits})
        yield from families(LIMITED, {"": meters})
        yield from families(TABLE, {"": table})
        yield from families(PAUSED, {"": table.pauses.last})


class DaemonPages:
    """The pages of a daemon, before and after it has opened its table; `name` in a method: of a table of a fleet, ""
    for an only table.

    A fleet is ready when the other daemons are known. A broken table does not change that.
    Thread safety. Any thread.
    """

    def __init__(self, scrape: Scrape) -> None:
        self.health = Health()
        self.health.hold("claiming", "the regions are being claimed and their logs replayed")
        self.scrape, self.events = scrape, RecentEvents()
        self.tables: Tables | None = None
        """The tables of this daemon; None before it answers calls."""
        self.share: Balancer | None = None
        """Maintains this daemon's share of the regions; None for a single daemon, and until the regions are claimed."""
        self._metrics: TableCollector | FleetCollector | None = None
        self._notice: Callable[[], None] = lambda: None

    def shows(self, tables: Tables, notice: Callable[[], None] = lambda: None) -> None:
        """Show `tables`; the regions of an only table may still be claimed.

        `notice`: called before this daemon reports itself ready, to detect that another writer has taken regions.
        """
        self.tables, self._notice = tables, notice
        if self._metrics is None:
            self._metrics = FleetCollector(tables, SystemClock()) if self.is_fleet else TableCollector(tables)
            self.scrape.add(self._metrics)

    @property
    def is_fleet(self) -> bool:
        """Whether the tables have names; False before they are known."""
        return self.tables is not None and "" not in self.tables.open()

    def table(self, name: str = "") -> Table | None:
        """Return a table if it is open."""
        return None if self.tables is None else self.tables.open().get(name)

    def look(self) -> None:
        """Keep the counters of tables that close. Call it once a second."""
        if isinstance(self._metrics, FleetCollector):
            self._metrics.look()

    def serves(self, share: Balancer | None) -> None:
        """Record that the regions are claimed. `share`: maintains the daemon's share; None if it has all regions."""
        self.share = share
        self.health.release("claiming")

    def reasons(self) -> list[Reason]:
        """Return why this daemon is not ready; empty if it is. Sends one request to storage; a fleet none."""
        if (table := self.table()) is None:
            return self.health.reasons()
        self._notice()
        found = self.known_reasons(table, [writer.status() for writer in table.regions.writers])
        try:
            table.ask_storage()
            resizing = table.resizing.under_way()
            found += [] if resizing is None else [{"reason": "resizing", "text": resizing}]
        except MemWalError as error:
            found.append({"reason": "storage", "text": str(error)})
        return found

    def known_reasons(self, table: Table, held: Sequence[Mapping[str, Any]]) -> list[Reason]:
        """Return the reasons without a request to storage. `held`: the status of each region of this daemon."""
        unclaimed = [] if self.share is None else unclaimed_regions(self.share.missing())
        return [*self.health.reasons(), *of_regions(held), *of_commits(table.upkeep.failures), *unclaimed]

    def status(self) -> dict[str, Any]:
        """Return the output of `memwal status --json`, without events; of a fleet, its tables. Raises: errors of
        reading the table, or of listing a prefix."""
        if self.tables is not None and self.is_fleet:
            return {"tables": self.tables.listed(), "not_ready": self.health.reasons()}
        if (table := self.table()) is None:
            return {"regions": [], "not_ready": self.health.reasons()}
        return table.status()

    def status_of(self, name: str) -> dict[str, Any]:
        """Return the status of one table of a fleet; what is known of it if it is not open. Raises: Invalid for an
        unknown name; errors of reading the table."""
        known = self.known(name)
        return known if (table := self.table(name)) is None else known | table.status()

    def known(self, name: str) -> dict[str, Any]:
        """Return what is known of a table of a fleet without reading it; see `described`. Raises: Invalid for an
        unknown name."""
        if self.tables is None:
            raise Unavailable("this daemon is starting; ask again in a moment")
        return self.tables.known(name)

    def pages(self) -> dict[str, Render]:
        """Return the pages by path."""
        return pages_of(self.scrape, self.reasons, self.status, self.paused)

    def of_tables(self) -> dict[str, OfTable]:
        """Return the pages of one table of a fleet by path."""
        return {"/status": lambda name: Page.of(self.status_of(name))}

    def acts(self) -> dict[str, Act]:
        """Return the actions by path. A flush covers the regions of this daemon, a commit all regions."""
        return {path: partial(self._act, path) for path in ("/pause", "/resume", "/flush", "/commit")}

    def paused(self) -> Paused:
        """Return what an operator has paused, as of the last read."""
        return {} if (table := self.table()) is None else table.pauses.last

    @contextmanager
    def using(self, name: str | None) -> Iterator[Table]:
        """Return the context of a call to a table, which is opened for it. Raises: as `Tables.using`; Unavailable."""
        if self.tables is None:
            raise Unavailable("the regions are being claimed; ask again in a moment")
        with self.tables.using(name, None) as table:
            yield table

    def _act(self, path: str, asked: Mapping[str, Any], peer: str) -> Mapping[str, Any]:
        with self.using(asked.get("table")) as table:
            if path == "/commit":
                return asdict(table.commit())
            if path == "/flush":
                regions = [writer.status() for writer in table.regions.writers]
                table.flush()
                return {"rows": sum(region["memtable_rows"] for region in regions), "regions": len(regions)}
            return pausing_acts(lambda: table.pauses, table.look_at_commits)[path](asked, peer)
