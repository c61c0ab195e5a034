"""The reads of some of a table's regions, for clients that put the answers of several owners together."""

from __future__ import annotations

from collections.abc import Callable, Collection

from memwal.flush import BaseTable
from memwal.ingest.api.reads import Level
from memwal.ingest.read.levels import RegionView
from memwal.ingest.read.local import LevelReads
from memwal.ingest.read.reader import Reader


class RegionReads(LevelReads):
    """Reads over the levels of some regions, all owned by this process.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds; Unavailable (`not_owner`) if a region is not here.
    """

    def __init__(
        self,
        base: BaseTable,
        reader: Reader,
        buckets: Collection[int] | None,
        views: Callable[[Level, bool], list[RegionView]],
        follow: Callable[[], None],
    ) -> None:
        """Use `Table.only`. `buckets`: those of the regions; None if these are all of the table's. `views`: captures
        the levels of the regions. `follow`: called when the columns of the table changed.
        """
        super().__init__(base, reader)
        self._buckets, self._captured, self._follow = buckets, views, follow

    def _views(self, level: Level, *, again: bool) -> list[RegionView]:
        return self._captured(level, again)

    def follow(self) -> None:
        self._follow()
