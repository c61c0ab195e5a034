"""Requests are unchanged on the wire, and a stream counts only once it is closed."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from memwal.ingest.errors import Invalid
from memwal.ingest.service.rpc.wire import (
    StreamSum,
    closed_with,
    from_flight,
    pack,
    raise_over_flight,
    read_closed,
    unpack,
    unpack_rows,
    without_views,
)
from tests.messages import raises


@pytest.mark.parametrize("rows", [None, pa.table({"k": ["a", "ü"], "v": [[1.0], None]})])
def test_a_request_comes_back_as_it_was(rows: pa.Table | None) -> None:
    request = {"op": "get", "columns": ["a", "b"], "filter": None, "n": 2**40}
    found, encoded = unpack(pack(request, rows))
    assert found == request
    assert (unpack_rows(encoded) if encoded else None) == rows


TEXT = pa.array(["a" * 5000, None, "b", "c" * 5000]).cast(pa.string_view())
VIEWS = {
    "text": (TEXT, pa.large_string()),
    "bytes": (TEXT.cast(pa.binary_view()), pa.large_binary()),
    "struct": (pa.StructArray.from_arrays([TEXT], ["x"]), pa.struct([("x", pa.large_string())])),
    "list": (pa.ListArray.from_arrays([0, 1, 2, 3, 4], TEXT), pa.list_(pa.large_string())),
    "large list": (pa.LargeListArray.from_arrays([0, 1, 2, 3, 4], TEXT), pa.large_list(pa.large_string())),
    "fixed list": (pa.FixedSizeListArray.from_arrays(TEXT, 1), pa.list_(pa.large_string(), 1)),
    "none": (pa.array([1, 2, 3, None]), pa.int64()),
}


@pytest.mark.parametrize(("column", "kind"), VIEWS.values(), ids=VIEWS)
def test_a_slice_of_what_is_sent_has_its_own_bytes_only(column: pa.Array, kind: pa.DataType) -> None:
    sent = without_views(rows := pa.table({"v": column}).replace_schema_metadata({"a": "b"}))
    assert (sent.schema.field("v").type, sent.schema.metadata) == (kind, rows.schema.metadata)
    assert sent.to_pylist() == rows.to_pylist()
    assert len(pack({}, sent.slice(1, 2))) < 1000


def changed(kind: pa.DataType, offsets: list[int], data: bytes) -> pa.Table:
    """Return a column with offsets that pyarrow would reject when it creates an array."""
    memory = bytearray(4 * len(offsets))
    array = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(memory), pa.py_buffer(data)])
    table = pa.table({"id": [1, 2], "k": array})
    memory[:] = struct.pack(f"<{len(offsets)}i", *offsets)
    return table


BAD = {
    "offsets that go down": changed(pa.string(), [0, 10**6, 3], b"abc"),
    "offsets beyond the data": changed(pa.binary(), [0, 1, 2**31 - 1], b"abc"),
    "negative offsets": changed(pa.binary(), [0, -(2**31), 3], b"abc"),
    "no UTF-8": changed(pa.string(), [0, 1, 3], b"a\xff\xfe"),
}


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_rows_that_are_not_valid_are_refused_before_anything_reads_them(rows: pa.Table) -> None:
    with raises(Invalid):
        unpack_rows(unpack(pack({"op": "get"}, rows))[1])
    counted = list[pa.RecordBatch]()
    with raises(Invalid):
        read_closed(Arriving(rows.to_batches()), None, counted.append)  # type: ignore[arg-type]
    assert not counted


class Arriving:
    """A stream of batches as a Flight server reads it."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches, self.schema = batches, batches[0].schema

    def __iter__(self) -> Any:
        return iter(SimpleNamespace(data=batch, app_metadata=None) for batch in self._batches)


def test_only_the_closing_message_says_what_was_sent() -> None:
    assert closed_with(pa.py_buffer(StreamSum(3, 2**32 - 1).closing())) == StreamSum(3, 2**32 - 1)
    assert closed_with(None) is None


KINDS = [
    *(pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.date32()),
    *(pa.timestamp("us", "Europe/Berlin"), pa.decimal128(38, 9), pa.string(), pa.large_binary(), pa.binary(3)),
    *(pa.list_(pa.float32(), 3), pa.list_(pa.string()), pa.large_list(pa.list_(pa.bool_()))),
    pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.list_(pa.string()))]))]),
]


