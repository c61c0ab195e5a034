"""Metrics and figures of `memwal run`, counted from the receipts of micro-batches: rows, times, dead letters."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memwal.ingest.engine.region.counters import Histogram
from memwal.ingest.engine.table.pauses import Paused
from memwal.ingest.service.ops.metrics import PAUSED, counter, families, gauge, histogram
from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.wal import Clock

WAITS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Bucket bounds, in seconds, of the time from the landing of rows in the source until they are searchable."""

_RECENT = 60.0
"""Seconds for which the freshness of the last micro-batch counts after the source was read to its end."""
KEPT = 100_000
"""Number of newest acks and waiting times kept for the percentiles: a few megabytes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The counts of a run at one moment. Times in seconds; NaN if nothing was measured.

    `rows`: rows of finished micro-batches. `repeated`: rows that their region had applied before. `bad`: rows that no
    region received. `letters`: dead letters written for them.
    `seconds`: from the start of the query to the last ack. `ack_*`: from a stream's closing message to the ack, one
    value per region and micro-batch. `batch_*`: `BatchReceipt.seconds` of micro-batches with rows.
    `queryable_*`: from a row's landing in the source to its ack. These times are
    known for the oldest and the newest row of a region in a micro-batch; the median uses their mean.
    """

    rows: int
    repeated: int
    micro_batches: int
    batch_id: int
    seconds: float
    ack_p50: float
    ack_p99: float
    queryable_p50: float
    queryable_max: float
    by_region: dict[str, int]
    batch_p50: float
    batch_max: float
    bad: int = 0
    letters: int = 0

    @property
    def rows_per_second(self) -> float:
        """Return rows per second from the start of the query to the last ack."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


class RunMeter:
    """The counters of one pipeline since its start.

    Thread safety. `begin` and `add` from the query's thread, `progressed` and `looked` from the run's; reading from any
    thread.
    """

    def __init__(self, clock: Clock, trigger: float = 0.0, freshness_max: float = 0.0) -> None:
        """`trigger`, `freshness_max`: the settings of [source], in seconds. `freshness_max` 0: no objective."""
        self._clock, self.trigger, self.freshness_max = clock, trigger, freshness_max
        self._lock = threading.Lock()
        self._began = self._last = clock.monotonic()
        self._by_region: Counter[str] = Counter()
        self._acks: deque[float] = deque(maxlen=KEPT)
        self._batches: deque[float] = deque(maxlen=KEPT)
        # Of each region and micro-batch: the mean of its oldest and newest row, the oldest row, the number of rows.
        self._waits: deque[tuple[float, float, int]] = deque(maxlen=KEPT)
        self.rows = self.repeated = self.micro_batches = 0
        self.bad = self.letters = 0
        self.batch_id = -1
        self.ack_seconds = Histogram()
        self.queryable: dict[str, Histogram] = {}
        """Time from landing in the source until searchable, by region."""
        self.finished_at = 0.0
        self.rows_behind: int | None = None
        self._last_lag = 0.0
        self._processing = False
        self._landed = self._finished = clock.now()
        self._caught_up = 0.0
        self.steps: dict[str, float] = {}

    def begin(self) -> None:
        """Start the clock when the query starts or restarts. The time since the last ack does not count."""
        with self._lock:
            now = self._clock.monotonic()
            self._began, self._last = self._began + now - self._last, now

    def add(self, receipt: BatchReceipt) -> None:
        """Count a finished micro-batch."""
        with self._lock:
            self._add(receipt)

    def _add(self, receipt: BatchReceipt) -> None:
        self._last = self._clock.monotonic()
        self.micro_batches += 1
        self.bad += receipt.bad
        self.letters += receipt.letters
        self.batch_id = receipt.batch_id
        if receipt.regions:
            self._batches.append(receipt.seconds)
        waits, landed = [], []
        for region in receipt.regions:
            self.rows += region.rows
            self.repeated += 0 if region.applied else region.rows
            self.ack_seconds.observe(region.ack_seconds)
            self._by_region[region.region] += region.rows
            self._acks.append(region.ack_seconds)
            self.finished_at = max(self.finished_at, region.acked_at)
            if region.landed_first is not None:
                waits.append(max(0.0, region.acked_at - region.landed_first))
                newest = max(0.0, region.acked_at - (region.landed_last or region.landed_first))
                landed.append(region.landed_last or region.landed_first)
                if region.region not in self.queryable:  # a new dict, because a scrape may iterate over the old one
                    self.queryable = {**self.queryable, region.region: Histogram(WAITS)}
                self.queryable[region.region].spread(newest, waits[-1], region.rows)
                self._waits.append(((waits[-1] + newest) / 2, waits[-1], region.rows))
        self._last_lag = max(waits, default=0.0)
        self._finished = self._clock.now()
        self._landed = max(landed, default=self._finished)

    def figures(self) -> Figures:
        """Return the current counts."""
        with self._lock:
            waits = np.array(list(self._waits) or [(np.nan, np.nan, 1)])
            acks = np.array(list(self._acks) or [np.nan])
            batches = np.array(list(self._batches) or [np.nan])
            # The median of the rows: the smallest wait with at least half of the rows at or below it.
            ordered = waits[np.argsort(waits[:, 0])]
            covered = np.cumsum(ordered[:, 2])
            return Figures(
                rows=self.rows,
                repeated=self.repeated,
                micro_batches=self.micro_batches,
                batch_id=self.batch_id,
                seconds=self._last - self._began,
                ack_p50=float(np.percentile(acks, 50)),
                ack_p99=float(np.percentile(acks, 99)),
                queryable_p50=float(ordered[np.searchsorted(covered, covered[-1] / 2), 0]),
                queryable_max=float(waits[:, 1].max()),
                by_region=dict(self._by_region),
                batch_p50=float(np.percentile(batches, 50)),
                batch_max=float(batches.max()),
                bad=self.bad,
                letters=self.letters,
            )

    @property
    def lag_seconds(self) -> float:
        """Freshness: seconds from the landing of a row in the source until the row is searchable.

        For a finished micro-batch it is the time of its oldest row. While the source has more rows, it is at least the
        time that the oldest of them has waited: that row landed after the newest searchable row, and after the last
        check that found nothing to read. 0 if nothing landed in the last minute.
        """
        if self._ahead:
            return max(self._last_lag, self._clock.now() - max(self._landed, self._caught_up))
        return self._last_lag if self._clock.now() - self._finished <= _RECENT else 0.0

    @property
    def is_late(self) -> bool:
        """Whether `lag_seconds` exceeds the objective `source.freshness_max`."""
        return 0 < self.freshness_max < self.lag_seconds

    @property
    def waiting_seconds(self) -> float:
        """Seconds without a finished micro-batch while the source has rows to read or does not answer; else 0."""
        return max(0.0, self._clock.now() - max(self._finished, self._caught_up)) if self._ahead else 0.0

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Store Spark's progress of the last trigger."""
        self.rows_behind = rows_behind(progress)
        self.steps = {step: float(took) / 1e3 for step, took in progress.get("durationMs", {}).items()}

    def looked(self, status: Mapping[str, Any] | None) -> None:
        """Store Spark's status of the query; None if no query runs because the source does not answer."""
        self._processing = status is None or bool(status.get("isTriggerActive") and status.get("isDataAvailable"))
        if not self._ahead:
            self._caught_up = self._clock.now()

    @property
    def _ahead(self) -> bool:
        """Whether the source had rows to read at the last check, as reported by Spark."""
        return self._processing or bool(self.rows_behind)


