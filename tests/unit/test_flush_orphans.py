"""Orphan files of the base table, and the committed SSTs that the base table still needs, on real Lance tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa
import pytest
from lance.fragment import LanceFragment

import memwal
from memwal.flush import BaseTable, OrphanGarbage, base_needs, collect_orphans
from memwal.wal import LocalStore
from memwal.wal.layout import PROBE_PREFIX, bucket_region, staged_key
from tests.messages import raises
from tests.support.clock import FakeClock

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("price", pa.int64())])
REGION = bucket_region(0)
WEEK, DAY = 604_800.0, 86_400.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(start=2e9)


class Case:
    """A table with three versions with rows, at a path that contains blanks."""

    def __init__(self, directory: Path, clock: FakeClock) -> None:
        self.uri, self.clock = str(directory / "a table.lance"), clock
        BaseTable.create(self.uri, SCHEMA, ["id"], 1, [])
        for number in range(3):
            self.dataset.insert(self.rows(number))
        self.store = LocalStore(self.uri)
        self.date(3 * WEEK)

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.uri)

    def rows(self, *ids: int) -> pa.Table:
        return pa.table({"id": ids, "price": ids}, schema=SCHEMA)

    def files(self) -> dict[str, int]:
        root = Path(self.uri)
        return {str(each.relative_to(root)): each.stat().st_size for each in root.rglob("*") if each.is_file()}

    def date(self, age: float, *keys: str) -> None:
        """Set the modification time of files to `age` seconds ago; without `keys`, of all files."""
        for key in keys or self.files():
            os.utime(Path(self.uri, key), (self.clock.now() - age, self.clock.now() - age))

    def orphan(self, age: float) -> str:
        """Write the data file of an append that is never committed; return its key."""
        before = self.files().keys()
        LanceFragment.create(self.uri, self.rows(99), mode="append")
        (key,) = self.files().keys() - before
        self.date(age, key)
        return key

    def put(self, key: str, age: float) -> str:
        Path(self.uri, key).parent.mkdir(parents=True, exist_ok=True)
        Path(self.uri, key).write_bytes(b"0123456789")
        self.date(age, key)
        return key

    def collect(self, *, dry_run: bool = False) -> OrphanGarbage:
        return collect_orphans(self.store, self.dataset, self.clock, WEEK, dry_run=dry_run)


@pytest.fixture
def case(tmp_path: Path, clock: FakeClock) -> Case:
    return Case(tmp_path, clock)


def test_the_files_of_a_commit_that_never_happened_go_when_old(case: Case) -> None:
    before = case.files()
    young, old = case.orphan(WEEK - 1), case.orphan(WEEK)
    size = case.files()[old]
    report = case.collect()
    assert report == OrphanGarbage((old,), size, too_young=1, kept=(young,))
    assert case.files().keys() == {*before, young}
    assert case.dataset.to_table().num_rows == 3


def test_files_of_an_index_that_was_never_committed_go(case: Case) -> None:
    keys = {case.put(f"_indices/{uuid4()}/{name}.lance", WEEK) for name in ("page_data", "page_lookup")}
    case.dataset.create_scalar_index("price", "BTREE")
    case.date(3 * WEEK, *(key for key in case.files() if key.startswith("_indices") and key not in keys))
    assert set(case.collect().files) == keys
    assert case.dataset.to_table(filter="price = 1").num_rows == 1


def test_deletion_files_and_transactions_go_once_they_are_older_than_the_oldest_version(case: Case) -> None:
    """The rule is Lance's."""
    before_all = 3e8  # seconds before 2033; versions have the time of the system's clock
    keys = {case.put(f"_deletions/0-2-{number}.arrow", before_all) for number in (1, 2)}
    keys.add(case.put(f"_transactions/3-{uuid4()}.txn", before_all))
    case.put("_deletions/0-2-3.arrow", WEEK)
    assert set(case.collect().files) == keys


def test_a_commit_in_progress_keeps_its_files(case: Case) -> None:
    """The collection runs after a merge has written its files and before its version."""
    before = case.files().keys()
    builder = case.dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    transaction, _ = builder.use_index(False).execute_uncommitted(case.rows(1, 7))
    case.date(DAY, *(case.files().keys() - before))
    assert case.collect().files == ()
    done = lance.LanceDataset.commit(case.uri, transaction, read_version=case.dataset.version)
    assert sorted(done.to_table()["id"].to_pylist()) == [0, 1, 2, 7]


def test_what_any_version_a_tag_or_a_branch_refers_to_stays(case: Case) -> None:
    case.dataset.tags.create("kept", 2)
    case.dataset.create_branch("side", 3)
    case.dataset.delete("id = 0")
    case.dataset.optimize.compact_files()
    case.date(3 * WEEK)
    before = case.files()
    assert case.collect() == OrphanGarbage()
    assert case.files() == before
    for version in range(1, case.dataset.version + 1):
        lance.dataset(case.uri, version=version).to_table()


def test_what_lies_elsewhere_stays(case: Case) -> None:
    strangers = [
        case.put(key, 5 * WEEK)
        for key in (
            "notes.txt",
            "data/notes.txt",
            f"_mem_wal/{REGION}/0a0a0a0a_gen_1/data/rows.lance",
            f"_mem_wal/{REGION}/commits/1.json",
            "data2/x.lance",
        )
    ]
    assert case.collect().files == ()
    assert set(strangers) < case.files().keys()


