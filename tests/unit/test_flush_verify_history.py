"""Deleted rows that come back when another program writes from a handle older than all kept versions."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lance
import pyarrow as pa
import pytest

from memwal import flush
from memwal.flush.commits import maintenance
from memwal.flush.commits.maintenance import clean_up
from memwal.flush.commits.thinning import VersionRules
from memwal.flush.verification.runner import verify_table
from memwal.wal import LocalStore
from tests.messages import raises
from tests.support.interpose import Once

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])


class Scene:
    """A table with rows 1 to 6; rows 2 and 6 are deleted while another program has the table open."""

    def __init__(self, path: Path) -> None:
        self.uri = str(path / "t.lance")
        flush.BaseTable.create(self.uri, SCHEMA, ["id"], 1, [])
        for ids in ([1, 2, 3, 4], [5, 6]):
            self.insert(ids)
        self.stale = lance.dataset(self.uri)
        lance.dataset(self.uri).delete("id in (2, 6)")
        for number in range(3):
            self.insert([40 + number])

    def insert(self, ids: list[int]) -> None:
        lance.dataset(self.uri).insert(pa.table({"id": ids, "v": [0] * len(ids)}, schema=SCHEMA))

    def clean_up(self) -> None:
        lance.dataset(self.uri).cleanup_old_versions(older_than=timedelta(0))

    def thin_out(self) -> int:
        """Delete all versions except the newest and tagged ones."""
        rules = VersionRules(age_min=1e-6, hourly=0, daily=0, newest=1)
        return clean_up(LocalStore(self.uri), lance.dataset(self.uri), rules, time.time())

    def ids(self) -> list[int]:
        return sorted(lance.dataset(self.uri).to_table()["id"].to_pylist())

    def findings(self, *, deep: bool) -> list[tuple[str, str]]:
        found = verify_table(LocalStore(self.uri), self.uri, deep=deep).findings
        return [(each.check, each.what) for each in found]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


WRITES: dict[str, Callable[[lance.LanceDataset], object]] = {
    "update": lambda dataset: dataset.update({"v": "100"}, where="id = 3"),
    "delete": lambda dataset: dataset.delete("id = 3"),
    "compact": lambda dataset: dataset.optimize.compact_files(),
}
NEW_KEYS = pa.table({"id": [40, 88], "v": [5, 5]}, schema=SCHEMA)
MORE_WRITES: dict[str, Callable[[lance.LanceDataset], object]] = WRITES | {
    "merge": lambda dataset: dataset.merge_insert("id").when_not_matched_insert_all().execute(NEW_KEYS),
    "upsert": lambda dataset: (
        dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(NEW_KEYS)
    ),
    "append": lambda dataset: dataset.insert(pa.table({"id": [99], "v": [0]}, schema=SCHEMA)),
    "index": lambda dataset: dataset.create_scalar_index("v", "BTREE"),
    "rename": lambda dataset: dataset.alter_columns({"path": "v", "name": "w"}),
}
REFUSED = ("compact", "append", "rename")


@pytest.mark.parametrize("write", WRITES)
def test_rows_that_came_back_are_found_by_deep(scene: Scene, write: str) -> None:
    scene.clean_up()
    WRITES[write](scene.stale)
    assert 2 in scene.ids()  # pylance behaves like this; if a release does not, the check is not needed
    (found,) = [each for each in scene.findings(deep=True) if each[0] == "returned rows"]
    assert found[1].endswith("had deleted are live again")
    assert found[1].startswith("2 rows" if write == "compact" else "1 rows")
    assert scene.findings(deep=False) == []


@pytest.mark.parametrize("write", WRITES)
def test_while_the_versions_are_kept_no_row_comes_back(scene: Scene, write: str) -> None:
    """The purpose of `gc.versions_age_min`: while Lance has the versions, it detects the conflict and refuses the write
    or merges it."""
    with suppress(OSError, RuntimeError, ValueError):
        WRITES[write](scene.stale)
    assert 2 not in scene.ids()
    assert scene.findings(deep=True) == []


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("write", MORE_WRITES)
def test_a_handle_older_than_deleted_versions_brings_nothing_back(scene: Scene, write: str, tagged: bool) -> None:
    """Either the version of the handle was deleted, or only the versions between it and the newest one."""
    if tagged:
        scene.stale.tags.create("report", scene.stale.version)
    assert scene.thin_out() >= 3
    before, refused = scene.ids(), False
    try:
        MORE_WRITES[write](scene.stale)
    except OSError as error:
        refused = "conflict" in str(error)
    assert refused == (write in REFUSED)
    gone = {3} if write == "delete" else set()
    new = {88} if write in ("merge", "upsert") else set()
    assert scene.ids() == sorted({*before, *new} - gone)
    assert scene.findings(deep=True) == []
    again = lance.dataset(scene.uri)
    again.insert(pa.table({"id": [99], "v": [0]}, schema=again.schema))  # after it has opened the table again


@pytest.mark.parametrize("write", WRITES)
def test_without_the_barrier_they_come_back(scene: Scene, write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault that the test above detects."""
    monkeypatch.setattr(maintenance, "_raise_barrier", lambda *_: None)
    assert scene.thin_out() >= 3
    MORE_WRITES[write](scene.stale)
    assert 2 in scene.ids()


