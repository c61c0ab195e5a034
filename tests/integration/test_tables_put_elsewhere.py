"""Tables that were cloned, separated from their regions, restored, overwritten, or named by a path that moves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.flush.base import create as table_creation
from memwal.flush.base import table as base_table
from memwal.flush.base.open import Session, open_dataset
from memwal.flush.verification.finding import Finding
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.read.merged import MergedView
from memwal.wal import ObjectStore, open_store
from tests.conftest import Made
from tests.messages import raises

Open = Callable[..., Any]


def filled(open_small: Open, made: Made, at: str, commits: int = 3) -> None:
    with open_small(at) as table:
        for version in range(commits):
            table.put(made.rows(range(10), version))
            table.flush()
            table.commit()


def versions_of_rows(table: Any) -> dict[int, str]:
    return {row["id"]: row["name"].split()[-1] for row in table.scan(["id", "name"]).read_all().to_pylist()}


def without_its_regions(uri: str, _: Path) -> str:
    shutil.rmtree(f"{uri}/_mem_wal")
    return uri


def cloned(uri: str, tmp_path: Path) -> str:
    dataset = lance.dataset(uri)
    dataset.shallow_clone(str(tmp_path / "clone"), dataset.version)
    return str(tmp_path / "clone")


@pytest.mark.parametrize("move", [without_its_regions, cloned])
def test_a_base_table_without_its_regions_takes_rows_that_stay(
    open_small: Open, made: Made, uri: str, tmp_path: Path, move: Callable[[str, Path], str]
) -> None:
    """Its new regions begin above the committed generations: an SST numbered from 1 would count as committed."""
    filled(open_small, made, uri)
    there = move(uri, tmp_path)
    with open_small(there) as table:
        expected = {id: "v9" if id in range(5, 15) else "v2" for id in range(15)}
        table.put(made.rows(range(5, 15), 9))
        assert versions_of_rows(table) == expected
        table.flush()
        assert versions_of_rows(table) == expected
        assert table.commit().ssts == 2
        assert versions_of_rows(table) == expected
    with open_small(there) as table:
        assert versions_of_rows(table) == expected


def test_regions_older_than_their_base_table_are_refused(
    open_small: Open, made: Made, uri: str, tmp_path: Path
) -> None:
    """Their log would put old rows over newer ones, and their published SSTs would count as committed."""
    filled(open_small, made, uri, commits=1)
    shutil.copytree(f"{uri}/_mem_wal", tmp_path / "backup")
    filled(open_small, made, uri, commits=2)
    shutil.rmtree(f"{uri}/_mem_wal")
    shutil.copytree(tmp_path / "backup", f"{uri}/_mem_wal")
    with raises(memwal.Corrupted):
        open_small(uri)


def test_a_relative_path_names_the_table_from_every_directory(
    open_small: Open, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that changes its directory commits to the table that it opened, and not to one with the same name."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    filled(open_small, made, str(tmp_path / "there" / "small"))
    monkeypatch.chdir(tmp_path / "here")
    with open_small("small") as table:
        table.put(made.rows(range(20, 30), 1))
        table.flush()
        monkeypatch.chdir(tmp_path / "there")
        table.commit()
        assert versions_of_rows(table) == dict.fromkeys(range(20, 30), "v1")
    rows = {place: lance.dataset(str(tmp_path / place / "small")).count_rows() for place in ("here", "there")}
    assert rows == {"here": 10, "there": 10}


def test_after_a_restore_of_the_base_table_commits_go_on(open_small: Open, made: Made, uri: str) -> None:
    """The restored version lacks generations between the committed and the published ones; no manifest is lost."""
    filled(open_small, made, uri)
    with open_small(uri) as table:
        table.put(made.rows([50], 4))
        table.flush()
        lance.dataset(uri, version=restorable(uri)).restore()
        expected = dict.fromkeys(range(10), "v1") | {50: "v4"}
        assert versions_of_rows(table) == expected
        assert not findings(uri)
        table.commit()
        assert versions_of_rows(table) == expected
        assert not findings(uri)
    assert lance.dataset(uri).count_rows() == 11


def test_generations_that_nobody_took_back_are_missed(open_small: Open, made: Made, uri: str) -> None:
    """The base lost its newest version: a commit would silently lose its rows."""
    filled(open_small, made, uri)
    newest = min(Path(uri, "_versions").glob("*.manifest"))
    while lance.dataset(uri).version > restorable(uri):
        newest.unlink()
        newest = min(Path(uri, "_versions").glob("*.manifest"))
    with open_small(uri) as table:
        table.put(made.rows(range(50, 60), 4))
        table.flush()
        with raises(memwal.Corrupted):
            table.commit()
    assert {each.check for each in findings(uri)} == {"generations"}


@pytest.mark.parametrize("plain", [False, True], ids=["with the schema's metadata", "without"])
def test_a_table_that_was_written_over_is_refused_and_says_how_to_go_on(
    open_small: Open, made: Made, uri: str, plain: bool
) -> None:
    """Its progress was lost with the MemWAL index: if the table counted as empty, its SSTs could never be committed."""
    filled(open_small, made, uri)
    before = lance.dataset(uri).version
    rows = lance.dataset(uri).to_table()
    rows = rows.replace_schema_metadata(None) if plain else rows
    lance.write_dataset(rows.slice(0, 4), uri, mode="overwrite")
    for _ in range(2):  # a rejection creates nothing
        with raises(memwal.Invalid):
            open_small(uri)
    lance.dataset(uri, version=before).restore()
    with open_small(uri) as table:
        table.put(made.rows([50], 4))
        table.flush()
        table.commit()
        assert versions_of_rows(table) == dict.fromkeys(range(10), "v2") | {50: "v4"}


def test_a_table_that_another_process_finishes_and_claims_is_not_taken_for_written_over(
    open_small: Open, made: Made, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process opens the table between its first version and the one with the MemWAL index."""
    filled(open_small, made, uri, commits=1)
    seen = []

    def opened_before(
        store: ObjectStore, at: str, version: int | None = None, session: Session | None = None
    ) -> lance.LanceDataset | None:
        seen.append(at)
        return open_dataset(store, at, 1 if len(seen) == 1 else version, session)

    for module in (table_creation, base_table):
        monkeypatch.setattr(module, "open_dataset", opened_before)
    found = BaseTable.find(uri)
    assert found is not None
    assert len(seen) == 2
    assert found.committed


