"""What the HTTP edges of `memwal serve` and `memwal run` answer: /metrics, /health/livez, /health/readyz, /status."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ingest.errors import MemWalError
from ingest.health import Health, Reason, not_here, of_commits, of_regions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.streaming.query import StreamingQuery

    from ingest.balancer import Balancer
    from ingest.http_edge import Make, Page
    from ingest.metrics import Scrape, TableCollector
    from ingest.run_metrics import RunMeter
    from ingest.security import Guard
    from ingest.spark_sink import BatchReceipt
    from ingest.table import Table
    from ingest.tally import Tally


class DaemonPages:
    """The pages of a daemon, before and after it has its table.

    Thread safety. Any thread.
    """

    def __init__(self, scrape: Scrape) -> None:
        self.health = Health()
        self.health.hold("claiming", "the regions are being claimed and their logs replayed")
        self._scrape = scrape
        self._table: Table | None = None
        self._shown: TableCollector | None = None
        self._share: Balancer | None = None
        self._notice: Callable[[], None] = lambda: None

    def shows(self, table: Table, notice: Callable[[], None] = lambda: None) -> None:
        """The table is open; its regions may still be claimed. One that was shown before is closed. `notice`: looks
        whether another writer has taken regions, before anybody is told that this daemon is ready.
        """
        from ingest.metrics import TableCollector

        if self._shown is not None:
            self._scrape.remove(self._shown)
        self._table, self._shown, self._notice = table, TableCollector(table), notice
        self._scrape.add(self._shown)

    def serves(self, share: Balancer | None) -> None:
        """The regions are claimed: the daemon's share of them, None where it has all."""
        self._share = share
        self.health.release("claiming")

    def reasons(self) -> list[Reason]:
        """Why this daemon is not ready; empty when it is. Asks storage, once."""
        held = self.health.reasons()
        if self._table is None:
            return held
        self._notice()
        found = [*held, *of_regions(writer.status() for writer in self._table.regions.writers)]
        found += of_commits(self._table.upkeep.failures)
        found += [] if self._share is None else not_here(self._share.missing())
        try:
            self._table.ask_storage()
            resizing = self._table.resizing.under_way()
            found += [] if resizing is None else [{"reason": "resizing", "text": resizing}]
        except MemWalError as error:
            found.append({"reason": "storage", "text": str(error)})
        return found

    def status(self) -> dict[str, Any]:
        """As `memwal status --json`; Raises: what reading the table does."""
        if self._table is None:
            return {"regions": [], "not_ready": self.health.reasons()}
        return self._table.status()

    def pages(self) -> dict[str, Make]:
        """By path."""
        return _pages(self._scrape, self.reasons, self.status)


class RunPages:
    """The pages of a pipeline's driver.

    Thread safety. Any thread.
    """

    def __init__(self, scrape: Scrape, meter: RunMeter, tally: Tally, table: str) -> None:
        from ingest.run_metrics import RunCollector

        self.health = Health()
        self.health.hold("starting", "Spark and the daemon are being started")
        self._scrape, self._meter, self._name = scrape, meter, table
        self.tally = tally
        scrape.add(RunCollector(meter))

    def add(self, receipt: BatchReceipt) -> None:
        """Count a finished micro-batch."""
        self.tally.add(receipt)
        self._meter.add(receipt)

    def look(self, query: StreamingQuery) -> None:
        """Take over what Spark says of the source; nothing where its JVM is gone, which others find out."""
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):
            progress = query.lastProgress
            if progress is not None:
                self._meter.progressed(json.loads(progress.json))

    def status(self) -> dict[str, Any]:
        """What the pipeline has done so far; times in seconds, null where nothing was measured."""
        figures, meter = self.tally.figures(), self._meter
        return {
            "table": self._name,
            "batch_id": figures.batch_id,
            "micro_batches": figures.micro_batches,
            "rows": figures.rows,
            "rows_repeated": figures.repeated,
            "rows_per_second": figures.rows_per_second,
            "source_lag_rows": meter.rows_behind,
            "source_lag_seconds": meter.lag_seconds,
            "steps": meter.steps,
            "ack_p50": _number(figures.ack_p50),
            "ack_p99": _number(figures.ack_p99),
            "queryable_p50": _number(figures.queryable_p50),
            "queryable_max": _number(figures.queryable_max),
            "rows_bad": meter.bad,
            "dead_letters": meter.letters,
            "not_ready": self.health.reasons(),
        }

    def pages(self) -> dict[str, Make]:
        """By path."""
        return _pages(self._scrape, self.health.reasons, self.status)


def listening(
    host: str, port: int, pages: DaemonPages | RunPages, guard: Guard, *, setting: str
) -> AbstractContextManager[str | None]:
    """Serve the pages for as long as the context lasts; its value is their URL, None where `port` is -1 (off).

    Raises: Invalid when the port is taken.
    """
    return _listening(host, port, pages, guard, setting)


@contextmanager
def _listening(host: str, port: int, pages: DaemonPages | RunPages, guard: Guard, setting: str) -> Iterator[str | None]:
    if port < 0:
        yield None
        return
    from ingest.http_edge import HttpEdge  # not for those who listen nowhere: it takes a while to import

    edge = HttpEdge(host, port, pages.pages(), guard, setting=setting)
    try:
        yield edge.url
    finally:
        edge.close()


def _pages(
    scrape: Scrape, reasons: Callable[[], list[Reason]], status: Callable[[], Mapping[str, Any]]
) -> dict[str, Make]:
    from ingest.http_edge import Page
    from ingest.metrics import CONTENT_TYPE

    def ready() -> Page:
        found = reasons()
        return Page.of({"ready": not found, "reasons": found}, 503 if found else 200)

    return {
        "/metrics": lambda: Page(scrape.text(), CONTENT_TYPE),
        "/health/livez": lambda: Page.of({"alive": True}),
        "/health/readyz": ready,
        "/status": lambda: Page.of(status()),
    }


def _number(value: float) -> float | None:
    return None if value != value else value
