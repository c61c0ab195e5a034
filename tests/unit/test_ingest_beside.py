"""Work beside a read: in another thread if one is free, otherwise in the caller's thread."""

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
def test_its_error_is_raised_where_the_result_is_wanted() -> None:
    def fails() -> None:
        raise Unavailable("storage is away")

    with raises(Unavailable):
        SideTask(fails).result()


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
