"""A commit is killed at each call of storage or Lance: the next commit gives the same table, with no row doubled."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal.flush import CommitReport
from memwal.flush.commits import committer, foreign_writes, rounds
from tests.clean import assert_clean, assert_collected
from tests.commit_world import World
from tests.support.interpose import killed_at

LANCES = ("delete_pass", "upsert_pass", "catch_up", "sync_table")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a base with rows and two SSTs to commit: inserts, updates, deletes, and an upsert replaced by a delete."""
    world = World(str(tmp_path_factory.mktemp("prepared") / "table"), buckets=1, key_type=pa.int16())
    world.put(range(20), 1)
    world.commit()
    world.put(range(15, 25), 2)
    world.delete([*range(5), 22])
    return world


def finished(world: World) -> CommitReport:
    """Commit after a crash. Assert that the table is valid before the commit, and that nothing is left after it."""
    assert_clean(world.store, world.uri)
    report = world.commit()
    assert world.found() == world.oracle
    assert (world.listed(), world.committed()) == ([0], {0: 3})
    assert world.commit().versions == 0
    assert_collected(world.store, world.uri)
    assert world.found() == world.oracle
    return report


def test_killed_at_any_call_of_the_store(prepared: World, tmp_path: Path) -> None:
    def commit(world: World) -> None:
        report = world.commit()
        assert (report.rows_inserted, report.rows_updated, report.rows_deleted, report.rows_skipped) == (4, 5, 5, 2)

    for world in prepared.killed_at_each_call(tmp_path, commit):
        finished(world)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", LANCES)
def test_killed_at_any_call_of_lance(prepared: World, tmp_path: Path, name: str, after: bool) -> None:
    world = prepared.copied(tmp_path)
    with killed_at(rounds if name.endswith("_pass") else committer, name, after=after):
        world.commit()
    report = finished(world)
    done = (report.rows_inserted, report.rows_updated, report.rows_deleted)
    everything, without_deletes = (4, 5, 5), (4, 5, 0)
    place = LANCES.index(name) + after
    assert done == (everything if place == 0 else without_deletes if place == 1 else (0, 0, 0))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_a_repair(prepared: World, tmp_path: Path, after: bool) -> None:
    world = prepared.copied(tmp_path)
    world.commit()
    late = lance.dataset(world.uri)
    world.put([40], 3)
    world.commit()
    row = pa.table({"note": [None], "id": [40], "n": [5], "vector": [None]}, schema=world.base.schema)
    merge = late.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().use_index(False)
    merge.conflict_retries(0).execute(row)
    world.put([1], 4)
    world.oracle[40] = 5
    with killed_at(foreign_writes, "delete_rows", after=after):
        world.commit()
    assert world.commit().rows_repaired == (0 if after else 1)
    assert world.found() == world.oracle
    assert_collected(world.store, world.uri)
