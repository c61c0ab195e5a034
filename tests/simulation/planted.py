"""Faults that the simulation must find; the number of seeds that it needs measures its worth.

Each patches real code during a run. Most are what another implementation of the format does, or a shortcut that looks
harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import lance

import memwal.flush.base.swap
import memwal.flush.sst.flusher
import memwal.wal.appender
import memwal.wal.fence
import memwal.wal.slot
import memwal.wal.store.local
from memwal.flush import BaseTable, FlushAttempts, SstCollector
from memwal.flush.commits.append_pass import AppendedRows, mark
from memwal.flush.commits.merge_passes import Written
from memwal.flush.garbage.ssts import Verdict
from memwal.flush.sst.files import discard
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.log import RegionLog, _Lingering
from memwal.ingest.engine.region.state import RegionLevels
from memwal.wal import (
    EntryHeader,
    LocalStore,
    ManifestStore,
    ObjectStore,
    PutOutcome,
    ReadLease,
    StoreRefused,
    StoreUnavailable,
    WalAppender,
    WalCollector,
    WalGarbage,
)
from memwal.wal.entry_reader import EntryReader
from memwal.wal.fence import _Claimer
from memwal.wal.fences import Fences
from memwal.wal.layout import entry_key
from memwal.wal.replay import BatchAssembler
from tests.simulation.lease_world import LeaseWorld
from tests.simulation.world import AppendWorld, SeedFailed, World, simulate

Planted = AbstractContextManager[Any]


def _settle(store: ObjectStore, key: str, data: bytes, *taken_for_ours: PutOutcome, **rest: Any) -> bytes | None:
    """Do the same as `wal.slot.put_until_known`, but count some answers of the first attempt as success."""
    if store.put_if_absent(key, data) in (PutOutcome.CREATED, *taken_for_ours):
        return None
    return memwal.wal.slot.put_until_known(store, key, data, **rest)


@contextmanager
def skips_the_slot_after_a_conflict() -> Iterator[None]:
    """After a 409 the writer uses the next position instead of the same one again, as Lance's own writer does."""

    def put(self: WalAppender, data: bytes) -> int:
        key = entry_key(self._region_id, self.next_position, self._codec.suffix)
        if self._store.put_if_absent(key, data) is PutOutcome.UNAVAILABLE:
            self.next_position += 1
        return original(self, data)

    original = WalAppender._put
    with patch.object(WalAppender, "_put", put):
        yield


@contextmanager
def forgets_rows_that_were_not_appended_beside() -> Iterator[None]:
    """If storage refuses an entry of lingering rows, the rows are not kept for the next entry."""

    def finish(self: RegionLog) -> None:
        try:
            original(self)
        except (StoreUnavailable, StoreRefused):
            self._lingering = _Lingering()
            raise

    original = RegionLog.finish
    with patch.object(RegionLog, "finish", finish):
        yield


@contextmanager
def does_not_wait_for_the_append_beside() -> Iterator[None]:
    """A durable write, a freeze or a durable read continues while lingering rows are still in flight."""

    def finish(self: RegionLog) -> None:
        if self._under_way is not None and not self._under_way.ended:
            self._under_way = None
        original(self)

    original = RegionLog.finish
    with patch.object(RegionLog, "finish", finish):
        yield


def acks_before_the_put_is_known() -> Planted:
    """A put without an answer counts as written."""
    return patch.object(
        memwal.wal.appender, "put_until_known", lambda *args, **rest: _settle(*args, PutOutcome.OUTCOME_UNKNOWN, **rest)
    )


def claims_without_a_sentinel() -> Planted:
    """The claim replays, and leaves the older writer's next slot free."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return patch.object(memwal.wal.fence, "put_until_known", nothing)


def takes_its_own_entry_for_a_strangers() -> Planted:
    """After ALREADY_EXISTS an entry always counts as another writer's, also one that the writer's own retry left."""
    return patch.object(memwal.wal.slot, "_read_back", lambda store, data, attempts: (True, store.get(attempts.key)))


def takes_a_strangers_entry_for_its_own() -> Planted:
    """After ALREADY_EXISTS an entry always counts as the writer's own."""
    return patch.object(memwal.wal.slot, "_read_back", lambda store, data, attempts: (True, None))


@contextmanager
def replay_skips_holes() -> Iterator[None]:
    """Replay skips a missing entry."""

    def each(self: EntryReader, positions: Any) -> Iterator[Any]:
        return (entry for entry in original(self, positions) if entry is not None)

    original = EntryReader.each
    with patch.object(EntryReader, "each", each), patch("memwal.wal.replay.closing", _unclosed):
        yield


@contextmanager
def _unclosed(entries: Any) -> Iterator[Any]:
    yield entries


