"""The figures of a run: rows, acks and waiting times, counted from the receipts of its micro-batches."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.wal import Clock

KEPT = 100_000
"""Number of newest acks and waiting times kept for the percentiles: a few megabytes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The counts of a run at one moment. Times in seconds; NaN if nothing was measured.

    `rows`: rows of finished micro-batches. `repeated`: rows that their region had applied before. `bad`: rows that no
    region received. `letters`: dead letters written for them.
    `seconds`: from the start of the query to the last ack. `ack_*`: from a stream's closing message to the ack, one
    value per region and micro-batch. `queryable_*`: from a row's landing in the source to its ack. These times are
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
    bad: int = 0
    letters: int = 0

    @property
    def rows_per_second(self) -> float:
        """Return rows per second from the start of the query to the last ack."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


class RunStats:
    """Counts receipts.

    Thread safety. `begin` and `add` from the query's thread, `figures` from any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._last = clock.monotonic()
        self._rows = self._repeated = self._batches = 0
        self._bad = self._letters = 0
        self._batch_id = -1
        self._by_region: Counter[str] = Counter()
        self._acks: deque[float] = deque(maxlen=KEPT)
        self._waits: deque[tuple[float, float, int]] = deque(
            maxlen=KEPT
        )  # mean of oldest and newest row, oldest row, rows

    def begin(self) -> None:
        """Start the clock when the query starts or restarts. The time since the last ack does not count."""
        with self._lock:
            now = self._clock.monotonic()
            self._began, self._last = self._began + now - self._last, now

    def add(self, receipt: BatchReceipt) -> None:
        """Count a finished micro-batch."""
        with self._lock:
            self._last = self._clock.monotonic()
            self._batches += 1
            self._batch_id = receipt.batch_id
            self._bad += receipt.bad
            self._letters += receipt.letters
            for region in receipt.regions:
                self._rows += region.rows
                self._repeated += 0 if region.applied else region.rows
                self._by_region[region.region] += region.rows
                self._acks.append(region.ack_seconds)
                if region.landed_first is not None:
                    oldest = max(0.0, region.acked_at - region.landed_first)
                    newest = max(0.0, region.acked_at - (region.landed_last or region.landed_first))
                    self._waits.append(((oldest + newest) / 2, oldest, region.rows))

    def figures(self) -> Figures:
        """Return the current counts."""
        with self._lock:
            waits = np.array(list(self._waits) or [(np.nan, np.nan, 1)])
            acks = np.array(list(self._acks) or [np.nan])
            return Figures(
                rows=self._rows,
                repeated=self._repeated,
                micro_batches=self._batches,
                batch_id=self._batch_id,
                seconds=self._last - self._began,
                ack_p50=float(np.percentile(acks, 50)),
                ack_p99=float(np.percentile(acks, 99)),
                queryable_p50=_weighted_median(waits[:, 0], waits[:, 2]),
                queryable_max=float(waits[:, 1].max()),
                by_region=dict(self._by_region),
                bad=self._bad,
                letters=self._letters,
            )


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the smallest value with at least half of the weight at or below it. Both arrays: float64[n], n >= 1."""
    order = np.argsort(values)
    covered = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(covered, covered[-1] / 2)])
