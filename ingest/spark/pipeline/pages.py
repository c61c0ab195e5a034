"""The HTTP pages of a pipeline's driver: metrics, health with reasons, status."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memwal.flush import BaseTable
from memwal.ingest.engine.region.counters import COMMITS_KEPT
from memwal.ingest.engine.table.pauses import Paused, PauseWatch
from memwal.ingest.errors import Unavailable
from memwal.ingest.protocol import build
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.ops.health import Health, Reason
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.service.ops.pages import Act, Render, pages_of, pausing_acts
from memwal.ingest.service.ops.sentence import duration
from memwal.ingest.spark.pipeline.figures import RunStats
from memwal.ingest.spark.pipeline.metrics import RunCollector, RunMeter
from memwal.ingest.spark.pipeline.pausing import Pausing
from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.wal import Clock, SystemClock

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


BAD_BATCHES = 20
"""Number of newest micro-batches with bad rows that are kept with their reasons."""


class RunPages:
    """The pages of a pipeline's driver, with the last status of its owners.

    Thread safety. Any thread.
    """

    def __init__(
        self, scrape: Scrape, meter: RunMeter, stats: RunStats, table: str, clock: Clock | None = None
    ) -> None:
        self.health = Health()
        self.health.hold("starting", "Spark and the daemon are being started")
        self.scrape, self.meter, self.name = scrape, meter, table
        self._clock = clock or SystemClock()
        self.stats = stats
        self.base: BaseTable | None = None
        """The table; None until it is known."""
        self.reader: RemoteTable | None = None
        """A client of the table's owners; None until they run."""
        self.owners: Mapping[str, Any] = {}
        """The newest status that the owners returned; empty before the first one."""
        self.bad_batches: deque[dict[str, Any]] = deque(maxlen=BAD_BATCHES)
        """The newest micro-batches with bad rows, oldest first: `{"time", "batch_id", "bad", "letters", "reasons"}`."""
        self.commits: Sequence[Mapping[str, Any]] = ()
        """The newest commits of the owners, oldest first; see `CommitMeter.recent`."""
        self.pausing: Pausing | None = None
        """The pauses of the table; None until the table is known."""
        scrape.add(RunCollector(meter, self._held))

    def serves(self, base: BaseTable, reader: RemoteTable) -> None:
        """Set the table and a client of its owners."""
        self.base, self.reader = base, reader

    def paused(self) -> Paused:
        """Return what an operator has paused, as last read from storage."""
        return {} if self.pausing is None else self.pausing.watch.last

    def add(self, receipt: BatchReceipt) -> None:
        """Count a finished micro-batch."""
        self.stats.add(receipt)
        self.meter.add(receipt)
        if receipt.bad:
            told = {"batch_id": receipt.batch_id, "bad": receipt.bad, "letters": receipt.letters}
            self.bad_batches.append({"time": self._clock.now(), **told, "reasons": receipt.reasons})

    def saw(self, status: Mapping[str, Any]) -> None:
        """Store a status that the owners returned."""
        self.owners = {**status, "regions": _with_silent(self.owners, status)}
        if status.get("commits"):  # a restarted daemon has no commits
            self.commits = status["commits"][-COMMITS_KEPT:]

    def look(self, query: StreamingQuery) -> None:
        """Store Spark's progress of the source. Does nothing if the JVM has ended, which `PipelineStream` reports."""
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):
            progress = query.lastProgress
            if progress is not None:
                self.meter.progressed(json.loads(progress.json))
            self.meter.looked(query.status if query.isActive else None)

    def status(self) -> dict[str, Any]:
        """Return what the pipeline has done so far. Times are in seconds; null if nothing was measured."""
        figures, meter = self.stats.figures(), self.meter
        return {
            "table": self.name,
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
            "ingestion": "running" if self.pausing is None else self.pausing.state,
            "paused": self.paused(),
            "versions": dict(build()),
            "freshness_max": meter.freshness_max,
            "not_ready": self.reasons(),
        }

    def reasons(self) -> list[Reason]:
        """Return why the run is not ready; empty if it is ready.

        Rows that wait because of an operator's pause are not late.
        """
        meter = self.meter
        if not meter.is_late or "ingestion" in self.paused():
            return self.health.reasons()
        text = f"rows are searchable {duration(meter.lag_seconds)} after they land in the source"
        objective = f"source.freshness_max is {duration(meter.freshness_max)}"
        return [*self.health.reasons(), {"reason": "not_fresh", "text": f"{text}; {objective}"}]

    def pages(self) -> dict[str, Render]:
        """Return the pages by path."""
        return pages_of(self.scrape, self.reasons, self.status, self.paused)

    def acts(self) -> dict[str, Act]:
        """Return the actions by path. Flushes and commits are actions of the owners."""

        def flush(*_: Any) -> dict[str, Any]:
            regions = self._served().status()["regions"]
            self._served().flush()
            return {"rows": sum(region["memtable_rows"] for region in regions), "regions": len(regions)}

        pauses = pausing_acts(self._watch, lambda: None)
        return pauses | {"/flush": flush, "/commit": lambda *_: asdict(self._served().commit())}

    def _held(self) -> Paused:
        """Return the pauses that are in effect: a paused ingestion counts only once the query is stopped.

        Until then a micro-batch may be in progress, and may hang.
        """
        stands = self.pausing is not None and self.pausing.stands
        return {what: told for what, told in self.paused().items() if what != "ingestion" or stands}

    def _served(self) -> RemoteTable:
        if self.reader is None:
            raise Unavailable("the daemon is being started; ask again in a moment")
        return self.reader

    def _watch(self) -> PauseWatch:
        if self.pausing is None:
            raise Unavailable("Spark and the daemon are being started; ask again in a moment")
        return self.pausing.watch


def _with_silent(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the regions of the status `now`, and as silent those of the status `before` whose owner did not answer."""
    answered = {region["id"] for region in now["regions"]}
    same = before.get("routing") == now.get("routing")
    silent = (region for region in before.get("regions", ()) if same and region["id"] not in answered)
    regions = [*now["regions"], *({**region, "state": "silent"} for region in silent)]
    return sorted(regions, key=lambda region: int(region["bucket"]))


def _number(value: float) -> float | None:
    return None if value != value else value