def test_a_table_that_was_written_over_starts_anew_without_its_regions(
    open_small: Open, made: Made, uri: str, tmp_path: Path
) -> None:
    filled(open_small, made, uri)
    lance.write_dataset(lance.dataset(uri).to_table().slice(0, 4), uri, mode="overwrite")
    shutil.move(f"{uri}/_mem_wal", tmp_path / "away")
    with open_small(uri) as table:
        table.put(made.rows([50], 4))
        table.flush()
        table.commit()
        assert len(versions_of_rows(table)) == 5
    assert not findings(uri)


def test_a_table_whose_metadata_was_wiped_names_the_version_to_restore(open_small: Open, made: Made, uri: str) -> None:
    """Restoring that version brings every acknowledged row back."""
    with open_small(uri) as table:
        table.put(made.rows(range(10), 1))
        table.flush()
        table.commit()
        table.put(made.rows(range(5, 15), 2))
        table.flush()
        lance.dataset(uri).replace_schema_metadata({})
        good = lance.dataset(uri).version - 1
        other = made.table([99]).cast(pa.schema(list(lance.dataset(uri).schema)))
        lance.write_dataset(other, uri, mode="append")
        table.put(made.rows(range(14, 20), 3))  # the owner has not detected it yet
        with raises(memwal.MemWalError):
            table.count()
        with raises(memwal.MemWalError):
            table.commit()
        assert f"restore version {good} " in table.upkeep.failures[0]["error"]
    for opening in ({}, {"schema": made.schema, "key": "id", "regions": 2}):
        with raises(memwal.MemWalError):
            memwal.open(uri, **opening)
    lance.dataset(uri, version=good).restore()
    with open_small(uri) as table:
        wanted = dict.fromkeys(range(5), "v1") | dict.fromkeys(range(5, 14), "v2") | dict.fromkeys(range(14, 20), "v3")
        assert versions_of_rows(table) == wanted
        table.flush()
        table.commit()
        assert lance.dataset(uri).count_rows() == len(wanted)


def test_a_table_made_anew_under_an_open_one_is_not_read_as_it(open_small: Open, made: Made, uri: str) -> None:
    """Its versions may be higher or lower than those of the old table."""
    for commits, again in ((3, 1), (1, 3)):
        filled(open_small, made, uri, commits)
        with open_small(uri) as table:
            assert table.count() == 10
            shutil.rmtree(uri)
            filled(open_small, made, uri, again)
            with raises(memwal.Invalid):
                table.count()
        shutil.rmtree(uri)


@pytest.mark.parametrize("read", ["scan", "count", "match", "search"])
def test_a_read_whose_version_is_cleaned_up_beside_it_is_made_again(
    open_small: Open, made: Made, uri: str, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """Another program cleans versions up without waiting for readers."""
    filled(open_small, made, uri)
    with open_small(uri) as table:
        table.delete([3])
        table.flush()
        table.commit()
        views, view = list[Any](), MergedView.__init__

        def cleaned_up_after_it_was_opened(self: MergedView, *captured: Any) -> None:
            view(self, *captured)
            views.append(self)
            if len(views) == 1:
                lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.01)
                lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)

        monkeypatch.setattr(MergedView, "__init__", cleaned_up_after_it_was_opened)
        requests = {"match": {"column": "body", "text": "harbor"}, "search": {"column": "vector", "vector": [0.0] * 8}}
        getattr(table, read)(**requests.get(read, {}))
        assert len(table.scan().read_all()) == 9
        assert len(views) >= 2


def restorable(uri: str) -> int:
    """Return the newest version that has generation 2 and not 3."""
    numbers = sorted((each["version"] for each in lance.dataset(uri).versions()), reverse=True)
    return next(n for n in numbers if set(BaseTable.open(uri, version=n).committed.values()) == {2})


def findings(uri: str) -> tuple[Finding, ...]:
    return verify_table(open_store(uri), uri).findings
