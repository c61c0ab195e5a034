"""A call to a daemon that stands still (it was stopped, its machine froze) is given up when its region has a new owner.

Nothing tells a client that a daemon stands still: its kernel takes bytes for it, and no answer comes, as from a busy
one. But the other daemons notice by themselves, and claim its regions (`ingest.placement`). So a client whose call
takes long asks them, every now and then, whether they have the region by now. The epoch makes it safe to believe them:
the older owner's appends are refused from their claim on, and rows that it had taken before are known by their token.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from ingest.errors import UnknownOutcome
from ingest.flight_wire import MOVED
from ingest.worker import Worker

T = TypeVar("T")

LOOK_AFTER, LOOK_EVERY = 0.5, 0.25
"""Seconds after which a call counts as long, and between two looks then."""


def given_up_when(moved: Callable[[], bool], call: Callable[[], T]) -> T:
    """What `call` returns or raises, as `awaited`."""
    return awaited(begun(call), moved)


def begun(call: Callable[[], T]) -> Future[T]:
    """What `call` will return or raise, in a thread of its own."""
    done: Future[T] = Future()
    Worker("call", partial(_settle, done, call))
    return done


def awaited(done: Future[T], moved: Callable[[], bool], grace: float = 0.0) -> T:
    """What `done` returns or raises; where it takes long, and `moved` says so, UnknownOutcome with the reason "moved".

    `grace`: seconds more, for a daemon that lives: what it was asked for is done or refused by then.
    The call goes on, until its own deadline: nobody waits for it.
    """
    patience = LOOK_AFTER
    while not wait([done], patience).done:
        patience = LOOK_EVERY
        if moved() and not wait([done], grace).done:
            raise UnknownOutcome("the region has another owner by now; retry with the same token", {"reason": MOVED})
    return done.result()


def _settle(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        done.set_exception(error)
