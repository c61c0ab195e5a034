"""WAL entries as Arrow IPC streams: the layout that Lance's own ShardWriter writes and replays.

    +----------------+---------------------------+---------------------+----------------------------------+
    | schema message | one record batch message  | end of stream       | trailer                          |
    | epoch, …       | (entry id, …) and columns | FFFFFFFF 00000000   | memwal:crc32 8 hex digits        |
    +----------------+---------------------------+---------------------+----------------------------------+
    sentinel: empty schema, no batch

    schema metadata         writer_epoch, generation, and the base table's schema metadata; in a sentinel
                            writer_epoch, fence_sentinel, memwal:generation, and the keys of the next line
    metadata of the batch   memwal:entry_id, memwal:log_id, memwal:applied, memwal:part; see wal.codec.metadata
    field metadata          that of the base table, and lance:field_id = decimal id
    trailer                 CRC-32 of every byte before it

Reason for these places: ShardWriter refuses a region if an entry's schema metadata is not exactly what it would write
itself ("schema doesn't match"), or if a generation, a sentinel's included, is below an earlier entry's. It ignores the
metadata of a batch, additional keys in a sentinel, and bytes after the end of the stream. It refuses a batch without
rows, so an entry without rows has no batch, and memwal's keys are in its schema. These facts were established with
pylance 14.0.2; tests check them.

Reason for a trailer: Arrow's format has no checksum, and a trailer is found without a search. An object without a
trailer is another program's entry, unless it has memwal's keys: then it was truncated. Another program's entry must end
with its end-of-stream marker, and its values are validated before use.

An entry has one batch, because ShardWriter does not open a region with more than 8,000 batches of one generation.
Entries are not compressed, as in ShardWriter.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import pyarrow as pa

from memwal.wal.codec.columns import EntryColumns, field_ids
from memwal.wal.codec.metadata import Metadata, check_sum, lances_keys, our_keys, parse_foreign_header, parse_header
from memwal.wal.errors import Corrupt, first_line
from memwal.wal.records import Entry, EntryHeader

_NO_COLUMNS = pa.schema([])
_END = b"\xff\xff\xff\xff\0\0\0\0"
_MARK = b"memwal:crc32"
_TRAILER = len(_MARK) + 8
_SENTINELS_GENERATION = "memwal:generation"
# Raised by Arrow for bytes that are not a stream (for an absurd length, out of memory), and by Python for names that
# are not text.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


class ArrowCodec:
    """Entries as Arrow IPC streams; the module docstring draws the format.

    Thread safety. Any thread; immutable.
    Invariants. `decode` returns rows in exactly the row schema, see `EntryColumns`; they share the memory of the
    decoded bytes.
    """

    suffix = "arrow"

    def __init__(self, row_schema: pa.Schema) -> None:
        """`row_schema`: the base columns with their field metadata and `lance:field_id`, then `_tombstone`; its schema
        metadata is the base table's.
        """
        self._columns = EntryColumns(row_schema)
        self._written = row_schema
        self._base_metadata = dict(row_schema.metadata or {})
        self.row_schema = self._columns.schema
        self.no_rows = self._columns.no_rows

    def encode(self, header: EntryHeader, rows: pa.Table) -> bytes:
        """Return the entry's bytes. Raises ValueError if `rows` is not in the row schema."""
        self._columns.check(rows)
        lances, ours = lances_keys(header), our_keys(header)
        if header.sentinel:
            ours[_SENTINELS_GENERATION] = lances.pop("generation")
            return _sealed(_NO_COLUMNS.with_metadata({**lances, **ours}))
        if not rows.num_rows:
            return _sealed(self._written.with_metadata({**self._base_metadata, **lances, **ours}))
        batches = rows.to_batches()
        (batch,) = batches if len(batches) == 1 else rows.combine_chunks().to_batches()
        return _sealed(self._written.with_metadata({**self._base_metadata, **lances}), batch, ours)

    def decode(self, position: int, data: bytes) -> Entry:
        """Return the entry at `position` (1-based). Raises Corrupt, naming the position."""
        try:
            header, table = _read(data)
            rows = self.no_rows if header.sentinel else self._columns.conform(table, field_ids(table.schema))
            if not header.entry_id:
                _check_nulls(rows)
        except (Corrupt, *_UNREADABLE) as error:
            raise Corrupt(f"WAL entry at position {position}: {first_line(error)}") from error
        return Entry(position, header, rows)

    def header(self, data: bytes) -> EntryHeader:
        """Return the header only. Raises Corrupt if `data` is not a whole entry."""
        return _read(data)[0]


def _sealed(schema: pa.Schema, batch: pa.RecordBatch | None = None, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the stream of `batch` and its trailer."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        if batch is not None:
            writer.write_batch(batch, custom_metadata=metadata)
    stream = sink.getvalue()
    return b"".join((stream, _MARK, b"%08x" % zlib.crc32(stream)))


def _read(data: bytes) -> tuple[EntryHeader, pa.Table]:
    """Return header and columns as written. Raises Corrupt unless `data` is a whole entry, of any program."""
    ours = data[-_TRAILER:-8] == _MARK
    if ours:
        check_sum(zlib.crc32(memoryview(data)[:-_TRAILER]), data[-8:])
    elif not data.endswith(_END):
        raise Corrupt(f"{len(data)} bytes do not end as an entry does; the object is truncated or is no entry")
    try:
        metadata, table = _parse(pa.py_buffer(data), len(data) - _TRAILER * ours)
    except _UNREADABLE as error:
        raise Corrupt(f"it is no Arrow stream: {first_line(error)}") from error
    if ours:
        return parse_header({b"generation": metadata.get(_SENTINELS_GENERATION.encode(), b""), **metadata}), table
    if b"memwal:entry_id" in metadata:
        raise Corrupt("its checksum is missing; the object was truncated or damaged after writing")
    try:  # values without a checksum may point outside the object
        table.validate(full=True)
    except pa.ArrowException as error:
        raise Corrupt(f"its values are damaged: {error}") from error
    return parse_foreign_header(metadata), table


def _parse(data: pa.Buffer, end: int) -> tuple[Metadata, pa.Table]:
    """Return the metadata of the schema and the batches together, and the columns, of a stream of `end` bytes."""
    source = pa.BufferReader(data.slice(0, end))
    with pa.ipc.open_stream(source) as reader:
        metadata, batches = dict(reader.schema.metadata or {}), []
        for batch, of_batch in _batches(reader):
            batches.append(batch)
            metadata |= of_batch
        table = pa.Table.from_batches(batches, schema=reader.schema)
    return metadata, table


def _batches(reader: pa.RecordBatchStreamReader) -> Iterator[tuple[pa.RecordBatch, Metadata]]:
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        yield batch, dict(metadata or {})


def _check_nulls(rows: pa.Table) -> None:
    for field in rows.schema:
        if not field.nullable and rows.column(field.name).null_count:
            raise Corrupt(f"column {field.name!r} has nulls, but is not nullable")
