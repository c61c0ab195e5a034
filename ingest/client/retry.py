"""Decide whether a call to the owners of regions is made again, as a pure function, and pause between attempts.

==================  ==========================================================  =========================
the error           what it means                                               what to do
==================  ==========================================================  =========================
flush_failing       the owner's memtables are full, and its flushes fail        raise; the sink waits
busy                the owner's back-pressure, or too many calls at it; nothing wait, ask it again
                    was applied; "retry_after" says how long to wait at least
moved               the region has another, known owner; the token settles it   ask that one
not_owner           another or no daemon has the region; nothing applied        learn who owns it
draining, FENCED    the owner ends, or was replaced; nothing was applied        learn who owns it
lost, UNAVAILABLE   no answer to a call that applied nothing, or storage fails  learn who owns it
UNKNOWN_OUTCOME     rows may be applied: only their token settles it            learn, if it has a token
resized             the table has other regions; nothing was applied            raise: open it again
any other           another attempt would get the same answer                   raise
==================  ==========================================================  =========================

A read is not sent to a third daemon after two have ended while they answered it: it may be what ended them. If the
process that the client knew still answers at its endpoint, only the connection was lost (`Router`).

If the table has a single daemon, nobody else takes its regions over. Then a call waits only for what passes by itself:
`busy`, and `not_owner` while its regions are being claimed. With `restarts` (the sink knows that the daemon is
restarted when it ends) it also waits for a restart, for a while; but not after a fence, since a newer writer then has
the regions.

A call to a daemon that stands still (it was stopped, its machine froze) is abandoned when its region has a new owner.
The client cannot see that a daemon stands still: the kernel still takes bytes for it, and no answer comes, as from a
busy one. But the other daemons notice, and claim its regions (`ingest.daemon.placement`). So a client whose call takes
long asks them several times a second whether they have the region. The epoch makes it safe to believe them: from their
claim on the older owner's appends are refused, and rows that it took before are recognised by their token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Literal, TypeVar

from memwal.ingest.caller import carried, expect_waiting, present
from memwal.ingest.errors import (
    BUSY,
    FLUSH_FAILING,
    MOVED,
    NOT_OWNER,
    RESIZED,
    FencedError,
    Internal,
    MemWalError,
    Unavailable,
    UnknownOutcome,
)
from memwal.ingest.threads import Worker
from memwal.wal import Clock, Ids
from memwal.wal.retries import Backoff

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.2
"""Pauses in seconds, doubling. A planned hand-over takes tens of milliseconds, a take-over a second or two."""
FIRST_PATIENCE = 30.0
"""Seconds that the first attempt may take if another daemon may take the region over, doubling. This limit matters only
if the machine vanished or sleeps, and no other daemon claims the region before."""

ENDED_MAX = 2
"""Daemons that may end while they answer one read."""

Verdict = Literal["raise", "wait", "learn"]


def verdict(error: MemWalError, *, repeatable: bool, alone: bool) -> Verdict:
    """Return what to do after `error`. `repeatable`: a read, or rows with a token; `alone`: no other daemon is
    known.
    """
    reason = error.details.get("reason")
    if reason == MOVED and repeatable:
        return "wait"
    if isinstance(error, Unavailable) and reason in (BUSY, NOT_OWNER):
        return "wait" if reason == BUSY else "learn"
    if reason in (RESIZED, FLUSH_FAILING) or alone or not isinstance(error, Unavailable | FencedError | UnknownOutcome):
        return "raise"
    return "raise" if isinstance(error, UnknownOutcome) and not repeatable else "learn"


class Attempts:
    """The attempts at one call, until its deadline.

    Thread safety. One thread.
    Invariants. No attempt begins after the deadline; two attempts always have a pause between them.
    """

    def __init__(
        self, clock: Clock, ids: Ids, seconds: float, *, repeatable: bool, restarts: float = 0.0, reads: bool = False
    ) -> None:
        """The deadline is `seconds` from now. `ids`: the source of the pauses' jitter, without which clients that were
        refused together would come back together. `restarts`: seconds from the first failure in which a single daemon
        may be restarted, and is waited for. `reads`: the call is a read.
        """
        self._reads, self._ended = reads, list[str]()
        self._clock, self._repeatable = clock, repeatable
        self._until = clock.monotonic() + seconds
        self._restarts, self._failing_since = restarts, float("inf")
        self._backoff, self._patience = Backoff(FIRST_PAUSE, LONGEST_PAUSE, ids), FIRST_PATIENCE

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 past it."""
        return max(0.0, self._until - self._clock.monotonic())

    def patience(self, *, alone: bool) -> float:
        """Return the seconds that the next attempt may take."""
        return self.left if alone else min(self.left, self._patience)

    def after(self, error: MemWalError, *, alone: bool) -> bool:
        """Pause before the next attempt; return whether to learn the owners again. Raises: `error` if there is no
        next.
        """
        what = verdict(error, repeatable=self._repeatable, alone=alone and not self._comes_back(error))
        if self._restarts and error.details.get("reason") == FLUSH_FAILING:
            what = "wait"  # a stream waits for its storage
        pause = max(self._backoff.pause(), float(error.details.get("retry_after", 0.0)))
        caller = present()
        if what == "raise" or self.left <= pause or (caller is not None and caller.left):
            raise error
        self._clock.sleep(pause)
        self._patience *= 2
        return what == "learn"

    def ended(self, daemons: Sequence[str], error: MemWalError) -> None:
        """Note daemons that ended while they answered. Raises: Internal if a read has ended two."""
        self._ended += daemons
        if self._reads and len(self._ended) >= ENDED_MAX:
            raise Internal(
                f"{len(self._ended)} daemons ended while they answered this read ({', '.join(self._ended)}); it is not "
                "sent again: see their logs, report it, and ask for less",
                {"ended": self._ended},
            ) from error

    def _comes_back(self, error: MemWalError) -> bool:
        """Return whether a single daemon may still be restarted after `error`."""
        now = self._clock.monotonic()
        self._failing_since = min(self._failing_since, now)
        return not isinstance(error, FencedError) and now - self._failing_since < self._restarts


T = TypeVar("T")

LOOK_AFTER, LOOK_EVERY = 0.5, 0.25
"""Seconds after which a call counts as long, and between two looks then."""


def abandon_if_moved(moved: Callable[[], bool], call: Callable[[], T]) -> T:
    """Return or raise what `call` does, as `wait_unless_moved`."""
    return wait_unless_moved(start(call), moved)


def start(call: Callable[[], T]) -> Future[T]:
    """Start `call` in a thread of its own."""
    done: Future[T] = Future()
    Worker("call", partial(_settle, done, carried(call)))
    return done


def wait_unless_moved(done: Future[T], moved: Callable[[], bool], grace: float = 0.0) -> T:
    """Return or raise the result of `done`; if it takes long and `moved` is true, raise UnknownOutcome ("moved").

    `grace`: seconds to wait after that for the answer of a daemon that lives.
    An abandoned call goes on until its own deadline, and its result is dropped.
    """
    patience = LOOK_AFTER
    while not wait([done], patience).done:
        patience = LOOK_EVERY
        expect_waiting()
        if moved() and not wait([done], grace).done:
            raise UnknownOutcome("the region has another owner by now; retry with the same token", {"reason": MOVED})
    return done.result()


def _settle(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
        done.set_exception(error)
