"""The files of the base table that are synced before the SSTs are pruned."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lance
import pyarrow as pa
import pytest

import memwal
import memwal.flush.base.create
from memwal.flush.base import fsync
from memwal.flush.base.fsync import sync_table
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.maintenance import clean_up
from memwal.flush.commits.thinning import VersionRules
from memwal.ingest.engine.region import core
from memwal.wal import LocalStore, ManifestStore, regions
from memwal.wal.layout import UNSYNCED_KEY
from memwal.wal.store.local import TEMPORARY
from tests.conftest import SCHEMA, Made
from tests.messages import raises
from tests.support.interpose import Once


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return a set that records every file and directory that memwal syncs."""
    found: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.add(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return found


def test_all_that_the_newest_version_is_made_of_and_no_more_as_versions_pass(
    open_small: Callable[..., Any], uri: str, made: Made, synced: set[Path]
) -> None:
    root, syncs = Path(uri).resolve(), []
    with open_small(regions=1) as table:
        for first in range(0, 180, 10):  # upserts, so that old fragments get deletion files
            table.put(made.rows([*range(first, first + 10), max(0, first - 15)], 1))
            table.flush()
            synced.clear()
            table.commit()
            below = {path for path in synced if root in path.parents and "_mem_wal" not in path.parts}
            syncs.append(len(below))
    dataset = lance.dataset(uri)
    files = {root / "data" / file.path for each in dataset.get_fragments() for file in each.metadata.files}
    files |= {root / path for each in dataset.get_fragments() if (path := each.deletion_file())}
    segments = {str(segment.uuid) for index in dataset.describe_indices() for segment in index.segments}
    files |= {path for uuid in segments for path in (root / "_indices" / uuid).glob("*")}
    files.add(next((root / "_versions").glob(f"*{2**64 - 1 - dataset.version}.manifest")))
    files.add(next((root / "_transactions").glob(f"{dataset.version - 1}-*.txn")))
    assert files <= below
    assert {root, root / "data", root / "_versions", root / "_deletions", root / "_indices"} <= synced
    assert max(syncs[12:]) < 1.5 * max(syncs[:12])


@pytest.mark.parametrize("name", ["table", "a b", "100%"])
def test_a_table_given_as_a_url_of_a_file_is_synced_too(
    open_small: Callable[..., Any], tmp_path: Path, made: Made, synced: set[Path], name: str
) -> None:
    uri = str(tmp_path / name)
    with open_small(uri) as table:
        table.put(made.rows(range(5)))
        table.flush()
        table.commit()
    synced.clear()
    sync_table(lance.dataset((tmp_path / name).as_uri()))
    assert any(path.suffix == ".lance" for path in synced)


def test_many_files_are_synced_side_by_side_before_any_directory(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = lance.write_dataset(pa.table({"id": range(64)}), uri, max_rows_per_file=1)
    order: list[Path] = []
    threads: set[int] = set()

    def noted(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        threads.add(threading.get_ident())

    monkeypatch.setattr(os, "fsync", noted)
    sync_table(dataset)
    files = [path for path in order if path.is_file()]
    assert len([path for path in files if path.suffix == ".lance"]) == 64
    assert len(files) == len(set(files))
    assert order[: len(files)] == files
    assert len(threads) > 1


@contextmanager
def disk_without(*names: str) -> Iterator[None]:
    """Make the first sync of each file with one of these names fail. As a kernel does, report each failure once."""
    left = set(names)

    def failing(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name in left:
            left.remove(name)
            raise OSError(errno.EIO, "the disk is broken")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        yield


def copied(path: Path) -> None:
    """Replace a file by a copy of itself."""
    shutil.copy2(path, copy := path.with_name("copy"))
    copy.replace(path)


@pytest.mark.parametrize("at", [0, 40, 63])
@pytest.mark.parametrize("noted", [True, False])
def test_a_file_that_could_not_be_synced_is_never_relied_upon_again(
    uri: str, monkeypatch: pytest.MonkeyPatch, at: int, noted: bool
) -> None:
    dataset = lance.write_dataset(pa.table({"id": range(64)}), uri, max_rows_per_file=1)
    root, broken = Path(uri), dataset.get_fragments()[at].metadata.files[0].path
    note = Path(UNSYNCED_KEY).name
    with (
        disk_without(broken, *[] if noted else [f"{TEMPORARY}{note}"]),
        raises(OSError),
    ):
        sync_table(dataset)
    assert (root / UNSYNCED_KEY).exists() == noted
    if noted:  # another process knows only the note on storage
        monkeypatch.setattr(fsync, "_LOST_HERE", {})
    for _ in range(2):
        with raises(OSError):
            sync_table(dataset)
    assert fsync.synced_version(root) == 0
    copied(root / "data" / broken)
    sync_table(dataset)
    assert fsync.synced_version(root) == dataset.version


def test_every_file_that_a_disk_did_not_take_is_remembered(uri: str) -> None:
    dataset = lance.write_dataset(pa.table({"id": range(64)}), uri, max_rows_per_file=1)
    names = [dataset.get_fragments()[at].metadata.files[0].path for at in (3, 21, 50)]
    with disk_without(*names, "_versions"), raises(OSError):
        sync_table(dataset)
    noted = json.loads((Path(uri) / UNSYNCED_KEY).read_text())["files"]
    assert set(noted) == {"_versions", *(f"data/{name}" for name in names)}
    for name in names:
        copied(Path(uri) / "data" / name)
    with raises(OSError):
        sync_table(dataset)


def test_a_file_that_cannot_be_opened_now_is_synced_later(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = lance.write_dataset(pa.table({"id": range(3)}), uri)
    with monkeypatch.context() as patched:
        patched.setattr(fsync.os, "open", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
        with raises(OSError):
            sync_table(dataset)
    sync_table(dataset)
    assert fsync.synced_version(Path(uri)) == dataset.version


def test_rows_of_a_commit_that_the_disk_did_not_take_stay_in_ssts_until_the_table_is_on_another_one(
    open_small: Callable[..., Any], tmp_path: Path, made: Made
) -> None:
    uri, sound = str(tmp_path / "table"), str(tmp_path / "sound")
    with open_small(uri, regions=1) as table:
        table.put(made.rows(range(20)))
        table.flush()
        with disk_without("data"), raises(memwal.Unavailable):
            table.commit()
        for _ in range(2):
            with raises(memwal.Unavailable):
                table.commit()
        assert len(table) == 20
        store = LocalStore(Path(uri))
        assert [len(ManifestStore(store, region).latest().ssts) for region in regions(store)] == [1]
    shutil.copytree(uri, sound)
    (Path(sound) / UNSYNCED_KEY).unlink()
    with open_small(sound, regions=1) as table:
        table.commit()
        assert table.scan(["id"], level="committed").read_all().num_rows == 20


@pytest.mark.parametrize("found", [False, True])
def test_a_new_table_is_on_the_disk_with_its_name_before_a_region_is_claimed(
    tmp_path: Path, synced: set[Path], monkeypatch: pytest.MonkeyPatch, once: Once, found: bool
) -> None:
    root = tmp_path.resolve() / "new" / "deep" / "table"
    if found:  # Another process has created the table and has not synced it yet.
        with monkeypatch.context() as unsynced:
            unsynced.setattr(memwal.flush.base.create, "sync_new_table", lambda dataset: None)
            BaseTable.create(str(root), SCHEMA, ["id"], 2, [])
        synced.clear()
    before: list[set[Path]] = []
    once(core.wal, "claim", lambda: before.append(set(synced)))
    memwal.open(str(root), schema=SCHEMA, key="id").close()
    files = {path for part in ("_versions", "_transactions") for path in [root / part, *(root / part).glob("*")]}
    assert files - {root / "_versions/latest_version_hint.json"} <= before[0]
    assert {root, root.parent, root.parent.parent, tmp_path.resolve()} <= before[0]


def test_the_first_object_makes_the_names_of_directories_durable_that_another_program_made(
    tmp_path: Path, synced: set[Path]
) -> None:
    root = tmp_path.resolve() / "new" / "table"
    root.mkdir(parents=True)
    LocalStore(root).put_if_absent("log/1", b"entry")
    assert {root / "log", root, root.parent, tmp_path.resolve()} <= synced


def test_the_newest_version_is_on_the_disk_before_older_ones_are_deleted(
    open_small: Callable[..., Any], uri: str, made: Made, monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    """Otherwise a power cut that loses all newer versions, such as a burst of another program, leaves no version."""
    with open_small(regions=1) as table:
        table.put(made.rows(range(5)))
        table.flush()
        table.commit()
    for n in range(3):
        lance.dataset(uri).update_config({"another": str(n)})
    dataset, order = lance.dataset(uri), list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    once(lance.LanceDataset, "cleanup_old_versions", lambda: order.append("deleted"))
    rules = VersionRules(age_min=1e-6, hourly=0, daily=0, newest=1)
    assert clean_up(LocalStore(uri), dataset, rules, time.time()) > 0
    newest = f"{2**64 - 1 - dataset.version}.manifest"
    assert newest in order[: order.index("deleted")]
    assert [each["version"] for each in lance.dataset(uri).version_refs()][-1] == dataset.version
