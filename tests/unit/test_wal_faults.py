"""The failure matrix of the log: one fault at every store call, on every adapter; reopen, compare with the acks.

This module also tests the appender's reaction to each answer of storage, and two real processes that take a region from
each other.
"""

from __future__ import annotations

import errno
import itertools
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from memwal.wal import (
    ConcurrentUse,
    Corrupt,
    EntryHeader,
    Fenced,
    LocalStore,
    ManifestStore,
    ObjectStore,
    OutcomeUnknown,
    Poisoned,
    PutOutcome,
    SsTable,
    StoreRefused,
    StoreUnavailable,
    SystemIds,
    WalAppender,
    WalCollector,
    WalError,
    WalOptions,
    open_store,
)
from memwal.wal.layout import entry_key, parse_entry_key, wal_prefix
from tests.conftest import ROOT, extent
from tests.failure_matrix import (
    CODES,
    CREATES,
    FAULTS,
    HARMLESS,
    LASTING,
    STEPS,
    Call,
    FaultyStore,
    Killed,
    SystemCalls,
    copy_objects,
)
from tests.log_life import LogLife, calls_of_a_life, check_chain, log_of_two_entries, take, writer
from tests.log_rows import CODEC, rows
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds
from tests.support.log_world import REGION, found
from tests.support.memory_store import MemoryStore

LIFE = calls_of_a_life()
BEFORE = MemoryStore()
log_of_two_entries(BEFORE)


@dataclass(frozen=True)
class Stores:
    """Creates empty stores of one kind."""

    make: Callable[[], ObjectStore]
    every: int = 1
    """Try the fault at every n-th call that it can happen to."""

    def places(self, fault: str) -> list[Call]:
        """Return the calls of a life at which a fault is tried."""
        possible = [call for call in LIFE.calls if call.method in FAULTS[fault].calls]
        return possible[:: self.every]


