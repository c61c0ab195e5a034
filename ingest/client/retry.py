"""When a call to the owners of regions is made again: a pure decision, and the pauses between the attempts.

==================  ==========================================================  =========================
what was met        what it means                                               what is done
==================  ==========================================================  =========================
busy                the owner's back-pressure; nothing was applied              wait, ask the same again
moved               it has another owner, who is known; its token settles it    ask that one
not_owner           the region is elsewhere, or nowhere yet; nothing applied    learn who owns it
draining, FENCED    the owner lets go, or was replaced; nothing was applied     learn who owns it
lost, UNAVAILABLE   no answer to a call that applied nothing, or storage fails  learn who owns it
UNKNOWN_OUTCOME     rows may be applied: only their token settles it            learn, if there is a token
resized             the table has other regions; nothing was applied            raise: open it again
any other           the same answer would come again                            raise
==================  ==========================================================  =========================

A daemon that is alone has nobody to take its regions over. There only what passes by itself is waited for: `busy`, and
`not_owner` while its regions are being claimed. Who knows that somebody starts it again when it ends (the sink does)
waits for that too, for a while; but not where it was fenced: then a newer writer has its regions, and keeps them.

A call to a daemon that stands still (it was stopped, its machine froze) is given up when its region has a new owner.

Nothing tells a client that a daemon stands still: its kernel takes bytes for it, and no answer comes, as from a busy
one. But the other daemons notice by themselves, and claim its regions (`ingest.daemon.placement`). So a client whose
call takes long asks them, every now and then, whether they have the region by now. The epoch makes it safe to believe
them: the older owner's appends are refused from their claim on, and rows that it had taken before are known by their
token.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Literal, TypeVar

from memwal.ingest.errors import BUSY, MOVED, NOT_OWNER, RESIZED, FencedError, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.threads import Worker
from memwal.wal import Clock, Ids

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.2
"""Seconds, doubling. A planned hand-over takes tens of milliseconds, a take-over a second or two."""
FIRST_PATIENCE = 30.0
"""Seconds that the first attempt may take where another daemon may take the region over, doubling: only a machine that
vanished without a word, or sleeps, is given up by this, if not by `ingest.client.retry` before."""

Verdict = Literal["raise", "wait", "learn"]


def verdict(error: MemWalError, *, repeatable: bool, alone: bool) -> Verdict:
    """What to do after `error`. `repeatable`: a read, or rows with a token; `alone`: no other daemon is known."""
    reason = error.details.get("reason")
    if reason == MOVED and repeatable:
        return "wait"
    if isinstance(error, Unavailable) and reason in (BUSY, NOT_OWNER):
        return "wait" if reason == BUSY else "learn"
    if reason == RESIZED or alone or not isinstance(error, Unavailable | FencedError | UnknownOutcome):
        return "raise"
    return "raise" if isinstance(error, UnknownOutcome) and not repeatable else "learn"


class Attempts:
    """The attempts at one call, until its deadline.

    Thread safety. One thread.
    Invariants. No attempt begins after the deadline; between two attempts there is always a pause.
    """

    def __init__(self, clock: Clock, ids: Ids, seconds: float, *, repeatable: bool, restarts: float = 0.0) -> None:
        """Begin now. `ids`: the source of the pauses' jitter, without which clients that were refused together would
        come back together. `restarts`: seconds, from the first failure on, for which a daemon that is alone is waited
        for, since somebody starts it again.
        """
        self._clock, self._ids, self._repeatable = clock, ids, repeatable
        self._until = clock.monotonic() + seconds
        self._restarts, self._failing_since = restarts, float("inf")
        self._pause, self._patience = FIRST_PAUSE, FIRST_PATIENCE

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 past it."""
        return max(0.0, self._until - self._clock.monotonic())

    def patience(self, *, alone: bool) -> float:
        """Seconds that the next attempt may take."""
        return self.left if alone else min(self.left, self._patience)

    def after(self, error: MemWalError, *, alone: bool) -> bool:
        """Pause before the next attempt; whether to learn anew who owns what. Raises: `error` if there is no next."""
        what = verdict(error, repeatable=self._repeatable, alone=alone and not self._comes_back(error))
        share = 0.5 + int(self._ids.token(), 16) / 2**33
        pause = self._pause * share
        if what == "raise" or self.left <= pause:
            raise error
        self._clock.sleep(pause)
        self._pause, self._patience = min(2 * self._pause, LONGEST_PAUSE), 2 * self._patience
        return what == "learn"

    def _comes_back(self, error: MemWalError) -> bool:
        """Whether a daemon that is alone may be waited for after `error`."""
        now = self._clock.monotonic()
        self._failing_since = min(self._failing_since, now)
        return not isinstance(error, FencedError) and now - self._failing_since < self._restarts


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
