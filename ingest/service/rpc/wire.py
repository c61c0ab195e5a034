"""Encode and decode the messages between clients and daemons (`rpc.connection`, `daemon.service`).

A request is a small JSON object, followed by an Arrow IPC stream if it has rows (the keys of a `get`, the vector of a
`search`). It is the command in the descriptor of a DoExchange:

    u32 length, little-endian | JSON, UTF-8 | Arrow IPC stream (may be absent)

The rows of a write follow as the stream of the call, and end with a closing message. Its application metadata is
`{"close": rows sent, "crc": checksum}`, the CRC-32 of the Arrow messages of its batches. README.md lists the steps of a
stream. Errors travel as the JSON of `errors.to_wire` in Flight's `extra_info`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.engine.api.arguments import check_encoding
from memwal.ingest.errors import LOST, UNAUTHENTICATED, Internal, Invalid, MemWalError, Unavailable, from_wire, to_wire
from memwal.wal.errors import first_line

_LENGTH = struct.Struct("<I")
ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
"""Rows in a message can begin at any byte. Arrow warns about each unaligned array, and DataFusion rejects it."""
_HEAD_MAX = 4 << 20
"""Maximum bytes of a request without its rows. Parsing JSON of this size takes half a second and blocks all threads."""
_CLOSING_MAX = 1 << 10
"""Maximum bytes of a closing message."""


def pack(request: Mapping[str, Any], rows: pa.Table | None = None) -> bytes:
    """Encode a request."""
    head = json.dumps(request).encode()
    parts = [_LENGTH.pack(len(head)), head]
    if rows is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
        parts.append(sink.getvalue().to_pybytes())
    return b"".join(parts)


def unpack(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Decode a request and return its fields, and its rows in encoded form. Raises: Invalid if the bytes are not a
    request."""
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        if length > _HEAD_MAX:
            raise Invalid(f"not a request of memwal: {length} bytes before its rows, at most {_HEAD_MAX} are taken")
        request = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
    except (struct.error, ValueError, RecursionError) as error:
        raise Invalid(f"not a request of memwal: {first_line(error)}") from error
    if not isinstance(request, dict):
        raise Invalid("not a request of memwal: no JSON object")
    return request, view[_LENGTH.size + length :]


def unpack_rows(encoded: memoryview) -> pa.Table:
    """Return the rows of a request, validated.

    Raises: Invalid for malformed rows, and for compressed ones, since few compressed bytes can expand to gigabytes.
    """
    try:
        body = pa.py_buffer(encoded)
        for message in pa.ipc.MessageReader.open_stream(body):
            if message.type in ("record batch", "dictionary") and _is_compressed(message):
                raise Invalid("not a request of memwal: its rows are compressed; send them as they are")
        rows = pa.ipc.open_stream(body, options=ALIGNED).read_all()
        check_encoding(rows)
    except (struct.error, ValueError, pa.ArrowException, OSError, MemoryError) as error:
        raise Invalid(f"not a request of memwal: {first_line(error)}") from error
    return rows


def _is_compressed(message: pa.ipc.Message) -> bool:
    """Return whether the buffers of a record batch or dictionary are compressed.

    Source: Arrow's Message.fbs, where `header` is field 2 of a Message, `data` field 1 of a DictionaryBatch and
    `compression` field 3 of a RecordBatch.
    """
    data = message.metadata.to_pybytes()
    path = (2, 3) if message.type == "record batch" else (2, 1, 3)
    table = _offset(data, 0)
    for field in path:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        (size,) = struct.unpack_from("<H", data, vtable)
        place = 4 + 2 * field
        at = struct.unpack_from("<H", data, vtable + place)[0] if place < size else 0
        if not at:
            return False
        table = _offset(data, table + at)
    return True


