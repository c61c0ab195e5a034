"""Which daemon serves which region: a pure decision of each daemon for itself, from what it sees of the others.

The rule. Of the daemons that live, a region belongs to the one with the highest score, a hash of region and endpoint
(rendezvous hashing): who leaves gives up its own regions only, who comes takes only what is to be its own. Nobody
elects anybody, and no two daemons need see the same: the writer epoch decides, whatever they believe. A daemon

1. claims a region that is to be its own and that nobody who lives has;
2. asks the daemon that has it to release it, and claims it then. *The asker dies in between: nobody has it, and the
   next look of whoever it belongs to now claims it;*
3. asks a draining daemon like any other; it gives its regions to whoever they belong to without it;
4. looks at storage where another says it has a region of ours with a higher epoch: this one slept, and was taken over.

What keeps two that see the world differently from taking a region from each other for ever:

- Being looked at is seeing: a daemon that asks is alive, though it may not be reached the other way (`Watch.heard`).
- A region that was taken from us by somebody whom we do not see, or given to him, is left alone for a while, twice as
  long each time (`Patience`), unless we see all of them.

A peer counts as down once it refused `REFUSALS` connections one after the other (its process ended), or gave no answer
`SILENCES` times (it is stopped, or out of reach). One that was never looked at may have anything: nothing is claimed
before it is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

REFUSALS, SILENCES = 2, 3
HEARD = 3.0
"""Seconds for which a daemon that asked us counts as alive, though it does not answer. One that refuses does not."""
AWAY_FIRST, AWAY_MOST = 1.0, 30.0
"""Seconds that a region which was taken from us is left alone: at first, and at most."""
FORGET = 4
"""Times as long as it was left alone we must have a region before that is forgotten; two that take it from each other
leave it alone for up to twice as long as the other, so they never do."""


def score(region: UUID, endpoint: str) -> int:
    """The claim of `endpoint` on `region`: the same number in every process, evenly spread, 64 bits."""
    return int.from_bytes(hashlib.blake2b(region.bytes + endpoint.encode(), digest_size=8).digest())


def target(region: UUID, live: Iterable[str]) -> str | None:
    """To which of `live` the region belongs, None where nobody lives."""
    return max(live, key=lambda endpoint: (score(region, endpoint), endpoint), default=None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a peer said of itself: the epochs of the regions that it has, and whether it is about to end."""

    regions: Mapping[UUID, int] = field(default_factory=dict)
    draining: bool = False


@dataclass(slots=True)
class _Peer:
    answer: Answer | None = None
    refused: int = 0
    silent: int = 0
    heard: float | None = None

    @property
    def down(self) -> bool:
        return self.refused >= REFUSALS or self.silent >= SILENCES

    @property
    def known(self) -> bool:
        return self.answer is not None or self.down


