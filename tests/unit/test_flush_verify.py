"""`flush.verification`: a table is clean at every stage of its life; each kind of damage is found and named, alone."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader, LanceFileWriter
from lance.mem_wal import CompactedSsTable

import ingest
from flush import BaseTable, bloom_bytes, write_key_sidecar
from flush.commit_plan import plan_key
from flush.finding import Finding, View, take_view
from flush.verification import Verified, verify_table
from flush.verify_sst import check_keys
from wal import (
    FakeClock,
    ManifestStore,
    ObjectStore,
    RegionManifest,
    SeededIds,
    SsTable,
    claim,
    open_store,
    read_tail,
)
from wal.layout import (
    entry_key,
    manifest_key,
    manifest_prefix,
    parse_entry_key,
    parse_manifest_key,
    sst_key,
    wal_prefix,
)

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
    ]
)
INDEXES = {"name": "btree"}
SETTINGS = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def rows(ids: range | list[int], version: int) -> list[dict[str, Any]]:
    """Rows that only these arguments decide."""
    return [{"id": n, "name": f"name of {n} v{version}", "vector": [n, version, 0.5, 1.0]} for n in ids]


def opened(uri: str) -> Any:
    """The table, claimed."""
    new = {} if Path(uri).exists() else {"schema": SCHEMA, "key": "id", "regions": 2, "indexes": INDEXES}
    return ingest.open(uri, settings=SETTINGS, **new)


def grow(uri: str) -> Iterator[str]:
    """A table's life, stage by stage."""
    table = opened(uri)
    yield "created"
    table.put(rows(range(40), 1))
    yield "put"
    table.flush()
    yield "flushed"
    table.commit()
    yield "committed"
    table.put(rows(range(20, 60), 2))
    table.delete([1, 2, 3])
    table.flush()
    table.put(rows([5, 6, 7, 100, 101], 3))
    table.flush()
    yield "flushed twice"
    table.put(rows(range(200, 210), 4))
    table.close()
    table = opened(uri)
    yield "opened again"
    for number in range(3):
        table.put(rows(range(300 + 10 * number, 305 + 10 * number), 5), durable=number != 1)
    table.close()
    yield "closed"


def verify(uri: str, deep: bool = True) -> Verified:
    return verify_table(open_store(uri), uri, deep=deep)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with one generation committed, two published, and a tail that two claims wrote."""
    path = tmp_path_factory.mktemp("verify") / "table"
    for _ in grow(str(path)):
        pass
    return path


class Damaged:
    """A copy of the grown table, to be damaged. `region` is that of bucket 0."""

    def __init__(self, uri: str) -> None:
        self.uri, self.store = uri, open_store(uri)
        self.base = BaseTable.open(uri)
        self.region, self.other = self.base.regions
        self.suffix = self.base.codec.suffix

    @property
    def manifest(self) -> RegionManifest:
        found = ManifestStore(self.store, self.region).latest()
        assert found is not None
        return found

    @property
    def sst(self) -> SsTable:
        return self.manifest.ssts[0]

    def file(self, key: str) -> Path:
        return Path(self.uri) / key

    def sst_file(self, name: str) -> Path:
        """A file of the first SST; a pattern may be given, of a name that there is one of."""
        (found,) = self.file(sst_key(self.region, self.sst.path)).glob(name)
        return found

    def entry(self, position: int) -> Path:
        return self.file(entry_key(self.region, position, self.suffix))

    @property
    def positions(self) -> list[int]:
        keys = map(parse_entry_key, self.store.list(wal_prefix(self.region)))
        return sorted(key.position for key in keys if key)

    @property
    def sentinel(self) -> int:
        """Position of the second claim's."""
        (found,) = (p for p in self.positions if self.base.codec.header(self.entry(p).read_bytes()).sentinel)
        return found

    def reentry(self, position: int, rows: Callable[[pa.Table], pa.Table] = lambda rows: rows, **changes: Any) -> None:
        """Write an entry anew, its header or rows changed, its checksum right."""
        found = self.base.codec.decode(position, self.entry(position).read_bytes())
        header = replace(found.header, **changes)
        self.entry(position).write_bytes(self.base.codec.encode(header, rows(found.rows)))

    def rewrite_manifests(self, change: Callable[[RegionManifest], RegionManifest], newest: bool = False) -> None:
        """Write manifest versions anew, every one or the newest, their checksums right."""
        keys = map(parse_manifest_key, self.store.list(manifest_prefix(self.region)))
        for version in [self.manifest.version] if newest else [key.version for key in keys if key]:
            file = self.file(manifest_key(self.region, version))
            file.write_bytes(change(RegionManifest.decode(file.read_bytes())).encode())

    def collect(self) -> None:
        """What the collector would take of the log."""
        for position in self.positions:
            if position <= self.manifest.replay_after and position != self.sentinel:
                self.entry(position).unlink()

    def rewrite_sst(self, change: Callable[[pa.Table], pa.Table]) -> None:
        """Write the first SST anew from changed rows, all its parts fitting, and collect the log it was made of."""
        directory = self.file(sst_key(self.region, self.sst.path))
        changed = change(lance.dataset(str(directory)).to_table())
        shutil.rmtree(directory)
        lance.write_dataset(changed, str(directory), data_storage_version=self.base.storage_version)
        keys = changed.select(["id"])
        (directory / "bloom_filter.bin").write_bytes(bloom_bytes(keys))
        write_key_sidecar(str(directory), keys, ["id"])
        self.recount(changed.num_rows)
        self.collect()

    def recount(self, rows: int) -> None:
        """Let every manifest say that the first SST has `rows` rows."""
        generation = self.sst.generation

        def recounted(manifest: RegionManifest) -> RegionManifest:
            ssts = (replace(s, physical_rows=rows) if s.generation == generation else s for s in manifest.ssts)
            return replace(manifest, ssts=tuple(ssts))

        self.rewrite_manifests(recounted)

    def base_file(self, pattern: str) -> Path:
        return next(Path(self.uri).glob(pattern))

    def mark(self, region: UUID, generation: int) -> None:
        """Record progress that nobody made."""
        merge = self.base.dataset.merge_insert("id").when_not_matched_insert_all()
        done = [CompactedSsTable(str(region), generation)]
        merge.mark_sstables_as_compacted(done).execute(self.base.schema.empty_table())


