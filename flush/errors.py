"""Errors of flushing and committing.

Each is one line: what is wrong, with the numbers and names, and how to mend it. What a caller must do differs
per class, so callers match on the class and never on the text. `wal.errors.Corrupt` is raised from here too,
where what is on storage contradicts the protocol (a published SST that is missing, a gap in the generations).
"""

from __future__ import annotations


class FlushError(Exception):
    """Base of every error this package raises on purpose."""


class NotALanceTable(FlushError):
    """The path holds nothing, or something that is no Lance table. Correct the path."""

    @classmethod
    def at(cls, uri: str, version: int | None = None) -> NotALanceTable:
        """Of what lies at `uri`, or of one `version` of it."""
        which = "" if version is None else f" of version {version}"
        return cls(f"{uri}: no Lance table{which} is there; correct table.uri")


class TableExists(FlushError):
    """A table is already there; open it instead of creating it."""


class NotInitialised(FlushError):
    """A Lance table, but not set up for ingestion by us: `memwal init` sets it up."""


class UnsupportedTable(FlushError):
    """A Lance table this version cannot ingest into; the message says why and what to do."""


class SstInvalid(FlushError):
    """An SST does not hold what was written; it was not published. The flush may be tried again."""


class InvalidFileOptions(FlushError, ValueError):
    """A setting of the file writer that it cannot follow: correct the setting."""


class FlushOutOfOrder(FlushError):
    """A generation was flushed before the one below it, or twice: a fault of the caller, nothing was
    published.
    """


class InvalidResize(FlushError):
    """A table cannot get so many regions; the message says why and what to do. Nothing was written."""


class CommitConflict(FlushError):
    """Others kept committing to the base table; nothing is lost, commit again."""


class CountMismatch(FlushError):
    """The base table holds a key twice, or did not change by the rows that were committed. The message says whether
    anything was written. Stop and look.
    """


class DoubledKey(CountMismatch):
    """A key stands twice in the base table, by another program. Its region is held back where it is to be written; no
    row was written over it.
    """
