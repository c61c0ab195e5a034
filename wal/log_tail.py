"""Follow the log of a region from storage, without a claim. Each look reads only what was appended since the previous
one.

Steps of `look`. T is the last position that was read.

 1. Read the entry in slot T+1, then continue until a slot T'+1 is missing. (model: Tail!BeginLook, Tail!ReadSlot)
 2. *Then* read the newest manifest: probe the version after the known one, then read the known one, which proves that
    no version was pruned there (`wal.manifest`).
 3. If that manifest has the known `replay_after` and generation, T' is the end of the log and the look is done.
    Otherwise rows were flushed meanwhile: raise `Overtaken`, and the caller begins again. (model: Tail!FollowManifest)

Invariant. After each look, every entry above `manifest.replay_after` that was created before the look began has been
returned exactly once, by this look or an earlier one since `begin`.

Proof. Slots are filled in order, so all entries up to T' were read, and only T'+1 is in question, which was missing at
some moment t of the look. If it was filled before t, it was collected before t. Only entries at or below the
`replay_after` of an existing manifest are collected, and `replay_after` never decreases. The manifest of step 2 was the
newest at a moment after t, and its `replay_after` is at most T'. Therefore T'+1 was not filled before t, nor was any
slot behind it.

A takeover, a commit, a prune of the manifest and a collection do not affect this: they fill no slot but the next one,
and move `replay_after` only with a flush. A sentinel is an entry without rows, and ends open batches as in replay.

On an unchanged log, `look` makes three requests, each for one key. Fewer would not be sound. A put writes only its
entry, so each region's slot must be read. A missing slot alone does not prove that no entry was appended: it may have
been filled, flushed and collected. A listing would show both at once, but it is not atomic and may lag behind the
newest object. The manifest shows what was flushed, but its slots may have been pruned as well; hence its second
request. An object that every collection changes would save only that one.
"""

from __future__ import annotations

from contextlib import closing
from uuid import UUID

from memwal.wal.clock import Clock, SystemClock
from memwal.wal.codec.port import EntryCodec
from memwal.wal.entry_reader import EntryReader
from memwal.wal.errors import Corrupt, Overtaken
from memwal.wal.layout import manifest_prefix
from memwal.wal.manifest import ManifestStore, RegionManifest
from memwal.wal.records import Entry
from memwal.wal.replay import BatchAssembler, find_tip, probe_tip, visible
from memwal.wal.retries import WalOptions, with_retried_reads
from memwal.wal.store.port import ObjectStore

_ONE_BY_ONE = 4
"""New entries that are read one by one. If there are more, the end is searched and they are read concurrently."""


class LogTail:
    """The entries of one region above a manifest's `replay_after`, as they are appended.

    Thread safety. One thread at a time. Writes nothing and fences no writer.
    Invariants. See the module docstring. After an error, call `begin` before the next look.
    Errors. Both methods raise Overtaken (begin again), Corrupt (a hole, damage), StoreUnavailable, StoreRefused.
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
        """`codec`: returns entries in the caller's row schema. `options.readers`: entries read concurrently."""
        self._options = options or WalOptions()
        self._store = with_retried_reads(store, clock or SystemClock(), self._options)
        self._manifests = ManifestStore(store, region_id, clock=clock, options=self._options)
        self._region_id, self._codec = region_id, codec
        self._alone = EntryReader(self._store, region_id, codec)
        self._assembler = BatchAssembler()
        self.manifest: RegionManifest | None = None
        """The newest manifest as of the last look; None before `begin`, and in a region that was never claimed."""
        self.position = 0
        """The last position that was read, or `replay_after` if no entry is behind it."""

    def begin(self, manifest: RegionManifest | None = None) -> list[Entry]:
        """Read the newest manifest, and return the entries behind its `replay_after` as `wal.replay.replay` does.

        `manifest`: an existing version at which the search for the newest one starts.
        (model: Tail!ReadManifest, Tail!ReadEntry, Tail!CheckNotFlushed)
        """
        self.manifest = self._manifests.latest(manifest)
        if self.manifest is None:
            return []
        self._assembler = BatchAssembler()
        self._alone.log_id = self.manifest.log_id
        after = self.manifest.replay_after
        tip = find_tip(self._store, self._region_id, self._codec.suffix, after, self._options.readers)
        entries = self._read(after, tip)
        newest = self._newest(self.manifest, tip)
        if newest.replay_after > tip:
            raise Overtaken(self._region_id, tip + 1, newest.replay_after, newest.current_generation)
        self.position = tip  # during a flush the older manifest is kept; the next look detects that
        return entries

    def look(self) -> list[Entry]:
        """Return the entries that became visible since the previous look. `begin` must have found a manifest."""
        if self.manifest is None:
            raise ValueError("look() before begin() found a manifest")
        entries, position = list[Entry](), self.position
        for _ in range(_ONE_BY_ONE):
            entry = self._alone.read(position + 1)
            if entry is None:
                break
            entries += self._assembler.add(entry)
            position += 1
        else:
            tip = probe_tip(self._store, self._region_id, self._codec.suffix, position)
            entries += self._read(position, tip)
            position = tip
        newest, known = self._newest(self.manifest, position), self.manifest
        if _read_from(newest) != _read_from(known):
            raise Overtaken(self._region_id, position + 1, newest.replay_after, newest.current_generation)
        self.manifest, self.position = newest, position
        return entries

    def _read(self, after: int, tip: int) -> list[Entry]:
        readers = self._options.readers if tip - after > 1 else 1
        reader = EntryReader(self._store, self._region_id, self._codec, readers, log_id=self._alone.log_id)
        with closing(visible(reader, after, tip, assembler=self._assembler)) as entries:
            return list(entries)

    def _newest(self, known: RegionManifest, position: int) -> RegionManifest:
        newest = self._manifests.latest(known)
        if newest is None:
            raise Corrupt(f"{manifest_prefix(self._region_id)}: empty, though position {position} was read; restore it")
        return newest


def _read_from(manifest: RegionManifest) -> tuple[int, int, str]:
    """Return the start position, generation and log id of readers that use `manifest`."""
    return manifest.replay_after, manifest.current_generation, manifest.log_id