@pytest.fixture
def damaged(grown: Path, tmp_path: Path) -> Damaged:
    shutil.copytree(grown, tmp_path / "table")
    return Damaged(str(tmp_path / "table"))


def flip(file: Path, at: int) -> None:
    """One bit of the byte at `at`; of a small letter it makes a capital."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x20
    file.write_bytes(data)


def cut(file: Path, to: int = -5) -> None:
    file.write_bytes(file.read_bytes()[:to])


# ---- clean ---------------------------------------------------------------------------------------------------------


def test_a_table_is_clean_at_every_stage_of_its_life(tmp_path: Path) -> None:
    uri, seen = str(tmp_path / "table"), []
    for stage in grow(uri):
        found = verify(uri)
        assert found.findings == (), stage
        seen.append((stage, found.ssts))
    assert dict(seen)["flushed twice"] == 4


def test_a_table_of_arrow_format_is_clean_whoever_wrote_to_it(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    base = BaseTable.create(uri, SCHEMA, ["id"], 1, (), wal_format="arrow")
    for version in (1, 2):
        with base.dataset.mem_wal_writer(str(base.regions[0])) as writer:
            for ids in ([1, 2, 3], [2, 5]):
                writer.put(pa.Table.from_pylist(rows(ids, version), schema=base.schema))
    assert verify(uri).findings == ()
    table = opened(uri)
    table.put(rows([7, 8], 3))
    table.flush()
    table.put(rows([2], 4))
    assert verify(uri).ssts == 3
    assert verify(uri).findings == ()
    table.commit()
    table.close()
    assert verify(uri).findings == ()


def test_a_table_without_rows_in_one_region_is_clean(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    BaseTable.create(uri, SCHEMA, ["id"], 3, ())
    assert verify(uri).findings == ()


def test_what_is_done_meanwhile_is_no_damage(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    table = opened(uri)
    table.put(rows(range(20), 0))
    ended, failed = threading.Event(), []

    def work() -> None:
        try:
            for number in range(12):
                table.put(rows(range(number, number + 20), number))
                table.delete([number])
                table.flush()
                if number % 3 == 2:
                    table.commit()
        except BaseException as error:  # noqa: BLE001 - the test's own thread
            failed.append(error)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    rounds = 0
    while not ended.is_set():
        assert verify(uri).findings == ()
        rounds += 1
    worker.join()
    table.close()
    assert failed == []
    assert rounds >= 3


def test_only_what_is_found_again_on_a_table_at_rest_is_reported(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[View] = []

    def unsteady(view: View) -> Iterator[Finding]:
        asked.append(view)
        if len(asked) == 1:
            yield Finding("index", "passing", "1 is wrong", "wait")
        yield Finding("index", "lasting", f"{len(asked)} are wrong", "mend it")

    monkeypatch.setattr("flush.verification.check_indexes", unsteady)
    found = verify(str(grown), deep=False).findings
    assert [str(each) for each in found] == ["lasting: 2 are wrong; mend it"]
    assert asked[0] is not asked[1]


# ---- damaged -------------------------------------------------------------------------------------------------------


def found_in(damaged: Damaged, deep: bool = True) -> list[tuple[str, str]]:
    findings = verify(damaged.uri, deep=deep).findings
    for each in findings:
        assert "\n" not in str(each)
        assert each.remedy
    return [(each.check, each.where) for each in findings]


def _foreign_copy(damaged: Damaged) -> str:
    source = damaged.entry(damaged.positions[-1])
    target = source.with_suffix(".arrow")
    target.write_bytes(source.read_bytes())
    return str(target.relative_to(damaged.uri))


def _entry_after_the_sentinel(damaged: Damaged) -> int:
    return damaged.positions[damaged.positions.index(damaged.sentinel) + 1]


def missing_version(d: Damaged) -> tuple[str, str]:
    d.file(manifest_key(d.region, 2)).unlink()
    return "manifest", manifest_key(d.region, 2)


def damaged_version(d: Damaged) -> tuple[str, str]:
    flip(d.file(manifest_key(d.region, 2)), 40)
    return "manifest", manifest_key(d.region, 2)


def damaged_newest_version(d: Damaged) -> tuple[str, str]:
    key = manifest_key(d.region, d.manifest.version)
    cut(d.file(key))
    return "manifest", key


def manifests_gone(d: Damaged) -> tuple[str, str]:
    shutil.rmtree(d.file(manifest_prefix(d.region)))
    return "manifest", manifest_prefix(d.region)


def cursor_goes_back(d: Damaged) -> tuple[str, str]:
    d.rewrite_manifests(lambda m: replace(m, replay_after=m.replay_after - 1), newest=True)
    return "succession", manifest_key(d.region, d.manifest.version)


def generation_dropped(d: Damaged) -> tuple[str, str]:
    d.rewrite_manifests(lambda m: replace(m, ssts=m.ssts[1:]), newest=True)
    return "generations", manifest_prefix(d.region)


def hole(d: Damaged) -> tuple[str, str]:
    position = _entry_after_the_sentinel(d)
    assert d.manifest.replay_after < position < d.positions[-1]
    d.entry(position).unlink()
    return "hole", entry_key(d.region, position, d.suffix)


def end_of_the_log_lost(d: Damaged) -> tuple[str, str]:
    sentinel = d.sentinel
    for position in d.positions:
        if position >= sentinel:
            d.entry(position).unlink()
    return "hole", entry_key(d.region, sentinel, d.suffix)


def damaged_entry(d: Damaged) -> tuple[str, str]:
    position = d.positions[-1]
    flip(d.entry(position), 30)
    return "entry", entry_key(d.region, position, d.suffix)


def entry_of_another_format(d: Damaged) -> tuple[str, str]:
    return "entry", _foreign_copy(d)


def epoch_goes_back(d: Damaged) -> tuple[str, str]:
    d.reentry(d.positions[-1], writer_epoch=1)
    return "epoch", entry_key(d.region, d.positions[-1], d.suffix)


def epoch_never_claimed(d: Damaged) -> tuple[str, str]:
    d.reentry(d.positions[-1], writer_epoch=9)
    return "epoch", entry_key(d.region, d.positions[-1], d.suffix)


def no_sentinel(d: Damaged) -> tuple[str, str]:
    position = d.sentinel
    d.reentry(position, sentinel=False)
    return "sentinel", entry_key(d.region, position, d.suffix)


def sst_gone(d: Damaged) -> tuple[str, str]:
    shutil.rmtree(d.file(sst_key(d.region, d.sst.path)))
    return "sst", f"{sst_key(d.region, d.sst.path)}/"


def sst_that_does_not_open(d: Damaged) -> tuple[str, str]:
    for manifest in d.file(sst_key(d.region, d.sst.path)).glob("_versions/*.manifest"):
        manifest.unlink()
    return "sst", sst_key(d.region, d.sst.path, "_versions")


def sst_index_gone(d: Damaged) -> tuple[str, str]:
    directory = d.file(sst_key(d.region, d.sst.path))
    lance.dataset(str(directory)).create_scalar_index("id", "BTREE", name="one_more")
    (segment,) = (i.segments[0].uuid for i in lance.dataset(str(directory)).describe_indices() if i.name == "one_more")
    shutil.rmtree(directory / "_indices" / segment)
    return "sst index", sst_key(d.region, d.sst.path, f"_indices/{segment}")


def _part(check: str, pattern: str, damage: Callable[[Path], Any]) -> Callable[[Damaged], tuple[str, str]]:
    """Damages one file of an SST."""

    def part(d: Damaged) -> tuple[str, str]:
        file = d.sst_file(pattern)
        damage(file)
        return check, str(file.relative_to(d.uri))

    return part


def _base_part(pattern: str, damage: Callable[[Path], Any]) -> Callable[[Damaged], tuple[str, str]]:
    """Damages one file of the base table."""

    def part(d: Damaged) -> tuple[str, str]:
        file = d.base_file(pattern)
        damage(file)
        return "base file", str(file.relative_to(d.uri))

    return part


def progress_beyond_what_was_published(d: Damaged) -> tuple[str, str]:
    d.mark(d.region, 9)
    return "marker", manifest_prefix(d.region)


def progress_of_an_unknown_region(d: Damaged) -> tuple[str, str]:
    d.mark(UUID(int=7), 1)
    return "marker", f"_mem_wal/{UUID(int=7)}/"


def region_of_nobody(d: Damaged) -> tuple[str, str]:
    stranger, clock = UUID(int=7), FakeClock()
    claim(d.store, stranger, spec_id=1, codec=d.base.codec, ids=SeededIds(), clock=clock)
    return "region", manifest_prefix(stranger)


def unreadable_plan(d: Damaged) -> tuple[str, str]:
    d.file(plan_key(d.region, 1)).write_bytes(b"{}")
    return "plan", plan_key(d.region, 1)


def overlapping_plan(d: Damaged) -> tuple[str, str]:
    for first in (4, 5):
        d.file(plan_key(d.region, first)).write_bytes(json.dumps({"first": first, "last": 6}).encode())
    return "plan", plan_key(d.region, 5)


def half_a_commit(d: Damaged) -> tuple[str, str]:
    d.file(plan_key(d.region, 1)).write_bytes(b'{"first": 1, "last": 3}')
    return "plan", plan_key(d.region, 1)


def base_index_gone(d: Damaged) -> tuple[str, str]:
    segment = next(index.segments[-1] for index in d.base.dataset.describe_indices() if index.name == "name_idx")
    shutil.rmtree(Path(d.uri) / "_indices" / segment.uuid)
    return "base file", f"_indices/{segment.uuid}"


def base_index_file(d: Damaged) -> Path:
    segment = next(index.segments[-1] for index in d.base.dataset.describe_indices() if index.name == "name_idx")
    return Path(d.uri) / "_indices" / segment.uuid / "page_data.lance"


def base_index_cut(d: Damaged) -> tuple[str, str]:
    file = base_index_file(d)
    cut(file)
    return "base file", str(file.parent.relative_to(d.uri))


def base_index_file_gone(d: Damaged) -> tuple[str, str]:
    file = base_index_file(d)
    file.unlink()
    return "base file", str(file.parent.relative_to(d.uri))


def index_dropped(d: Damaged) -> tuple[str, str]:
    d.base.dataset.drop_index("name_idx")
    return "index", "index name_idx"


SHALLOW = {
    "missing version": missing_version,
    "damaged version": damaged_version,
    "damaged newest version": damaged_newest_version,
    "manifests gone": manifests_gone,
    "cursor goes back": cursor_goes_back,
    "generation dropped": generation_dropped,
    "hole": hole,
    "end of the log lost": end_of_the_log_lost,
    "damaged entry": damaged_entry,
    "entry of another format": entry_of_another_format,
    "epoch goes back": epoch_goes_back,
    "epoch never claimed": epoch_never_claimed,
    "no sentinel": no_sentinel,
    "SST gone": sst_gone,
    "SST index gone": sst_index_gone,
    "SST that does not open": sst_that_does_not_open,
    "bloom filter gone": _part("bloom", "bloom_filter.bin", Path.unlink),
    "bloom filter cut": _part("bloom", "bloom_filter.bin", cut),
    "data gone": _part("data", "data/*.lance", Path.unlink),
    "data cut": _part("data", "data/*.lance", cut),
    "sidecar gone": _part("sidecar", "_pk_index/page_data.lance", Path.unlink),
    "sidecar cut": _part("sidecar", "_pk_index/page_data.lance", cut),
    "lookup gone": _part("sidecar", "_pk_index/page_lookup.lance", Path.unlink),
    "lookup cut": _part("sidecar", "_pk_index/page_lookup.lance", cut),
    "base data gone": _base_part("data/*.lance", Path.unlink),
    "base data cut": _base_part("data/*.lance", cut),
    "base index gone": base_index_gone,
    "base index cut": base_index_cut,
    "base index file gone": base_index_file_gone,
    "progress beyond what was published": progress_beyond_what_was_published,
    "progress of an unknown region": progress_of_an_unknown_region,
    "region of nobody": region_of_nobody,
    "unreadable plan": unreadable_plan,
    "overlapping plan": overlapping_plan,
    "half a commit": half_a_commit,
    "index dropped": index_dropped,
}


@pytest.mark.parametrize("damage", SHALLOW.values(), ids=SHALLOW)
def test_damage_is_found_without_reading_rows(damaged: Damaged, damage: Callable[[Damaged], tuple[str, str]]) -> None:
    expected = damage(damaged)
    assert found_in(damaged, deep=False) == [expected]
    assert found_in(damaged, deep=True) == [expected]


def test_an_index_file_that_cannot_be_read_is_found(damaged: Damaged) -> None:
    """Of its full size: queries that use it fail, and only reading it tells."""
    file = base_index_file(damaged)
    file.write_bytes(bytes(file.stat().st_size))
    assert found_in(damaged, deep=False) == []
    assert found_in(damaged, deep=True) == [("base file", str(file.relative_to(damaged.uri)))]


def test_a_clone_misses_no_file_of_the_table_it_was_made_from(damaged: Damaged, tmp_path: Path) -> None:
    dataset = lance.dataset(damaged.uri)
    dataset.shallow_clone(str(tmp_path / "clone"), dataset.version)
    ingest.open(str(tmp_path / "clone"), settings=SETTINGS).close()
    clone = str(tmp_path / "clone")
    assert verify_table(open_store(clone), clone, deep=True).findings == ()


def test_a_deletion_file_of_the_base_is_missed(damaged: Damaged) -> None:
    damaged.base.dataset.delete("id = 7")
    damaged.base_file("_deletions/*").unlink()
    ((check, where),) = found_in(damaged, deep=False)
    assert check == "base file"
    assert where.startswith("_deletions/")


def test_counts_that_do_not_hold_are_found_in_data_and_sidecar(damaged: Damaged) -> None:
    damaged.recount(99)
    assert [check for check, _ in found_in(damaged)] == ["data", "sidecar"]


def test_an_index_on_another_column_is_found(damaged: Damaged) -> None:
    damaged.base.dataset.drop_index("name_idx")
    damaged.base.dataset.create_scalar_index("id", "BTREE", name="name_idx")
    assert found_in(damaged, deep=False) == [("index", "index name_idx")]


# ---- damage that only rows show ------------------------------------------------------------------------------------


def sidecar_out_of_order(d: Damaged) -> tuple[str, str]:
    file = d.sst_file("_pk_index/page_data.lance")
    _rewrite(file, lambda table: table.set_column(1, table.schema.field(1), table["ids"][::-1]))
    return "sidecar", str(file.relative_to(d.uri))


def lookup_wrong(d: Damaged) -> tuple[str, str]:
    file = d.sst_file("_pk_index/page_lookup.lance")
    _rewrite(file, lambda table: table.set_column(0, table.schema.field(0), pa.array([12345])))
    return "sidecar", str(file.relative_to(d.uri))


def _rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = change(LanceFileReader(str(file)).read_all().to_table())
    with LanceFileWriter(str(file), table.schema, version="2.0") as writer:
        writer.write_batch(table)


def bloom_denies(d: Damaged) -> tuple[str, str]:
    file = d.sst_file("bloom_filter.bin")
    file.write_bytes(bytes(file.stat().st_size))
    return "bloom", str(file.relative_to(d.uri))


def key_twice_in_an_sst(d: Damaged) -> tuple[str, str]:
    d.rewrite_sst(lambda table: pa.concat_tables([table, table.slice(0, 1)]))
    return "double key", f"{sst_key(d.region, d.sst.path)}/"


def row_in_the_wrong_region(d: Damaged) -> tuple[str, str]:
    stranger = next(n for n in range(1000, 2000) if d.base.route(pa.table({"id": [n]}))[0] == 1)

    def moved(table: pa.Table) -> pa.Table:
        ids = pa.array([stranger, *table["id"].to_pylist()[1:]], pa.int64())
        return table.set_column(0, table.schema.field(0), ids)

    d.rewrite_sst(moved)
    return "route", f"{sst_key(d.region, d.sst.path)}/"


def row_in_the_wrong_log(d: Damaged) -> tuple[str, str]:
    stranger = next(n for n in range(1000, 2000) if d.base.route(pa.table({"id": [n]}))[0] == 1)

    def moved(table: pa.Table) -> pa.Table:
        ids = pa.array([stranger, *table["id"].to_pylist()[1:]], pa.int64())
        return table.set_column(0, table.schema.field(0), ids)

    d.reentry(d.positions[-1], moved)
    return "route", wal_prefix(d.region)


def key_twice_in_the_base(d: Damaged) -> tuple[str, str]:
    again = d.base.dataset.to_table().slice(0, 1)
    lance.write_dataset(again, d.uri, mode="append")
    return "double key", "data/ (base table)"


def base_that_cannot_be_read(d: Damaged) -> tuple[str, str]:
    file = d.base_file("data/*.lance")
    file.write_bytes(bytes(file.stat().st_size))
    return "base rows", "data/ (base table)"


def sst_that_cannot_be_read(d: Damaged) -> tuple[str, str]:
    file = d.sst_file("data/*.lance")
    file.write_bytes(bytes(file.stat().st_size))
    return "data", sst_key(d.region, d.sst.path, "data")


def another_value_in_an_sst(d: Damaged) -> tuple[str, str]:
    """One flipped bit, of a value: Lance has no checksum for it."""
    file = d.sst_file("data/*.lance")
    flip(file, file.read_bytes().index(b"name of"))
    return "fingerprint", sst_key(d.region, d.sst.path)


def another_value_in_the_log(d: Damaged) -> tuple[str, str]:
    def renamed(table: pa.Table) -> pa.Table:
        return table.set_column(1, table.schema.field(1), pa.array(["?"] * table.num_rows))

    before = d.sst.generation
    covered = next(p for p in d.positions if d.base.codec.header(d.entry(p).read_bytes()).generation == before)
    d.reentry(covered, renamed)
    return "fingerprint", sst_key(d.region, d.sst.path)


DEEP = [
    sidecar_out_of_order,
    lookup_wrong,
    bloom_denies,
    key_twice_in_an_sst,
    row_in_the_wrong_region,
    row_in_the_wrong_log,
    key_twice_in_the_base,
    base_that_cannot_be_read,
    sst_that_cannot_be_read,
    another_value_in_an_sst,
    another_value_in_the_log,
]


@pytest.mark.parametrize("damage", DEEP, ids=lambda damage: damage.__name__)
def test_damage_that_only_rows_show_is_found_by_deep(
    damaged: Damaged, damage: Callable[[Damaged], tuple[str, str]]
) -> None:
    expected = damage(damaged)
    assert found_in(damaged, deep=False) == []
    assert found_in(damaged, deep=True) == [expected]


def test_a_null_key_is_found() -> None:
    keys = pa.table({"a": [1, None, 2], "b": ["x", "x", None]})
    assert [each.what for each in check_keys("here", keys, "mend")] == ["2 values of its key columns are null"]


def test_a_collected_log_makes_no_statement(damaged: Damaged) -> None:
    damaged.collect()
    assert found_in(damaged) == []


def test_verifying_writes_nothing(damaged: Damaged, tree: Callable[[Path], dict[str, int]]) -> None:
    before = tree(Path(damaged.uri))
    verify(damaged.uri)
    assert tree(Path(damaged.uri)) == before


def test_a_view_is_of_one_moment(damaged: Damaged) -> None:
    store: ObjectStore = damaged.store
    view = take_view(store, damaged.uri)
    assert view.moment == take_view(store, damaged.uri).moment
    damaged.base.dataset.delete("id = 7")
    assert view.moment != take_view(store, damaged.uri).moment
    assert read_tail(store, damaged.region, damaged.base.codec, view.manifests[damaged.region].replay_after)[0]
