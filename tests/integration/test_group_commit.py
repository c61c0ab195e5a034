"""Many callers of one region: they share entries, each gets its own answer, and none waits forever."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.ingest.engine.api.tokens import Receipt
from memwal.ingest.engine.region.write_queue import PacedQueue, WriteQueue
from memwal.ingest.errors import FencedError, Invalid, MemWalError, Unavailable, UnknownOutcome
from tests.conftest import wait_until
from tests.messages import raises
from tests.support.together import together
from tests.ways import entered

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
QUIET = {"commit": {"interval": 0}}
BEGUN = (0.3, 3.0, 30.0)
"""Seconds within which a region has begun a write. On a busy machine the first ones may be too short."""
HURRY = {"wal": {"put_timeout": "50ms", "retry_budget": "200ms"}}


def _open(path: Path, **more: Any) -> Any:
    new = {} if (path / "t.lance").exists() else {"schema": SCHEMA, "key": "id", "regions": more.pop("regions", 1)}
    return memwal.open(path / "t.lance", settings={**QUIET, **more}, take_over=True, **new)


@pytest.fixture(params=["embedded", "flight"])
def way_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, ends: ExitStack) -> Callable[[Any], Any]:
    """Turn a table into the object that the test calls: the table, or a client of a Flight service in front of it."""
    monkeypatch.setattr("memwal.ingest.service.client.remote.ANSWER_TIMEOUT", 60.0)  # wait for the service's own error
    return lambda table: entered(request.param, table, ends)


def expect_unknown(put: Callable[[float], Receipt], expect: Callable[..., Any] = raises) -> None:
    """Call `put` with a timeout within which it begins; expect an unknown outcome. `expect`: `raises` of a kind."""
    for timeout in BEGUN:
        with suppress(Unavailable):  # it did not begin, and was withdrawn
            with expect(UnknownOutcome):
                put(timeout)
            return
    pytest.fail("no region has begun the write")


def _row(id: int, v: str = "") -> pa.Table:
    return pa.table({"id": [id], "v": [v]}, schema=SCHEMA)


class Gate:
    """Blocks the entries of the first opened table while it is closed; counts entries and writes."""

    def __init__(self) -> None:
        self.closed, self.entered = threading.Event(), threading.Event()
        self.opened = threading.Event()
        self.entries = 0
        self.submitted = 0
        """The number of writes that were ever queued in a region."""
        self._lock = threading.Lock()
        self.answer: Callable[[], wal.PutOutcome] | None = None
        self._real = wal.LocalStore.put_if_absent
        self._store: wal.LocalStore | None = None

    def put_if_absent(self, store: wal.LocalStore, key: str, data: bytes) -> wal.PutOutcome:
        self._store = self._store or (store if "/wal/" in key else None)
        if store is self._store and "/wal/" in key:
            self.entries += 1
            if self.closed.is_set():
                self.entered.set()
                assert self.opened.wait(60), "the test forgot to open the gate"
            if self.answer is not None:
                return self.answer()
        return self._real(store, key, data)

    def counting(self, submit: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Wrap `submit` of a queue so that it counts each item after queuing it."""

        def counted(queue: Any, item: Any) -> None:
            submit(queue, item)
            with self._lock:
                self.submitted += 1

        return counted

    def close(self) -> None:
        self.closed.set()

    def open(self) -> None:
        self.closed.clear()
        self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()

    def put_if_absent(store: wal.LocalStore, key: str, data: bytes) -> wal.PutOutcome:
        return made.put_if_absent(store, key, data)

    monkeypatch.setattr(wal.LocalStore, "put_if_absent", put_if_absent)
    for queue in (WriteQueue, PacedQueue):
        monkeypatch.setattr(queue, "submit", made.counting(queue.submit))
    yield made
    made.open()


