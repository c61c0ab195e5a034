"""The reads of a table whose levels this process sees: its own memtables, or what is on storage.

The reads of some regions of a table: the answers of a daemon that shares the table with others.

Whoever asks several daemons puts their answers together: each row is of one region, and each region has one owner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import pyarrow as pa

from memwal import flush
from memwal.ingest.api.reads import Level, Reads, check_level
from memwal.ingest.errors import Unavailable, translate_errors
from memwal.ingest.read.levels import OverTaken, RegionView, Reshaped
from memwal.ingest.read.reader import Reader
from memwal.wal.panics import RustPanic, panics_as_errors

ATTEMPTS = 20
"""A commit takes much longer than a capture, so a second attempt is rare and a third has not been seen. Columns are
changed by hand."""


class LevelReads(Reads):
    """Reads over captured levels."""

    _buckets: Collection[int] | None = None
    """Of the base table only rows of these are read; None: all."""

    def __init__(self, base: flush.BaseTable, reader: Reader) -> None:
        """`base`: key and buckets are taken from it, columns and indexes until they change; every read opens the newest
        version.
        """
        self.base = base
        self.schema = base.schema
        self.key = base.key
        self._reader = reader

    @property
    def base_version(self) -> int:
        """The version of the base table that was opened last. Asks no storage."""
        return self._reader.version

    @translate_errors
    def ask_storage(self) -> None:
        """One request to storage. Raises: Unavailable, Invalid: what it has to say."""
        self._reader.ask_storage()

    @abstractmethod
    def _views(self, level: Level, *, again: bool) -> list[RegionView]:
        """Capture the levels above the base, newest first; the reader opens the base only after this. `again`: a commit
        overtook the capture before, maybe somebody else's."""

    def follow(self) -> None:
        """Take over the columns of the newest base version, after a read met other ones."""
        self.base = self._reader.base()
        self.schema = self.base.schema

    def _answer(self, read: str, level: str, /, **request: Any) -> Any:
        """The reader's answer over views of `level`, captured again when a commit overtook them, and once when files of
        the base version could not be read: another program may have cleaned that version up. A filter that fails over
        a row is the caller's mistake at every level.
        """
        checked, failed_at = check_level(level), -1
        for attempt in range(ATTEMPTS):
            with suppress(OverTaken):
                try:
                    views = self._views(checked, again=attempt > 0)
                    with panics_as_errors:
                        return getattr(self._reader, read)(views, buckets=self._buckets, **request)
                except Reshaped:
                    self.follow()
                except (pa.ArrowInvalid, OSError, RustPanic):
                    self._reader.ask_storage()
                    if failed_at == self._reader.version:
                        self._reader.blame(request.get("filter"))
                        raise
                    failed_at = self._reader.version
        raise Unavailable(f"{ATTEMPTS} commits overtook this read one after the other; read again")