def test_temporary_files_probes_and_staged_rows_go_when_old(case: Case) -> None:
    old = {
        case.put(f"_mem_wal/{REGION}/wal/.memwal-put-123-4", WEEK),
        case.put(f"_mem_wal/{REGION}/0a0a0a0a_gen_1/.memwal-put-123-5", WEEK),
        case.put(f"{PROBE_PREFIX}0a0a0a0a", WEEK),
        case.put(staged_key("0a" * 16), WEEK),
    }
    young = {case.put(f"_mem_wal/{REGION}/wal/.memwal-put-123-6", WEEK - 1), case.put(staged_key("0b" * 16), WEEK - 1)}
    report = case.collect()
    assert (set(report.files), report.bytes, report.too_young) == (old, 40, 2)
    assert young <= case.files().keys()


def test_a_dry_run_says_the_same_and_deletes_nothing(case: Case) -> None:
    key = case.orphan(WEEK)
    before = case.files()
    dry = case.collect(dry_run=True)
    assert dry.files == (key,)
    assert dry.dry_run
    assert case.files() == before
    assert case.collect().files == dry.files


def test_a_crash_in_the_middle_and_a_second_collector_do_no_harm(case: Case) -> None:
    before = case.files().keys()
    keys = sorted(case.orphan(WEEK) for _ in range(3))

    class Failing(LocalStore):
        def delete(self, key: str) -> None:
            if key == keys[1]:
                raise RuntimeError("killed")
            case.collect(dry_run=True)
            super().delete(key)

    with raises(RuntimeError):
        collect_orphans(Failing(case.uri), case.dataset, case.clock, WEEK)
    case.collect()
    assert case.files().keys() == before


# ---- what the base table asks of committed SSTs ----------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Any:
    settings = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
    uri = str(tmp_path / "t.lance")
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, indexes={"price": "btree"}, settings=settings) as opened:
        yield opened


def fill(table: Any, *ids: int) -> None:
    for each in ids:
        table.put([{"id": each, "price": each}])
        table.flush()
        table.commit()


def needs(uri: str, since: float) -> Any:
    return base_needs(LocalStore(uri), BaseTable.open(uri), since)


def test_a_version_counts_until_it_was_superseded_long_ago_however_old_it_is(table: Any) -> None:
    fill(table, 1, 2)
    uri, now = table.base.uri, 2e9
    versions = sorted(Path(uri, "_versions").glob("*.manifest"), reverse=True)
    for path in versions:
        os.utime(path, (now - 1000 * DAY, now - 1000 * DAY))
    assert needs(uri, now - 600).opened == {REGION: 2}
    fill(table, 3)
    fresh = set(Path(uri, "_versions").glob("*.manifest")) - set(versions)
    for path in fresh:
        os.utime(path, (now - 60, now - 60))
    assert needs(uri, now - 600).opened == {REGION: 2}  # the version of 1,000 days ago was the newest 2 min ago
    assert needs(uri, now - 30).opened == {REGION: 3}
    assert needs(uri, now - 30).settled(REGION) == 3
    assert needs(uri, now - 2000 * DAY).opened == {}  # no version is this old: use the oldest one


def test_an_index_counts_while_it_lags(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(table, 1, 2)
    assert needs(table.base.uri, 3e9).indexed == {}
    with monkeypatch.context() as crashing:
        crashing.setattr("memwal.flush.commits.committer.catch_up", lambda *_: False)
        fill(table, 3)
    found = needs(table.base.uri, 3e9)
    assert found.indexed == {"price_idx": {REGION: 2}}
    assert (found.committed[REGION], found.settled(REGION)) == (3, 2)
    fill(table, 4)
    assert needs(table.base.uri, 3e9).settled(REGION) == 4


def test_an_index_that_is_not_ours_does_not_count(table: Any) -> None:
    lance.dataset(table.base.uri).create_scalar_index("id", "BTREE", name="somebodys")
    fill(table, 1, 2)
    assert needs(table.base.uri, 3e9).indexed == {}


def test_tags_count_and_those_of_branches_do_not(table: Any) -> None:
    fill(table, 1)
    dataset = lance.dataset(table.base.uri)
    dataset.tags.create("one", dataset.version)
    dataset.create_branch("side", 1)
    dataset.tags.create("other", ("side", None))
    fill(table, 2)
    assert needs(table.base.uri, 3e9).tagged == ({REGION: 1},)


def test_a_version_that_is_cleaned_up_meanwhile_is_passed_over(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(table, 1, 2)
    uri = table.base.uri
    base = BaseTable.open(uri)
    cleaned = []

    class Cleaning(LocalStore):
        def get(self, key: str) -> bytes | None:
            if not cleaned:
                cleaned.append(key)
                for path in sorted(Path(uri, "_versions").glob("*.manifest"), reverse=True)[:-1]:
                    path.unlink()
            return super().get(key)

    assert base_needs(Cleaning(uri), base, 0.0).opened == {REGION: 2}
