"""Counters of a daemon: plain numbers, each written by one thread and read by scrapes without a lock.

The put path takes no lock, so a scrape may see a group's rows slightly before its time, which no dashboard shows.
costs.md lists the costs. `ops.metrics` declares the meaning of each number and its name in Prometheus.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args
from uuid import UUID

from memwal.flush import CommitReport
from memwal.ingest.engine.api.tokens import Ack
from memwal.ingest.errors import classify
from memwal.ingest.log_limit import Log, log_of
from memwal.wal import Clock

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of time buckets: from an append to a local disk to a commit of many SSTs."""
SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
"""Upper bounds of the buckets for numbers of writes per append."""
COMMITS_KEPT = 20
_LOG = logging.getLogger("memwal.commit")


class Histogram:
    """Counts values per bucket.

    Thread safety. One thread observes, any thread reads.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0.0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def spread(self, least: float, most: float, count: int) -> None:
        """Count `count` values distributed evenly between `least` and `most`."""
        below = 0.0
        for number, bound in enumerate((*self._bounds, most)):
            share = 1.0 if bound >= most else 0.0 if bound < least else (bound - least) / (most - least)
            self._counts[number] += count * (share - below)
            below = share
        self.total += count * (least + most) / 2

    @property
    def counts(self) -> tuple[float, ...]:
        """The number of values in each bucket, not cumulative. The last bucket is above all bounds."""
        return tuple(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound; the last bound is "+Inf"."""
        cumulative, below = [], 0.0
        for bound, count in zip((*self._bounds, float("inf")), list(self._counts), strict=True):
            below += count
            cumulative.append(("+Inf" if bound == float("inf") else repr(bound), below))
        return cumulative


Step = Literal["append", "flush", "commit", "claim", "fence", "poison"]
"""Steps of a region that can fail: an append to the log, a flush, a commit of its SSTs, a claim; and the end of a
claim by a newer writer, or by a storage failure."""


@dataclass(frozen=True, slots=True)
class LastError:
    """The newest failure of a step. `at`: unix time in seconds."""

    at: float
    text: str


