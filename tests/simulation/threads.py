"""Replace threads, locks and futures of real code by actors of the simulation.

Inside `simulated_threads` the modules of memwal use these in place of the standard library's. A thread is an actor of
the process that starts it. A wait, for a lock, an event or a future, lets other actors run, as a call of the storage
does. Between two waits a thread is not interrupted.

Modules that compute in their own threads and wait for them inside one call are not changed: pylance's and those of
`flush/sst`. No decision there depends on the order of threads.
"""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace, TracebackType
from typing import Any, Self
from unittest.mock import patch

import greenlet

import memwal.ingest.engine.read.sst_cache
import memwal.ingest.threads
from tests.simulation.coverage import parts_here, run_within
from tests.simulation.scheduler import Actor, Killed, Scheduler

_FOR_EVER = float("inf")
_TICK = 1e-6
"""Minimum duration of a wait in seconds, since a slower clock may have a moment left."""
_ALONE = ("memwal.flush.sst.", "memwal.flush.base.", "memwal.wal.store.", "memwal.flush.commits.", "memwal.memtable")


class Parking:
    """Actors that wait until they are woken. Fair: first come, first woken."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: deque[Actor] = deque()

    def wait(self, until: float) -> bool:
        """Wait until woken (return True) or until the moment `until` (return False). Raises: Killed."""
        actor = self._scheduler.current
        assert actor is not None, "somebody waits while everything stands still"
        if self._scheduler.elapsed >= until - _TICK:
            self._scheduler.pause(_TICK)
            return False
        self._waiting.append(actor)
        try:
            self._scheduler.pause(until - self._scheduler.elapsed)
        finally:
            woken = actor not in self._waiting
            if not woken:
                self._waiting.remove(actor)
        return woken

    def wake(self, most: int = sys.maxsize) -> None:
        """Wake the first `most` actors."""
        while self._waiting and most > 0:
            self._scheduler.wake(self._waiting.popleft())
            most -= 1


class Lock:
    """A simulated `threading.Lock`."""

    def __init__(self) -> None:
        self.held = False
        self._parking = Parking(_present())

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self.held:
            self.held = True
            return True
        if not blocking:
            return False
        until = _FOR_EVER if timeout < 0 else _present().elapsed + timeout
        while self.held:
            if not self._parking.wait(until) and self.held:
                return False
        self.held = True
        return True

    def release(self) -> None:
        self.held = False
        self._parking.wake(1)

    def locked(self) -> bool:
        return self.held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A simulated `threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: greenlet.greenlet | None = None
        self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = greenlet.getcurrent()
        if self.owner is not me:
            if not super().acquire(blocking, timeout):
                return False
            self.owner = me
        self.depth += 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.owner = None
            super().release()


class Condition:
    """A simulated `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._parking = Parking(_present())

    def wait(self, timeout: float | None = None) -> bool:
        depth = self._lock.depth if isinstance(self._lock, RLock) else 1
        for _ in range(depth):
            self._lock.release()
        try:
            return self._parking.wait(_FOR_EVER if timeout is None else _present().elapsed + timeout)
        finally:
            for _ in range(depth):
                self._again()

    def _again(self) -> None:
        """Acquire the lock again. A killed thread cannot wait for it, and takes it, since its state is not used any
        more."""
        try:
            self._lock.acquire()
        except Killed:
            self._lock.held = True
            if isinstance(self._lock, RLock):
                self._lock.owner, self._lock.depth = greenlet.getcurrent(), self._lock.depth + 1

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = _FOR_EVER if timeout is None else _present().elapsed + timeout
        while not (found := predicate()):
            if _present().elapsed >= until:
                return found
            self.wait(None if until == _FOR_EVER else until - _present().elapsed)
        return found

    def notify(self, n: int = 1) -> None:
        self._parking.wake(n)

    def notify_all(self) -> None:
        self._parking.wake()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    """A simulated `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._parking = Parking(_present())

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._parking.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = _FOR_EVER if timeout is None else _present().elapsed + timeout
        while not self._set and self._parking.wait(until):
            pass
        return self._set


class SimpleQueue:
    """A simulated `queue.SimpleQueue`."""

    __class_getitem__ = classmethod(lambda cls, _: cls)

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._parking = Parking(_present())

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._parking.wake(1)

    def get(self, timeout: float | None = None) -> Any:
        until = _FOR_EVER if timeout is None else _present().elapsed + timeout
        while not self._items:
            if not self._parking.wait(until) and not self._items:
                raise queue.Empty
        return self._items.popleft()


