"""Backup and restore: the content of a copy, crashes at every call, damage, and writers between any two steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.flush.backup import contents as contents_of_moments
from memwal.flush.backup import copying, moment, take
from memwal.flush.backup import restore as restoring
from memwal.flush.backup.moment import Moment, RegionMoment, capture
from memwal.flush.backup.record import BACKING_UP, RECORD, RESTORED, Record, read_record
from memwal.flush.base import create
from memwal.flush.base.create import RESTORING
from memwal.flush.commits import rounds
from memwal.flush.errors import BackupOvertaken, InvalidBackup, NotALanceTable
from memwal.wal import Corrupt, ObjectStore, bucket_region, open_store
from memwal.wal.layout import owner_key, parse_entry_key, parse_manifest_key, parse_sst_dir
from memwal.wal.store.local import TEMPORARY
from tests.backups import OPTIONS, applied_of, backed_up, contents, restored, rows_of, tags
from tests.clean import collect_ssts
from tests.damaged_table import SCHEMA, SETTINGS, opened, rows, verify
from tests.failure_matrix import Call, FaultyStore, Killed, StoreFault, WatchedStore
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.interpose import Once, killed_at, run_once

pytestmark = pytest.mark.usefixtures("only_process")


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """Return the place of the backup and the place of the restored table."""
    return str(tmp_path / "backup"), str(tmp_path / "restored")


@pytest.fixture
def table(grown: Path, tmp_path: Path) -> str:
    """Return a copy of a table with one committed generation, two published ones, and a log tail from two claims."""
    shutil.copytree(grown, tmp_path / "table")
    return str(tmp_path / "table")


def copied(uri: str, places: tuple[str, str]) -> Record:
    """Back up the table at `uri` and restore the backup."""
    record = backed_up(uri, places[0])
    restored(*places)
    return record


# ---- what a copy holds ---------------------------------------------------------------------------------------------


def test_a_backup_is_a_table_and_a_restore_makes_one_of_its_own(table: str, places: tuple[str, str]) -> None:
    backup, new = places
    record = backed_up(table, backup, at_once=8)
    wanted, base = rows_of(table), BaseTable.open(table)
    assert rows_of(backup) == wanted
    assert restored(backup, new, at_once=8).record == record
    assert rows_of(new) == wanted
    assert tags(table) == tags(backup) == []
    assert [index.name for index in lance.dataset(new).describe_indices()] == [
        index.name for index in base.dataset.describe_indices()
    ]
    again = BaseTable.open(new)
    assert again.table_id not in (base.table_id, "")
    assert BaseTable.open(backup).table_id == base.table_id == record.table
    assert again.restored is not None
    assert again.restored == (base.table_id, record.began, record.id)
    assert again.version == record.version == base.version
    note = json.loads(Path(new, RESTORED).read_text())
    assert (note["id"], note["uri"], "objects" in note) == (record.id, table, False)
    with memwal.open(new, settings=SETTINGS) as written:
        written.put(rows([1, 7000], 9))
        written.flush()
        written.commit()
        found = {row["id"]: row["name"] for row in rows_of(new)}
    assert found == {row["id"]: row["name"] for row in wanted} | {n: f"name of {n} v9" for n in (1, 7000)}
    assert rows_of(table) == wanted


def test_a_backup_holds_one_version_and_no_notes(table: str, places: tuple[str, str]) -> None:
    store = open_store(table)
    store.put(owner_key(bucket_region(0)), b"{}")
    record = backed_up(table, places[0])
    keys = sorted(copied.key for copied in record.objects)
    assert [*keys, RECORD] == sorted(contents(places[0]), key=lambda key: (key == RECORD, key))
    assert sum(key.startswith("_versions/") for key in keys) == 1
    manifests = [parsed for key in keys if (parsed := parse_manifest_key(key))]
    assert len(manifests) == len({parsed.region for parsed in manifests}) == 2
    assert not [
        key for key in keys if key.endswith(("owner.json", "fences.json", "/version_hint.json")) or "_refs/" in key
    ]
    for copied in record.objects:
        if parse_manifest_key(copied.key) is None:
            assert Path(places[0], copied.key).read_bytes() == Path(table, copied.key).read_bytes()
    region = record.regions[str(bucket_region(0))]
    positions = sorted(p.position for key in keys if (p := parse_entry_key(key)) and p.region == bucket_region(0))
    assert positions[-1] == region.position
    assert set(range(region.replay_after + 1, region.position + 1)) <= set(positions)


def test_an_empty_region_and_a_table_that_nobody_claimed(tmp_path: Path, places: tuple[str, str]) -> None:
    BaseTable.create(str(tmp_path / "table"), SCHEMA, ["id"], 2, [])
    assert backed_up(str(tmp_path / "table"), places[0]).regions == {}
    restored(*places)
    with opened(places[1]) as table:
        table.put(rows(range(5), 1))
    assert len(rows_of(places[1])) == 5


@pytest.mark.parametrize("append_only", [False, True])
def test_tables_of_other_kinds(append_only: bool, tmp_path: Path, places: tuple[str, str]) -> None:
    """A table with a log in arrow format, which Lance's writer shares, and a table without a key."""
    uri, new = str(tmp_path / "table"), rows(range(40), 1)
    key = () if append_only else "id"
    settings = SETTINGS | ({} if append_only else {"wal": {"format": "arrow"}})
    with memwal.open(uri, schema=SCHEMA, key=key, regions=2, settings=settings) as table:
        for part in range(0, 40, 10):
            table.put(new[part : part + 10], token=f"loader:{part}")
            if part < 30:
                table.flush()
            if part == 10:
                table.commit()
    with memwal.open(uri, settings=settings) as table:
        table.put(rows([50], 1))
    copied(uri, places)
    assert rows_of(places[1]) == rows_of(uri) == [*new, *rows([50], 1)]
    with memwal.open(places[1], settings=settings) as again:
        assert not again.put(new[30:], token="loader:30").applied
        again.put(rows([60], 1))
        again.flush()
        again.commit()
    assert rows_of(places[1]) == [*new, *rows([50, 60], 1)]


