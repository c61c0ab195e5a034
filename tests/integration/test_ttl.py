"""`table.ttl`: every read and every conditional write treats an expired row as absent."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush.commits.expiry import ExpiredRows
from memwal.ingest.cli.app import main
from memwal.ingest.engine.region.groups import Repeats, WriteGroups
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.engine.table.create import initialise
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.ops import metrics
from memwal.ingest.settings.load import load
from tests import fault_proxy as faults
from tests.clean import assert_clean
from tests.conftest import extent, wait_until
from tests.messages import raises
from tests.opened import open_table
from tests.support.clock import FakeClock
from tests.ttl_world import run_seed

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("t", pa.timestamp("us", "UTC")), ("x", pa.int64()), ("y", pa.int64())]
)
TTL = 600.0
Row = Mapping[str, Any]
STAGES = ("memtable", "sst", "base", "reopened")


@pytest.mark.parametrize("seed", range(1, extent(3, 30)))
def test_every_read_equals_the_oracle_while_rows_expire(seed: int) -> None:
    run_seed(seed, 12)


class StillClock(FakeClock):
    """A clock whose `now` moves only when a test moves it, even if a thread sleeps on it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = super().now()

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self._now += seconds


class Clocked:
    """A table of one region with a clock that the test moves."""

    def __init__(self, path: Path, **table: Any) -> None:
        self.uri, self.clock = str(path / "t.lance"), StillClock()
        self.given = {"uri": self.uri, "key": ["id"], "ttl": "10min", "ttl_column": "t", **table}
        self.table = self.opened()

    def opened(self, **more: Any) -> Any:
        quiet: dict[str, Any] = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}, "regions": {"count": 1}}
        quiet["memtable"] = {"age_max": "365d"}
        return open_table(load({"table": self.given | more, **quiet}, {}, {}), {}, SCHEMA, clock=self.clock)

    def at(self, age: float | None) -> datetime | None:
        return None if age is None else datetime.fromtimestamp(self.clock.now(), UTC) - timedelta(seconds=age)

    def rows(self, *given: tuple[int, float | None, int]) -> pa.Table:
        """Return rows of (id, age in seconds, x)."""
        ids, ages, xs = zip(*given, strict=True)
        return pa.table({"id": ids, "t": list(map(self.at, ages)), "x": xs, "y": [None] * len(ids)}, schema=SCHEMA)

    def stage(self, name: str) -> None:
        if name in ("sst", "base"):
            self.table.flush()
        if name == "base":
            self.table.commit()
        if name == "reopened":
            self.table.close()
            self.table = self.opened()

    def found(self) -> dict[int, int]:
        return {row["id"]: row["x"] for row in self.table.scan(["id", "x"]).read_all().to_pylist()}


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[Clocked]:
    made = Clocked(tmp_path)
    yield made
    made.table.close()


# ---- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("older", STAGES)
@pytest.mark.parametrize("newer", STAGES)
def test_no_older_row_of_a_key_comes_back(older: str, newer: str, clocked: Clocked) -> None:
    """The older row of key 1 has the later time."""
    clocked.table.put(clocked.rows((1, 0, 10), (2, 0, 20)))
    clocked.stage(older)
    clocked.table.put(clocked.rows((1, TTL + 1, 11)))
    clocked.stage(newer)
    for name in ("memtable", *STAGES):
        clocked.stage(name)
        assert clocked.found() == {2: 20}
        assert clocked.table.get([1, 2])["x"].to_pylist() == [20]
        assert clocked.table.count("x < 15") == 0
        clocked.clock.advance(61.0)
    clocked.table.flush()
    clocked.table.commit()
    clocked.clock.advance(61.0)
    clocked.table.commit()
    assert lance.dataset(clocked.uri).to_table()["id"].to_pylist() == [2]
    assert clocked.found() == {2: 20}


def test_a_row_expires_a_microsecond_after_its_time_and_null_never(clocked: Clocked) -> None:
    clocked.table.put(clocked.rows((1, TTL - 1, 1), (2, TTL, 2), (3, TTL + 1e-6, 3), (4, None, 4), (5, -1e6, 5)))
    for stage in STAGES:
        clocked.stage(stage)
        assert clocked.found() == {1: 1, 2: 2, 4: 4, 5: 5}
        assert clocked.table.get([1, 2, 3, 4, 5])["id"].to_pylist() == [1, 2, 4, 5]
    clocked.clock.advance(1e-6 * 10)
    assert clocked.found() == {1: 1, 4: 4, 5: 5}
    clocked.clock.advance(1e12 / 1e3)
    assert clocked.found() == {4: 4}


