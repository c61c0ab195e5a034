"""A daemon's share of a table's regions: looks at its peers; claims, asks for and gives up regions by the placement.

What must hold, whatever dies when:

1. A daemon acks a durable write only with an entry that storage took under its epoch (`ingest.region.core`). Nothing
   here is needed for that, so a belief that is wrong costs a fence and a retry, never a row.
2. A region that was released is not acked for any more before the release is answered (`ingest.table.regions`).
3. A daemon claims a region only when no peer that answers says that it has it. So two that see each other never fence
   each other.

A take-over, in steps: a peer refuses two looks, or is silent for three (`ingest.daemon.placement`) -> each of its
regions is claimed by the daemon it now belongs to: epoch, sentinel, replay -> it serves. *Crash in between: the claimer
is a dead peer as well, and the next one claims. The dead one was only asleep: its appends are refused, its callers
told; its own next look sees the higher epoch, it drops that writer, and asks for what belongs to it.*

A planned hand-over (SIGTERM), in steps:

1. No more regions are claimed, and the peers are told to look: they see that this daemon is draining, and ask for what
   is to be theirs. From then on a call for it waits at the asker until it is there.
2. What is asked for is released, and claimed by the asker. What is not released yet is served. *Crash: a take-over,
   from there.* What nobody asks for is released in the end, and the peers are told to look again.
3. Calls under way end; the process ends. Without peers the regions stay until then.

A daemon that comes (back) asks the owners for what is to be its own. *The asker dies after the release: nobody has the
region, and it belongs to another one as soon as that is seen. The owner dies while it releases: a take-over.*
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

from memwal import wal
from memwal.ingest.daemon.peers import LOOK_EVERY, Peer
from memwal.ingest.daemon.placement import Answer, Patience, Steps, Watch, agrees, decide, target
from memwal.ingest.errors import MemWalError, classify
from memwal.ingest.region.backlog import Waiting
from memwal.ingest.region.writer import RegionWriter
from memwal.ingest.rpc.credentials import Access
from memwal.ingest.table.embedded import Table
from memwal.ingest.threads import Worker

_LOG = logging.getLogger("memwal.balancer")
SLEPT, CHECK_EVERY = 2.0, 1.0
"""Seconds without a step after which we may have been taken over: less than `SILENCES` looks take. And between two
looks at the region manifests while a peer is silent, which may well have taken over what is ours."""
ASKED_WITHIN = 2.0
"""Seconds that a daemon which ends waits for the next question of a peer; then it just lets go of the rest."""
AT_ONCE = 8
"""Regions that are claimed or asked for at the same time; most of a claim is waiting for storage."""
_STEP = 0.02
"""Seconds between two questions after one that was refused, and between two looks at what is left."""


class Balancer:
    """Keeps the regions of `table` in this process those that belong to it.

    Thread safety. Every method from any thread.
    """

    def __init__(
        self, table: Table, me: str, endpoints: Sequence[str], clock: wal.Clock, access: Access | None = None
    ) -> None:
        """`endpoints`: of all daemons of the table, ours, `me`, among them; `access`: how to reach them.

        `start` begins.
        """
        self._access = access or Access()
        others = [endpoint for endpoint in endpoints if endpoint != me]
        self._table, self._me, self._endpoints, self._clock = table, me, others, clock
        self._lock = threading.RLock()
        self._watch = Watch(others)
        self._taken, self._failed = Patience(), Patience()
        self._busy: set[UUID] = set()
        self._peers: dict[str, Peer] = {}
        self._wake, self._stopped, self._settled = threading.Event(), threading.Event(), threading.Event()
        self._jobs = ThreadPoolExecutor(AT_ONCE, "claim")
        self._stepped, self._checked = self._instant(), clock.monotonic()
        self._worker: Worker | None = None

    def start(self) -> None:
        """Begin to look and to claim. The daemon must answer calls by now."""
        table = self._table.identity["table"]
        self._table.regions.hint, self._table.regions.assure = self.owner, self.assure
        self._table.upkeep.others = self.waiting
        self._peers = {
            endpoint: Peer(endpoint, self._me, table, self._seen, self._access) for endpoint in self._endpoints
        }
        self._worker = Worker("balancer", self._run)

    def wait_settled(self, timeout: float) -> bool:
        """Wait until every region that belongs to this daemon is here, or could not be claimed; False: not yet."""
        return self._settled.wait(timeout)

    def owner(self, region: UUID) -> str | None:
        """Who has `region`, or is to have it, as far as is known."""
        with self._lock:
            owner = self._watch.owner(region)
            return owner[0] if owner is not None else target(region, self._watch.live(self._clock.monotonic()))

    def missing(self) -> list[UUID]:
        """Regions that belong here, by the daemons that live, and that nobody is known to have."""
        have = {writer.region for writer in self._table.regions.alive}
        with self._lock:
            live = [self._me, *self._watch.live(self._clock.monotonic())]
            nobodys = [each for each in self._table.regions.order if each not in have and not self._watch.owner(each)]
            return [region for region in nobodys if target(region, live) == self._me]

    def assure(self) -> None:
        """Look at the region manifests where this process may have slept: a read must not show what was, unawares.

        Raises: why one of them cannot be looked at.
        """
        if max(now - then for now, then in zip(self._instant(), self._stepped, strict=True)) >= SLEPT:
            if failed := self._check([writer.region for writer in self._table.regions.alive]):
                raise classify(failed)
            self._stepped = self._instant()

    def _instant(self) -> tuple[float, float]:
        """By both clocks: the monotonic one stands still while a machine is suspended, the other may be set back."""
        return self._clock.monotonic(), self._clock.now()

    def waiting(self) -> list[Waiting]:
        """What waits for a commit at the peers that answer; one that has not heard of our last commit counts later."""
        if self._table.upkeep.held_back_elsewhere:
            return []
        version = self._table.upkeep.caught_up
        with self._lock:
            seen = [peer for peer in self._peers.values() if self._watch.sees(peer.endpoint)]
            return [peer.waiting for peer in seen if peer.version >= version]

    # ---- what peers ask ------------------------------------------------------------------------------------------

    def heard(self, endpoint: str) -> None:
        """The peer at `endpoint` looked at us: it lives."""
        with self._lock:
            self._watch.heard(endpoint, self._clock.monotonic())

    def look(self, endpoint: str) -> None:
        """The peer at `endpoint` has something to show."""
        if endpoint in self._peers:
            self._peers[endpoint].look()
        self._table.look_at_commits()

    def gives(self, region: UUID, asker: str) -> bool:
        """Whether `region` is to be released to `asker`."""
        now = self._clock.monotonic()
        with self._lock:
            self._watch.heard(asker, now)
            if not agrees(region, asker, None if self._table.regions.draining else self._me, self._watch, now):
                return False
            if not self._watch.sees(asker):
                self._taken.lost(region, now)
            return True

    def tell(self) -> None:
        """Have the peers that answer look at us now."""
        for peer in list(self._peers.values()):
            if self._watch.sees(peer.endpoint):
                peer.tell()

    # ---- the end -------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Steps 1 and 2 of a planned hand-over. A region that cannot be released is let go of at the end, as ever."""
        before = self._table.regions.writers  # peers may ask for some while we stop claiming others
        self._table.regions.draining = True
        self._stop_claiming()
        with self._lock:
            alone = not any(self._watch.sees(endpoint) for endpoint in self._endpoints)
        if alone:
            return
        leaving = dict.fromkeys([*before, *self._table.regions.writers])
        self.tell()
        self._wait_asked()
        for writer in leaving:
            if self._table.regions.has(writer) and not self._let_go(writer):
                continue
            _LOG.info("region %s is handed over", writer.region)

    def _wait_asked(self) -> None:
        """Wait while peers ask for our regions."""
        regions, clock = self._table.regions, self._clock
        left, until = len(regions.writers), clock.monotonic() + ASKED_WITHIN
        while left and clock.monotonic() < until:
            clock.sleep(_STEP)
            if len(regions.writers) < left:
                left, until = len(regions.writers), clock.monotonic() + ASKED_WITHIN

    def _let_go(self, writer: RegionWriter) -> bool:
        """Release it unasked, and have the peers see that; whether it could be released."""
        try:
            self._table.release(writer.region)
        except MemWalError as error:
            if self._table.regions.has(writer):
                _LOG.warning("region %s is not handed over: %s", writer.region, error)
                return False
        self.tell()
        return True

    def stop(self) -> None:
        """End all threads."""
        self._stop_claiming()
        for peer in self._peers.values():
            peer.stop()

    def _stop_claiming(self) -> None:
        with self._lock:
            self._stopped.set()
        self._wake.set()
        if self._worker is not None:
            self._worker.wait()
        self._jobs.shutdown()

    # ---- the balancer's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.assure()  # first: once we have stepped, nobody would know that we had slept
                self._step()
                self._stepped = self._instant()
            except BaseException as error:  # noqa: BLE001 - ending here would end all take-overs in silence
                _LOG.warning("placement failed, will try again: %s", classify(error))
            self._wake.wait(LOOK_EVERY)
            self._wake.clear()

    def _step(self) -> None:
        self._drop_ended()
        steps = self._decided()
        self._check(steps.check)
        for region in steps.claim:
            self._begin(region, self._take, region, None)
        for region, owner in steps.ask:
            self._begin(region, self._take, region, self._peers[owner])
        if steps.settled and not self._busy:
            self._settled.set()

    def _check(self, regions: Sequence[UUID]) -> wal.WalError | None:
        """Look at the manifests of `regions`, let go of those that another has claimed; why one could not be read."""
        failed = None
        for region in regions:
            try:
                self._table.regions.writer(region).refresh()
            except (wal.Fenced, MemWalError):
                continue  # it is let go of below, or has gone meanwhile
            except wal.WalError as error:
                failed = error
        if regions:
            self._drop_ended()
        return failed

    def _decided(self) -> Steps:
        now = self._clock.monotonic()
        regions = self._table.regions
        ours = {writer.region: writer.guard.epoch for writer in regions.alive}
        with self._lock:
            for region in ours:
                self._taken.kept(region, now)
                self._failed.kept(region, now)
            if self._watch.sees_all():
                self._taken.forget()
            away = self._taken.away(now) | self._failed.away(now) | self._busy
            steps = decide(self._me, regions.order, ours, self._watch, away, now)
            if self._watch.misses_any() and now - self._checked >= CHECK_EVERY:
                self._checked = now
                steps = replace(steps, check=list(ours))
            return steps

    def _drop_ended(self) -> None:
        """Let go of writers that were fenced, or that storage made stop themselves: only a new claim mends either."""
        for writer in self._table.regions.writers:
            if writer.failure is not None:
                self._begin(writer.region, self._drop, writer)

    def _drop(self, writer: RegionWriter) -> None:
        """Its threads may need a while to end, one of them may wait for storage; the region is not claimed before."""
        _LOG.warning("region %s is let go of: %s", writer.region, writer.failure)
        with suppress(MemWalError):
            self._table.release(writer.region)
        now = self._clock.monotonic()
        with self._lock:
            if not isinstance(writer.failure, wal.Fenced):
                self._failed.lost(writer.region, now)
            elif self._watch.owner(writer.region) is None:
                self._taken.lost(writer.region, now)

    def _begin(self, region: UUID, work: Callable[..., None], *what: Any) -> None:
        """Have `work` done beside, unless something is done to `region` already."""
        with self._lock:
            if region in self._busy or self._stopped.is_set():
                return
            self._busy.add(region)
            self._jobs.submit(self._done, region, work, *what)

    def _done(self, region: UUID, work: Callable[..., None], *what: Any) -> None:
        try:
            work(*what)
        except BaseException as error:  # noqa: BLE001 - one region's trouble is not the others'
            with self._lock:
                self._failed.lost(region, self._clock.monotonic())
            _LOG.warning("region %s cannot be claimed, will try again: %s", region, classify(error))
        finally:
            with self._lock:
                self._busy.discard(region)
            self._wake.set()

    def _take(self, region: UUID, owner: Peer | None) -> None:
        """Ask `owner` for the region first, if there is one, and claim it."""
        with self._table.regions.expecting(region):
            before = self._table.before(region)  # while it is still served, where somebody serves it
            if (owner is None or self._released(region, owner)) and not self._stopped.is_set():
                epoch = self._table.acquire(region, before)
                _LOG.info("region %s is served here with writer epoch %d", region, epoch)

    def _released(self, region: UUID, owner: Peer) -> bool:
        try:
            owner.ask(region)
        except MemWalError as error:
            _LOG.info("the daemon at %s keeps region %s for now: %s", owner.endpoint, region, error)
            owner.look()  # it may have ended
            self._clock.sleep(_STEP)
            return False
        return True

    def _seen(self, peer: Peer, answer: Answer | None, refused: bool) -> None:
        with self._lock:
            if answer is not None:
                changed = self._watch.answered(peer.endpoint, answer)
            elif refused:
                changed = self._watch.refused(peer.endpoint)
            else:
                changed = self._watch.silent(peer.endpoint)
        if changed:
            self._wake.set()
