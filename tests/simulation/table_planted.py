"""Faults in flush, commit and collection that the simulation of the table must find.

Each patches real code during a run, as in `planted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import memwal.flush.commits.changes
import memwal.flush.commits.committer
import memwal.flush.commits.load
import memwal.flush.commits.maintenance
import memwal.flush.commits.rounds
import memwal.flush.sst.files
import memwal.flush.sst.flusher
import memwal.ingest.engine.region.core
import memwal.wal.fence
import memwal.wal.manifest
from memwal.flush.commits.append_pass import mark
from memwal.flush.commits.changes import Newest, newest_per_key
from memwal.flush.commits.plan import RegionPlan
from memwal.flush.garbage.ssts import Verdict
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.table.regions import RegionSet
from memwal.wal import RegionManifest
from tests.simulation.planted import Planted, collects_flushes_under_way, collects_ssts_that_are, first_failure
from tests.simulation.table_world import RestingWorld, TableWorld


@contextmanager
def prunes_before_the_sync() -> Iterator[None]:
    """The manifests drop their SSTs before the base is synced to the disk."""

    def prune_all(*arguments: Any) -> None:
        waiting: list[Any] = []
        with patch.object(memwal.flush.commits.committer, "sync_table", waiting.append):
            original(*arguments)
        for dataset in waiting:
            memwal.flush.commits.committer.sync_table(dataset)

    original = memwal.flush.commits.committer.prune_all
    with patch.object(memwal.flush.commits.committer, "prune_all", prune_all):
        yield


def prunes_one_generation_too_many() -> Planted:
    """Off by one: the first generation that is not committed is pruned too."""
    original = memwal.flush.commits.committer._without
    return patch.object(memwal.flush.commits.committer, "_without", lambda manifest, done: original(manifest, done + 1))


@contextmanager
def marker_on_the_deletes_pass() -> Iterator[None]:
    """The first of the two passes records the progress."""
    markers: list[Mapping[Any, int]] = []

    def write(self: Any, base: Any, changes: Any, there: Any, marker: Mapping[Any, int]) -> None:
        markers.append(marker)
        write_original(self, base, changes, there, marker)

    def delete(dataset: Any, keys: Any, marker: Mapping[Any, int] | None = None) -> Any:
        done = delete_original(dataset, keys, marker or markers[-1])
        markers.append({})  # the upserts pass has nothing left to record
        return done

    def upsert(dataset: Any, rows: Any, key: Any, marker: Mapping[Any, int]) -> Any:
        return upsert_original(dataset, rows, key, markers[-1])

    write_original = memwal.flush.commits.rounds.Rounds._write
    delete_original, upsert_original = (
        memwal.flush.commits.rounds.delete_pass,
        memwal.flush.commits.rounds.upsert_pass,
    )
    with ExitStack() as patches:
        patches.enter_context(patch.object(memwal.flush.commits.rounds.Rounds, "_write", write))
        patches.enter_context(patch.object(memwal.flush.commits.rounds, "delete_pass", delete))
        patches.enter_context(patch.object(memwal.flush.commits.rounds, "upsert_pass", upsert))
        yield


@contextmanager
def commits_without_the_first_generation() -> Iterator[None]:
    """Of several generations the first one's rows are skipped; the marker claims that all are committed."""

    def read(store: Any, plans: Sequence[RegionPlan], *rest: Any) -> Any:
        return original(store, [replace(plan, ssts=plan.ssts[-1:]) for plan in plans], *rest)

    original = memwal.flush.commits.rounds.read_changes
    with patch.object(memwal.flush.commits.rounds, "read_changes", read):
        yield


def commits_the_oldest_row_of_each_key() -> Planted:
    """Over several generations the first row of a key wins."""

    def reversed_order(generations: Sequence[Any], key: Sequence[str]) -> list[Newest]:
        return newest_per_key(generations[::-1], key)[::-1]

    return patch.object(memwal.flush.commits.changes, "newest_per_key", reversed_order)


def leaves_out_the_deletes_of_a_second_try() -> Planted:
    """After a conflict the deletes are assumed to be done."""
    return patch.object(memwal.flush.commits.rounds, "rows_to_delete", lambda *_: 0)


@contextmanager
def publishes_before_the_sidecar() -> Iterator[None]:
    """The manifest lists the SST before its key sidecar is written."""
    waiting: dict[str, Callable[[], None]] = {}

    def write_later(directory: str, *args: Any, **rest: Any) -> None:
        waiting[directory.rsplit("/", 1)[1]] = lambda: write(directory, *args, **rest)

    def flushed(store: Any, manifests: Any, guard: Any, *args: Any, **rest: Any) -> RegionManifest:
        manifest = original(store, manifests, guard, *args, **rest)
        for sst in manifest.ssts:
            if sst.path in waiting:
                memwal.flush.sst.files.sync_tree("")  # takes its time
                waiting.pop(sst.path)()
        return manifest

    write, original = memwal.flush.sst.files.write_key_sidecar, memwal.flush.flush
    with ExitStack() as patches:
        patches.enter_context(patch.object(memwal.flush.sst.files, "write_key_sidecar", write_later))
        patches.enter_context(patch.object(memwal.flush.sst.files, "verify", lambda *_: None))
        patches.enter_context(patch.object(memwal.flush, "flush", flushed))
        yield


