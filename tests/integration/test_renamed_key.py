"""LanceDB renames a key column, which plain Lance rejects: an open table follows, and no acked row is lost."""

from __future__ import annotations

from pathlib import Path

import lancedb
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.table.embedded import Table
from tests.messages import raises

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])


def renamed(at: Path) -> None:
    lancedb.connect(str(at)).open_table("t").alter_columns({"path": "id", "rename": "key"})


def put(table: Table, name: str, ids: list[int], v: int) -> None:
    table.put(pa.table({name: pa.array(ids, pa.int64()), "v": pa.array([v] * len(ids), pa.int64())}))


def found(table: Table) -> dict[int, int]:
    rows = table.scan().read_all()
    return {row["key"]: row["v"] for row in rows.to_pylist()}


@pytest.mark.parametrize("committed", [False, True])
def test_a_renamed_key_is_followed(tmp_path: Path, *, committed: bool) -> None:
    table = memwal.open(
        tmp_path / "t.lance", schema=SCHEMA, key="id", regions=2, settings={"commit": {"interval": "0s"}}
    )
    with table:
        put(table, "id", [1, 2, 3], 1)
        table.flush()
        if committed:
            table.commit()
        put(table, "id", [3, 4], 2)
        renamed(tmp_path)
        put(table, "id", [5], 3)  # the rename is not detected yet: acked, and found under the new name

        assert found(table) == {1: 1, 2: 1, 3: 2, 4: 2, 5: 3}
        with raises(memwal.Invalid):
            put(table, "id", [6], 4)
        put(table, "key", [2, 6], 5)
        table.delete([1])
        assert table.get([2, 5]).column("v").to_pylist() == [5, 3]

        now = {2: 5, 3: 2, 4: 2, 5: 3, 6: 5}
        assert found(table) == now
        table.flush()
        table.commit()
        assert found(table) == now
        put(table, "key", [7], 6)
    with memwal.open(tmp_path / "t.lance") as again:
        assert found(again) == {**now, 7: 6}
