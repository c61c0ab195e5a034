"""The HTTP pages of a pipeline's driver: metrics, health with reasons, status."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memwal.ingest.ops.health import Health
from memwal.ingest.ops.metrics import Scrape
from memwal.ingest.ops.pages import Render, pages_of
from memwal.ingest.pipeline.figures import RunStats
from memwal.ingest.pipeline.metrics import RunCollector, RunMeter
from memwal.ingest.sink.receipts import BatchReceipt

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


class RunPages:
    """The pages of a pipeline's driver.

    Thread safety. Any thread.
    """

    def __init__(self, scrape: Scrape, meter: RunMeter, stats: RunStats, table: str) -> None:
        self.health = Health()
        self.health.hold("starting", "Spark and the daemon are being started")
        self.scrape, self._meter, self._name = scrape, meter, table
        self.stats = stats
        scrape.add(RunCollector(meter))

    def add(self, receipt: BatchReceipt) -> None:
        """Count a finished micro-batch."""
        self.stats.add(receipt)
        self._meter.add(receipt)

    def look(self, query: StreamingQuery) -> None:
        """Take over Spark's progress of the source; do nothing if the JVM has ended, which `PipelineStream` reports."""
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):
            progress = query.lastProgress
            if progress is not None:
                self._meter.progressed(json.loads(progress.json))
            self._meter.looked(query.status if query.isActive else None)

    def status(self) -> dict[str, Any]:
        """Return what the pipeline has done so far; times in seconds, null if nothing was measured."""
        figures, meter = self.stats.figures(), self._meter
        return {
            "table": self._name,
            "batch_id": figures.batch_id,
            "micro_batches": figures.micro_batches,
            "rows": figures.rows,
            "rows_repeated": figures.repeated,
            "rows_per_second": figures.rows_per_second,
            "source_lag_rows": meter.rows_behind,
            "source_lag_seconds": meter.lag_seconds,
            "source_waiting_seconds": meter.waiting_seconds,
            "steps": meter.steps,
            "ack_p50": _number(figures.ack_p50),
            "ack_p99": _number(figures.ack_p99),
            "queryable_p50": _number(figures.queryable_p50),
            "queryable_max": _number(figures.queryable_max),
            "rows_bad": meter.bad,
            "dead_letters": meter.letters,
            "not_ready": self.health.reasons(),
        }

    def pages(self) -> dict[str, Render]:
        """Return the pages by path."""
        return pages_of(self.scrape, self.health.reasons, self.status)


def _number(value: float) -> float | None:
    return None if value != value else value
