"""One event loop on one thread, for an asynchronous client library below synchronous callers.

Clients of an object store keep connections open, and a connection belongs to the loop that opened it. Therefore the
process has one loop, on a daemon thread that starts on first use, and all clients run there. A forked child does not
have that thread and must not use its parent's connections: it drops the loop silently, and starts its own on first use.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Hashable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

from memwal.wal.errors import StoreUnavailable

T = TypeVar("T")

_CLOSING_SECONDS = 5.0


class EventLoop:
    """An asyncio loop on a daemon thread, and the contexts opened on it.

    Thread safety. Any thread but the loop's own, which would wait for itself.
    Invariants. A context that `opened` returned stays open until `close`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stack = AsyncExitStack()
        self._opened: dict[Hashable, Any] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="wal-store", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result; the caller waits.

        An interrupt cancels the work. Raises what `work` raises.
        """
        assert threading.current_thread() is not self._thread, "the loop's thread waits for itself"
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def opened(self, key: Hashable, open: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Return the context of `open`, entered once per `key` and left when the loop closes. Raises what entering
        raises.
        """
        if (known := self._opened.get(key)) is None:
            with self._lock:
                if (known := self._opened.get(key)) is None:
                    known = self._opened[key] = self.run(self._stack.enter_async_context(open()))
        found: T = known
        return found

    def close(self) -> None:
        """Leave the opened contexts and end the thread. Nothing may run on the loop afterwards."""
        try:
            asyncio.run_coroutine_threadsafe(self._stack.aclose(), self._loop).result(_CLOSING_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def abandon(self) -> None:
        """Drop the loop in a forked child: its thread is gone and its connections are the parent's.

        Neither may be used, and the garbage collector must not warn that they were not closed.
        """
        self._loop.set_exception_handler(lambda *_: None)


class _Process:
    """The loop of this process, if it has one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: EventLoop | None = None
        self.ended = False
        self.abandoned: list[EventLoop] = []


_PROCESS = _Process()


def event_loop() -> EventLoop:
    """Return the loop of this process, started by the first call. Raises StoreUnavailable while the program ends."""
    if (loop := _PROCESS.loop) is not None:
        return loop
    with _PROCESS.lock:
        if _PROCESS.ended:
            raise StoreUnavailable("the program is ending: storage takes no more requests")
        if _PROCESS.loop is None:
            _PROCESS.loop = EventLoop()
        return _PROCESS.loop


# Registered when this module is imported, before the modules that use a store at the end of the program: exit handlers
# run in reverse order.
@atexit.register
def _end() -> None:
    with _PROCESS.lock:
        _PROCESS.ended, loop, _PROCESS.loop = True, _PROCESS.loop, None
    if loop is not None:
        loop.close()


def _forked() -> None:
    _PROCESS.lock = threading.Lock()  # another thread of the parent may have held it
    if _PROCESS.loop is not None:
        _PROCESS.loop.abandon()
        _PROCESS.abandoned.append(_PROCESS.loop)  # kept: its collection would close the parent's connections
        _PROCESS.loop = None


os.register_at_fork(after_in_child=_forked)
