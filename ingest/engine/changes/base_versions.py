"""Find the version of the base table that holds exactly a region's log up to some position.

A version records the highest committed generation of each region, but it may hold more: a commit deletes rows in a
separate version, before the version that records its progress (`flush.commits.committer`), and may crash in between. A
version is *exact* for a region if it holds all rows of the region's committed generations and nothing of later ones.
This is certain only if one of these rules applies:

 1. It is the first version with this progress of the region. A commit of later generations reads this progress before
    its first write.
 2. Nothing above the committed generation was published when it was opened: a commit takes only published generations.
 3. It is older than the first entry above the committed generations, by an hour and by the clock of the storage. Used
    only if rule 1 cannot be checked, because the previous version was cleaned up: the region was idle for days.

The routing counts as part of the progress: after a resize a region has other keys, and the version of the switch is the
first one that holds the rows which other regions had of these keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from uuid import UUID

from memwal.flush import BaseTable, FlushError, NotALanceTable
from memwal.flush.base.manifest import manifest_version
from memwal.wal import Corrupt, ObjectStore

Progress = tuple[int, int]
"""Routing version and committed generation of a region; both never decrease from one version to the next."""
_NOT_SET_UP: Progress = (0, 0)
_APART = 3600.0
"""Seconds of rule 3."""


class VersionGone(Exception):
    """A version was cleaned up after it was listed: list again. Never leaves this package."""


class BaseVersions:
    """The versions of a base table on storage at the time of construction.

    Thread safety. One thread. Errors. All methods raise VersionGone, Corrupt, StoreUnavailable, StoreRefused.
    """

    def __init__(self, newest: BaseTable, store: ObjectStore) -> None:
        self.newest = newest
        self._written = {
            version: info.modified
            for info in store.describe("_versions/")
            if (version := manifest_version(info.key)) is not None and version <= newest.version
        }
        self._numbers = sorted(self._written)
        self._views: dict[int, BaseTable | None] = {newest.version: newest}

    def exact(
        self, region: UUID, routing: int, most: int, begun_after: Callable[[int], float | None]
    ) -> BaseTable | None:
        """Return the newest exact version of `routing` with at most generation `most` of `region` committed.

        `begun_after`: returns when the first entry above a generation was written, in seconds by the storage's clock;
        None if unknown. Returns None if no version is certain to be exact.
        """
        last = bisect_right(self._numbers, (routing, most), key=lambda number: self._progress(number, region)) - 1
        if last < 0 or (held := self._progress(self._numbers[last], region))[0] != routing:
            return None
        first = bisect_left(self._numbers, held, key=lambda number: self._progress(number, region))
        if self._is_first(first):
            return self._view(self._numbers[first])
        began = begun_after(held[1])
        if began is None:
            return None
        older = [number for number in self._numbers[first : last + 1] if self._written[number] <= began - _APART]
        return self._view(older[-1]) if older else None

    def first_exact(self, region: UUID, routing: int, least: int) -> BaseTable | None:
        """Return the oldest version that is exact by rule 1, with at least generation `least` committed."""
        at = bisect_left(self._numbers, (routing, least), key=lambda number: self._progress(number, region))
        if at < len(self._numbers) and not self._is_first(at):
            held = self._progress(self._numbers[at], region)
            at = bisect_right(self._numbers, held, key=lambda number: self._progress(number, region))
        if at == len(self._numbers) or self._progress(self._numbers[at], region)[0] != routing:
            return None
        return self._view(self._numbers[at])

    def _is_first(self, at: int) -> bool:
        """Return whether the version before the one at index `at` is kept, or never existed."""
        number = self._numbers[at]
        return number == 1 or (at > 0 and self._numbers[at - 1] == number - 1)

    def _progress(self, number: int, region: UUID) -> Progress:
        view = self._view(number)
        return _NOT_SET_UP if view is None else (view.routing_version, view.committed.get(region, 0))

    def _view(self, number: int) -> BaseTable | None:
        """Return the version; None for one from before the table was set up."""
        if number not in self._views:
            newest = self.newest
            try:
                self._views[number] = BaseTable.open(newest.uri, newest.storage_options, number)
            except (NotALanceTable, Corrupt) as error:
                raise VersionGone(f"{newest.uri}: version {number}") from error
            except FlushError:
                self._views[number] = None
        return self._views[number]
