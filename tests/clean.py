"""What every crash must leave behind: a table that `memwal verify` finds nothing wrong with, at once and after the next
owner has done what was left to do, and then no SST directory that nobody needs.
"""

from __future__ import annotations

from memwal.flush import BaseTable, SstCollector, SstGarbage, base_needs, collect_orphans
from memwal.flush.verification.runner import verify_table
from memwal.wal import ObjectStore, SystemClock, regions
from tests.support.clock import FakeClock

_WAY_OFF = 1e9
"""Seconds by which a collector's clock is ahead: everything is old enough."""


def assert_clean(store: ObjectStore, uri: str, *, deep: bool = True) -> None:
    """`memwal verify` (with `--deep`) finds nothing wrong with the table at `uri`, the root of `store`."""
    findings = verify_table(store, uri, deep=deep).findings
    assert not findings, "\n".join(map(str, findings))


def collect_ssts(store: ObjectStore, uri: str) -> list[SstGarbage]:
    """One collection of every region's SST directories, whatever their age."""
    clock = FakeClock(start=SystemClock().now() + _WAY_OFF)
    found = []
    for region in regions(store):
        collector = SstCollector(store, region, clock, workers=1)
        listing = collector.list_region()
        needs = base_needs(store, BaseTable.open(uri, store.storage_options), clock.now())
        found.append(collector.collect(listing, needs, 0.0))
    return found


def assert_collected(store: ObjectStore, uri: str) -> None:
    """Where everything is committed and nobody is at work, a collection leaves no file that no version refers to and no
    SST directory, and the table is as clean as before.

    Files first: a process killed inside a put leaves a temporary file, and with it an SST directory is not empty.
    """
    clock = FakeClock(start=SystemClock().now() + _WAY_OFF)
    collect_orphans(store, BaseTable.open(uri, store.storage_options).dataset, clock, 0.0)
    for garbage in collect_ssts(store, uri):
        assert (garbage.unaccounted, garbage.unpublished, garbage.listed, garbage.needed) == (0, 0, 0, 0), garbage
    left = [name for region in regions(store) for name in SstCollector(store, region, FakeClock()).names()]
    assert left == []
    assert_clean(store, uri)
