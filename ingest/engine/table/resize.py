"""Handle, in a serving process, a resize of its table by another process (`flush.resizing.steps` has the protocol).

A resize starts by sealing the regions, which fences their writers, unless a daemon that splits the table had them make
way. For callers both are a pause, unlike a fence by a writer that keeps the region. Once the new routing is decided,
the regions of this process are obsolete; it claims regions of the new routing instead (`Table.adopt_routing`).

`Gate` separates calls from the change: while it is closed, no call knows the former routing or has a write in flight.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from math import inf
from uuid import UUID

from memwal import wal
from memwal.flush.resizing.routing import decided
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.errors import FencedError, MemWalError
from memwal.ingest.refusals import being_resized, expect_routing, resized
from memwal.ingest.threads import start

_LOG = logging.getLogger("memwal.table")
LOOK_EVERY = 5.0
"""Seconds between two checks of storage while no region is fenced."""
BROKEN_OFF = 5.0
"""Seconds after which a process with `regions.count = "auto"` resizes sealed regions to the present number."""
PASSES = 3
"""Flushes and commits before a resize closes the gate."""
CLOSE_WITHIN, ADOPT_WITHIN, WAY_WITHIN = 0.1, 5.0, 2.0
"""Seconds that calls under way get to end: before a resize, on a local disk, and after one by another process. The
third: how long a process that has made way waits for the decision."""
WAIT_MAX = 10.0
"""Seconds that a call waits at a closed gate."""
_PASSED: ContextVar[Gate | None] = ContextVar("memwal_gate", default=None)
"""The gate that the call in this thread has passed; it does not wait at it again."""


class Gate:
    """Lets calls that depend on the routing of a table pass, except while it is closed: no call is inside then, and
    only then `version`, of the routing, and the regions of the table change. Thread safety. Any thread.
    """

    def __init__(self, uri: str, version: int) -> None:
        self.version, self.uri = version, uri
        self._changed = threading.Condition(threading.Lock())
        self.inside: set[_Passing] = set()
        self.shut = False

    def passing(self, routing: int | None = None) -> _Passing:
        """Return the context of a call that was sent by version `routing`; None: by no particular one.

        Entering it raises: Unavailable (reason "resized") if the table has another routing, or if it changes for
        `WAIT_MAX`.
        """
        return _Passing(self, routing)

    def wait(self, call: _Passing) -> None:
        """Wait outside until the gate opens. Raises: as `passing`."""
        with self._changed:
            self.inside.discard(call)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self.shut, WAIT_MAX):
                raise being_resized(self.uri)
            self.inside.add(call)

    def expect(self, routing: int | None) -> None:
        """Raises: as `passing`, if the table has another routing."""
        expect_routing(self.uri, routing, self.version)

    def left(self) -> None:
        """Wake the thread that closes the gate."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def closed(self, within: float) -> Iterator[None]:
        """Close the gate for the duration of the context.

        Raises: Unavailable, and opens it again, if the calls inside do not end `within` seconds.
        """
        with self._changed:
            if self.shut:
                raise being_resized(self.uri)
            self.shut = True
            ended = self._changed.wait_for(lambda: not self.inside, within)
        try:
            if not ended:
                raise being_resized(self.uri)
            yield
        finally:
            with self._changed:
                self.shut = False
                self._changed.notify_all()


class _Passing:
    """See `Gate.passing`.

    Every put passes a gate: a generator, or a lock around a counter, would take several times as long. A call first
    adds itself and then reads `shut`; the thread that closes the gate first sets `shut` and then looks who is inside,
    so at least one of them sees the other. A call that is made by a call inside does not wait.
    """

    __slots__ = ("_before", "_gate", "_routing")

    def __init__(self, gate: Gate, routing: int | None) -> None:
        self._gate, self._routing, self._before = gate, routing, _PASSED.get()

    def __enter__(self) -> None:
        gate = self._gate
        gate.inside.add(self)
        try:
            if gate.shut and self._before is not gate:
                gate.wait(self)
            gate.expect(self._routing)
        except BaseException:
            gate.inside.discard(self)
            gate.left()
            raise
        _PASSED.set(gate)

    def __exit__(self, *_: object) -> None:
        gate = self._gate
        _PASSED.set(self._before)
        gate.inside.discard(self)
        if gate.shut:
            gate.left()