def _offset(data: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


@dataclass
class StreamSum:
    """Number of rows and checksum of the batches of a write, as sent or as received."""

    rows: int = 0
    crc: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch of at least one row."""
        self.rows += batch.num_rows
        self.crc = zlib.crc32(batch.serialize(), self.crc)

    def closing(self) -> bytes:
        """Return the application metadata of the closing message."""
        return json.dumps({"close": self.rows, "crc": self.crc}).encode()


def closed_with(metadata: pa.Buffer | None) -> StreamSum | None:
    """Return the sum in a closing message; None for any other message."""
    message = {} if metadata is None or metadata.size > _CLOSING_MAX else json.loads(metadata.to_pybytes())
    return StreamSum(message["close"], message["crc"]) if "close" in message else None


def without_views(rows: pa.Table) -> pa.Table:
    """Return `rows` with Arrow's string and binary views, which Polars produces, converted to plain types.

    A slice of a view column keeps all of its bytes, so each message would carry the whole column. Dictionary values
    are not converted: they are sent once.
    """
    fields = [field.with_type(_without_views(field.type)) for field in rows.schema]
    schema = pa.schema(fields, rows.schema.metadata)
    return rows if schema == rows.schema else rows.cast(schema)


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return (pa.list_ if pa.types.is_list(kind) else pa.large_list)(_element(kind))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_element(kind), kind.list_size)
    return kind


def _element(kind: Any) -> pa.Field:
    return kind.value_field.with_type(_without_views(kind.value_type))


def read_closed(
    reader: flight.MetadataRecordBatchReader,
    announced: int | None,
    count: Callable[[pa.RecordBatch], None],
) -> pa.Table:
    """Return all rows that follow the request of a write, validated.

    `announced`: number of rows, if the sender knew it before the first row. `count`: called with each validated
    batch; raises if the stream exceeds its limit of bytes.
    Raises: errors of `count`; Invalid for malformed rows, and if the stream ended without its closing message;
    Unavailable if the received rows differ from the sent ones.
    """
    batches: list[pa.RecordBatch] = []
    arrived, said = StreamSum(), None
    for chunk in reader:
        if chunk.data is not None and chunk.data.num_rows:
            check_encoding(chunk.data)
            count(chunk.data)
            batches.append(chunk.data)
            arrived.add(chunk.data)
        said = closed_with(chunk.app_metadata)
    if said is None:
        raise Invalid(f"the stream ended after {arrived.rows} rows without being closed; nothing was applied")
    if said != arrived or announced not in (None, arrived.rows):
        raise Unavailable(
            f"{arrived.rows} rows arrived with checksum {arrived.crc}, but the sender announced {announced} rows and "
            f"closed the stream after {said.rows} with checksum {said.crc}; nothing was applied, retry"
        )
    return pa.Table.from_batches(batches, reader.schema)


def raise_over_flight(error: MemWalError) -> None:
    """Raise `error` in the form that Flight carries to the client."""
    wire = to_wire(error)
    wire["message"], details = _short(error.message), wire["details"]
    wire["details"] = {name: _short(value) if isinstance(value, str) else value for name, value in details.items()}
    raise flight.FlightServerError(wire["message"], extra_info=json.dumps(wire, default=str).encode())


def _short(text: str) -> str:
    """Shorten a text of an error. Errors travel in headers, and gRPC rejects an answer with more than 8 to 16 KiB of
    headers: the client would consider the daemon lost."""
    short = text[:_TEXT_MAX]
    while len(json.dumps(short)) > _TEXT_MAX:  # JSON escapes count
        short = short[: len(short) * 3 // 4]
    return text if short == text else f"{short}…"


_TEXT_MAX = 1500
"""Maximum characters of each text of an error. An error has at most three: the message twice, and a name in the
details."""


_NOT_REACHED = "failed to connect"
"""gRPC's text for a connection that was not established, so the daemon never received the call. Flight has no error
type for it."""
_UNTRUSTED = "certificate verify failed"
"""TLS's text for a certificate that no trusted authority signed. Flight has no error type for it."""


def from_flight(error: Exception, endpoint: str) -> MemWalError:
    """Return the error for a client: the daemon's own error, or Unavailable if the daemon did not answer."""
    extra = getattr(error, "extra_info", b"")
    if extra:
        return from_wire(json.loads(extra))
    if isinstance(error, flight.FlightUnauthenticatedError):
        return Invalid(
            f"the daemon at {endpoint} refuses the call: missing or wrong token; set daemon.token to its token",
            {"reason": UNAUTHENTICATED},
        )
    if isinstance(error, flight.FlightUnavailableError | flight.FlightCancelledError | flight.FlightTimedOutError):
        if _UNTRUSTED in str(error):
            text = f"the daemon at {endpoint} has a certificate that daemon.tls_ca does not cover; correct tls_ca"
            return Unavailable(text, {"reason": LOST, "untrusted": True})
        text = f"the daemon at {endpoint} does not answer; is it running? Retry with the same token"
        if not isinstance(error, flight.FlightUnavailableError):
            return Unavailable(text, {"reason": LOST})
        more = {"not_reached": True} if _NOT_REACHED in str(error) else {"ended": [endpoint]}
        return Unavailable(text, {"reason": LOST, **more})
    return Internal(f"{type(error).__name__} from the daemon at {endpoint}: {first_line(error)}")