class RegionMeter:
    """The counters of one region since this process first claimed it.

    Thread safety. `served` and `appended`: the region's thread. `flushed` and `flush_failed`: the flusher's.
    `claimed`: the thread that opens the region. `failed`: once per claim. `waiting`, `refused` and `erred`: any
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows_put = self.rows_deleted = self.rows_skipped = self.rows_repeated = 0
        self.writes = self.writes_failed = 0
        self.ack_seconds, self.group_writes = Histogram(), Histogram(SIZES)
        self.entries = self.append_bytes = 0
        self.append_seconds = Histogram()
        self.flush_seconds = Histogram()
        self.flush_rows = self.flush_bytes = self.flush_failures = 0
        self.waiting_puts = self.waited_puts = self.refused_puts = 0
        self.waited_seconds = 0.0
        self.claims = self.fences = self.poisonings = 0
        self.replay_seconds = 0.0
        self.last_errors: dict[Step, LastError | None] = dict.fromkeys(get_args(Step))
        """By step; None if it never failed. Steps are never added, so a scrape can iterate safely."""

    def erred(self, step: Step, error: BaseException, now: float) -> None:
        """Record the failure of a step. `now`: unix time in seconds."""
        self.last_errors[step] = LastError(now, str(classify(error)) or type(error).__name__)

    def errors_told(self) -> dict[str, dict[str, Any]]:
        """Return the steps that have failed, as the status of a region reports them: `{step: {"at", "error"}}`."""
        last = {step: error for step, error in self.last_errors.items() if error is not None}
        return {step: {"at": error.at, "error": error.text} for step, error in last.items()}

    def served(self, seconds: float, answers: Sequence[tuple[Ack, int]], failed: int) -> None:
        """Count a group of writes that was answered `seconds` after the arrival of its oldest write.

        `answers`: for each write its answer, and the number of its rows that delete. `failed`: number of writes with
        an error.
        """
        self.ack_seconds.observe(seconds)
        self.group_writes.observe(len(answers) + failed)
        self.writes += len(answers)
        self.writes_failed += failed
        for answer, deletes in answers:
            if not answer.applied:
                self.rows_repeated += answer.rows
            else:
                self.rows_repeated += answer.repeated
                self.rows_deleted += deletes
                self.rows_put += answer.rows - answer.repeated - deletes - answer.skipped
                self.rows_skipped += answer.skipped

    def appended(self, seconds: float, size: int, entries: int) -> None:
        """Count one durable append: `entries` WAL entries with `size` bytes of rows."""
        self.append_seconds.observe(seconds)
        self.append_bytes += size
        self.entries += entries

    def flushed(self, seconds: float, rows: int, size: int) -> None:
        """Count one memtable that was published as an SST."""
        self.flush_seconds.observe(seconds)
        self.flush_rows += rows
        self.flush_bytes += size

    def flush_failed(self, error: BaseException, now: float) -> None:
        """Count a failed flush. `now`: unix time in seconds."""
        self.flush_failures += 1
        self.erred("flush", error, now)

    @contextmanager
    def waiting(self, clock: Clock) -> Iterator[None]:
        """Return a context that counts a put as waiting for room. Many puts may wait at once, so this takes a lock."""
        began = clock.monotonic()
        with self._lock:
            self.waiting_puts += 1
        try:
            yield
        finally:
            with self._lock:
                self.waiting_puts -= 1
                self.waited_puts += 1
                self.waited_seconds += clock.monotonic() - began

    def refused(self) -> None:
        """Count a put that got no room in time."""
        with self._lock:
            self.refused_puts += 1

    def failed(self, *, fenced: bool) -> None:
        """Count the end of a claim: by the fence of a newer writer, or by a storage failure."""
        if fenced:
            self.fences += 1
        else:
            self.poisonings += 1

    def claimed(self, seconds: float) -> None:
        """Count a claim that took `seconds`, including the replay of the log."""
        self.claims += 1
        self.replay_seconds += seconds


class CommitMeter:
    """The counters of this process's commits.

    Thread safety. One commit at a time, see `CommitLoop`.
    """

    def __init__(self, log: Log = _LOG) -> None:
        self._log = log
        self.seconds = Histogram()
        self.rows_inserted = self.rows_updated = self.rows_deleted = 0
        self.ssts = self.bytes = self.failures = self.held_back = 0
        self.rows_expired = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=COMMITS_KEPT)
        """The newest commits, oldest first: `{"time", "seconds", "version", "rows", "ssts"}`, and failures: `{"time",
        "error", "times"}`, where `times` counts consecutive equal failures and `time` is the newest, in unix seconds.
        """

    def counted(self, commit: Callable[[], CommitReport], clock: Clock) -> CommitReport:
        """Return `commit()`. Count and log it if it committed anything; count a failure."""
        began = clock.monotonic()
        try:
            report = commit()
        except BaseException as error:
            self.failures += 1
            self.failed(str(classify(error)), clock.now())
            raise
        if report.ssts:
            self._committed(report, clock.monotonic() - began, clock.now())
        return report

    def expired(self, rows: int) -> None:
        """Count expired rows that were deleted from the base table."""
        self.rows_expired += rows

    def failed(self, error: str, now: float) -> None:
        """Add a commit that failed, or left out a region, at unix time `now`, to the newest commits."""
        last = self.recent[-1] if self.recent else {}
        if last.get("error") == error:
            self.recent[-1] = last | {"time": now, "times": last["times"] + 1}
        else:
            self.recent.append({"time": now, "error": error, "times": 1})

    def _committed(self, report: CommitReport, seconds: float, now: float) -> None:
        self.seconds.observe(seconds)
        rows = report.rows_inserted + report.rows_updated + report.rows_deleted
        text = "committed %d SSTs as version %d, %d rows changed, in %.3f s"
        told = {"event": "commit", "version": report.version, "rows": rows, "ssts": report.ssts, "seconds": seconds}
        self._log.info(text, report.ssts, report.version, rows, seconds, extra=told)
        self.recent.append({"time": now, **{name: told[name] for name in ("seconds", "version", "rows", "ssts")}})
        self.rows_inserted += report.rows_inserted
        self.rows_updated += report.rows_updated
        self.rows_deleted += report.rows_deleted
        self.ssts += report.ssts
        self.bytes += report.bytes_written


class Meters:
    """The counters of one table in one process. A region's counters outlive its claims, because counters never
    decrease.

    Thread safety. Any thread.
    """

    def __init__(self, name: str = "") -> None:
        """`name`: of the table in a fleet, for its log lines."""
        self._lock = threading.Lock()
        self._regions: dict[UUID, RegionMeter] = {}
        self.commits = CommitMeter(log_of(_LOG, name))
        self.refusals: Mapping[str, int] = {}
        """Puts that a limit has rejected, by the name of its setting."""
        self.throttled_puts, self.throttled_seconds = 0, 0.0
        """Puts that have waited for `table.put_rate_max`, and the total time."""

    def of(self, region: UUID) -> RegionMeter:
        """Return the meter of a region, created at the first call."""
        with self._lock:
            return self._regions.setdefault(region, RegionMeter())

    def refused(self, limit: str) -> None:
        """Count a put that `limit` has rejected."""
        with self._lock:
            self.refusals = {**self.refusals, limit: self.refusals.get(limit, 0) + 1}

    def throttled(self, seconds: float) -> None:
        """Count a put that has waited `seconds` for `table.put_rate_max`."""
        with self._lock:
            self.throttled_puts += 1
            self.throttled_seconds += seconds

    def regions(self) -> dict[UUID, RegionMeter]:
        """Return the meters of all regions that `of` was called for."""
        with self._lock:
            return dict(self._regions)
