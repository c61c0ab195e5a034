"""Read the log of a region that another process owns, so that a later claim has little left to read.

    read-ahead      R+1 … T          entries behind the newest manifest's `replay_after`, as they are appended
    claim           T+1 … sentinel   entries appended since; the others are taken from memory

An entry that was read once may be replayed later because a position is written once and its object never changes. The
only exception is a table that was deleted and recreated at the same place, which has another log under the same keys.
Therefore a claim reads the last of these entries again. If its random id is the same, the log is the same, and so is
every position before; otherwise the claim uses none of them (`wal.fence`).

Nothing else depends on what was read ahead: a claim finds the tip, the manifest and the applied map on storage in any
case.
"""

from __future__ import annotations

import threading
from contextlib import closing
from uuid import UUID

from memwal.wal.clock import Clock
from memwal.wal.codec.port import EntryCodec
from memwal.wal.entry_reader import EntryReader
from memwal.wal.manifest import ManifestStore, RegionManifest
from memwal.wal.records import Entry
from memwal.wal.retries import WalOptions
from memwal.wal.store.port import ObjectStore

BYTES_MAX = 64 << 20
"""Bytes of rows that are kept per region; a claim reads what is behind them."""


class ReadAhead:
    """The entries of one region behind `replay_after` that were read so far. Writes nothing and fences no writer.

    Thread safety. Any thread; looks wait for one another.
    Invariants. The entries are consecutive.
    """

    def __init__(
        self,
        store: ObjectStore,
        region_id: UUID,
        codec: EntryCodec,
        *,
        clock: Clock | None = None,
        options: WalOptions | None = None,
    ) -> None:
        """`codec`: returns entries in the caller's row schema. Nothing is read before the first look."""
        self.codec = codec
        self._readers = 1 if options is None or not store.remote else options.readers
        self._reader = EntryReader(store, region_id, codec, self._readers)
        self._manifests = ManifestStore(store, region_id, clock=clock, options=options)
        self._manifest: RegionManifest | None = None
        self._entries: dict[int, Entry] = {}
        self._next, self._bytes = 1, 0
        self._looking = threading.Lock()

    @property
    def position(self) -> int:
        """The last position that a claim need not read, as of the last look."""
        return self._next - 1

    def look(self, most: int, patience: float = -1) -> int:
        """Read at most `most` of the entries that follow, drop those that were flushed, and return how many were read.

        `patience`: seconds to wait for a concurrent look, -1 without a limit; after that time none are read.

        Raises: Corrupt, Overtaken, StoreUnavailable, StoreRefused; entries read before are kept, look again later.
        """
        if not self._looking.acquire(timeout=patience):
            return 0
        try:
            self._manifest = self._manifests.latest(self._manifest)
            if self._manifest is None:
                return 0
            self._reader.log_id = self._manifest.log_id
            self._forget(self._manifest.replay_after)
            before, at_once = self._next, 1
            while self._read(min(at_once, before + most - self._next)):
                at_once = min(2 * at_once, self._readers)  # an idle region costs one request; others few unneeded ones
            return self._next - before
        finally:
            self._looking.release()

    def _read(self, most: int) -> bool:
        """Read the next `most` entries; return whether there may be more, and room for them."""
        with closing(self._reader.each(range(self._next, self._next + most))) as entries:
            for entry in entries:
                if entry is None or self._bytes >= BYTES_MAX:
                    return False
                self._entries[self._next] = entry
                self._bytes += entry.rows.nbytes
                self._next += 1
        return most > 0 and self._bytes < BYTES_MAX

    def entries(self, codec: EntryCodec) -> list[Entry]:
        """Return the entries, in order; none if `codec` is another one, because the table's columns changed."""
        return list(self._entries.values()) if codec is self.codec else []

    def _forget(self, upto: int) -> None:
        for position in [position for position in self._entries if position <= upto]:
            self._bytes -= self._entries.pop(position).rows.nbytes
        self._next = max(self._next, upto + 1)