def records_a_load_after_its_rows() -> Planted:
    """The marker of a load is in a separate version."""

    def upsert(dataset: Any, rows: Any, key: Any, marker: Mapping[Any, int], number: int) -> Any:
        done = original(dataset, rows, key, {}, number)
        mark(dataset, marker)
        return done

    original = memwal.flush.commits.load.upsert_pass
    return patch.object(memwal.flush.commits.load, "upsert_pass", upsert)


def collects_published_ssts() -> Planted:
    """An SST is collected although the newest manifest lists it."""
    return collects_ssts_that_are(Verdict.LISTED)


def deletes_versions_without_a_barrier() -> Planted:
    """A write from a handle older than the deleted versions does not conflict."""
    return patch.object(memwal.flush.commits.maintenance, "_raise_barrier", lambda *_: None)


def rests_with_rows_in_memory() -> Planted:
    """A region is released at rest whatever rows are in its memtables or SSTs."""
    return patch.object(RegionCore, "at_rest", property(lambda self: self.failure is None))


@contextmanager
def trusts_a_rest_of_an_older_epoch() -> Iterator[None]:
    """A claim keeps the mark, and a reader does not compare it with the epoch."""
    with ExitStack() as both:
        both.enter_context(patch.object(RegionManifest, "at_rest", property(lambda self: self.released > 0)))
        both.enter_context(patch.object(memwal.wal.manifest, "check_succession", lambda *_: None))
        both.enter_context(patch.object(memwal.wal.fence, "replace", _keeping_the_mark))
        yield


def _keeping_the_mark(manifest: Any, **changes: Any) -> Any:
    changes.pop("released", None)
    return replace(manifest, **changes)


def looks_once_for_all_reads() -> Planted:
    """A region that was found at rest once is read from storage ever after."""

    def at_rest(self: RegionSet, region: Any, *, flushed: bool) -> Any:
        looked = self._looked.get(region)
        if looked is not None and looked.at_rest:
            return RegionView(region, (), looked.ssts)
        return original(self, region, flushed=flushed)

    original = RegionSet._at_rest
    return patch.object(RegionSet, "_at_rest", at_rest)


def rests_one_entry_too_far() -> Planted:
    """Replay after a rest begins one entry too late."""
    original = memwal.ingest.engine.region.core.passed_over
    return patch.object(
        memwal.ingest.engine.region.core, "passed_over", lambda manifest, position: original(manifest, position + 1)
    )


OF_REST: dict[str, Callable[[], Planted]] = {
    each.__name__: each
    for each in (
        rests_with_rows_in_memory,
        trusts_a_rest_of_an_older_epoch,
        looks_once_for_all_reads,
        rests_one_entry_too_far,
    )
}
"""Faults of regions at rest."""


PLANTED_IN_TABLE: dict[str, Callable[[], Planted]] = {
    each.__name__: each
    for each in (
        prunes_before_the_sync,
        prunes_one_generation_too_many,
        marker_on_the_deletes_pass,
        commits_without_the_first_generation,
        commits_the_oldest_row_of_each_key,
        publishes_before_the_sidecar,
        leaves_out_the_deletes_of_a_second_try,
        collects_published_ssts,
        collects_flushes_under_way,
        records_a_load_after_its_rows,
        deletes_versions_without_a_barrier,
    )
}


FOUND_BY = {
    "prunes_before_the_sync": 4,
    "marker_on_the_deletes_pass": 5,
    "commits_without_the_first_generation": 2,
    "leaves_out_the_deletes_of_a_second_try": 4,  # only if a conflict follows a deletes pass: rare
    "records_a_load_after_its_rows": 5,
    "deletes_versions_without_a_barrier": 32,  # only if another program sleeps: one seed of four
    "collects_flushes_under_way": 5,
    "rests_with_rows_in_memory": 2,
}
"""As `planted.FOUND_BY`."""
SEEDS_TO_FIND = 45


def found_in_table_by(name: str, first: int | None = None) -> tuple[int, str] | None:
    """Return the same as `planted.found_by`."""
    kind = RestingWorld if name in OF_REST else TableWorld
    return first_failure((PLANTED_IN_TABLE | OF_REST)[name], kind, first or FOUND_BY.get(name, 1), SEEDS_TO_FIND)
