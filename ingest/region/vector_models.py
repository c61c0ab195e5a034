"""What the base table's vector indexes were trained to: memtables begin with it, and need not train themselves.

Read where storage is asked anyway, by whoever opens the table and by its committer; new memtables get it from memory.
A memtable keeps the model it began with. Without one, or where it cannot be read, it trains on its own rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from memwal.flush import BaseTable
from memwal.memtable import MemTable, VectorModel, row_schema
from memwal.wal.panics import as_exception

_LOG = logging.getLogger("memwal.models")


class VectorModels:
    """The newest models that this process knows, by column.

    Thread safety. `current` from any thread, asks no storage; `read` from one thread at a time.
    """

    def __init__(self) -> None:
        self._current: Mapping[str, VectorModel] = {}
        self._read_from: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())

    def current(self) -> Mapping[str, VectorModel]:
        """Models by column, nothing for a column whose index the base table has not built."""
        return self._current

    def read(self, base: BaseTable) -> None:
        """Take over the models of `base`, where its vector indexes are others than the last time.

        Never raises: a model is a help, no condition. What went wrong is logged, and the models stay as they were.
        """
        wanted = {spec.name for spec in base.indexes if spec.kind == "ivf_pq"}
        if not wanted:
            return
        try:
            there = [each for each in base.dataset.describe_indices() if each.name in wanted]
            columns = tuple(sorted(spec.column for spec in base.indexes if spec.kind == "ivf_pq"))
            found = (columns, frozenset(str(segment.uuid) for each in there for segment in each.segments))
            if found == self._read_from:
                return
            models = base.vector_models()
            MemTable(row_schema(base.schema, base.key), base.key, base.indexes, 0, models=models)  # do they fit?
        except BaseException as error:  # noqa: BLE001 - whatever it was, memtables train themselves
            reason = as_exception(error)
            _LOG.warning("%s: cannot read what its vector indexes were trained to: %s", base.uri, reason)
            return
        self._current, self._read_from = models, found
