"""Decide, as a pure function, whether a failed call to the owners of regions is repeated; pause between attempts.

==================  ==========================================================  =========================
error               meaning                                                     action
==================  ==========================================================  =========================
flush_failing       the owner's memtables are full, and its flushes fail        raise; the sink waits
busy                back-pressure or a limit of the owner; nothing was applied; wait, ask it again
                    "retry_after": minimum wait
moved               the region has another, known owner; the token decides      ask that owner
not_owner           another or no daemon owns the region; nothing was applied   learn the owners
draining, FENCED    the owner stops, or was replaced; nothing was applied       learn the owners
lost, UNAVAILABLE   no answer to a call that applied nothing, or storage fails  learn the owners
UNKNOWN_OUTCOME     rows may be applied; only their token decides               learn, if it has a token
resized             the table has other regions; nothing was applied            raise: open it again
any other           another attempt would get the same answer                   raise
==================  ==========================================================  =========================

A read is not sent to a third daemon after two have ended while they answered it, because the read may be the cause.
If the process that the client knew still answers at its endpoint, only the connection was lost (`Router`).

If the table has a single daemon, no other daemon takes over its regions. Then a call waits only for temporary states:
`busy`, and `not_owner` while the regions are being claimed. With `restarts` (the sink knows that its daemon is
restarted) it also waits for a restart, for a limited time; but not after a fence, because a newer writer owns the
regions.

A call to a daemon that hangs (stopped process, frozen machine) is abandoned when its region has a new owner. The
client cannot detect a hanging daemon: the kernel still accepts bytes, and no answer arrives, as from a busy daemon.
The other daemons detect it and claim its regions (`daemon.placement`). Therefore a client asks them several
times a second during a long call whether they own the region. The epoch makes their answers safe: after their claim
the appends of the older owner are rejected, and the token identifies rows that it applied before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Literal, TypeVar

from memwal.ingest.caller import carried, expect_waiting, left
from memwal.ingest.errors import (
    BUSY,
    FLUSH_FAILING,
    MOVED,
    NOT_OWNER,
    PUT_RATE_MAX,
    RESIZED,
    FencedError,
    Internal,
    MemWalError,
    Unavailable,
    UnknownOutcome,
)
from memwal.ingest.threads import start
from memwal.wal import Clock, Ids
from memwal.wal.retries import Backoff

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.2
"""Pauses in seconds, doubling. A planned handover takes tens of milliseconds, a takeover one or two seconds."""
FIRST_PATIENCE = 30.0
"""Seconds for the first attempt if another daemon can take over the region; doubles with each attempt. The limit
matters only if the machine vanished or sleeps and no other daemon has claimed the region by then."""

ENDED_MAX = 2
"""Maximum daemons that may end while they answer one read."""

Verdict = Literal["raise", "wait", "learn"]


def verdict(error: MemWalError, *, repeatable: bool, alone: bool) -> Verdict:
    """Return the action after `error`. `repeatable`: a read, or rows with a token. `alone`: no other daemon is
    known."""
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
    Invariants. No attempt begins after the deadline; a pause separates every two attempts.
    """

    def __init__(
        self, clock: Clock, ids: Ids, seconds: float, *, repeatable: bool, restarts: float = 0.0, reads: bool = False
    ) -> None:
        """Set the deadline `seconds` from now.

        `ids`: source of the jitter of pauses, so that clients rejected together do not return together. `restarts`:
        seconds from the first failure to wait for the restart of a single daemon. `reads`: the call is a read.
        """
        self._reads, self._ended = reads, list[str]()
        self._clock, self._repeatable = clock, repeatable
        self._until = clock.monotonic() + seconds
        self._restarts, self._failing_since = restarts, float("inf")
        self._backoff, self._patience = Backoff(FIRST_PAUSE, LONGEST_PAUSE, ids), FIRST_PATIENCE

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._until - self._clock.monotonic())

    def patience(self, *, alone: bool) -> float:
        """Return the seconds that the next attempt may take."""
        return self.left if alone else min(self.left, self._patience)

    def after(self, error: MemWalError, *, alone: bool) -> bool:
        """Pause before the next attempt; return whether to learn the owners again.

        Raises: `error` if no attempt follows.
        """
        what = verdict(error, repeatable=self._repeatable, alone=alone and not self._comes_back(error))
        if self._restarts and error.details.get("reason") == FLUSH_FAILING:
            what = "wait"  # a stream waits for its storage
        pause = max(self._backoff.pause(), float(error.details.get("retry_after", 0.0)))
        if self._restarts and error.details.get("limit") == PUT_RATE_MAX:
            self._until += pause  # a stream waits until the table's rate admits it
        if what == "raise" or self.left <= pause or left():
            raise error
        self._clock.sleep(pause)
        self._patience *= 2
        return what == "learn"

    def ended(self, daemons: Sequence[str], error: MemWalError) -> None:
        """Record daemons that ended while they answered. Raises: Internal if a read has ended two."""
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
"""Seconds after which a call counts as long, and the interval of checks from then on."""


def abandon_if_moved(moved: Callable[[], bool], call: Callable[[], T]) -> T:
    """Run `call` with the rules of `wait_unless_moved`."""
    return wait_unless_moved(start("call", carried(call)), moved)


def wait_unless_moved(done: Future[T], moved: Callable[[], bool], grace: float = 0.0) -> T:
    """Return or raise the result of `done`. Raise UnknownOutcome ("moved") if it takes long and `moved` returns true.

    `grace`: additional seconds to wait for the answer of a daemon that is alive. An abandoned call continues until
    its own deadline, and its result is dropped.
    """
    patience = LOOK_AFTER
    while not wait([done], patience).done:
        patience = LOOK_EVERY
        expect_waiting()
        if moved() and not wait([done], grace).done:
            raise UnknownOutcome("the region has another owner by now; retry with the same token", {"reason": MOVED})
    return done.result()