def test_a_long_applied_map_is_copied_with_its_snapshot(tmp_path: Path, places: tuple[str, str]) -> None:
    uri = str(tmp_path / "table")
    with opened(uri) as table:
        for number in range(30):
            table.put(rows([number], 1), token=f"{number:02d}{'x' * 2000}:1")
    assert any("/applied/" in key for key in contents(uri))
    copied(uri, places)
    assert any("/applied/" in key for key in contents(places[1]))
    with opened(places[1]) as again:
        assert not any(again.put(rows([n], 2), token=f"{n:02d}{'x' * 2000}:1").applied for n in range(30))


def test_tokens_are_applied_once_whatever_was_flushed_and_collected(tmp_path: Path, places: tuple[str, str]) -> None:
    uri = str(tmp_path / "table")
    with opened(uri) as table:
        table.put(rows(range(10), 1), token="loader:7")
        table.flush()
        table.commit()
    for region in BaseTable.open(uri).regions:
        clock = FakeClock(start=wal.SystemClock().now() + 1e9)
        wal.WalCollector(open_store(uri), region, BaseTable.open(uri).codec, clock, workers=1).collect(0.0)
    copied(uri, places)
    with opened(places[1]) as again:
        assert not again.put(rows(range(10), 2), token="loader:7").applied
        assert not again.put(rows(range(10), 2), token="loader:6").applied
        assert again.put(rows(range(10), 2), token="loader:8").applied


def test_a_backup_of_a_restored_table(table: str, places: tuple[str, str], tmp_path: Path) -> None:
    copied(table, places)
    backed_up(places[1], str(tmp_path / "second"))
    restored(str(tmp_path / "second"), str(tmp_path / "again"))
    ids = {BaseTable.open(uri).table_id for uri in (table, places[1], str(tmp_path / "again"))}
    assert len(ids) == 3
    assert rows_of(str(tmp_path / "again")) == rows_of(table)


def test_large_objects_are_streamed(table: str, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "WHOLE_MAX", 100)
    told: list[tuple[int, int, int, int]] = []
    base, clock = BaseTable.open(table), wal.SystemClock()
    stores = open_store(table), open_store(places[0])
    record = take.back_up(
        take.BackupRun(*stores, clock, wal.SystemIds(), OPTIONS, lambda *n: told.append(n), base=base)
    )
    done, objects, size, total = told[-1]
    assert (done, size) == (objects, total)
    assert total <= record.size
    restored(*places)
    assert rows_of(places[1]) == rows_of(table)
    assert not [name for place in places for name in contents(place) if ".memwal-put" in name]


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_place_that_is_not_empty_is_refused(table: str, places: tuple[str, str]) -> None:
    backup, new = places
    Path(new).mkdir()
    Path(new, "letter.txt").write_text("mine")
    for place in (f"{table}/backup", table, new):
        with raises(InvalidBackup):
            backed_up(table, place)
    with raises(InvalidBackup):
        restored(backup, f"{new}-2")
    backed_up(table, backup)
    with raises(InvalidBackup):
        backed_up(table, backup)
    for place in (new, table):
        with raises(InvalidBackup):
            restored(backup, place)
    assert contents(new) == {"letter.txt": b"mine"}


def test_a_shallow_clone_is_refused(table: str, places: tuple[str, str], tmp_path: Path) -> None:
    dataset = lance.dataset(table)
    dataset.shallow_clone(str(tmp_path / "clone"), dataset.version)
    with raises(InvalidBackup):
        backed_up(str(tmp_path / "clone"), places[0])


def test_a_table_that_is_being_resized_is_refused(table: str, places: tuple[str, str]) -> None:
    base, store = BaseTable.open(table), open_store(table)
    new: dict[str, Any] = {"ids": wal.SystemIds(), "clock": wal.SystemClock(), "seal": True}
    wal.claim(store, base.regions[1], spec_id=base.routing_version, codec=base.codec, **new)
    with raises(BackupOvertaken):
        backed_up(table, places[0])


