"""List the indexes of a table: those in its set-up, and others that Lance has."""

from __future__ import annotations

from typing import Any

from memwal.flush.base.existing_indexes import LANCES_OWN, adoptable
from memwal.flush.base.table import BaseTable


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
