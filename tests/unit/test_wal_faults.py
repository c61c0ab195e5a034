"""The failure matrix: one fault at every store call of claim, append and edit; then reopen and compare with the acks.

The appender's answers to storage, case by case, and two real processes taking a region from each other, are here too.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest

from wal import (
    BatchPart,
    Claim,
    ConcurrentUse,
    Corrupt,
    EntryHeader,
    FakeClock,
    Fenced,
    LanceCodec,
    LocalStore,
    ManifestStore,
    MemoryStore,
    ObjectStore,
    OutcomeUnknown,
    Poisoned,
    PutOutcome,
    RegionManifest,
    SeededIds,
    StoreRefused,
    StoreUnavailable,
    SystemIds,
    WalAppender,
    WalError,
    WalOptions,
    bucket_region,
    check_succession,
    claim,
)
from wal.layout import entry_key, manifest_key, parse_entry_key, wal_prefix

REGION = bucket_region(0)
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), nullable=False)])
CODEC = LanceCodec(SCHEMA)


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": ids, "_tombstone": [False] * len(ids)}, schema=SCHEMA)


class Killed(BaseException):
    """The process ended here."""


FAULTS = {
    "lands then no answer": (True, PutOutcome.OUTCOME_UNKNOWN),
    "lands then unavailable": (True, PutOutcome.UNAVAILABLE),
    "no answer before landing": (False, PutOutcome.OUTCOME_UNKNOWN),
    "unavailable before landing": (False, PutOutcome.UNAVAILABLE),
    "no answer, lands much later": (False, PutOutcome.OUTCOME_UNKNOWN),
    "error before landing": (False, StoreUnavailable("storage is away")),
    "refused": (False, StoreRefused("no permission")),
    "killed before": (False, Killed()),
    "killed after": (True, Killed()),
}


@dataclass
class FaultyStore:
    """A store whose call number `at` (from 0) fails with `fault`, once or from then on."""

    inner: ObjectStore
    fault: str = ""
    at: int = -1
    permanent: bool = False
    calls: int = 0
    hit: bool = False
    hit_a_put: bool = False
    storage_options: dict[str, str] = field(default_factory=dict)
    late: list[tuple[str, bytes]] = field(default_factory=list)

    def _now(self) -> bool:
        number, self.calls = self.calls, self.calls + 1
        now = number == self.at or (self.permanent and 0 <= self.at <= number)
        self.hit = self.hit or now
        return now

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        if not self._now():
            return self.inner.put_if_absent(key, data)
        self.hit_a_put = True
        lands, answer = FAULTS[self.fault]
        if (
            lands
            and self.inner.put_if_absent(key, data) is PutOutcome.ALREADY_EXISTS
            and isinstance(answer, PutOutcome)
        ):
            return PutOutcome.ALREADY_EXISTS
        if "later" in self.fault:
            self.late.append((key, data))
        return self._answer(answer)

    @staticmethod
    def _answer(answer: PutOutcome | BaseException) -> PutOutcome:
        if isinstance(answer, BaseException):
            raise type(answer)(*answer.args)
        return answer

    def _read(self) -> None:
        if self._now():
            self._answer(FAULTS[self.fault][1])
            raise StoreUnavailable("storage is away")

    def put(self, key: str, data: bytes) -> None:
        self._read()
        self.inner.put(key, data)

    def get(self, key: str) -> bytes | None:
        self._read()
        return self.inner.get(key)

    def exists(self, key: str) -> bool:
        self._read()
        return self.inner.exists(key)

    def children(self, prefix: str) -> list[str]:
        self._read()
        return self.inner.children(prefix)

    def list(self, prefix: str) -> list[str]:
        self._read()
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self._read()
        self.inner.delete(key)

    def url(self, key: str) -> str:
        return self.inner.url(key)


def take(store: ObjectStore, seed: int = 0) -> Claim:
    return claim(store, REGION, spec_id=1, codec=CODEC, ids=SeededIds(seed), clock=FakeClock())


def writer(store: ObjectStore, claimed: Claim, seed: int = 100) -> WalAppender:
    return WalAppender(store, REGION, claimed.guard, CODEC, claimed.next_position, SeededIds(seed), FakeClock())


def found(claimed: Claim) -> list[int]:
    return [each for entry in claimed.entries for each in entry.rows["id"].to_pylist()]


@dataclass
class Run:
    """A life of one writer: what it tried, what it was acknowledged for, how it ended."""

    tried: list[int] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    applied: dict[str, int] = field(default_factory=dict)
    ended: BaseException | None = None
    appender: WalAppender | None = None
    store: FaultyStore | None = None

    def live(self, store: FaultyStore) -> Run:
        """Claim, append three entries (two of them one batch), edit the manifest, append two more."""
        self.store = store
        try:
            claimed = take(store, seed=1)
            self.appender = writer(store, claimed)
            self.append(10)
            self.append(11, 12, part=BatchPart("q", 1, "a", closes=False))
            self.append(13, part=BatchPart("q", 1, "a", closes=True), also=[11, 12])
            manifests = ManifestStore(store, REGION, ids=SeededIds(2), clock=FakeClock())
            manifests.edit(claimed.guard, lambda current: replace(current, last_seen=current.last_seen + 1))
            self.append(14)
            self.append(15)
        except (WalError, Killed) as error:
            self.ended = error
        return self

    def append(self, *ids: int, part: BatchPart | None = None, also: Sequence[int] = ()) -> None:
        assert self.appender is not None
        self.tried += ids
        if part is None:
            self.applied["w"] = ids[-1]
        elif part.closes:
            self.applied[part.producer] = part.sequence
        self.appender.append(rows(*ids), generation=1, applied=self.applied, part=part)
        if part is None or part.closes:
            self.acked += [*also, *ids]


def first_life(store: ObjectStore) -> None:
    appender = writer(store, take(store), seed=50)
    for number in (1, 2):
        appender.append(rows(number), generation=1, applied={"w": number})


def calls_of_a_life() -> int:
    store = FaultyStore(MemoryStore())
    first_life(store.inner)
    assert Run().live(store).ended is None
    return store.calls


CALLS = calls_of_a_life()


def check_after(inner: ObjectStore, run: Run) -> None:
    """Reopen and compare; then let the old writer try again."""
    claimed = take(inner, seed=200)
    rows_found = found(claimed)
    assert len(rows_found) == len(set(rows_found)), "a row twice"
    assert [each for each in rows_found if each in {1, 2, *run.acked}] == [1, 2, *run.acked], (
        "an acknowledged row is missing"
    )
    assert set(rows_found) <= {1, 2, *run.tried}
    assert not {11, 12, 13} & set(rows_found) or {11, 12, 13} <= set(rows_found), "half a batch"
    assert ("q" in claimed.applied) == (13 in rows_found)
    assert claimed.applied["w"] >= max([2, *(each for each in run.acked if each not in (11, 12, 13))])
    positions = sorted(parsed.position for key in inner.list(wal_prefix(REGION)) if (parsed := parse_entry_key(key)))
    assert positions == list(range(1, claimed.next_position))
    check_chain(inner)
    if run.store is not None:
        run.store.at = -1  # storage is well again
    if run.appender is not None:
        with pytest.raises((Fenced, Poisoned)):
            run.appender.append(rows(99), generation=1, applied={})
    assert writer(inner, claimed, seed=300).append(rows(100), generation=1, applied={}) == claimed.next_position


def check_chain(inner: ObjectStore) -> None:
    current: RegionManifest | None = None
    for version in itertools.count(1):
        data = inner.get(manifest_key(REGION, version))
        if data is None:
            return
        proposed = RegionManifest.decode(data)
        check_succession(current, proposed)
        current = proposed


@pytest.mark.parametrize("permanent", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_at_every_store_call(fault: str, permanent: bool) -> None:
    for at in range(CALLS):
        inner = MemoryStore()
        first_life(inner)
        store = FaultyStore(inner, fault, at, permanent)
        run = Run().live(store)
        assert store.hit, at
        for key, data in store.late:
            inner.put_if_absent(key, data)
        check_after(inner, run)


@pytest.mark.parametrize(
    "fault",
    ["lands then no answer", "lands then unavailable", "no answer before landing", "unavailable before landing"],
)
def test_a_single_lost_answer_of_a_put_stops_nobody(fault: str) -> None:
    """At put-if-absent calls the writer goes on; the life ends as if nothing had happened, without a row twice."""
    puts = 0
    for at in range(CALLS):
        inner = MemoryStore()
        first_life(inner)
        store = FaultyStore(inner, fault, at)
        run = Run().live(store)
        if not store.hit_a_put:
            continue
        puts += 1
        assert run.ended is None
        assert run.acked == [10, 11, 12, 13, 14, 15]
        assert run.appender is not None
        assert take(inner, seed=9).next_position == 1 + 2 + 1 + 5 + 1
    assert puts == 9  # two manifests and the sentinel of the claim, five entries and the edit


@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("second", ["lands then no answer", "no answer before landing", "killed after"])
def test_a_second_writer_with_a_fault_after_a_first_one(first: str, second: str) -> None:
    for at in range(0, CALLS, 4):
        inner = MemoryStore()
        first_life(inner)
        run = Run().live(FaultyStore(inner, first, at))
        with suppress(WalError, Killed):
            take(FaultyStore(inner, second, at % 7), seed=77)
        check_after(inner, run)


# ---- the appender, case by case --------------------------------------------------------------------------------------


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


def script(inner: MemoryStore, *answers: tuple[bool, PutOutcome | BaseException]) -> None:
    """The next put-if-absent calls land or not and are answered as told; the ones after go to the store itself."""
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


def test_already_exists_by_our_own_retry_is_success(inner: MemoryStore) -> None:
    appender, clock = appender_with_clock(inner)
    script(inner, (True, PutOutcome.OUTCOME_UNKNOWN))
    assert appender.append(rows(1), generation=1, applied={}) == 1
    assert appender.append(rows(2), generation=1, applied={}) == 2
    assert len(clock.slept) == 1
    assert found(take(inner, 5)) == [1, 2]


def test_no_answer_past_the_budget_poisons_within_it(inner: MemoryStore) -> None:
    appender, clock = appender_with_clock(inner, WalOptions(put_timeout=2, retry_budget=20))
    script(inner, *[(False, PutOutcome.OUTCOME_UNKNOWN)] * 1000)
    with pytest.raises(OutcomeUnknown, match=r"wal/100.*no answer after \d+ attempts.*may exist now or later"):
        appender.append(rows(1), generation=1, applied={})
    assert 10 < clock.monotonic() <= 18
    assert appender.poisoned
    script(inner)
    with pytest.raises(Poisoned, match=r"writer of epoch 1 stopped itself at position 1.*open the region again"):
        appender.append(rows(1), generation=1, applied={})
    assert found(take(inner, 5)) == []


def test_unavailable_past_the_budget_writes_nothing_and_poisons_nothing(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    script(inner, *[(False, StoreUnavailable("disk full: free space"))] * 60)
    with pytest.raises(StoreUnavailable, match="disk full: free space; nothing was written"):
        appender.append(rows(1), generation=1, applied={})
    script(inner)
    assert appender.append(rows(2), generation=1, applied={}) == 1
    assert found(take(inner, 5)) == [2]


def test_refused_at_once_but_unknown_after_a_lost_answer(inner: MemoryStore) -> None:
    appender, clock = appender_with_clock(inner)
    script(inner, (False, StoreRefused("no permission")))
    with pytest.raises(StoreRefused, match="no permission"):
        appender.append(rows(1), generation=1, applied={})
    assert (appender.poisoned, clock.slept) == (False, [])
    script(inner, (True, PutOutcome.OUTCOME_UNKNOWN), (False, StoreRefused("no permission")))
    with pytest.raises(OutcomeUnknown, match=r"may exist.*no permission"):
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
    with pytest.raises(Corrupt, match=r"position 1 holds an entry that writer epoch 1 did not write"):
        appender.append(rows(1), generation=1, applied={})
    with pytest.raises(Poisoned):
        appender.append(rows(1), generation=1, applied={})


def test_a_stranger_in_our_slot_of_a_newer_time_fences(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    take(inner, 5)
    inner.put(entry_key(REGION, 1, "lance"), b"damaged sentinel")
    with pytest.raises(Fenced, match="epoch 1 was fenced by epoch 2"):
        appender.append(rows(1), generation=1, applied={})


def test_two_threads_at_once_are_told(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    said: list[str] = []

    def meanwhile(key: str, data: bytes, real: Callable[[str, bytes], PutOutcome] = inner.put_if_absent) -> PutOutcome:
        with pytest.raises(ConcurrentUse, match="two threads append at once") as caught:
            appender.append(rows(2), generation=1, applied={})
        said.append(str(caught.value))
        return real(key, data)

    inner.put_if_absent = meanwhile  # type: ignore[method-assign]
    assert appender.append(rows(1), generation=1, applied={}) == 1
    assert len(said) == 1
    assert inner.exists(entry_key(REGION, 1, "lance"))
    assert not inner.exists(entry_key(REGION, 2, "lance"))


def test_rows_not_in_the_row_schema_change_nothing(inner: MemoryStore) -> None:
    appender, _ = appender_with_clock(inner)
    with pytest.raises(ValueError, match="row schema"):
        appender.append(pa.table({"x": [1]}), generation=1, applied={})
    assert appender.append(rows(1), generation=1, applied={}) == 1


def test_options_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"put_timeout 5s must be above 0 and at most wal\.retry_budget 1s"):
        WalOptions(put_timeout=5, retry_budget=1)


# ---- two real processes ----------------------------------------------------------------------------------------------

WRITER = """
import sys
import pyarrow as pa
from wal import *
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


