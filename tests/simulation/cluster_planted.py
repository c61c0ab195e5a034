"""Faults that a `ClusterWorld` must find: of tokens where regions change hands and number, of clients, of daemons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch
from uuid import UUID

import memwal.ingest.region.core
import memwal.ingest.rpc.connection
import memwal.wal.garbage
from memwal.flush.resizing.applied_maps import PREFIX, merged_map
from memwal.ingest.client.writes import RoutedWrite
from memwal.ingest.errors import LOST, Unavailable
from memwal.wal import ObjectInfo, ObjectStore
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
    """What some regions have applied counts for all of them after a resize."""
    return _carrying(lambda _, found: {name: each for name, each in found.items() if not name.startswith(PREFIX)})


@contextmanager
def claims_with_an_empty_map() -> Iterator[None]:
    """A take-over forgets what was applied."""

    def forgetting(*args: Any, **rest: Any) -> Any:
        claimed = claim(*args, **rest)
        claimed.applied.clear()
        return claimed

    claim = memwal.ingest.region.core.wal.claim
    with ExitStack() as patches:
        patches.enter_context(patch.object(memwal.ingest.region.core.wal, "claim", forgetting))
        yield


@contextmanager
def _snapshots_collected(fits: Callable[[str, int, str], bool]) -> Iterator[None]:
    """By another rule, of a snapshot's name, the position of the newest entry and the snapshot that this names."""

    def superseded(store: ObjectStore, region: UUID, position: int, named: str) -> list[ObjectInfo]:
        found = ((each, parse_snapshot_key(each.key)) for each in store.describe(snapshot_prefix(region)))
        return [each for each, name in found if name and fits(name, position, named)]

    with patch.object(memwal.wal.garbage, "superseded", superseded):
        yield


def collects_the_snapshot_that_is_named() -> Planted:
    """Snapshots of the map are as old as the entries beside them."""
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
    """A client that lost the connection behind its rows says that nothing was written, or sends them again."""
    return patch.object(
        memwal.ingest.rpc.connection, "_no_answer", lambda endpoint: Unavailable(f"lost {endpoint}", {"reason": LOST})
    )


PLANTED_IN_CLUSTERS: dict[str, Callable[[], Planted]] = {
    each.__name__: each
    for each in (
        carries_the_highest_only,
        claims_with_an_empty_map,
        collects_the_snapshot_that_is_named,
        resends_without_the_token,
        takes_a_lost_answer_for_not_written,
    )
}

FOUND_BY = {
    "carries_the_highest_only": 52,
    "claims_with_an_empty_map": 20,
    "collects_the_snapshot_that_is_named": 20,
    "resends_without_the_token": 66,
    "takes_a_lost_answer_for_not_written": 34,
}
"""As `planted.FOUND_BY`."""
SEEDS_TO_FIND = 100


def found_in_clusters_by(name: str) -> tuple[int, str] | None:
    """The first seed that fails with the fault planted, and what it says; None where none of SEEDS_TO_FIND does."""
    return first_failure(PLANTED_IN_CLUSTERS[name], ClusterWorld, FOUND_BY.get(name, 1), SEEDS_TO_FIND)
