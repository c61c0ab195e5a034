"""Add an index to a table, or drop one, while the table is written.

To add an index:

 1. Read the newest version; check the column, the parameters, and any existing index of the column. An index of the
    same kind that another program built is adopted unchanged.
 2. Build it in the base table. A vector index with too few rows is left to the commit that adds enough. *Crash here:
    Lance has an index that is not in the set-up. Adding it again adopts it; dropping it drops it.*
 3. Add it to the set-up (flush.base.setup), in one version of the table. Lance rejects this version if another writer
    changed the indexes since step 1: then restart at step 1.

The index is built before it is declared, because a match on a column with a declared but unbuilt index would fail.
After step 3 the table has a new shape. The region owners detect it at the next version of the base that they open, and
their next memtables have the index (region.admission). SSTs and the log's tail are indexed as they are read, by
the set-up of that moment.

To drop an index:

 1. Remove it from the set-up, as in step 3. *Crash here: as in step 2.*
 2. Drop it in the base table. A commit that read the set-up before step 1 may build it again; after building, the
    commit reads the newest set-up and drops the index (`drop_undeclared`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lance

from memwal.flush.base.create import create_scalar_indexes
from memwal.flush.base.existing_indexes import DEFAULTS, LANCES_OWN, adoptable, with_existing_indexes
from memwal.flush.base.setup import index_settings
from memwal.flush.base.shape import column_ids
from memwal.flush.base.swap import retried
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.index_catchup import build_vector_index
from memwal.memtable import IndexSpec, InvalidRows, check_indexes
from memwal.memtable.index_spec import nearest
from memwal.wal import Clock
from memwal.wal.errors import first_line
from memwal.wal.panics import RustPanic


def add_index(base: BaseTable, spec: IndexSpec, clock: Clock) -> IndexSpec:
    """Add `spec` to the table of `base` (any version); return it with its resulting name and parameters.

    Returns immediately if the table already has the same index.
    Raises InvalidRows for an index that the table cannot have, or a column with a different index; CommitConflict;
    errors of storage.
    """

    def attempt(newest: BaseTable, dataset: lance.LanceDataset) -> IndexSpec:
        declared = next((one for one in newest.indexes if one.column == spec.column), None)
        if declared is not None:
            return _same(spec, declared)
        check_indexes(newest.schema, [spec])
        (whole,) = with_existing_indexes(newest.uri, dataset, [spec])
        for other in newest.indexes:
            if other.name == whole.name:  # a renamed column keeps the name of its index
                raise InvalidRows(
                    f"the index on {other.column!r} is called {whole.name}; drop that one first", column=whole.column
                )
        check_indexes(newest.schema, [*newest.indexes, whole])
        _build(dataset, whole)
        _declare(newest, [*newest.indexes, whole])
        return whole

    return retried(base, clock, attempt)


def drop_index(base: BaseTable, name: str, clock: Clock) -> None:
    """Drop the index called `name` from the table of `base` (any version).

    Raises InvalidRows if no such index exists; CommitConflict; errors of storage.
    """
    done: list[str] = []

    def attempt(newest: BaseTable, dataset: lance.LanceDataset) -> None:
        built = {index.name for index in dataset.describe_indices() if not index.name.startswith(LANCES_OWN)}
        if name in (spec.name for spec in newest.indexes):
            _declare(newest, [spec for spec in newest.indexes if spec.name != name])
            done.append(name)
            dataset.checkout_latest()  # type: ignore[no-untyped-call]
        elif name not in built and not done:
            known = sorted(built | {spec.name for spec in newest.indexes})
            hint = nearest(name, known).replace("the columns are", "its indexes are") if known else "; it has none"
            raise InvalidRows(f"{newest.uri}: no index is called {name!r:.200}{hint}")
        if name in built:
            dataset.drop_index(name)

    retried(base, clock, attempt)


def drop_undeclared(before: BaseTable, newest: BaseTable) -> bool:
    """Drop indexes that are in the set-up of `before` but not of `newest`. Return whether a version was created.

    Raises what Lance raises on a conflict.
    """
    gone = {spec.name for spec in before.indexes} - {spec.name for spec in newest.indexes}
    built = {index.name for index in newest.dataset.describe_indices()} if gone else set()
    dataset = newest.dataset.checkout_version(newest.version) if gone & built else newest.dataset
    for name in sorted(gone & built):
        dataset.drop_index(name)
    return bool(gone & built)


def _same(wanted: IndexSpec, declared: IndexSpec) -> IndexSpec:
    """Return `declared` if it matches `wanted`. Raises InvalidRows."""
    has = {**DEFAULTS, **declared.parameters}
    differs = any(has.get(name) != value for name, value in wanted.parameters.items())
    if wanted.kind != declared.kind or differs:
        listed = "".join(f", {name} = {value!r}" for name, value in declared.parameters.items())
        raise InvalidRows(
            f"column {wanted.column!r} has the index {declared.name} ({declared.kind}{listed}); drop that one first",
            column=wanted.column,
        )
    return declared


def _build(dataset: lance.LanceDataset, spec: IndexSpec) -> None:
    """Run step 2. Raises InvalidRows if Lance cannot build the index and a newer version would not change that."""
    try:
        create_scalar_indexes(dataset, [spec])
        if spec.kind == "ivf_pq" and spec.name not in {index.name for index in dataset.describe_indices()}:
            build_vector_index(dataset, spec)
    except (RuntimeError, ValueError, RustPanic) as error:
        if dataset.latest_version != dataset.version:
            raise
        raise InvalidRows(
            f"Lance cannot build {spec.kind} on column {spec.column!r}: {first_line(error)}; correct the rows, or make "
            "their values null",
            column=spec.column,
        ) from error


def _declare(base: BaseTable, indexes: Iterable[IndexSpec]) -> None:
    """Run step 3: set the indexes of the table, unless another writer changed them since the version of `base`."""
    settings: Mapping[str, Any] = index_settings(list(indexes), column_ids(base.dataset))
    base.dataset.checkout_version(base.version).update_config(dict(settings))


def list_indexes(base: BaseTable) -> list[dict[str, Any]]:
    """Return the indexes in the set-up, one dict each. Reads no index.

    name, column, kind, parameters; built: whether the base table has it; rows, rows_waiting: base rows that it covers,
    and those that the next commit adds to it; bytes: of its files, 0 if Lance recorded none.
    """
    rows = {fragment.fragment_id: fragment.count_rows() for fragment in base.dataset.get_fragments()}
    built = {index.name: index for index in base.dataset.describe_indices()}
    found = []
    for spec in base.indexes:
        index = built.get(spec.name)
        covered = set() if index is None else {part for segment in index.segments for part in segment.fragment_ids}
        found.append(
            {
                "name": spec.name,
                "column": spec.column,
                "kind": spec.kind,
                "parameters": dict(spec.parameters),
                "built": index is not None,
                "rows": sum(count for fragment, count in rows.items() if fragment in covered),
                "rows_waiting": sum(count for fragment, count in rows.items() if fragment not in covered),
                "bytes": 0 if index is None else int(index.total_size_bytes or 0),
            }
        )
    return found


def undeclared(base: BaseTable) -> dict[str, str]:
    """Return the indexes of the base table that are not in its set-up: name -> reason; "" if it can be added."""
    declared, columns = {spec.name for spec in base.indexes}, {spec.column: spec.name for spec in base.indexes}
    found = dict[str, str]()
    for index in base.dataset.describe_indices():
        if index.name in declared or index.name.startswith(LANCES_OWN):
            continue
        spec, reason = adoptable(base.uri, base.dataset, index)
        if spec is not None and spec.column in columns:
            reason = f"its column has the index {columns[spec.column]}, and memwal keeps one for each column"
        found[index.name] = reason
    return found
