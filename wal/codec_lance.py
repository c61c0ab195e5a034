"""WAL entries as Lance files.

An entry is a complete Lance file (format version 2.1) of the rows in the row schema. Everything else is in
its schema metadata, which any Lance reader shows:

    writer_epoch     decimal                   generation     decimal
    memwal:entry_id  32 hex digits             memwal:applied {"producer": sequence, …}  JSON
    memwal:part      {"producer", "sequence", "attempt", "closes"}  JSON; absent where the entry is no part of a batch
    memwal:field_ids {"column": id, …}  JSON; absent where the row schema's fields carry no lance:field_id
    memwal:crc32     8 hex digits: CRC-32 of the whole object, computed with these digits as "00000000"
    fence_sentinel   "true"; only in a sentinel, whose file has the one column _tombstone and no rows

    +------------------+-----------------+-------------------------------------------+---------------+
    | pages of columns | column metadata | schema, metadata above (… crc32 8 digits …) | footer … LANC |
    +------------------+-----------------+-------------------------------------------+---------------+
    sentinel: no pages

Why a checksum of our own: Lance checks the footer, not the pages; a flipped bit in a page would come back as
a value. Why it is patched in afterwards: the Lance writer lays out the file, so the digits' place is known
only when it is done. The metadata stands in the file as protobuf map entries, hence the marker: key, tag of a
length-delimited field 2, length 8. Why not bytes without a file: the Lance writer writes to a path; an
in-memory object store is the cheapest one.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from lance.file import LanceFileReader, LanceFileSession

from wal.errors import Corrupt
from wal.records import BatchPart, Entry, EntryHeader

_VERSION = "2.1"
_FIELD_ID = b"lance:field_id"
_TOMBSTONE = "_tombstone"
_CRC_KEY = "memwal:crc32"
_CRC_MARK = _CRC_KEY.encode() + b"\x12\x08"
_NO_CRC = b"00000000"
_MAGIC = b"LANC"
# Handing one chunk to the Lance writer costs about 20 µs; copying narrow rows together costs less than that
# per chunk.
_MOST_CHUNKS = 4
_SENTINEL_SCHEMA = pa.schema([pa.field(_TOMBSTONE, pa.bool_(), nullable=False)])


class LanceCodec:
    """Entries as Lance files; the format is drawn in the module's text.

    Thread safety. Any thread: each call uses a file name of its own, in memory and on disk.
    Invariants. `decode` gives rows in exactly the row schema: columns matched by field id where both sides
    have ids, else by name; absent ones null, an absent `_tombstone` false, others ignored.
    """

    suffix = "lance"

    def __init__(self, row_schema: pa.Schema) -> None:
        """`row_schema`: the base columns, then `_tombstone`. Field ids are taken from metadata
        `lance:field_id`."""
        self.row_schema = row_schema.remove_metadata()
        self.no_rows = self.row_schema.empty_table()
        self._ids = _field_ids(row_schema)
        self._constant = {"memwal:field_ids": json.dumps(self._ids)} if self._ids else {}
        self._session = LanceFileSession("memory:///wal")
        self._names = map("{}.lance".format, itertools.count())

    def encode(self, header: EntryHeader, rows: pa.Table) -> bytes:
        """The entry's bytes. Raises ValueError where `rows` is not in the row schema."""
        if not rows.schema.equals(self.row_schema):
            raise ValueError(f"rows are not in the row schema: {_difference(rows.schema, self.row_schema)}")
        if header.sentinel:
            rows = _SENTINEL_SCHEMA.empty_table()
        metadata = {**_metadata(header), **self._constant, _CRC_KEY: _NO_CRC.decode()}
        data = self._write(rows, metadata)
        at = data.rindex(_CRC_MARK) + len(_CRC_MARK)
        return b"%b%08x%b" % (data[:at], zlib.crc32(data), data[at + 8 :])

    def decode(self, position: int, data: bytes) -> Entry:
        """The entry at `position` (1-based). Raises Corrupt, naming the position."""
        try:
            table = self._read(data)
            header = _header(table.schema.metadata or {})
            rows = self.no_rows if header.sentinel else self._conform(table)
        except Corrupt as error:
            raise Corrupt(f"WAL entry at position {position}: {error}") from error
        return Entry(position, header, rows)

    def header(self, data: bytes) -> EntryHeader:
        """The header alone. Raises Corrupt where `data` is no whole entry."""
        _check_whole(data)
        with _reader(data) as reader:
            return _header(reader.metadata().schema.metadata or {})

    def _write(self, rows: pa.Table, metadata: Mapping[str, str]) -> bytes:
        name = next(self._names)
        batches = rows.to_batches()
        if len(batches) > _MOST_CHUNKS:
            batches = rows.combine_chunks().to_batches()
        writer = self._session.open_writer(name, schema=rows.schema.with_metadata(metadata), version=_VERSION)
        try:
            for batch in batches:
                writer.write_batch(batch)
        finally:
            writer.close()
        try:
            return bytes(self._session.read_range(name, 0, writer.size_bytes or 0))
        finally:
            self._session.delete_file(name)

    def _read(self, data: bytes) -> pa.Table:
        _check_whole(data)
        with _reader(data) as reader:
            return reader.read_all(batch_size=max(reader.num_rows(), 1)).to_table()

    def _conform(self, table: pa.Table) -> pa.Table:
        written = json.loads((table.schema.metadata or {}).get(b"memwal:field_ids", b"{}"))
        if table.schema.equals(self.row_schema) and (written == self._ids or not written or not self._ids):
            return pa.Table.from_arrays(table.columns, schema=self.row_schema)
        by_id = {number: name for name, number in written.items()}
        columns = [self._column(table, field, by_id) for field in self.row_schema]
        return pa.Table.from_arrays(columns, schema=self.row_schema)

    def _column(self, table: pa.Table, field: pa.Field, by_id: Mapping[int, str]) -> Any:
        name = by_id.get(self._ids[field.name]) if by_id and field.name in self._ids else field.name
        if name in table.column_names:
            return _cast(table[name], field)
        if field.name == _TOMBSTONE:
            return pa.repeat(pa.scalar(False), table.num_rows)
        if not field.nullable:
            raise Corrupt(f"column {field.name!r} is missing and may not be null")
        return pa.nulls(table.num_rows, field.type)