def test_a_scan_keeps_the_moment_of_its_call(clocked: Clocked) -> None:
    clocked.table.put(clocked.rows(*((id, 0, id) for id in range(40_000))))
    clocked.stage("base")
    clocked.table.put(clocked.rows(*((id, 0, id) for id in range(40_000, 60_000))))
    rows = clocked.table.scan(["id"])
    clocked.clock.advance(TTL + 1)
    assert clocked.table.count() == 0
    assert rows.read_all().num_rows == 60_000


def test_top_k_looks_past_rows_that_expired(tmp_path: Path) -> None:
    schema = SCHEMA.append(pa.field("v", pa.list_(pa.float32(), 2))).append(pa.field("body", pa.string()))
    clock, uri = StillClock(), str(tmp_path / "t.lance")
    indexes = {"v": "ivf_pq", "body": "fts", "t": "btree"}
    table = {"uri": uri, "key": ["id"], "ttl": "10min", "ttl_column": "t", "indexes": indexes}
    settings = load({"table": table, "commit": {"interval": "0s"}, "gc": {"interval": "0s"}}, {}, {})
    with closing(open_table(settings, {}, schema, clock=clock)) as opened:
        now = datetime.fromtimestamp(clock.now(), UTC)
        ages = np.where(np.arange(2_000) % 10 == 0, 100, 900)  # one of ten is alive
        rows = {
            "id": range(2_000),
            "t": [now - timedelta(seconds=int(age)) for age in ages],
            "x": range(2_000),
            "y": [None] * 2_000,
            "v": [[float(id), 0.0] for id in range(2_000)],
            "body": ["word"] * 2_000,
        }
        opened.put(pa.table(rows, schema=schema))
        living = list(range(0, 2_000, 10))
        for _ in range(3):
            assert opened.search("v", [0.0, 0.0], 20)["id"].to_pylist() == living[:20]
            assert set(opened.match("body", "word", 150)["id"].to_pylist()) < set(living)
            assert opened.match("body", "word", 2_000).num_rows == 200
            found = opened.scan(["id"], order_by=["x"], limit=5, offset=2).read_all()["id"]
            assert found.to_pylist() == living[2:7]
            both = opened.hybrid([0.0, 0.0], "word", 30, vector_column="v", text_column="body")
            assert set(both["id"].to_pylist()) <= set(living)
            assert both.num_rows == 30
            opened.flush()
            opened.commit()


def test_through_a_daemon_from_storage_and_awaited_all_agree_without_a_configuration(clocked: Clocked) -> None:
    """Clients and readers have no configuration; those that read storage use the table's own ttl."""
    clocked.table.put(clocked.rows((1, 0, 1), (2, TTL + 1, 2), (3, None, 3)))
    service = FlightService(OneTable(clocked.table), "grpc://127.0.0.1:0")
    address = f"grpc://127.0.0.1:{service.port}"

    async def awaited() -> tuple[int, list[int]]:
        async with await memwal.connect_async(address) as table:
            return await table.count(), (await table.get([1, 2, 3]))["id"].to_pylist()

    try:
        with memwal.connect(address) as client:
            stored = StoredTable(flush.BaseTable.open(clocked.uri), wal.open_store(clocked.uri, {}), clocked.clock)
            for stage in ("memtable", "sst", "base"):
                clocked.stage(stage)
                assert client.count() == stored.count(level="durable") == 2
                assert client.sql("SELECT sum(x) AS s FROM table").read_all().to_pylist() == [{"s": 4}]
                assert stored.get([1, 2, 3], level="durable")["id"].to_pylist() == [1, 3]
                assert asyncio.run(awaited()) == (2, [1, 3])
        with closing(memwal.open(clocked.uri, read_only=True)) as reader:
            assert reader.count() == 1  # by the system's clock both times have expired, but a null has not
            assert reader.status()["ttl"] == {"column": "t", "seconds": TTL}
    finally:
        service.shutdown()