def test_a_base_that_was_put_back_is_refused(table: str, places: tuple[str, str]) -> None:
    before = lance.dataset(table).version
    with opened(table) as again:
        again.flush()
        again.commit()
    lance.dataset(table, version=before).restore()
    with raises(InvalidBackup):
        backed_up(table, places[0])


def test_damage_of_any_object_is_found_before_there_is_a_table(table: str, places: tuple[str, str]) -> None:
    backup, new = places
    for copied in backed_up(table, backup).objects:
        file = Path(backup, copied.key)
        whole = file.read_bytes()
        middle = len(whole) // 2
        changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for damaged, says in ((changed, "checksum is another"), (whole[:-1], "are recorded"), (None, "is missing")):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(Corrupt, match=says) as refused:
                restored(backup, new)
            assert copied.key in str(refused.value)
            assert not Path(new, "_versions").exists() or not any(Path(new, "_versions").iterdir())
            shutil.rmtree(new, ignore_errors=True)
        file.write_bytes(whole)
    restored(backup, new)


def test_a_damaged_record_is_refused_in_one_line(table: str, places: tuple[str, str]) -> None:
    backed_up(table, places[0])
    record = Path(places[0], RECORD)
    whole = record.read_text()
    for text in ("", "[]", whole[:100], whole.replace('"objects"', '"object"')):
        record.write_text(text)
        with raises(Corrupt):
            restored(*places)
    record.write_text(whole.replace('"format": 1', '"format": 2'))
    with raises(InvalidBackup):
        restored(*places)
    outside = whole.replace('"key": "data/', '"key": "data/../../')
    assert outside != whole
    record.write_text(outside)
    with raises(Corrupt):
        restored(*places)
    assert not Path(places[1]).exists()


