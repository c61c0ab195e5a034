"""Errors of flushing and committing.

Each message is one line: the problem, with numbers and names, and the remedy. Each class requires a different action of
the caller, so callers match on the class and never on the text. This package also raises `wal.errors.Corrupt`, if
storage contradicts the protocol (a missing published SST, a gap in the generations).
"""

from __future__ import annotations


class FlushError(Exception):
    """Base of every error this package raises on purpose."""


class NotALanceTable(FlushError):
    """The path is empty, or holds something other than a Lance table. Correct the path."""

    @classmethod
    def at(cls, uri: str, version: int | None = None) -> NotALanceTable:
        """Return the error for `uri`, or for one `version` of the table there."""
        which = "" if version is None else f" of version {version}"
        return cls(f"{uri}: no Lance table{which} is there; correct table.uri")


class TableExists(FlushError):
    """The table exists already; open it instead of creating it."""


class NotInitialised(FlushError):
    """The Lance table is not set up for ingestion by memwal: `memwal init` sets it up."""


class UnsupportedTable(FlushError):
    """This version of memwal cannot ingest into the Lance table; the message has the reason and the remedy."""


class SstInvalid(FlushError):
    """An SST does not hold the rows that were written; it was not published. Flush again."""


class InvalidFileOptions(FlushError, ValueError):
    """A setting of the file writer is not valid: correct the setting."""


class FlushOutOfOrder(FlushError):
    """A generation was flushed before the one below it, or twice: a bug of the caller. Nothing was published."""


class InvalidResize(FlushError):
    """The table cannot get this number of regions; the message has the reason. Nothing was written."""


class InvalidBackup(FlushError):
    """A backup or restore is not possible with these arguments; the message has the reason and the remedy."""


class BackupOvertaken(FlushError):
    """Other writers kept changing the table while its backup began; nothing is lost, back it up again."""


class CommitConflict(FlushError):
    """Other writers kept committing to the base table; nothing is lost, commit again."""


class LoadEnded(FlushError):
    """Another process ended an attempt at a load, because its note was no longer renewed.

    Nothing was loaded; begin another attempt.
    """


class CountMismatch(FlushError):
    """The base table holds a key twice, or did not change by the rows that were committed.

    The message states whether anything was written. Stop and investigate.
    """


class DoubledKey(CountMismatch):
    """A key has two rows in the base table because of another program.

    If a commit would write the key, its region is held back; no row was written over it.
    """
