"""The metrics of the tables of a fleet, with the label `table`, summed over the regions of each.

1. At most `SHOWN` tables have a label of their own. The others together are `OTHER`.
2. A table keeps its label while there are not more tables. Otherwise those with the most rows since the last choice,
   which is `CHOOSE_EVERY` seconds ago at least, get the labels.
3. Counters never decrease, although tables are opened and closed and change their label: the growth of a table's
   counters is added to those of its label.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memwal.ingest.engine.region.counters import Meters
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import MEMORY_MAX, PENDING_MAX, PUT_RATE_MAX, UNFLUSHED_MAX
from memwal.ingest.service.daemon.tables import Tables
from memwal.ingest.service.ops.metrics import COMMITTED, COUNTED, FLEET, HELD, LIMITED, PAUSED, TABLE, Declared
from memwal.wal import Clock

SHOWN, OTHER = 100, "other"
CHOOSE_EVERY = 60.0
STATES = ("serving", "idle", "broken")
Vector = npt.NDArray[np.float64]


class Growth:
    """Counters of tables, whose meters begin at 0 when a table is opened.

    Thread safety. One thread.
    """

    def __init__(self, read: Callable[[Meters], Vector]) -> None:
        """`read`: returns the counters of a table."""
        self._read, self._zero = read, read(Meters())
        self._last: dict[str, tuple[Meters, Vector]] = {}

    def since(self, name: str, meters: Meters) -> Vector:
        """Return the growth of a table's counters since the last call. Call `ended` before."""
        (_, before), now = self._last[name], self._read(meters)
        self._last[name] = meters, now
        return now - before

    def ended(self, open_: Mapping[str, Meters]) -> Iterator[tuple[str, Vector]]:
        """Yield the name and the last growth of each table that was closed, or closed and opened again."""
        last, self._last = self._last, {name: (meters, self._zero) for name, meters in open_.items()}
        for name, (then, before) in last.items():
            if open_.get(name) is then:
                self._last[name] = then, before
            else:
                yield name, self._read(then) - before


class FleetCollector(Collector):
    """The metrics of a daemon of a fleet.

    Thread safety. Any thread.
    """

    def __init__(self, tables: Tables, clock: Clock) -> None:
        self._tables, self._clock, self._lock = tables, clock, threading.Lock()
        zero = Meters()
        zero.of(UUID(int=0))
        zero.refusals = dict.fromkeys((MEMORY_MAX, PENDING_MAX, PUT_RATE_MAX, UNFLUSHED_MAX), 0)
        self._counters = [
            (metric, parts, list(metric.folded(parts(zero))))
            for group, parts in _COUNTERS
            for metric in group
            if _counts(metric)
        ]
        self._growth = Growth(self._read)
        self._totals: dict[str, Vector] = {}
        """The counters by label. Its keys are the tables with a label."""
        self._busy, self._chosen = Counter[str](), clock.monotonic()

    def look(self) -> None:
        """Add what closed tables have counted. Call it more often than a table is opened and closed."""
        with self._lock:
            self._take_ended(self._tables.open())

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        with self._lock:
            open_ = dict(self._tables.open())
            self._take_ended(open_)
            for name, table in open_.items():
                self._add(name, self._growth.since(name, table.regions.context.meters))
            self._choose(open_)
            totals = {label: dict(self._split(vector)) for label, vector in sorted(self._totals.items())}
            labelled: dict[str, list[Table]] = {}
            for name, table in sorted(open_.items()):
                labelled.setdefault(name if name in self._totals and name != OTHER else OTHER, []).append(table)
        for metric, *_ in self._counters:
            yield metric.family({label: found[metric.name] for label, found in totals.items()}, "table")
        for group, parts in _GAUGES:
            objects = {label: [part for table in of for part in parts(table)] for label, of in labelled.items()}
            for metric in group:
                if metric.fold and not _counts(metric):
                    yield metric.family({label: metric.folded(each) for label, each in objects.items()}, "table")
        states = Counter(each["state"] for each in self._tables.listed(fresh=False))
        (known,) = FLEET
        yield known.family({"": {state: states[state] for state in STATES}}, "")

    # ---- inside, with the lock -----------------------------------------------------------------------------------

    def _read(self, meters: Meters) -> Vector:
        found = list[float]()
        for metric, parts, keys in self._counters:
            numbers = metric.folded(parts(meters))
            found += [numbers.get(key, 0.0) for key in keys]
        return np.asarray(found)

    def _split(self, vector: Vector) -> Iterator[tuple[str, dict[Any, float]]]:
        at = 0
        for metric, _, keys in self._counters:
            yield metric.name, dict(zip(keys, vector[at : at + len(keys)].tolist(), strict=True))
            at += len(keys)

    def _take_ended(self, open_: Mapping[str, Table]) -> None:
        for name, grown in self._growth.ended({name: table.regions.context.meters for name, table in open_.items()}):
            self._add(name, grown)

    def _add(self, name: str, grown: Vector) -> None:
        """Add the growth of a table's counters to its label, which it gets if one is free."""
        if name not in self._totals and len(self._totals.keys() - {OTHER}) < SHOWN:
            self._totals[name] = np.zeros_like(grown)
        label = name if name in self._totals else OTHER
        self._totals[label] = self._totals.get(label, np.zeros_like(grown)) + grown
        self._busy[name] += int(grown[0])  # rows put, the first counter

    def _choose(self, open_: Iterable[str]) -> None:
        """Give the labels to the tables with the most rows, if there are more tables than labels."""
        now, labels = self._clock.monotonic(), self._totals.keys() - {OTHER}
        if now - self._chosen < CHOOSE_EVERY:
            return
        known = sorted(labels | (set(open_) - {OTHER}), key=lambda name: (-self._busy[name], name not in labels, name))
        for name in labels - set(known[:SHOWN]):
            del self._totals[name]
        for name in set(known[:SHOWN]) - labels:
            self._totals[name] = np.zeros(sum(len(keys) for *_, keys in self._counters))
        self._busy.clear()
        self._chosen = now


def _counts(metric: Declared) -> bool:
    return metric.kind != "gauge"


def _held(table: Table) -> Sequence[Any]:
    return [writer.status() for writer in table.regions.writers]


_COUNTERS: Sequence[tuple[Sequence[Declared], Callable[[Meters], Iterable[Any]]]] = (
    (COUNTED, lambda meters: meters.regions().values()),
    (COMMITTED, lambda meters: [meters.commits]),
    (LIMITED, lambda meters: [meters]),
)
"""The groups of metrics with counters, and their objects in the meters of a table."""
_GAUGES: Sequence[tuple[Sequence[Declared], Callable[[Table], Iterable[Any]]]] = (
    (COUNTED, lambda table: table.regions.context.meters.regions().values()),
    (HELD, _held),
    (COMMITTED, lambda table: [table.regions.context.meters.commits]),
    (TABLE, lambda table: [table]),
    (PAUSED, lambda table: [table.pauses.last]),
)
"""The groups of metrics, and their objects in a table."""