# ---- crashes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(prepared: dict[str, Path], tmp_path: Path) -> str:
    """Return a table of one region with one committed generation, two published ones and one log entry."""
    shutil.copytree(prepared["commit"], tmp_path / "table")
    return str(tmp_path / "table")


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Return a function that runs `work`, which must be killed. As a killed process does, it removes no tag."""

    def run(work: Callable[[], Any]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(take, "_untag", lambda *_: None)
            with pytest.raises(Killed):
                work()

    return run


AFTER = StoreFault(frozenset({"put_if_absent", "put", "delete"}), lands=True, answer=Killed())
BEFORE = StoreFault(frozenset({"put_if_absent", "put", "delete", "list", "describe", "get", "exists"}), answer=Killed())


def kills_of(work: Callable[[FaultyStore], Any], store: ObjectStore, root: Path) -> list[tuple[Call, StoreFault]]:
    """Return the calls at which to kill `work`: one for each state of the files below `root` that it passes."""
    work(watched := WatchedStore(store, root))
    kills = watched.kills(lambda call: call.method in BEFORE.calls)
    return [(call, AFTER if comes_after else BEFORE) for call, comes_after in kills]


def calls_of(work: Callable[[FaultyStore], Any], store: ObjectStore) -> list[Call]:
    """Return the store calls of `work`."""
    counting = FaultyStore(store, FakeClock())
    work(counting)
    return counting.calls


def test_a_backup_killed_at_any_call_of_the_destination_goes_on(
    small: str, tmp_path: Path, dies: Callable[[Callable[[], Any]], None]
) -> None:
    whole = str(tmp_path / "whole")
    kills = kills_of(lambda store: backed_up(small, store), open_store(whole), tmp_path)
    wanted = {copied.key: copied.sha256 for copied in read_record(open_store(whole)).objects}
    for number, (call, fault) in enumerate(kills):
        dest = str(tmp_path / f"{number}")
        store = FaultyStore(open_store(dest), FakeClock())
        store.arm(fault, call)
        dies(lambda store=store: backed_up(small, store))  # type: ignore[misc]
        if not Path(dest, RECORD).exists():
            with pytest.raises(InvalidBackup, match=r"is not finished|no backup is there"):
                read_record(open_store(dest))
            if Path(dest, BACKING_UP).exists():
                with pytest.raises(InvalidBackup, match="an unfinished backup is there"):
                    backed_up(small, dest)
            else:
                backed_up(small, dest)
        if Path(dest, BACKING_UP).exists():
            backed_up(small, dest, resume=True)
            assert tags(small) == []
            assert not Path(dest, BACKING_UP).exists()
        found = read_record(open_store(dest))
        assert {copied.key: copied.sha256 for copied in found.objects} == wanted, call
        assert set(contents(dest)) == {*wanted, RECORD}, call
        shutil.rmtree(dest)
    restored(whole, str(tmp_path / "restored"))


def test_a_backup_killed_at_any_call_of_the_table_leaves_a_tag_that_goes(
    small: str, tmp_path: Path, dies: Callable[[Callable[[], Any]], None]
) -> None:
    calls = calls_of(lambda store: backed_up(store, str(tmp_path / "whole"), uri=small), open_store(small))
    assert {call.method for call in calls} <= {"get", "exists", "list", "describe", "children"}, "it only reads"
    seen = set()
    for call in calls:
        dest = str(tmp_path / "dest")
        store = FaultyStore(open_store(small), FakeClock())
        store.arm(StoreFault(frozenset({call.method}), answer=Killed()), call)
        dies(lambda store=store, dest=dest: backed_up(store, dest, uri=small))  # type: ignore[misc]
        seen.add(len(tags(small)))
        backed_up(small, dest, resume=True)
        assert tags(small) == []
        shutil.rmtree(dest)
    assert seen == {0, 1}


@pytest.mark.parametrize("lands", [False, True])
def test_a_resumed_backup_that_is_killed_at_its_marker_can_be_resumed(
    lands: bool, small: str, tmp_path: Path, dies: Callable[[Callable[[], Any]], None]
) -> None:
    """A marker exists at any time, and the tag of the first backup is deleted before the marker that names it."""
    killed = str(tmp_path / "killed")
    store = FaultyStore(open_store(killed), FakeClock())
    store.arm(BEFORE, Call("put_if_absent", RECORD, 1))
    dies(lambda: backed_up(small, store))
    (tag,) = tags(small)
    shutil.copytree(killed, tmp_path / "whole")
    calls = calls_of(lambda store: backed_up(small, store, resume=True), open_store(str(tmp_path / "whole")))
    *marks, last = [
        call for call in calls if call.key == BACKING_UP and call.method in ("put_if_absent", "put", "delete")
    ]
    assert (len(marks), last.method) == (1, "delete")
    for number, call in enumerate(marks):
        dest = str(tmp_path / f"dest-{number}")
        shutil.copytree(killed, dest)
        lance.dataset(small).tags.create(tag, lance.dataset(small).version)
        store = FaultyStore(open_store(dest), FakeClock())
        store.arm(StoreFault(frozenset({call.method}), lands=lands, answer=Killed()), call)
        with pytest.raises(Killed):
            backed_up(small, store, resume=True)
        assert tags(small) == []
        assert Path(dest, BACKING_UP).exists()
        backed_up(small, dest, resume=True)
        restored(dest, str(tmp_path / f"restored-{number}"))


def test_the_tag_of_a_finished_backup_goes_before_the_marker_that_names_it(
    small: str, tmp_path: Path, once: Once
) -> None:
    dest, seen = str(tmp_path / "dest"), []
    once(take, "_untag", lambda: seen.append({RECORD, BACKING_UP} & contents(dest).keys()))
    backed_up(small, dest)
    assert seen == [{RECORD, BACKING_UP}]


def test_tags_of_backups_that_were_killed_long_ago_are_removed(small: str, tmp_path: Path) -> None:
    dataset = lance.dataset(small)
    for name in ("memwal-backup-20200101T000000Z-0123abcd", "memwal-backup-29990101T000000Z-0123abcd", "release"):
        dataset.tags.create(name, dataset.version)
    backed_up(small, str(tmp_path / "backup"))
    assert sorted(tags(small)) == ["memwal-backup-29990101T000000Z-0123abcd", "release"]


def test_a_restore_killed_at_any_call_is_no_table_and_goes_on(small: str, tmp_path: Path) -> None:
    backup, wanted = str(tmp_path / "backup"), rows_of(small)
    backed_up(small, backup)
    kills = kills_of(lambda store: restored(backup, store), open_store(str(tmp_path / "whole")), tmp_path)
    last = max(n for n, (call, _) in enumerate(kills) if call.method == "delete" and call.key == RESTORING)
    for number, (call, fault) in enumerate(kills[: last + 1]):
        dest = str(tmp_path / f"{number}")
        store = FaultyStore(open_store(dest), FakeClock())
        store.arm(fault, call)
        with pytest.raises(Killed):
            restored(backup, store)
        is_table = any(name.startswith("_versions/") for name in contents(dest))
        if Path(dest, RESTORING).exists():
            if not is_table:
                with pytest.raises(NotALanceTable):
                    BaseTable.find(dest)
            with pytest.raises(InvalidBackup, match="an unfinished restore is there"):
                restored(backup, dest)
            restored(backup, dest, resume=True)
        elif not is_table:
            restored(backup, dest)
        assert rows_of(dest) == wanted, call
        assert not Path(dest, RESTORING).exists()
        shutil.rmtree(dest)


def other_table(uri: str) -> None:
    """Create a table as another program does, which does not check for markers."""
    lance.write_dataset(pa.table({"other": [1]}), uri)


@pytest.mark.parametrize(
    ("module", "step"), [(copying, "put_until_known"), (restoring, "sync_tree")], ids=["begins", "copies"]
)
def test_a_table_that_is_created_while_a_restore_begins_or_copies_stays(
    module: ModuleType, step: str, small: str, places: tuple[str, str], once: Once
) -> None:
    backed_up(small, places[0])
    once(module, step, lambda: other_table(places[1]))
    for resume in (False, True)[: 1 if step == "put_until_known" else 2]:
        with raises(InvalidBackup):
            restored(*places, resume=resume)
        assert lance.dataset(places[1]).to_table().to_pylist() == [{"other": 1}]
    if step == "put_until_known":
        assert not {name for name in contents(places[1]) if name == RESTORING or name.startswith("_mem_wal")}


def test_no_table_is_created_where_a_restore_begins_meanwhile(places: tuple[str, str], once: Once) -> None:
    place = open_store(places[1])
    once(create, "_first_version", lambda: place.put(RESTORING, b"{}"), after=True)
    with raises(NotALanceTable):
        BaseTable.create(places[1], SCHEMA, ["id"], 1, [])
    assert contents(places[1]) == {RESTORING: b"{}"}


@pytest.mark.parametrize("step", ["_checked", "_renamed"])
@pytest.mark.parametrize("looks", [True, False])
def test_a_restore_that_is_resumed_while_it_works_stops(
    step: str, looks: bool, small: str, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    """The resumed restore has created the table, and its manifest must stay. Without the checks (`looks`) the put of
    step 5 is refused."""
    backed_up(small, places[0])
    made: list[bytes] = []

    def newer() -> None:
        restored(*places, resume=True)
        made.extend(path.read_bytes() for path in Path(places[1], "_versions").glob("*.manifest"))
        if not looks:
            monkeypatch.setattr(restoring, "_expect_ours", lambda *_: None)
            monkeypatch.setattr(restoring, "versions", lambda _: [])

    once(restoring, step, newer, after=True)
    with raises(InvalidBackup):
        restored(*places)
    assert [path.read_bytes() for path in Path(places[1], "_versions").glob("*.manifest")] == made
    assert rows_of(places[1]) == rows_of(small)


def test_a_resumed_restore_leaves_a_table_that_lives_alone(small: str, places: tuple[str, str]) -> None:
    """The file that resembles a leftover is the running put of a writer."""
    record = copied(small, places)
    Path(places[1], RESTORING).write_text(json.dumps({"id": record.id}))
    with opened(places[1]) as table:
        table.put([{"id": 7000, "n": 9}])
    under_way = Path(places[1], "_mem_wal", str(bucket_region(0)), "wal", f"{TEMPORARY}1-abc")
    under_way.touch()
    before = contents(places[1])
    restored(*places, resume=True)
    del before[RESTORING]
    assert contents(places[1]) == before
    assert str(under_way.relative_to(places[1])) in before


def test_what_an_unfinished_attempt_left_is_checked_before_it_is_kept(small: str, tmp_path: Path) -> None:
    backup, dest = str(tmp_path / "backup"), str(tmp_path / "dest")
    record = backed_up(small, backup)
    Path(dest).mkdir()
    Path(dest, RESTORING).write_text(json.dumps({"id": record.id}))
    copied = next(each for each in record.objects if parse_entry_key(each.key))
    damaged = Path(dest, copied.key)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(bytes(copied.size))
    restored(backup, dest, resume=True)
    assert rows_of(dest) == rows_of(small)
    other = str(tmp_path / "other")
    Path(other).mkdir()
    Path(other, RESTORING).write_text('{"id": "another"}')
    with raises(InvalidBackup):
        restored(backup, other, resume=True)


@pytest.mark.parametrize("name", ["pieces_of", "_remove_others"])
def test_a_backup_that_is_resumed_while_it_works_stops(name: str, small: str, tmp_path: Path, once: Once) -> None:
    dest = str(tmp_path / "dest")
    once(take, name, lambda: backed_up(small, dest, resume=True), after=True)
    with raises(InvalidBackup):
        backed_up(small, dest)
    restored(dest, str(tmp_path / "restored"))
    assert rows_of(str(tmp_path / "restored")) == rows_of(small)
    assert tags(small) == []


def test_an_older_backup_leaves_a_finished_one_as_it_is(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older backup captures no other moment, and replaces no region manifest of the newer one."""
    for ends in (True, False):
        dest = str(tmp_path / f"dest-{ends}")
        finished: dict[str, bytes] = {}

        def newer(dest: str = dest, finished: dict[str, bytes] = finished, ends: bool = ends) -> None:
            backed_up(small, dest, resume=True)
            (manifest,) = (Path(dest, key) for key in contents(dest) if parse_manifest_key(key))
            manifest.write_bytes(b"of a later moment")
            finished.update(contents(dest))
            if ends:
                raise take.Vanished("an entry")

        with monkeypatch.context() as patched:
            captures = counted(patched)
            run_once(patched, take, "pieces_of", newer, after=True)
            with raises(InvalidBackup):
                backed_up(small, dest)
        assert len(captures) == 2
        assert contents(dest) == finished