def rows_behind(progress: Mapping[str, Any]) -> int | None:
    """Return the number of rows that the sources had at the last trigger and that it did not read.

    None if no source counts rows (files). `progress`: Spark's JSON. A source that counts rows reports offsets by topic
    and partition, as Kafka does.
    """
    behind: int | None = None
    for source in progress.get("sources", ()):
        end, latest = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
        if end is not None and latest is not None:
            ahead = sum(max(0, offset - end.get(place, 0)) for place, offset in latest.items())
            behind = (behind or 0) + ahead
    return behind


def _offsets(found: Any) -> dict[tuple[str, str], int] | None:
    """Return offsets by topic and partition; None for anything else."""
    try:
        topics = json.loads(found) if isinstance(found, str) else found
        return {(topic, number): int(offset) for topic, by in topics.items() for number, offset in by.items()}
    except (ValueError, TypeError, AttributeError):
        return None


RAN = (
    counter("memwal_run_rows", "rows of finished micro-batches", lambda run: run.rows),
    counter("memwal_run_repeated_rows", "rows of these that were sent again", lambda run: run.repeated),
    counter("memwal_run_micro_batches", "micro-batches finished", lambda run: run.micro_batches),
    gauge("memwal_run_batch_id", "batch_id of the newest of them, -1 before", lambda run: run.batch_id),
    gauge(
        "memwal_run_last_batch_timestamp_seconds",
        "when rows were last acknowledged, unix time; 0 before",
        lambda run: run.finished_at,
    ),
    histogram(
        "memwal_run_ack_seconds",
        "closing of a region's stream to its ack, one per region and micro-batch",
        lambda run: run.ack_seconds,
    ),
    gauge(
        "memwal_source_lag_seconds",
        "freshness: time from landing in the source until searchable, of the oldest row of the last micro-batch; while "
        "the source has more rows, at least the time that the oldest of them has waited; 0 after a minute without rows",
        lambda run: run.lag_seconds,
    ),
    gauge(
        "memwal_run_freshness_max_seconds",
        "objective for this freshness (`source.freshness_max`); 0 = none, as with `run --once`",
        lambda run: run.freshness_max,
    ),
    gauge(
        "memwal_source_waiting_seconds",
        "time without a finished micro-batch though the source has rows to read, or does not answer; else 0",
        lambda run: run.waiting_seconds,
    ),
    gauge(
        "memwal_run_trigger_seconds",
        "time between two micro-batches (`source.trigger`)",
        lambda run: run.trigger,
    ),
    gauge(
        "memwal_source_lag_rows",
        "rows that the source held at the last trigger and it did not take; NaN where the source counts none (files)",
        lambda run: float("nan") if run.rows_behind is None else run.rows_behind,
    ),
    gauge(
        "memwal_run_step_seconds",
        "the last micro-batch by Spark's own count: triggerExecution is all of it, addBatch the sink's part",
        lambda run: sorted(run.steps.items()),
        by="step",
    ),
    counter("memwal_bad_rows", "rows that no region got: left out, or dead letters", lambda run: run.bad),
    counter("memwal_dead_letters", "dead letters written", lambda run: run.letters),
)
"""Metrics of a `RunMeter`."""

RAN_BY_REGION = (
    histogram(
        "memwal_run_queryable_seconds",
        "freshness of all rows: time from a row's landing in the source until it is searchable; rows between the "
        "oldest and the newest of a micro-batch count as evenly spread",
        lambda queryable: queryable,
    ),
)
"""Metrics of one region in a `RunMeter`."""


class RunCollector(Collector):
    """The metrics of one pipeline."""

    def __init__(self, meter: RunMeter, paused: Callable[[], Paused] = dict) -> None:
        self._meter, self._paused = meter, paused

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from families(RAN, {"": self._meter})
        yield from families(RAN_BY_REGION, self._meter.queryable, "region")
        yield from families(PAUSED, {"": self._paused()})
