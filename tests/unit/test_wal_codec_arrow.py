"""Entries as Arrow streams: memwal writes what ShardWriter would write, reads ShardWriter's entries, and detects
damage."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal.wal import ArrowCodec, Corrupt, EntryHeader, bucket_region
from memwal.wal.layout import parse_entry_key
from tests.conftest import ROOT
from tests.messages import raises
from tests.support.golden import GOLDEN, golden

PRIMARY_KEY = {b"lance-schema:unenforced-primary-key": b"true"}
BASE_METADATA = {"owner": "somebody"}


def numbered(field: pa.Field, number: int) -> pa.Field:
    return field.with_metadata({**(field.metadata or {}), b"lance:field_id": str(number).encode()})


BASE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("name", pa.string(), metadata={"about": "words"}),
        pa.field("vector", pa.list_(pa.float32(), 2)),
        pa.field("both", pa.struct([pa.field("x", pa.int8()), pa.field("y", pa.string(), metadata={"in": "side"})])),
        pa.field("many", pa.list_(pa.int32())),
    ],
    metadata=BASE_METADATA,
)
ROW_SCHEMA = pa.schema(
    [
        numbered(BASE.field("id"), 0),
        numbered(BASE.field("name"), 1),
        numbered(BASE.field("vector"), 2),
        numbered(
            pa.field(
                "both",
                pa.struct(
                    [numbered(pa.field("x", pa.int8()), 4), numbered(BASE.field("both").type.field("y"), 5)],
                ),
            ),
            3,
        ),
        numbered(pa.field("many", pa.list_(numbered(pa.field("item", pa.int32()), 7))), 6),
        pa.field("_tombstone", pa.bool_(), nullable=False),
    ],
    metadata=BASE_METADATA,
)
CODEC = ArrowCodec(ROW_SCHEMA)
HEADER = EntryHeader(1, 1, "ab" * 16, {"loader": 17})
VALUES: list[dict[str, Any]] = [
    {"id": 1, "name": "a", "vector": [1.0, 2.0], "both": {"x": 1, "y": "z"}, "many": [1, 2]},
    {"id": 2, "name": None, "vector": None, "both": None, "many": None},
]
DELETED = {"id": 2, "name": None, "vector": None, "both": None, "many": None, "_tombstone": True}
ROWS = pa.Table.from_pylist([{**row, "_tombstone": False} for row in VALUES], schema=CODEC.row_schema)


def stream(schema: pa.Schema, *batches: pa.RecordBatch) -> bytes:
    """Return a stream as another program would write it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def theirs(metadata: dict[str, str], schema: pa.Schema = ROW_SCHEMA, rows: pa.Table = ROWS) -> bytes:
    return stream(schema.with_metadata(metadata), *rows.to_batches())


def written_by_shard_writer(uri: str) -> list[bytes]:
    """Return the entries that ShardWriter writes for a put, a claim's sentinel and a delete."""
    dataset = lance.write_dataset(BASE.empty_table(), uri, schema=BASE)
    dataset.initialize_mem_wal(bucket_column="id", num_buckets=1)
    region = str(bucket_region(0))
    with dataset.mem_wal_writer(region) as writer:
        writer.put(pa.Table.from_pylist(VALUES, schema=BASE))
    with dataset.mem_wal_writer(region) as writer:
        writer.delete(pa.table({"id": pa.array([2], pa.int64())}))
    found = {}
    for path in Path(uri).glob("_mem_wal/*/wal/*"):
        key = parse_entry_key(path.relative_to(uri).as_posix())
        assert key is not None
        found[key.position] = path.read_bytes()
    return [found[position] for position in sorted(found)]


