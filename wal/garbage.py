"""Delete WAL entries that no replay, claim, fence or reader can need again.

These are kept:

 * Entries above `replay_after` of the newest manifest: every replay needs them. The manifest is the boundary: it moves
   first, by a conditional write, never back, and only the region's owner moves it.
 * Every fence, that is the first entry of each epoch (`wal.fences`). A paused writer aims at the first slot that it has
   not filled, which holds the next claim's sentinel. Without the sentinel the put would return CREATED, and its rows
   would never be replayed. This holds for any writer of the format, Lance's included.
   A put of a sentinel that got no answer may land after its slot, which an older writer had filled, was collected. It
   is then below the fence and has the fence's epoch. Therefore entries without rows above a younger entry are kept as
   well, and so are those above a deleted one: another collector may have deleted a sentinel whose epoch was read.
 * The newest entry that carries the applied map, and everything above it: the next claim searches for the map there.
 * The snapshot of that map, if the entry names one; `wal.applied` defines which others may be deleted.
 * Entries younger than a minimum age: a reader with an older manifest may still read them. A reader that is too slow
   finds a position missing that the newest manifest has passed, and restarts.

Nothing else is needed, so a crash in the middle and concurrent collectors are harmless. A collector owns no region and
fences no writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TypeVar
from uuid import UUID

from memwal.wal.applied import superseded
from memwal.wal.clock import Clock
from memwal.wal.codec.port import EntryCodec
from memwal.wal.entry_reader import EntryReader
from memwal.wal.errors import Corrupt
from memwal.wal.fences import FenceIndex, Fences
from memwal.wal.manifest import ManifestStore
from memwal.wal.parallel_map import each
from memwal.wal.records import EntryHeader
from memwal.wal.retries import WalOptions
from memwal.wal.store.port import ObjectStore

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class WalGarbage:
    """The result of one collection of a region's WAL. Nothing was deleted if `dry_run`."""

    region: UUID
    boundary: int
    """`replay_after` of the manifest that was read, or the given lower limit. Entries above were not considered."""
    entries: int = 0
    """Number of entries deleted."""
    bytes: int = 0
    """Bytes deleted."""
    fences: int = 0
    """Fences among the entries that are old enough, kept for paused writers."""
    too_young: int = 0
    """Entries that are not needed but have not reached the minimum age."""
    unreadable: int = 0
    """Entries kept because they cannot be read and may be fences."""
    snapshots: int = 0
    """Number of snapshots of the applied map deleted."""
    dry_run: bool = False


class WalCollector:
    """Collects the WAL of one region, any number of times.

    Thread safety. One thread at a time; any number of collectors, in any number of processes.
    Invariants. See the module docstring. An entry that was read to find the fences is not read again, not even by other
    processes (`wal.fences`).
    """

    def __init__(
        self,
        store: ObjectStore,
        region_id: UUID,
        codec: EntryCodec,
        clock: Clock,
        workers: int = 8,
        options: WalOptions | None = None,
    ) -> None:
        """`workers`: objects read or deleted concurrently; 1 starts no thread."""
        self._store = store
        self._region_id = region_id
        self._reader = EntryReader(store, region_id, codec)
        self._clock = clock
        self._workers, self._options = workers, options
        self._fences = Fences(lambda positions: self._each(self._readable_header, positions))
        self._index = FenceIndex(store, region_id, self._readable_header)
        self._remembers = False

    def collect(self, min_age: float, *, dry_run: bool = False, most: int | None = None) -> WalGarbage:
        """Delete what is not needed and at least `min_age` seconds old; with `dry_run`, only report it.

        `most`: the highest position to delete, None for no limit: a reader of changes needs all entries above it.
        (model: Log!ReadBoundary, Log!ListEntries, Log!ReadHeader, Log!ListAgain, Log!DeleteEntry)

        Raises: StoreUnavailable, StoreRefused (objects deleted before the error stay deleted; call again); Corrupt,
        naming the object, if the manifest or an entry above the newest applied map cannot be read.
        """
        manifest = ManifestStore(self._store, self._region_id, clock=self._clock, options=self._options).latest()
        boundary = 0 if manifest is None else manifest.replay_after
        boundary = boundary if most is None else min(boundary, most)
        self._reader.log_id = "" if manifest is None else manifest.log_id
        entries = self._reader.listed()
        tip = max(entries, default=0)
        last, newest = self._reader.newest_map(tip)
        last = tip if newest is None else last
        below = [position for position in entries if position <= boundary and position < last]
        old = [position for position in below if entries[position].modified <= self._clock.now() - min_age]
        if old and not self._remembers:
            self._fences.learn(self._index.load())
            self._remembers = True
        last_old = max(old, default=0)
        considered = [position for position in below if position <= last_old]
        fences, unreadable = self._fences.among(considered)
        kept = fences | unreadable | self._possible_fences(considered) if old else fences
        condemned = [position for position in old if position not in kept]
        named = superseded(self._store, self._region_id, last, newest.snapshot) if newest is not None else []
        snapshots = [snapshot for snapshot in named if snapshot.modified <= self._clock.now() - min_age]
        if not dry_run:
            self._index.save(self._fences.epochs(fences))
            self._each(lambda position: self._store.delete(entries[position].key), condemned)
            self._each(lambda snapshot: self._store.delete(snapshot.key), snapshots)
        return WalGarbage(
            region=self._region_id,
            boundary=boundary,
            entries=len(condemned),
            bytes=sum(entries[position].size for position in condemned) + sum(snapshot.size for snapshot in snapshots),
            fences=len(fences),
            too_young=len(below) - len(old),
            unreadable=len(unreadable),
            snapshots=len(snapshots),
            dry_run=dry_run,
        )

    def _possible_fences(self, positions: Sequence[int]) -> set[int]:
        """Return those of `positions` that may be fences and are above an entry that is younger or gone, and those that
        are gone.

        Requires: the epochs were read before. The log is listed again, since a slot may have been collected and then
        filled by a late put. A claim's fence has no rows; another program's fence may have.
        """
        entries = self._reader.listed()
        gone = {position for position in positions if position not in entries}
        # Entries above one that storage received later, which landed in a collected slot, or storage's times are not in
        # order. A position that is not in `entries` may have held one.
        times = [entries[position].modified if position in entries else inf for position in positions]
        times_and_latest = zip(positions, times, accumulate(times, max), strict=True)
        above = [position for position, modified, latest in times_and_latest if modified < latest]
        headers = zip(above, self._each(self._readable_header, above), strict=True)
        read = {at: header for at, header in headers if isinstance(header, EntryHeader)}
        rows = {at for at, header in read.items() if not header.sentinel and header.applied is not None}
        return gone | set(above) - rows

    def _readable_header(self, position: int) -> EntryHeader | Corrupt | None:
        try:
            return self._reader.header(position)
        except Corrupt as error:
            return error

    def _each(self, work: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
        return list(each(work, items, self._workers))