def test_an_explained_read_tells_of_them_as_of_deleted_rows(clocked: Clocked) -> None:
    clocked.table.put(clocked.rows((1, 0, 1), (2, TTL + 1, 2)))
    told: list[Any] = []
    assert clocked.table.get([1, 2], explain=told.append).num_rows == 1
    assert clocked.table.scan(filter="x > 0", explain=told.append).read_all().num_rows == 1
    clocked.stage("base")
    assert clocked.table.count(explain=told.append) == 1
    assert [each.found for each in told[:2]] == [1, 1]
    (key,) = (search for level in told[0].parts[0].levels for search in level.searches if search.found)
    assert (key.found, key.deleted, key.returned) == (2, 1, 1)


# ---- conditional writes ----------------------------------------------------------------------------------------------


def naive(rule: Row, stored: Row | None, row: Row) -> Row:
    """Return the row after a put of `row`, when readers see the row `stored`."""
    if rule.get("upsert") == "insert":
        return stored or row
    if rule.get("version"):
        return stored if stored is not None and row["y"] < stored["y"] else row
    if rule.get("upsert") == "merge":
        return {**dict.fromkeys(SCHEMA.names), **(stored or {}), **row}
    return row


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "gathered"])
@pytest.mark.parametrize("rule", [{"upsert": "insert"}, {"upsert": "merge"}, {"version": "y"}], ids=str)
def test_a_conditional_put_takes_an_expired_row_for_absent(
    tmp_path: Path, rule: dict[str, Any], together: bool
) -> None:
    """Random puts and deletes of few keys, many with rows that have already expired, compared with a naive model."""
    draw = np.random.default_rng(7)
    clocked = Clocked(tmp_path, **rule)
    model: dict[int, Row] = {}

    def seen(id: int) -> Row | None:
        row, bound = model.get(id), clocked.at(TTL)
        assert bound is not None
        return None if row is None or (row["t"] is not None and row["t"] < bound) else row

    def drawn(id: int) -> dict[str, Any]:
        age = None if draw.random() < 0.1 else float(draw.choice([0, 300, 650, 700]))
        row = {"id": id, "t": clocked.at(age), "x": int(draw.integers(1000)), "y": int(draw.integers(10))}
        if rule.get("upsert") == "merge":
            return {name: value for name, value in row.items() if name == "id" or draw.random() < 0.6}
        return row

    for _ in range(60):
        writes = []
        for _ in range(int(draw.integers(1, 6))):
            id = int(draw.integers(4))
            if draw.random() < 0.15:
                writes.append(Write(pa.Table.from_pylist([{"id": id}], SCHEMA), deletes=True))
                model.pop(id, None)
                continue
            row = drawn(id)
            schema = pa.schema([SCHEMA.field(name) for name in row])
            writes.append(Write(pa.Table.from_pylist([row], schema)))
            model[id] = naive(rule, seen(id), row)
        core = clocked.table.regions.writers[0]._core
        for batch in [writes] if together else [[write] for write in writes]:
            core.serve(batch)
        assert all(write.done.result(10.0).rows == 1 for write in writes)
        expected = {id: row for id in model if (row := seen(id)) is not None}
        assert {row["id"]: row for row in clocked.table.scan().read_all().to_pylist()} == expected
        clocked.stage(str(draw.choice(STAGES, p=[0.7, 0.15, 0.1, 0.05])))
        clocked.clock.advance(float(draw.choice([0, 30, 200])))
    clocked.table.close()
    assert_clean(wal.LocalStore(clocked.uri), clocked.uri)


def test_a_write_with_expired_rows_is_gathered_with_others_where_no_rule_asks(clocked: Clocked) -> None:
    groups = WriteGroups(clocked.table.regions.context, Repeats({}), clocked.table.regions.writers[0].view)
    writes = [Write(clocked.rows((1, TTL + 1, 1))), Write(clocked.rows((1, 0, 2)))]
    assert [len(run) for run in groups.runs(writes, 1 << 20)] == [2]


