"""Obstacles that must not stop a commit or a collection: an index that cannot be built, and versions and tags that
another program deletes meanwhile."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import lance
import pyarrow as pa
import pytest

from memwal.flush import BaseTable
from memwal.flush.base.version_files import tagged_versions
from memwal.flush.commits import foreign_writes, rounds
from memwal.memtable import IndexSpec, with_tombstone
from tests.commit_world import WIDTH, World
from tests.messages import raises
from tests.support.interpose import Once


def zero_vectors(world: World, ids: range) -> None:
    rows = {"id": pa.array(ids, pa.int64()), "n": [1] * len(ids), "vector": [[0.0] * WIDTH] * len(ids)}
    world.flush(with_tombstone(pa.table(rows), world.rows))
    world.oracle |= dict.fromkeys(ids, 1)


def test_an_index_that_cannot_be_built_stops_no_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A vector of length 0 has no angle, so the index has no vectors to train on. The SSTs are pruned nevertheless."""
    by_angle = IndexSpec("vector", "ivf_pq", {"metric": "cosine"})
    world = World(str(tmp_path / "table"), indexes=[by_angle, IndexSpec("n", "btree")])
    zero_vectors(world, range(300))
    with caplog.at_level(logging.WARNING, "memwal.flush"):
        world.commit()
    assert "index vector_idx does not cover the newest rows" in caplog.text
    assert (world.found(), world.listed()) == (world.oracle, [0, 0])
    indexed = {each.name: each.num_rows_indexed for each in lance.dataset(world.uri).describe_indices()}
    assert indexed["n_idx"] == 300  # the other one has every row
    assert "vector_idx" not in indexed
    world.put(range(300, 600), 2)
    world.commit()
    assert "vector_idx" in {each.name for each in lance.dataset(world.uri).describe_indices()}


def test_a_damaged_index_stops_no_commit_and_no_other_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(str(tmp_path / "table"), indexes=[IndexSpec("n", "btree"), IndexSpec("note", "fts")])
    world.put(range(20), 1)
    world.commit()
    (damaged,) = [each for each in lance.dataset(world.uri).describe_indices() if each.name == "note_idx"]
    for file in Path(world.uri, "_indices", str(damaged.segments[0].uuid)).iterdir():
        file.write_bytes(b"")
    world.put(range(20, 40), 2)
    with caplog.at_level(logging.WARNING, "memwal.flush"):
        world.commit()
    assert (world.found(), world.listed()) == (world.oracle, [0, 0])
    indexed = {each.name: each.num_rows_indexed for each in lance.dataset(world.uri).describe_indices()}
    assert indexed["n_idx"] == 40


@pytest.mark.parametrize("prepared", [0, 1])
def test_a_stranger_that_compacts_and_cleans_up_at_once_is_a_conflict_like_any_other(
    tmp_path: Path, once: Once, prepared: int
) -> None:
    """The files of the version that the commit has read are deleted before it writes, so the commit reads again."""
    world = World(str(tmp_path / "table"))
    world.put(range(20), 1)
    world.commit()
    world.put(range(5), 2)
    world.commit()
    world.put(range(10, 40), 3)
    world.delete(range(prepared, 4))

    def compact_and_clean_up() -> None:
        lance.dataset(world.uri).optimize.compact_files()
        lance.dataset(world.uri).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)

    once(rounds, "read_changes", compact_and_clean_up, after=True)
    world.commit()
    assert (world.found(), world.listed()) == (world.oracle, [0, 0])
    assert BaseTable.open(world.uri).committed


def test_an_error_that_is_no_conflict_is_told(tmp_path: Path, once: Once) -> None:
    world = World(str(tmp_path / "table"), buckets=1)
    world.put(range(5), 1)

    def broken() -> None:
        raise ValueError("no conflict")

    once(rounds, "read_changes", broken, after=True)
    with raises(ValueError):
        world.commit()


def clean_up(world: World) -> None:
    lance.dataset(world.uri).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)


def test_versions_of_strangers_that_are_cleaned_up_before_their_keys_are_read(tmp_path: Path, once: Once) -> None:
    world = World(str(tmp_path / "table"))
    world.put(range(20), 1)
    world.commit()
    world.stranger_row(50, 7)
    lance.dataset(world.uri).delete("id = 3")
    world.put(range(10, 40), 3)

    once(foreign_writes, "look_back", lambda: clean_up(world), after=True)
    world.commit()
    expected = {id: n for id, n in world.oracle.items() if id != 3} | {50: 7}
    assert (world.found(), world.listed()) == (expected, [0, 0])


def test_the_version_below_a_pass_is_cleaned_up_before_its_rows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    world = World(str(tmp_path / "table"))
    world.put(range(20), 1)
    world.commit()
    world.put(range(20, 40), 2)
    world.commit()
    world.put(range(5), 3)
    # Lance sees no conflict, since the row is in another fragment.
    once(rounds, "read_changes", lambda: lance.dataset(world.uri).delete("id = 30"), after=True)
    seen: list[int] = []
    once(lance.LanceDataset, "checkout_version", lambda: (clean_up(world), seen.append(1)))
    world.commit()
    assert seen
    world.oracle.pop(30)
    assert (world.found(), world.listed()) == (world.oracle, [0, 0])


def test_a_tag_that_is_deleted_while_tags_are_listed_stops_no_collection() -> None:
    answers: list[object] = [ValueError("Not found: _refs/tags/gone.json"), {"kept": {"version": 3, "branch": None}}]

    def listed() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert tagged_versions(SimpleNamespace(tags=SimpleNamespace(list=listed))) == {3}
