"""Maintain a daemon's share of the regions of its tables: watch the peers; claim, request and release regions by the
placement.

The regions of a single `[table]` have an owner at all times. In a fleet the first call that needs a region claims it,
at the daemon that it belongs to (`RegionSet.serving`). Only regions that a daemon has are taken over after its end, or
requested by the daemon that they belong to.

Invariants, whichever process dies at whichever step:

1. A daemon acks a durable write only with an entry that storage accepted under its epoch (`region.core`). This
   does not depend on the balancer, so wrong information costs a fence and a retry, never a row.
2. After the answer to a release, the former owner acks nothing of the region (`table.regions`).
3. A daemon claims a region only if no answering peer reports that it has the region. So two daemons that see each
   other never fence each other.

Takeover, in steps:

1. A peer refuses two connections, or gives no answer three times (`daemon.placement`). A call for one of its regions
   has it checked at once: a client that lost its daemon asks the others.
2. Each of its regions is claimed by the daemon that it now belongs to: epoch, sentinel, replay of the entries that
   were not read before (`daemon.standby`). In a fleet, calls claim the regions that they need, and the balancer claims
   the others one after the other. *If the claimer crashes, it counts as dead too, and the next daemon claims.*
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from memwal import wal
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.region.writer import RegionWriter
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import MemWalError, classify
from memwal.ingest.service.daemon.peers import LOOK_AGAIN, LOOK_EVERY, LOOK_IDLE, Peer
from memwal.ingest.service.daemon.placement import (
    Answer,
    Patience,
    TableRegion,
    Watch,
    agrees,
    decide,
    inherited,
    target,
)
from memwal.ingest.service.daemon.standby import MOST_BEFORE_ASKING, PATIENCE_BEFORE_ASKING, Standby
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.threads import Worker
from memwal.wal.parallel_map import each

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
    """Claims and releases regions of the served tables, so that this process owns those that belong to it.

    Thread safety. Every method from any thread.
    """

    def __init__(
        self, me: str, endpoints: Sequence[str], clock: wal.Clock, access: Access | None = None, read_ahead: float = 0.0
    ) -> None:
        """Prepare the balancer; nothing happens before `start`.

        `endpoints`: all daemons of the tables, including `me`, this daemon. `access`: credentials for the others.
        `read_ahead`: see `daemon.read_ahead`.
        """
        self._access = access or Access()
        others = [endpoint for endpoint in endpoints if endpoint != me]
        self._me, self._endpoints, self._clock = me, others, clock
        self._tables: dict[str, Table] = {}
        self.open: Callable[[str], Table] | None = None
        """Opens a table of a fleet by its name, and serves it here; None in a daemon of one table."""
        self.draining = False
        self._lock = threading.RLock()
        self._watch = Watch(others)
        self._taken, self._failed = Patience(), Patience()
        self._busy: set[TableRegion] = set()
        self._answered: dict[str, float] = {}
        self._peers: dict[str, Peer] = {}
        self._wake, self._stopped, self._settled = threading.Event(), threading.Event(), threading.Event()
        self._jobs = ThreadPoolExecutor(AT_ONCE, "claim")
        self._stepped, self._checked = self._instant(), clock.monotonic()
        self._worker: Worker | None = None
        self._standby = Standby(self._tables, self.inherited, read_ahead)

    def serve(self, table: Table, name: str = "") -> None:
        """Maintain the share of `table` from now on; `name`: in a fleet, whose tables are lazy."""
        regions = table.regions
        regions.hint, regions.assure = partial(self._owner_in, name), self.assure
        regions.belongs = partial(self._belongs_in, name)
        regions.ahead = lambda region: self._standby.take(TableRegion(name, region))
        regions.draining = self.draining
        table.upkeep.others, table.resized = partial(self.waiting, name), self.tell
        table.resizing.flush_others = lambda *how: self._each_peer(lambda peer: peer.flush(name, *how))
        with self._lock:
            self._tables[name] = table

    def leave(self, name: str) -> None:
        """Forget a table of the fleet, whose regions are released."""
        with self._lock:
            self._tables.pop(name, None)

    def start(self, address: str) -> None:
        """Start the checks and claims. `address`: of the table or the fleet, which peers must serve too.

        Requires: the daemon answers calls.
        """
        self._peers = {
            endpoint: Peer(endpoint, self._me, address, self._seen, self._access) for endpoint in self._endpoints
        }
        self._worker = Worker("balancer", self._run)
        self._standby.start()

    def wait_settled(self, timeout: float) -> bool:
        """Wait until every region of this daemon's share is claimed, or failed to be. Return False after `timeout`
        seconds."""
        return self._settled.wait(timeout)

    def owner(self, region: TableRegion) -> tuple[str, int] | None:
        """Return the endpoint that has `region` and its epoch, else the one that should have it and 0; None if
        unknown."""
        with self._lock:
            if (owner := self._watch.owner(region)) is not None:
                return owner[:2]
            should = target(region, self._watch.live(self._clock.monotonic()))
            return None if should is None else (should, 0)

    def belongs(self, region: TableRegion) -> bool:
        """Return whether `region`, which is not here, belongs to this daemon, and no peer has it or may have it."""
        now = self._clock.monotonic()
        with self._lock:
            owner = self._watch.owner(region)
            if owner is not None and owner[0] in self._peers and now - self._answered.get(owner[0], now) > LOOK_AGAIN:
                self._peers[owner[0]].look()  # a caller that asks here may have found that the owner has ended
            if self.draining or not self._watch.known() or owner is not None:
                return False
            away = self._taken.away(now) | self._failed.away(now)
            return region not in away and target(region, [self._me, *self._watch.live(now)]) == self._me

    def _owner_in(self, name: str, region: UUID) -> tuple[str, int] | None:
        return self.owner(TableRegion(name, region))

    def _belongs_in(self, name: str, region: UUID) -> bool:
        return self.belongs(TableRegion(name, region))

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
                    "waiting": max((backlog.ssts for backlog, _ in peer.backlogs.values()), default=0),
                }
                for endpoint, peer in self._peers.items()
            ]

    @property
    def refusal(self) -> MemWalError | None:
        """Why this daemon and a live peer do not call each other; None if all peers are compatible."""
        lives = self._watch.answers
        found = (peer.refusal for peer in list(self._peers.values()) if lives(peer.endpoint))
        return next((refusal for refusal in found if refusal is not None), None)

    def served_elsewhere(self, region: TableRegion) -> tuple[str, int] | None:
        """Return the endpoint and the epoch of the peer that serves `region`; None if unknown."""
        with self._lock:
            owner = self._watch.owner(region)
        return None if owner is None else owner[:2]

    def elsewhere(self) -> dict[str, dict[str, int]]:
        """Return the number of regions of each table that peers have, by table and endpoint."""
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            owners = [(region.table, self._watch.owner(region)) for region in self._watch.regions()]
        for name, owner in owners:
            if owner is not None:
                of = found.setdefault(name, {})
                of[owner[0]] = of.get(owner[0], 0) + 1
        return found

    def missing(self) -> list[UUID]:
        """Return the regions that belong to this daemon, must have an owner, and have none that is known."""
        have = self._ours()
        with self._lock:
            live = [self._me, *self._watch.live(self._clock.monotonic())]
            unowned = [each for each in self._kept() if each not in have and not self._watch.owner(each)]
            return [region.id for region in unowned if target(region, live) == self._me]

    def inherited(self) -> list[TableRegion]:
        """Return the regions of peers that would belong to this daemon if their owner ended, in open tables."""
        with self._lock:
            found = inherited(self._me, self._wanted(), self._watch, self._clock.monotonic())
            return [region for region in found if region.table in self._tables]

    def assure(self) -> None:
        """Read the region manifests if this process may have been suspended, so that no read returns a former state.

        Raises: the error of reading a manifest.
        """
        if max(now - then for now, then in zip(self._instant(), self._stepped, strict=True)) >= SLEPT:
            if failed := self._check(self._ours()):
                raise classify(failed)
            self._stepped = self._instant()

    def _instant(self) -> tuple[float, float]:
        """Return the time of both clocks: the monotonic clock stops in a suspended machine, the other may be set
        back."""
        return self._clock.monotonic(), self._clock.now()

    def waiting(self, name: str = "") -> list[Backlog]:
        """Return the backlogs of a table at the peers that answer and that know this daemon's last commit of it."""
        upkeep = self._tables[name].upkeep
        if upkeep.held_back_elsewhere:
            return []
        with self._lock:
            seen = [peer.backlogs.get(name) for peer in self._peers.values() if self._watch.sees(peer.endpoint)]
            return [each[0] for each in seen if each is not None and each[1] >= upkeep.caught_up]

    # ---- requests of peers ---------------------------------------------------------------------------------------

    def heard(self, endpoint: str) -> None:
        """Record that the peer at `endpoint` checked this daemon, so it is alive; check it now if it did not answer."""
        with self._lock:
            self._watch.heard(endpoint, self._clock.monotonic())
            unseen = endpoint in self._peers and not self._watch.sees(endpoint)
        if unseen:
            self._peers[endpoint].look()

    def look(self, endpoint: str) -> None:
        """Check the peer at `endpoint` now, because its state changed."""
        if endpoint in self._peers:
            self._peers[endpoint].look()
        for table in self._served():
            table.look_at_commits()

    def gives(self, region: TableRegion, asker: str) -> bool:
        """Return whether to release `region` to `asker`."""
        now = self._clock.monotonic()
        with self._lock:
            self._watch.heard(asker, now)
            if not agrees(region, asker, None if self.draining else self._me, self._watch, now):
                return False
            if not self._watch.sees(asker):
                self._taken.lost(region, now)
            return True

    def tell(self) -> None:
        """Ask the answering peers to check this daemon now."""
        self._each_peer(Peer.tell)

    def _each_peer(self, call: Callable[[Peer], object]) -> None:
        answering = [peer for peer in list(self._peers.values()) if self._watch.sees(peer.endpoint)]
        list(each(call, answering, AT_ONCE))

    # ---- the end -------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Execute steps 1 and 2 of a planned handover. A region that cannot be released stays until the table is
        closed."""
        before = self._held()  # read first: peers may request some while the claims stop
        self.draining = True
        for table in self._served():
            table.regions.draining = True
        self._stop_claiming()
        with self._lock:
            alone = not any(self._watch.sees(endpoint) for endpoint in self._endpoints)
        if alone:
            return
        leaving = dict.fromkeys([*before, *self._held()])
        self.tell()
        self._wait_asked()
        for region, table, writer in leaving:
            if table.regions.has(writer):  # no peer has requested it
                try:
                    table.release(writer.region)
                except MemWalError as error:
                    if table.regions.has(writer):
                        _LOG.warning("%s is not handed over: %s", region, error)
                        continue
                self.tell()
            _LOG.info("%s is handed over", region)

    def _wait_asked(self) -> None:
        """Wait while peers request regions of this daemon."""
        left, until = len(self._held()), self._clock.monotonic() + ASKED_WITHIN
        while left and self._clock.monotonic() < until:
            self._clock.sleep(_STEP)
            if (fewer := len(self._held())) < left:
                left, until = fewer, self._clock.monotonic() + ASKED_WITHIN

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
        now, ours = self._clock.monotonic(), self._ours()
        with self._lock:
            for region in ours:
                self._taken.kept(region, now)
                self._failed.kept(region, now)
            self._watch.adopted(ours)
            if self._watch.sees_all():
                self._taken.forget()
            away = self._taken.away(now) | self._failed.away(now) | self._busy
            steps = decide(self._me, self._wanted(ours), ours, self._watch, away, now)
            if self._watch.misses_any() and now - self._checked >= CHECK_EVERY:
                self._checked = now
                steps = replace(steps, check=list(ours))
        self._check(steps.check)
        # In a fleet the calls that wait claim their regions, and many claims beside them would slow these down.
        for region in steps.claim if self.open is None else steps.claim[:1]:
            self._begin(region, self._take, region, None)
        for region, owner in steps.ask:
            if self._peers[owner].refusal is None:
                self._begin(region, self._take, region, self._peers[owner])
        if steps.settled and not self._busy:
            self._settled.set()

    def _served(self) -> list[Table]:
        with self._lock:
            return list(self._tables.values())

    def _held(self) -> list[tuple[TableRegion, Table, RegionWriter]]:
        """Return the regions here, also those whose writer has failed."""
        with self._lock:
            tables = list(self._tables.items())
        return [
            (TableRegion(name, writer.region), table, writer)
            for name, table in tables
            for writer in table.regions.writers
        ]

    def _ours(self) -> dict[TableRegion, int]:
        """Return the epochs of the regions that are served here."""
        with self._lock:
            tables = list(self._tables.items())
        return {
            TableRegion(name, writer.region): writer.guard.epoch
            for name, table in tables
            for writer in table.regions.alive
        }

    def _kept(self) -> list[TableRegion]:
        """Return the regions that must have an owner at all times, in a daemon of one table. Requires: the lock."""
        if self.open is not None:
            return []
        return [TableRegion(name, region) for name, table in self._tables.items() for region in table.regions.order]

    def _wanted(self, ours: Iterable[TableRegion] = ()) -> Iterable[TableRegion]:
        """Return the regions that must have an owner, and in a fleet those that a daemon has or had until its end.

        Requires: the lock.
        """
        return self._kept() or dict.fromkeys((*ours, *sorted(self._watch.regions())))

    def _check(self, regions: Iterable[TableRegion]) -> wal.WalError | None:
        """Read the manifests of `regions` and drop those that another process has claimed. Return an error of
        reading."""
        failed = None
        for name, region in regions:
            try:
                self._tables[name].regions.writer(region).refresh()
            except (wal.Fenced, MemWalError, KeyError):
                continue  # dropped below, or released or closed meanwhile
            except wal.WalError as error:
                failed = error
        if regions:
            self._drop_ended()
        return failed

    def _drop_ended(self) -> None:
        """Drop writers that were fenced, or stopped themselves after a storage failure. Both need a new claim."""
        with self._lock:
            tables = list(self._tables.items())
        for name, table in tables:
            for writer in table.regions.writers:
                if writer.failure is not None:
                    region = TableRegion(name, writer.region)
                    self._begin(region, self._drop, region, table, writer)

    def _drop(self, region: TableRegion, table: Table, writer: RegionWriter) -> None:
        """Close a failed writer. Its threads may wait for storage for a while; no claim begins before they end."""
        _LOG.warning("%s is dropped: %s", region, writer.failure)
        with suppress(MemWalError):
            table.release(writer.region)
        now = self._clock.monotonic()
        with self._lock:
            if not isinstance(writer.failure, wal.Fenced):
                self._failed.lost(region, now)
            elif self._watch.owner(region) is None:
                self._taken.lost(region, now)

    def _begin(self, region: TableRegion, work: Callable[..., None], *what: Any) -> None:
        """Start `work` in the background, unless other work on `region` is running."""
        with self._lock:
            if region in self._busy or self._stopped.is_set():
                return
            self._busy.add(region)
            self._jobs.submit(self._done, region, work, *what)

    def _done(self, region: TableRegion, work: Callable[..., None], *what: Any) -> None:
        try:
            work(*what)
        except BaseException as error:  # noqa: BLE001 - an error of one region must not stop the others
            with self._lock:
                self._failed.lost(region, self._clock.monotonic())
            _LOG.warning("%s cannot be claimed, will try again: %s", region, classify(error))
        finally:
            with self._lock:
                self._busy.discard(region)
            self._wake.set()

    def _take(self, region: TableRegion, owner: Peer | None) -> None:
        """Claim the region; first request it from its `owner`, if it has one."""
        name, id = region
        table = self._tables.get(name)
        if table is None:
            assert self.open is not None
            table = self.open(name)
        with table.regions.expecting(id):
            before = table.before_claim(id)  # while its owner, if any, still serves it
            if owner is not None:
                try:
                    read = self._standby.look(region, MOST_BEFORE_ASKING, PATIENCE_BEFORE_ASKING)
                    before = replace(before, released=owner.ask(region, read))
                except MemWalError as error:
                    _LOG.info("the daemon at %s keeps %s for now: %s", owner.endpoint, region, error)
                    self._standby.take(region)
                    owner.look()  # it may have ended
                    self._clock.sleep(_STEP)
                    return
            if self._stopped.is_set():
                return
            epoch = table.acquire(id, before)
            _LOG.info("%s is served here with writer epoch %d", region, epoch)

    def _seen(self, peer: Peer, answer: Answer | None, refused: bool) -> float:
        ours = self._ours()
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
            idle = not ours and not self._kept() and not self._watch.regions()
        if changed:
            self._wake.set()
        return LOOK_IDLE if idle else LOOK_EVERY
