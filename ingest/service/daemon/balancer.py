"""Maintain a daemon's share of a table's regions: watch the peers; claim, request and release regions by the
placement.

Invariants, whichever process dies at whichever step:

1. A daemon acks a durable write only with an entry that storage accepted under its epoch (`region.core`). This
   does not depend on the balancer, so wrong information costs a fence and a retry, never a row.
2. After the answer to a release, the former owner acks nothing of the region (`table.regions`).
3. A daemon claims a region only if no answering peer reports that it has the region. So two daemons that see each
   other never fence each other.

Takeover, in steps:

1. A peer refuses two connections, or gives no answer three times (`daemon.placement`).
2. Each of its regions is claimed by the daemon that it now belongs to: epoch, sentinel, replay of the entries that
   were not read before (`daemon.standby`). *If the claimer crashes, it counts as dead too, and the next daemon
   claims.*
3. The claimer serves the region. *If the dead peer only hung: its appends are rejected, its callers get the fence;
   its next check sees the higher epoch, drops that writer, and requests its share.*

Planned handover (SIGTERM), in steps:

1. The daemon stops claiming and asks its peers to check it. They see that it is draining, and request the regions
   that now belong to them. From then on, calls for a requested region wait at the requester until it serves the
   region.
2. The daemon releases requested regions, and the requester claims them. The daemon still serves the others. *After a
   crash, a takeover follows.* Finally the daemon releases regions that no peer requested, and asks the peers to check
   again.
3. Running calls end; the process ends. Without peers it keeps its regions until then.

A starting daemon requests its share from the owners. *If the requester dies after the release, no daemon has the
region; the daemon that it belongs to next claims it as soon as it sees that. If the owner dies during the release, a
takeover follows.*
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
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.region.writer import RegionWriter
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import MemWalError, classify
from memwal.ingest.service.daemon.peers import LOOK_EVERY, Peer
from memwal.ingest.service.daemon.placement import Answer, Patience, Watch, agrees, decide, inherited, target
from memwal.ingest.service.daemon.standby import MOST_BEFORE_ASKING, PATIENCE_BEFORE_ASKING, Standby
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.threads import Worker
from memwal.wal import named

_LOG = logging.getLogger("memwal.balancer")
SLEPT, CHECK_EVERY = 2.0, 1.0
"""SLEPT: seconds without a step after which peers may have taken regions of this daemon; less than `SILENCES` checks
take. CHECK_EVERY: seconds between two reads of the region manifests while a silent peer may have taken regions."""
ASKED_WITHIN = 2.0
"""Seconds that an ending daemon waits for the next request of a peer before it releases the remaining regions."""
AT_ONCE = 8
"""Regions that are claimed or requested concurrently; a claim mostly waits for storage."""
_STEP = 0.02
"""Seconds between two requests after a rejected one, and between two checks of the remaining regions."""


class Balancer:
    """Claims and releases regions of `table`, so that this process owns those that belong to it.

    Thread safety. Every method from any thread.
    """

    def __init__(
        self,
        table: Table,
        me: str,
        endpoints: Sequence[str],
        clock: wal.Clock,
        access: Access | None = None,
        read_ahead: float = 0.0,
    ) -> None:
        """Prepare the balancer; nothing happens before `start`.

        `endpoints`: all daemons of the table, including `me`, this daemon. `access`: credentials for the others.
        `read_ahead`: see `daemon.read_ahead`.
        """
        self._access = access or Access()
        others = [endpoint for endpoint in endpoints if endpoint != me]
        self._table, self._me, self._endpoints, self._clock = table, me, others, clock
        self._lock = threading.RLock()
        self._watch = Watch(others)
        self._taken, self._failed = Patience(), Patience()
        self._busy: set[UUID] = set()
        self._answered: dict[str, float] = {}
        self._peers: dict[str, Peer] = {}
        self._wake, self._stopped, self._settled = threading.Event(), threading.Event(), threading.Event()
        self._jobs = ThreadPoolExecutor(AT_ONCE, "claim")
        self._stepped, self._checked = self._instant(), clock.monotonic()
        self._worker: Worker | None = None
        self._standby = Standby(table, self.inherited, read_ahead)

    def start(self) -> None:
        """Start the checks and claims. Requires: the daemon answers calls."""
        table = self._table.identity["table"]
        self._table.regions.hint, self._table.regions.assure = self.owner, self.assure
        self._table.upkeep.others = self.waiting
        self._peers = {
            endpoint: Peer(endpoint, self._me, table, self._seen, self._access) for endpoint in self._endpoints
        }
        self._worker = Worker("balancer", self._run)
        self._standby.start()

    def wait_settled(self, timeout: float) -> bool:
        """Wait until every region of this daemon's share is claimed, or failed to be. Return False after `timeout`
        seconds."""
        return self._settled.wait(timeout)

    def owner(self, region: UUID) -> tuple[str, int] | None:
        """Return the endpoint that has `region` and its epoch, else the one that should have it and 0; None if
        unknown."""
        with self._lock:
            if (owner := self._watch.owner(region)) is not None:
                return owner[:2]
            should = target(region, self._watch.live(self._clock.monotonic()))
            return None if should is None else (should, 0)

    def peers(self) -> list[dict[str, Any]]:
        """Return the other daemons as this one sees them.

        Fields: `endpoint`, `state` (`PeerState`), `answered` (seconds since the last answer, None without one), and
        `waiting` (the largest number of uncommitted SSTs of one of its regions).
        """
        now = self._clock.monotonic()
        with self._lock:
            return [
                {
                    "endpoint": endpoint,
                    "state": self._watch.state(endpoint),
                    "answered": now - self._answered[endpoint] if endpoint in self._answered else None,
                    "waiting": peer.waiting.ssts,
                }
                for endpoint, peer in self._peers.items()
            ]

    @property
    def refusal(self) -> MemWalError | None:
        """Why this daemon and a live peer do not call each other; None if all peers are compatible."""
        lives = self._watch.answers
        found = (peer.refusal for peer in list(self._peers.values()) if lives(peer.endpoint))
        return next((refusal for refusal in found if refusal is not None), None)

    def served_elsewhere(self, region: UUID) -> tuple[str, int] | None:
        """Return the endpoint and the epoch of the peer that serves `region`; None if unknown."""
        with self._lock:
            owner = self._watch.owner(region)
        return None if owner is None else owner[:2]

    def missing(self) -> list[UUID]:
        """Return the regions that belong to this daemon and that no daemon is known to have."""
        have = {writer.region for writer in self._table.regions.alive}
        with self._lock:
            live = [self._me, *self._watch.live(self._clock.monotonic())]
            unowned = [each for each in self._table.regions.order if each not in have and not self._watch.owner(each)]
            return [region for region in unowned if target(region, live) == self._me]

    def inherited(self) -> list[UUID]:
        """Return the regions of peers that would belong to this daemon if their owner ended."""
        with self._lock:
            return inherited(self._me, self._table.regions.order, self._watch, self._clock.monotonic())

    def assure(self) -> None:
        """Read the region manifests if this process may have been suspended, so that no read returns a former state.

        Raises: the error of reading a manifest.
        """
        if max(now - then for now, then in zip(self._instant(), self._stepped, strict=True)) >= SLEPT:
            if failed := self._check([writer.region for writer in self._table.regions.alive]):
                raise classify(failed)
            self._stepped = self._instant()

    def _instant(self) -> tuple[float, float]:
        """Return the time of both clocks: the monotonic clock stops in a suspended machine, the other may be set
        back."""
        return self._clock.monotonic(), self._clock.now()

    def waiting(self) -> list[Backlog]:
        """Return the backlogs of the peers that answer and that know this daemon's last commit."""
        if self._table.upkeep.held_back_elsewhere:
            return []
        version = self._table.upkeep.caught_up
        with self._lock:
            seen = [peer for peer in self._peers.values() if self._watch.sees(peer.endpoint)]
            return [peer.waiting for peer in seen if peer.version >= version]

    # ---- requests of peers ---------------------------------------------------------------------------------------

    def heard(self, endpoint: str) -> None:
        """Record that the peer at `endpoint` checked this daemon, so it is alive."""
        with self._lock:
            self._watch.heard(endpoint, self._clock.monotonic())

    def look(self, endpoint: str) -> None:
        """Check the peer at `endpoint` now, because its state changed."""
        if endpoint in self._peers:
            self._peers[endpoint].look()
        self._table.look_at_commits()

    def gives(self, region: UUID, asker: str) -> bool:
        """Return whether to release `region` to `asker`."""
        now = self._clock.monotonic()
        with self._lock:
            self._watch.heard(asker, now)
            if not agrees(region, asker, None if self._table.regions.draining else self._me, self._watch, now):
                return False
            if not self._watch.sees(asker):
                self._taken.lost(region, now)
            return True

    def tell(self) -> None:
        """Ask the answering peers to check this daemon now."""
        for peer in list(self._peers.values()):
            if self._watch.sees(peer.endpoint):
                peer.tell()

    # ---- the end -------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Execute steps 1 and 2 of a planned handover. A region that cannot be released stays until the table is
        closed."""
        before = self._table.regions.writers  # read first: peers may request some while the claims stop
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
            if self._table.regions.has(writer):  # no peer has requested it
                try:
                    self._table.release(writer.region)
                except MemWalError as error:
                    if self._table.regions.has(writer):
                        _LOG.warning("%s is not handed over: %s", named(writer.region), error)
                        continue
                self.tell()
            _LOG.info("%s is handed over", named(writer.region))

    def _wait_asked(self) -> None:
        """Wait while peers request regions of this daemon."""
        regions, clock = self._table.regions, self._clock
        left, until = len(regions.writers), clock.monotonic() + ASKED_WITHIN
        while left and clock.monotonic() < until:
            clock.sleep(_STEP)
            if len(regions.writers) < left:
                left, until = len(regions.writers), clock.monotonic() + ASKED_WITHIN

    def stop(self) -> None:
        """Stop all threads."""
        self._stop_claiming()
        self._standby.stop()
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
                self.assure()  # before the step, which resets the times that reveal a suspension
                self._step()
                self._stepped = self._instant()
            except BaseException as error:  # noqa: BLE001 - an error here would silently stop all takeovers
                _LOG.warning("placement failed, will try again: %s", classify(error))
            self._wake.wait(LOOK_EVERY)
            self._wake.clear()

    def _step(self) -> None:
        self._drop_ended()
        now, regions = self._clock.monotonic(), self._table.regions
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
        self._check(steps.check)
        for region in steps.claim:
            self._begin(region, self._take, region, None)
        for region, owner in steps.ask:
            if self._peers[owner].refusal is None:
                self._begin(region, self._take, region, self._peers[owner])
        if steps.settled and not self._busy:
            self._settled.set()

    def _check(self, regions: Sequence[UUID]) -> wal.WalError | None:
        """Read the manifests of `regions` and drop those that another process has claimed. Return an error of
        reading."""
        failed = None
        for region in regions:
            try:
                self._table.regions.writer(region).refresh()
            except (wal.Fenced, MemWalError):
                continue  # dropped below, or released meanwhile
            except wal.WalError as error:
                failed = error
        if regions:
            self._drop_ended()
        return failed

    def _drop_ended(self) -> None:
        """Drop writers that were fenced, or stopped themselves after a storage failure. Both need a new claim."""
        for writer in self._table.regions.writers:
            if writer.failure is not None:
                self._begin(writer.region, self._drop, writer)

    def _drop(self, writer: RegionWriter) -> None:
        """Close a failed writer. Its threads may wait for storage for a while; no claim begins before they end."""
        _LOG.warning("%s is dropped: %s", named(writer.region), writer.failure)
        with suppress(MemWalError):
            self._table.release(writer.region)
        now = self._clock.monotonic()
        with self._lock:
            if not isinstance(writer.failure, wal.Fenced):
                self._failed.lost(writer.region, now)
            elif self._watch.owner(writer.region) is None:
                self._taken.lost(writer.region, now)

    def _begin(self, region: UUID, work: Callable[..., None], *what: Any) -> None:
        """Start `work` in the background, unless other work on `region` is running."""
        with self._lock:
            if region in self._busy or self._stopped.is_set():
                return
            self._busy.add(region)
            self._jobs.submit(self._done, region, work, *what)

    def _done(self, region: UUID, work: Callable[..., None], *what: Any) -> None:
        try:
            work(*what)
        except BaseException as error:  # noqa: BLE001 - an error of one region must not stop the others
            with self._lock:
                self._failed.lost(region, self._clock.monotonic())
            _LOG.warning("%s cannot be claimed, will try again: %s", named(region), classify(error))
        finally:
            with self._lock:
                self._busy.discard(region)
            self._wake.set()

    def _take(self, region: UUID, owner: Peer | None) -> None:
        """Claim the region; first request it from its `owner`, if it has one."""
        with self._table.regions.expecting(region):
            before = self._table.before_claim(region)  # while its owner, if any, still serves it
            if owner is not None:
                try:
                    read = self._standby.look(region, MOST_BEFORE_ASKING, PATIENCE_BEFORE_ASKING)
                    before = replace(before, released=owner.ask(region, read))
                except MemWalError as error:
                    _LOG.info("the daemon at %s keeps %s for now: %s", owner.endpoint, named(region), error)
                    self._standby.take(region)
                    owner.look()  # it may have ended
                    self._clock.sleep(_STEP)
                    return
            if self._stopped.is_set():
                return
            epoch = self._table.acquire(region, before, self._standby.take(region))
            _LOG.info("%s is served here with writer epoch %d", named(region), epoch)

    def _seen(self, peer: Peer, answer: Answer | None, refused: bool) -> None:
        with self._lock:
            if answer is not None:
                self._answered[peer.endpoint] = self._clock.monotonic()
                changed = self._watch.answered(peer.endpoint, answer)
            elif refused:
                changed = self._watch.refused(peer.endpoint)
            elif peer.denies:
                changed = self._watch.denied(peer.endpoint)
            else:
                changed = self._watch.silent(peer.endpoint)
        if changed:
            self._wake.set()
