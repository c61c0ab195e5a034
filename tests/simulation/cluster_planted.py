"""Faults that a `ClusterWorld` must find: of tokens during take-overs and resizes, of clients, of daemons, of readers
of changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch
from uuid import UUID

import memwal.ingest.engine.region.core
import memwal.ingest.engine.region.log
import memwal.ingest.service.rpc.connection
import memwal.wal.garbage
from memwal import wal
from memwal.flush.resizing.applied_maps import PREFIX, merged_map
from memwal.ingest.engine.changes.start import BaseVersions, Start, Starts
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.groups import Repeats, WriteGroup
from memwal.ingest.engine.region.log import RegionLog
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.errors import LOST, MemWalError, Unavailable
from memwal.ingest.service.client.writes import RoutedWrite
from memwal.wal import ObjectInfo, ObjectStore, WalAppender
from memwal.wal.applied import AppliedMap
from memwal.wal.layout import parse_snapshot_key, snapshot_prefix
from tests.simulation.cluster_world import ClusterWorld
from tests.simulation.planted import first_failure

Planted = AbstractContextManager[Any]


def _carrying(change: Callable[[Sequence[Mapping[str, int]], dict[str, int]], dict[str, int]]) -> Planted:
    return patch.object(
        import_module("memwal.flush.resizing.steps"),
        "initial_map",
        lambda maps: AppliedMap(change(maps, merged_map(maps))),
    )


def carries_the_highest_only() -> Planted:
    """After a resize, what some regions have applied counts for all of them."""
    return _carrying(lambda _, found: {name: each for name, each in found.items() if not name.startswith(PREFIX)})


def carries_what_all_have_only() -> Planted:
    """After a resize, what some regions have not applied counts for none of them."""
    return _carrying(
        lambda maps, found: {
            name: min(each.get(name, -1) for each in maps) for name in found if not name.startswith(PREFIX)
        }
    )


def claims_with_an_empty_map() -> Planted:
    """A take-over forgets the whole applied map."""

    def forgetting(*args: Any, **rest: Any) -> Any:
        claimed = claim(*args, **rest)
        for name in list(claimed.applied):
            del claimed.applied[name]
        return claimed

    claim = wal.claim
    return patch.object(memwal.ingest.engine.region.core.wal, "claim", forgetting)


def claims_without_tokens_of_clients() -> Planted:
    """A take-over forgets the tokens that clients have applied, and keeps those of producers."""

    def forgetting(*args: Any, **rest: Any) -> Any:
        claimed = claim(*args, **rest)
        for name in [name for name in claimed.applied if name.startswith("writer")]:
            del claimed.applied[name]
        return claimed

    claim = wal.claim
    return patch.object(memwal.ingest.engine.region.core.wal, "claim", forgetting)


def applies_tokens_of_clients_twice() -> Planted:
    """A daemon checks the tokens of producers only: a client's repeated put is applied again."""

    def set_aside(self: Repeats, group: Sequence[Write], applied: AppliedMap, admission: Any) -> Any:
        fresh: list[Write] = []
        after = applied.copy() if any(write.token for write in group) else applied
        for write in group:
            if write.token is None or write.token.producer.startswith("writer"):
                fresh.append(write)
            else:
                some, after = original(self, [write], after, admission)
                fresh += some
        return fresh, after

    original = Repeats.set_aside
    return patch.object(Repeats, "set_aside", set_aside)


def believes_a_token_of_a_refused_entry() -> Planted:
    """A token counts as applied although storage refused its entry."""

    def append(self: RegionLog, checked: Any, applied: AppliedMap, **rest: Any) -> Any:
        try:
            return original(self, checked, applied, **rest)
        except memwal.ingest.engine.region.log.NOTHING_WRITTEN:
            self.applied = applied
            raise

    original = RegionLog.append
    return patch.object(RegionLog, "append", append)


def acks_before_the_append() -> Planted:
    """Durable writes are acknowledged while they linger."""
    return patch.object(WriteGroup, "durable", property(lambda _: False))


def acks_before_the_append_without_a_token() -> Planted:
    """Durable writes without a token are acknowledged while they linger."""
    durable = property(lambda group: any(write.durable and write.token is not None for write in group.writes))
    return patch.object(WriteGroup, "durable", durable)


def acks_deletes_before_the_append() -> Planted:
    """Durable deletes are acknowledged while they linger."""
    durable = property(lambda group: any(write.durable and write.deletes is not True for write in group.writes))
    return patch.object(WriteGroup, "durable", durable)


def shows_lingering_rows_as_durable() -> Planted:
    """A read at `durable` shows lingering rows without appending them."""
    return patch.object(RegionCore, "durable_view", lambda core: core.levels.view())


def acks_a_put_when_one_owner_has() -> Planted:
    """A client acknowledges a put to several owners when one owner has acknowledged it."""

    def attempt(self: RoutedWrite, within: float) -> Any:
        try:
            return original(self, within)
        except MemWalError:
            if self._acks:
                return self._receipt()
            raise

    original = RoutedWrite.attempt
    return patch.object(RoutedWrite, "attempt", attempt)


