"""Await, in a coroutine, a call that runs in a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from memwal.ingest.caller import Caller

T = TypeVar("T")


async def answer_of(job: Future[T], caller: Caller) -> T:
    """Return the result of `job`, or raise its error.

    If this coroutine is cancelled, `caller` leaves, a call that has not begun is cancelled, and a result that still
    arrives is closed. Works in any event loop.
    Raises: asyncio.CancelledError; concurrent.futures.CancelledError if the threads were closed.
    """
    loop = asyncio.get_running_loop()
    settled = loop.create_future()
    job.add_done_callback(lambda _: _tell(loop, settled))
    try:
        await settled
    except BaseException:  # cancelled, or closed with its event loop
        caller.leave()
        if not job.cancel():
            job.add_done_callback(_dropped)
        raise
    return job.result()


def _tell(loop: asyncio.AbstractEventLoop, settled: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop was closed: no task waits
        loop.call_soon_threadsafe(partial(_wake, settled))


def _wake(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def _dropped(job: Future[Any]) -> None:
    """Close an unused result: a stream holds a snapshot, a table holds connections."""
    if not job.cancelled() and job.exception() is None:
        close = getattr(job.result(), "close", None)
        if close is not None:
            close()
