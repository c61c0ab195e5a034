"""Decide which daemon serves which region. Each daemon decides for itself, by pure functions, from its view of its
peers.

A region belongs to the live daemon with the highest score, a hash of table, region and endpoint (rendezvous hashing):
a daemon that leaves affects only its own regions, and so does one that joins. The daemons elect no leader and need not
see the same peers: the writer epoch keeps every view safe. A daemon

1. claims a region that belongs to it and that no live daemon has;
2. asks the daemon that has one of its regions to release it, and then claims it. *If the requester dies in between, no
   daemon has the region; the daemon that it belongs to next claims it at its next check;*
3. asks a draining daemon like any other; a draining daemon excludes itself when it decides where a region belongs;
4. reads storage if a peer reports one of this daemon's regions with a higher epoch: this daemon was suspended, and
   another one took over.

Two daemons with different views do not take a region from each other indefinitely, because:

- A peer that contacts this daemon counts as alive, even if this daemon cannot reach it (`Watch.heard`).
- A peer that rejects this daemon's credentials counts as alive and keeps its regions (`Watch.denied`).
- A region that an unseen daemon took or received from this one is left alone for a pause that doubles each time
  (`Patience`), unless this daemon sees all peers.

A peer counts as down after it refused `REFUSALS` connections in a row (its process ended), or gave no answer
`SILENCES` times (it hangs, or is unreachable). A peer that was never checked may have any region, so nothing is
claimed before the first check of every peer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from uuid import UUID

from memwal.wal import named

REFUSALS, SILENCES = 2, 3
HEARD = 3.0
"""Seconds for which a peer that contacted this daemon counts as alive though it does not answer. Does not apply to a
peer that refuses connections."""
AWAY_FIRST, AWAY_MOST = 1.0, 30.0
"""Seconds for which a region that was taken away is left alone: the first time, and at most."""
FORGET = 4
"""A pause is forgotten after this daemon has kept the region for this many times the pause. Two daemons that take a
region from each other have pauses that differ by a factor of two at most, so they never forget."""


class TableRegion(NamedTuple):
    """A region of one of the tables of a daemon. Regions of different tables have the same ids."""

    table: str
    """The table's name, "" in a daemon of one table."""
    id: UUID

    def __str__(self) -> str:
        """Return the name of the region in messages: "orders region 3", without the table if there is only one."""
        return f"{self.table} {named(self.id)}".lstrip()