def test_region_manifests_of_an_earlier_attempt_are_replaced(small: str, places: tuple[str, str]) -> None:
    record = backed_up(small, places[0])
    Path(places[0], RECORD).rename(Path(places[0], BACKING_UP))
    (manifest,) = (Path(places[0], copied.key) for copied in record.objects if parse_manifest_key(copied.key))
    manifest.write_bytes(b"of an earlier moment")
    backed_up(small, places[0], resume=True)
    restored(*places)
    assert rows_of(places[1]) == rows_of(small)


@pytest.mark.parametrize("part", ["data", "sst"])
def test_what_is_missing_in_the_table_is_named(
    part: str, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = counted(monkeypatch)
    if part == "data":
        victim = next(Path(small, "data").iterdir())
        victim.unlink()
    else:
        manifest = wal.ManifestStore(open_store(small), bucket_region(0)).latest()
        assert manifest is not None
        victim = Path(small, "_mem_wal", str(bucket_region(0)), manifest.ssts[-1].path)
        shutil.rmtree(victim)
    with raises(Corrupt):
        backed_up(small, str(tmp_path / "dest"))
    assert len(captures) == 2
    assert tags(small) == []


def test_an_unfinished_backup_of_another_table_is_refused(small: str, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / BACKING_UP).write_text(json.dumps({"table": "0" * 32}))
    with raises(InvalidBackup):
        backed_up(small, str(dest), resume=True)


# ---- writers in between --------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Any]:
    """Return an open table of two regions with rows in the base, in an SST and in the log."""
    table = opened(str(tmp_path / "table"))
    table.put(rows(range(20), 1))
    table.flush()
    table.commit()
    table.put(rows(range(10, 30), 2))
    table.flush()
    table.put(rows(range(25, 35), 3))
    yield table
    table.close()


def names(uri: str) -> dict[int, str]:
    """Return the name of each row by id."""
    return {row["id"]: row["name"] for row in rows_of(uri)}


def all_go(uri: str) -> None:
    """Collect everything that is not needed, whatever its age."""
    clock = FakeClock(start=wal.SystemClock().now() + 1e9)
    base, store = BaseTable.open(uri), open_store(uri)
    for region in base.regions:
        wal.WalCollector(store, region, base.codec, clock, workers=1).collect(0.0)
    collect_ssts(store, uri)


def half_a_commit(uri: str) -> None:
    """Commit, killed after the pass of the deletes."""
    with killed_at(rounds, "upsert_pass"):
        flush.commit(uri, {}, open_store(uri), clock=FakeClock())


def commit_all(table: Any) -> None:
    table.flush()
    table.commit()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Moment]:
    """Return a list that records the moments that later backups capture."""
    captures: list[Moment] = []

    def noted(*args: Any) -> Moment:
        captures.append(capture(*args))
        return captures[-1]

    monkeypatch.setattr(take, "capture", noted)
    return captures


