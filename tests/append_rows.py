"""Shared by tests of tables without a key: rows, reads of their counts, and configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import memwal
from memwal.flush.verification.runner import verify_table
from memwal.wal import open_store
from tests.conftest import toml

WIDTH = 4
SCHEMA = pa.schema([("n", pa.int64()), ("body", pa.string()), ("vector", pa.list_(pa.float32(), WIDTH))])
INDEXES = {"n": "btree", "body": "fts", "vector": "ivf_pq"}
QUIET: dict[str, Any] = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def rows(numbers: Sequence[int | None]) -> pa.Table:
    """Return rows; equal numbers give equal rows, None gives a row of nulls."""
    vectors = [None if n is None else [float(n % 1000)] * WIDTH for n in numbers]
    bodies = [None if n is None else f"word{n} harbor" for n in numbers]
    return pa.Table.from_pydict({"n": numbers, "body": bodies, "vector": vectors}, schema=SCHEMA)


def counted(table: Any, level: str = "latest") -> Counter[int | None]:
    """Return how often a table has each row."""
    found = Counter(table.scan(["n"], level=level).read_all().column("n").to_pylist())
    assert table.count(level=level) == found.total()
    return found


def opened(uri: str, buckets: int | None = None, /, **sections: Any) -> Any:
    """Open the table at `uri`; create it with `buckets` regions if given."""
    new = {} if buckets is None else {"schema": SCHEMA, "key": (), "regions": buckets, "indexes": INDEXES}
    return memwal.open(uri, settings=QUIET | sections, take_over=True, **new)


def clean(uri: str) -> None:
    assert verify_table(open_store(uri, None), uri, deep=True).findings == ()


def configured(directory: Path, uri: str, **changes: Any) -> Path:
    columns = {"n": "int64", "body": "string", "vector": f"vector[{WIDTH}]"}
    sections: dict[str, Any] = {
        "table": {"uri": uri, "append_only": True, "columns": columns, **changes.pop("table", {})},
        "regions": {"count": 3},
        "commit": {"interval": "0s"},
    }
    sections["table"]["columns"] = changes.pop("columns", columns)
    path = directory / "config.toml"
    path.write_text(toml(sections | changes).replace("True", "true"))
    return path
