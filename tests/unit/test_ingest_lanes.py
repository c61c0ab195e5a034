"""The scheduler of lanes: one thread at a time for each lane, no lost wake-up, maxima, turns, timers, ends."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from memwal.ingest import lanes, threads
from memwal.ingest.lanes import CAPS, MOST, Kind, Lane, Scheduler
from tests.conftest import wait_until
from tests.support.clock import FakeClock

SERVE, LOG, PUBLISH, INDEX, _COMMIT = Kind


def scheduler(most: int = 100, **caps: int) -> Scheduler:
    return Scheduler(caps={kind: caps.get(kind.name.lower(), 4) for kind in Kind}, most=most)


class Gate:
    """A task that blocks until the test opens the gate; counts its runs."""

    def __init__(self) -> None:
        self.begun, self.opened, self.runs = threading.Event(), threading.Event(), 0

    def __call__(self) -> None:
        self.runs += 1
        self.begun.set()
        assert self.opened.wait(60)


def held(of: Scheduler, kind: Kind = SERVE, table: str = "held", **more: Any) -> tuple[Lane, Gate]:
    """Return a lane whose task has begun and blocks, with its gate."""
    gate = Gate()
    lane = of.lane(kind, table, gate, **more)
    lane.ready()
    assert gate.begun.wait(60)
    return lane, gate


def close(*lanes: Lane) -> None:
    for lane in lanes:
        lane.end()
    for lane in lanes:
        lane.wait()


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("caps", "most"), [(1, 100), (3, 100), (8, 4)])
def test_under_stress_no_lane_runs_twice_at_a_time_and_no_wake_up_is_lost(caps: int, most: int) -> None:
    """Eight threads add to forty counters and make their lanes ready, which must see every addition."""
    of = scheduler(most, serve=caps, log=caps, publish=caps, index=caps)
    added, seen = Counter[int](), Counter[int]()
    running: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
    overlaps, most_seen, now = list[int](), Counter[Kind](), Counter[Kind]()
    counting = threading.Lock()

    def task(number: int, kind: Kind) -> None:
        if not running[number].acquire(blocking=False):
            overlaps.append(number)
        with counting:
            now[kind] += 1
            most_seen[kind] = max(most_seen[kind], now[kind])
        seen[number] = added[number]
        if number % 5 == 0:
            time.sleep(0.0002)
        with counting:
            now[kind] -= 1
        running[number].release()

    def lane(number: int) -> Lane:
        kind = Kind(number % 4)
        return of.lane(kind, f"t{number % 7}", lambda: task(number, kind))

    made = [lane(number) for number in range(40)]

    def add(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(2_000):
            number = chance.randrange(5) * 8 + seed  # one thread for each counter
            added[number] += 1
            if chance.random() < 0.1:
                made[number].after(chance.random() / 1_000)
            else:
                made[number].ready()
            if chance.random() < 0.01:
                time.sleep(0.001)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    wait_until(lambda: seen == added)
    close(*made)
    assert overlaps == []
    assert max(most_seen.values()) <= caps
    assert of.calls.threads <= most + len(Kind)


def test_a_lane_that_becomes_ready_while_it_runs_runs_once_more() -> None:
    lane, gate = held(scheduler())
    for _ in range(5):
        lane.ready()
    gate.opened.set()
    wait_until(lambda: gate.runs == 2)
    close(lane)
    assert gate.runs == 2


def test_a_task_may_make_its_own_lane_ready() -> None:
    turns = list[int]()

    def task() -> None:
        turns.append(1)
        if len(turns) < 1_000:
            lane.ready()

    lane = scheduler().lane(SERVE, "t", task)
    lane.ready()
    wait_until(lambda: len(turns) == 1_000)


def test_an_error_ends_its_lane_only(caplog: pytest.LogCaptureFixture) -> None:
    of, done = scheduler(serve=1), threading.Event()

    def fails() -> None:
        raise MemoryError("no room")

    lane = of.lane(SERVE, "t", fails)
    lane.ready()
    lane.wait()
    of.lane(SERVE, "t", done.set).ready()
    assert done.wait(60)
    assert "MemoryError: no room" in caplog.text


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_the_thread_that_was_idle_last_is_used_again_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE", 0.3)
    of, used = scheduler(), set[int]()
    gates = [held(of, table=str(number))[1] for number in range(4)]
    assert of.calls.threads in (4, 5), "the first one may not have been idle yet"
    for gate in gates:
        gate.opened.set()
    again = of.lane(SERVE, "t", lambda: used.add(threading.get_ident()))
    for _ in range(20):
        wait_until(lambda: len(of.calls.idle) == of.calls.threads)
        again.ready()
    wait_until(lambda: len(of.calls.idle) == of.calls.threads)
    assert len(used) == 1
    wait_until(lambda: of.calls.threads == 1)
    time.sleep(0.5)
    assert of.calls.threads == 1, "the last one stays, because another one may not be startable"
    used.clear()
    again.ready()
    wait_until(lambda: bool(used))


def test_where_no_thread_can_be_started_the_others_run_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    of, done = scheduler(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            of.lane(SERVE, "t", done.set)
    _, gate = held(of)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        of.lane(SERVE, "t", done.set).ready()
        gate.opened.set()
        assert done.wait(60)


def test_a_forked_process_has_threads_of_its_own() -> None:
    code = (
        "import os, threading\n"
        "from memwal.ingest.lanes import Kind, SCHEDULER\n"
        "def runs():\n"
        "    begun = threading.Event(); SCHEDULER.lane(Kind.SERVE, 't', begun.set).ready(); return begun.wait(10)\n"
        "assert runs()\n"
        "if os.fork() == 0:\n"
        "    raise SystemExit(not runs())\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False).returncode == 0


# ---- maxima and turns ------------------------------------------------------------------------------------------------


def test_a_table_and_a_kind_use_no_more_threads_than_they_may() -> None:
    of = scheduler(serve=3)
    gates = [held(of, most=2)[1] for _ in range(2)]
    done = [threading.Event() for _ in range(3)]
    of.lane(SERVE, "held", done[0].set).ready()
    other, gate = held(of, table="other")
    of.lane(SERVE, "other", done[1].set).ready()
    of.lane(PUBLISH, "held", done[2].set).ready()
    assert done[2].wait(60), "another kind has threads of its own"
    assert not done[0].wait(0.05)
    assert not done[1].is_set()
    gate.opened.set()
    assert done[1].wait(60)
    assert not done[0].is_set(), "its table has the most threads that it may have"
    gates[0].opened.set()
    assert done[0].wait(60)
    gates[1].opened.set()
    close(other)


def test_a_table_whose_tasks_hang_leaves_threads_to_the_others() -> None:
    of = scheduler(serve=4)
    gates = [held(of, most=2)[1] for _ in range(2)]
    for _ in range(20):
        of.lane(SERVE, "held", gates[0]).ready()
    for number in range(50):
        done = threading.Event()
        of.lane(SERVE, f"t{number}", done.set).ready()
        assert done.wait(60)
    for gate in gates:
        gate.opened.set()


@pytest.mark.parametrize("ends", [SERVE, PUBLISH])
def test_the_most_urgent_kind_goes_first_and_no_kind_waits_for_ever(ends: Kind) -> None:
    """A thread of one kind ends while two kinds wait. A kind that has no thread then goes first."""
    of, order = scheduler(most=4), list[Kind]()
    kinds = (SERVE, SERVE, PUBLISH, PUBLISH) if ends is SERVE else (SERVE, SERVE, SERVE, PUBLISH)
    gates = [(kind, held(of, kind)[1]) for kind in kinds]
    for kind in (PUBLISH, INDEX, SERVE):
        for _ in range(2):
            of.lane(kind, "t", lambda kind=kind: order.append(kind)).ready()  # type: ignore[misc]
    wait_until(lambda: order == [INDEX, INDEX])  # it has no thread, so it may start one
    next(gate for kind, gate in gates if kind is ends).opened.set()
    wait_until(lambda: len(order) == 6)
    first, then = (SERVE, PUBLISH) if ends is SERVE else (PUBLISH, SERVE)
    assert order == [INDEX, INDEX, first, first, then, then]
    for _, gate in gates:
        gate.opened.set()


class Turns:
    """A scheduler with one thread, whose tasks take simulated time."""

    def __init__(self) -> None:
        self.clock, self.order = FakeClock(), list[str]()
        self.of = Scheduler(self.clock, dict.fromkeys(Kind, 1))

    def lane(self, table: str, seconds: float, weight: float = 1.0) -> Lane:
        def task() -> None:
            self.order.append(table)
            self.clock.advance(seconds)
            if len(self.order) < 400:
                lane.ready()

        lane = self.of.lane(SERVE, table, task, weight=weight)
        return lane

    def shares(self, *tables: tuple[str, float, float]) -> Counter[str]:
        """Let 8 lanes of each table be ready at all times, given as name, seconds and weight; return how often the
        tables run in 200 turns. The first turns have no measured time yet."""
        _, gate = held(self.of, table="first")
        self.order.clear()
        for table in tables:
            for _ in range(8):
                self.lane(*table).ready()
        gate.opened.set()
        wait_until(lambda: len(self.order) >= 400)
        return Counter(self.order[100:300])


def test_tables_share_a_thread_by_time_and_weight() -> None:
    assert Turns().shares(("heavy", 0.002, 3.0), ("light", 0.002, 1.0))["heavy"] == pytest.approx(150, abs=4)
    assert Turns().shares(("slow", 0.006, 1.0), ("quick", 0.002, 1.0))["quick"] == pytest.approx(150, abs=4)


def test_a_table_that_floods_the_scheduler_delays_another_one_by_two_tasks_at_most() -> None:
    """A flood of 200 lanes, each ready again when it ends; the other table becomes ready now and then."""
    of, runs, stop = scheduler(serve=2), Counter[str](), threading.Event()

    def flood(number: int) -> None:
        runs["flood"] += 1
        time.sleep(0.002)
        if not stop.is_set():
            flooding[number].ready()

    flooding = [of.lane(SERVE, "flood", lambda number=number: flood(number)) for number in range(200)]  # type: ignore[misc]
    for lane in flooding:
        lane.ready()
    wait_until(lambda: runs["flood"] > 50)
    waited = list[int]()
    for _ in range(30):
        done = threading.Event()
        before = runs["flood"]
        of.lane(SERVE, "other", done.set).ready()
        assert done.wait(60)
        waited.append(runs["flood"] - before)
        time.sleep(0.003)
    stop.set()
    assert sorted(waited)[15] <= 4, "in turns without the tables it would be 200"
    for lane in flooding:
        close(lane)


def test_a_table_that_rested_has_no_credit() -> None:
    """A table that used nothing for long does not exclude the others when it comes back."""
    turns = Turns()
    rested, busy = turns.lane("rested", 0.001), turns.lane("busy", 3600.0)
    turns.order += ["before"] * 398  # each of the two runs once more after its first run
    for lane in (busy, rested):
        lane.ready()
    wait_until(lambda: len(turns.order) == 401)
    assert turns.shares(("busy", 0.002, 1.0), ("rested", 0.002, 1.0))["busy"] == pytest.approx(100, abs=4)


# ---- timers ----------------------------------------------------------------------------------------------------------


def test_timers_run_lanes_in_order_and_the_earliest_holds() -> None:
    of, order, began = scheduler(serve=1), list[str](), time.monotonic()

    def named(name: str) -> Lane:
        return of.lane(SERVE, "t", lambda: order.append(name))

    later, sooner, now = named("later"), named("sooner"), named("now")
    later.after(0.3)
    sooner.after(60)
    sooner.after(0.1)
    sooner.after(50)
    now.ready()
    wait_until(lambda: len(order) == 3)
    assert order == ["now", "sooner", "later"]
    assert 0.3 <= time.monotonic() - began < 30
    wait_until(lambda: later.due == sooner.due == float("inf"))


def test_a_timer_of_a_running_lane_runs_it_once_more() -> None:
    lane, gate = held(scheduler())
    lane.after(0.01)
    time.sleep(0.05)
    assert gate.runs == 1
    gate.opened.set()
    wait_until(lambda: gate.runs == 2)


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_close_waits_for_the_running_task_and_nothing_runs_afterwards() -> None:
    lane, gate = held(scheduler())
    lane.ready()
    lane.after(0.01)
    with ThreadPoolExecutor(2) as pool:
        closing = [pool.submit(close, lane) for _ in range(2)]
        time.sleep(0.1)
        assert not any(each.done() for each in closing)
        gate.opened.set()
        for each in closing:
            each.result(60)
    lane.ready()
    lane.after(0.0)
    time.sleep(0.05)
    assert gate.runs == 1


def test_a_lane_that_waits_for_a_thread_is_closed_at_once() -> None:
    of, runs = scheduler(serve=1), list[int]()
    _, gate = held(of)
    waiting, other = of.lane(SERVE, "t", lambda: runs.append(1)), threading.Event()
    waiting.ready()
    close(waiting)
    of.lane(SERVE, "t", other.set).ready()
    gate.opened.set()
    assert other.wait(60)
    assert runs == []


def test_a_task_may_end_its_lane() -> None:
    def task() -> None:
        lane.end()

    lane = scheduler().lane(SERVE, "t", task)
    lane.ready()
    lane.wait()
    assert not lane.running


def test_the_process_has_one_scheduler_whose_maxima_fit_together() -> None:
    assert lanes.SCHEDULER.calls.threads <= MOST
    assert max(CAPS.values()) < MOST < sum(CAPS.values())