def _field_ids(schema: pa.Schema) -> dict[str, int]:
    """Field id per base column, empty unless every one has an id.

    `_tombstone` is matched by name: as max+1 its id moves when the base table gains a column, and the new column
    would be paired with the old entries' tombstones.
    """
    base = [field for field in schema if field.name != _TOMBSTONE]
    found = {field.name: int(field.metadata[_FIELD_ID]) for field in base if _FIELD_ID in (field.metadata or {})}
    return found if len(found) == len(base) else {}


def _metadata(header: EntryHeader) -> dict[str, str]:
    metadata = {
        "writer_epoch": str(header.writer_epoch),
        "generation": str(header.generation),
        "memwal:entry_id": header.entry_id,
        "memwal:applied": json.dumps(dict(header.applied)),
    }
    if header.part is not None:
        metadata["memwal:part"] = json.dumps(vars(header.part))
    if header.sentinel:
        metadata["fence_sentinel"] = "true"
    return metadata


def _header(metadata: Mapping[bytes, bytes]) -> EntryHeader:
    try:
        part = metadata.get(b"memwal:part")
        return EntryHeader(
            writer_epoch=int(metadata[b"writer_epoch"]),
            generation=int(metadata[b"generation"]),
            entry_id=metadata[b"memwal:entry_id"].decode(),
            applied=json.loads(metadata[b"memwal:applied"]),
            part=BatchPart(**json.loads(part)) if part is not None else None,
            sentinel=metadata.get(b"fence_sentinel") == b"true",
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Corrupt(f"its schema metadata is not a memwal entry's: {error!r}") from error


def _check_whole(data: bytes) -> None:
    """Raise Corrupt unless `data` is what `encode` returned. The Lance reader is never given anything
    else."""
    if not data.endswith(_MAGIC):
        raise Corrupt(
            f"{len(data)} bytes do not end as a Lance file does; the object is truncated or is something else"
        )
    mark = data.rfind(_CRC_MARK)
    if mark < 0:
        raise Corrupt(f"a Lance file without {_CRC_KEY}: not written by memwal")
    at = mark + len(_CRC_MARK)
    found = zlib.crc32(data[at + 8 :], zlib.crc32(_NO_CRC, zlib.crc32(data[:at])))
    if data[at : at + 8] != b"%08x" % found:
        raise Corrupt(
            f"checksum is {found:08x}, recorded is {data[at : at + 8]!r}; the object was damaged after writing"
        )


@contextmanager
def _reader(data: bytes) -> Iterator[LanceFileReader]:
    """A Lance reader of `data`, through a temporary file: the Lance reader reads from a path."""
    with tempfile.NamedTemporaryFile(prefix="memwal-", suffix=".lance") as file:
        file.write(data)
        file.flush()
        yield LanceFileReader(file.name)


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    try:
        return column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as error:
        raise Corrupt(f"column {field.name!r} is {column.type}, expected {field.type}: {error}") from error


def _difference(found: pa.Schema, expected: pa.Schema) -> str:
    for ours, theirs in itertools.zip_longest(expected, found):
        if ours is None or theirs is None or not ours.equals(theirs):
            return f"expected {ours or 'no more columns'}, found {theirs or 'no more columns'}"
    return "equal"