def test_two_runs_at_once_leave_a_barrier_above_what_both_delete(scene: Scene, once: Once) -> None:
    thinned: list[int] = []

    def overtaken() -> None:
        scene.insert([50])
        thinned.append(scene.thin_out())

    once(lance.LanceDataset, "cleanup_old_versions", overtaken)
    scene.thin_out()
    assert thinned > [0]
    before = scene.ids()
    scene.stale.update({"v": "100"}, where="id = 3")
    assert scene.ids() == before


def test_a_conflict_with_another_writer_makes_the_barrier_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    make, tried = maintenance.append_if_unchanged, list[int]()

    def overtaken(dataset: lance.LanceDataset, *given: Any, **named: Any) -> Any:
        tried.append(dataset.version)
        if len(tried) < 3:
            scene.insert([60 + len(tried)])
        return make(dataset, *given, **named)

    monkeypatch.setattr(maintenance, "append_if_unchanged", overtaken)
    assert scene.thin_out() > 0
    assert len(tried) == 3
    assert {61, 62} <= set(scene.ids())


def test_a_run_that_is_killed_before_it_deletes_leaves_one_more_version(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(lance.LanceDataset, "cleanup_old_versions", Mock(side_effect=OSError("no answer")))
        with raises(OSError):
            scene.thin_out()
    assert scene.findings(deep=True) == []
    assert scene.thin_out() > 0
    scene.stale.update({"v": "100"}, where="id = 3")
    assert 2 not in scene.ids()


def test_nothing_to_delete_makes_no_version(scene: Scene) -> None:
    before = lance.dataset(scene.uri).version
    assert clean_up(LocalStore(scene.uri), lance.dataset(scene.uri), VersionRules(), time.time()) == 0
    assert lance.dataset(scene.uri).version == before


def test_a_tag_of_a_version_that_is_being_deleted_stops_no_collection(scene: Scene, once: Once) -> None:
    def tagged_meanwhile() -> None:
        tag = Path(scene.uri, "_refs", "tags", "late.json")
        tag.write_text((tag.parent / "early.json").read_text().replace(str(newest), str(scene.stale.version)))

    newest = lance.dataset(scene.uri).version
    lance.dataset(scene.uri).tags.create("early", newest)
    # After Lance has listed the tags.
    once(lance.LanceDataset, "cleanup_old_versions", tagged_meanwhile, after=True)
    assert scene.thin_out() > 0
    assert lance.dataset(scene.uri).tags.list()["late"]["version"] == scene.stale.version
    base = flush.BaseTable.open(scene.uri)
    assert len(flush.base_needs(LocalStore(scene.uri), base, time.time()).tagged) == 1
    assert scene.findings(deep=True) == []


def test_what_a_restore_takes_back_is_meant(scene: Scene) -> None:
    lance.dataset(scene.uri, version=scene.stale.version).restore()
    assert 2 in scene.ids()
    assert scene.findings(deep=True) == []


def test_deletes_merges_compactions_and_indexes_bring_nothing_back(scene: Scene) -> None:
    dataset = lance.dataset(scene.uri)
    dataset.optimize.compact_files(materialize_deletions_threshold=0.0)
    dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().use_index(False).execute(
        pa.table({"id": [2, 3], "v": [5, 5]}, schema=SCHEMA)
    )
    dataset.delete("id = 3")
    dataset.create_scalar_index("v", "BTREE")
    dataset.optimize.compact_files()
    assert scene.findings(deep=True) == []