@pytest.mark.parametrize("stage", STAGES)
def test_a_delete_by_filter_counts_rows_that_are_seen(stage: str, clocked: Clocked) -> None:
    clocked.table.put(clocked.rows((1, 0, 1), (2, TTL + 1, 1), (3, 0, 2)))
    clocked.stage(stage)
    receipt = clocked.table.delete(filter="x = 1")
    assert (receipt.rows, receipt.skipped) == (1, 0)
    assert clocked.found() == {3: 2}


# ---- the feed of changes ---------------------------------------------------------------------------------------------


def test_expiry_and_collection_make_no_changes(clocked: Clocked) -> None:
    clocked.table.put(clocked.rows((1, 0, 1), (2, TTL - 1, 2)))
    clocked.stage("base")
    before = [row for batch in clocked.table.changes(since="earliest") for row in batch.to_pylist()]
    clocked.clock.advance(TTL)
    clocked.table.commit()
    assert lance.dataset(clocked.uri).count_rows() == 1
    after = [row for batch in clocked.table.changes(since="earliest") for row in batch.to_pylist()]
    assert after == before
    assert len(before) == 2


# ---- the setting -----------------------------------------------------------------------------------------------------


def test_a_configuration_sets_changes_leaves_and_removes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "t.lance")
    columns = {"id": "int64", "t": "timestamp[us, UTC]"}

    def settled(**table: Any) -> flush.Ttl | None:
        caplog.clear()
        given = {"uri": uri, "key": ["id"], "columns": columns, **table}
        return initialise(load({"table": given}, {}, {}), {})[0].ttl

    day = 86_400.0
    assert settled(ttl="30d", ttl_column="t") == flush.Ttl("t", 30 * day)
    assert settled() == settled(ttl="", ttl_column="") == flush.Ttl("t", 30 * day)
    assert not caplog.text
    assert settled(ttl="7d", ttl_column="t") == flush.Ttl("t", 7 * day)
    assert f"{uri}: rows expire 7d after t; before: rows expire 30d after t" in caplog.text
    with closing(memwal.open(uri, settings={"table": {"ttl": "1h", "ttl_column": "t"}})) as table:
        assert table.status()["ttl"] == {"column": "t", "seconds": 3600.0}
    assert settled(ttl="off") is None
    assert f"{uri}: no row expires; before: rows expire 1h after t" in caplog.text
    assert settled(ttl="0") is settled() is None
    with closing(memwal.open(uri)) as table:
        assert table.status()["ttl"] is None


@pytest.mark.parametrize(
    "given",
    [
        {"ttl": "30d"},
        {"ttl_column": "t"},
        {"ttl": "30d", "ttl_column": "tt"},
        {"ttl": "30d", "ttl_column": "x"},
        {"ttl": "10ms", "ttl_column": "t"},
        {"ttl": "30", "ttl_column": "t"},
        {"ttl": "never", "ttl_column": "t"},
    ],
)
def test_a_wrong_setting_is_one_line_with_what_to_do(given: dict[str, str], tmp_path: Path) -> None:
    columns = {"id": "int64", "t": "timestamp[us, UTC]", "x": "int64"}
    with raises(memwal.Invalid):
        load({"table": {"uri": str(tmp_path / "t"), "key": ["id"], "columns": columns, **given}}, {}, {})
    made = memwal.open(tmp_path / "t", schema=SCHEMA, key="id")
    made.close()
    with pytest.raises(memwal.Invalid):
        memwal.open(tmp_path / "t", settings={"table": given})


def test_dates_expire_by_their_midnight_in_utc(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("day", pa.date32())])
    today = datetime.now(UTC).date()
    ttl = {"table": {"ttl": "2d", "ttl_column": "day"}}
    with closing(memwal.open(tmp_path / "t", schema=schema, key="id", settings=ttl)) as table:
        days: list[date | None] = [today - timedelta(days=age) for age in range(5)]
        table.put(pa.table({"id": range(6), "day": [*days, None]}, schema=schema))
        assert table.scan().read_all()["id"].to_pylist() in ([0, 1, 5], [0, 1, 2, 5])  # with 2 exactly at midnight
        assert table.count("id = 3 OR id = 4") == 0


# ---- metrics and commands --------------------------------------------------------------------------------------------


