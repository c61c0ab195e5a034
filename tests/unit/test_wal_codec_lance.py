"""Entries as Lance files: Lance can read them, and memwal distinguishes them from files of other programs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from lance.file import LanceFileReader, LanceFileWriter

from memwal.wal import Corrupt, EntryHeader, LanceCodec
from tests.messages import raises

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("n", pa.int64()),
        pa.field("_tombstone", pa.bool_(), nullable=False),
    ]
)
ROWS = pa.table({"id": ["a", "b"], "n": [1, None], "_tombstone": [False, True]}, schema=SCHEMA)
CODEC = LanceCodec(SCHEMA)


def test_any_lance_reader_reads_rows_and_header(tmp_path: Path) -> None:
    (tmp_path / "e.lance").write_bytes(CODEC.encode(EntryHeader(6, 3, "ab" * 16, {"loader": 17}), ROWS))
    table = LanceFileReader(str(tmp_path / "e.lance")).read_all().to_table()
    assert table.to_pylist() == ROWS.to_pylist()
    assert table.schema.metadata[b"writer_epoch"] == b"6"
    assert table.schema.metadata[b"generation"] == b"3"
    assert table.schema.metadata[b"memwal:entry_id"] == b"ab" * 16
    assert table.schema.metadata[b"memwal:applied"] == b'{"loader": 17}'


def test_a_lance_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    with LanceFileWriter(str(tmp_path / "x.lance"), SCHEMA, version="2.1") as writer:
        writer.write_batch(ROWS)
    with raises(Corrupt):
        CODEC.decode(1, (tmp_path / "x.lance").read_bytes())