def score(region: TableRegion, endpoint: str) -> int:
    """Return the score of `endpoint` for `region`: equal in every process, evenly distributed, 64 bits."""
    text = region.table.encode() + region.id.bytes + endpoint.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def target(region: TableRegion, live: Iterable[str]) -> str | None:
    """Return the endpoint in `live` that the region belongs to; None if `live` is empty."""
    return max(live, key=lambda endpoint: (score(region, endpoint), endpoint), default=None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A peer's answer to a check: the epochs of its regions, and whether it is about to end."""

    regions: Mapping[TableRegion, int] = field(default_factory=dict)
    draining: bool = False


PeerState = Literal["unknown", "serving", "draining", "denied", "silent", "ended"]
"""Not checked yet; answers; answers and is about to end; rejects the credentials; gives no answer; refuses
connections."""


@dataclass(slots=True)
class _Peer:
    answer: Answer | None = None
    refused: int = 0
    silent: int = 0
    heard: float | None = None
    denied: bool = False

    @property
    def down(self) -> bool:
        return self.refused >= REFUSALS or self.silent >= SILENCES

    @property
    def known(self) -> bool:
        return self.answer is not None or self.down

    @property
    def seen(self) -> bool:
        return self.answer is not None and not self.denied

    def lives(self, now: float) -> bool:
        if self.refused >= REFUSALS:
            return False
        if self.silent >= SILENCES:
            return self.heard is not None and now - self.heard < HEARD
        return self.answer is None or not self.answer.draining


class Watch:
    """The state of a daemon's peers, as of its last checks.

    Thread safety. None; times are those of one clock, in seconds.
    """

    def __init__(self, peers: Iterable[str]) -> None:
        """Begin with the endpoints `peers` in unknown state."""
        self._peers = {endpoint: _Peer() for endpoint in peers}
        self._orphans: set[TableRegion] = set()

    def answered(self, endpoint: str, answer: Answer) -> bool:
        """Record the answer to a check; return whether it differs from the previous one."""
        peer = self._peers[endpoint]
        changed = peer.down or peer.answer != answer
        peer.answer, peer.refused, peer.silent, peer.denied = answer, 0, 0, False
        return changed

    def denied(self, endpoint: str) -> bool:
        """Record that the peer rejected the credentials, so it is alive. Return whether it was down before.

        It counts as having the regions that it had. If it was down, others have taken its regions, so it counts as
        having none.
        """
        peer = self._peers[endpoint]
        changed = peer.down
        if changed:
            peer.answer = Answer()
        peer.refused, peer.silent, peer.denied = 0, 0, True
        return changed

    def refused(self, endpoint: str) -> bool:
        """Record a refused connection; return whether the peer has become down."""
        return self._missed(endpoint, refused=1)

    def silent(self, endpoint: str) -> bool:
        """Record a check without an answer; return whether the peer has become down."""
        return self._missed(endpoint, silent=1)

    def heard(self, endpoint: str, now: float) -> None:
        """Record a call of a peer to this daemon."""
        if endpoint in self._peers:
            self._peers[endpoint].heard = now

    def live(self, now: float) -> list[str]:
        """Return the peers that can own regions: neither down (unless they called recently) nor draining."""
        return [endpoint for endpoint, peer in self._peers.items() if peer.lives(now)]

    def sees(self, endpoint: str) -> bool:
        """Return whether `endpoint` answers this daemon."""
        peer = self._peers.get(endpoint)
        return peer is not None and peer.seen

    def answers(self, endpoint: str) -> bool:
        """Return whether `endpoint` answers this daemon, or rejects its credentials."""
        return self.sees(endpoint) or self._peers[endpoint].denied

    def state(self, endpoint: str) -> PeerState:
        """Return the state of a peer."""
        peer = self._peers[endpoint]
        if peer.down:
            return "ended" if peer.refused >= REFUSALS else "silent"
        if peer.denied:
            return "denied"
        if peer.answer is None:
            return "unknown"
        return "draining" if peer.answer.draining else "serving"

    def misses_any(self) -> bool:
        """Return whether an unseen peer may be alive: it does not answer, or rejects the credentials, but does not
        refuse connections."""
        silent = (peer.silent >= SILENCES and peer.refused < REFUSALS for peer in self._peers.values())
        return any(silent) or any(peer.denied for peer in self._peers.values())

    def sees_all(self) -> bool:
        """Return whether every peer answers this daemon."""
        return all(peer.seen for peer in self._peers.values())

    def known(self) -> bool:
        """Return whether every peer has answered once or is down."""
        return all(peer.known for peer in self._peers.values())

    def owner(self, region: TableRegion) -> tuple[str, int, bool] | None:
        """Return the peer that has `region`, its epoch, and whether it is draining; None if unknown."""
        having = [
            (endpoint, peer.answer.regions[region], peer.answer.draining)
            for endpoint, peer in self._peers.items()
            if peer.answer is not None and region in peer.answer.regions
        ]
        return max(having, key=lambda owner: owner[1], default=None)

    def regions(self) -> set[TableRegion]:
        """Return the regions that peers have, and those of peers that went down, until another peer has them."""
        having = {region for peer in self._peers.values() if peer.answer is not None for region in peer.answer.regions}
        self._orphans -= having
        return having | self._orphans

    def adopted(self, regions: Iterable[TableRegion]) -> None:
        """Record that this daemon has `regions`."""
        self._orphans.difference_update(regions)

    def _missed(self, endpoint: str, refused: int = 0, silent: int = 0) -> bool:
        peer, before = self._peers[endpoint], self._peers[endpoint].down
        peer.refused += refused
        peer.silent += silent
        if peer.down:
            self._orphans.update(() if peer.answer is None else peer.answer.regions)
            peer.answer, peer.denied = None, False
        return peer.down and not before


class Patience:
    """Regions to leave alone for a while, because an unseen daemon took them, or a claim failed.

    Thread safety. None.
    """

    def __init__(self) -> None:
        self._away: dict[TableRegion, tuple[float, float]] = {}

    def lost(self, region: TableRegion, now: float) -> None:
        """Leave `region` alone, for longer than the last time: it was taken away, or could not be claimed."""
        _, pause = self._away.get(region, (0.0, AWAY_FIRST / 2))
        pause = min(2 * pause, AWAY_MOST)
        self._away[region] = (now + pause, pause)

    def kept(self, region: TableRegion, now: float) -> None:
        """Record that this daemon has `region`. After `FORGET` times its pause the pause is forgotten."""
        until, pause = self._away.get(region, (0.0, 0.0))
        if now >= until + FORGET * pause:
            self._away.pop(region, None)

    def forget(self) -> None:
        """Forget all pauses."""
        self._away.clear()

    def away(self, now: float) -> set[TableRegion]:
        """Return the regions to leave alone now."""
        return {region for region, (until, _) in self._away.items() if now < until}


@dataclass(frozen=True, slots=True)
class Steps:
    """The next actions. `claim`: regions to claim; `ask`: regions to request before a claim, with their owners;
    `check`: own regions that a peer reports with a higher epoch; `settled`: no action is left, and every peer is
    known."""

    claim: Sequence[TableRegion] = ()
    ask: Sequence[tuple[TableRegion, str]] = ()
    check: Sequence[TableRegion] = ()
    settled: bool = True


def decide(
    me: str,
    regions: Iterable[TableRegion],
    ours: Mapping[TableRegion, int],
    watch: Watch,
    away: Collection[TableRegion],
    now: float,
) -> Steps:
    """Apply the rules of the module to the daemon `me`. `ours`: epochs of its regions; `away`: regions to leave
    alone."""
    live = [me, *watch.live(now)]
    claim, ask, check = [], [], []
    for region in regions:
        owner = watch.owner(region)
        if region in ours:
            if owner is not None and owner[1] > ours[region]:
                check.append(region)
        elif target(region, live) != me or region in away:
            continue
        elif owner is None:
            claim.append(region)
        else:
            ask.append((region, owner[0]))
    if not watch.known():
        claim = []
    return Steps(claim, ask, check, settled=watch.known() and not (claim or ask or check))


def inherited(me: str, regions: Iterable[TableRegion], watch: Watch, now: float) -> list[TableRegion]:
    """Return the regions of peers that would belong to `me` if their owner ended now."""
    live = watch.live(now)
    owned = [(region, owner[0]) for region in regions if (owner := watch.owner(region)) is not None]
    return [region for region, owner in owned if target(region, {me, *live} - {owner}) == me]


def agrees(region: TableRegion, asker: str, me: str | None, watch: Watch, now: float) -> bool:
    """Return whether `region`, owned by `me`, belongs to `asker` in the view of `me`. The asker counts as alive.

    `me`: None for a daemon that is about to end.
    """
    return target(region, {asker, *watch.live(now)} | ({me} if me else set())) == asker
