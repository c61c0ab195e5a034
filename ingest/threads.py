"""Background threads (`Worker`, `Periodic`), threads that execute calls and side tasks, and events set by signals.

The wait for a `Worker` may be interrupted and repeated. `threading.Thread.join` does not support this: in CPython up
to 3.12 an interrupt inside it marks the running thread as ended, and the next `join` returns at once. A program
interrupted while it closes would then end in the middle of an append.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TextIO, TypeVar

from memwal.ingest.caller import carried
from memwal.ingest.errors import classify
from memwal.ingest.log_limit import EVERY

T = TypeVar("T")

_LOG = logging.getLogger("memwal.periodic")
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_IDLE = 5.0
"""Seconds after which an idle thread ends."""


class Periodic:
    """Runs `work` every `interval` seconds, in its own thread, from `start` to `stop`.

    Thread safety. Any thread.
    Errors. Failed work is repeated after the interval. Consecutive failures are logged once a minute.
    """

    def __init__(self, name: str, work: Callable[[], object], interval: float) -> None:
        """Prepare. `name`: of the thread and of the work in log lines. `interval`: 0 means never."""
        self._name, self._work, self._interval = name, work, interval
        self._stopped = threading.Event()
        self._failures, self._logged_each = 0, max(1, round(EVERY / interval)) if interval > 0 else 1
        self._worker: Worker | None = None

    def start(self) -> None:
        """Start the thread, which runs the work for the first time after one interval."""
        if self._interval > 0:
            self._worker = Worker(self._name, self._run)

    def stop(self) -> None:
        """End the thread after work in progress."""
        self._stopped.set()
        if self._worker is not None:
            self._worker.wait()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._work()
                self._failures = 0
            except BaseException as error:  # noqa: BLE001 - an exception would end the thread silently
                # A panic in pylance's Rust code is only a BaseException; no other direct BaseException reaches this
                # thread.
                if self._failures % self._logged_each == 0:
                    _LOG.warning("%s failed, retrying in %g s: %s", self._name, self._interval, classify(error))
                self._failures += 1


class Worker:
    """Runs `work` once, in a daemon thread that starts with the construction.

    Thread safety. Any thread.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the work has ended. The wait may be interrupted and repeated."""
        self._ended.wait()
        self._thread.join()  # returns at once: the work is done

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()


_Call = tuple[Callable[[], object], Future[Any] | None]


class CallThreads:
    """A limited number of daemon threads that execute calls in order, the last idle one first, so that few stay.

    `ThreadPoolExecutor` is not used because Python joins its threads at exit, and would wait for a daemon that hangs.
    Thread safety. Any thread.
    Invariants. No call begins after `close`.
    """

    def __init__(self, name: str, most: int, keep: int = 0) -> None:
        """`keep`: the number of threads that do not end when they are idle."""
        self._name, self._most, self._keep = name, most, keep
        self._lock = threading.Lock()
        self._queue: deque[_Call] = deque()
        self.idle: list[SimpleQueue[_Call | None]] = []
        self.threads = 0
        """The number of threads; those that wait for a call are in `idle`."""
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Submit `call`. Cancelling the returned future prevents it from starting.

        Raises: RuntimeError if no thread exists and none can be started.
        """
        job: Future[T] = Future()
        if not self.run(partial(_settle, job, call), job):
            job.cancel()
        return job

    def run(self, call: Callable[[], object], job: Future[Any] | None = None) -> bool:
        """Submit `call`, which raises nothing; return False after `close`. `job`: its future. Raises: as `submit`."""
        with self._lock:
            if self.idle and not self._closed:
                self.idle.pop().put((call, job))
            elif not self._closed:
                self._queue.append((call, job))
                if self.threads < self._most:
                    self._start()
            return not self._closed

    def take_back(self, job: Future[Any]) -> bool:
        """Cancel `job` and remove it from the queue; return whether it had not begun."""
        with self._lock:
            if not job.cancel():
                return False
            self._queue = deque(task for task in self._queue if task[1] is not job)
            return True

    def close(self) -> None:
        """Cancel the calls that have not begun. Threads end after the running calls."""
        with self._lock:
            self._closed, waiting, idle = True, list(self._queue), list(self.idle)
            self._queue.clear()
            self.idle.clear()
            self.threads -= len(idle)
        for inbox in idle:
            inbox.put(None)
        for _, job in waiting:
            if job is not None:
                job.cancel()

    def _start(self) -> None:
        """Start a thread, which waits until the caller releases the lock."""
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:
            if not self.threads:
                self._queue.pop()
                raise
        else:
            self.threads += 1

    def _work(self) -> None:
        inbox: SimpleQueue[_Call | None] = SimpleQueue()
        while (task := self._next(inbox)) is not None:
            task[0]()
            del task  # an idle thread would hold the last answer, and with a stream its snapshot

    def _next(self, inbox: SimpleQueue[_Call | None]) -> _Call | None:
        """Return the next call; None if this thread must end."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            if self._closed:
                self.threads -= 1
                return None
            self.idle.append(inbox)
        while True:
            try:
                return inbox.get(timeout=_IDLE)
            except Empty:
                with self._lock:
                    if inbox in self.idle and self.threads > self._keep:
                        self.idle.remove(inbox)
                        self.threads -= 1
                        return None


def start(name: str, call: Callable[[], T]) -> Future[T]:
    """Start `call` in a new daemon thread, which no pool can delay; return its result."""
    job: Future[T] = Future()
    threading.Thread(target=_settle, args=(job, call), name=name, daemon=True).start()
    return job


_side_threads = CallThreads("beside", os.cpu_count() or 1)
# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=partial(CallThreads.__init__, _side_threads, "beside", os.cpu_count() or 1))


class SideTask(Generic[T]):
    """One piece of work that a thread starts as soon as one is free, such as the search of the base table in a read.

    Lance, faiss and tantivy release Python's lock, so the caller and the thread run at once if there are cores. The
    caller never waits for a thread: if none has started the work when its result is needed, the caller does the work.
    Thread safety. One thread. Invariants. After `result` or `end` has returned, no part of the work runs any more: if
    the program ended in the middle of a search, Lance would abort the process.
    """

    def __init__(self, work: Callable[[], T], *, alone: bool = False) -> None:
        """`alone`: the caller has no other work in the meantime, so `result` does this work."""
        self._work = work
        self._job: Future[T] | None = None
        if not alone:
            with suppress(RuntimeError):  # no thread can be started
                self._job = _side_threads.submit(carried(work))

    def result(self) -> T:
        """Return the result of the work, or raise its error. Call it once."""
        job = self._job
        try:
            if job is None or _side_threads.take_back(job):
                return self._work()
            return job.result()
        finally:
            del job  # an error refers to this frame and would keep alive what the work refers to

    def end(self) -> None:
        """Cancel the work; if it has started, wait until it has ended. Its result or error is dropped."""
        if self._job is not None and not _side_threads.take_back(self._job):
            wait([self._job])
        self._job = None


def _settle(job: Future[T], call: Callable[[], T]) -> None:
    if not job.set_running_or_notify_cancel():
        return
    try:
        answer = call()
    except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
        job.set_exception(error)
    else:
        job.set_result(answer)
    finally:
        del job, call  # an error holds this frame, and so every object of the call


def stop_event(lifeline: TextIO | None) -> threading.Event:
    """Return an event that SIGTERM, SIGINT and the end of `lifeline` (a pipe from the parent process) set."""
    stop = threading.Event()
    _set_by_signals(stop)
    if lifeline is not None:
        threading.Thread(target=_watch, args=(lifeline, stop), name="lifeline", daemon=True).start()
    return stop


def _watch(lifeline: TextIO, stop: threading.Event) -> None:
    while lifeline.readline():
        pass
    stop.set()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set inside the context, and restore the previous handlers after it.

    Outside the main thread, where Python permits no handlers, signals do not set it.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}
    told = _set_by_signals(stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        told.put(False)


def _set_by_signals(stop: threading.Event) -> SimpleQueue[bool]:
    """Let SIGINT and SIGTERM set `stop`, until False is put into the returned queue.

    A thread sets the event, because a handler interrupts the main thread at any point. If the main thread is inside
    `stop.wait`, it may hold the lock of `stop`, and `set` would deadlock. `SimpleQueue.put` is safe at any point.
    """
    told: SimpleQueue[bool] = SimpleQueue()

    def watch() -> None:
        while told.get():
            stop.set()

    threading.Thread(target=watch, name="signals", daemon=True).start()
    for number in _STOPPING:
        signal.signal(number, lambda *_: told.put(True))
    return told
