"""WAL entries as Lance files.

An entry is a complete Lance file (format version 2.1) of the rows in the row schema. Everything else is in its schema
metadata, which any Lance reader shows:

    writer_epoch, generation, fence_sentinel, memwal:entry_id, memwal:log_id, memwal:applied, memwal:part
                     see wal.codec.metadata
    memwal:field_ids {"column": id, …}  JSON; absent where the row schema's fields carry no lance:field_id
    memwal:crc32     8 hex digits: CRC-32 of the whole object, computed with these digits as "00000000"

    +------------------+-----------------+---------------------------------------------+---------------+
    | pages of columns | column metadata | schema, metadata above (… crc32 8 digits …) | footer … LANC |
    +------------------+-----------------+---------------------------------------------+---------------+
    sentinel: no pages, the one column _tombstone

Reason for a separate checksum: Lance checks the footer, not the pages; a flipped bit in a page would be returned as a
value. It is patched in afterwards because the Lance writer lays out the file, so the place of the digits is known only
at the end. The metadata is stored as protobuf map entries, hence the marker: key, tag of a length-delimited field 2,
length 8. The file is written to an in-memory object store because the Lance writer writes to a path, and that is the
cheapest one.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import threading
import zlib
from collections.abc import Mapping
from typing import IO, Any

import pyarrow as pa
from lance.file import LanceFileReader, LanceFileSession

from memwal.wal.codec.columns import TOMBSTONE, EntryColumns
from memwal.wal.codec.lance_arrays import delicate_columns, importable
from memwal.wal.codec.metadata import check_sum, lances_keys, our_keys, parse_header
from memwal.wal.errors import Corrupt
from memwal.wal.panics import panics_as_errors
from memwal.wal.records import Entry, EntryHeader

_VERSION = "2.1"
_CRC_KEY = "memwal:crc32"
_CRC_MARK = _CRC_KEY.encode() + b"\x12\x08"
_NO_CRC = b"00000000"
_MAGIC = b"LANC"
# Passing one chunk to the Lance writer costs about 20 µs; combining narrow rows costs less than that per chunk.
_MOST_CHUNKS = 4
_SENTINEL_SCHEMA = pa.schema([pa.field(TOMBSTONE, pa.bool_(), nullable=False)])


class LanceCodec:
    """Entries as Lance files; the module docstring draws the format.

    Thread safety. Any thread: each call writes under its own name, each thread reads from its own file.
    Invariants. `decode` returns rows in exactly the row schema, see `EntryColumns`.
    """

    suffix = "lance"

    def __init__(self, row_schema: pa.Schema) -> None:
        """`row_schema`: the base columns, then `_tombstone`. Field ids are taken from metadata `lance:field_id`."""
        self._columns = EntryColumns(row_schema)
        self.row_schema = self._columns.schema
        self.no_rows = self._columns.no_rows
        ids = self._columns.ids
        self._delicate = delicate_columns(self.row_schema)
        self._constant = {"memwal:field_ids": json.dumps(ids)} if ids else {}
        self._scratch = ScratchFile()
        self._session = LanceFileSession("memory:///wal")
        self._names = map("{}.lance".format, itertools.count())

    @panics_as_errors
    def encode(self, header: EntryHeader, rows: pa.Table) -> bytes:
        """Return the entry's bytes. Raises ValueError if `rows` is not in the row schema, and Lance's own errors."""
        self._columns.check(rows)
        if header.sentinel:
            rows = _SENTINEL_SCHEMA.empty_table()
        metadata = {**lances_keys(header), **our_keys(header), **self._constant, _CRC_KEY: _NO_CRC.decode()}
        data = self._write(rows, metadata)
        at = data.rindex(_CRC_MARK) + len(_CRC_MARK)
        return b"%b%08x%b" % (data[:at], zlib.crc32(data), data[at + 8 :])

    @panics_as_errors
    def decode(self, position: int, data: bytes) -> Entry:
        """Return the entry at `position` (1-based). Raises Corrupt, naming the position."""
        try:
            table = self._read(data)
            metadata = table.schema.metadata or {}
            header, written = parse_header(metadata), json.loads(metadata.get(b"memwal:field_ids", b"{}"))
            rows = self.no_rows if header.sentinel else self._columns.conform(table, written)
        except Corrupt as error:
            raise Corrupt(f"WAL entry at position {position}: {error}") from error
        return Entry(position, header, rows)

    @panics_as_errors
    def header(self, data: bytes) -> EntryHeader:
        """Return the header only. Raises Corrupt if `data` is not a whole entry."""
        _check_whole(data)
        return parse_header(self._reader(data).metadata().schema.metadata or {})

    def _write(self, rows: pa.Table, metadata: Mapping[str, str]) -> bytes:
        name = next(self._names)
        batches = rows.to_batches()
        if len(batches) > _MOST_CHUNKS:
            batches = rows.combine_chunks().to_batches()
        writer = self._session.open_writer(name, schema=rows.schema.with_metadata(metadata), version=_VERSION)
        try:
            for batch in batches:
                writer.write_batch(importable(batch, self._delicate))
        finally:
            writer.close()
        try:
            return bytes(self._session.read_range(name, 0, writer.size_bytes or 0))
        finally:
            self._session.delete_file(name)

    def _read(self, data: bytes) -> pa.Table:
        _check_whole(data)
        reader = self._reader(data)
        return reader.read_all(batch_size=max(reader.num_rows(), 1)).to_table()

    def _reader(self, data: bytes) -> LanceFileReader:
        """Return a Lance reader of `data`, valid until this thread's next call."""
        return LanceFileReader(self._scratch.holding(data))


def _check_whole(data: bytes) -> None:
    """Raise Corrupt unless `data` is a result of `encode`. The Lance reader gets no other bytes."""
    if not data.endswith(_MAGIC):
        raise Corrupt(f"{len(data)} bytes do not end as a Lance file does; the object is truncated or is no Lance file")
    mark = data.rfind(_CRC_MARK)
    if mark < 0:
        raise Corrupt(f"a Lance file without {_CRC_KEY}: not written by memwal")
    at = mark + len(_CRC_MARK)
    view = memoryview(data)
    check_sum(zlib.crc32(view[at + 8 :], zlib.crc32(_NO_CRC, zlib.crc32(view[:at]))), data[at : at + 8])


def open_scratch(process: int | str = "self") -> tuple[IO[bytes] | Any, str]:
    """Return an empty file, unbuffered, and its path.

    On Linux it is in memory without a name, so nothing remains if this process is killed. `process`: this process's id,
    if another process of this user opens the path.
    """
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("memwal"), "r+b", buffering=0)  # noqa: SIM115, PTH123 - the caller closes it
        return file, f"/proc/{process}/fd/{file.fileno()}"
    named = tempfile.NamedTemporaryFile(prefix="memwal-", buffering=0)  # noqa: SIM115 - the caller closes it
    return named, named.name


class ScratchFile(threading.local):
    """One file per thread, which holds the bytes that this thread put last.

    Thread safety. Any thread: each has its own file. A forked child creates new ones.
    Durability. None; its name is gone when the thread ends. Uses as much memory as the bytes put last.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._file, self._path = open_scratch()

    def holding(self, data: bytes) -> str:
        """Return the path of the file, which holds exactly `data` until this thread's next call."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc] # the inherited file is the parent's
        fd, rest = self._file.fileno(), memoryview(data)
        while rest:
            rest = rest[os.pwrite(fd, rest, len(data) - len(rest)) :]
        os.ftruncate(fd, len(data))
        return self._path
