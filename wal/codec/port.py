"""The port between the log and an entry format, and the choice of the format."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import pyarrow as pa

from memwal.wal.codec.arrow import ArrowCodec
from memwal.wal.codec.lance import LanceCodec
from memwal.wal.records import Entry, EntryHeader

WalFormat = Literal["lance", "arrow"]
"""Format of a table's entries: Lance files, or the Arrow streams of Lance's own writer."""
WAL_FORMATS: tuple[WalFormat, ...] = get_args(WalFormat)


class EntryCodec(Protocol):
    """Encodes entries into bytes and decodes them.

    Thread safety. Any thread.
    Invariants. `decode(p, encode(h, rows))` is `Entry(p, h, rows)`; the bytes of two headers with different entry ids
    differ.
    """

    suffix: str
    """Suffix of the entry's key, without the dot."""
    no_rows: pa.Table
    """An empty table in the row schema, for sentinels."""

    def encode(self, header: EntryHeader, rows: pa.Table) -> bytes:
        """Return the entry's bytes. Raises ValueError or pa.ArrowInvalid if `rows` is not in the row schema."""

    def decode(self, position: int, data: bytes) -> Entry:
        """Return the entry at `position`. Raises Corrupt, naming the position, if `data` is not a whole entry."""

    def header(self, data: bytes) -> EntryHeader:
        """Return the header only. Raises Corrupt if `data` is not a whole entry."""


def codec_for(wal_format: WalFormat, row_schema: pa.Schema) -> EntryCodec:
    """Return the codec of a table's format.

    `row_schema`: the base columns, with `lance:field_id` where known, then `_tombstone`; its schema metadata is the
    base table's, which the arrow format repeats in every entry.
    """
    return LanceCodec(row_schema) if wal_format == "lance" else ArrowCodec(row_schema)