class Resizing:
    """Check storage for a resize of the table of `regions`.

    Thread safety. Any thread.
    """

    def __init__(self, regions: RegionSet, gate: Gate, met: Callable[[], int], flush: Callable[[], object]) -> None:
        """`gate`: knows the version of the claims. `met`: returns the version in the base table opened last. `flush`:
        publishes the memtables of `regions`."""
        self._uri, self._regions, self._gate, self._met, self._flush = gate.uri, regions, gate, met, flush
        self._clock = regions.context.clock
        self._looked = self._clock.monotonic()
        self._told = False
        self.close_within = CLOSE_WITHIN * (10 if regions.context.store.remote else 1)
        self.flush_others: Callable[[int, bool], object] = lambda *_: None
        """Lets other processes flush their regions of this routing, and make way if the second argument is true."""
        self.way: ExitStack | None = None
        """Opens the gate again after `make_way`."""
        self.unclaimed = inf
        """Monotonic time (s). From then on this process claims its regions again, even if no resize was decided."""

    def flush(self, *, make_way: bool = False) -> None:
        """Flush the regions here while other processes flush, or make way. Raises: as `TableUpkeep.flush`."""
        others = start("flush", partial(self.flush_others, self._gate.version, make_way))
        self._flush()
        others.result()

    def make_way(self, routing: int | None) -> None:
        """Flush and release the regions here, for a process that resizes the table from version `routing` now.

        Calls wait until `Table.adopt_routing` finds the decision, or is called after `WAY_WITHIN`. No safety depends on
        this: only a seal ends the right to write. Raises: as `Table.resize`.
        """
        with ExitStack() as paused:
            paused.enter_context(self._gate.closed(self.close_within))
            self._gate.expect(routing)
            self._flush()
            self._regions.leave_all()
            self.way, self.unclaimed = paused.pop_all(), self._clock.monotonic() + WAY_WITHIN

    def done(self) -> str | None:
        """Return why these regions are obsolete if another routing was decided, else None.

        Reads one small object from storage every few seconds, and always if a region was fenced, or a read or commit
        found another routing. Raises: as a read.
        """
        now = self._clock.monotonic()
        fenced = self._fenced()
        routing = self._gate.version
        if not fenced and self._met() == routing and now - self._looked < LOOK_EVERY:
            return None
        self._looked = now
        following = decided(self._regions.context.store, routing + 1)
        return None if following is None else str(resized(self._uri, routing, following.routing))

    def hurry(self) -> None:
        """Let the next `done` check storage."""
        self._looked = -LOOK_EVERY

    def under_way(self) -> str | None:
        """Return a message if a resize has sealed an owned region and has decided nothing yet, else None."""
        sealed = self._sealed()
        if sealed is None:
            return None
        return (
            f"{wal.named(sealed)} is sealed: the table is being resized; if that broke off, run `memwal regions "
            "resize` again, with the present number of regions to go back"
        )

    def told(self, error: MemWalError) -> MemWalError:
        """Return `error` in the form for the caller: a fence by a resize becomes a pause, which ends by itself."""
        if not isinstance(error, FencedError):
            return error
        # Only the decision removes a seal, so check for seals first.
        resizes = self._sealed() is not None or self.done() is not None
        return being_resized(self._uri) if resizes else error

    def look(self) -> None:
        """Log once that a resize holds owned regions."""
        said = self.under_way()
        if said is not None and not self._told:
            _LOG.warning("%s: %s", self._uri, said)
        self._told = said is not None

    def _fenced(self) -> list[UUID]:
        return [each.region for each in self._regions.writers if isinstance(each.failure, wal.Fenced)]

    def _sealed(self) -> UUID | None:
        for region in self._fenced():
            manifest = wal.ManifestStore(self._regions.context.store, region, clock=self._clock).latest()
            if manifest is not None and manifest.status is wal.RegionStatus.SEALED:
                return region
        return None
