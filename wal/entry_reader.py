"""Read a log's entries in order, several concurrently.

On object storage a read is a round trip, and decoding an entry uses a processor without holding the interpreter lock,
so a few threads read and decode ahead of the consumer. The entries ahead are bounded in number and in bytes. The size
of an entry is known only once it is read, so each entry ahead counts as much as the largest so far. Until the first is
read, the number of entries ahead is the number of readers.

A table that was deleted and recreated at the same place has the same keys, and its epochs start at 1 again. On object
storage a writer of the deleted table does not detect this until it reads the manifest; what it writes before that, or
sent long ago, lands in the new log. Each entry is therefore compared with the id of the log. The newest manifest
decides, since the caller's may be the deleted table's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TypeVar
from uuid import UUID

from memwal.wal.codec.port import EntryCodec
from memwal.wal.errors import AnotherLog, Corrupt, Overtaken
from memwal.wal.layout import entry_key, parse_entry_key, wal_prefix
from memwal.wal.manifest import ManifestStore
from memwal.wal.records import Entry, EntryHeader
from memwal.wal.store.port import ObjectInfo, ObjectStore

T = TypeVar("T")

_BYTES_AHEAD = 64 << 20
_AHEAD_PER_READER = 2
"""One being read, one waiting for the consumer."""


class EntryReader:
    """Reads entries of one region.

    Thread safety. Any thread.
    Invariants. (1) With one reader no thread is started: the caller's thread makes one store call after another. (2) An
    error is raised in the place of its entry. (3) No thread outlives the iterator of `each`, however it ended.
    Errors. Every method raises Corrupt, naming the key, if an object is not a whole entry; AnotherLog if it belongs to
    another log than the region's; Overtaken if it belongs to the region's log and `log_id` does not (the table was
    recreated); StoreUnavailable; StoreRefused.
    """

    def __init__(
        self,
        store: ObjectStore,
        region_id: UUID,
        codec: EntryCodec,
        readers: int = 1,
        known: Mapping[int, Entry] | None = None,
        log_id: str = "",
    ) -> None:
        """`known`: entries by position, which `each` does not read, as long as the first of its positions are known.

        `log_id`: that of the caller's manifest; if "", the newest manifest is read once.
        """
        self.store, self.region_id = store, region_id
        self._codec, self._readers, self._known = codec, readers, known or {}
        self.log_id = log_id
        self._is_unknown = False
        # An entry never changes, so its header need not be read twice.
        self._last: tuple[int, EntryHeader] | None = None
        self.suffix = codec.suffix

    def key(self, position: int) -> str:
        """Return the key of the entry at `position`."""
        return entry_key(self.region_id, position, self._codec.suffix)

    def header(self, position: int) -> EntryHeader | None:
        """Return the header of one entry; None if it does not exist."""
        header = self.header_of_any(position)
        if header is not None:
            self._expect_ours(position, header)
        return header

    def header_of_any(self, position: int) -> EntryHeader | None:
        """Return the header of one entry of any log; None if it does not exist."""
        last = self._last
        if last is not None and last[0] == position:
            return last[1]
        header = self._decoded(position, self._codec.header)
        if header is not None:
            self._last = (position, header)
        return header

    def listed(self) -> dict[int, ObjectInfo]:
        """Return the entries on storage by position, ascending; objects of other formats are omitted."""
        described = ((parse_entry_key(info.key), info) for info in self.store.describe(wal_prefix(self.region_id)))
        found = {key.position: info for key, info in described if key is not None and key.suffix == self.suffix}
        return dict(sorted(found.items()))

    def newest_map(self, tip: int) -> tuple[int, EntryHeader | None]:
        """Return position and header of the newest entry with the applied map, searched from `tip` down.

        The header is None if there is none before the first missing entry, whose position (0 without one) is returned.
        """
        for position in range(tip, 0, -1):
            header = self.header(position)
            if header is None or header.applied is not None:
                return position, header
        return 0, None

    def read(self, position: int) -> Entry | None:
        """Return one entry; None if it does not exist."""
        entry = self._decoded(position, partial(self._codec.decode, position))
        if entry is not None:
            self._expect_ours(position, entry.header)
        return entry

    def _decoded(self, position: int, decode: Callable[[bytes], T]) -> T | None:
        data = self.store.get(self.key(position))
        try:
            return None if data is None else decode(data)
        except Corrupt as error:
            raise Corrupt(f"{self.key(position)}: {error}; restore this object from a backup") from error

    def each(self, positions: Iterable[int]) -> Generator[Entry | None, None, None]:
        """Yield `read` of every position, in order. Close it (`contextlib.closing`) if it may not be exhausted."""
        left = iter(positions)
        for position in left:
            if position not in self._known:
                left = chain([position], left)
                break
            self._expect_ours(position, self._known[position].header)
            yield self._known[position]
        if self._readers == 1:
            yield from map(self.read, left)
        else:
            yield from self._each_ahead(left)

    def _expect_ours(self, position: int, header: EntryHeader) -> None:
        known = self.log_id  # another thread may set it meanwhile
        if header.log_id in ("", known) or self._is_unknown:
            return
        newest = ManifestStore(self.store, self.region_id).latest()
        if newest is None or not newest.log_id:
            self._is_unknown = True
        elif newest.log_id != header.log_id:
            raise AnotherLog(self.key(position), header.log_id, newest.log_id)
        elif known:
            raise Overtaken(self.region_id, position, newest.replay_after, newest.current_generation)
        else:
            self.log_id = newest.log_id

    def _each_ahead(self, positions: Iterable[int]) -> Generator[Entry | None, None, None]:
        ahead: deque[Future[Entry | None]] = deque()
        largest, most = 0, self._readers
        with ThreadPoolExecutor(self._readers, "wal-reader") as pool:
            try:
                for position in positions:
                    ahead.append(pool.submit(self.read, position))
                    while len(ahead) >= most:
                        entry = ahead.popleft().result()
                        largest = max(largest, entry.rows.nbytes if entry else 0)
                        if largest:
                            most = max(1, min(self._readers * _AHEAD_PER_READER, _BYTES_AHEAD // largest))
                        yield entry
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for unread in ahead:
                    unread.cancel()
