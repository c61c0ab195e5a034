"""Versions of the base table that a power cut between Lance's commit and memwal's sync left torn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import pytest

import memwal
from memwal.flush.base import torn
from memwal.flush.base.fsync import sync_table, synced_version
from memwal.flush.base.manifest import manifest_position, manifest_version
from memwal.flush.base.state import read_state, versions
from memwal.flush.base.table import BaseTable
from memwal.wal import Corrupt, open_store
from tests.clean import assert_clean
from tests.conftest import SCHEMA, Made, tree
from tests.messages import raises
from tests.support.garbage import collect
from tests.support.interpose import no_pruning

pytestmark = pytest.mark.usefixtures("only_process")
Open = Callable[..., Any]


def manifest(root: Path) -> Path:
    return next((root / "_versions").glob(f"*{2**64 - 1 - lance.dataset(str(root)).version}.manifest"))


def new_file(root: Path, folder: str) -> Path:
    """Return the newest file in a folder."""
    return max((root / folder).rglob("*.*"), key=lambda path: path.stat().st_mtime_ns)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def zeroed_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))


def zeroed_length(path: Path) -> None:
    """Overwrite the length of the manifest's message with zeros; the footer stays valid."""
    data = bytearray(path.read_bytes())
    position = manifest_position(bytes(data))
    data[position : position + 4] = bytes(4)
    path.write_bytes(data)


def zeroed_middle(path: Path) -> None:
    data = path.read_bytes()
    begin, end = len(data) // 3, len(data) * 2 // 3
    path.write_bytes(data[:begin] + bytes(end - begin) + data[end:])


