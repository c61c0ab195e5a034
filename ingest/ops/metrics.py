"""Every metric that memwal shows Prometheus: name, meaning, and where its number comes from.

The README's table is rendered from these declarations (`render_reference`), and a house test holds it to them. A scrape
reads what `ingest.ops.counters` has counted and what the regions hold in memory: it asks no storage and takes no lock
that a put would wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from memwal.ingest.ops.counters import Histogram

Kind = Literal["counter", "gauge", "histogram"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric. `name`: without the `_total` that a counter's samples get. `read`: its number (a histogram's
    `Histogram`, or with a second label pairs of that label and the number), from the object that its group is of."""

    name: str
    kind: Kind
    meaning: str
    read: Callable[[Any], Any]
    by: str = ""
    """A label beside that of the group."""


def _counter(name: str, meaning: str, field: str) -> Declared:
    return Declared(name, "counter", meaning, lambda meter: getattr(meter, field))


def _histogram(name: str, meaning: str, field: str) -> Declared:
    return Declared(name, "histogram", meaning, lambda meter: getattr(meter, field))


def _gauge(name: str, meaning: str, field: str) -> Declared:
    return Declared(name, "gauge", meaning, lambda state: state[field])


def _pending(what: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda state: sum(sst[what] or 0 for sst in state["ssts"])


_STATES = ("serving", "flush_failing", "fenced", "poisoned")

COUNTED = (
    _counter("memwal_put_rows", "rows put and acknowledged", "rows_put"),
    _counter("memwal_deleted_rows", "keys deleted and acknowledged", "rows_deleted"),
    _counter(
        "memwal_skipped_rows",
        "rows left out: their key was there (upsert = insert), or newer (version)",
        "rows_skipped",
    ),
    _counter("memwal_repeated_rows", "rows acknowledged again: their token was applied before", "rows_repeated"),
    _counter("memwal_writes", "puts, deletes and streams of micro-batches acknowledged", "writes"),
    _counter(
        "memwal_failed_writes",
        "writes answered with an error; nothing of them is applied, or its outcome is unknown",
        "writes_failed",
    ),
    _histogram(
        "memwal_ack_seconds", "arrival to ack of the oldest write of each group that was served together", "ack_seconds"
    ),
    _histogram("memwal_group_writes", "writes that were served together, and mostly share one append", "group_writes"),
    _histogram("memwal_append_seconds", "one append to the WAL, until it is durable", "append_seconds"),
    _counter("memwal_append_bytes", "bytes of rows appended, as they are in memory", "append_bytes"),
    _counter("memwal_append_entries", "WAL entries appended", "entries"),
    _histogram("memwal_flush_seconds", "one frozen memtable to a published SST", "flush_seconds"),
    _counter("memwal_flush_rows", "rows of flushed memtables", "flush_rows"),
    _counter("memwal_flush_bytes", "bytes of flushed memtables, indexes counted", "flush_bytes"),
    _counter("memwal_flush_failures", "flushes that failed and are tried again", "flush_failures"),
    Declared("memwal_backpressure_waiting_puts", "gauge", "puts that wait for room now", lambda m: m.waiting_puts),
    _counter("memwal_backpressure_waits", "puts that had to wait for room", "waited_puts"),
    _counter("memwal_backpressure_waited_seconds", "time that puts waited for room", "waited_seconds"),
    _counter("memwal_backpressure_refused", "puts refused because there was no room in time", "refused_puts"),
    _counter("memwal_claims", "claims of the region by this process", "claims"),
    _counter("memwal_fences", "claims that a newer writer ended", "fences"),
    _counter("memwal_poisonings", "claims that ended because storage failed them", "poisonings"),
    _counter("memwal_replay_seconds", "time of claims, replay of the log included", "replay_seconds"),
)
"""Of a `RegionMeter`."""

HELD = (
    Declared(
        "memwal_region_state",
        "gauge",
        "1 for the state the region is in: serving, flush_failing, fenced or poisoned",
        lambda state: [(each, float(each == state["state"])) for each in _STATES],
        by="state",
    ),
    _gauge("memwal_writer_epoch", "writer epoch of the region", "epoch"),
    _gauge("memwal_wal_position", "newest WAL entry of the region", "wal_position"),
    _gauge("memwal_replay_after", "newest WAL entry whose rows are in a published SST", "replay_after"),
    _gauge("memwal_generation", "generation of the active memtable", "generation"),
    _gauge("memwal_memtable_rows", "rows in the memtables of the region", "memtable_rows"),
    _gauge("memwal_memtable_bytes", "bytes of the memtables of the region, indexes counted", "memtable_bytes"),
    _gauge(
        "memwal_unindexed_rows", "rows in memtables that searches look at one by one, not indexed yet", "unindexed_rows"
    ),
    Declared(
        "memwal_behind_seconds",
        "gauge",
        "age of the oldest row here that has not reached a level: latest (it waits for its ack), flushed (SST) or "
        "committed (base table); 0 when all have",
        lambda state: sorted(state["behind"].items()),
        by="level",
    ),
    Declared("memwal_pending_ssts", "gauge", "SSTs published, not committed", lambda state: len(state["ssts"])),
    Declared("memwal_pending_sst_rows", "gauge", "rows of these", _pending("rows")),
    Declared("memwal_pending_sst_bytes", "gauge", "bytes of these, as they were in memory", _pending("bytes")),
)
"""Of a region's part of `Table.status()`, from memory alone."""

COMMITTED = (
    _histogram("memwal_commit_seconds", "one commit of SSTs into the base table", "seconds"),
    _counter("memwal_commit_inserted_rows", "rows that commits inserted", "rows_inserted"),
    _counter("memwal_commit_updated_rows", "rows that commits updated", "rows_updated"),
    _counter("memwal_commit_deleted_rows", "rows that commits deleted", "rows_deleted"),
    _counter("memwal_commit_ssts", "SSTs committed", "ssts"),
    _counter("memwal_commit_bytes", "bytes of data files that commits wrote", "bytes"),
    _counter("memwal_commit_failures", "commits that failed and are tried again", "failures"),
    Declared(
        "memwal_commit_held_back_regions",
        "gauge",
        "regions that the last commit could not take; `status` and the log say why",
        lambda meter: meter.held_back,
    ),
)
"""Of a `CommitMeter`."""

TABLE = (
    Declared("memwal_base_version", "gauge", "version of the base table that was seen last", lambda t: t.base_version),
)


def families(declared: Iterable[Declared], objects: Mapping[str, Any], label: str = "") -> Iterator[Metric]:
    """Each metric with a sample of every object, by its name as the value of `label`, where there is one."""
    for each in declared:
        labels = [name for name in (label, each.by) if name]
        family = _FAMILIES[each.kind](each.name, each.meaning, labels=labels)
        for name, read_from in objects.items():
            _add(family, each, [name] if label else [], each.read(read_from))
        yield family


_FAMILIES: Mapping[Kind, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add(family: Any, declared: Declared, labels: list[str], value: Any) -> None:
    if declared.by:
        for name, number in value:
            family.add_metric([*labels, name], number)
    elif isinstance(value, Histogram):
        family.add_metric(labels, value.buckets(), value.total)
    else:
        family.add_metric(labels, value)


class Scrape:
    """What /metrics answers: the process's own figures, and those of the collectors added so far.

    Thread safety. `add` and `text` from any thread.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def add(self, collector: Collector) -> None:
        """Show the metrics of one more part of this process."""
        self._registry.register(collector)

    def remove(self, collector: Collector) -> None:
        """Show them no more."""
        self._registry.unregister(collector)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)
