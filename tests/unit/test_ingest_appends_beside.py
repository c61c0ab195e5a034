"""Another thread appends lingering rows. Meanwhile the region's thread serves writes; it waits only where it needs the
log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from memwal import wal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.region import log
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.write_queue import Write
from memwal.wal import layout
from tests.messages import raises
from tests.region_contexts import LIMITS, region_context
from tests.support.clock import FakeClock
from tests.unit.test_ingest_region_core import BASE, REGION, Scripted, refuse, seen, write


class Later:
    """A stand-in for the other thread: it works when the test says so, or when the region waits for it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.waits = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.work.append(work)

        def wait() -> None:
            self.waits += 1
            self.do()

        return wait

    def do(self) -> None:
        """Do the remaining work."""
        while self.work:
            self.work.pop()()


class Region:
    """A core whose lingering rows are appended beside it, with its store and clock."""

    def __init__(self, root: Path, beside: Any = None, **limits: Any) -> None:
        self.store, self.clock, self.later = Scripted(root), FakeClock(), Later()
        self.context = region_context(self.store, BASE, clock=self.clock, limits=replace(LIMITS, **limits))
        self.core = RegionCore.open(self.context, REGION, beside=beside or self.later)

    def lingering(self, *ids: int, v: str = "") -> None:
        """Put non-durable rows and let their linger time pass: their append has begun and has not ended."""
        self.core.serve([write(*ids, v=v, durable=False)])
        self.clock.advance(LIMITS.linger_max)
        self.core.keep_limits()

    def durable(self, *ids: int, v: str = "") -> Write:
        """Put durable rows."""
        self.core.serve([put := write(*ids, v=v)])
        return put

    def again(self) -> dict[int, str]:
        """Return what a newer claim of the region replays."""
        return seen(RegionCore.open(self.context, REGION))


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region(tmp_path / "t.lance")


def test_writes_are_served_while_rows_are_appended(region: Region) -> None:
    region.lingering(1, v="a")
    region.core.serve([write(2, v="b", durable=False)])
    assert (region.store.entries, seen(region.core)) == (0, {1: "a", 2: "b"})
    region.later.do()
    assert region.store.entries == 1
    region.core.keep_limits()
    assert region.later.waits == 1
    assert region.core.lingers, "row 2 came later"
    assert region.again() == {1: "a"}


def test_a_durable_write_goes_behind_the_append_under_way(region: Region) -> None:
    region.lingering(1, v="a")
    put = region.durable(1, v="b")
    assert (put.done.result().position, region.store.entries) == (2, 2)
    assert region.again() == seen(region.core) == {1: "b"}


def test_what_came_meanwhile_goes_with_the_next_durable_write(region: Region) -> None:
    region.lingering(1)
    region.core.serve([write(2, durable=False)])
    put = region.durable(3)
    assert (put.done.result().position, region.store.entries) == (2, 2)
    assert set(region.again()) == {1, 2, 3}


@pytest.mark.parametrize("call", ["durable_view", "freeze", "close"])
def test_what_promises_durable_rows_waits_for_the_append(region: Region, call: str) -> None:
    region.lingering(1)
    region.core.serve([write(2, durable=False)])
    getattr(region.core, call)()
    assert not region.core.lingers
    assert set(region.again()) == {1, 2}


def test_a_frozen_memtable_covers_the_append_under_way(region: Region) -> None:
    region.lingering(1)
    region.core.freeze()
    assert region.core.publish_next()
    assert region.core.levels.manifest.replay_after == region.core.status()["wal_position"] == 1


def test_rows_behind_an_append_linger_until_it_has_ended(region: Region) -> None:
    """However long the append takes, the region serves writes; its only duty meanwhile is the age of the memtable."""
    region.lingering(1)
    region.lingering(2)
    assert (region.store.entries, region.later.waits) == (0, 0)
    assert region.core.next_duty() == pytest.approx(LIMITS.age_max - 2 * LIMITS.linger_max)
    region.later.do()
    assert region.core.next_duty() == 0
    region.core.keep_limits()
    assert (region.store.entries, region.later.waits, len(region.later.work)) == (1, 1, 1)
    region.core.close()
    assert set(region.again()) == {1, 2}