def check_beside(uri: str, places: tuple[str, str], acknowledged: dict[int, str]) -> None:
    """Back up and restore; assert that the copy holds every acknowledged row, at the same or a newer version."""
    copied(uri, places)
    found = names(places[1])
    assert found.items() >= acknowledged.items(), sorted(acknowledged.items() - found.items())


@pytest.mark.parametrize(
    ("where", "name", "after"),
    [
        (moment, "_look", False),
        (moment, "_look", True),
        (moment, "_end", False),
        (moment, "newest_base", False),
        (moment, "newest_base", True),
        (take, "pieces_of", False),
        (take, "pieces_of", True),
    ],
)
def test_a_flush_commit_and_collection_between_any_two_steps(
    where: Any,
    name: str,
    after: bool,
    written: Any,
    places: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    once: Once,
) -> None:
    uri = written.base.uri
    acknowledged = names(uri)

    def act() -> None:
        commit_all(written)
        written.put(rows(range(100, 120), 4))
        commit_all(written)
        lance.dataset(uri).cleanup_old_versions(retain_versions=1, error_if_tagged_old_versions=False)
        all_go(uri)

    once(where, name, act, after=after)
    captures = counted(monkeypatch)
    check_beside(uri, places, acknowledged)
    assert len(captures) == (2 if where is take else 1), "entries of the log were collected before they were copied"


