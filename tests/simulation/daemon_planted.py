"""Faults that a `DaemonWorld` must find: what may go wrong with tokens where regions change hands and number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pyarrow as pa

import memwal.ingest.region.core
import memwal.wal.garbage
from memwal.flush.resizing.applied_maps import PREFIX, merged_map
from memwal.ingest.region.write_queue import Write
from memwal.wal import ObjectInfo, ObjectStore
from memwal.wal.applied import AppliedMap
from memwal.wal.layout import parse_snapshot_key, snapshot_prefix
from tests.simulation.daemon_world import DaemonWorld
from tests.simulation.planted import first_failure

Planted = AbstractContextManager[Any]


def cuts_the_rows_and_not_what_deletes() -> Planted:
    """A half-applied micro-batch with deletes after a resize."""

    def keep(self: Write, rows: Any) -> None:
        self.rows = self.rows.filter(pa.array(rows))

    return patch.object(Write, "keep", keep)


def _carrying(change: Callable[[Sequence[Mapping[str, int]], dict[str, int]], dict[str, int]]) -> Planted:
    return patch.object(
        import_module("memwal.flush.resizing.steps"),
        "initial_map",
        lambda maps: AppliedMap(change(maps, merged_map(maps))),
    )


def carries_the_highest_only() -> Planted:
    """What some regions have applied counts for all of them after a resize."""
    return _carrying(lambda _, found: {name: each for name, each in found.items() if not name.startswith(PREFIX)})


def carries_what_all_have_only() -> Planted:
    """What some regions have not applied counts for none of them after a resize."""
    return _carrying(
        lambda maps, found: {
            name: min(each.get(name, -1) for each in maps) for name in found if not name.startswith(PREFIX)
        }
    )


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


def collects_snapshots_ahead_of_their_entry() -> Planted:
    """What no entry names is garbage."""
    return _snapshots_collected(lambda name, _, named: name != named)


PLANTED_IN_DAEMONS: dict[str, Callable[[], Planted]] = {
    each.__name__: each
    for each in (
        cuts_the_rows_and_not_what_deletes,
        carries_the_highest_only,
        carries_what_all_have_only,
        claims_with_an_empty_map,
        collects_the_snapshot_that_is_named,
        collects_snapshots_ahead_of_their_entry,
    )
}

FOUND_BY = {
    "cuts_the_rows_and_not_what_deletes": 12,
    "carries_the_highest_only": 1,
    "carries_what_all_have_only": 10,
    "claims_with_an_empty_map": 6,
    "collects_the_snapshot_that_is_named": 4,
    "collects_snapshots_ahead_of_their_entry": 4,
}
"""As `planted.FOUND_BY`; about one seed in ten finds one."""
SEEDS_TO_FIND = 70


def found_in_daemons_by(name: str) -> tuple[int, str] | None:
    """The first seed that fails with the fault planted, and what it says; None where none of SEEDS_TO_FIND does."""
    return first_failure(PLANTED_IN_DAEMONS[name], DaemonWorld, FOUND_BY[name], SEEDS_TO_FIND)