class Callers:
    """Threads that put one row each, and their answers."""

    def __init__(self, put: Callable[[int], Any], count: int) -> None:
        self.answers: dict[int, Any] = {}
        self._put = put
        self._threads = [threading.Thread(target=self._call, args=(n,), daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _call(self, n: int) -> None:
        try:
            self.answers[n] = self._put(n)
        except MemWalError as error:
            self.answers[n] = error

    def all(self) -> Counter[type]:
        """Return the types of the answers; fail if a caller still waits."""
        for thread in self._threads:
            thread.join(60)
        assert len(self.answers) == len(self._threads), "a caller was never woken"
        return Counter(map(type, self.answers.values()))


def _held(gate: Gate, table: Any, count: int = 200) -> Callers:
    """Start callers: storage holds the writes of the first ones without an answer, and all others wait behind them."""
    return _behind(gate, lambda n: table.put(_row(n, f"caller {n}")), count)


def _behind(gate: Gate, put: Callable[[int], Any], count: int) -> Callers:
    """Start `count` callers of `put`; each waits for its answer behind the closed gate."""
    gate.close()
    callers = Callers(put, count)
    wait_until(lambda: gate.submitted >= count)
    assert gate.entered.wait(60)
    return callers


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_two_thousand_callers_share_a_few_entries(tmp_path: Path, gate: Gate) -> None:
    with _open(tmp_path) as table:
        callers = _behind(gate, lambda n: table.put(_row(n)), 2_000)
        gate.open()
        assert callers.all() == {Receipt: 2_000}
        assert gate.entries <= 20
        assert table.count() == 2_000
    with _open(tmp_path) as again:
        assert again.count() == 2_000


def test_callers_that_come_back_together_share_an_entry_again(tmp_path: Path, gate: Gate) -> None:
    """If the region did not wait for all of them, it would write the first few and the others as two entries."""
    with _open(tmp_path) as table:

        def call(n: int) -> None:
            for turn in range(20):
                table.put(_row(n * 20 + turn))

        assert Callers(call, 16).all() == {type(None): 16}
        assert gate.entries <= 120, "20 turns of 16 callers are 320 puts"


# ---- one answer each -------------------------------------------------------------------------------------------------


def test_only_the_caller_at_fault_is_refused(tmp_path: Path, gate: Gate) -> None:
    null = pa.table({"id": pa.array([1, None], pa.int64()), "v": ["a", "b"]}, schema=SCHEMA)
    tables = [_row(0, "fine"), null, null, _row(4, "fine too")]
    with _open(tmp_path) as table:
        callers = _behind(gate, lambda n: table.put(tables[n % 4]), 8)
        gate.open()
        assert callers.all() == {Receipt: 4, Invalid: 4}
        for n in (1, 2, 5, 6):
            assert (callers.answers[n].details["column"], callers.answers[n].details["row"]) == ("id", 1)
        assert gate.entries <= 3
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [0, 4]


def test_a_fence_wakes_every_waiter_with_both_epochs(tmp_path: Path, gate: Gate) -> None:
    table = _open(tmp_path)
    callers = _held(gate, table)
    with _open(tmp_path) as newer:
        gate.open()
        answers = callers.all()
        assert answers == {FencedError: 200}
        assert all("epoch 1 was fenced by epoch 2" in str(error) for error in callers.answers.values())
        assert newer.count() == 0
    table.close()


def test_storage_without_an_answer_wakes_every_waiter(tmp_path: Path, gate: Gate) -> None:
    table = _open(tmp_path, **HURRY)
    callers = _held(gate, table)
    gate.answer = lambda: wal.PutOutcome.OUTCOME_UNKNOWN
    gate.open()
    answers = callers.all()
    assert set(answers) <= {UnknownOutcome, Unavailable}
    gate.answer = None
    table.close()
    with _open(tmp_path) as again:  # no caller got an acknowledgement, and the table is empty
        assert again.count() == 0


def test_closing_answers_every_waiter_and_keeps_what_was_acknowledged(tmp_path: Path, gate: Gate) -> None:
    table = _open(tmp_path)
    callers = _held(gate, table)
    closing = threading.Thread(target=table.close)
    closing.start()
    gate.open()
    answers = callers.all()
    closing.join(20)  # timers wake an idle region only later
    assert not closing.is_alive()
    assert set(answers) <= {Receipt, Unavailable, Invalid}
    with raises(Invalid):
        table.put(_row(1))
    with _open(tmp_path) as again:
        there = set(again.scan(["id"]).read_all()["id"].to_pylist())
        assert {n for n, answer in callers.answers.items() if isinstance(answer, Receipt)} <= there


# ---- time-outs and interrupts ----------------------------------------------------------------------------------------


def test_a_write_that_was_not_begun_in_time_is_withdrawn(
    tmp_path: Path, gate: Gate, way_in: Callable[[Any], Any]
) -> None:
    with _open(tmp_path) as opened:
        table = way_in(opened)
        gate.close()
        first = Callers(lambda _: table.put(_row(1)), 1)
        assert gate.entered.wait(60)
        with raises(Unavailable):
            table.put(_row(2), token="loader:1", timeout=0.2)
        with raises(Unavailable):
            table.delete([1], timeout=0.05)
        gate.open()
        assert first.all() == {Receipt: 1}
        assert table.put(_row(3)).applied
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [1, 3]
        assert table.put(_row(2), token="loader:1").applied


def test_a_write_that_was_begun_is_unknown_and_its_token_settles_it(
    tmp_path: Path, gate: Gate, way_in: Callable[[Any], Any]
) -> None:
    ids = np.array([7, 8])
    rows = pa.table({"id": ids, "v": ["a", "b"]})
    with _open(tmp_path) as opened:
        table = way_in(opened)
        gate.close()
        expect_unknown(lambda timeout: table.put(rows, token="loader:1", timeout=timeout))
        ids[:] = 99  # the caller may reuse its memory
        gate.open()
        assert not table.put(pa.table({"id": [7, 8], "v": ["a", "b"]}), token="loader:1").applied
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [7, 8]


def _interrupting(gate: Gate) -> threading.Thread:
    """Return a thread that sends Ctrl-C once the main thread waits at the gate.

    The pause is for the main thread: a signal that arrives one step before its wait does not end the wait.
    """

    def interrupt() -> None:
        gate.entered.wait(60)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_an_interrupt_gives_the_caller_its_memory_back(tmp_path: Path, gate: Gate) -> None:
    ids = np.array([7, 8])
    with _open(tmp_path) as table:
        gate.close()
        interrupting = _interrupting(gate)
        with pytest.raises(KeyboardInterrupt):
            table.put(pa.table({"id": ids, "v": ["a", "b"]}))
        interrupting.join()
        ids[:] = 99
        gate.open()
        table.put(_row(1))
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [1, 7, 8]


def test_non_durable_puts_do_not_wait_while_others_are_appended(tmp_path: Path, gate: Gate) -> None:
    with _open(tmp_path) as table:
        gate.close()
        table.put(_row(1), durable=False)
        assert gate.entered.wait(60)
        for n in range(2, 30):
            table.put(_row(n), durable=False)
        assert table.count() == 29
        gate.open()
    with _open(tmp_path) as again:
        assert again.count() == 29


def test_an_owner_that_was_replaced_learns_it_by_an_append_beside(tmp_path: Path, gate: Gate) -> None:
    """No caller uses the owner meanwhile."""
    with _open(tmp_path) as older:
        gate.close()
        older.put(_row(1), durable=False)
        assert gate.entered.wait(60)
        with _open(tmp_path) as newer:
            gate.open()
            wait_until(lambda: older.status()["regions"][0]["state"] == "fenced")
            assert newer.count() == 0


def test_an_interval_between_entries_makes_fewer_of_them_and_loses_none(tmp_path: Path, gate: Gate) -> None:
    """With `wal.entry_interval`, callers that return at once wait for the interval together. A durable read, a flush
    and the close of the table do not wait.
    """
    callers, turns = 8, 5
    with _open(tmp_path, wal={"entry_interval": "200ms"}) as table:
        together(*(lambda f=f: [table.put(_row(f * turns + n)) for n in range(turns)] for f in range(callers)))
        assert gate.entries < callers * turns / 2, "of 40 puts; seven entries where nobody is late"
        assert table.count(level="durable") == callers * turns
    with _open(tmp_path, wal={"entry_interval": "1min"}) as table:
        table.put(_row(100))
        late = threading.Thread(target=table.put, args=[_row(101)])
        late.start()
        wait_until(lambda: gate.submitted >= callers * turns + 3)  # the durable read above is one of them
        assert table.count(level="durable") == callers * turns + 2
        late.join(60)
        table.flush()
        table.put(_row(102), durable=False)
        assert table.count() == callers * turns + 3


def test_a_close_that_was_interrupted_can_be_made_again(tmp_path: Path, gate: Gate) -> None:
    table = _open(tmp_path, wal={"linger_max": "1h"})
    table.put(_row(1), durable=False)
    gate.close()
    interrupting = _interrupting(gate)
    with pytest.raises(KeyboardInterrupt):
        table.close()
    interrupting.join()
    opening = threading.Timer(0.3, gate.open)
    opening.start()
    table.close()  # waits for the append of the first call, which is still in progress
    assert gate.opened.is_set()
    opening.join(60)
    with _open(tmp_path) as again:
        assert again.count() == 1


def test_of_several_regions_an_unknown_one_decides(tmp_path: Path, gate: Gate) -> None:
    rows = [{"id": n, "v": ""} for n in range(50)]
    with _open(tmp_path, regions=4) as table:
        gate.close()
        expect_unknown(lambda timeout: table.put(rows, token="loader:1", timeout=timeout), pytest.raises)
        gate.open()
        table.put(rows, token="loader:1")
        assert table.count() == 50


def test_unavailable_is_said_only_where_no_region_applied_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": n, "v": "new"} for n in range(50)]
    real = wal.LocalStore.put_if_absent
    down: set[str] = set()

    def partly_down(store: wal.LocalStore, key: str, data: bytes) -> wal.PutOutcome:
        if any(region in key for region in down):
            raise wal.StoreUnavailable("storage is away")
        return real(store, key, data)

    monkeypatch.setattr(wal.LocalStore, "put_if_absent", partly_down)
    with _open(tmp_path, regions=2, **HURRY) as table:
        first, second = [region["id"] for region in table.status()["regions"]]
        down.update([second])
        with raises(UnknownOutcome):
            table.put(rows, token="loader:1")
        assert 0 < table.count() < 50
        down.update([first])
        with pytest.raises(Unavailable):
            table.put(rows, token="loader:2")
        down.clear()
        table.put(rows, token="loader:1")
        assert table.count() == 50


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "3"])
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, timeout: Any) -> None:
    with _open(tmp_path) as table, raises(Invalid):
        table.put(_row(1), timeout=timeout)
