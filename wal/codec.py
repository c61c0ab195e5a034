"""The port between the log and an entry format."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from wal.records import Entry, EntryHeader


class EntryCodec(Protocol):
    """Turns entries into bytes and back.

    Thread safety. Any thread.
    Invariants. `decode(p, encode(h, rows))` is `Entry(p, h, rows)`; bytes of two headers with different entry
    ids differ.
    """

    suffix: str
    """Suffix of the entry's key, without the dot."""
    no_rows: pa.Table
    """No rows, in the row schema: what a sentinel is given."""

    def encode(self, header: EntryHeader, rows: pa.Table) -> bytes:
        """The entry's bytes. `rows` has the row schema. Raises ValueError or pa.ArrowInvalid where it has
        not."""
        ...

    def decode(self, position: int, data: bytes) -> Entry:
        """The entry at `position`. Raises Corrupt, naming the position, where `data` is no whole entry."""
        ...

    def header(self, data: bytes) -> EntryHeader:
        """The header alone. Raises Corrupt where `data` is no whole entry."""
        ...
