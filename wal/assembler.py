"""Determine when rows become visible.

Rows of a batch of several entries become visible together, when the closing entry is durable: its parts are returned
directly before that entry, even if other entries lie between. A batch that is not closed was never acknowledged and is
dropped. An entry of a newer epoch ends all open batches, because the writer that could have closed them is fenced.
"""

from __future__ import annotations

from memwal.wal.errors import Corrupt
from memwal.wal.records import Entry

_BatchKey = tuple[str, int, str]


class BatchAssembler:
    """Takes a log's entries in the order of their positions, and returns them in the order of visibility.

    Thread safety. One thread.
    Invariants. (1) Sentinels are not returned. (2) Epochs never decrease. (3) Only parts of open batches are held back.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._open: dict[_BatchKey, list[Entry]] = {}

    def add(self, entry: Entry) -> list[Entry]:
        """Return the entries whose rows become visible with `entry`, in order.

        Raises Corrupt if its epoch is below an earlier entry's: a fenced writer cannot append.
        """
        epoch = entry.header.writer_epoch
        if epoch < self._epoch:
            raise Corrupt(f"writer epoch {epoch} at position {entry.position} follows epoch {self._epoch}")
        if epoch > self._epoch:
            self._epoch = epoch
            self._open.clear()
        return [] if entry.header.sentinel else self._closed_by(entry)

    def _closed_by(self, entry: Entry) -> list[Entry]:
        part = entry.header.part
        if part is None:
            return [entry]
        batch = (part.producer, part.sequence, part.attempt)
        if part.closes:
            parts = self._open.pop(batch, [])
            # The batch is applied now: other attempts at it were abandoned, and none can close it again.
            self._open = {each: held for each, held in self._open.items() if each[:2] != batch[:2]}
            return [*parts, entry]
        self._open.setdefault(batch, []).append(entry)
        return []
