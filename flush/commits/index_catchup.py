"""Build and extend the base table's indexes after each commit, so that they cover its rows.

The step depends on the state of the table and not on what the commit did, so the next commit also covers rows of a
commit that crashed before this step, or rows that other programs appended. *Crash here: the next commit does it.*

Rows missing from an index go into a new segment, in one version for all indexes. The cost depends on the number of new
rows: 15 to 45 ms per index for 3,000. Merging with the existing segments, Lance's default, rewrites full-text and
scalar indexes each time (0.1 to 0.2 s for 200,000 short texts); `flush.commits.maintenance` merges.

If an index cannot be built or extended (vectors of length 0 under cosine, a damaged index file), the failure is logged
and the next commit tries again; Lance scans the rows that the index does not cover. The rows are already in the base
table, and a commit that failed here would never prune its committed SSTs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lance
import pyarrow as pa

from memwal.flush.base.create import create_scalar_indexes
from memwal.flush.base.existing_indexes import is_behind
from memwal.memtable import IndexSpec
from memwal.wal.errors import first_line
from memwal.wal.panics import as_exception

_LOG = logging.getLogger("memwal.flush")

PQ_ROWS_MIN = 256
"""Rows with a vector. Lance trains 2**8 centroids per sub-vector and refuses fewer rows."""
_SUB_VECTOR_WIDTHS = (16, 8, 4, 2, 1)
_SUB_VECTORS_MIN = 4
"""One 8-bit code for a whole small vector gives low recall. With 4 codes, recall@10 of 4,000 random vectors without
re-ranking rises from 0.29 to 0.89 (8 wide), from 0.20 to 0.67 (16) and from 0.28 to 0.45 (32).
"""


def catch_up(dataset: lance.LanceDataset, indexes: Sequence[IndexSpec]) -> bool:
    """Build the missing indexes and extend those that lag. Return whether a new version was created.

    Moves `dataset` to the newest version. A vector index is built once PQ_ROWS_MIN rows have a vector; until then Lance
    searches the column exactly. Raises what Lance raises on a conflict with another writer. An index that Lance cannot
    build raises nothing.
    """
    before = dataset.version
    for spec in indexes:
        _attempted(dataset, spec.name, partial(create_scalar_indexes, dataset, [spec]))
    present = {index.name: index for index in dataset.describe_indices()}
    for spec in indexes:
        if spec.kind == "ivf_pq" and spec.name not in present:
            _attempted(dataset, spec.name, partial(build_vector_index, dataset, spec))
    lagging = [spec.name for spec in indexes if spec.name in present and is_behind(dataset, present[spec.name])]
    if lagging and not _attempted(dataset, ", ".join(lagging), partial(_extend, dataset, lagging)) and len(lagging) > 1:
        for name in lagging:
            _attempted(dataset, name, partial(_extend, dataset, [name]))
    return bool(dataset.version != before)


def build_vector_index(dataset: lance.LanceDataset, spec: IndexSpec, *, replace: bool = False) -> None:
    """Build the vector index `spec`, if PQ_ROWS_MIN rows have a vector. Raises what Lance raises.

    `replace`: replace an existing index of that name.
    """
    with_vector = f"`{spec.column}` IS NOT NULL"
    if dataset.count_rows() >= PQ_ROWS_MIN and dataset.count_rows(with_vector) >= PQ_ROWS_MIN:
        parameters = ivf_pq_parameters(spec, dataset.schema)
        dataset.create_index(spec.column, "IVF_PQ", name=spec.name, replace=replace, **parameters)


def train_anew(dataset: lance.LanceDataset, spec: IndexSpec) -> bool:
    """Rebuild the vector index `spec`, trained on the current rows.

    Returns False if Lance cannot, or there are too few rows. Raises what Lance raises on a conflict with another
    writer.
    """
    before = dataset.version
    built = _attempted(dataset, spec.name, partial(build_vector_index, dataset, spec, replace=True))
    return bool(built and dataset.version != before)


def _extend(dataset: lance.LanceDataset, names: list[str]) -> None:
    dataset.optimize.optimize_indices(index_names=names, num_indices_to_merge=0)


def _attempted(dataset: lance.LanceDataset, what: str, act: Callable[[], object]) -> bool:
    """Run `act` on the indexes `what`. Return whether it succeeded; log a failure of Lance.

    Raises what `act` raises if the table has a newer version: only a newer version makes it a conflict.
    """
    try:
        act()
    except BaseException as raised:  # noqa: BLE001 - pylance raises any class
        error = as_exception(raised)
        if dataset.latest_version != dataset.version:
            raise error from None
        reason = first_line(error)
        _LOG.warning("%s: index %s does not cover the newest rows, will try again: %s", dataset.uri, what, reason)
        return False
    return True


def ivf_pq_parameters(spec: IndexSpec, schema: pa.Schema) -> Mapping[str, Any]:
    """Return Lance's arguments for a vector index; defaults: metric l2, and `sub_vectors` of the width."""
    given: dict[str, Any] = {
        "metric": spec.parameters.get("metric", "l2"),
        "num_sub_vectors": spec.parameters.get(
            "num_sub_vectors", sub_vectors(schema.field(spec.column).type.list_size)
        ),
    }
    if "num_partitions" in spec.parameters:
        given["num_partitions"] = spec.parameters["num_partitions"]
    return given


def sub_vectors(width: int) -> int:
    """Return the codes per vector: equal parts of up to 16 dimensions, at least 4 of them (width 384: 24 of 16)."""
    counts = (width // part for part in _SUB_VECTOR_WIDTHS if width % part == 0)
    return next((count for count in counts if count >= _SUB_VECTORS_MIN), width)
