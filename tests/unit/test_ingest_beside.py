"""Work beside a read: by a thread where one is free, else by the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from memwal.ingest.caller import Caller, present
from memwal.ingest.errors import Unavailable
from memwal.ingest.read import beside as module
from memwal.ingest.read.beside import beside
from memwal.ingest.threads import CallThreads


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = CallThreads("beside", 1)
    monkeypatch.setattr(module, "_THREADS", threads)
    yield
    threads.close()


@pytest.mark.usefixtures("one_thread")
def test_a_thread_begins_at_once_and_the_caller_gets_its_result() -> None:
    begun = threading.Event()

    def work() -> str:
        begun.set()
        return threading.current_thread().name

    result = beside(work)
    assert begun.wait(10)
    assert result() == "beside"


@pytest.mark.usefixtures("one_thread")
def test_what_no_thread_has_begun_the_caller_does() -> None:
    gate, held = threading.Event(), threading.Event()

    def blocked() -> None:
        held.set()
        gate.wait(10)

    first = beside(blocked)
    assert held.wait(10)
    second = beside(lambda: threading.current_thread().name)
    assert second() == threading.current_thread().name
    gate.set()
    first()


@pytest.mark.usefixtures("one_thread")
def test_its_error_is_raised_where_the_result_is_wanted() -> None:
    def fails() -> None:
        raise Unavailable("storage is away")

    with pytest.raises(Unavailable, match="storage is away"):
        beside(fails)()


@pytest.mark.usefixtures("one_thread")
def test_the_thread_works_for_the_same_caller() -> None:
    caller = Caller()

    def asked() -> Caller | None:
        begun = threading.Event()
        result = beside(lambda: (begun.set(), present())[1])
        assert begun.wait(10)
        return result()

    assert caller.run(asked) is caller
    assert asked() is None
