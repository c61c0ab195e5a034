"""One region without a thread: each guarantee of the core, tested step by step on a store that fails on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest

from memwal import wal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.errors import Invalid
from memwal.memtable import InvalidRows
from memwal.wal.layout import wal_prefix
from tests.messages import raises
from tests.region_contexts import LIMITS, region_context
from tests.support.clock import FakeClock

BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
REGION = wal.bucket_region(0)


class Scripted:
    """A local store that follows the test's script at the next conditional writes of WAL entries."""

    def __init__(self, root: Path) -> None:
        self._inner = wal.LocalStore(root)
        self.next: list[Callable[[], wal.PutOutcome | None]] = []
        self.entries = 0

    def put_if_absent(self, key: str, data: bytes) -> wal.PutOutcome:
        if "/wal/" in key:
            self.entries += 1
            if self.next and (outcome := self.next.pop(0)()) is not None:
                return outcome
        return self._inner.put_if_absent(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def refuse() -> wal.PutOutcome:
    raise wal.StoreRefused("no such bucket")


class Region:
    """A core with its store and clock."""

    def __init__(self, root: Path, **limits: Any) -> None:
        self.store, self.clock = Scripted(root), FakeClock()
        self.context = region_context(self.store, BASE, clock=self.clock, limits=replace(LIMITS, **limits))
        self.core = RegionCore.open(self.context, REGION)

    def again(self) -> RegionCore:
        """Return a newer claim of the same region."""
        return RegionCore.open(self.context, REGION)


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region(tmp_path / "t.lance")


def write(*ids: int, v: str = "", **more: Any) -> Write:
    return Write(pa.table({"id": list(ids), "v": [v] * len(ids)}, schema=BASE), **more)


def seen(core: RegionCore) -> dict[int, str]:
    """Return the newest row per key of the memtables."""
    found: dict[int, dict[str, Any]] = {}
    for snapshot in core.view().memtables:
        for row in snapshot.take(np.flatnonzero(snapshot.newest()), ["id", "v", "_tombstone"]).to_pylist():
            found.setdefault(row["id"], row)
    return {key: row["v"] for key, row in found.items() if not row["_tombstone"]}


def test_one_call_is_one_entry_and_every_write_is_acknowledged(region: Region) -> None:
    writes = [write(1, v="a"), write(2, 3, v="b"), write(1, v="c")]
    region.core.serve(writes)
    assert [each.done.result().position for each in writes] == [1, 1, 1]
    assert [each.done.result().rows for each in writes] == [1, 2, 1]
    assert region.store.entries == 1
    assert seen(region.core) == {1: "c", 2: "b", 3: "b"}
    assert seen(region.again()) == {1: "c", 2: "b", 3: "b"}


def test_a_delete_between_two_puts_keeps_its_place(region: Region) -> None:
    gone = write(1, 2, v="old")
    delete = Write(pa.table({"id": [1, 2], "v": [None, None]}, schema=BASE), deletes=True)
    region.core.serve([gone, delete, write(2, v="new")])
    assert seen(region.core) == seen(region.again()) == {2: "new"}


def test_nothing_is_visible_before_it_is_durable_and_a_view_may_be_taken_meanwhile(region: Region) -> None:
    """The test also shows that no lock is held during a call of the store, because it uses one thread."""
    during: list[Any] = []

    def look() -> None:
        during.append((seen(region.core), region.core.publish_next(), region.core.status()["wal_position"]))

    region.store.next = [look]
    region.core.serve([write(1)])
    assert during == [({}, False, 0)]
    assert seen(region.core) == {1: ""}


def test_a_token_is_applied_once_within_a_group_and_after_a_claim(region: Region) -> None:
    first, again = write(1, v="a", token=Token("loader", 7)), write(1, v="b", token=Token("loader", 7))
    region.core.serve([first, again])
    assert (first.done.result().applied, again.done.result().applied) == (True, False)
    newer = region.again()
    newer.serve([late := write(1, v="c", token=Token("loader", 6))])
    assert not late.done.result().applied
    assert seen(newer) == {1: "a"}


def test_a_retired_name_is_refused_and_never_taken_for_new(region: Region) -> None:
    """The region cannot distinguish a retry from a new write. The other writes of the group are written."""
    with patch("memwal.wal.applied._INLINE_MAX", 60), patch("memwal.wal.applied.NAMES_MAX", 10):
        for number in range(60):
            region.core.serve([write(number, token=Token(f"file {number:03}", 1))])
        for life in range(2):
            core = region.again() if life else region.core
            retry, other = (
                write(0, v="again", token=Token("file 000", 1)),
                write(1, v="new", token=Token("file 059", 2)),
            )
            core.serve([retry, other])
            with raises(Invalid):
                retry.done.result()
            assert other.done.result().newest in (None, 2)
            assert {id: v for id, v in seen(core).items() if id < 2} == {0: "", 1: "new"}


def test_storage_that_refuses_fails_the_group_and_leaves_the_region_alive(region: Region) -> None:
    region.store.next = [refuse]
    writes = [write(1), write(2)]
    region.core.serve(writes)
    assert all(isinstance(each.done.exception(), wal.StoreRefused) for each in writes)
    region.core.serve([fine := write(3)])
    assert fine.done.result().position == 1
    assert region.core.failure is None
    assert seen(region.core) == {3: ""}


def test_an_unknown_outcome_is_told_to_its_callers_and_poisons_the_region(region: Region) -> None:
    region.store.next = [lambda: wal.PutOutcome.OUTCOME_UNKNOWN] * 100
    lost = write(1)
    with pytest.raises(wal.OutcomeUnknown):
        region.core.serve([lost])
    assert isinstance(lost.done.exception(), wal.OutcomeUnknown)
    for step in (region.core.view, region.core.keep_limits, region.core.freeze, lambda: region.core.serve([write(2)])):
        with raises(wal.Poisoned):
            step()


def test_a_fenced_region_says_so_to_everybody(region: Region) -> None:
    region.core.serve([write(1)])
    newer = region.again()
    late = write(2)
    with raises(wal.Fenced):
        region.core.serve([late])
    assert isinstance(late.done.exception(), wal.Fenced)
    with pytest.raises(wal.Fenced):
        region.core.publish_next()
    assert seen(newer) == {1: ""}


def test_a_write_larger_than_an_entry_is_split_and_comes_back_whole(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", entry_size_max=100)
    region.core.serve([write(*range(30)), write(30)])
    assert region.store.entries > 2
    assert set(seen(region.again())) == set(range(31))


def test_rows_that_linger_are_appended_when_their_time_is_up(region: Region) -> None:
    assert region.core.next_duty() is None
    region.core.serve([write(1, durable=False)])
    assert (region.store.entries, seen(region.core)) == (0, {1: ""})
    assert region.core.next_duty() == pytest.approx(LIMITS.linger_max)
    region.core.keep_limits()
    assert region.core.lingers
    region.clock.advance(LIMITS.linger_max)
    region.core.keep_limits()
    assert not region.core.lingers
    assert seen(region.again()) == {1: ""}


def test_frozen_memtables_are_published_in_order_and_a_failed_flush_blocks_those_behind(region: Region) -> None:
    for first in (0, 10):
        region.core.serve([write(*range(first, first + 10))])
        region.core.keep_limits()
    assert region.core.view().ssts == ()
    broken = region.store.put_if_absent
    region.store.put_if_absent = lambda key, data: refuse()  # type: ignore[method-assign]
    with pytest.raises(wal.StoreRefused):
        region.core.publish_next()
    region.store.put_if_absent = broken  # type: ignore[method-assign]
    assert (region.core.failure, region.core.view().ssts) == (None, ())
    assert [region.core.publish_next() for _ in range(3)] == [True, True, False]
    assert [sst.generation for sst in region.core.view().ssts] == [1, 2]
    assert region.core.status()["replay_after"] == 2
    assert seen(region.again()) == {}


def logged(region: Region) -> list[tuple[int, int]]:
    """Return the generation and the number of rows of every log entry with rows."""
    entries, _ = wal.read_tail(region.store, REGION, region.context.codec, 0)
    return [(entry.header.generation, entry.rows.num_rows) for entry in entries]


def frozen_and_active(core: RegionCore) -> list[int]:
    """Return the number of rows of each memtable, oldest first."""
    return [snapshot.n for snapshot in reversed(core.view().memtables) if snapshot.n]


def test_a_claim_follows_the_generations_of_the_log(region: Region) -> None:
    for ids in ((1, 2), (3,)):
        region.core.serve([write(*ids)])
        region.core.freeze()
    region.core.serve([write(4)])
    again = region.again()
    assert frozen_and_active(again) == [2, 1, 1]
    again.serve([write(5)])
    assert logged(region) == [(1, 2), (2, 1), (3, 1), (3, 1)]


def test_a_generation_has_no_more_rows_and_entries_in_the_log_than_it_may(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", rows_max=100, generation_rows=5, generation_entries=3)
    for ids in ((1, 2, 3), (4, 5), (6,), (7,), (8,), (9,), tuple(range(20, 30)), (10,)):
        region.core.serve([write(*ids)])
    assert logged(region) == [(1, 3), (1, 2), (2, 1), (2, 1), (2, 1), (3, 1), (4, 10), (5, 1)]
    assert sorted(seen(region.core)) == [*range(1, 11), *range(20, 30)]


def test_many_entries_freeze_the_memtable_so_that_the_next_owner_has_few_to_read(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", rows_max=100, entries_max=3)
    for id in range(5):
        region.core.serve([write(id)])
        region.core.keep_limits()
    assert frozen_and_active(region.core) == [3, 2]
    assert region.core.publish_next()
    assert region.core.unflushed_entries() == 2
    assert frozen_and_active(region.again()) == [2]


def test_notes_of_batches_without_rows_do_not_pile_up_in_the_log(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", rows_max=100, entries_max=10)
    core = region.core
    core.serve([write(1, v="kept")])
    for number in range(95):
        core.serve([write(token=Token("loader", number))])
        core.keep_limits()
        core.publish_next()
    assert core.unflushed_entries() < 10
    wal.WalCollector(region.store, REGION, region.context.codec, FakeClock(1e12)).collect(0.0)
    assert len([key for key in region.store.list(wal_prefix(REGION)) if "/wal/" in key]) < 12
    again = region.again()
    again.serve([late := write(token=Token("loader", 94))])
    assert not late.done.result().applied
    assert [sst.generation for sst in again.levels.manifest.ssts] == [1]


def test_rows_behind_notes_are_not_passed_over(tmp_path: Path) -> None:
    """Entries without rows must not move the cursor past rows in a frozen memtable that is not flushed, in the active
    memtable, or in lingering writes."""
    region = Region(tmp_path / "t.lance", rows_max=2, entries_max=3)
    core = region.core
    core.serve([write(1, 2)])
    core.keep_limits()
    for number in range(9):
        core.serve([write(token=Token("loader", number))])
        core.keep_limits()
    assert core.levels.manifest.replay_after == 0
    assert core.publish_next()
    core.serve([write(3, v="active")])
    for number in range(9, 12):
        core.serve([write(token=Token("loader", number))])
    assert seen(region.again()) == {3: "active"}


def test_rows_that_linger_count_for_their_generation(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", rows_max=100, generation_rows=5, generation_entries=100)
    for ids in ((1, 2, 3), (4, 5), (6,)):
        region.core.serve([write(*ids, durable=False)])
    region.core.close()
    assert logged(region) == [(1, 5), (2, 1)]


def test_a_generation_of_the_log_is_published_whole_where_shard_writer_may_come_next(tmp_path: Path) -> None:
    region = Region(tmp_path / "t.lance", rows_max=100, generation_rows=5, generation_entries=100)
    for ids in ((1, 2), (3, 4), (5,)):
        region.core.serve([write(*ids)])
    small = Region(tmp_path / "t.lance", rows_max=2, generation_rows=5, generation_entries=100)
    assert frozen_and_active(small.core) == [5]
    small.core.keep_limits()
    assert small.core.publish_next()
    assert small.core.status()["replay_after"] >= 3


def test_only_the_write_at_fault_is_refused_and_its_token_may_be_used_again(region: Region) -> None:
    token = Token("loader", 1)
    faulty = Write(pa.table({"id": pa.array([5, None], pa.int64()), "v": ["", ""]}, schema=BASE), token=token)
    writes = [write(1), faulty, write(2), write(6, token=token)]
    region.core.serve(writes)
    fault = faulty.done.exception()
    assert isinstance(fault, InvalidRows)
    assert (fault.column, fault.row) == ("id", 1)
    assert [writes[n].done.result().position for n in (0, 2, 3)] == [1, 1, 1]
    assert writes[3].done.result().applied
    assert seen(region.core) == seen(region.again()) == {1: "", 2: "", 6: ""}


def test_a_write_of_no_rows_is_remembered_by_its_token(region: Region) -> None:
    """A sender without rows for a region records the token, so that a replay of the micro-batch adds no rows there."""
    none, again = write(token=Token("query", 7)), write(1, token=Token("query", 7))
    region.core.serve([none])
    assert none.done.result().position == 1
    taken = region.again()
    taken.serve([again])
    assert not again.done.result().applied
    assert seen(taken) == {}
    taken.serve([write(2, token=Token("query", 8))])
    assert seen(taken) == seen(region.again()) == {2: ""}


def test_a_durable_repeat_of_a_token_that_only_lingers_is_remembered(region: Region) -> None:
    """A write without rows lingers with only its token. The durable answer to its repeat must survive the process."""
    none, again = write(token=Token("query", 7), durable=False), write(token=Token("query", 7))
    region.core.serve([none])
    assert (region.core.lingers, region.store.entries) == (True, 0)
    region.core.serve([again])
    assert (again.done.result().applied, again.done.result().position) == (False, 1)
    assert not region.core.lingers
    region.core.serve([write(token=Token("query", 7))])
    assert region.store.entries == 1  # the log has it
    taken = region.again()
    taken.serve([late := write(1, token=Token("query", 7))])
    assert not late.done.result().applied


@pytest.mark.parametrize("step", ["close", "freeze", "keep_limits"])
def test_a_token_that_lingers_without_rows_is_appended_as_rows_are(region: Region, step: str) -> None:
    region.core.serve([write(token=Token("query", 7), durable=False)])
    assert region.core.next_duty() == pytest.approx(LIMITS.linger_max)
    region.clock.advance(LIMITS.linger_max)
    getattr(region.core, step)()
    assert (region.core.lingers, region.core.next_duty(), region.store.entries) == (False, None, 1)
    taken = region.again()
    taken.serve([late := write(1, token=Token("query", 7))])
    assert not late.done.result().applied


def test_a_token_that_lingers_alone_is_kept_while_storage_refuses(region: Region) -> None:
    region.core.serve([write(token=Token("query", 7), durable=False)])
    region.store.next = [refuse]
    region.core.serve([again := write(token=Token("query", 7))])
    assert isinstance(again.done.exception(), wal.StoreRefused)
    assert region.core.lingers
    region.core.close()
    assert not region.core.lingers
    assert region.again().applied("query").everywhere == 7


def test_a_write_that_its_caller_withdrew_is_not_written(region: Region) -> None:
    kept, withdrawn = write(1), write(2)
    assert withdrawn.take()
    region.core.serve([withdrawn, kept])
    assert (kept.copied, withdrawn.copied, withdrawn.done.done()) == (True, False, False)
    assert not kept.take()
    assert seen(region.core) == {1: ""}
    region.core.serve([withdrawn])
    assert region.store.entries == 1