def test_two_processes_taking_the_region_from_each_other(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for base in (0, 1_000_000)
    ]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.communicate(timeout=120)[0].split("\n") for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    acked = [int(line) for each in lines for line in each if line.isdigit()]
    rows_found = found(take(LocalStore(tmp_path), 5))
    assert len(rows_found) == len(set(rows_found))
    assert sorted(rows_found) == sorted(acked)
    assert len(acked) > 30
    check_chain(LocalStore(tmp_path))


def test_a_killed_process_loses_nothing_it_was_acknowledged_for(tmp_path: Path) -> None:
    acked: list[int] = []
    for life in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER.replace("range(30)", "range(10**9)"), str(tmp_path), str(life * 1_000_000)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdin
        assert process.stdout
        process.stdin.write("go\n")
        process.stdin.flush()
        acked += [int(process.stdout.readline()) for _ in range(20)]
        process.kill()
        acked += [
            int(line) for line in process.communicate(timeout=60)[0].splitlines(keepends=True) if line.endswith("\n")
        ]
    rows_found = found(take(LocalStore(tmp_path), 5))
    assert [each for each in rows_found if each in set(acked)] == acked
    assert len(rows_found) == len(set(rows_found)) <= len(acked) + 3
    check_chain(LocalStore(tmp_path))
