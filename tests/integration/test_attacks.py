"""Schedules that broke a promise once, each the smallest one that did."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import ingest
from flush import resize
from ingest.table import Table
from memtable import TOMBSTONE
from wal import FakeClock, LocalStore, SystemIds

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
QUIET = {"commit": {"interval": 0}, "gc": {"interval": 0}}


def opened(uri: str, regions: int | None = None, **table: str) -> Table:
    new = {"schema": SCHEMA, "key": "id", "regions": regions} if regions else {}
    return ingest.open(uri, settings={**QUIET, **({"table": table} if table else {})}, **new)


def send(table: Table, rows: pa.Table, regions: int | None = None) -> None:
    """A micro-batch as the sink's tasks send it, to the first so many regions only where that is given."""
    buckets = table.base.route(rows)
    for bucket, region in enumerate(table.base.regions[:regions]):
        part = rows.filter(pa.array(buckets == bucket))
        if part.num_rows:
            table.put_region(region, part, ingest.Token("query", 7), table.base.routing_version)


def shown(table: Table) -> dict[int, int]:
    return {row["id"]: row["n"] for row in table.scan().to_pylist()}


def test_a_micro_batch_with_deletes_that_a_resize_met_half_applied_is_completed(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    gone = pa.array([id % 3 == 0 for id in range(40)])
    rows = pa.table({"id": list(range(40)), "n": [None if id % 3 == 0 else 2 for id in range(40)], TOMBSTONE: gone})
    with opened(uri, 2) as table:
        table.put([{"id": id, "n": 1} for id in range(50)])
        send(table, rows, regions=1)
    resize(uri, {}, LocalStore(uri), 3, clock=FakeClock(), ids=SystemIds())
    with opened(uri) as table:
        for _ in range(2):
            send(table, rows)
            assert shown(table) == {id: 1 if id >= 40 else 2 for id in range(50) if id >= 40 or id % 3}


@pytest.mark.parametrize("rules", [{"upsert": "insert"}, {"version": "n"}])
def test_a_put_that_changes_nothing_is_not_acked_by_an_owner_that_was_overtaken(
    tmp_path: Path, rules: dict[str, str]
) -> None:
    """The older owner finds the key, which the newer one has deleted: nobody would have the row that it acks."""
    uri = str(tmp_path / "t.lance")
    with opened(uri, 1, **rules) as older:
        older.put([{"id": 1, "n": 9}], token="b:1")
        with opened(uri) as newer:
            newer.delete([1], token="b:2")
            with pytest.raises(ingest.FencedError):
                older.put([{"id": 1, "n": 3}], token="b:3")
            assert newer.put([{"id": 1, "n": 3}], token="b:3").skipped == 0
            assert shown(newer) == {1: 3}