class Semaphore:
    """A simulated `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._left = value
        self._parking = Parking(_present())

    def __enter__(self) -> None:
        while not self._left:
            self._parking.wait(_FOR_EVER)
        self._left -= 1

    def __exit__(self, *_: object) -> None:
        self._left += 1
        self._parking.wake(1)


class Thread:
    """A simulated `threading.Thread`: an actor of the process that starts it."""

    def __init__(self, target: Callable[..., Any], name: str = "", args: tuple[Any, ...] = (), daemon: bool = False):
        del daemon
        self._work, self.name = lambda: target(*args), name
        self._actor: Actor | None = None
        self._ended = Event()

    def start(self) -> None:
        """Let the thread run when its turn comes."""
        scheduler = _present()
        by = scheduler.current
        assert by is not None, "a thread is started while everything stands still"
        self._actor = scheduler.spawn(f"{by.host.name}/{self.name}", self._run, by.host, background=True)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._ended.is_set()


class Future(concurrent.futures.Future[Any]):
    """A simulated `concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._condition = Condition()  # type: ignore[assignment]
        self._state = concurrent.futures._base.PENDING
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Any], object]] = []


class Pool:
    """A simulated `concurrent.futures.ThreadPoolExecutor`; its threads end when they are idle."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "pool", **_: Any) -> None:
        self._most, self._name = max_workers, thread_name_prefix
        self._jobs: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._running = 0
        self._idle = Event()

    def submit(self, work: Callable[..., Any], /, *args: Any, **rest: Any) -> Future:
        job = Future()
        parts = parts_here()
        self._jobs.append((job, lambda: run_within(parts, lambda: work(*args, **rest))))
        if _present().current is None:
            self._work()
        elif self._running < self._most:
            self._running += 1
            self._idle.clear()
            Thread(self._run, self._name).start()
        return job

    def map(self, work: Callable[..., Any], *items: Iterable[Any]) -> Iterator[Any]:
        jobs = [self.submit(work, *each) for each in zip(*items, strict=False)]
        return (job.result() for job in jobs)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _work(self) -> None:
        while self._jobs:
            job, work = self._jobs.popleft()
            if not job.set_running_or_notify_cancel():
                continue
            try:
                answer = work()
            except BaseException as error:
                job.set_exception(error)
                if isinstance(error, Killed):
                    raise
            else:
                job.set_result(answer)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            while self._jobs:
                self._jobs.popleft()[0].cancel()
        while wait and self._running:
            self._idle.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()


def wait_all(jobs: Iterable[Future], timeout: float | None = None) -> Any:
    """Do the same as `concurrent.futures.wait`."""
    jobs, until = list(jobs), _FOR_EVER if timeout is None else _present().elapsed + timeout
    for job in jobs:
        with suppress(Exception):
            job.exception(None if until == _FOR_EVER else max(0.0, until - _present().elapsed))
    done = {job for job in jobs if job.done()}
    return SimpleNamespace(done=done, not_done=set(jobs) - done)


def as_completed(jobs: Iterable[Future]) -> Iterator[Future]:
    """Do the same as `concurrent.futures.as_completed`."""
    left, ended = list(jobs), Event()
    for job in left:
        job.add_done_callback(lambda _: ended.set())
    while left:
        ended.wait()
        ended.clear()
        for job in [job for job in left if job.done()]:
            left.remove(job)
            yield job


_SCHEDULERS: list[Scheduler] = []


def _present() -> Scheduler:
    return _SCHEDULERS[-1]


_THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    Thread=Thread,
    TIMEOUT_MAX=threading.TIMEOUT_MAX,
    get_ident=lambda: id(greenlet.getcurrent()),
    local=threading.local,
    current_thread=threading.current_thread,
    main_thread=threading.main_thread,
)
_REPLACED = {
    "threading": (threading, _THREADING),
    "Lock": (threading.Lock, Lock),
    "ThreadPoolExecutor": (concurrent.futures.ThreadPoolExecutor, Pool),
    "SimpleQueue": (queue.SimpleQueue, SimpleQueue),
    "Future": (concurrent.futures.Future, Future),
    "wait": (concurrent.futures.wait, wait_all),
    "as_completed": (concurrent.futures.as_completed, as_completed),
}


class _NoThreads:
    """The threads of side tasks: none is free, so the caller does the work."""

    def submit(self, _: Callable[[], Any]) -> Any:
        """Raises: RuntimeError."""
        raise RuntimeError("no thread is free")


@contextmanager
def simulated_threads(scheduler: Scheduler) -> Iterator[None]:
    """Replace the threads, locks and futures of memwal's modules by actors of `scheduler` inside the context."""
    _SCHEDULERS.append(scheduler)
    try:
        with ExitStack() as patches:
            for name, module in list(sys.modules.items()):
                if not name.startswith("memwal.") or name.startswith(_ALONE):
                    continue
                for attribute, (real, ours) in _REPLACED.items():
                    if vars(module).get(attribute) is real:
                        patches.enter_context(patch.object(module, attribute, ours))
            patches.enter_context(patch.object(memwal.ingest.threads, "_side_threads", _NoThreads()))
            kept = memwal.ingest.engine.read.sst_cache._Kept  # the class creates its default future
            patches.enter_context(
                patch.object(memwal.ingest.engine.read.sst_cache, "_Kept", lambda columns: kept(columns, Future()))
            )
            yield
    finally:
        _SCHEDULERS.pop()


__all__ = ["Event", "Future", "Lock", "Thread", "simulated_threads"]
