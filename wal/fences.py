"""Find the fences of a log: the first entry of each writer epoch.

A paused writer of epoch e aims at the first position that it has not filled. Epochs never decrease from one position to
the next, so the entry at that position is the first one of a later epoch. A claim puts its sentinel there before
anything else; a writer without sentinels puts its rows there.

The epochs around an entry therefore determine whether it is a fence. Its form does not: a writer's own note of a batch
without rows has the form of a sentinel and fences no writer. Its size does not either: the applied map in a sentinel
shrinks after a resize. Epoch 1 is the first of a region and has no writer to fence.

Between two entries of the same epoch no entry is a fence, so bisection finds the fences: a log of n entries and c
claims costs about c * log2(n) reads, not n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from memwal.wal.errors import Corrupt
from memwal.wal.records import EntryHeader

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
        """Add epochs by position that an earlier collection read; see `wal.fence_index`."""
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
