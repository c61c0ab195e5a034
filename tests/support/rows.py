"""The rows of a table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def names(table: Any, level: str = "latest") -> dict[int, str]:
    """Return the rows of a table, name by id; each key occurs once."""
    rows = by_key(table.scan(["id", "name"], level=level).read_all())
    return {id: row["name"] for id, row in rows.items()}


def by_key(rows: pa.Table, key: str = "id") -> dict[Any, dict[str, Any]]:
    """Return rows by their key, which is one column; each key occurs once."""
    found = {row[key]: row for row in rows.to_pylist()}
    assert len(found) == rows.num_rows, "a key occurs twice"
    return found