@pytest.fixture(params=["memory", "local", "s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Run the test on every adapter. On S3 a part of the calls is enough: test_failure_matrix.py tries every call and
    every fault on the wire."""
    numbers = itertools.count()
    if request.param == "memory":
        return Stores(MemoryStore)
    if request.param == "local":
        return Stores(lambda: LocalStore(tmp_path / str(next(numbers))))
    table = request.getfixturevalue("s3_table")
    return Stores(lambda: open_store(f"{table.uri}/{next(numbers)}", table.storage_options), every=extent(9, 3))


def lived(inner: ObjectStore, fault: str, at: Call, *, lasting: bool = False) -> LogLife:
    """Run a life over the log BEFORE, copied to `inner`, with one fault. Late answers have landed when it returns."""
    clock = FakeClock()
    store = FaultyStore(inner, clock)
    copy_objects(BEFORE, store)
    store.begin()
    store.arm(FAULTS[fault], at, lasting=lasting)
    life = LogLife(store, clock).live()
    assert store.hit, at
    store.heal()
    store.let_late_ones_land()
    return life


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_at_every_store_call(stores: Stores, fault: str) -> None:
    for at in stores.places(fault):
        inner = stores.make()
        lived(inner, fault, at).check(inner)


@pytest.mark.parametrize("stores", ["memory", "local"], indirect=True)
@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_stays_from_any_store_call_on(stores: Stores, fault: str) -> None:
    for at in stores.places(fault):
        inner = stores.make()
        life = lived(inner, fault, at, lasting=True)
        assert life.ended is not None or at.method not in CREATES
        life.check(inner)


@pytest.mark.parametrize("fault", HARMLESS)
def test_a_single_lost_answer_stops_nobody(fault: str) -> None:
    """The writer continues, and the life ends as it does without the fault, with no row doubled."""
    for at in Stores(MemoryStore).places(fault):
        inner = MemoryStore()
        life = lived(inner, fault, at)
        assert (life.ended, tuple(life.acked)) == (None, LogLife.WHOLE), at
        assert take(inner, 9).next_position == 1 + 2 + 1 + 4 + 1
    creates = [call for call in LIFE.calls if call.method in CREATES]
    assert len(creates) == 8  # two manifests and the sentinel of the claim, four entries and the edit


@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("second", ["lands then 500, 503, reset or timeout", "reset before landing", "killed after"])
def test_a_second_writer_with_a_fault_after_a_first_one(first: str, second: str) -> None:
    creates = [call for call in LIFE.calls[:12] if call.method in CREATES]
    for number, at in enumerate(Stores(MemoryStore).places(first)[::3]):
        inner = MemoryStore()
        life = lived(inner, first, at)
        clock = FakeClock()
        store = FaultyStore(inner, clock)
        store.arm(FAULTS[second], replace(creates[number % len(creates)], nth=1))
        with suppress(WalError, Killed):
            take(store, seed=77, clock=clock)
        life.check(inner)


# ---- local files, system call by system call -------------------------------------------------------------------------


def local_life(root: Path, calls: SystemCalls) -> tuple[ObjectStore, LogLife]:
    """Run a life over the log BEFORE on local files, with the system calls `calls`."""
    inner, clock = LocalStore(root), FakeClock()
    copy_objects(BEFORE, inner)
    with calls.installed():
        return inner, LogLife(FaultyStore(LocalStore(root), clock), clock).live()


def test_an_error_after_the_effect_of_every_system_call(tmp_path: Path) -> None:
    """Each step of each put takes effect and then fails: no row is lost, and no refused row is in the log."""
    _, whole = local_life(tmp_path / "whole", dry := SystemCalls())
    assert tuple(whole.acked) == LogLife.WHOLE
    assert set(dry.calls) == STEPS
    for number, (name, code) in enumerate(zip(dry.calls, itertools.cycle(CODES), strict=False)):
        inner, life = local_life(tmp_path / str(number), SystemCalls(number, code))
        life.check(inner)
        if name in ("link", "unlink", "replace"):
            assert (life.ended, tuple(life.acked)) == (None, LogLife.WHOLE), (number, name, code)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.ENOENT])
def test_an_error_after_the_link_stops_nobody(tmp_path: Path, code: int) -> None:
    """The next attempt finds its own bytes in the slot, and the life ends as it does without the fault."""
    local_life(tmp_path / "whole", dry := SystemCalls())
    links = [number for number, name in enumerate(dry.calls) if name == "link"]
    for number in links:
        for at in (number, number + 2):  # the link, and the check after it
            assert dry.calls[at] in ("link", "stat")
            inner, life = local_life(tmp_path / f"{at}", SystemCalls(at, code))
            assert (life.ended, tuple(life.acked)) == (None, LogLife.WHOLE), at
            life.check(inner)


# ---- collection ------------------------------------------------------------------------------------------------------


def log_with_garbage() -> MemoryStore:
    """Entries 1 and 2 are in an SST, 3 is a fence, 4 holds the row 10."""
    store = MemoryStore()
    log_of_two_entries(store)
    claimed = take(store, 1)
    manifests = ManifestStore(store, REGION, ids=SeededIds(2), clock=FakeClock())
    sst = SsTable(1, "00000000_gen_1", physical_rows=2)
    manifests.edit(claimed.guard, lambda current: replace(current, replay_after=2, current_generation=2, ssts=(sst,)))
    writer(store, claimed).append(rows(10), generation=2, applied={"w": 10})
    return store


def collect(store: ObjectStore) -> None:
    clock = FakeClock()
    clock.advance(1e9)  # every entry is old enough
    WalCollector(store, REGION, CODEC, clock, workers=1).collect(0.0)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_at_every_store_call_of_a_collection(stores: Stores, fault: str) -> None:
    """Whatever the collection deleted before the fault, all needed entries remain, and the next one finishes."""
    before = log_with_garbage()
    dry = FaultyStore(log_with_garbage(), FakeClock())
    collect(dry)
    for at in [call for call in dry.calls if call.method in FAULTS[fault].calls][:: stores.every]:
        inner = stores.make()
        copy_objects(before, inner)
        store = FaultyStore(inner, FakeClock())
        store.arm(FAULTS[fault], at)
        with suppress(WalError, Killed):
            collect(store)
        assert store.hit, at
        collect(inner)
        keys = map(parse_entry_key, inner.list(wal_prefix(REGION)))
        assert sorted(each.position for each in keys if each) == [3, 4]
        claimed = take(inner, 5)
        assert (found(claimed), claimed.applied["w"]) == ([10], 10)
        check_chain(inner)


# ---- the appender, case by case --------------------------------------------------------------------------------------


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


def script(inner: MemoryStore, *answers: tuple[bool, PutOutcome | BaseException]) -> None:
    """Script the next calls of `put_if_absent`: each pair says whether the put lands, and gives its answer. Later calls
    go to the store unchanged."""
    left = iter(answers)

    def put_if_absent(key: str, data: bytes) -> PutOutcome:
        lands, answer = next(left, (True, None))
        outcome = MemoryStore.put_if_absent(inner, key, data) if lands else None
        if isinstance(answer, BaseException):
            raise answer
        return answer or outcome  # type: ignore[return-value]

    inner.put_if_absent = put_if_absent  # type: ignore[method-assign]


def appender_with_clock(inner: MemoryStore, options: WalOptions | None = None) -> tuple[WalAppender, FakeClock]:
    claimed, clock = take(inner), FakeClock()
    return WalAppender(inner, REGION, claimed.guard, CODEC, 1, SystemIds(), clock, options), clock


def test_no_answer_past_the_budget_poisons_within_it(inner: MemoryStore) -> None:
    appender, clock = appender_with_clock(inner, WalOptions(put_timeout=2, retry_budget=20))
    script(inner, *[(False, PutOutcome.OUTCOME_UNKNOWN)] * 1000)
    with raises(OutcomeUnknown):
        appender.append(rows(1), generation=1, applied={})
    assert 10 < clock.monotonic() <= 18
    assert appender.poisoned
    script(inner)
    with raises(Poisoned):
        appender.append(rows(1), generation=1, applied={})
    assert found(take(inner, 5)) == []


def test_unavailable_past_the_budget_writes_nothing_and_poisons_nothing(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    script(inner, *[(False, StoreUnavailable("disk full: free space"))] * 60)
    with raises(StoreUnavailable):
        appender.append(rows(1), generation=1, applied={})
    script(inner)
    assert appender.append(rows(2), generation=1, applied={}) == 1
    assert found(take(inner, 5)) == [2]


def test_refused_at_once_but_unknown_after_a_lost_answer(inner: MemoryStore) -> None:
    appender, clock = appender_with_clock(inner)
    script(inner, (False, StoreRefused("no permission")))
    with raises(StoreRefused):
        appender.append(rows(1), generation=1, applied={})
    assert (appender.poisoned, clock.slept) == (False, [])
    script(inner, (True, PutOutcome.OUTCOME_UNKNOWN), (False, StoreRefused("no permission")))
    with raises(OutcomeUnknown):
        appender.append(rows(1), generation=1, applied={})
    assert appender.poisoned


def test_an_interrupt_in_the_middle_of_a_put_poisons(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    script(inner, (True, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        appender.append(rows(1), generation=1, applied={})
    with pytest.raises(Poisoned):
        appender.append(rows(2), generation=1, applied={})


@pytest.mark.parametrize("strange", [b"not an entry", CODEC.encode(EntryHeader(1, 1, "0" * 32), rows(7))])
def test_a_stranger_in_our_slot_is_corruption_not_the_next_slot(inner: MemoryStore, strange: bytes) -> None:
    appender, _ = appender_with_clock(inner)
    inner.put(entry_key(REGION, 1, "lance"), strange)
    with raises(Corrupt):
        appender.append(rows(1), generation=1, applied={})
    with pytest.raises(Poisoned):
        appender.append(rows(1), generation=1, applied={})


def test_a_stranger_in_our_slot_of_a_newer_time_fences(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    take(inner, 5)
    inner.put(entry_key(REGION, 1, "lance"), b"damaged sentinel")
    with raises(Fenced):
        appender.append(rows(1), generation=1, applied={})


def test_two_threads_at_once_are_told(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)

    def meanwhile(key: str, data: bytes, real: Callable[[str, bytes], PutOutcome] = inner.put_if_absent) -> PutOutcome:
        with raises(ConcurrentUse):
            appender.append(rows(2), generation=1, applied={})
        return real(key, data)

    inner.put_if_absent = meanwhile  # type: ignore[method-assign]
    assert appender.append(rows(1), generation=1, applied={}) == 1
    assert inner.exists(entry_key(REGION, 1, "lance"))
    assert not inner.exists(entry_key(REGION, 2, "lance"))


def test_rows_not_in_the_row_schema_change_nothing(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    with raises(ValueError):
        appender.append(pa.table({"x": [1]}), generation=1, applied={})
    assert appender.append(rows(1), generation=1, applied={}) == 1


def test_options_that_cannot_hold_are_refused() -> None:
    with raises(ValueError):
        WalOptions(put_timeout=5, retry_budget=1)


# ---- two real processes ----------------------------------------------------------------------------------------------

WRITER = """
import sys
import pyarrow as pa
from memwal.wal import *
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), nullable=False)])
store, codec, ids, clock = LocalStore(sys.argv[1]), LanceCodec(SCHEMA), SystemIds(), SystemClock()
base, acked = int(sys.argv[2]), 0
sys.stdin.readline()
for takeover in range(6):
    try:
        claimed = claim(store, bucket_region(0), spec_id=1, codec=codec, ids=ids, clock=clock)
        appender = WalAppender(store, bucket_region(0), claimed.guard, codec, claimed.next_position, ids, clock)
        for _ in range(30):
            rows = pa.table({"id": [base + acked], "_tombstone": [False]}, schema=SCHEMA)
            appender.append(rows, generation=1, applied={})
            print(base + acked, flush=True)
            acked += 1
    except Fenced as error:
        base += 1000  # the un-acknowledged row may not be sent again under its old number
        print("fenced", error.ours, error.theirs, flush=True)