@pytest.fixture
def unsynced(open_small: Open, uri: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a table whose newest version updates, deletes and adds rows and was not synced before a power cut."""
    with open_small(regions=1) as table:
        table.put(made.rows(range(40)))
        table.flush()
        table.commit()
        table.put(made.rows(range(30, 60), 1))
        table.delete([1, 2])
        commit_without_pruning(table)
    return Path(uri)


def commit_without_pruning(table: Any) -> None:
    """Flush and commit; a power cut comes before the commit prunes its SSTs."""
    table.flush()
    with no_pruning():
        table.commit()


def expect_every_row(table: Any) -> None:
    """Commit, and assert that reads show every row before and after it."""
    expect_all_rows(table, "latest")
    table.commit()
    expect_all_rows(table, "committed")


def expect_all_rows(table: Any, level: str) -> None:
    names = {row["id"]: row["name"] for row in table.scan(level=level).read_all().to_pylist()}
    assert names == {id: f"row {id} v{int(id >= 30)}" for id in range(60) if id not in (1, 2)}


@pytest.mark.parametrize("damage", [emptied, shortened, zeroed_end, Path.unlink])
@pytest.mark.parametrize("what", ["manifest", "data"])
def test_opening_goes_back_to_the_last_whole_version_and_no_row_is_lost(
    unsynced: Path, open_small: Open, what: str, damage: Callable[[Path], None], uri: str
) -> None:
    state = read_state(open_store(uri), lance.dataset(uri).version)
    newest_data = unsynced / next(iter(state.fragments[max(state.fragments)].files))
    damage(manifest(unsynced) if what == "manifest" else newest_data)
    with open_small() as table:
        expect_all_rows(table, "flushed")
        expect_every_row(table)
    assert_clean(open_store(uri), uri)


def test_a_manifest_whose_message_is_zeros_is_torn(unsynced: Path, open_small: Open) -> None:
    zeroed_length(manifest(unsynced))
    with open_small() as table:
        expect_every_row(table)


def renamed(path: Path) -> None:
    """Give a file the temporary name that Lance uses while it writes."""
    path.rename(path.with_name(".tmpUfvsf6"))


@pytest.mark.parametrize(
    ("folder", "damage"),
    [("_transactions", emptied), ("_deletions", emptied), ("_indices", emptied), ("_indices", renamed)],
    ids=["transaction", "deletions", "index", "temporary name"],
)
def test_every_kind_of_file_of_a_version_is_looked_at(
    unsynced: Path, open_small: Open, uri: str, folder: str, damage: Callable[[Path], None]
) -> None:
    before = versions(open_store(uri))
    damage(new_file(unsynced, folder))
    with open_small() as table:
        assert versions(open_store(uri))[-1] < before[-1]
        expect_every_row(table)
    assert_clean(open_store(uri), uri)


def test_a_torn_version_below_a_whole_one_is_set_aside_so_that_collections_can_read_all(
    unsynced: Path, open_small: Open, uri: str
) -> None:
    *_, torn_one, newest = before = versions(open_store(uri))
    assert torn_one > synced_version(unsynced)
    emptied(next((unsynced / "_versions").glob(f"*{2**64 - 1 - torn_one}.manifest")))
    with open_small() as table:
        assert [version for version in versions(open_store(uri)) if version <= newest] == [*before[:-2], newest]
        expect_every_row(table)
    collect(str(unsynced), orphan=0.0)
    assert_clean(open_store(uri), uri)


@pytest.mark.parametrize("damage", [emptied, shortened, zeroed_middle])
@pytest.mark.parametrize("rows", [100, 6000])
def test_a_deletion_file_of_any_size_is_looked_at(
    open_small: Open, uri: str, made: Made, monkeypatch: pytest.MonkeyPatch, rows: int, damage: Callable[[Path], None]
) -> None:
    with open_small(regions=1) as table:
        table.put(made.rows(range(rows)))
        table.flush()
        table.commit()
        table.delete([id for id in range(rows) if id % 50])
        commit_without_pruning(table)
    path = new_file(Path(uri), "_deletions")
    assert path.suffix == (".bin" if rows > 5000 else ".arrow")
    damage(path)
    with open_small() as table:
        assert len(table) == rows // 50
        table.commit()
        assert len(table.scan(level="committed").read_all()) == rows // 50
    assert_clean(open_store(uri), uri)


def test_a_version_whose_ssts_were_pruned_is_damaged_and_stays(open_small: Open, uri: str, made: Made) -> None:
    with open_small(regions=1) as table:
        table.put(made.rows(range(10)))
        table.flush()
        table.commit()
    for path in Path(uri, "_versions").glob("*.manifest"):
        if read_state(open_store(uri), manifest_version(f"_versions/{path.name}") or 0).committed:
            emptied(path)
    before = tree(Path(uri, "_versions"))
    with raises(memwal.MemWalError):
        open_small()
    assert tree(Path(uri, "_versions")) == before


@pytest.mark.parametrize("cut", ["all", "the end"])
def test_a_creation_that_was_cut_off_begins_again(tmp_path: Path, cut: str) -> None:
    root = tmp_path / "table"
    lance.write_dataset(SCHEMA.empty_table(), str(root))
    (emptied if cut == "all" else shortened)(manifest(root))
    with memwal.open(str(root), schema=SCHEMA, key="id") as table:
        assert len(table) == 0


def test_a_reader_is_told_who_goes_back(unsynced: Path, uri: str) -> None:
    emptied(manifest(unsynced))
    with raises(memwal.MemWalError):
        memwal.open(uri, read_only=True)


def test_a_whole_table_stays_as_it_is(unsynced: Path, open_small: Open, uri: str) -> None:
    before = versions(open_store(uri))
    open_small().close()
    assert versions(open_store(uri)) == before
    assert not list(unsynced.rglob("*.torn"))


@pytest.mark.parametrize("damage", ["the newest version", "all versions"])
def test_a_table_that_memwal_has_not_set_up_stays_as_it_is(tmp_path: Path, made: Made, damage: str) -> None:
    root = tmp_path / "table"
    for _ in range(2):
        lance.write_dataset(made.table(range(5)), str(root), mode="append" if root.exists() else "create")
    for path in Path(root, "_versions").glob("*.manifest") if damage == "all versions" else [manifest(root)]:
        emptied(path)
    before = tree(Path(root, "_versions"))
    with raises(memwal.MemWalError):
        memwal.open(str(root), schema=SCHEMA, key="id")
    assert tree(Path(root, "_versions")) == before


def test_what_another_program_wrote_is_synced_before_rows_rely_on_it(open_small: Open, uri: str, made: Made) -> None:
    with open_small(regions=1) as table:
        table.put(made.rows(range(5)))
    lance.dataset(uri).add_columns({"extra": "cast(null as string)"})
    with memwal.open(uri) as table:
        assert synced_version(Path(uri)) == lance.dataset(uri).version
        lance.dataset(uri).add_columns({"more": "cast(null as string)"})
        table.put([{**made.row(7), "extra": "", "more": "x"}])
        assert synced_version(Path(uri)) == lance.dataset(uri).version


def test_a_synced_version_is_never_set_aside(unsynced: Path, open_small: Open, uri: str) -> None:
    open_small().close()
    new_file(unsynced, "data").unlink()
    before = tree(Path(uri, "_versions"))
    open_small().close()
    assert tree(Path(uri, "_versions")) == before


def test_a_look_from_storage_changes_nothing(unsynced: Path, uri: str) -> None:
    emptied(manifest(unsynced))
    before = tree(Path(uri, "_versions"))
    with pytest.raises(Corrupt):
        BaseTable.find(uri)
    assert tree(Path(uri, "_versions")) == before


def test_a_torn_tag_is_set_aside_and_others_stay(unsynced: Path, open_small: Open, uri: str) -> None:
    dataset = lance.dataset(uri)
    for name in ("whole", "torn", "torn-2"):
        dataset.tags.create(name, 2)
    shortened(unsynced / "_refs/tags/torn-2.json")
    with raises(RuntimeError):
        dataset.tags.list()
    emptied(unsynced / "_refs/tags/torn.json")
    open_small().close()
    assert set(lance.dataset(uri).tags.list()) == {"whole"}
    assert len(list(unsynced.rglob("*.json.torn"))) == 2


def test_one_process_at_a_time_judges_and_renames(unsynced: Path, uri: str) -> None:
    emptied(manifest(unsynced))
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: torn.set_torn_versions_aside(open_store(uri), uri), range(8)))
    assert sorted(map(len, done)) == [0] * 7 + [1]


def test_files_of_the_legacy_format_are_whole(tmp_path: Path, made: Made) -> None:
    uri = str(tmp_path)
    sync_table(lance.write_dataset(made.table(range(5)), uri, data_storage_version="legacy"))
    lance.write_dataset(made.table(range(5)), uri, mode="append")
    assert torn.set_torn_versions_aside(open_store(uri), uri) == []
    shortened(new_file(tmp_path, "data"))
    assert torn.set_torn_versions_aside(open_store(uri), uri) == [2]