def test_a_table_to_which_nobody_writes_is_collected_by_its_loop(tmp_path: Path) -> None:
    """A metric counts it too."""
    uri, now = str(tmp_path / "t.lance"), datetime.now(UTC)
    with closing(memwal.open(uri, schema=SCHEMA, key="id", settings={"commit": {"interval": "0s"}})) as table:
        rows = {"id": [1, 2], "t": [now, now - timedelta(hours=1)], "x": [1, 2], "y": [None, None]}
        table.put(pa.table(rows, schema=SCHEMA))
        table.flush()
        table.commit()
    given = {"table": {"uri": uri, "ttl": "10min", "ttl_column": "t"}, "commit": {"interval": "100ms"}}
    with closing(open_table(load(given, {}, {}), {})) as opened:
        meter = opened.regions.context.meters.commits
        wait_until(lambda: meter.rows_expired == 1)
        assert lance.dataset(uri).to_table()["id"].to_pylist() == [1]
        families = {each.name: each for each in metrics.families(metrics.COMMITTED, {"": meter})}
        (sample,) = families["memwal_rows_expired"].samples
        assert (sample.name, sample.value) == ("memwal_rows_expired_total", 1.0)


def test_commands_collect_and_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, config = tmp_path / "t.lance", tmp_path / "c.toml"
    config.write_text(f'[table]\nuri = "{uri}"\nkey = ["id"]\nttl = "1h"\nttl_column = "t"\n[log]\nlevel = "error"\n')

    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["memwal", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    with closing(memwal.open(uri, schema=SCHEMA, key="id", settings=str(config))) as table:
        now = datetime.now(UTC)
        rows = {"id": [1, 2, 3], "t": [now, now - timedelta(hours=2), None], "x": [1, 2, 3], "y": [None] * 3}
        table.put(pa.table(rows, schema=SCHEMA))
        table.flush()
    assert command("init", str(config)).endswith("indexes: none, rows expire 1h after t\n")
    assert "rows expire 1h after t; those not deleted yet are counted" in command("status", str(config))
    assert json.loads(command("status", str(config), "--json"))["ttl"] == {"column": "t", "seconds": 3600.0}
    assert "expired rows deleted: 1" in command("commit", str(config)).splitlines()
    assert "expire 1 row" in command("log", str(config))
    assert command("verify", str(config), "--deep")


# ---- on S3 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["_deletions/", "_transactions/", "_versions/"])
@pytest.mark.parametrize(
    "fault",
    [faults.answers(403, "AccessDenied"), faults.lands_then_answers(500, "InternalError")],
    ids=["refused", "lands then 500"],
)
def test_a_write_of_a_collection_that_fails_on_s3_leaves_a_clean_table(
    s3_table_through_proxy: Any, fault_proxy: Any, key: str, fault: faults.Fault
) -> None:
    uri, options = s3_table_through_proxy
    table: dict[str, Any] = {"uri": uri, "key": ["id"], "storage_options": options, "ttl": "1h", "ttl_column": "t"}
    given = load({"table": table, "commit": {"interval": "0s"}, "regions": {"count": 1}}, {}, {})
    now = datetime.now(UTC)
    with closing(open_table(given, {}, SCHEMA)) as opened:
        opened.upkeep.maintain = lambda: None
        rows = {"id": [1, 2, 3], "t": [now, now - timedelta(hours=2), None], "x": [1, 2, 3], "y": [None] * 3}
        opened.put(pa.table(rows, schema=SCHEMA))
        opened.flush()
        opened.commit()
    base = flush.BaseTable.open(uri, options)
    expiry = base.expiry(wal.SystemClock().now())
    assert expiry is not None

    def collect() -> int:
        return ExpiredRows().collect(lance.dataset(uri, storage_options=options), expiry, options)

    fault_proxy.inject(fault, method="PUT", key=key, times=1)
    with suppress(OSError):
        collect()
    assert fault_proxy.count("PUT", key)
    fault_proxy.heal()
    with closing(memwal.open(uri, storage_options=options, read_only=True)) as reader:
        assert reader.count() == 2
    assert_clean(wal.open_store(uri, options), uri)
    collect()
    assert sorted(lance.dataset(uri, storage_options=options).to_table()["id"].to_pylist()) == [1, 3]
    assert_clean(wal.open_store(uri, options), uri)