@pytest.fixture(scope="module")
def shard_writers(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return written_by_shard_writer(str(tmp_path_factory.mktemp("theirs") / "t.lance"))


def test_entries_of_shard_writer_are_understood(shard_writers: list[bytes]) -> None:
    names = [f"wal/shard_writer_{name}.arrow" for name in ("put", "sentinel", "delete")]
    for entries in (shard_writers, list(map(golden, names, shard_writers))):
        put, sentinel, delete = (CODEC.decode(at, data) for at, data in enumerate(entries, 1))
        assert put.rows.equals(ROWS)
        assert put.header == EntryHeader(1, 1, "", None)
        assert (sentinel.header, sentinel.rows) == (EntryHeader(2, 0, "", None, sentinel=True), CODEC.no_rows)
        assert delete.header == EntryHeader(2, 2, "", None)
        assert delete.rows.to_pylist() == [DELETED]


def test_ours_has_the_schema_that_shard_writer_writes(shard_writers: list[bytes]) -> None:
    ours, put = (pa.ipc.open_stream(data) for data in (CODEC.encode(HEADER, ROWS), shard_writers[0]))
    assert ours.schema.equals(put.schema, check_metadata=True)
    assert ours.schema.metadata == {b"writer_epoch": b"1", b"generation": b"1", b"owner": b"somebody"}
    batch, metadata = ours.read_next_batch_with_custom_metadata()
    assert batch.equals(put.read_next_batch())
    assert dict(metadata) == {b"memwal:entry_id": b"ab" * 16, b"memwal:applied": b'{"loader": 17}'}


def test_a_sentinel_has_what_shard_writer_looks_for_and_no_generation(shard_writers: list[bytes]) -> None:
    sentinel = EntryHeader(2, 5, "cd" * 16, {"loader": 17}, sentinel=True)
    ours, found = (pa.ipc.open_stream(data) for data in (CODEC.encode(sentinel, CODEC.no_rows), shard_writers[1]))
    assert (ours.schema, found.schema) == (pa.schema([]), pa.schema([]))
    assert {key: ours.schema.metadata[key] for key in found.schema.metadata} == dict(found.schema.metadata)
    assert b"generation" not in ours.schema.metadata


def test_decoded_rows_share_the_memory_of_the_entry() -> None:
    data = CODEC.encode(HEADER, ROWS)
    before = pa.total_allocated_bytes()
    rows = CODEC.decode(1, data).rows
    assert rows.get_total_buffer_size() > 0
    assert pa.total_allocated_bytes() - before < 64


def test_several_batches_in_one_entry_are_read_in_order() -> None:
    several = stream(ROW_SCHEMA.with_metadata({"writer_epoch": "4"}), *ROWS.slice(0, 1).to_batches() * 3)
    entry = CODEC.decode(1, several)
    assert entry.header == EntryHeader(4, 0, "", None)
    assert entry.rows["id"].to_pylist() == [1, 1, 1]


def test_columns_another_program_left_out_are_null_and_false() -> None:
    schema = pa.schema([ROW_SCHEMA.field("vector"), ROW_SCHEMA.field("id")])
    rows = CODEC.decode(1, theirs({"writer_epoch": "1"}, schema, ROWS.select(["vector", "id"]))).rows
    assert rows.schema.equals(CODEC.row_schema)
    assert rows.slice(0, 1).to_pylist() == [
        {"id": 1, "name": None, "vector": [1.0, 2.0], "both": None, "many": None, "_tombstone": False}
    ]


@pytest.mark.parametrize(
    "data",
    [
        theirs({}),
        theirs({"writer_epoch": "one"}),
        theirs({"writer_epoch": "1"}, rows=ROWS, schema=ROW_SCHEMA)[:-8],
        CODEC.encode(HEADER, ROWS)[:-20],
        CODEC.encode(HEADER, ROWS) + b"\xff\xff\xff\xff\0\0\0\0",
        b"",
        b"PAR1" * 10 + b"\xff\xff\xff\xff\0\0\0\0",
        theirs(
            {"writer_epoch": "1"},
            ROW_SCHEMA.set(0, pa.field("id", pa.string())),
            ROWS.set_column(0, "id", [["x", "y"]]),
        ),
        theirs(
            {"writer_epoch": "1"},
            ROW_SCHEMA.set(0, pa.field("id", pa.int64())),
            ROWS.set_column(0, "id", [[1, None]]),
        ),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(data: bytes) -> None:
    with raises(Corrupt):
        CODEC.decode(3, data)


def test_every_byte_of_our_entries_is_covered() -> None:
    """Each byte damaged, each length cut: always Corrupt."""
    sentinel = EntryHeader(2, 1, "cd" * 16, {"loader": 17}, sentinel=True)
    for whole in (
        CODEC.encode(HEADER, ROWS),
        CODEC.encode(sentinel, CODEC.no_rows),
        CODEC.encode(HEADER, CODEC.no_rows),
    ):
        for damaged in damages(whole):
            with pytest.raises(Corrupt):
                CODEC.decode(1, damaged)


def damages(whole: bytes) -> Iterator[bytes]:
    """Every byte with one bit flipped and with all of them flipped, and every truncation."""
    for at in range(len(whole)):
        for flip in (1 << at % 8, 0xFF):
            yield b"".join((whole[:at], bytes([whole[at] ^ flip]), whole[at + 1 :]))
        yield whole[:at]


def read_damaged(whole: bytes) -> tuple[int, int]:
    """Return how many damaged copies of another program's entry were refused, and how many were read."""
    rng, refused, read = random.Random(7), 0, 0
    several = (bytearray(whole) for _ in range(3000))
    for damaged in several:
        for _ in range(rng.randrange(2, 8)):
            damaged[rng.randrange(len(damaged) - 8)] = rng.randrange(256)
    for data in (*damages(whole), *map(bytes, several)):
        try:
            rows = CODEC.decode(1, data).rows
        except Corrupt:
            refused += 1
            continue
        assert rows.schema.equals(CODEC.row_schema)
        rows.to_pylist()
        read += 1
    return refused, read


def test_damage_to_an_entry_without_checksum_never_ends_the_process() -> None:
    """Runs in a separate process, because offsets that point outside their buffers would end the process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_wal_codec_arrow"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, read = map(int, done.stdout.split())
    assert refused > read > 0


if __name__ == "__main__":
    print(*read_damaged((GOLDEN / "wal" / "shard_writer_put.arrow").read_bytes()))
