"""Implement the reads of a table in this process, over its own memtables or over storage alone.

A daemon that owns some of the regions reads only these. A client combines the answers of several daemons: each row
belongs to one region, and each region has one owner.
"""

from __future__ import annotations

import datetime
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal import flush
from memwal.ingest.caller import expect_waiting
from memwal.ingest.engine.api.explanation import Watch
from memwal.ingest.engine.api.keys import normalise_keys
from memwal.ingest.engine.api.reads import Level, Reads, check_level
from memwal.ingest.engine.read.levels import CaptureOvertaken, RegionView, Reshaped
from memwal.ingest.engine.read.reader import Captured, Reader
from memwal.ingest.engine.read.traced import Trace
from memwal.ingest.errors import Invalid, Unavailable, translate_errors
from memwal.wal.panics import RustPanic, panics_as_errors

ATTEMPTS = 20
"""Attempts per read. A commit takes much longer than a capture, so a second attempt is rare and a third was never
observed. Columns change rarely too, because people change them.
"""


class LevelReads(Reads):
    """Reads over captured levels."""

    _buckets: Collection[int] | None = None
    """Buckets of the base rows to read; None: all."""
    _routing: int | None = None
    """Version of the routing of `_buckets`."""

    def __init__(self, base: flush.BaseTable, reader: Reader) -> None:
        """`base`: has the key and buckets, and the first columns and indexes. Every read opens the newest version."""
        self.base = base
        self.schema = base.schema
        self.key = base.key
        self._reader = reader
        self._opening, self._opened = threading.Lock(), None  # type: threading.Lock, VersionReads | None

    @property
    def base_version(self) -> int:
        """The base table version that was opened last. Makes no request to storage."""
        return self._reader.opened.version

    @translate_errors
    def ask_storage(self) -> None:
        """Make one request to storage. Raises: its error, as Unavailable or Invalid."""
        self._reader.ask_storage()

    @translate_errors
    def list_indexes(self) -> list[dict[str, Any]]:
        """See `Operations.list_indexes`."""
        return flush.list_indexes(self._reader.base())

    @translate_errors
    def list_versions(self) -> list[dict[str, Any]]:
        """See `Operations.list_versions`."""
        found: list[dict[str, Any]] = self._reader.base().dataset.versions()  # type: ignore[assignment]
        return [{"version": each["version"], "timestamp": each["timestamp"].astimezone(datetime.UTC)} for each in found]

    @translate_errors
    def list_tags(self) -> dict[str, int]:
        """See `Operations.list_tags`."""
        tags = flush.tags_of(self._reader.base().dataset)
        return {name: tag["version"] for name, tag in tags.items() if tag.get("branch") is None}

    @translate_errors
    def at(self, version: int) -> VersionReads:
        """Return reads of a version of the base table. Raises: Invalid if it is not kept."""
        with self._opening:
            if self._opened is None or self._opened.base.version != version:
                self._opened = VersionReads(self._reader.at(version))
            return self._opened

    @property
    def _location(self) -> str:
        return self.base.uri

    @property
    def _described(self) -> str:
        return f"{self.base.uri}, {self.base.buckets} regions"

    @abstractmethod
    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        """Capture the levels above the base table, newest first; the reader opens the base table only afterwards.

        `keys`: the requested keys, so that regions without these keys may be left out; None: all rows. `again`: a
        commit, possibly of another process, overtook the previous capture.
        """

    def follow(self) -> None:
        """Adopt the columns of the newest base version, after a read found that they changed."""
        self.base = self._reader.base()
        self.schema = self.base.schema

    def _answer(self, read: str, level: str, /, *, explain: Watch | None = None, **request: Any) -> Any:
        """Return the reader's answer over views of `level`.

        The views are captured again if a commit overtook them, and once if files of the base version could not be read,
        because another program may have removed that version. A filter that fails on a row is Invalid at every level.
        """
        if (version := request.pop("at", None)) is not None:
            return self.at(version)._answer(read, level, explain=explain, **request)  # noqa: SLF001
        checked, failed_at = check_level(level), -1
        trace = None if explain is None else Trace(explain.clock)
        for attempt in range(ATTEMPTS):
            with suppress(CaptureOvertaken):
                try:
                    capture = partial(self._views, checked, request.get("keys"), again=attempt > 0)
                    views = capture() if trace is None else trace.captured(capture)
                    expect_waiting()
                    levels = Captured(views, self._buckets, trace, self._routing)
                    with panics_as_errors:
                        answer = getattr(self._reader, read)(levels, **request)
                    if explain is not None and trace is not None:
                        explain.add(trace.part)
                    return answer
                except Reshaped:
                    self.follow()
                except (pa.ArrowInvalid, OSError, RustPanic):
                    self._reader.ask_storage()
                    if failed_at == self._reader.opened.version:
                        self._reader.raise_filter_error(request.get("filter"))
                        raise
                    failed_at = self._reader.opened.version
        raise Unavailable(f"{ATTEMPTS} commits in a row overtook this read; read again")


class VersionReads(LevelReads):
    """Reads of one version of the base table. Thread safety. Any thread. Errors. Only `ingest.errors` kinds."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader.opened, reader)

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        del level, keys, again
        return []


def regions_of(base: flush.BaseTable, keys: Any) -> Iterator[UUID]:
    """Yield the regions that can have rows of `keys` (any form that `get` accepts); None: the regions of all rows.

    Uses the routing of `base`, and only when the first region is requested: a read of the base table alone needs none.
    """
    regions = base.regions
    if keys is not None and len(regions) > 1:
        # The reader handles keys that do not fit: it rejects them, or finds that their columns have new names.
        with suppress(Invalid):
            buckets = base.route(normalise_keys(keys, base.schema, base.key))
            regions = tuple(regions[bucket] for bucket in np.flatnonzero(np.bincount(buckets)))
    yield from regions