def test_as_much_as_an_entry_holds_waits_for_the_append_under_way(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", entry_size_max=40)
    region.lingering(1)
    region.lingering(2)
    assert region.later.waits == 0
    region.lingering(3, 4, 5)
    assert region.later.waits == 1
    region.core.close()
    assert set(region.again()) == {1, 2, 3, 4, 5}


def test_rows_that_storage_refused_linger_again_in_front_of_the_others(region: Region) -> None:
    region.store.next = [refuse]
    region.lingering(1, v="a")
    region.core.serve([write(1, v="b", durable=False)])
    region.later.do()
    with pytest.raises(wal.StoreRefused):
        region.core.keep_limits()
    assert region.core.failure is None
    assert region.core.next_duty() == 0, "their time is up as it was"
    region.core.keep_limits()
    region.later.do()
    region.core.keep_limits()
    assert not region.core.lingers
    assert region.again() == seen(region.core) == {1: "b"}


def test_a_durable_write_takes_along_what_storage_refused(region: Region) -> None:
    region.store.next = [refuse]
    region.lingering(1)
    assert region.durable(2).done.result().position == 1
    assert set(region.again()) == {1, 2}


def test_a_newer_owner_ends_the_region_at_its_next_duty(region: Region) -> None:
    region.lingering(1)
    assert region.again() == {}
    region.later.do()
    with pytest.raises(wal.Fenced):
        region.core.keep_limits()
    assert isinstance(region.core.failure, wal.Fenced)


def test_an_unknown_outcome_of_other_rows_is_not_that_of_a_write_behind_them(region: Region) -> None:
    def unknown() -> wal.PutOutcome:
        raise wal.OutcomeUnknown("no answer")

    region.store.next = [unknown]
    region.lingering(1)
    put = write(2)
    with raises(wal.Poisoned):
        region.core.serve([put])
    assert isinstance(put.done.exception(), wal.Poisoned)


def test_an_error_of_any_kind_in_the_other_thread_is_raised(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: object) -> Any:
        raise MemoryError("no room for the rows")

    region.lingering(1)
    monkeypatch.setattr(log.pa, "concat_tables", no_memory)
    region.later.do()
    monkeypatch.undo()
    with pytest.raises(MemoryError):
        region.core.durable_view()
    assert isinstance(region.core.failure, MemoryError)


def test_a_map_that_needs_a_snapshot_is_written_by_the_regions_thread(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot changes the map and may retire names, which another thread must not do while the region looks up
    repeats."""
    monkeypatch.setattr("memwal.wal.applied._INLINE_MAX", 40)
    monkeypatch.setattr("memwal.wal.applied._OF_A_NAME", 1)
    for number in range(6):
        region.core.serve([write(number, durable=False, token=Token(f"a producer with a long name {number}", 1))])
        region.clock.advance(2 * LIMITS.linger_max)
        snapshots = region.store.list(layout.snapshot_prefix(REGION))
        region.core.keep_limits()
        assert bool(region.later.work) == (region.store.list(layout.snapshot_prefix(REGION)) == snapshots)
        region.later.do()
    region.core.close()
    again = RegionCore.open(region.context, REGION)
    assert all(again.applied(f"a producer with a long name {number}").newest == 1 for number in range(6))


def test_appended_rows_are_let_go_of(tmp_path: Path) -> None:
    region, before = Region(tmp_path / "t.lance", rows_max=1 << 20), pa.total_allocated_bytes()
    region.core.serve([write(*range(100_000), v="x" * 50, durable=False)])
    region.clock.advance(LIMITS.linger_max)
    region.core.keep_limits()
    region.core.freeze()
    assert region.core.publish_next()
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("refused", [False, True])
def test_entries_under_way_count_in_a_generation_of_the_arrow_format(tmp_path: Path, refused: bool) -> None:
    region = Region(tmp_path / "t.lance", rows_max=1000, generation_rows=1000, generation_entries=3)
    region.durable(1)
    region.store.next = [refuse] if refused else []
    region.lingering(2)
    region.core.serve([write(3, durable=False)])
    assert region.later.waits == 0, "a third entry still fits"
    for number in (4, 5, 6):
        assert region.durable(number).done.result().position
    assert region.core.levels.active.generation > 1
    assert set(region.again()) == {1, 2, 3, 4, 5, 6}


def test_rows_are_appended_in_parts_as_elsewhere(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", entry_size_max=100)
    region.lingering(*range(9))
    region.core.close()
    assert region.store.entries > 1
    assert set(region.again()) == set(range(9))
