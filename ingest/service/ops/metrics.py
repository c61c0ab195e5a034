"""Declare every Prometheus metric of a daemon: name, meaning, and source of the value.

The tables in README.md are rendered from these declarations (`ingest.cli.docs`); a house test checks that they are up
to date. A scrape reads `region.counters` and the regions' state in memory: it sends no request to storage and
takes no lock that a put waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from memwal.ingest.engine.region.counters import Histogram
from memwal.ingest.engine.table.pauses import WHATS
from memwal.ingest.protocol import build
from memwal.ingest.service.rpc.guard import WAYS, Refused

Kind = Literal["counter", "gauge", "histogram"]
Read = str | Callable[[Any], Any]
Numbers = Mapping[Any, float]
"""A value as numbers: by the value of `by`; a histogram by upper bound, cumulative, and its total; else by ""."""
_TOTAL = "total"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric.

    `name`: without the suffix `_total`, which is added to samples of counters. `read`: returns the value from the
    object of the group (for example a `RegionMeter`), or names its field: a number, a `Histogram`, or, with `by`, pairs
    of label value and number.
    """

    kind: Kind
    name: str
    meaning: str
    read: Read
    by: str = ""
    """Labels besides that of the group: a name, or several separated by commas."""
    fold: Literal["sum", "max", ""] = "sum"
    """How a fleet combines the values of regions and tables; "": it does not export the metric."""

    @property
    def labels(self) -> list[str]:
        """The names of the labels in `by`."""
        return self.by.split(",") if self.by else []

    def value(self, of: Any) -> Any:
        """Return the value from `of`, an object of the group."""
        if not isinstance(self.read, str):
            return self.read(of)
        return of[self.read] if isinstance(of, Mapping) else getattr(of, self.read)

    def numbers(self, of: Any) -> Numbers:
        """Return the value from `of` as numbers."""
        value = self.value(of)
        if self.by:
            return dict(value)
        return {**dict(value.buckets()), _TOTAL: value.total} if isinstance(value, Histogram) else {"": value}

    def folded(self, objects: Iterable[Any]) -> Numbers:
        """Return the values from several objects, combined by `fold`. A value that is NaN counts as missing."""
        found: dict[Any, float] = {}
        for of in objects:
            for key, number in self.numbers(of).items():
                before = found.get(key, number)
                larger = number if before != before else before if number != number else max(before, number)
                found[key] = found.get(key, 0.0) + number if self.fold == "sum" else larger
        return found

    def family(self, found: Mapping[str, Numbers], label: str) -> Metric:
        """Return the metric with the numbers of each object, by its name. `label`: see `families`."""
        family: Any = _FAMILIES[self.kind](self.name, self.meaning, labels=[*([label] if label else []), *self.labels])
        for name, numbers in found.items():
            of = [name] if label else []
            if self.kind == "histogram":
                buckets = [(bound, count) for bound, count in numbers.items() if bound != _TOTAL]
                family.add_metric(of, buckets, numbers.get(_TOTAL, 0.0))
                continue
            for by, number in numbers.items():
                family.add_metric([*of, *(([by] if isinstance(by, str) else by) if self.by else ())], number)
        found_family: Metric = family
        return found_family


counter, gauge, histogram = partial(Declared, "counter"), partial(Declared, "gauge"), partial(Declared, "histogram")


