"""Find the fences of a log: the first entry of each writer epoch.

A paused writer of epoch e aims at the first position that it has not filled. Epochs never decrease from one position to
the next, so the entry at that position is the first one of a later epoch. A claim puts its sentinel there before
anything else; a writer without sentinels puts its rows there.

The epochs around an entry therefore determine whether it is a fence. Its form does not: a writer's own note of a batch
without rows has the form of a sentinel and fences no writer. Its size does not either: the applied map in a sentinel
shrinks after a resize. Epoch 1 is the first of a region and has no writer to fence.

Between two entries of the same epoch no entry is a fence, so bisection finds the fences: a log of n entries and c
claims costs about c * log2(n) reads, not n.

The fences found by earlier collections are stored, so that a new process need not read every entry:

    _mem_wal/{region uuid}/fences.json
    {"fences": [[position, last position, epoch], …],     runs of fences, position and epoch rising by one
     "entry_id": "…",                                      of the last fence: proves that it is the same log
     "crc32": "8 hex digits"}                              of this object with these digits as "00000000"

The object is advisory: losing it costs only reads. A wrong one could cost a fence, so it is used only if its checksum
matches and its last fence is in the log with that entry id. Entries never change, so the entries below are then the
same too. Entries written by Lance have no entry id; each process reads a log whose fences are all Lance's again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from uuid import UUID

from memwal.wal.errors import Corrupt, WalError
from memwal.wal.layout import fences_key
from memwal.wal.records import EntryHeader
from memwal.wal.store.port import ObjectStore

Headers = Callable[[Sequence[int]], Sequence[EntryHeader | Corrupt | None]]
"""Headers of the entries at the given positions; None for a deleted entry, Corrupt for one that cannot be read."""


class Fences:
    """Finds which entries of one log are fences.

    Thread safety. One thread at a time.
    Invariants. The epoch of an entry never changes, so each is read once.
    """

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._epochs: dict[int, int] = {}

    def learn(self, epochs: Mapping[int, int]) -> None:
        """Add epochs by position that an earlier collection stored (`FenceIndex`)."""
        self._epochs |= epochs

    def epochs(self, positions: Iterable[int]) -> dict[int, int]:
        """Return the epochs of those of `positions` that were read."""
        return {position: self._epochs[position] for position in positions if position in self._epochs}

    def among(self, positions: Sequence[int]) -> tuple[set[int], set[int]]:
        """Return those of `positions` that are fences, and those that cannot be read.

        `positions`: ascending, without a gap from the lowest entry that exists, except where entries were deleted. If
        an entry cannot be read, the next readable one is a fence too if its epoch may begin there.
        Raises what `headers` raises.
        """
        self._epochs = {position: self._epochs[position] for position in positions if position in self._epochs}
        unreadable, left = set[int](), positions
        while wanted := self._undecided(left):
            without = set[int]()
            for position, header in zip(wanted, self._headers(wanted), strict=True):
                if isinstance(header, EntryHeader):
                    self._epochs[position] = header.writer_epoch
                else:
                    without.add(position)
                    if header is not None:
                        unreadable.add(position)
            left = [position for position in left if position not in without] if without else left
        known = [(0, 1), *((position, self._epochs[position]) for position in left if position in self._epochs)]
        return {here for (_, before), (here, epoch) in pairwise(known) if epoch != before}, unreadable

    def _undecided(self, positions: Sequence[int]) -> list[int]:
        """Return the positions to read next: both ends, then the middle of each stretch where the epoch changes."""
        if not positions:
            return []
        ends = [each for each in {positions[0], positions[-1]} if each not in self._epochs]
        if ends:
            return sorted(ends)
        known = [at for at, position in enumerate(positions) if position in self._epochs]
        epochs = [self._epochs[positions[at]] for at in known]
        stretches = zip(pairwise(known), pairwise(epochs), strict=True)
        return [positions[(a + b) // 2] for (a, b), (before, after) in stretches if b - a > 1 and before != after]


_NO_CHECKSUM = "0" * 8

Header = Callable[[int], EntryHeader | Corrupt | None]


class FenceIndex:
    """The stored fences of one region, as position -> writer epoch.

    Thread safety. One thread at a time; any number of processes, and the last one to save wins.
    """

    def __init__(self, store: ObjectStore, region_id: UUID, header: Header) -> None:
        self._store, self._key, self._header = store, fences_key(region_id), header
        self._saved: Mapping[int, int] = {}

    def load(self) -> Mapping[int, int]:
        """Return the fences stored for this log; {} if missing or of another log. Makes two requests.

        Raises: StoreUnavailable, StoreRefused.
        """
        self._saved = {}
        data = self._store.get(self._key)
        if data is not None and (read := _decode(data)) is not None:
            fences, entry_id = read
            epoch, last = fences[max(fences)], self._header(max(fences))
            if isinstance(last, EntryHeader) and (last.entry_id, last.writer_epoch) == (entry_id, epoch):
                self._saved = fences
        return self._saved

    def save(self, fences: Mapping[int, int]) -> None:
        """Store `fences`, unless they are stored already or the last has no entry id. Storage errors are ignored."""
        if fences == self._saved or not fences:
            return
        last = self._header(max(fences))
        if not isinstance(last, EntryHeader) or not last.entry_id:
            return
        try:
            self._store.put(self._key, _encode(fences, last.entry_id))
        except WalError:
            return
        self._saved = dict(fences)


def _encode(fences: Mapping[int, int], entry_id: str) -> bytes:
    runs: list[list[int]] = []
    for position, epoch in sorted(fences.items()):
        if runs and position == runs[-1][1] + 1 and epoch == runs[-1][2] + position - runs[-1][0]:
            runs[-1][1] = position
        else:
            runs.append([position, position, epoch])
    document = {"fences": runs, "entry_id": entry_id, "crc32": _NO_CHECKSUM}
    checksum = zlib.crc32(json.dumps(document).encode())
    return json.dumps(document | {"crc32": f"{checksum:08x}"}).encode()


def _decode(data: bytes) -> tuple[dict[int, int], str] | None:
    """Return the fences and the entry id of the last one; None if `data` is not a result of `_encode`."""
    try:
        document = json.loads(data)
        blank = json.dumps(document | {"crc32": _NO_CHECKSUM}).encode()
        if int(document["crc32"], 16) != zlib.crc32(blank) or not document["fences"]:
            return None
        runs, entry_id = document["fences"], document["entry_id"]
        return {at: epoch + at - first for first, last, epoch in runs for at in range(first, last + 1)}, entry_id
    except (ValueError, TypeError, KeyError):
        return None
