"""If another program wiped a table's schema metadata, memwal names the version to restore, and no acked row is lost."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa

import memwal
from memwal.ingest.engine.table.embedded import Table
from tests.messages import raises

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
RESTORE = r"restore version (\d+) .*Do not copy its rows elsewhere"


def put(table: Table, ids: range, v: int) -> None:
    table.put(pa.table({"id": pa.array(ids), "v": [v] * len(ids)}, schema=SCHEMA))


def test_restoring_the_version_that_is_named_brings_every_acked_row_back(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    settings = {"commit": {"interval": "0s"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=2, settings=settings) as table:
        put(table, range(10), 1)
        table.flush()
        table.commit()
        put(table, range(5, 15), 2)
        table.flush()
        lance.dataset(uri).replace_schema_metadata({})
        good = lance.dataset(uri).version - 1
        lance.write_dataset(pa.table({"id": [99], "v": [9]}, schema=SCHEMA), uri, mode="append")
        put(table, range(14, 20), 3)  # the owner has not detected it yet
        with raises(memwal.MemWalError):
            table.count()
        with raises(memwal.MemWalError):
            table.commit()
        assert f"restore version {good} " in table.upkeep.failures[0]["error"]

    for opening in ({}, {"schema": SCHEMA, "key": "id", "regions": 2}):
        with raises(memwal.MemWalError):
            memwal.open(uri, settings=settings, **opening)
    lance.dataset(uri, version=good).restore()
    with memwal.open(uri, settings=settings) as table:
        wanted = dict.fromkeys(range(5), 1) | dict.fromkeys(range(5, 14), 2) | dict.fromkeys(range(14, 20), 3)
        found = table.scan().read_all()
        assert dict(zip(found.column("id").to_pylist(), found.column("v").to_pylist(), strict=True)) == wanted
        table.flush()
        table.commit()
        assert lance.dataset(uri).count_rows() == len(wanted)