def test_a_base_opened_before_the_looks_is_found(
    written: Any, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    """Planted fault: the backup opens the base first and reads the manifests later. Rows that are committed and pruned
    in between are in neither."""
    uri = written.base.uri
    monkeypatch.setattr(moment, "newest_base", lambda begun: begun)
    once(moment, "_look", lambda: commit_all(written))
    acknowledged = names(uri)
    with raises(InvalidBackup):
        check_beside(uri, places, acknowledged)
    shutil.rmtree(places[0])
    monkeypatch.setattr(moment, "_check", lambda *_: None)
    once(moment, "_look", lambda: (written.put(rows([50], 5)), commit_all(written)))
    acknowledged = names(uri)
    with pytest.raises(AssertionError):
        check_beside(uri, places, acknowledged)


def test_the_tag_keeps_the_ssts_and_the_base_version(
    written: Any, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    """Commits, compactions, clean-ups and collections of SSTs after the tag require no second capture."""
    uri, captures = written.base.uri, counted(monkeypatch)
    acknowledged = names(uri)

    def act() -> None:
        commit_all(written)
        lance.dataset(uri).optimize.compact_files()
        lance.dataset(uri).cleanup_old_versions(retain_versions=1, error_if_tagged_old_versions=False)
        collect_ssts(open_store(uri), uri)
        assert lance.dataset(uri).version > captures[0].base.version

    once(take, "pieces_of", act)
    check_beside(uri, places, acknowledged)
    assert len(captures) == 1
    listed = [sst for end in captures[0].regions for sst in end.manifest.ssts]
    assert listed
    collect_ssts(open_store(uri), uri)
    left = {name for region in BaseTable.open(uri).regions for name in open_store(uri).children(f"_mem_wal/{region}/")}
    assert not [sst.path for sst in listed if sst.path in left], "the tag is gone, so they go"
    assert all(parse_sst_dir(sst.path) for sst in listed)


def test_no_region_is_more_than_one_batch_ahead(
    written: Any, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    """Batches of one producer arrive between the reads of two regions. Each is sent once the one before is durable."""
    uri = written.base.uri
    query = "6f1c2f8e-6f0a-4d0e-9c8e-0a3a5d0c7f11"

    def send(batches: range) -> None:
        for batch in batches:
            written.put(rows(range(1000 * batch, 1000 * batch + 20), 1), token=f"{query}:{batch}")

    send(range(1, 4))
    once(moment, "_look", lambda: send(range(4, 7)), after=True)
    once(moment, "_end", lambda: send(range(7, 10)))
    record = copied(uri, places)
    numbers = [applied[query] for applied in applied_of(places[1]).values()]
    assert max(numbers) == record.queries[query] == 6
    assert max(numbers) - min(numbers) <= 1
    found = names(places[1])
    assert all(1000 * batch + n in found for batch in range(1, 6) for n in range(20)), "all before the last are whole"
    assert not any(id >= 7000 for id in found)
    with opened(places[1]) as again:
        again.put(rows(range(6000, 6020), 1), token=f"{query}:6")
        again.put(rows(range(7000, 7020), 1), token=f"{query}:7")
    found = names(places[1])
    assert all(1000 * batch + n in found for batch in range(1, 8) for n in range(20))
    # Planted fault: without the second read, one region has batch 3 and the other one batch 6.
    monkeypatch.setattr(moment, "_end", lambda *args: args[-1])
    send(range(10, 12))
    once(moment, "_look", lambda: send(range(12, 15)), after=True)
    backed_up(uri, f"{places[0]}-2")
    numbers = [applied[query] for applied in applied_of(f"{places[0]}-2").values()]
    assert max(numbers) - min(numbers) > 1


def test_a_table_that_is_first_claimed_while_a_moment_is_captured(
    tmp_path: Path, places: tuple[str, str], once: Once
) -> None:
    """A copy with the rows in the base but without the log of their region would not know the rows' token."""
    uri = str(tmp_path / "table")
    BaseTable.create(uri, SCHEMA, ["id"], 2, [])

    def act() -> None:
        with opened(uri) as table:
            table.put(rows(range(20), 1), token="loader:1")
            commit_all(table)

    once(moment, "newest_base", act)
    copied(uri, places)
    with opened(places[1]) as again:
        assert not again.put(rows(range(20), 2), token="loader:1").applied


def test_a_region_that_is_first_claimed_while_a_moment_is_captured(
    written: Any, places: tuple[str, str], once: Once
) -> None:
    """Batch 1 is durable in both regions before batch 2 is sent, so a copy with batch 2 must hold all of batch 1."""
    uri, query = written.base.uri, "6f1c2f8e-6f0a-4d0e-9c8e-0a3a5d0c7f11"
    for batch in (1, 2):
        written.put(rows(range(1000 * batch, 1000 * batch + 20), 1), token=f"{query}:{batch}")
    region = Path(uri, "_mem_wal", str(bucket_region(1)))
    hidden = region.rename(Path(uri).parent / "hidden")
    once(wal, "regions", lambda: hidden.rename(region), after=True)
    copied(uri, places)
    assert {n for n in names(places[1]) if n >= 1000} == {*range(1000, 1020), *range(2000, 2020)}


STEPS = [
    (moment, "_look", True),
    (moment, "_end", False),
    (moment, "newest_base", False),
    (take, "pieces_of", False),
]


@pytest.mark.parametrize(
    ("where", "name", "after", "buckets"),
    [*((*step, 5) for step in STEPS), (contents_of_moments, "_of_region", False, 1)],
)
def test_a_resize_between_any_two_steps(
    where: Any,
    name: str,
    after: bool,
    buckets: int,
    table: str,
    places: tuple[str, str],
    once: Once,
) -> None:
    """The copy has either the routing before the resize or the routing after it, never a mixture."""
    with opened(table) as before:
        before.put(rows(range(500, 520), 7), token="loader:1")
    wanted = rows_of(table)

    def resized(uri: str, to: int) -> None:
        flush.resize(uri, {}, open_store(uri), to, clock=wal.SystemClock(), ids=wal.SystemIds())

    once(where, name, lambda: resized(table, buckets), after=after)
    backed_up(table, places[0])
    assert BaseTable.open(table).buckets == buckets
    restored(*places)
    assert rows_of(places[1]) == wanted
    with opened(places[1]) as again:
        assert not again.put(rows(range(500, 520), 8), token="loader:1").applied
        again.put(rows([1, 2, 3], 9), token="loader:2")
    wanted = rows_of(places[1])
    resized(places[1], 3)
    assert rows_of(places[1]) == wanted
    with opened(places[1]) as again:
        assert not again.put(rows([1, 2, 3], 9), token="loader:2").applied


@pytest.mark.parametrize(("where", "name", "after"), STEPS)
def test_a_take_over_between_any_two_steps(
    where: Any, name: str, after: bool, table: str, places: tuple[str, str], once: Once
) -> None:
    acknowledged = names(table)

    def claimed() -> None:
        with opened(table) as other:
            other.put(rows(range(500, 520), 7))

    once(where, name, claimed, after=after)
    check_beside(table, places, acknowledged)
    with opened(places[1]) as again:
        again.put(rows([1, 2, 3], 9))
    assert verify(places[1]).findings == ()


def test_a_half_commit_is_copied_with_its_plan(written: Any, places: tuple[str, str]) -> None:
    uri = written.base.uri
    written.delete([1, 2, 3])
    written.flush()
    half_a_commit(uri)
    wanted = names(uri)
    assert 1 not in {row["id"] for row in lance.dataset(uri).to_table(["id"]).to_pylist()}, "the deletes pass was made"
    backed_up(uri, places[0])
    assert any("/commits/" in key for key in contents(places[0]))
    restored(*places)
    assert names(places[1]) == wanted
    with opened(places[1]) as again:
        again.put(rows([60], 9))
        again.flush()
        again.commit()
        again.commit()
    assert names(places[1]) == wanted | {60: "name of 60 v9"}
    assert lance.dataset(places[1]).count_rows() == len(wanted) + 1


def test_a_half_commit_of_generations_behind_the_look_is_not_copied(
    written: Any, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    """The base holds the commit's deletes pass; no SST of the manifest that the backup read holds the commit's rows."""
    uri = written.base.uri
    acknowledged = names(uri)

    def half() -> None:
        written.put([*rows(range(500, 510), 1)])
        written.delete(list(range(20)))
        written.flush()
        half_a_commit(uri)

    once(moment, "newest_base", half)
    copied(uri, places)
    found = names(places[1])
    assert (500 in found) != (1 in found), "the later put and the later delete are both in it, or neither"
    # Planted fault: the backup ignores a commit plan with generations beyond the manifest.
    with opened_again(written, uri) as table:
        table.commit()
        table.put(rows(range(20), 7))
        commit_all(table)
        acknowledged = names(uri)
        table.put(rows([50], 1))

        def again() -> None:
            table.put(rows(range(600, 610), 1))
            table.delete(list(range(20)))
            table.flush()
            half_a_commit(uri)

        once(moment, "newest_base", again)
        monkeypatch.setattr(moment, "_is_passed", lambda *_: False)
        backed_up(uri, f"{places[0]}-2")
        restored(f"{places[0]}-2", f"{places[1]}-2")
        found = names(f"{places[1]}-2")
        assert not acknowledged.keys() <= found.keys()
        assert 600 not in found


def opened_again(table: Any, uri: str) -> Any:
    table.close()
    return opened(uri)


@pytest.mark.parametrize("never", ["at rest", "whole"])
def test_a_backup_that_is_always_overtaken_ends_and_says_so(
    never: str, written: Any, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either a commit ends each capture, or a collection deletes an object before each copy."""
    real, numbers = moment.newest_base, iter(range(take.MOMENTS))

    def committed(begun: BaseTable) -> BaseTable:
        written.put(rows([1], 9))
        commit_all(written)
        return real(begun)

    def collected(*_: object) -> None:
        raise take.Vanished(f"entry {next(numbers)}")

    if never == "at rest":
        monkeypatch.setattr(moment, "newest_base", committed)
        monkeypatch.setattr(moment, "CAPTURES", 3)
    else:
        monkeypatch.setattr(take, "pieces_of", collected)
    with raises(BackupOvertaken):
        backed_up(written.base.uri, places[0])
    assert tags(written.base.uri) == []


def test_regions_are_described_as_they_were_captured(written: Any, places: tuple[str, str]) -> None:
    uri = written.base.uri
    found = capture(BaseTable.open(uri), open_store(uri), OPTIONS)
    assert all(isinstance(each, RegionMoment) and each.tip > each.manifest.replay_after for each in found.regions)
    record = backed_up(uri, places[0])
    assert {name: region.position for name, region in record.regions.items()} == {
        str(each.region): each.tip for each in found.regions
    }
    assert [region.ssts for region in record.regions.values()] == [1, 1]
