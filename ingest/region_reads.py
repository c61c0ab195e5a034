"""The reads of some regions of a table: the answers of a daemon that shares the table with others.

Whoever asks several daemons puts their answers together: each row is of one region, and each region has one owner.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from ingest.level_reads import LevelReads
from ingest.levels import Level, RegionView
from ingest.reader import Reader

if TYPE_CHECKING:
    from ingest.table import Table


class RegionReads(LevelReads):
    """Reads over the levels of `regions`, all owned by this process.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds; Unavailable (`not_owner`) where one is not here.
    """

    def __init__(self, table: Table, reader: Reader, regions: Sequence[UUID], buckets: Collection[int] | None) -> None:
        """Use `Table.only`. `buckets`: those of the regions; None where they are all that the table has."""
        super().__init__(table.base, reader)
        self._table, self._regions, self._buckets = table, regions, buckets

    def _views(self, level: Level, *, again: bool) -> list[RegionView]:
        return self._table.views(level, self._regions, again=again)

    def follow(self) -> None:
        self._table.follow()
