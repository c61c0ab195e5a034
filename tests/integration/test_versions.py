"""`table.version`: a row older than the stored one is left out, wherever the stored row is, and after a delete too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner

import memwal
from memwal import wal
from memwal.ingest.engine.table.create import initialise
from memwal.ingest.errors import Invalid
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.spark.sink.route import RouteTask
from memwal.ingest.spark.sink.send import SendTask
from memwal.ingest.spark.source.columns import BUCKET, DELETE
from memwal.memtable import TOMBSTONE
from tests.conftest import Cli, SmallConfig
from tests.lance_scan import snapshots
from tests.messages import raises
from tests.routed import placed, shuffled
from tests.support.rows import names

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("at", pa.timestamp("us", "UTC")), ("name", pa.string())]
)
REGION = wal.bucket_region(0)
STAGES = ("memtable", "sst", "reopened")
Row = tuple[int, int | None, str | None]


def opened(path: Path, *, wal_format: str = "lance", **rules: str) -> Any:
    settings: dict[str, Any] = {"commit": {"interval": "0s"}, "wal": {"format": wal_format}}
    if (path / "t.lance").exists():
        return memwal.open(path / "t.lance", settings=settings)
    settings["table"] = {"version": "at", **rules}
    return memwal.open(path / "t.lance", schema=SCHEMA, key="id", regions=1, indexes={"at": "btree"}, settings=settings)


def rows(*given: Row) -> pa.Table:
    """Return rows of (id, version, name); a row without a name deletes."""
    data = [list(column) for column in zip(*given, strict=True)]
    made = pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip(data, SCHEMA, strict=True)], schema=SCHEMA
    )
    return made.append_column(TOMBSTONE, pa.array([name is None for name in data[2]]))


def send(table: Any, *given: Row) -> int:
    """Send the rows as one stream; return how many were left out."""
    return int(table.put_region(REGION, rows(*given), None).skipped)


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_row_that_is_late_stays_out_also_behind_a_delete(stage: str, wal_format: str, tmp_path: Path) -> None:
    table = opened(tmp_path, wal_format=wal_format)
    send(table, (1, 50, "one"), (2, 50, "two"), (3, 50, "three"), (2, 60, None), (4, 60, None))
    if stage == "sst":
        table.flush()
    if stage == "reopened":
        table.close()
        table = opened(tmp_path, wal_format=wal_format)
    assert send(table, (1, 49, "late"), (2, 59, "late"), (3, 49, None), (4, 10, "late"), (5, 1, "new")) == 4
    assert names(table) == {1: "one", 3: "three", 5: "new"}
    assert table.put(rows((1, 50, "equal"), (2, 60, "equal"), (3, 50, "equal")).drop_columns(TOMBSTONE)).skipped == 0
    assert names(table) == {1: "equal", 2: "equal", 3: "equal", 5: "new"}
    table.flush()
    table.commit()
    assert send(table, (1, 49, "late"), (5, 0, None), (3, 51, "newer")) == 2
    assert names(table) == names(table, "durable") == {1: "equal", 2: "equal", 3: "newer", 5: "new"}
    table.close()


def test_a_delete_is_remembered_until_it_is_committed(tmp_path: Path) -> None:
    """A limit that the README states: the base table has no tombstones."""
    with opened(tmp_path) as table:
        send(table, (1, 50, "one"), (1, 60, None))
        table.flush()
        assert send(table, (1, 55, "late")) == 1
        table.commit()
        assert send(table, (1, 55, "late")) == 0
        assert names(table) == {1: "late"}


def test_rows_of_one_stream_are_late_by_those_before_them(tmp_path: Path) -> None:
    with opened(tmp_path) as table:
        assert send(table, (1, 5, "a"), (1, 4, "late"), (1, 5, "b"), (2, 9, None), (2, 8, "late"), (2, 9, "c")) == 2
        assert names(table) == {1: "b", 2: "c"}


def test_a_delete_by_key_alone_takes_any_version_and_lets_any_follow(tmp_path: Path) -> None:
    with opened(tmp_path) as table:
        send(table, (1, 50, "one"), (2, 50, "two"))
        table.delete([1])
        assert send(table, (2, None, None), (1, 1, "again"), (2, 2, "again")) == 0
        assert names(table) == {1: "again", 2: "again"}


def test_a_late_row_of_a_merge_gives_none_of_its_columns(tmp_path: Path) -> None:
    with opened(tmp_path, upsert="merge") as table:
        send(table, (1, 50, "one"))
        late = rows((1, 40, "late")).drop_columns(TOMBSTONE)
        assert table.put(late).skipped == 1
        assert table.put(late.drop_columns("name")).skipped == 1
        assert table.put(rows((1, 60, "")).select(["id", "at"])).skipped == 0
        (found,) = table.scan().read_all().to_pylist()
        assert (found["name"], found["at"].microsecond) == ("one", 60)
        with raises(Invalid):
            table.put(late.select(["id", "name"]))


def test_a_row_that_is_put_without_a_version_is_refused_in_one_line(tmp_path: Path) -> None:
    with opened(tmp_path) as table:
        for put in (lambda given: send(table, *given), lambda given: table.put(rows(*given).drop_columns(TOMBSTONE))):
            with raises(Invalid):
                put([(1, 50, "one"), (2, None, "two")])
        assert names(table) == {}


def test_the_column_is_followed_when_it_is_renamed_and_rows_of_before_know_none(tmp_path: Path) -> None:
    old = rows((1, None, "old"), (2, 50, "two")).drop_columns(TOMBSTONE)
    lance.write_dataset(old, tmp_path / "t.lance")
    config = {"commit": {"interval": "0s"}, "table": {"uri": str(tmp_path / "t.lance"), "key": ["id"], "version": "at"}}
    adopted = initialise(memwal.ingest.settings.load.load({**config, "regions": {"count": 1}}, {}), {})[0]
    assert adopted.rules.version == "at"
    with opened(tmp_path) as table:
        assert send(table, (1, 1, "first"), (2, 40, "late")) == 1
        table.flush()
        lance.dataset(tmp_path / "t.lance").alter_columns({"path": "at", "name": "seen"})
        table.look()
        renamed = rows((1, 0, "late"), (2, 60, "newer")).rename_columns(["id", "seen", "name", TOMBSTONE])
        assert table.put_region(REGION, renamed, None).skipped == 1
        assert names(table) == {1: "first", 2: "newer"}


def test_lances_own_readers_honour_a_delete_that_has_a_version(tmp_path: Path) -> None:
    with opened(tmp_path) as table:
        send(table, (1, 10, "one"), (2, 10, "two"), (3, 10, "three"))
        table.flush()
        table.commit()
        send(table, (1, 20, None), (2, 20, "newer"), (9, 20, None))
        table.flush()
        base = lance.dataset(tmp_path / "t.lance")
        manifest = wal.ManifestStore(wal.open_store(str(tmp_path / "t.lance"), {}), REGION).latest()
        assert manifest is not None
        (snapshot,) = snapshots([manifest])
        scan = LsmScanner.from_snapshots(base, [snapshot])
        assert sorted(scan.to_table()["name"].to_pylist()) == ["newer", "three"]
        fresh = LsmScanner.from_snapshots(base, [snapshot]).filter("at > to_timestamp_micros(15)")
        assert fresh.to_table()["name"].to_pylist() == ["newer"]
        lookups = LsmPointLookupPlanner(base, [snapshot])
        found = [
            lookups.plan_lookup(pa.array([id]), columns=["name"]).to_table()["name"].to_pylist() for id in (1, 2, 9)
        ]
        assert found == [[], ["newer"], []]


def test_deletes_travel_with_their_version(tmp_path: Path) -> None:
    with opened(tmp_path) as table:
        send(table, (1, 50, "one"), (2, 50, "two"))
        service = FlightService(OneTable(table), "grpc://127.0.0.1:0")
        frame = rows((1, 40, None), (2, 60, None), (2, 55, "late")).rename_columns(["id", "at", "name", DELETE])
        routed = shuffled(RouteTask(str(tmp_path / "t.lance"), ())(iter([placed(frame)])))
        assert routed[BUCKET].to_pylist() == [0] * 4
        send_task = SendTask(f"grpc://127.0.0.1:{service.port}", table.base.regions, "query", 0, 30.0)
        (receipt,) = send_task(iter([routed]))
        assert (receipt["rows"].to_pylist(), receipt["skipped"].to_pylist()) == ([3], [2])
        assert names(table) == {1: "one"}
        service.shutdown()


@pytest.mark.parametrize(
    "rules",
    [
        {"version": "att"},
        {"version": "id"},
        {"version": "name"},
        {"upsert": "insert"},
    ],
)
def test_a_version_column_that_cannot_be_one_is_refused(rules: dict[str, str], tmp_path: Path) -> None:
    with raises(Invalid):
        opened(tmp_path, **rules)
    assert not (tmp_path / "t.lance").exists()


def test_another_version_column_than_the_tables_is_refused(
    tmp_path: Path, cli: Cli, small_config: SmallConfig, uri: str
) -> None:
    config = small_config("versioned.toml", table={"version": "price"})
    assert "version price" in cli("init", config).out
    with raises(Invalid):
        memwal.open(uri, settings={"table": {"version": "id"}})
    with memwal.open(uri) as table:
        assert table.base.rules.version == "price"
