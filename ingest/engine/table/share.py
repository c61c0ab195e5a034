"""Read some of a table's regions: those of a get's keys, or those named by a client that combines several owners'
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import numpy as np

from memwal.flush import BaseTable
from memwal.ingest.engine.api.keys import normalise_keys
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.read.local import LevelReads
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.errors import Invalid


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
        """Use `Table.only`. `buckets`: of the regions; None if these are all of the table's.

        `views`: captures the levels of the regions. `follow`: called when the columns of the table changed.
        """
        super().__init__(base, reader)
        self._buckets, self._captured, self._follow = buckets, views, follow

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        del keys  # the client has named their regions
        return self._captured(level, again)

    def follow(self) -> None:
        self._follow()


def regions_of(base: BaseTable, keys: Any) -> Iterator[UUID]:
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