@contextmanager
def collects_fences() -> Iterator[None]:
    """Everything up to `replay_after` is collected, and writers trust their creates."""
    with ExitStack() as both:
        both.enter_context(patch.object(Fences, "among", lambda *_: (set(), set())))
        both.enter_context(patch.object(WalAppender, "_prove_ownership", lambda *_: None))
        yield


@contextmanager
def tells_fences_by_their_size() -> Iterator[None]:
    """An entry larger than a sentinel without a map counts as rows and is collected. The assumption is that the map
    only grows, but a resize shrinks it. Writers trust their creates."""

    def collect(self: WalCollector, min_age: float, *, dry_run: bool = False) -> WalGarbage:
        report, entries = original(self, min_age, dry_run=dry_run), self._reader.listed()
        sentinel = EntryHeader(1, 1, "0" * 32, {}, sentinel=True)
        last, _ = self._reader.newest_map(max(entries, default=0))
        codec = self._reader._codec
        largest = len(codec.encode(sentinel, codec.no_rows))
        for position, found in entries.items():
            if position <= report.boundary and position < last and found.size > largest and not dry_run:
                self._store.delete(found.key)
        return report

    original = WalCollector.collect
    with ExitStack() as both:
        both.enter_context(patch.object(WalCollector, "collect", collect))
        both.enter_context(patch.object(WalAppender, "_prove_ownership", lambda *_: None))
        yield


def forgets_the_applied_map() -> Planted:
    """A claim begins with an empty map."""
    return patch.object(memwal.wal.fence, "newest_applied", lambda *_: {})


def replays_open_batches() -> Planted:
    """Replay applies entries whether their batch was closed or not."""
    return patch.object(BatchAssembler, "_closed_by", lambda self, entry: [entry])


@contextmanager
def flushes_one_entry_too_far() -> Iterator[None]:
    """The SST claims to cover the entry after its last one."""

    def freeze(self: RegionLevels, covers: int) -> None:
        original(self, covers + 1)

    original = RegionLevels.freeze
    with patch.object(RegionLevels, "freeze", freeze):
        yield


def collects_ssts_that_are(wrongly: Verdict) -> Planted:
    """An SST with this verdict is collected too."""

    def verdict(self: SstCollector, *listing: Any) -> Verdict:
        found = original(self, *listing)
        return Verdict.COMMITTED if found is wrongly else found

    original = SstCollector.verdict
    return patch.object(SstCollector, "verdict", verdict)


def collects_flushes_under_way() -> Planted:
    """An SST that is in no manifest counts as garbage, also that of a flush in progress."""
    return collects_ssts_that_are(Verdict.UNPUBLISHED)


def _looks_behind_the_link(self: LocalStore, directory: Any, name: str, data: bytes) -> PutOutcome:
    """Do the same as `LocalStore._create`, but check only after the link that the directory is in its place."""
    with patch.object(type(directory), "check_in_place", lambda _: None):
        outcome = _create(self, directory, name, data)
    memwal.wal.store.local._Directory.check_in_place(directory)
    return outcome


_create = LocalStore._create


def takes_an_error_behind_the_link_for_a_refusal() -> Planted:
    """The directory is checked once, after the link; if the check fails, the put is answered as refused."""
    return patch.object(LocalStore, "_create", _looks_behind_the_link)


@contextmanager
def removes_an_sst_whose_publication_was_refused() -> Iterator[None]:
    """As the fault above, for manifests only; and the flusher trusts the refusal and removes the SST."""

    def create(self: LocalStore, directory: Any, name: str, data: bytes) -> PutOutcome:
        return (_looks_behind_the_link if name.endswith(".binpb") else _create)(self, directory, name, data)

    def publish(manifests: ManifestStore, guard: Any, kept: FlushAttempts, sst: Any, covers: int) -> Any:
        try:
            return original(manifests, guard, kept, sst, covers)
        except (StoreRefused, StoreUnavailable):
            discard(manifests._store, guard.region_id, sst)
            kept.sst = None
            raise

    original = memwal.flush.sst.flusher._publish
    with ExitStack() as both:
        both.enter_context(patch.object(LocalStore, "_create", create))
        both.enter_context(patch.object(memwal.flush.sst.flusher, "_publish", publish))
        yield


def publishes_though_fenced() -> Planted:
    """The flusher does not check that it still owns the region."""
    return patch.object(ManifestStore, "owned", lambda self, guard, known=None: self._newest(known))


def reads_without_a_lease() -> Planted:
    """An owner that knows of no other owner answers from memory."""
    return patch.object(ReadLease, "covers", lambda self, _: not self.guard.fenced)


def writes_before_others_stop_reading() -> Planted:
    """A claim accepts writes as soon as the log is replayed."""
    return patch.object(RegionCore, "_wait_for_others", lambda _: None)


