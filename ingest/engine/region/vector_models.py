"""Provide the trained models of the base table's vector indexes, so that memtables need not train their own.

The models are read when the table is opened and after a commit, operations that read storage anyway; new memtables get
them from memory. A memtable keeps the model it began with. Without a readable model it trains on its own rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from memwal.flush import BaseTable
from memwal.memtable import MemTable, VectorModel, row_schema
from memwal.wal.panics import as_exception

_LOG = logging.getLogger("memwal.models")


class VectorModels:
    """The newest models that this process has read, by column.

    Thread safety. `current` from any thread, without access to storage; `read` from one thread at a time.
    """

    def __init__(self) -> None:
        self._current: Mapping[str, VectorModel] = {}
        self._read_from: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())

    def current(self) -> Mapping[str, VectorModel]:
        """Return the models by column; a column whose index the base table has not built is missing."""
        return self._current

    def read(self, base: BaseTable) -> None:
        """Read the models of `base` if its vector indexes changed since the last call.

        Never raises, because memtables work without a model. A failure is logged, and the models stay unchanged.
        """
        wanted = {spec.name for spec in base.indexes if spec.kind == "ivf_pq"}
        if not wanted:
            return
        try:
            built = [index for index in base.dataset.describe_indices() if index.name in wanted]
            columns = tuple(sorted(spec.column for spec in base.indexes if spec.kind == "ivf_pq"))
            read_from = (columns, frozenset(str(segment.uuid) for index in built for segment in index.segments))
            if read_from == self._read_from:
                return
            models = base.vector_models()
            # raises if the models do not fit
            MemTable(row_schema(base.schema, base.key), base.key, base.indexes, 0, models=models)
        except BaseException as error:  # noqa: BLE001 - memtables then train their own models
            reason = as_exception(error)
            _LOG.warning("%s: cannot read the models of its vector indexes: %s", base.uri, reason)
            return
        self._current, self._read_from = models, read_from