"""


def started(root: Path, base: int, script: str = WRITER) -> subprocess.Popen[str]:
    """Start a process that appends the rows from `base` on, once it reads a line."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script, str(root), str(base)], **pipes, cwd=ROOT)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()


def test_two_processes_taking_the_region_from_each_other(tmp_path: Path) -> None:
    processes = [started(tmp_path, base) for base in (0, 1_000_000)]
    for process in processes:
        go(process)
    lines = [process.communicate(timeout=300)[0].split("\n") for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    acked = [int(line) for each in lines for line in each if line.isdigit()]
    rows_found = found(take(LocalStore(tmp_path), 5))
    assert len(rows_found) == len(set(rows_found))
    assert sorted(rows_found) == sorted(acked)
    assert len(acked) >= 30  # no newer claim fences the last one
    check_chain(LocalStore(tmp_path))


def test_a_killed_process_loses_nothing_it_was_acknowledged_for(tmp_path: Path) -> None:
    acked: list[int] = []
    for life in range(3):
        go(process := started(tmp_path, life * 1_000_000, WRITER.replace("range(30)", "range(10**9)")))
        assert process.stdout
        acked += [int(process.stdout.readline()) for _ in range(20)]
        process.kill()
        with process:  # not `communicate`, which drops what the stream has read ahead
            acked += [int(line) for line in process.stdout if line.endswith("\n")]
    rows_found = found(take(LocalStore(tmp_path), 5))
    assert [each for each in rows_found if each in set(acked)] == acked
    assert len(rows_found) == len(set(rows_found)) <= len(acked) + 3
    check_chain(LocalStore(tmp_path))