def _pending(what: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda state: sum(sst[what] or 0 for sst in state["ssts"])


_STATES = ("serving", "flush_failing", "fenced", "poisoned")

COUNTED = (
    counter("memwal_put_rows", "rows put and acknowledged", "rows_put"),
    counter("memwal_deleted_rows", "keys deleted and acknowledged", "rows_deleted"),
    counter(
        "memwal_skipped_rows",
        "rows not stored: their key was stored already (upsert = insert), or with a newer version",
        "rows_skipped",
    ),
    counter(
        "memwal_repeated_rows",
        "rows acknowledged without being applied, because their token was applied before",
        "rows_repeated",
    ),
    counter("memwal_writes", "puts, deletes and streams of micro-batches acknowledged", "writes"),
    counter(
        "memwal_failed_writes", "writes answered with an error: not applied, or with unknown outcome", "writes_failed"
    ),
    histogram(
        "memwal_ack_seconds",
        "time from the arrival of a write to its ack, of the oldest write of each group",
        "ack_seconds",
    ),
    histogram("memwal_group_writes", "number of writes per group; a group usually shares one append", "group_writes"),
    histogram("memwal_append_seconds", "time of one append to the WAL, until it is durable", "append_seconds"),
    counter("memwal_append_bytes", "bytes of appended rows, in memory", "append_bytes"),
    counter("memwal_append_entries", "WAL entries appended", "entries"),
    histogram("memwal_flush_seconds", "time from a frozen memtable to its published SST", "flush_seconds"),
    counter("memwal_flush_rows", "rows of flushed memtables", "flush_rows"),
    counter("memwal_flush_bytes", "bytes of flushed memtables, indexes included", "flush_bytes"),
    counter("memwal_flush_failures", "failed flushes; each is retried", "flush_failures"),
    gauge("memwal_backpressure_waiting_puts", "puts that wait for room now", "waiting_puts"),
    counter("memwal_backpressure_waits", "puts that had to wait for room", "waited_puts"),
    counter("memwal_backpressure_waited_seconds", "total time that puts waited for room", "waited_seconds"),
    counter("memwal_backpressure_refused", "puts refused because no room became free in time", "refused_puts"),
    counter("memwal_claims", "claims of the region by this process", "claims"),
    counter("memwal_fences", "claims that ended because a newer writer fenced them", "fences"),
    counter("memwal_poisonings", "claims that ended because of a storage failure", "poisonings"),
    counter("memwal_replay_seconds", "total time of claims, including the replay of the log", "replay_seconds"),
    gauge(
        "memwal_region_last_error_timestamp_seconds",
        "when a step of the region last failed, unix time; 0 = never. what: append, flush, commit, claim, fence or "
        "poison; /status has the text",
        lambda meter: [(step, 0.0 if error is None else error.at) for step, error in meter.last_errors.items()],
        by="what",
        fold="max",
    ),
)
"""Metrics read from a `RegionMeter`."""

HELD = (
    gauge(
        "memwal_region_state",
        "1 for the current state of the region: serving, flush_failing, fenced or poisoned; 0 for the others",
        lambda state: [(name, float(name == state["state"])) for name in _STATES],
        by="state",
    ),
    gauge("memwal_writer_epoch", "writer epoch of the region", "epoch", fold=""),
    gauge("memwal_wal_position", "position of the newest WAL entry of the region", "wal_position", fold=""),
    gauge(
        "memwal_replay_after",
        "position of the newest WAL entry whose rows are in a published SST",
        "replay_after",
        fold="",
    ),
    gauge("memwal_generation", "generation of the active memtable", "generation", fold=""),
    gauge("memwal_memtable_rows", "rows in the memtables of the region", "memtable_rows"),
    gauge("memwal_memtable_bytes", "bytes of the memtables of the region, indexes included", "memtable_bytes"),
    gauge(
        "memwal_unindexed_rows",
        "rows in memtables that are not indexed yet; searches read them one by one",
        "unindexed_rows",
    ),
    gauge(
        "memwal_behind_seconds",
        "age of the oldest row of the region that has not reached a level: latest (acked), flushed (in an SST) or "
        "committed (in the base table); 0 if all have",
        lambda state: sorted(state["behind"].items()),
        by="level",
        fold="max",
    ),
    gauge("memwal_pending_ssts", "SSTs that are published but not committed", lambda state: len(state["ssts"])),
    gauge("memwal_pending_sst_rows", "rows of these SSTs", _pending("rows")),
    gauge("memwal_pending_sst_bytes", "bytes of these SSTs, as their rows were in memory", _pending("bytes")),
)
"""Metrics read from a region's part of `Table.status()`, which needs no storage."""

COMMITTED = (
    histogram("memwal_commit_seconds", "time of one commit of SSTs into the base table", "seconds"),
    counter("memwal_commit_inserted_rows", "rows that commits inserted", "rows_inserted"),
    counter("memwal_commit_updated_rows", "rows that commits updated", "rows_updated"),
    counter("memwal_commit_deleted_rows", "rows that commits deleted", "rows_deleted"),
    counter("memwal_rows_expired", "expired rows (`table.ttl`) that were deleted from the base table", "rows_expired"),
    counter("memwal_commit_ssts", "SSTs committed", "ssts"),
    counter("memwal_commit_bytes", "bytes of data files written by commits", "bytes"),
    counter("memwal_commit_failures", "failed commits; each is retried", "failures"),
    gauge(
        "memwal_commit_held_back_regions",
        "regions that the last commit left out because of a problem; see `memwal status` and the log",
        "held_back",
    ),
)
"""Metrics read from a `CommitMeter`."""

LIMITED = (
    counter(
        "memwal_refused_puts",
        "puts that a limit of the table has refused. reason: the setting, such as table.put_rate_max",
        lambda meters: sorted(meters.refusals.items()),
        by="reason",
    ),
    counter(
        "memwal_throttled_puts",
        "puts that have waited for `table.put_rate_max`",
        "throttled_puts",
    ),
    counter(
        "memwal_throttled_seconds",
        "total time that puts have waited for `table.put_rate_max`",
        "throttled_seconds",
    ),
)
"""Metrics read from the `Meters` of a table."""

TABLE = (
    gauge("memwal_base_version", "version of the base table that this process saw last", "base_version", fold="max"),
    gauge(
        "memwal_table_memory_bytes",
        "bytes of the table's memtables that hold rows, and of cached SSTs; `table.memory_max` limits them",
        lambda t: t.memory.bytes,
    ),
    gauge(
        "memwal_commit_interval_seconds",
        "time between two commits (`commit.interval`); 0 = on demand only",
        lambda t: t.upkeep.commit_interval,
        fold="max",
    ),
    gauge(
        "memwal_unsupported_columns",
        "columns of the base table that memwal cannot hold; puts are rejected while there are any, see `memwal status`",
        lambda t: len(t.base.unsupported),
    ),
    gauge(
        "memwal_storage_bytes",
        "bytes of the table on storage, measured once an hour by the process that commits. kind: newest (version of "
        "the base table), older (versions), ssts, log or orphans",
        lambda t: [] if t.upkeep.space is None else list(t.upkeep.space.bytes.items()),
        by="kind",
    ),
    gauge(
        "memwal_storage_factor",
        "all these bytes divided by those of the newest version; NaN before they are measured",
        lambda t: float("nan") if t.upkeep.space is None else t.upkeep.space.factor,
        fold="max",
    ),
)
"""Metrics read from an `embedded.Table`."""

PAUSED = (
    gauge(
        "memwal_paused",
        "1 while an operator has paused it, else 0. what: ingestion (no micro-batch begins) or commits (none by "
        "itself)",
        lambda paused: [(what, float(what in paused)) for what in WHATS],
        by="what",
        fold="max",
    ),
)
"""Metrics read from `table.pauses.Paused`."""

FLEET = (
    gauge(
        "memwal_tables",
        "tables of the fleet that this daemon knows. state: serving (open here), idle or broken",
        lambda counts: sorted(counts.items()),
        by="state",
    ),
)
"""Metrics read from the number of tables by state."""

BUILD = (
    gauge(
        "memwal_build_info",
        "1; its labels are the versions of this process: of memwal, of its protocol, and of its tables on storage",
        lambda build: [((build["memwal"], build["protocol"], build["storage"]), 1.0)],
        by="version,protocol,storage",
    ),
)
"""Metrics read from `ingest.protocol.build`."""
REFUSED = (
    counter(
        "memwal_refused_requests",
        "requests refused without effect. over: flight or http. reason: token (missing or wrong), certificate, role, "
        "site (a page of another site), invalid, size, busy (too many at once), time, memory",
        lambda counts: sorted(counts.items()),
        by="reason",
    ),
)
"""Metrics of one interface in `Refused`."""


def families(declared: Iterable[Declared], objects: Mapping[str, Any], label: str = "") -> Iterator[Metric]:
    """Yield each metric with one sample per object. `label`: the label that holds the object's name; "": no label."""
    for metric in declared:
        yield metric.family({name: metric.numbers(of) for name, of in objects.items()}, label)


_FAMILIES: Mapping[Kind, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class _BuildCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        yield from families(BUILD, {"": build()})


class RefusedCollector(Collector):
    """The requests that this process rejected."""

    def __init__(self, refused: Refused) -> None:
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from families(REFUSED, {way: self._refused.counts(way) for way in WAYS}, "over")


class Scrape:
    """The content of /metrics: metrics of the process itself, and of the collectors added to it.

    Thread safety. `add` and `text` from any thread.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(_BuildCollector())

    def add(self, collector: Collector) -> None:
        """Add the metrics of one more part of this process."""
        self._registry.register(collector)

    def remove(self, collector: Collector) -> None:
        """Remove the collector's metrics."""
        self._registry.unregister(collector)

    def text(self) -> bytes:
        """Return the metrics in the exposition format, version 0.0.4."""
        return generate_latest(self._registry)
