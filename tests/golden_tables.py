"""Tables that earlier versions wrote, as archives in tests/golden/tables: each must stay readable and writable.

`python -m tests.golden_tables` creates missing archives with the present code; it never replaces one.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import memwal

ARCHIVES = Path(__file__).parent / "golden" / "tables"
WIDTH = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("score", pa.float64()),
        pa.field("place", pa.struct([("city", pa.string()), ("at", pa.list_(pa.float64()))])),
        pa.field("embedding", pa.list_(pa.float32(), WIDTH)),
    ]
)
COMMITTED, FLUSHED, LOGGED = range(300), range(300, 330), range(330, 340)
"""Ids of the rows of each level."""
CHANGED, DELETED = 5, 6
"""For tables with a key, committed ids whose newest version is in the log. The row changes only if `id` is the key."""
TOKEN = memwal.Token("loader", 7)
"""The token of the put of `LOGGED`."""


@dataclass(frozen=True)
class Kind:
    """Parameters of a golden table."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    key: str | tuple[str, ...] = "id"
    indexes: dict[str, str] = field(default_factory=dict)

    def key_of(self, id: int) -> Any:
        """Return the key of a row in the form that callers use."""
        row = rows(range(id, id + 1)).to_pylist()[0]
        return row[self.key] if isinstance(self.key, str) else tuple(row[name] for name in self.key)


KINDS = (
    Kind("keyed", indexes={"embedding": "ivf_pq", "name": "fts", "score": "btree"}),
    Kind("arrow", {"wal": {"format": "arrow"}}),
    Kind("append_only", key=()),
    Kind("composite", key=("name", "id")),
)


def rows(ids: range, said: str = "row") -> pa.Table:
    """Return the rows of these ids; they must never change."""
    numbers = np.arange(ids.start, ids.stop)
    angles = numbers[:, None] * np.linspace(0.1, 1.7, WIDTH)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.sin(angles).ravel(), pa.float32()), WIDTH)
    columns = [
        pa.array(numbers),
        pa.array([f"{said} number{n}" for n in ids]),
        pa.array([n / 4 for n in ids]).cast(pa.decimal128(10, 2)),
        pa.array([None if n % 11 == 0 else n / 3 for n in ids]),
        pa.array(
            [None if n % 7 == 0 else {"city": f"c{n % 3}", "at": [n / 2, None]} for n in ids],
            SCHEMA.field("place").type,
        ),
        vectors,
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def make(kind: Kind, at: Path) -> None:
    """Write the table: rows of each level, and a log as left by a process that ends without a flush."""
    settings = {"regions": {"count": 2}, "commit": {"interval": "0s"}, "memtable": {"vector_train_rows": 256}}
    with memwal.open(at, schema=SCHEMA, key=kind.key, indexes=kind.indexes, settings=settings | kind.settings) as table:
        table.put(rows(COMMITTED))
        table.flush()
        table.commit()
        table.put(rows(FLUSHED))
        table.flush()
        table.put(rows(LOGGED), token=TOKEN)
        if kind.key == "id":
            table.put(rows(range(CHANGED, CHANGED + 1), "changed"))
        if kind.key:
            table.delete([kind.key_of(DELETED)])


def main() -> int:
    """Create the missing archives; return the exit code."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        archive = ARCHIVES / f"{kind.name}.tar.xz"
        if archive.exists():
            continue
        with tempfile.TemporaryDirectory() as directory:
            make(kind, Path(directory) / "table")
            with tarfile.open(archive, "w:xz") as packed:
                packed.add(Path(directory) / "table", "table", filter=_nobodys)
        print(f"{archive.name}: {archive.stat().st_size:,} bytes")
    return 0


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    sys.exit(main())
