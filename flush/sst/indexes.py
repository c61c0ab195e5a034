"""Build the indexes inside an SST, under the names of the base table's indexes, for searches by Lance's own readers.

 1. ivf_pq: with the centroids and the codebook of the base table's index, so nothing is trained, and distances from
    base and SST are comparable. While the base has no such index (too few rows), its SSTs have none, and Lance's vector
    planner does not see their rows.
 2. fts, btree: with the parameters of the base's index, in SSTs of `scalar_rows_min` rows or more. Lance finds fewer
    rows by a scan, and for 1,000 rows of text the indexes are a third of the SST.

They are built after the fields have the base table's ids, because an index refers to its column by id. Each is one more
version of the SST's dataset. *Crash at any point: an SST that no manifest lists.* An SST is complete without indexes:
memwal's readers index its rows in memory, and Lance's scans and lookups need none. So a failure to build one fails no
flush.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import lance

from memwal.flush.base.create import SCALAR_KINDS
from memwal.memtable import IndexSpec, VectorModel
from memwal.wal.errors import first_line
from memwal.wal.panics import as_exception

SCALAR_ROWS_MIN = 10_000
"""Minimum number of rows of an SST for full-text and B-tree indexes, in an open table."""
_LOG = logging.getLogger("memwal.flush")

Models = Callable[[], Mapping[str, VectorModel]]
"""Returns, at each flush, the models of the base table's vector indexes by column."""


class SstIndexes:
    """Builds the base table's indexes in SSTs.

    Thread safety. Any thread; one object for all regions of a table.
    Invariants. `build` never raises for an index; a failure is logged once, and again after a success.
    """

    def __init__(
        self, specs: Sequence[IndexSpec] = (), models: Models = dict, *, wanted: bool = True, scalar_rows_min: int = 0
    ) -> None:
        """`specs`: the table's indexes; if it is empty or `wanted` is False, SSTs get none. SSTs with fewer than
        `scalar_rows_min` rows get vector indexes only.
        """
        self._specs, self._models, self._wanted = tuple(specs) if wanted else (), models, wanted
        self._scalar_rows_min = scalar_rows_min
        self._failing: set[str] = set()

    def over(self, specs: Sequence[IndexSpec]) -> SstIndexes:
        """Return the same builder for a table whose indexes are now `specs`."""
        return SstIndexes(specs, self._models, wanted=self._wanted, scalar_rows_min=self._scalar_rows_min)

    def build(self, directory: str, storage_options: Mapping[str, str], rows: int) -> None:
        """Build the indexes in the SST at `directory` (what pylance opens), after its fields got their ids.

        `rows`: of the SST.
        """
        if not self._specs:
            return
        models, scalar = self._models(), rows >= self._scalar_rows_min
        specs = [spec for spec in self._specs if (spec.column in models if spec.kind == "ivf_pq" else scalar)]
        for spec in specs:
            try:
                dataset = lance.dataset(directory, storage_options=dict(storage_options))
                _build(dataset, spec, models.get(spec.column))
                self._failing.discard(spec.name)
            except BaseException as error:  # noqa: BLE001 - pylance raises any class
                self._failed(spec, as_exception(error))

    def _failed(self, spec: IndexSpec, error: Exception) -> None:
        if spec.name in self._failing:
            return
        self._failing.add(spec.name)
        reason = first_line(error)
        _LOG.warning("index %s: SSTs go without it, and Lance's own search may miss their rows: %s", spec.name, reason)


def _build(dataset: lance.LanceDataset, spec: IndexSpec, model: VectorModel | None) -> None:
    if model is None:
        dataset.create_scalar_index(spec.column, SCALAR_KINDS[spec.kind], name=spec.name, **spec.parameters)
    elif dataset.count_rows(f"`{spec.column}` IS NOT NULL"):  # Lance cannot index a column of nulls only
        number = dataset.schema.field(spec.column).type.value_type.to_pandas_dtype()
        codes, values, _ = model.codebook.shape
        dataset.create_index(
            spec.column,
            "IVF_PQ",
            name=spec.name,
            metric=spec.parameters.get("metric", "l2"),
            num_partitions=len(model.centroids),
            num_sub_vectors=codes,
            num_bits=values.bit_length() - 1,
            ivf_centroids=model.centroids.astype(number),  # both arrays in the column's number type
            pq_codebook=model.codebook.astype(number),
        )
