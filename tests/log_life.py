"""One life of a writer over another writer's log, and the checks of the log after any end of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from memwal.wal import (
    BatchPart,
    Claim,
    Clock,
    Fenced,
    ManifestStore,
    ObjectStore,
    Poisoned,
    RegionManifest,
    WalAppender,
    WalError,
    WalOptions,
    check_succession,
    claim,
)
from memwal.wal.layout import manifest_key, parse_entry_key, wal_prefix
from tests.failure_matrix import FaultyStore, Killed
from tests.log_rows import CODEC, rows
from tests.support.clock import FakeClock, SeededIds
from tests.support.log_world import REGION, found
from tests.support.memory_store import MemoryStore


def take(store: ObjectStore, seed: int = 0, clock: Clock | None = None, options: WalOptions | None = None) -> Claim:
    """Claim the region."""
    ids, clock = SeededIds(seed), clock or FakeClock()
    return claim(store, REGION, spec_id=1, codec=CODEC, ids=ids, clock=clock, options=options)


def writer(
    store: ObjectStore,
    claimed: Claim,
    seed: int = 100,
    clock: Clock | None = None,
    options: WalOptions | None = None,
) -> WalAppender:
    """Return the appender of a claim."""
    ids, clock = SeededIds(seed), clock or FakeClock()
    return WalAppender(store, REGION, claimed.guard, CODEC, claimed.next_position, ids, clock, options)


def log_of_two_entries(store: ObjectStore) -> None:
    """Write the log of an earlier writer: ids 1 and 2, acknowledged."""
    appender = writer(store, take(store), seed=50)
    for number in (1, 2):
        appender.append(rows(number), generation=1, applied={"w": number})


class LogLife:
    """Claim, append three entries (two of them one batch), edit the manifest, append another; until a fault ends it."""

    WHOLE = (10, 11, 12, 13, 14)

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock | None = None,
        options: WalOptions | None = None,
        on_ack: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        """`on_ack`: called with all acknowledged ids whenever there are more."""
        self.store, self.clock, self.options = store, clock or FakeClock(), options
        self._on_ack = on_ack
        self.tried: list[int] = []
        self.acked: list[int] = []
        self.ended: BaseException | None = None
        self.appender: WalAppender | None = None
        self._applied: dict[str, int] = {}

    def live(self) -> LogLife:
        """Live until the end or a fault, which is then in `ended`."""
        try:
            claimed = take(self.store, 1, self.clock, self.options)
            self.appender = writer(self.store, claimed, 100, self.clock, self.options)
            self._applied = dict(claimed.applied)
            self._append(10)
            self._append(11, 12, part=BatchPart("q", 1, "a", closes=False))
            self._append(13, part=BatchPart("q", 1, "a", closes=True), also=[11, 12])
            manifests = ManifestStore(self.store, REGION, ids=SeededIds(2), clock=self.clock, options=self.options)
            manifests.edit(claimed.guard, lambda current: replace(current, last_seen=current.last_seen + 1))
            self._append(14)
        except (WalError, Killed) as error:
            self.ended = error
        return self

    def check(self, inner: ObjectStore) -> None:
        """Reopen and compare with what was acknowledged; then let this writer, still alive, try again."""
        claimed = take(inner, seed=200)
        held = found(claimed)
        assert len(held) == len(set(held)), "a row twice"
        assert [each for each in held if each in {1, 2, *self.acked}] == [1, 2, *self.acked], "an acked row is missing"
        assert set(held) <= {1, 2, *self.tried}, "a row that nobody put"
        assert not {11, 12, 13} & set(held) or {11, 12, 13} <= set(held), "half a batch"
        assert ("q" in claimed.applied) == (13 in held)
        assert claimed.applied["w"] >= max([2, *(each for each in self.acked if each in (10, 14))])
        check_positions(inner, claimed.next_position)
        check_chain(inner)
        if self.appender is not None:
            with pytest.raises((Fenced, Poisoned)):
                self.appender.append(rows(99), generation=1, applied={})
        assert writer(inner, claimed, seed=300).append(rows(100), generation=1, applied={}) == claimed.next_position

    def _append(self, *ids: int, part: BatchPart | None = None, also: Sequence[int] = ()) -> None:
        assert self.appender is not None
        self.tried += ids
        if part is None:
            self._applied["w"] = ids[-1]
        elif part.closes:
            self._applied[part.producer] = part.sequence
        self.appender.append(rows(*ids), generation=1, applied=self._applied, part=part)
        if part is None or part.closes:
            self.acked += [*also, *ids]
            self._on_ack(self.acked)


def check_positions(inner: ObjectStore, next_position: int) -> None:
    """Check that positions have no hole, and that nothing lies above the tip."""
    keys = map(parse_entry_key, inner.list(wal_prefix(REGION)))
    assert sorted(each.position for each in keys if each) == list(range(1, next_position))


def check_chain(inner: ObjectStore) -> None:
    """Check that every manifest version follows the one before by the rules."""
    current: RegionManifest | None = None
    for version in itertools.count(1):
        data = inner.get(manifest_key(REGION, version))
        if data is None:
            assert version > 1
            return
        proposed = RegionManifest.decode(data)
        check_succession(current, proposed)
        current = proposed


def calls_of_a_life() -> FaultyStore:
    """Run a life without a fault; return its store with its calls and the log that it began with."""
    store = FaultyStore(MemoryStore(), FakeClock())
    log_of_two_entries(store)
    store.begin()
    life = LogLife(store).live()
    assert (life.ended, tuple(life.acked)) == (None, LogLife.WHOLE)
    return store