def any_value(kind: pa.DataType, n: int) -> Any:
    """Return the nth value of a type; every third value is null."""
    if n % 3 == 2:
        return None
    if pa.types.is_struct(kind):
        return {field.name: any_value(field.type, n + 1) for field in kind}
    if pa.types.is_fixed_size_list(kind):
        return [float(n)] * kind.list_size
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [any_value(kind.value_type, n + at) for at in range(n % 4)]
    if pa.types.is_decimal(kind):
        return Decimal(n) / 8
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return datetime(2026, 1, 1 + n % 28, tzinfo=UTC)
    if pa.types.is_string(kind):
        return "ü" * (n % 5)
    if pa.types.is_boolean(kind):
        return n % 2 == 0
    return b"abc" if pa.types.is_fixed_size_binary(kind) or pa.types.is_large_binary(kind) else n % 100


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("start", "rows"), [(0, 40), (3, 17), (8, 8), (1, 1), (0, 3)])
def test_sender_and_receiver_make_the_same_checksum(kind: pa.DataType, start: int, rows: int) -> None:
    whole = pa.record_batch({"values": pa.array([any_value(kind, n) for n in range(40)], kind), "row": range(40)})
    sent, arrived = StreamSum(), StreamSum()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as stream:
        for batch in (whole.slice(start, rows), whole.slice(0, rows)):
            sent.add(batch)
            stream.write_batch(batch)
    for batch in pa.ipc.open_stream(sink.getvalue()):
        arrived.add(batch)
    assert arrived == sent
    other = StreamSum()
    other.add(whole.slice(0, rows))
    other.add(whole.slice(start, rows))
    assert (other == sent) == (start == 0)


def test_an_error_keeps_its_kind_and_details() -> None:
    with pytest.raises(flight.FlightServerError) as raised:
        raise_over_flight(Invalid("column 'x' is null in row 3", {"column": "x", "row": 3}))
    found = from_flight(raised.value, "grpc://127.0.0.1:1")
    assert isinstance(found, Invalid)
    assert (found.message, found.details) == ("column 'x' is null in row 3", {"column": "x", "row": 3})


@pytest.mark.parametrize("padding", range(8))
def test_rows_of_a_request_are_aligned_wherever_they_begin(padding: int) -> None:
    sent = pa.table({"day": ["2013-01-01", "2013-01-02"], "flight": pa.array([1545, 22], pa.int32())})
    rows = unpack_rows(unpack(pack({"columns": "x" * padding}, sent))[1])
    assert rows.equals(sent)
    offsets, numbers = (column.chunk(0).buffers()[1] for column in rows.columns)
    assert (offsets.address % 4, numbers.address % 4) == (0, 0)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_compressed_rows_are_refused_before_they_are_large(codec: str, kind: pa.DataType) -> None:
    rows = pa.table({"k": pa.array(["x" * 1000] * 1000, kind)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_table(rows)
    with raises(Invalid):
        unpack_rows(memoryview(sink.getvalue()))
    assert unpack_rows(unpack(pack({}, rows))[1]) == rows


def test_a_long_head_and_a_long_closing_message_are_not_parsed() -> None:
    with raises(Invalid):
        unpack(pack({"filter": "x" * (4 << 20)}))
    assert closed_with(pa.py_buffer(b'{"close": 1, "crc": 1' + b" " * 2000 + b"}")) is None


@pytest.mark.parametrize("letter", ["x", "\n", "\x00", "語", "😀"])
def test_an_error_of_any_length_fits_into_the_headers_of_its_answer(letter: str) -> None:
    text = letter * 100_000
    with pytest.raises(flight.FlightServerError) as raised:
        raise_over_flight(Invalid(text, {"column": text, "rows": list(range(1000, 1300))}))
    assert len(quote(json.loads(raised.value.extra_info)["message"])) + len(raised.value.extra_info) < 8192
    assert from_flight(raised.value, "grpc://127.0.0.1:1").details["rows"][-1] == 1299


def test_a_daemon_counts_as_ended_by_a_call_only_if_it_had_the_call() -> None:
    ended = from_flight(flight.FlightUnavailableError("Socket closed"), "grpc://127.0.0.1:1")
    assert ended.details == {"reason": "lost", "ended": ["grpc://127.0.0.1:1"]}
    refused = flight.FlightUnavailableError("failed to connect to all addresses; last error: Connection refused")
    assert from_flight(refused, "grpc://127.0.0.1:1").details == {"reason": "lost", "not_reached": True}
    late = flight.FlightTimedOutError("Deadline Exceeded")
    assert from_flight(late, "grpc://127.0.0.1:1").details == {"reason": "lost"}
