"""Following a region's log from outside.

A tailer reads what the writer appends, entry by entry, in the order in which the rows became visible. It claims
nothing, writes nothing and fences nobody; any number of them, in any process, may follow one region.

The next position being absent has three meanings, and which one it is the manifest says:

 * nothing was appended yet: `last_seen` and `replay_after` lie before it, and nothing lies behind it;
 * its rows were flushed, and the entry was collected (`wal.garbage`): `replay_after` has reached it. The tailer was
   overtaken: what it missed is in the SSTs, and it is to go on after `replay_after`;
 * it is lost: it existed, or a later entry exists, and its rows are in no SST. Corrupt.

Looking at the manifest costs more than looking for the entry, and the first meaning is the usual one; so the manifest
is read only when nothing has come for a while, and then once in a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from uuid import UUID

from memwal.wal.assembler import BatchAssembler
from memwal.wal.clock import Clock
from memwal.wal.codec.port import EntryCodec
from memwal.wal.entry_reader import EntryReader
from memwal.wal.errors import Corrupt, WalError
from memwal.wal.manifest import ManifestStore
from memwal.wal.options import WalOptions
from memwal.wal.patience import patient
from memwal.wal.records import Entry
from memwal.wal.replay import missing
from memwal.wal.store.port import ObjectStore

_MANIFEST_EVERY = 5.0
"""Seconds without news after which the manifest is read, and between two such reads."""
_MOST_PER_POLL = 256
"""Entries one poll reads: what is behind comes in pieces that fit into memory."""


class WalTailer:
    """Reads one region's log as it grows, beside its writers, through takeovers.

    Thread safety. One thread.
    Durability. What is given is on storage and was, or will be, acknowledged or replayed.
    Invariants. (1) Every row visible after the first position is given once, in the order in which rows became
    visible; parts of a batch only when it is closed, never those of a batch that a takeover ended. (2) Nothing is
    written. (3) A poll that finds nothing makes one store call, except when it looks at the manifest.
    """

    def __init__(
        self,
        store: ObjectStore,
        region_id: UUID,
        codec: EntryCodec,
        after: int,
        *,
        clock: Clock,
        options: WalOptions | None = None,
    ) -> None:
        """`after`: the newest position already known, such as a manifest's `replay_after`; 0 for the beginning."""
        options = options or WalOptions()
        store = patient(store, clock, options)
        self._reader = EntryReader(store, region_id, codec, options.readers)
        self._manifests = ManifestStore(store, region_id, clock=clock, options=options)
        self._clock = clock
        self._assembler = BatchAssembler()
        self._quiet_since: float | None = None
        self.position = after
        """Newest position read."""

    @property
    def restart_after(self) -> int:
        """Where another tailer goes on without missing a row: before the parts held back. It may give rows again."""
        held_back = self._assembler.first_held_back
        return self.position if held_back is None else held_back - 1

    def poll(self) -> list[Entry]:
        """Entries that became visible since the last poll, in that order; none where nothing did. Never waits for any.

        Reads at most 256 entries. What stands before an error is given first; the next poll raises it.
        Raises Overtaken, saying where to go on; Corrupt, naming the key; StoreUnavailable, StoreRefused. Position and
        what is held back stay as they were then, so that the call may be made again.
        """
        before, visible = self.position, list[Entry]()
        try:
            for entry in self._next_entries():
                visible += self._take(entry)
        except WalError:
            if self.position == before:
                raise
        if self.position > before:
            self._quiet_since = self._clock.monotonic()
        return visible

    def follow(self, interval: float, stop: Callable[[], bool] = lambda: False) -> Iterator[Entry]:
        """Entries as they become visible, until `stop` says so; polls every `interval` seconds while there are none.

        Raises as `poll`.
        """
        while not stop():
            before = self.position
            yield from self.poll()
            if self.position == before:
                self._clock.sleep(interval)

    def _next_entries(self) -> Iterator[Entry]:
        """Entries from the next position to the first that is absent; the first alone, so that nothing new costs one
        read however many readers there are."""
        first = self._reader.read(self.position + 1) or self._found_after_all()
        if first is None:
            return
        positions = range(first.position + 1, first.position + _MOST_PER_POLL)
        with closing(self._reader.each(positions)) as following:
            yield first
            for entry in following:
                if entry is None:
                    return
                yield entry

    def _take(self, entry: Entry) -> list[Entry]:
        try:
            visible = self._assembler.add(entry)
        except Corrupt as error:
            raise Corrupt(f"{self._reader.key(entry.position)}: {error}") from error
        self.position = entry.position
        return visible

    def _found_after_all(self) -> Entry | None:
        """The next entry, absent a moment ago; None where it is not there yet. Raises Overtaken, Corrupt."""
        now = self._clock.monotonic()
        if self._quiet_since is not None and now - self._quiet_since < _MANIFEST_EVERY:
            return None
        self._quiet_since = now
        position = self.position + 1
        newest = self._manifests.latest()
        existed = newest is not None and position <= max(newest.last_seen, newest.replay_after)
        if not existed and not self._reader.store.exists(self._reader.key(position + 1)):
            return None
        # It may have been appended between the two looks.
        return self._reader.read(position) or missing(self._reader, position)
