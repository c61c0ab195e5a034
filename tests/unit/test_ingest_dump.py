"""`memwal inspect`: the output for each kind of object on storage."""

import io
import re
import shutil
from pathlib import Path
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader, LanceFileWriter
from rich.console import Console

import memwal
from memwal import flush, wal
from memwal.flush import bloom_bytes, contains
from memwal.flush.commits.plan import plan_key
from memwal.ingest.cli.describe import describe
from memwal.ingest.errors import Invalid
from memwal.memtable import IndexSpec, MemTable, row_schema, tombstones, with_tombstone
from memwal.wal import layout
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("vec", pa.list_(pa.float32(), 4)),
    ]
)
REGION = wal.bucket_region(0)


def printed(path: Path | str) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(describe(str(path)))
    return captured.get()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the place of a region with three entries (the last one a sentinel), one SST and a second claim."""
    root = tmp_path_factory.mktemp("dump") / "table"
    base = flush.BaseTable.create(str(root), SCHEMA, ["name"], 2, (IndexSpec("size", "btree"),))
    store, ids, clock = wal.open_store(str(root)), SeededIds(), FakeClock()
    rows = row_schema(base.schema, base.key)
    codec = wal.LanceCodec(rows)

    def claim() -> wal.Claim:
        return wal.claim(store, REGION, spec_id=1, codec=codec, ids=ids, clock=clock)

    first = claim()
    appender = wal.WalAppender(store, REGION, first.guard, codec, first.next_position, ids, clock, wal.WalOptions())
    table = MemTable(rows, ["name"], (), 1)
    put = with_tombstone(
        pa.table({"name": [f"row[{n}]" for n in range(8)], "size": list(range(8)), "vec": [[0.5] * 4] * 8}),
        rows,
    )
    deleted = tombstones(pa.table({"name": ["row[3]"]}), rows)
    table.apply(put)
    appender.append(put, generation=1, applied={"loader": 7})
    table.apply(deleted)
    appender.append(
        deleted, generation=1, applied={"loader": 7}, part=wal.BatchPart("spark", 4, "ab" * 16, closes=False)
    )
    table.freeze()
    flush.flush(
        store,
        wal.ManifestStore(store, REGION),
        first.guard,
        table.snapshot(),
        flush.SstFormat.of(base),
        generation=1,
        covers_position=2,
        ids=ids,
    )
    claim()
    return root


def only(root: Path, pattern: str) -> Path:
    (found,) = (root / "_mem_wal" / str(REGION)).glob(pattern)
    return found


SHOWN: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "manifest": (
        "manifest/*.binpb",
        {"writer epoch": "2", "current generation": "2", "replay after position": "2"},
        [str(REGION), "ACTIVE", "_gen_1"],
    ),
    "entry": ("wal/1", {"rows": "8"}, ["loader:7", "first 5 of 8 rows", "row[4]", "[0.5, 0.5, 0.5, …] (4)"]),
    "part of a batch": ("wal/2", {"tombstones": "1"}, ["spark:4", "does not close it"]),
    "sentinel": ("wal/3", {}, ["yes: it fences older writers"]),
    "SST": (
        "*_gen_1",
        {"key sidecar rows": "8", "bloom filter bytes": "32", "tombstones": "1"},
        ["yes, in manifest version", "no indexes"],
    ),
    "region": ("", {"WAL entries": "3", "not flushed": "1", "holes": "none"}, ["1 to 3"]),
}


def place(root: Path, pattern: str) -> Path:
    """Return the newest object of a pattern, or a log entry by its position."""
    if pattern.startswith("wal/"):
        return root / layout.entry_key(REGION, int(pattern.removeprefix("wal/")), "lance")
    if pattern.startswith("manifest/"):
        manifest = wal.ManifestStore(wal.open_store(str(root)), REGION).latest()
        assert manifest is not None
        return root / layout.manifest_key(REGION, manifest.version)
    return only(root, pattern) if pattern else root / "_mem_wal" / str(REGION)


@pytest.mark.parametrize("kind", SHOWN)
def test_an_object_is_shown_with_its_figures(root: Path, kind: str) -> None:
    pattern, figures, texts = SHOWN[kind]
    shown = printed(place(root, pattern))
    assert {label: shown.split(label)[1].split()[0] for label in figures} == figures
    assert [text for text in texts if text not in shown] == []
    assert kind != "entry" or "row[5]" not in shown


def test_a_table_shows_its_base_and_its_regions(root: Path) -> None:
    text = printed(root)
    for shown in ("size (btree)", "name string", str(REGION), "base version"):
        assert shown in text
    assert printed(f"file://{root}") == text


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """Return a copy of the table, which a test may change."""
    return Path(shutil.copytree(root, tmp_path / "table"))


def test_an_sst_shows_the_indexes_inside_it(copy: Path) -> None:
    directory = only(copy, "*_gen_1")
    lance.dataset(str(directory)).create_scalar_index("size", "BTREE", name="size_idx")
    assert re.search(r"size_idx\s+BTree\s+size\s+8\s+\d", printed(directory))


def test_a_key_sidecar_shows_its_pages_and_rows(root: Path) -> None:
    directory = only(root, "*_gen_1") / "_pk_index"
    text = printed(directory)
    assert text.split("rows")[1].split()[0] == "8"
    assert text.split("in order")[1].split()[0] == "yes"
    assert re.search(r"0\s+row\[0\]\s+row\[7\]\s+0", text)
    assert re.search(r"row\[3\]\s+7", text), "the tombstone came last"
    assert printed(directory / "page_data.lance") == text
    assert printed(directory / "page_lookup.lance") == text


def test_a_key_sidecar_that_is_out_of_order_is_said_to_be(copy: Path) -> None:
    file = only(copy, "*_gen_1") / "_pk_index" / "page_data.lance"
    rows = LanceFileReader(str(file)).read_all().to_table()
    with LanceFileWriter(str(file), rows.schema, version="2.0") as writer:
        writer.write_batch(rows.take(list(range(7, -1, -1))))
    assert "no: damaged" in printed(file)


@pytest.mark.parametrize(("keys", "blocks"), [(2_000, 32), (2_000, 128), (20_000, 1024)])
def test_a_bloom_filter_shows_how_full_it_is_and_how_often_it_errs(copy: Path, keys: int, blocks: int) -> None:
    file = only(copy, "*_gen_1") / "bloom_filter.bin"
    file.write_bytes(bloom_bytes(pa.table({"name": [f"held {n}" for n in range(keys)]}), blocks))
    text = printed(file)

    absent = contains(file.read_bytes(), pa.table({"name": [f"absent {n}" for n in range(20_000)]}))
    shown = float(text.split("false positives")[1].split("%")[0]) / 100
    assert shown == pytest.approx(absent.mean(), abs=0.01)
    bits = sum(byte.bit_count() for byte in file.read_bytes())
    assert float(text.split("bits set")[1].split("%")[0]) / 100 == pytest.approx(bits / (256 * blocks), abs=0.001)
    assert text.split("blocks")[1].split()[0] == f"{blocks:,}"


def test_a_bloom_filter_that_cannot_tell_keys_apart_is_said_to(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    with memwal.open(uri, schema=pa.schema([("id", pa.int16())]), key="id", regions=1) as table:
        table.put([{"id": 1}])
        table.flush()
        (file,) = Path(uri).glob("_mem_wal/*/*_gen_1/bloom_filter.bin")
        assert "all keys pass: Lance does not hash keys of int16" in printed(file)


def test_a_commit_plan_shows_its_range_and_what_became_of_it(copy: Path) -> None:
    plan = copy / plan_key(REGION, 1)
    plan.parent.mkdir(exist_ok=True)
    plan.write_text('{"first": 1, "last": 1, "by": "somebody"}')
    assert "agreed, not committed yet" in printed(plan)
    assert "somebody" in printed(plan)
    flush.commit(str(copy), None, wal.open_store(str(copy)), clock=FakeClock())
    text = printed(plan)
    assert "1 to 1" in text
    assert "committed (the base table holds generation 1)" in text
    plan.write_text("{")
    with raises(wal.Corrupt):
        describe(str(plan))


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("data/*.lance", ""),
        ("_versions/*.manifest", ""),
        ("_pk_index/page_data.lance", ""),
        ("_pk_index/page_data.lance", "_pk_index"),
        ("_pk_index/page_lookup.lance", "_pk_index"),
        ("bloom_filter.bin", "bloom_filter.bin"),
    ],
)
def test_a_damaged_part_is_named_in_one_line(copy: Path, file: str, path: str) -> None:
    directory = only(copy, "*_gen_1")
    for each in directory.glob(file):
        each.write_bytes(each.read_bytes()[:-5])
    with raises(wal.Corrupt) as raised:
        describe(str(directory / path))
    assert directory.name in str(raised.value)


def test_inspecting_changes_nothing(root: Path) -> None:
    def everything() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()}

    before = everything()
    printed(root)
    printed(root / "_mem_wal" / str(REGION))
    printed(only(root, "*_gen_1"))
    assert everything() == before


@pytest.mark.parametrize(
    "path",
    [
        "_mem_wal",
        "_versions",
        "nothing",
        "_mem_wal/{region}/manifest",
        "_mem_wal/{region}/manifest/version_hint.json",
        "_mem_wal/{region}/12345678_gen_9",
        "_mem_wal/{region}/12345678_gen_9/bloom_filter.bin",
    ],
)
def test_what_is_none_of_these_is_refused_with_what_can_be_inspected(root: Path, path: str) -> None:
    asked = root / path.format(region=REGION)
    with raises(Invalid) as raised:
        describe(str(asked))
    assert str(asked) in str(raised.value)


def test_a_directory_without_a_table_is_refused(tmp_path: Path) -> None:
    with raises(Invalid):
        describe(str(tmp_path))


def test_a_region_that_was_never_claimed_is_said_to_be(root: Path) -> None:
    empty = root / "_mem_wal" / str(UUID(int=7))
    empty.mkdir()

    assert "never claimed" in printed(empty)
    empty.rmdir()


def test_an_entry_of_another_program_is_said_to_be_one(tmp_path: Path) -> None:
    root = tmp_path / "table"
    base = flush.BaseTable.create(str(root), SCHEMA, ["name"], 1, (), wal_format="arrow")
    with base.dataset.mem_wal_writer(str(REGION)) as writer:
        writer.put(pa.table({"name": ["row[0]"], "size": [1], "vec": [[0.5] * 4]}, schema=base.schema))
    text = printed(root / layout.entry_key(REGION, 1, "arrow"))
    assert "none: written by another program" in text
    assert "unknown: written by another program" in text
    assert "row[0]" in text
    assert "arrow" in printed(root)
