"""Deleting WAL entries that nobody can need again.

What must stay, and who needs it:

 * Entries above `replay_after` of the newest manifest: every replay. The manifest is the boundary: it moves first,
   by a conditional write, never back, and only the region's owner moves it.
 * Every fence. The slot a sleeping writer will aim at is the first one it has not filled, and that is where the next
   claim put its sentinel; were it gone, the sleeper's put would be answered CREATED and its rows would never be
   replayed. This holds for any writer of the format, one that knows nothing of us included.
 * The newest entry that carries the applied map, and everything above it: the next claim looks for the map there.
 * Entries younger than a minimum age: a reader that took an older manifest may still be reading them. It may also
   read on too late; then it finds a position missing that the newest manifest has passed, and begins again.

Nothing else is needed, so a crash in the middle and two collectors at once do no harm. A collector owns nothing and
fences nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from wal.clock import Clock
from wal.codec import EntryCodec
from wal.entry_reader import EntryReader
from wal.errors import Corrupt
from wal.layout import parse_entry_key, wal_prefix
from wal.manifest import ManifestStore
from wal.records import EntryHeader
from wal.store import ObjectInfo, ObjectStore

_SLACK = 65_536
"""Bytes by which a fence may be larger than the one we would write now: names of columns dropped since, for one."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class WalGarbage:
    """What one collection of a region's WAL found, and deleted unless `dry_run`."""

    region: UUID
    boundary: int
    """`replay_after` of the manifest it went by: entries above it were not looked at."""
    entries: int = 0
    """Entries deleted."""
    bytes: int = 0
    """Their size together."""
    fences: int = 0
    """Sentinels at or below the boundary, kept for writers that sleep."""
    too_young: int = 0
    """Entries not needed any more that have not reached the minimum age."""
    unreadable: int = 0
    """Entries kept because they cannot be read, so that nobody can tell whether they are fences."""
    dry_run: bool = False


class WalCollector:
    """Collects the WAL of one region, as often as it is asked.

    Thread safety. One thread at a time; any number of collectors, in any number of processes.
    Invariants. See the module's text. What was once read as a fence is remembered, not read again.
    """

    def __init__(self, store: ObjectStore, region_id: UUID, codec: EntryCodec, clock: Clock, workers: int = 8) -> None:
        """`workers`: objects read or deleted at the same time; 1 starts no thread."""
        self._store = store
        self._region_id = region_id
        self._codec = codec
        self._reader = EntryReader(store, region_id, codec)
        self._clock = clock
        self._workers = workers
        self._fences: set[int] = set()

    def collect(self, min_age: float, *, dry_run: bool = False) -> WalGarbage:
        """Delete what is not needed and at least `min_age` seconds old; with `dry_run` only say what that is.

        Raises StoreUnavailable, StoreRefused (what was deleted by then is deleted; call again), and Corrupt, naming
        the object, where the manifest or an entry above the newest applied map cannot be read.
        """
        manifest = ManifestStore(self._store, self._region_id, clock=self._clock).latest()
        boundary = 0 if manifest is None else manifest.replay_after
        entries = self._entries()
        last, applied = self._newest_map(max(entries, default=0))
        below = [position for position in entries if position <= boundary and position < last]
        old = [position for position in below if entries[position].modified <= self._clock.now() - min_age]
        unreadable = self._look_for_fences(old, entries, applied)
        condemned = [position for position in old if position not in self._fences and position not in unreadable]
        if not dry_run:
            self._each(lambda position: self._store.delete(entries[position].key), condemned)
        return WalGarbage(
            region=self._region_id,
            boundary=boundary,
            entries=len(condemned),
            bytes=sum(entries[position].size for position in condemned),
            fences=len(self._fences.intersection(below)),
            too_young=len(below) - len(old),
            unreadable=len(unreadable),
            dry_run=dry_run,
        )

    def _entries(self) -> dict[int, ObjectInfo]:
        """By position, ascending. Objects that are no entries of this format are nobody's to delete."""
        found = {}
        for each in self._store.describe(wal_prefix(self._region_id)):
            parsed = parse_entry_key(each.key)
            if parsed is not None and parsed.suffix == self._codec.suffix:
                found[parsed.position] = each
        return dict(sorted(found.items()))

    def _newest_map(self, tip: int) -> tuple[int, Mapping[str, int]]:
        """Position of the newest entry that carries the applied map, and the map; the tip where none does."""
        position = tip
        while position and (header := self._reader.header(position)) is not None:
            if header.applied is not None:
                return position, header.applied
            position -= 1
        return tip, {}

    def _look_for_fences(
        self, positions: Sequence[int], entries: Mapping[int, ObjectInfo], applied: Mapping[str, int]
    ) -> set[int]:
        """Remember which of `positions` are fences; returns those that cannot be read.

        A large entry holds rows and is deleted without being read: the applied map only grows, so no fence is larger
        than one written now, but for what `_SLACK` allows.
        """
        sentinel = EntryHeader(1, 1, "0" * 32, applied, sentinel=True)
        largest = len(self._codec.encode(sentinel, self._codec.no_rows)) + _SLACK
        unknown = [p for p in positions if p not in self._fences and entries[p].size <= largest]
        unreadable = set()
        for position, header in zip(unknown, self._each(self._readable_header, unknown), strict=True):
            if isinstance(header, Corrupt):
                unreadable.add(position)
            elif header is not None and header.sentinel:
                self._fences.add(position)
        return unreadable

    def _readable_header(self, position: int) -> EntryHeader | Corrupt | None:
        try:
            return self._reader.header(position)
        except Corrupt as error:
            return error

    def _each(self, work: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
        if self._workers == 1 or len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(self._workers, len(items))) as pool:
            return list(pool.map(work, items))
