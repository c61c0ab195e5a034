"""Placement: regions are spread evenly and move rarely, and daemons that decide independently agree."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from memwal import wal
from memwal.ingest.service.daemon.placement import (
    AWAY_MOST,
    FORGET,
    Answer,
    Patience,
    TableRegion,
    Watch,
    agrees,
    decide,
    inherited,
    target,
)

ENDPOINTS = [f"grpc://10.0.0.{n}:7000" for n in range(1, 6)]
REGIONS = [TableRegion("", wal.bucket_region(bucket)) for bucket in range(64)]
TICK = 0.25


def test_regions_are_spread_over_all_daemons() -> None:
    many = [TableRegion("", wal.bucket_region(bucket)) for bucket in range(1000)]
    shares = Counter(target(region, ENDPOINTS) for region in many)
    assert set(shares) == set(ENDPOINTS)
    assert all(140 <= share <= 260 for share in shares.values()), shares


def test_who_leaves_moves_only_its_own_regions() -> None:
    for gone in ENDPOINTS:
        left = [endpoint for endpoint in ENDPOINTS if endpoint != gone]
        moved = [region for region in REGIONS if target(region, left) != target(region, ENDPOINTS)]
        assert moved == [region for region in REGIONS if target(region, ENDPOINTS) == gone]


def test_the_answer_is_the_same_in_every_process_and_order() -> None:
    assert [ENDPOINTS.index(str(target(region, ENDPOINTS))) for region in REGIONS[:4]] == [4, 0, 1, 1]
    assert all(target(region, reversed(ENDPOINTS)) == target(region, ENDPOINTS) for region in REGIONS)
    assert target(REGIONS[0], []) is None


ME, PEER = ENDPOINTS[:2]


def of(endpoint: str) -> TableRegion:
    """Return a region that belongs to `endpoint`, one of the two."""
    return next(region for region in REGIONS if target(region, (ME, PEER)) == endpoint)


def test_nothing_is_claimed_before_every_peer_is_known() -> None:
    watch = Watch([PEER])
    assert not decide(ME, REGIONS, {}, watch, (), 0.0).claim
    assert not watch.refused(PEER)
    assert not decide(ME, REGIONS, {}, watch, (), 0.0).claim
    assert watch.refused(PEER)
    assert list(decide(ME, REGIONS, {}, watch, (), 0.0).claim) == REGIONS


def test_a_region_is_inherited_by_who_has_the_next_score() -> None:
    third = ENDPOINTS[2]
    watch = Watch([PEER, third])
    owned = {region: 1 for region in REGIONS if target(region, (ME, PEER, third)) == PEER}
    watch.answered(PEER, Answer(owned))
    watch.answered(third, Answer({}))
    ours = inherited(ME, REGIONS, watch, 0.0)
    assert ours == [region for region in owned if target(region, (ME, third)) == ME]
    assert 0 < len(ours) < len(owned)
    watch.answered(third, Answer({}, draining=True))
    assert inherited(ME, REGIONS, watch, 0.0) == list(owned)
    for _ in range(2):
        watch.refused(PEER)
    assert inherited(ME, REGIONS, watch, 0.0) == []  # they are claimed now


def test_what_a_peer_has_is_asked_for_and_what_it_is_to_have_is_left() -> None:
    watch = Watch([PEER])
    watch.answered(PEER, Answer({of(ME): 3, of(PEER): 1}))
    steps = decide(ME, [of(ME), of(PEER)], {}, watch, (), 0.0)
    assert (list(steps.claim), list(steps.ask), steps.settled) == ([], [(of(ME), PEER)], False)
    assert agrees(of(PEER), PEER, ME, watch, 0.0)
    assert not agrees(of(ME), PEER, ME, watch, 0.0)


def test_a_draining_peer_is_asked_for_all_and_gets_nothing() -> None:
    watch = Watch([PEER])
    watch.answered(PEER, Answer({of(PEER): 1}, draining=True))
    steps = decide(ME, [of(PEER)], {}, watch, (), 0.0)
    assert (list(steps.claim), list(steps.ask), steps.settled) == ([], [(of(PEER), PEER)], False)
    leaving = Watch([ME])
    leaving.answered(ME, Answer())
    assert not agrees(of(PEER), ME, PEER, leaving, 0.0)
    assert agrees(of(PEER), ME, None, leaving, 0.0)
    watch.answered(PEER, Answer({}, draining=True))
    assert list(decide(ME, [of(PEER)], {}, watch, (), 0.0).claim) == [of(PEER)]


def test_a_higher_epoch_elsewhere_is_looked_at() -> None:
    watch = Watch([PEER])
    watch.answered(PEER, Answer({of(ME): 3}))
    assert list(decide(ME, [of(ME)], {of(ME): 2}, watch, (), 0.0).check) == [of(ME)]
    assert not decide(ME, [of(ME)], {of(ME): 4}, watch, (), 0.0).check


def test_a_peer_that_looks_at_us_is_alive_unless_nobody_listens_there() -> None:
    watch = Watch([PEER])
    for _ in range(3):
        watch.silent(PEER)
    assert list(decide(ME, [of(PEER)], {}, watch, (), 1.0).claim) == [of(PEER)]
    watch.heard(PEER, 1.0)
    assert not decide(ME, [of(PEER)], {}, watch, (), 1.0).claim
    assert list(decide(ME, [of(PEER)], {}, watch, (), 60.0).claim) == [of(PEER)]
    watch.heard(PEER, 60.0)
    for _ in range(2):
        watch.refused(PEER)
    assert list(decide(ME, [of(PEER)], {}, watch, (), 60.0).claim) == [of(PEER)]


def test_a_peer_that_denies_us_keeps_what_it_had_until_it_refuses_or_is_silent() -> None:
    watch = Watch([PEER])
    assert not watch.denied(PEER)
    assert not watch.known(), "it may have any region"
    watch.answered(PEER, Answer({of(ME): 3, of(PEER): 1}))
    for _ in range(10):
        assert not watch.denied(PEER)
        watch.silent(PEER)
    assert watch.state(PEER) == "denied"
    assert (watch.answers(PEER), watch.sees(PEER), watch.sees_all()) == (True, False, False)
    assert watch.misses_any(), "it may have taken ours"
    assert watch.owner(of(PEER)) == (PEER, 1, False)
    assert of(ME) not in decide(ME, REGIONS, {}, watch, (), 0.0).claim
    for _ in range(2):
        watch.refused(PEER)
    assert watch.state(PEER) == "ended"
    assert list(decide(ME, REGIONS, {}, watch, (), 0.0).claim) == REGIONS
    assert watch.denied(PEER), "it was started again"
    assert (watch.state(PEER), watch.known(), watch.owner(of(PEER))) == ("denied", True, None)
    assert of(PEER) not in decide(ME, REGIONS, {}, watch, (), 0.0).claim
    for _ in range(3):
        watch.silent(PEER)
    assert watch.state(PEER) == "silent"
    assert list(decide(ME, REGIONS, {}, watch, (), 0.0).claim) == REGIONS
    watch.answered(PEER, Answer())
    assert (watch.state(PEER), watch.sees_all(), watch.misses_any()) == ("serving", True, False)


def test_a_region_that_is_lost_again_and_again_is_left_alone_for_longer() -> None:
    patience, now, pauses = Patience(), 0.0, []
    for _ in range(12):
        patience.lost(REGIONS[0], now)
        began = now
        while patience.away(now):
            now += TICK
        pauses.append(now - began)
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == AWAY_MOST
    patience.kept(REGIONS[0], now + FORGET * AWAY_MOST)
    patience.lost(REGIONS[0], now)
    assert not patience.away(now + 1.0)


# ---- daemons that decide for themselves ----------------------------------------------------------------------------


@dataclass
class Daemon:
    """One daemon; a dict of epochs stands for storage."""

    endpoint: str
    watch: Watch
    patience: Patience = field(default_factory=Patience)
    ours: dict[TableRegion, int] = field(default_factory=dict)
    running: bool = True
    frozen: bool = False


class World:
    """Daemons, the links between them, and the epochs on storage."""

    def __init__(self, seed: int, daemons: int, regions: int) -> None:
        self.random = random.Random(seed)
        self.regions, self.now = REGIONS[:regions], 0.0
        self.epochs = dict.fromkeys(self.regions, 0)
        self.daemons: dict[str, Daemon] = {}
        self.broken: set[tuple[str, str]] = set()
        self.denied: set[tuple[str, str]] = set()
        self.claims = 0
        for endpoint in ENDPOINTS[:daemons]:
            self.start(endpoint)

    def start(self, endpoint: str) -> None:
        peers = [other for other in ENDPOINTS if other != endpoint]
        self.daemons[endpoint] = Daemon(endpoint, Watch(peers))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK
            everybody = sorted(self.daemons.values(), key=lambda each: each.endpoint)
            for daemon in self.random.sample(everybody, len(everybody)):
                if daemon.running and not daemon.frozen:
                    self.turn(daemon)
            self.check()

    def turn(self, daemon: Daemon) -> None:
        for peer in ENDPOINTS:
            if peer != daemon.endpoint:
                self.look(daemon, peer)
        self.write(daemon)
        if daemon.watch.sees_all():
            daemon.patience.forget()
        away = daemon.patience.away(self.now)
        steps = decide(daemon.endpoint, self.regions, daemon.ours, daemon.watch, away, self.now)
        for region in steps.check:
            if daemon.ours[region] < self.epochs[region]:
                self.fenced(daemon, region)
        for region in steps.claim:
            self.claim(daemon, region)
        for region, owner in steps.ask:
            if self.ask(daemon, region, owner):
                self.claim(daemon, region)

    def write(self, daemon: Daemon) -> None:
        """Write to each region with some probability; a write detects a fence."""
        for region, epoch in list(daemon.ours.items()):
            if epoch < self.epochs[region] and self.random.random() < 0.2:
                self.fenced(daemon, region)
            else:
                daemon.patience.kept(region, self.now)

    def look(self, daemon: Daemon, peer: str) -> None:
        other = self.daemons.get(peer)
        if other is None or not other.running:
            daemon.watch.refused(peer)
        elif other.frozen or (daemon.endpoint, peer) in self.broken:
            daemon.watch.silent(peer)
        elif (daemon.endpoint, peer) in self.denied:
            daemon.watch.denied(peer)
        else:
            other.watch.heard(daemon.endpoint, self.now)
            daemon.watch.answered(peer, Answer(dict(other.ours)))

    def ask(self, daemon: Daemon, region: TableRegion, owner: str) -> bool:
        other = self.daemons.get(owner)
        if other is None or not other.running or other.frozen or (daemon.endpoint, owner) in self.broken | self.denied:
            return False
        other.watch.heard(daemon.endpoint, self.now)
        if not agrees(region, daemon.endpoint, owner, other.watch, self.now):
            return False
        other.ours.pop(region, None)
        if not other.watch.sees(daemon.endpoint):
            other.patience.lost(region, self.now)
        return self.random.random() > 0.05  # otherwise the claim comes too late

    def claim(self, daemon: Daemon, region: TableRegion) -> None:
        self.epochs[region] += 1
        self.claims += 1
        daemon.ours[region] = self.epochs[region]

    def fenced(self, daemon: Daemon, region: TableRegion) -> None:
        del daemon.ours[region]
        if daemon.watch.owner(region) is None:
            daemon.patience.lost(region, self.now)

    def check(self) -> None:
        """Assert that at most one daemon has the newest claim of a region; the epoch rejects all others."""
        for region in self.regions:
            newest = [d for d in self.daemons.values() if d.ours.get(region) == self.epochs[region] > 0]
            assert len(newest) <= 1

    def harm(self) -> None:
        daemon = self.random.choice(sorted(self.daemons.values(), key=lambda each: each.endpoint))
        kind = self.random.choice(["crash", "freeze", "thaw", "cut", "cut one way", "mend", "start"])
        if kind == "crash":
            daemon.running, daemon.ours = False, {}
        elif kind in ("freeze", "thaw"):
            daemon.frozen = kind == "freeze"
        elif kind == "mend":
            self.broken.clear()
        elif kind == "start":
            self.start(daemon.endpoint) if not daemon.running else None
        else:
            peer = self.random.choice([other for other in ENDPOINTS if other != daemon.endpoint])
            self.broken |= {(daemon.endpoint, peer)} | ({(peer, daemon.endpoint)} if kind == "cut" else set())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happened_every_region_is_served_by_one_and_stays_there(seed: int) -> None:
    """After crashes, freezes and partitions end, each region is at its daemon, and no daemon claims any more."""
    world = World(seed, daemons=2 + seed % 4, regions=8)
    for _ in range(30):
        world.run(world.random.uniform(0, 6))
        world.harm()
    world.broken.clear()
    for daemon in world.daemons.values():
        daemon.frozen = False
    if not any(daemon.running for daemon in world.daemons.values()):
        world.start(ENDPOINTS[0])
    world.run(2 * AWAY_MOST)
    live = [daemon.endpoint for daemon in world.daemons.values() if daemon.running]
    claims = world.claims
    world.run(20)
    assert world.claims == claims
    for region in world.regions:
        having = [each for each in world.daemons.values() if region in each.ours]
        assert [each.endpoint for each in having] == [target(region, live)]
        assert having[0].ours[region] == world.epochs[region]


@pytest.mark.parametrize("one_way", [False, True])
def test_two_that_do_not_see_each_other_do_not_fight_for_ever(one_way: bool) -> None:
    world = World(1, daemons=2, regions=8)
    world.run(10)
    world.broken = {(ME, PEER)} if one_way else {(ME, PEER), (PEER, ME)}
    world.run(100)
    claims = world.claims
    world.run(100)
    assert world.claims - claims <= 8 * (100 / AWAY_MOST + 2) * 2


@pytest.mark.parametrize("one_way", [False, True])
def test_two_that_deny_each_other_access_take_nothing_from_each_other(one_way: bool) -> None:
    """This happens while a token is already replaced at one daemon and not yet at the other."""
    world = World(1, daemons=2, regions=8)
    world.run(10)
    world.denied = {(ME, PEER)} if one_way else {(ME, PEER), (PEER, ME)}
    claims, having = world.claims, {each.endpoint: dict(each.ours) for each in world.daemons.values()}
    world.run(100)
    assert world.claims == claims
    assert {each.endpoint: each.ours for each in world.daemons.values()} == having
    world.daemons[PEER].running, world.daemons[PEER].ours = False, {}
    world.run(5)
    assert set(world.daemons[ME].ours) == set(world.regions), "it has ended, which a refused connection says"
    world.start(PEER)
    world.run(100)
    world.denied.clear()
    world.run(2 * AWAY_MOST)
    claims = world.claims
    world.run(20)
    assert world.claims == claims
    for region in world.regions:
        assert [each.endpoint for each in world.daemons.values() if region in each.ours] == [target(region, (ME, PEER))]
