"""The threads in which the calls of an asynchronous table are made, and how a coroutine awaits one."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from memwal.ingest.caller import Caller

T = TypeVar("T")

_IDLE = 5.0
"""Seconds after which a thread without calls ends."""


class CallThreads:
    """At most so many daemon threads, which make calls in the order in which these were submitted.

    Why not `ThreadPoolExecutor`: Python joins its threads at exit, and so would wait for a daemon that does not answer.
    Thread safety. Any thread. Invariants. No call begins after `close`.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._changed = threading.Condition()
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` made; `cancel` of the result takes it back if it has not begun."""
        job: Future[T] = Future()
        with self._changed:
            if self._closed:
                job.cancel()
                return job
            self._queue.append((job, call))
            if self._idle >= len(self._queue):
                self._changed.notify()
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return job

    def close(self) -> None:
        """Cancel the calls that have not begun; threads end after those that have."""
        with self._changed:
            self._closed, waiting = True, list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for job, _ in waiting:
            job.cancel()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            job, call = task
            if job.set_running_or_notify_cancel():
                _settle(job, call)
            del task, job, call  # an idle thread would hold the last answer, and with a stream its moment

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Return the next call; None if this thread is to end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed, _IDLE)
            self._idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._threads -= 1
            return None


def _settle(job: Future[T], call: Callable[[], T]) -> None:
    try:
        answer = call()
    except BaseException as error:  # noqa: BLE001 - raised by the await
        job.set_exception(error)
    else:
        job.set_result(answer)


async def answer_of(job: Future[T], caller: Caller) -> T:
    """Return what `job` returns, or raise its error. If this is cancelled, `caller` leaves, the call does not begin if
    it has not, and an answer that comes all the same is closed.

    Works in any event loop. Raises: asyncio.CancelledError; concurrent.futures.CancelledError if the threads closed.
    """
    loop = asyncio.get_running_loop()
    settled = loop.create_future()
    job.add_done_callback(lambda _: _tell(loop, settled))
    try:
        await settled
    except BaseException:  # cancelled, or the coroutine was closed because its loop has ended
        caller.leave()
        if not job.cancel():
            job.add_done_callback(_dropped)
        raise
    return job.result()


def _tell(loop: asyncio.AbstractEventLoop, settled: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop was closed: nobody waits
        loop.call_soon_threadsafe(partial(_wake, settled))


def _wake(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def _dropped(job: Future[Any]) -> None:
    """Close an answer that nobody takes: a stream holds its moment, a table connections."""
    if not job.cancelled() and job.exception() is None:
        close = getattr(job.result(), "close", None)
        if close is not None:
            close()
