"""Settings of the file writer: their effect on the file of an SST, and the values that are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

import memwal
from memwal.flush import FileOptions, InvalidFileOptions, SstFormat, read_sst, write_sst
from memwal.flush.sst.file_options import PAGE_SIZE_MAX, PAGE_SIZE_MIN
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import load
from memwal.memtable import MemTable, row_schema, with_tombstone
from memwal.wal import LocalStore, SsTable, bucket_region
from tests.messages import raises
from tests.support.clock import SeededIds

REGION, COUNT = bucket_region(0), 6_000
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("body", pa.string(), metadata={"a": "b"}),
        pa.field("n", pa.int64()),
    ]
)
ROWS = row_schema(SCHEMA, ["id"])
SCHEME, LEVEL = b"lance-encoding:compression", b"lance-encoding:compression-level"


class Written:
    """One SST of repetitive values, its data file opened."""

    def __init__(self, at: Path, options: FileOptions) -> None:
        self.store = LocalStore(str(at))
        table = MemTable(ROWS, ["id"], [], generation=1)
        bodies = [f"row {n} of a text that says the same of row {n} " * 8 for n in range(COUNT)]
        values = {"id": range(COUNT), "body": bodies, "n": range(COUNT)}
        rows = with_tombstone(pa.table(values, schema=SCHEMA), ROWS)
        for start in range(0, COUNT, COUNT // 12):
            table.apply(rows.take(pa.array(range(start, start + COUNT // 12))))
        format = SstFormat(["id"], "2.2", files=options)
        self.sst: SsTable = write_sst(self.store, REGION, table.snapshot(), format, generation=1, ids=SeededIds(1))
        self.dataset = lance.dataset(self.store.url(f"_mem_wal/{REGION}/{self.sst.path}"))
        (self.file,) = Path(self.dataset.uri).glob("data/*.lance")
        self.inside = LanceFileReader(str(self.file)).metadata()


def test_by_default_a_file_is_as_the_base_table_has_it(tmp_path: Path) -> None:
    written = Written(tmp_path, FileOptions())
    assert written.dataset.data_storage_version == "2.2"
    assert written.dataset.schema.equals(ROWS, check_metadata=True)


@pytest.mark.parametrize("version", ["2.0", "2.1"])
def test_the_storage_version_may_be_another_than_the_bases(tmp_path: Path, version: str) -> None:
    written = Written(tmp_path, FileOptions(version))
    assert written.dataset.data_storage_version == version
    assert (written.inside.major_version, written.inside.minor_version) in {(2, int(version[-1])), (0, 3)}
    assert read_sst(written.store, REGION, written.sst).num_rows == COUNT


def test_pages_are_of_the_size_asked_for(tmp_path: Path) -> None:
    small, large = (Written(tmp_path / str(size), FileOptions(page_size=size)) for size in (8 << 10, 1 << 20))
    pages = [len(each.inside.columns[2].pages) for each in (small, large)]
    assert pages == [4, 1]  # 12 batches of 500 numbers of 8 bytes; three of them together exceed 8 KiB


def test_columns_are_compressed_by_the_first_pattern_that_fits(tmp_path: Path) -> None:
    plain = Written(tmp_path / "plain", FileOptions(compression={"body": "none"}))
    packed = Written(tmp_path / "packed", FileOptions(compression={"bo*": "zstd:19", "*": "none"}))
    assert packed.file.stat().st_size < plain.file.stat().st_size / 2
    found = {field.name: field.metadata or {} for field in packed.inside.schema}
    assert found["body"] == {b"a": b"b", SCHEME: b"zstd", LEVEL: b"19"}
    assert found["n"] == {SCHEME: b"none"}
    assert b"lance-schema:unenforced-primary-key" not in found["n"]
    assert read_sst(packed.store, REGION, packed.sst).equals(read_sst(plain.store, REGION, plain.sst))


def test_schema_metadata_is_in_the_dataset_and_not_in_what_is_read(tmp_path: Path) -> None:
    written = Written(tmp_path, FileOptions(metadata={"source": "kafka"}))
    assert written.dataset.schema.metadata == {b"source": b"kafka"}
    assert read_sst(written.store, REGION, written.sst).schema.metadata is None


@pytest.mark.parametrize(
    "given",
    [
        {"compression": {"body": "brotli"}},
        {"compression": {"*": "zstd:23"}},
        {"compression": {"*": "lz4:3"}},
        {"compression": {"*": "zstd:"}},
        {"metadata": {"lance:field_id": "3"}},
        {"storage_version": "2.3"},
        {"page_size": 4095},
        {"page_size": (1 << 30) + 1},
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: Mapping[str, Any]) -> None:
    with raises(InvalidFileOptions):
        FileOptions(**given)
    with raises(Invalid):
        load({"table": {"uri": "t"}, "flush": given}, {})


def test_settings_become_options() -> None:
    source = {"table": {"uri": "t"}, "flush": {"storage_version": "2.1", "page_size": "1MiB", "metadata": {"a": "b"}}}
    loaded = load(source, {"MEMWAL__FLUSH__COMPRESSION": '{"*_text" = "lz4"}'})
    assert loaded.flush.file_options() == FileOptions("2.1", 1 << 20, {"*_text": "lz4"}, {"a": "b"})
    assert load({"table": {"uri": "t"}}, {}).flush.file_options() == FileOptions()


STRUCT = pa.struct([("x", pa.int64())])


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"storage_version": "2.0"}, STRUCT),
        ({"storage_version": "2.0"}, pa.list_(STRUCT)),
        ({"storage_version": "2.0", "compression": {"*": "fsst"}}, pa.string()),
        ({"storage_version": "2.0", "compression": {"c": "fsst"}}, pa.large_string()),
    ],
)
def test_options_that_no_sst_of_the_columns_could_be_written_with(given: Mapping[str, Any], kind: pa.DataType) -> None:
    columns = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("c", kind)])
    with raises(InvalidFileOptions):
        FileOptions(**given).expect_fit(columns, "2.2")
    FileOptions(**given).expect_fit(columns.remove(1), "2.2")


@pytest.mark.parametrize("scheme", ["zstd:22", "lz4", "fsst", "none"])
@pytest.mark.parametrize("page_size", [PAGE_SIZE_MIN, PAGE_SIZE_MAX])
def test_options_that_fit_write_every_sst(tmp_path: Path, scheme: str, page_size: int) -> None:
    options = FileOptions("2.1", page_size, {"*": scheme})
    options.expect_fit(SCHEMA, "2.2")
    assert Written(tmp_path, options).dataset.count_rows()


def test_settings_that_stop_every_flush_are_found_before_a_row_is_put(tmp_path: Path) -> None:
    uri, columns = str(tmp_path / "t.lance"), {"id": "int64", "doc": "string"}
    fsst = {"storage_version": "2.0", "compression": {"doc": "fsst"}}
    with raises(Invalid):
        memwal.open(uri, settings={"table": {"key": ["id"], "columns": columns}, "flush": fsst})
    assert not (tmp_path / "t.lance").exists()
    with memwal.open(uri, settings={"table": {"key": ["id"], "columns": columns}}) as table:
        table.put([{"id": 1, "doc": "a"}])
    with raises(Invalid):
        memwal.open(uri, settings={"flush": fsst})
    for section, name in (("flush", "page_size"), ("memtable", "size_max")):
        with raises(Invalid):
            memwal.open(uri, settings={section: {name: "9000000TiB"}})


def test_a_struct_added_by_another_program_stops_no_flush(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("a", pa.string())])
    settings = {"commit": {"interval": "0s"}, "flush": {"storage_version": "2.0"}}
    with memwal.open(uri, schema=schema, key="id", settings=settings) as table:
        table.put([{"id": 1, "a": "x"}])
        lance.dataset(uri).add_columns(pa.field("s", STRUCT))
        table.put([{"id": 2, "s": {"x": 5}}, {"id": 3}], missing="null")
        table.flush()
        table.commit()
        assert table.scan(["s"], "id > 1", level="committed").read_all()["s"].to_pylist() == [{"x": 5}, None]
