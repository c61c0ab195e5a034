"""Work in other threads: beside a read if a thread is free, and within limits of rows and steps."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from memwal.ingest import threads as module
from memwal.ingest.caller import Caller, present
from memwal.ingest.errors import Unavailable
from memwal.ingest.service.client.writes import InFlight
from memwal.ingest.spark.sink.send import OrderedPipeline
from memwal.ingest.threads import CallThreads, SideTask
from tests.messages import raises


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = CallThreads("beside", 1)
    monkeypatch.setattr(module, "_side_threads", threads)
    yield
    threads.close()


@pytest.mark.usefixtures("one_thread")
def test_a_thread_begins_at_once_and_the_caller_gets_its_result() -> None:
    begun = threading.Event()

    def work() -> str:
        begun.set()
        return threading.current_thread().name

    result = SideTask(work).result
    assert begun.wait(10)
    assert result() == "beside"


@pytest.mark.usefixtures("one_thread")
def test_what_no_thread_has_begun_the_caller_does() -> None:
    gate, held = threading.Event(), threading.Event()

    def blocked() -> None:
        held.set()
        gate.wait(10)

    first = SideTask(blocked)
    assert held.wait(10)
    second = SideTask(lambda: threading.current_thread().name)
    assert second.result() == threading.current_thread().name
    gate.set()
    first.result()


@pytest.mark.usefixtures("one_thread")
def test_the_thread_works_for_the_same_caller() -> None:
    caller = Caller()

    def asked() -> Caller | None:
        begun = threading.Event()
        result = SideTask(lambda: (begun.set(), present())[1]).result
        assert begun.wait(10)
        return result()

    assert caller.run(asked) is caller
    assert asked() is None


@pytest.mark.usefixtures("one_thread")
def test_after_the_end_nothing_of_the_work_runs() -> None:
    begun, done = threading.Event(), list[str]()

    def slow() -> None:
        begun.set()
        time.sleep(0.2)
        done.append("slow")

    first = SideTask(slow)
    assert begun.wait(10)
    second = SideTask(lambda: done.append("never begun"))
    second.end()
    first.end()
    assert done == ["slow"]


@pytest.mark.usefixtures("one_thread")
def test_where_no_thread_can_be_started_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[threading.Thread] = []

    def work() -> threading.Thread:
        workers.append(threading.current_thread())
        return workers[-1]

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(3):
            assert SideTask(work).result() is threading.current_thread()
    begun = threading.Event()
    result = SideTask(lambda: (begun.set(), threading.current_thread())[1]).result
    assert begun.wait(10)
    assert result() is not threading.current_thread()
    assert workers == [threading.current_thread()] * 3, "the new thread repeats nothing"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("in_a_thread", [True, False])
def test_an_error_holds_nothing_of_what_the_work_held(in_a_thread: bool) -> None:
    class View:
        """An object that a search holds."""

    view, begun = View(), threading.Event()
    held = weakref.ref(view)

    def fails(_: View) -> None:
        begun.set()
        raise Unavailable("storage is away")

    search = SideTask(partial(fails, view), alone=not in_a_thread)
    assert not in_a_thread or begun.wait(10)
    gc.disable()
    try:
        with pytest.raises(Unavailable):
            search.result()
        search.end()
        del view, search
        assert held() is None
    finally:
        gc.enable()


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert SideTask(lambda: 1).result() == 1
    code = (
        "import os, threading\n"
        "from memwal.ingest.threads import SideTask\n"
        "begun = threading.Event(); first = SideTask(begun.set); assert begun.wait(10); first.result()\n"
        "if os.fork() == 0:\n"
        "    begun = threading.Event(); work = SideTask(begun.set)\n"
        "    os._exit(0 if begun.wait(10) else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False).returncode == 0


def test_who_finds_no_room_waits_and_what_is_too_large_goes_alone() -> None:
    room = InFlight(100)
    with room.of(60, 1.0), room.of(40, 1.0), raises(Unavailable), room.of(1, 0.01):
        pass
    with room.of(1000, 1.0), pytest.raises(Unavailable), room.of(1, 0.01):
        pass
    entered = threading.Event()

    def enter() -> None:
        with room.of(70, 60.0):
            entered.set()

    with room.of(50, 1.0):
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.05)
    assert entered.wait(60)
    waiting.join()


def test_results_come_in_order_and_only_as_many_bytes_are_under_way_as_may_be() -> None:
    gates = [threading.Event() for _ in range(4)]
    results: list[int] = []

    def step(number: int) -> int:
        assert gates[number].wait(60)
        return number

    with OrderedPipeline[int](100) as pipelined:
        for number in (0, 1):
            results += pipelined.begin(lambda number=number: step(number), 50)
        assert results == []  # both are under way
        gates[1].set()
        gates[0].set()
        results += pipelined.begin(lambda: step(2), 60)
        assert results == [0, 1]  # step 2 had to wait until both had ended
        gates[2].set()
        gates[3].set()
        results += pipelined.begin(lambda: step(3), 1000)
        results += pipelined.rest()
    assert results == [0, 1, 2, 3]


def test_a_step_that_fails_is_told_when_its_turn_comes() -> None:
    def broken() -> int:
        raise Unavailable("no")

    with OrderedPipeline[int](100) as pipelined:
        assert list(pipelined.begin(broken, 10)) == []
        assert list(pipelined.begin(lambda: 1, 10)) == []
        with pytest.raises(Unavailable):
            list(pipelined.rest())