def believes_a_slot_that_was_pruned() -> Planted:
    """A manifest version counts as the writer's own if its put was answered CREATED, although the version before it is
    gone."""
    return patch.object(ManifestStore, "_follows", lambda *_: True)


def appends_without_the_swap() -> Planted:
    """Rows are added by Lance's Append, which conflicts with no other, and the marker after them, as a merge sets
    it."""

    def append(self: AppendedRows, base: BaseTable) -> Written:
        operation = lance.LanceOperation.Append(self._fragments)
        lance.LanceDataset.commit(base.dataset, operation, read_version=base.version)
        mark(lance.dataset(base.uri), self._marker)
        return Written(inserted=self._rows)

    return patch.object(AppendedRows, "append", append)


def appends_without_progress() -> Planted:
    """The rows are in one version, and the marker that they are committed in the next."""
    return patch.object(memwal.flush.base.swap, "_with_metadata", lambda dataset, _: dataset.lance_schema)


PLANTED: dict[str, Callable[[], Planted]] = {
    each.__name__: each
    for each in (
        skips_the_slot_after_a_conflict,
        acks_before_the_put_is_known,
        forgets_rows_that_were_not_appended_beside,
        does_not_wait_for_the_append_beside,
        claims_without_a_sentinel,
        takes_its_own_entry_for_a_strangers,
        takes_a_strangers_entry_for_its_own,
        replay_skips_holes,
        collects_fences,
        tells_fences_by_their_size,
        forgets_the_applied_map,
        replays_open_batches,
        flushes_one_entry_too_far,
        collects_flushes_under_way,
        takes_an_error_behind_the_link_for_a_refusal,
        removes_an_sst_whose_publication_was_refused,
        publishes_though_fenced,
        believes_a_slot_that_was_pruned,
    )
}


def takes_any_owner_for_the_one_that_ended() -> Planted:
    """A claim does not wait for owners that claimed after the owner that reported its end."""
    return patch.object(_Claimer, "_answers", lambda self, _: self.known.released is None)


OF_LEASES: dict[str, Callable[[], Planted]] = {
    each.__name__: each
    for each in (reads_without_a_lease, writes_before_others_stop_reading, takes_any_owner_for_the_one_that_ended)
}
"""Faults of reads by deposed owners."""


WITHOUT_A_KEY: dict[str, Callable[[], Planted]] = {
    each.__name__: each for each in (appends_without_the_swap, appends_without_progress)
}
"""Faults of commits into tables without a key."""


FOUND_BY = {
    "forgets_rows_that_were_not_appended_beside": 120,
    "does_not_wait_for_the_append_beside": 72,
    "takes_its_own_entry_for_a_strangers": 2,
    "replay_skips_holes": 11,
    "collects_fences": 3,
    "tells_fences_by_their_size": 7,
    "forgets_the_applied_map": 2,
    "replays_open_batches": 2,
    "collects_flushes_under_way": 31,
    "takes_an_error_behind_the_link_for_a_refusal": 2,
    "removes_an_sst_whose_publication_was_refused": 12,
    "publishes_though_fenced": 6,
    "believes_a_slot_that_was_pruned": 27,
    "appends_without_progress": 2,
    "writes_before_others_stop_reading": 2,
    "takes_any_owner_for_the_one_that_ended": 72,
}
"""A seed that finds each fault; seed 1 finds those that are not named. `make test` tries it first, and warns if another
one finds the fault: store that one here."""
SEEDS_TO_FIND = 150
"""Number of seeds within which a fault must be found if its own seed does not find it any more, since a change of the
code may change all runs. Most faults take fewer than ten seeds, some need a rare coincidence."""


def found_by(name: str, first: int | None = None) -> tuple[int, str] | None:
    """Return the first failing seed with the fault planted, and its message; None if none of SEEDS_TO_FIND fails.

    `first`: the seed to try first, by default the one of FOUND_BY.
    """
    kind = LeaseWorld if name in OF_LEASES else AppendWorld if name in WITHOUT_A_KEY else World
    return first_failure(
        (PLANTED | WITHOUT_A_KEY | OF_LEASES)[name], kind, first or FOUND_BY.get(name, 1), SEEDS_TO_FIND
    )


def first_failure(plant: Callable[[], Planted], kind: type[World], first: int, seeds: int) -> tuple[int, str] | None:
    """Return the first failing seed of `first` and then 1 to `seeds` with a fault planted, and its message; None if
    none fails.

    Raises: SeedFailed if the planted code does not fit the code any more, which would find nothing.
    """
    for seed in dict.fromkeys((first, *range(1, seeds + 1))):
        try:
            with plant():
                simulate(seed, kind=kind)
        except SeedFailed as error:
            if isinstance(error.__cause__, TypeError | AttributeError):
                raise
            return seed, error.reason
    return None