class Watch:
    """What a daemon knows of its peers, from looking at them.

    Thread safety. None; times are those of one clock, in seconds.
    """

    def __init__(self, peers: Iterable[str]) -> None:
        """`peers`: the other endpoints; nothing is known of them yet."""
        self._peers = {endpoint: _Peer() for endpoint in peers}

    def answered(self, endpoint: str, answer: Answer) -> bool:
        """A look was answered; True where the answer is another than the one before."""
        peer = self._peers[endpoint]
        changed = peer.down or peer.answer != answer
        peer.answer, peer.refused, peer.silent = answer, 0, 0
        return changed

    def refused(self, endpoint: str) -> bool:
        """Nobody listens there; True where that makes it down."""
        return self._missed(endpoint, refused=1)

    def silent(self, endpoint: str) -> bool:
        """There was no answer in time; True where that makes it down."""
        return self._missed(endpoint, silent=1)

    def heard(self, endpoint: str, now: float) -> None:
        """A peer asked us for something."""
        if endpoint in self._peers:
            self._peers[endpoint].heard = now

    def live(self, now: float) -> list[str]:
        """The peers that take regions: not down, or heard of just now; not draining."""
        return [endpoint for endpoint, peer in self._peers.items() if self._lives(peer, now)]

    def sees(self, endpoint: str) -> bool:
        """Whether `endpoint` answers us."""
        peer = self._peers.get(endpoint)
        return peer is not None and peer.answer is not None

    def misses_any(self) -> bool:
        """Whether a peer is down that may be alive: it does not answer, but does not refuse either."""
        return any(peer.silent >= SILENCES and peer.refused < REFUSALS for peer in self._peers.values())

    def sees_all(self) -> bool:
        """Whether every peer answers us."""
        return all(peer.answer is not None for peer in self._peers.values())

    def known(self) -> bool:
        """Whether every peer has answered once or is down."""
        return all(peer.known for peer in self._peers.values())

    def owner(self, region: UUID) -> tuple[str, int, bool] | None:
        """The peer that has `region`, its epoch, and whether it will let go by itself; None where none is known to."""
        having = [
            (peer.answer.regions[region], endpoint, peer.answer.draining)
            for endpoint, peer in self._peers.items()
            if peer.answer is not None and region in peer.answer.regions
        ]
        return max(((endpoint, epoch, leaves) for epoch, endpoint, leaves in having), key=_epoch, default=None)

    def _missed(self, endpoint: str, refused: int = 0, silent: int = 0) -> bool:
        peer, before = self._peers[endpoint], self._peers[endpoint].down
        peer.refused += refused
        peer.silent += silent
        if peer.down:
            peer.answer = None
        return peer.down and not before

    @staticmethod
    def _lives(peer: _Peer, now: float) -> bool:
        if peer.refused >= REFUSALS:
            return False
        if peer.silent >= SILENCES:
            return peer.heard is not None and now - peer.heard < HEARD
        return peer.answer is None or not peer.answer.draining


def _epoch(owner: tuple[str, int, bool]) -> int:
    return owner[1]


class Patience:
    """Regions to leave alone for a while, since somebody whom we do not see took them, or claiming them failed.

    Thread safety. None.
    """

    def __init__(self) -> None:
        self._away: dict[UUID, tuple[float, float]] = {}

    def lost(self, region: UUID, now: float) -> None:
        """`region` was taken from us, or could not be claimed: leave it alone, longer than the last time."""
        _, pause = self._away.get(region, (0.0, AWAY_FIRST / 2))
        pause = min(2 * pause, AWAY_MOST)
        self._away[region] = (now + pause, pause)

    def kept(self, region: UUID, now: float) -> None:
        """We have `region`; once we have had it for long, all is forgotten."""
        until, pause = self._away.get(region, (0.0, 0.0))
        if now >= until + FORGET * pause:
            self._away.pop(region, None)

    def forget(self) -> None:
        """Leave nothing alone any more."""
        self._away.clear()

    def away(self, now: float) -> set[UUID]:
        """The regions to leave alone now."""
        return {region for region, (until, _) in self._away.items() if now < until}


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do now. `claim`: regions to claim; `ask`: regions to ask their owners for first, with these; `check`:
    regions of ours that another has with a higher epoch; `settled`: nothing is to be done or waited for."""

    claim: Sequence[UUID] = ()
    ask: Sequence[tuple[UUID, str]] = ()
    check: Sequence[UUID] = ()
    settled: bool = True


def decide(
    me: str, regions: Sequence[UUID], ours: Mapping[UUID, int], watch: Watch, away: Collection[UUID], now: float
) -> Steps:
    """The rule of this module's text for the daemon `me`. `ours`: epochs of the regions that it has; `away`: regions
    that are left alone.
    """
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


def agrees(region: UUID, asker: str, me: str | None, watch: Watch, now: float) -> bool:
    """Whether `region`, which `me` has, belongs to `asker` as `me` sees it; the asker counts as alive.

    `me`: None of a daemon that is about to end.
    """
    return target(region, {asker, *watch.live(now)} | ({me} if me else set())) == asker