def takes_the_next_slot_when_fenced() -> Planted:
    """A former owner whose slot is taken writes into the next one."""
    return patch.object(WalAppender, "_taken", lambda *_: None)


@contextmanager
def _snapshots_collected(fits: Callable[[str, int, str], bool]) -> Iterator[None]:
    """Collect snapshots by the rule `fits`: of a snapshot's name, the position of the newest entry, and the snapshot
    that the entry names."""

    def superseded(store: ObjectStore, region: UUID, position: int, named: str) -> list[ObjectInfo]:
        found = ((each, parse_snapshot_key(each.key)) for each in store.describe(snapshot_prefix(region)))
        return [each for each, name in found if name and fits(name, position, named)]

    with patch.object(memwal.wal.garbage, "superseded", superseded):
        yield


def collects_the_snapshot_that_is_named() -> Planted:
    """A snapshot of the map below the newest entry is collected, although that entry may name it."""
    return _snapshots_collected(lambda name, position, _: int(name.partition("-")[0]) < position)


@contextmanager
def resends_without_the_token() -> Iterator[None]:
    """A client sends the token with its first attempt only."""

    def attempt(self: RoutedWrite, within: float) -> Any:
        try:
            return original(self, within)
        finally:
            self._request = {**self._request, "token": None}

    original = RoutedWrite.attempt
    with patch.object(RoutedWrite, "attempt", attempt):
        yield


def takes_a_lost_answer_for_not_written() -> Planted:
    """A client that lost the connection after sending its rows reports that nothing was written, or sends them
    again."""
    return patch.object(
        memwal.ingest.service.rpc.connection,
        "_no_answer",
        lambda endpoint: Unavailable(f"lost {endpoint}", {"reason": LOST}),
    )


def tells_changes_by_an_inexact_version() -> Planted:
    """A reader of changes uses the newest version of the base table with a region's progress, although an interrupted
    commit may already have deleted rows in it."""

    def exact(self: BaseVersions, region: UUID, routing: int, most: int, _: Any) -> Any:
        last = bisect_right(self._numbers, (routing, most), key=lambda number: self._progress(number, region)) - 1
        there = last >= 0 and self._progress(self._numbers[last], region)[0] == routing
        return self._view(self._numbers[last]) if there else None

    return patch.object(BaseVersions, "exact", exact)


def tells_changes_by_stored_rows_alone() -> Planted:
    """A reader of changes does not read the log between its base version and its position."""

    def of(self: Starts, region: UUID, position: int, routing: int) -> Start:
        return replace(original(self, region, position, routing), after=position)

    original = Starts.of
    return patch.object(Starts, "of", of)


def tells_changes_of_the_next_routing() -> Planted:
    """A reader of changes takes the end of the log for the end of an earlier routing."""
    return patch.object(Starts, "end_of_routing", lambda self, region, _, position: self.tip(region, position))


PLANTED_IN_CLUSTERS: dict[str, Callable[[], Planted]] = {
    each.__name__: each
    for each in (
        carries_the_highest_only,
        carries_what_all_have_only,
        claims_with_an_empty_map,
        claims_without_tokens_of_clients,
        applies_tokens_of_clients_twice,
        believes_a_token_of_a_refused_entry,
        acks_before_the_append,
        acks_before_the_append_without_a_token,
        acks_deletes_before_the_append,
        shows_lingering_rows_as_durable,
        acks_a_put_when_one_owner_has,
        takes_the_next_slot_when_fenced,
        collects_the_snapshot_that_is_named,
        resends_without_the_token,
        takes_a_lost_answer_for_not_written,
        tells_changes_by_an_inexact_version,
        tells_changes_by_stored_rows_alone,
        tells_changes_of_the_next_routing,
    )
}

FOUND_BY = {
    "carries_the_highest_only": 9,
    "carries_what_all_have_only": 89,
    "claims_with_an_empty_map": 20,
    "claims_without_tokens_of_clients": 96,
    "applies_tokens_of_clients_twice": 20,
    "believes_a_token_of_a_refused_entry": 57,
    "acks_before_the_append": 3,
    "acks_before_the_append_without_a_token": 13,
    "acks_deletes_before_the_append": 40,
    "shows_lingering_rows_as_durable": 93,
    "takes_the_next_slot_when_fenced": 15,
    "collects_the_snapshot_that_is_named": 2,
    "resends_without_the_token": 6,
    "takes_a_lost_answer_for_not_written": 2,
    "tells_changes_of_the_next_routing": 41,
    "acks_a_put_when_one_owner_has": 2,
    "tells_changes_by_an_inexact_version": 55,
    "tells_changes_by_stored_rows_alone": 12,
}
"""As `planted.FOUND_BY`."""
SEEDS_TO_FIND = 300


def found_in_clusters_by(name: str, first: int | None = None) -> tuple[int, str] | None:
    """Return the same as `planted.found_by`."""
    return first_failure(PLANTED_IN_CLUSTERS[name], ClusterWorld, first or FOUND_BY.get(name, 1), SEEDS_TO_FIND)
