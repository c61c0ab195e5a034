"""The collection of garbage."""

from __future__ import annotations

from collections.abc import Mapping

from memwal.flush import BaseTable
from memwal.ingest.engine.table.garbage import Ages, TableCollector, TableGarbage
from memwal.wal import SystemClock, open_store, regions


def collect(uri: str, options: Mapping[str, str] | None = None, *, orphans: bool = True, **ages: float) -> TableGarbage:
    """Collect like `memwal gc`, in this process; return what was deleted.

    `ages`: fields of `Ages`, in seconds. Without them, garbage of any age is deleted, except orphans below a week.
    """
    base, store = BaseTable.open(uri, options), open_store(uri, options)
    collector = TableCollector(store, base.codec, SystemClock(), regions(store))
    given = {"wal": 0.0, "sst": 0.0, "orphan": 604_800.0, "manifest": 0.0} | ages
    return collector.collect(base, Ages(**given), orphans=orphans)
