"""The page `flush/beside_lancedb.md`: what LanceDB does beside memwal, leaving a table and taking it over again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lancedb
import pyarrow as pa
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.flush.verification.runner import verify_table
from memwal.wal import LocalStore

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64()), pa.field("body", pa.string())]
)
FORMATS = ("lance", "arrow")


def rows(*ids: int, v: int = 0) -> pa.Table:
    return pa.table({"id": ids, "v": [v] * len(ids), "body": [f"word{each}" for each in ids]}, schema=SCHEMA)


def memwal_table(path: Path, wal_format: str) -> Any:
    return memwal.open(
        f"{path}/t.lance",
        schema=SCHEMA,
        key=["id"],
        regions=2,
        indexes={"body": "fts", "v": "btree"},
        settings={"wal": {"format": wal_format}},
    )


def lancedb_table(path: Path) -> Any:
    return lancedb.connect(str(path)).open_table("t")


def merged(table: Any, fresh: pa.Table, *, beside: bool = True) -> None:
    merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    (merge.use_lsm(False) if beside else merge).execute(fresh)


def held(path: Path) -> dict[int, int]:
    found = lance.dataset(f"{path}/t.lance").to_table()
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))


@pytest.mark.parametrize("wal_format", FORMATS)
def test_what_lancedb_may_do_beside_memwal(tmp_path: Path, wal_format: str) -> None:
    with memwal_table(tmp_path, wal_format) as table:
        table.put(rows(*range(10)))
        table.flush()
        table.commit()
        table.put(rows(5, 20, v=1))  # unflushed while LanceDB writes
        other = lancedb_table(tmp_path)
        other.add(rows(100, 101))
        merged(other, rows(1, 102, v=2))
        other.update(where="id = 2", values={"v": 3})
        other.delete("id = 3")
        other.optimize(cleanup_older_than=timedelta(days=7))
        assert other.count_rows("v >= 0") == 12
        assert [each["id"] for each in other.search("word4", query_type="fts").use_lsm(False).limit(3).to_list()] == [4]
        table.flush()
        table.commit()
        expected = dict.fromkeys((0, 4, 6, 7, 8, 9, 100, 101), 0) | {5: 1, 20: 1, 1: 2, 102: 2, 2: 3}
        assert held(tmp_path) == expected
    uri = f"{tmp_path}/t.lance"
    assert verify_table(LocalStore(uri), uri, deep=True).findings == ()


def by_lancedb(path: Path) -> None:
    lancedb_table(path).unset_lsm_write_spec()


def by_lance(path: Path) -> None:
    lance.dataset(f"{path}/t.lance").drop_index("__lance_mem_wal")


@pytest.mark.parametrize(("wal_format", "drop"), [("lance", by_lance), ("arrow", by_lancedb)])
def test_leaving(tmp_path: Path, wal_format: str, drop: Callable[[Path], None]) -> None:
    uri = f"{tmp_path}/t.lance"
    with memwal_table(tmp_path, wal_format) as table:
        table.put(rows(*range(10)))
        table.flush()
        table.commit()
        table.put(rows(3, 20, v=1))
        table.delete([4])
        table.flush()
        table.commit()
        assert all(
            not region["memtable_rows"] and not region["ssts"] for region in table.status()["regions"]
        )  # leaving loses no row
    expected = dict.fromkeys((0, 1, 2, 5, 6, 7, 8, 9), 0) | {3: 1, 20: 1}
    assert held(tmp_path) == expected

    drop(tmp_path)
    dataset = lance.dataset(uri)
    dataset.replace_schema_metadata(
        {key: value for key, value in dataset.schema_metadata.items() if not key.startswith("memwal:")}
    )
    shutil.rmtree(f"{uri}/_mem_wal")

    dataset = lance.dataset(uri)
    assert not [index.name for index in dataset.describe_indices() if "mem_wal" in index.name]
    assert not [key for key in dataset.schema_metadata if key.startswith("memwal:")]
    table = lancedb_table(tmp_path)
    table.add(rows(100))
    merged(table, rows(1, 101, v=2), beside=False)  # an ordinary merge into the base again
    table.update(where="id = 2", values={"v": 3})
    table.delete("id = 5")
    table.optimize()
    del expected[5]
    assert held(tmp_path) == expected | {100: 0, 1: 2, 101: 2, 2: 3}
    assert [each["id"] for each in table.search("word20", query_type="fts").limit(3).to_list()] == [20]
    assert not Path(uri, "_mem_wal").exists()


def test_coming_back(tmp_path: Path) -> None:
    test_leaving(tmp_path, "lance", by_lancedb)
    uri = f"{tmp_path}/t.lance"
    before = held(tmp_path)
    BaseTable.adopt(uri, ["id"], 2, [])  # `memwal init`
    with memwal.open(uri) as table:
        table.put(rows(1, 300, v=9))
        table.flush()
        table.commit()
    assert held(tmp_path) == before | {1: 9, 300: 9}
    assert verify_table(LocalStore(uri), uri, deep=True).findings == ()
