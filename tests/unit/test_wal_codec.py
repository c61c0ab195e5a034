"""The contract of every entry format: it loses no value, accepts no damage, and finds columns after table changes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.wal import WAL_FORMATS, BatchPart, Corrupt, EntryCodec, EntryHeader, WalFormat, codec_for
from tests.messages import raises
from tests.support.golden import golden

PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("n", pa.int64()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
        pa.field("_tombstone", pa.bool_(), nullable=False),
    ]
)
HEADER = EntryHeader(6, 3, "ab" * 16, {"loader": 17, "query 'ü'": 0}, BatchPart("loader", 17, "a1", True))

Make = Callable[[pa.Schema], EntryCodec]


@pytest.fixture(params=WAL_FORMATS, scope="module")
def wal_format(request: pytest.FixtureRequest) -> WalFormat:
    """Each format in turn."""
    return request.param


@pytest.fixture(scope="module")
def make_codec(wal_format: WalFormat) -> Make:
    return lambda schema: codec_for(wal_format, schema)


@pytest.fixture(scope="module")
def codec(make_codec: Make) -> EntryCodec:
    return make_codec(SCHEMA)


def make(count: int) -> pa.Table:
    return pa.table(
        {
            "id": [f"key {number}" for number in range(count)],
            "n": [None if number % 3 == 0 else number for number in range(count)],
            "vector": [[number, -number] if number % 2 else None for number in range(count)],
            "_tombstone": [number % 5 == 0 for number in range(count)],
        },
        schema=SCHEMA,
    )


@pytest.mark.parametrize("count", [0, 1, 1000, 20_000])
def test_round_trip(codec: EntryCodec, count: int) -> None:
    entry = codec.decode(9, codec.encode(HEADER, make(count)))
    assert (entry.position, entry.header) == (9, HEADER)
    assert entry.rows.equals(make(count), check_metadata=True)


@pytest.mark.parametrize(
    "header", [EntryHeader(1, 1, "0" * 32, {}), replace(HEADER, applied=None), replace(HEADER, log_id="cd" * 16)]
)
def test_header_alone_without_a_batch_or_a_map(codec: EntryCodec, header: EntryHeader) -> None:
    data = codec.encode(header, make(1))
    assert codec.header(data) == codec.decode(1, data).header == header


def test_sentinel_carries_the_map_and_no_rows(codec: EntryCodec) -> None:
    header = EntryHeader(2, 4, "1" * 32, {"q": 5}, sentinel=True)
    entry = codec.decode(3, codec.encode(header, codec.no_rows))
    assert entry.header == header
    assert entry.rows.num_rows == 0
    assert entry.rows.schema.equals(SCHEMA)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None], pa.uint8()),
        pa.array([dt.date(2024, 2, 29), None], pa.date32()),
        pa.array([1, None], pa.timestamp("us")),
        pa.array([b"\0\xff", None], pa.large_binary()),
        pa.array(["ü", None], pa.large_string()),
        pa.array([[1, 2], None], pa.list_(pa.int32())),
        pa.array([{"x": 1}, {"x": None}], pa.struct([("x", pa.int8())])),
        pa.array([1.5, None], pa.float64()).cast(pa.float16()),
    ],
)
def test_column_types_survive(make_codec: Make, column: pa.Array) -> None:
    schema = pa.schema([pa.field("c", column.type), SCHEMA.field("_tombstone")])
    table = pa.table({"c": column, "_tombstone": [False, True]}, schema=schema)
    codec = make_codec(schema)
    assert codec.decode(1, codec.encode(HEADER, table)).rows.equals(table)


def test_many_small_chunks_and_slices_make_one_entry(codec: EntryCodec) -> None:
    chunked = pa.concat_tables([make(10).slice(number, 1) for number in range(10)])
    assert chunked["id"].num_chunks == 10
    assert codec.decode(1, codec.encode(HEADER, chunked)).rows.equals(make(10))
    assert len(codec.encode(HEADER, make(20_000).slice(5, 2))) < 8_000


def test_rows_not_in_the_row_schema_are_refused_with_the_column(codec: EntryCodec) -> None:
    with raises(ValueError):
        codec.encode(HEADER, make(2).set_column(1, "n", pa.array(["a", "b"])))
    with raises(ValueError):
        codec.encode(HEADER, make(2).drop_columns("_tombstone"))


def test_two_entries_of_equal_rows_differ(codec: EntryCodec) -> None:
    ids = ("0" * 32, "1" * 32)
    first, second = (codec.encode(EntryHeader(1, 1, each), make(3)) for each in ids)
    assert first != second


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_truncation_is_corrupt(codec: EntryCodec, data: st.DataObject) -> None:
    whole = codec.encode(HEADER, make(50))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:cut], whole[:cut] + b"\0" * (len(whole) - cut)):
        with pytest.raises(Corrupt):
            codec.decode(12, damaged)
        with pytest.raises(Corrupt):
            codec.header(damaged)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_flipped_bit_is_corrupt(codec: EntryCodec, data: st.DataObject) -> None:
    whole = bytearray(codec.encode(HEADER, make(50)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        codec.decode(1, bytes(whole))


def with_ids(**columns: tuple[int, Any]) -> pa.Schema:
    fields = [
        pa.field(name, kind, metadata={"lance:field_id": str(number)}) for name, (number, kind) in columns.items()
    ]
    return pa.schema([*fields, SCHEMA.field("_tombstone")])


def test_columns_are_matched_by_field_id_then_name(make_codec: Make) -> None:
    old = make_codec(with_ids(key=(0, pa.int64()), dropped=(1, pa.int64()), price=(2, pa.int64())))
    rows = pa.table({"key": [1], "dropped": [2], "price": [3], "_tombstone": [True]}, schema=old.no_rows.schema)
    data = old.encode(HEADER, rows)
    new = with_ids(key=(0, pa.int64()), cost=(2, pa.int64()), dropped=(4, pa.int64()), added=(3, pa.string()))
    assert make_codec(new).decode(1, data).rows.to_pylist() == [
        {"key": 1, "cost": 3, "dropped": None, "added": None, "_tombstone": True}
    ]
    assert make_codec(new.set(0, pa.field("key", pa.int64()))).decode(1, data).rows.to_pylist() == [
        {"key": 1, "cost": None, "dropped": 2, "added": None, "_tombstone": True}
    ]


def test_an_id_that_lance_gave_anew_to_a_column_of_another_type_pairs_nothing(make_codec: Make) -> None:
    """Once no file has a dropped column any more, Lance gives its id to the next added column."""
    old = make_codec(with_ids(key=(0, pa.int64()), dropped=(1, pa.string())))
    rows = pa.table({"key": [1], "dropped": ["x"], "_tombstone": [False]}, schema=old.no_rows.schema)
    data = old.encode(HEADER, rows)
    for kind in (pa.int64(), pa.large_string()):
        new = make_codec(with_ids(key=(0, pa.int64()), added=(1, kind)))
        assert new.decode(1, data).rows.to_pylist() == [{"key": 1, "added": None, "_tombstone": False}]


def test_a_key_column_the_entry_lacks_is_corrupt(codec: EntryCodec, make_codec: Make) -> None:
    schema = pa.schema([pa.field("other", pa.int64(), nullable=False), *SCHEMA])
    with raises(Corrupt):
        make_codec(schema).decode(1, codec.encode(HEADER, make(1)))


def test_threads_share_a_codec(codec: EntryCodec) -> None:
    def round_trip(number: int) -> bool:
        header = EntryHeader(1, 1, f"{number:032x}", {"q": number})
        entry = codec.decode(number + 1, codec.encode(header, make(number)))
        return entry.header == header and entry.rows.equals(make(number))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(200)))


@pytest.mark.parametrize(("name", "header"), [("entry", HEADER), ("entry_of_a_log", replace(HEADER, log_id="cd" * 16))])
def test_an_entry_written_by_an_earlier_build_reads_the_same(
    codec: EntryCodec, wal_format: WalFormat, name: str, header: EntryHeader
) -> None:
    entry = codec.decode(1, golden(f"wal/{name}.{wal_format}", codec.encode(header, make(7))))
    assert entry.header == header
    assert entry.rows.equals(make(7))
