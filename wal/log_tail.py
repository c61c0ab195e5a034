"""Following the log of a region from storage, without a claim: a look reads only what came since the look before.

A look, in steps. T is the last position that was read.

 1. Read the entry in slot T+1, then on until a slot T'+1 is missing. (model: Tail!BeginLook, Tail!ReadSlot)
 2. *Then* ask for the newest manifest: probe the version behind the known one, then read the known one, which proves
    that no version was pruned there (`wal.manifest`).
 3. If that manifest has the known `replay_after` and generation, T' is the end of the log and the look is done.
    Otherwise rows were flushed meanwhile: `Overtaken`, and the caller begins anew. (model: Tail!FollowManifest)

Invariant. After a look, every entry above `manifest.replay_after` that was created before the look began was returned,
once, by this look or an earlier one since `begin`.

Proof. Slots are filled one after the other, so the entries read are all up to T', and only T'+1 is in question, which
was missing at some moment t of the look. If it was filled before t, it was collected before t; only entries at or below
the `replay_after` of a manifest that is written already are collected, and `replay_after` never goes back. The manifest
of step 2 was the newest at a moment after t, and its `replay_after` is at most T'. So T'+1 was not filled before t, nor
was any slot behind it.

A take-over, a commit, a prune of the manifest, and a collection change nothing in this: they fill no slot but the next
one, and move `replay_after` only with a flush. A sentinel is an entry without rows, and ends open batches as in replay.

Requests of an unchanged look: three, each for one key. Fewer would not be sound. A put writes its entry and nothing
else, so the slot has to be asked for, in each region. A missing slot alone does not prove that no entry came: it may
have been filled, flushed and collected. A listing would show both at once, but it is no single moment, and may lag
behind the newest object. The manifest shows what was flushed, but its slots may have been pruned as well, hence its
second request. An object that every collection changes would save that one, not the first two.
"""

from __future__ import annotations

from contextlib import closing
from uuid import UUID

from memwal.wal.assembler import BatchAssembler
from memwal.wal.clock import Clock, SystemClock
from memwal.wal.codec.port import EntryCodec
from memwal.wal.entry_reader import EntryReader
from memwal.wal.errors import Corrupt, Overtaken
from memwal.wal.layout import manifest_prefix
from memwal.wal.manifest import ManifestStore, RegionManifest
from memwal.wal.options import WalOptions
from memwal.wal.records import Entry
from memwal.wal.replay import find_tip, probe_tip, visible
from memwal.wal.retries import with_retried_reads
from memwal.wal.store.port import ObjectStore

_ONE_BY_ONE = 4
"""New entries read one after the other; if there are more, the end is searched and they are read several at once."""


class LogTail:
    """The entries of one region above a manifest's `replay_after`, as they come.

    Thread safety. One thread at a time. Writes nothing and fences no writer.
    Invariants. See the module's text. After an error, `begin` before the next look.
    Errors. Both methods raise Overtaken (begin anew), Corrupt (a hole, damage), StoreUnavailable, StoreRefused.
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
        """`codec`: returns entries in the caller's row schema. `options.readers`: entries read at once."""
        self._options = options or WalOptions()
        self._store = with_retried_reads(store, clock or SystemClock(), self._options)
        self._manifests = ManifestStore(store, region_id, clock=clock, options=self._options)
        self._region_id, self._codec = region_id, codec
        self._alone = EntryReader(self._store, region_id, codec)
        self._assembler = BatchAssembler()
        self.manifest: RegionManifest | None = None
        """The newest manifest as of the last look; None before `begin`, and in a region that was never claimed."""
        self.position = 0
        """The last position that was read, or `replay_after` where no entry is behind it."""

    def begin(self, manifest: RegionManifest | None = None) -> list[Entry]:
        """Read the newest manifest, and return the entries behind its `replay_after` as `wal.replay.replay` does.
        (model: Tail!ReadManifest, Tail!ReadEntry, Tail!CheckNotFlushed)

        `manifest`: a version that exists, where the search for the newest one starts.
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
        self.position = tip  # beside a flush the older manifest stays, which the next look finds out
        return entries

    def look(self) -> list[Entry]:
        """Return the entries that became visible since the look before. `begin` must have found a manifest."""
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
    """Where readers begin by `manifest`, and in which log."""
    return manifest.replay_after, manifest.current_generation, manifest.log_id
