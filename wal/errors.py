"""Errors of the log.

Each message is one line: the problem with its numbers and names, and the remedy. What a caller must do depends on the
class, so callers match on the class and never on the text.
"""

from __future__ import annotations

import re
from uuid import UUID

from memwal.wal.layout import named

_SOURCE_LOCATION = re.compile(r", /\S*\.rs:\d")


class WalError(Exception):
    """Base of every error that this package raises on purpose."""


class _TwoEpochs(WalError):
    """An error about a region and two numbers of it: this caller's, and the newer one on storage."""

    def __init__(self, region_id: UUID, ours: int, theirs: int) -> None:
        super().__init__(region_id, ours, theirs)
        self.region_id = region_id
        self.ours = ours
        self.theirs = theirs


class Fenced(_TwoEpochs):
    """Another writer claimed the region with a higher epoch; this writer must stop.

    Invariants. `theirs > ours`. Everything that this writer acknowledged is kept: the newer writer replays it.
    """

    def __str__(self) -> str:
        return (
            f"{named(self.region_id)}: writer epoch {self.ours} was fenced by epoch {self.theirs}; "
            "another writer owns the region now: stop this one, or open the table again to take the region back"
        )


class Overtaken(WalError):
    """A reader was too slow: entries that it had not read yet were flushed and collected.

    Read the region manifest again: the rows of these entries are in its SSTs below generation `generation`, and the log
    continues after position `replay_after`. Nothing is lost.
    """

    def __init__(self, region_id: UUID, position: int, replay_after: int, generation: int) -> None:
        super().__init__(region_id, position, replay_after, generation)
        self.region_id = region_id
        self.position = position
        self.replay_after = replay_after
        self.generation = generation

    def __str__(self) -> str:
        return (
            f"{named(self.region_id)}: WAL position {self.position} was flushed and collected before it was read; read "
            f"the SSTs below generation {self.generation}, then the log after position {self.replay_after}"
        )


class Poisoned(WalError):
    """The writer stopped itself after an earlier storage failure; open the region again to recover."""


class OutcomeUnknown(WalError):
    """Storage gave no answer: the write may or may not exist, now or later. Never report it as success or failure."""


class FencedAfterWrite(_TwoEpochs, OutcomeUnknown):
    """An entry was or may have been written, and then storage showed a newer writer.

    The newer writer replays the entry only if its sentinel is behind it. `theirs > ours`.
    """

    @property
    def fence(self) -> Fenced:
        """The error of every other call of the older writer."""
        return Fenced(self.region_id, self.ours, self.theirs)

    def __str__(self) -> str:
        return (
            f"{named(self.region_id)}: an entry may be written, but writer epoch {self.ours} was fenced by epoch "
            f"{self.theirs} meanwhile, which may have its rows or not"
        )


class Corrupt(WalError):
    """Storage contradicts the protocol. Stop and investigate; nothing is skipped or repaired silently."""


class AnotherLog(Corrupt):
    """An entry or manifest belongs to the log of another table, which was deleted and recreated at the same place."""

    def __init__(self, where: str, theirs: str, ours: str) -> None:
        """`where`: the object's key. `theirs`: the log id of the object. `ours`: the log id of the newest manifest."""
        super().__init__(
            f"{where}: of another log ({theirs}, not {ours}). Either this table was deleted and made anew while a "
            "writer of the deleted one was running, which wrote it: then end all processes that write to the table, "
            "delete this object, and open the table again; or parts of two backups are mixed"
        )


class StoreUnavailable(WalError):
    """Storage is unreachable or full, and nothing of this request landed. Retry."""


class StoreRefused(WalError):
    """Storage refuses the configuration: no permission, read-only, no conditional writes. Retrying cannot help."""


class Sealed(WalError):
    """The region refuses new claims: the table is being resized, or a resize to fewer regions dropped it."""

    reason = "resized"


class Resized(_TwoEpochs):
    """The region belongs to a newer routing of the table than the caller's; nothing was written.

    The table has a different number of regions now: read the base table again, and route by the new number.
    """

    reason = "resized"

    def __str__(self) -> str:
        return (
            f"{named(self.region_id)}: routing version {self.ours} was replaced by {self.theirs}; the table was "
            "resized meanwhile: open it again"
        )


class ConcurrentUse(WalError):
    """Two threads concurrently used an object that allows only one thread at a time."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class's name if the message is empty.

    Removes the source location that Lance appends: `…, /build/lance/rust/lance-file/src/reader.rs:797:24`.
    """
    lines = str(error).strip().splitlines()
    return _SOURCE_LOCATION.split(lines[0])[0] if lines else type(error).__name__
