"""Checks after a crash: `memwal verify` finds nothing wrong with the table, at once and after the next owner has
finished the pending work, and then no unneeded SST directory is left.
"""

from __future__ import annotations

from memwal.flush import BaseTable, SstCollector, SstGarbage, base_needs, collect_orphans
from memwal.flush.verification.runner import verify_table
from memwal.wal import ObjectStore, SystemClock, regions
from tests.support.clock import FakeClock

_WAY_OFF = 1e9
"""Seconds that a collector's clock is ahead, so that everything is old enough."""


def assert_clean(store: ObjectStore, uri: str, *, deep: bool = True) -> None:
    """Assert that `memwal verify` (`deep`: with `--deep`) finds nothing wrong with the table at `uri`, the root of
    `store`."""
    findings = verify_table(store, uri, deep=deep).findings
    assert not findings, "\n".join(map(str, findings))


def collect_ssts(store: ObjectStore, uri: str) -> list[SstGarbage]:
    """Collect every region's SST directories once, of any age."""
    clock = FakeClock(start=SystemClock().now() + _WAY_OFF)
    found = []
    for region in regions(store):
        collector = SstCollector(store, region, clock, workers=1)
        listing = collector.list_region()
        needs = base_needs(store, BaseTable.open(uri, store.storage_options), clock.now())
        found.append(collector.collect(listing, needs, 0.0))
    return found


def assert_collected(store: ObjectStore, uri: str) -> None:
    """Assert that a collection leaves only files of existing versions and no SST directory, and a clean table.

    Requires: everything is committed, and no process uses the table. Files are collected first: a process killed
    inside a put leaves a temporary file, and its SST directory is then not empty.
    """
    clock = FakeClock(start=SystemClock().now() + _WAY_OFF)
    collect_orphans(store, BaseTable.open(uri, store.storage_options).dataset, clock, 0.0)
    for garbage in collect_ssts(store, uri):
        assert (garbage.unaccounted, garbage.unpublished, garbage.listed, garbage.needed) == (0, 0, 0, 0), garbage
    left = [name for region in regions(store) for name in SstCollector(store, region, FakeClock()).names()]
    assert left == []
    assert_clean(store, uri)
