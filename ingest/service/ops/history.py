"""The last 15 minutes of a process, one sample a second, in memory.

A sample stores counters and gauges; rates and percentiles are differences of samples, computed by readers. So a
sample costs some microseconds, and the memory is fixed: 960 rows of 46 numbers, a third of a megabyte.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memwal.ingest.engine.region.counters import SECONDS, Histogram

Numbers = npt.NDArray[np.float64]

SHOWN, RECENT, RATE_OVER = 900, 60, 5
"""Samples that are shown, samples of "the last minute", and samples that one rate or percentile of a series covers."""
KEPT = SHOWN + RECENT
OVERLAP = 5
"""Newest samples that `series` repeats, for a reader that missed a message."""
_BUCKETS = len(SECONDS) + 1
_ZERO = (0.0,) * _BUCKETS


class Sample(NamedTuple):
    """Counters since the process started, and gauges, NaN if not measured.

    `latest`, `flushed`, `committed`: seconds, as `memwal_behind_seconds`. `acks`, `appends`: counts by the buckets of
    `SECONDS`, see `counts_of`.
    """

    put_rows: float = 0.0
    deleted_rows: float = 0.0
    bad_rows: float = 0.0
    latest: float = math.nan
    flushed: float = math.nan
    committed: float = math.nan
    lag_rows: float = math.nan
    acks: Sequence[float] = _ZERO
    appends: Sequence[float] = _ZERO


_COLUMNS = ("monotonic", "time", *Sample._fields[:-2])
_AT = {name: number for number, name in enumerate(_COLUMNS)}
_ACKS = slice(len(_COLUMNS), len(_COLUMNS) + _BUCKETS)
_APPENDS = slice(_ACKS.stop, _ACKS.stop + _BUCKETS)


def counts_of(histograms: Iterable[Histogram]) -> tuple[float, ...]:
    """Return the sum of these histograms (with bounds `SECONDS`) by bucket, not cumulative."""
    return tuple(map(sum, zip(_ZERO, *(each.counts for each in histograms), strict=True)))


def quantiles(counts: Numbers, q: float) -> Numbers:
    """Return the `q` quantile of each row of `counts` (float64[n, buckets], not cumulative) in seconds; NaN if empty.

    Values of a bucket count as evenly distributed, as in `histogram_quantile` of Prometheus; values above the last
    bound count as that bound.
    """
    bounds = np.asarray((0.0, *SECONDS, SECONDS[-1]))
    cumulative = np.cumsum(counts, axis=1)
    rank = q * cumulative[:, -1]
    bucket = np.minimum((cumulative < rank[:, None]).sum(axis=1), _BUCKETS - 1)
    rows = np.arange(len(counts))
    inside = counts[rows, bucket]
    below = cumulative[rows, bucket] - inside
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(inside > 0, (rank - below) / inside, np.nan)
    found: Numbers = bounds[bucket] + (bounds[bucket + 1] - bounds[bucket]) * share
    return found


class History:
    """A ring buffer of samples.

    Thread safety. Any thread; threads that write rows never take its lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = np.full((KEPT, _APPENDS.stop), np.nan)
        self.count = 0
        """Number of samples so far; the newest has this number less one."""

    def add(self, monotonic: float, time: float, sample: Sample) -> None:
        """Store a sample taken at unix time `time`, in place of the oldest."""
        *plain, acks, appends = sample
        with self._lock:
            self._rows[self.count % KEPT] = (monotonic, time, *plain, *acks, *appends)
            self.count += 1

    def figures(self) -> dict[str, Any]:
        """Return the figures of the last minute; None if not measured.

        `rates`: rows per second. `acks`, `appends`: p50 and p99 in seconds, and their number. `most`: the maximum age
        by level.
        """
        rows, _ = self._newest(RECENT + 1)
        if not len(rows):
            rows = np.full((1, _APPENDS.stop), np.nan)
        # fmax ignores NaN, unless there is nothing else
        levels = {name: _plain(np.fmax.reduce(rows[:, _AT[name]])) for name in ("latest", "flushed", "committed")}
        return {
            "rates": {name.partition("_")[0]: _plain(_rates(rows[-RATE_OVER - 1 :], name)[-1]) for name in _COUNTED},
            "acks": _spread(rows, _ACKS),
            "appends": _spread(rows, _APPENDS),
            "most": levels,
            "lag_before": _plain(float(rows[0, _AT["lag_rows"]])),
        }

    def series(self, since: int = 0) -> dict[str, Any]:
        """Return the samples from number `since` on, and `OVERLAP` before it, as lists of equal length, oldest first.

        `first`: the number of the first. `time`: unix seconds; `put`, `deleted`: rows per second; `latest`,
        `flushed`, `committed`, `ack_p99`: seconds; `lag_rows`. None if not measured.
        """
        wanted = min(SHOWN, self.count - since + OVERLAP)
        rows, first = self._newest(wanted + RATE_OVER)
        before = max(0, len(rows) - wanted)
        shown = {
            "put": _rates(rows, "put_rows"),
            "deleted": _rates(rows, "deleted_rows"),
            **{name: rows[:, _AT[name]] for name in ("latest", "flushed", "committed", "lag_rows")},
            "ack_p99": quantiles(_grown(rows, _ACKS), 0.99),
        }
        series = {name: [_plain(value) for value in values[before:].tolist()] for name, values in shown.items()}
        times = [round(time, 1) for time in rows[before:, _AT["time"]].tolist()]
        return {"first": first + before, "time": times, **series}

    def _newest(self, count: int) -> tuple[Numbers, int]:
        """Return copies of at most `count` samples, oldest first, and the number of the first."""
        with self._lock:
            first = max(0, self.count - min(count, KEPT))
            return self._rows[np.arange(first, self.count) % KEPT], first


_COUNTED = ("put_rows", "deleted_rows", "bad_rows")


def _before(rows: Numbers) -> npt.NDArray[np.intp]:
    """Return for each row the row to compare it with: `RATE_OVER` samples before, or the first."""
    return np.maximum(np.arange(len(rows)) - RATE_OVER, 0)


def _grown(rows: Numbers, columns: int | slice) -> Numbers:
    """Return the growth of counters. A counter that was reset (the table was resized) counts as unchanged."""
    grown: Numbers = np.maximum(rows[:, columns] - rows[_before(rows)][:, columns], 0.0)
    return grown


def _rates(rows: Numbers, name: str) -> Numbers:
    seconds = rows[:, 0] - rows[_before(rows), 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        rates: Numbers = np.where(seconds > 0, _grown(rows, _AT[name]) / seconds, np.nan)
    return rates


def _spread(rows: Numbers, columns: slice) -> dict[str, Any]:
    counts = np.nan_to_num(np.maximum(rows[-1:, columns] - rows[:1, columns], 0.0))
    p50, p99 = (_plain(float(quantiles(counts, q)[0])) for q in (0.5, 0.99))
    return {"p50": p50, "p99": p99, "count": int(counts.sum())}


def _plain(value: float) -> float | None:
    """Return a number with four digits for JSON, with None for NaN."""
    return None if value != value else float(f"{value:.4g}")
