"""Settings of the file writer: what they do to the file of an SST, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from memwal.flush import FileOptions, InvalidFileOptions, SstFormat, read_sst, write_sst
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import load
from memwal.memtable import MemTable, row_schema, with_tombstone
from memwal.wal import LocalStore, SsTable, bucket_region
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
    assert pages == [4, 1]  # 12 times 500 numbers of 8 bytes, three of which are more than 8 KiB


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
    ("given", "said"),
    [
        ({"compression": {"body": "brotli"}}, "'body' = 'brotli': use one of zstd, lz4, fsst, none"),
        ({"compression": {"*": "zstd:23"}}, "only zstd has levels, 1 to 22"),
        ({"compression": {"*": "lz4:3"}}, "only zstd has levels"),
        ({"compression": {"*": "zstd:"}}, "only zstd has levels"),
        ({"metadata": {"lance:field_id": "3"}}, "'lance:field_id'"),
        ({"storage_version": "2.3"}, "2.3"),
        ({"page_size": 4095}, "page_size"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InvalidFileOptions) as refused:
        FileOptions(**given)
    with pytest.raises(Invalid) as at_the_edge:
        load({"table": {"uri": "t"}, "flush": given}, {})
    assert said in str(refused.value)
    assert said in str(at_the_edge.value)
    assert "\n" not in str(refused.value) + str(at_the_edge.value)


def test_settings_become_options() -> None:
    source = {"table": {"uri": "t"}, "flush": {"storage_version": "2.1", "page_size": "1MiB", "metadata": {"a": "b"}}}
    loaded = load(source, {"MEMWAL__FLUSH__COMPRESSION": '{"*_text" = "lz4"}'})
    assert loaded.flush.file_options() == FileOptions("2.1", 1 << 20, {"*_text": "lz4"}, {"a": "b"})
    assert load({"table": {"uri": "t"}}, {}).flush.file_options() == FileOptions()
