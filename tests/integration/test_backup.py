"""Backups beside running writers, on local disk and S3; the commands; a pipeline and its checkpoint."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.flush.backup import copying
from memwal.flush.backup.record import RECORD, read_record
from memwal.wal import open_store
from tests import fault_proxy as faults
from tests.backups import backed_up, restored, rows_of, tags
from tests.conftest import toml, wait_until
from tests.fault_proxy import FaultProxy
from tests.s3_fixtures import S3Table
from tests.support.garbage import collect

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("writer", pa.int64()),
        pa.field("op", pa.int64()),
        pa.field("note", pa.string()),
    ]
)
BY_HAND = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
WRITERS, ROWS = 2, 6
KEYS = 40
_PAUSE = 0.01
"""Seconds between two writes of a writer: the load leaves the backup a share of the processors."""


# ---- beside writers --------------------------------------------------------------------------------------------------


@dataclass
class Op:
    """One write of one writer: rows, or the keys of a delete."""

    number: int
    rows: list[dict[str, Any]]
    deletes: bool
    began: float
    acked: float = float("inf")


@dataclass
class Load:
    """Threads that put, delete, flush, commit and collect garbage, with a record of the acknowledged writes."""

    table: Any
    uri: str
    keyed: bool
    ops: dict[int, list[Op]] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    commits: int = 0
    collected: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        jobs = [*(lambda w=w: self._write(w) for w in range(WRITERS)), self._upkeep, self._collect]
        threads = [threading.Thread(target=self._guarded, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert self.errors == []

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            while not self._stop.wait(_PAUSE):
                job()
        except Exception as error:  # noqa: BLE001 - reported by the test
            self.errors.append(error)

    def _write(self, writer: int) -> None:
        """Return the next write of one writer: mostly puts; with a key, some deletes of earlier rows, and repeated
        keys.
        """
        ops = self.ops.setdefault(writer, [])
        number, clock = len(ops), wal.SystemClock()
        deletes = self.keyed and number % 4 == 3
        ids = [writer * 1000 + (number * ROWS + n) % KEYS if self.keyed else number * ROWS + n for n in range(ROWS)]
        rows = [{"id": id, "writer": writer, "op": number, "note": f"of {writer}"} for id in ids]
        ops.append(Op(number, rows[:2] if deletes else rows, deletes, clock.now()))
        self.send(self.table, writer, ops[-1])
        ops[-1].acked = clock.now()

    @staticmethod
    def send(table: Any, writer: int, op: Op) -> Any:
        token = f"writer-{writer}:{op.number}"
        return (
            table.delete([row["id"] for row in op.rows], token=token) if op.deletes else table.put(op.rows, token=token)
        )

    def _upkeep(self) -> None:
        self.table.flush()
        self.table.commit()
        self.commits += 1
        with suppress(OSError):  # another clean-up may delete the file
            lance.dataset(self.uri).cleanup_old_versions(retain_versions=2, error_if_tagged_old_versions=False)

    def _collect(self) -> None:
        found = collect(self.uri, wal=2.0, manifest=86_400.0, orphans=False)
        self.collected += found.entries + found.committed

    def check(self, uri: str, record: Any) -> None:
        """Check the restored rows. For each writer and region they are the state after a prefix of its writes. The
        prefix has every write that was acknowledged before the backup began, and none that began after the backup's
        snapshot.
        """
        base, found = BaseTable.open(uri), rows_of(uri)
        for writer, ops in self.ops.items():
            mine = [row for row in found if row["writer"] == writer]
            for bucket in range(base.buckets):
                least = sum(op.acked < record.began for op in ops)
                most = sum(op.began <= record.captured for op in ops)
                here = _of_bucket(base, mine, bucket)
                states = [self._state(base, ops[:upto], bucket) for upto in range(least, most + 1)]
                assert here in states, (writer, bucket, least, most)

    def _state(self, base: BaseTable, ops: list[Op], bucket: int) -> list[dict[str, Any]]:
        state: dict[Any, dict[str, Any]] = {}
        for op in ops:
            for row in op.rows:
                key = row["id"] if self.keyed else (row["id"], row["op"])
                state.pop(key, None)
                if not op.deletes:
                    state[key] = row
        return _of_bucket(base, list(state.values()), bucket)


def _of_bucket(base: BaseTable, rows: list[dict[str, Any]], bucket: int) -> list[dict[str, Any]]:
    if not rows:
        return []
    routed = base.route(pa.Table.from_pylist(rows, schema=SCHEMA))
    return sorted((row for row, to in zip(rows, routed, strict=True) if to == bucket), key=_order)


def _order(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["id"], row["writer"], row["op"]


@pytest.mark.parametrize("keyed", [True, False])
def test_backups_beside_writers_deletes_flushes_commits_and_collections(keyed: bool, uri: str, tmp_path: Path) -> None:
    key = "id" if keyed else ()
    indexes = {"op": "btree"}
    records = []
    with memwal.open(uri, schema=SCHEMA, key=key, regions=3, indexes=indexes, settings=BY_HAND) as table:
        load = Load(table, uri, keyed)
        with load.running():
            for number in range(3):
                done = load.commits
                wait_until(lambda done=done: load.commits > done + 1 or load.errors)
                records.append(backed_up(uri, str(tmp_path / f"backup-{number}"), at_once=8))
            wait_until(lambda: load.collected or load.errors)
    assert tags(uri) == []
    for number, record in enumerate(records):
        place = str(tmp_path / f"restored-{number}")
        assert restored(str(tmp_path / f"backup-{number}"), place, at_once=8).record == record
        load.check(place, record)
        assert "op_idx" in {index.name for index in lance.dataset(place).describe_indices()}
    # Send all writes again, in their order and with their tokens: each is applied once, whether the backup had it or
    # not.
    with memwal.open(place, settings=BY_HAND) as again:
        for writer, ops in load.ops.items():
            for op in ops:
                load.send(again, writer, op)
    assert sorted(rows_of(place), key=_order) == sorted(rows_of(uri), key=_order)


# ---- local disk and S3 -----------------------------------------------------------------------------------------------


def test_from_local_disk_to_s3_to_s3_and_back(
    uri: str, s3_table: S3Table, tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects above 200 bytes are streamed, smaller ones copied whole."""
    monkeypatch.setattr(copying, "WHOLE_MAX", 200)
    remote, options = s3_table.uri, s3_table.storage_options
    with memwal.open(uri, schema=made.schema, key="id", indexes={"body": "fts"}, settings=BY_HAND) as table:
        table.put(made.rows(range(50)), token="loader:1")
        table.flush()
        table.commit()
        table.put(made.rows(range(40, 70), version=1), token="loader:2")
        table.flush()
        table.put(made.rows(range(65, 80), version=2), token="loader:3")
    wanted = rows_of(uri)
    stores = {name: open_store(f"{remote}/{name}", options) for name in ("first", "table", "second")}
    backed_up(uri, stores["first"], at_once=8)
    restored(stores["first"], stores["table"], at_once=8)
    assert rows_of(f"{remote}/table", options) == wanted
    backed_up(stores["table"], stores["second"], at_once=8)
    assert tags(f"{remote}/table", options) == []
    restored(stores["second"], str(tmp_path / "back"), at_once=8)
    assert rows_of(str(tmp_path / "back")) == wanted
    with memwal.open(f"{remote}/table", storage_options=options, settings=BY_HAND) as again:
        assert not again.put(made.rows(range(65, 80), version=5), token="loader:3").applied
        again.put(made.rows([80]), token="loader:4")
        again.flush()
        again.commit()
    assert len(rows_of(f"{remote}/table", options)) == len(wanted) + 1


@pytest.mark.usefixtures("retries_at_once")
def test_storage_that_fails_now_and_then(
    uri: str, s3_table_through_proxy: S3Table, fault_proxy: FaultProxy, tmp_path: Path, made: Any
) -> None:
    remote, options = s3_table_through_proxy
    with memwal.open(uri, schema=made.schema, key="id", settings=BY_HAND) as table:
        table.put(made.rows(range(50)))
        table.flush()
        table.commit()
        table.put(made.rows(range(40, 70), version=1))
    stores = {name: open_store(f"{remote}/{name}", options) for name in ("first", "table", "second")}
    ways = faults.answers(503, "SlowDown"), faults.resets(), faults.lands_then_answers(500, "InternalError")
    for fault in ways:
        fault_proxy.inject(fault, times=None, share=0.04)
    backed_up(uri, stores["first"])
    restored(stores["first"], stores["table"])
    backed_up(stores["table"], stores["second"])
    restored(stores["second"], str(tmp_path / "back"))
    assert sum(bool(each.fault) for each in fault_proxy.requests) > 5
    fault_proxy.heal()
    assert rows_of(str(tmp_path / "back")) == rows_of(uri)


# ---- the commands ----------------------------------------------------------------------------------------------------


def configuration(path: Path, uri: str, options: Mapping[str, str] | None = None, **sections: Any) -> Path:
    table: dict[str, Any] = {"uri": uri} | ({"storage_options": dict(options)} if options else {})
    path.write_text(toml({"table": table} | sections))
    return path


@pytest.fixture
def config(uri: str, tmp_path: Path, made: Any) -> Path:
    """Return the configuration of a table with rows in its base, in an SST and in its log."""
    with memwal.open(uri, schema=made.schema, key="id", settings=BY_HAND) as table:
        table.put(made.rows(range(20)))
        table.flush()
        table.commit()
        table.put(made.rows(range(10, 30), version=1))
    return configuration(tmp_path / "table.toml", uri)


def test_the_commands(config: Path, uri: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    dest, new = tmp_path / "backups" / "monday", tmp_path / "new.lance"
    ran = cli("backup", config, dest)
    assert (ran.code, ran.err) == (0, "")
    assert f"backed up {uri} to {dest}, as of 20" in ran.out
    assert "UTC: version " in ran.out
    other = configuration(tmp_path / "new.toml", str(new))
    ran = cli("restore", other, dest)
    assert (ran.code, ran.err) == (0, "")
    assert "verified: clean; `memwal run` and `memwal serve` go on from here" in ran.out
    assert rows_of(str(new)) == rows_of(uri)
    assert cli("verify", other, "--deep").code == 0
    assert "row 25 v1" in cli("query", other, "--key", "25", "--columns", "name").out
    reads_backup = configuration(tmp_path / "backup.toml", str(dest))
    assert cli("verify", reads_backup, "--deep").code == 0
    assert "row 25 v1" in cli("query", reads_backup, "--key", "25", "--columns", "name").out
    with memwal.open(str(new), settings=BY_HAND):
        pass  # claims regions, as `memwal serve` does


def test_a_load_is_not_repeated_after_a_restore(
    config: Path, uri: str, tmp_path: Path, made: Any, cli: Callable[..., Any]
) -> None:
    """The commands print JSON."""
    pq.write_table(made.table(range(25, 40), version=2), tmp_path / "more.parquet")
    load = ("load", config, tmp_path / "more.parquet", "--token", "monday")
    assert cli(*load).code == 0
    said = json.loads(cli("backup", config, tmp_path / "dest", "--json").out)
    record = read_record(open_store(str(tmp_path / "dest")))
    assert (said["backup"], said["uri"], said["id"]) == (str(tmp_path / "dest"), uri, record.id)
    assert (said["objects"], said["bytes"]) == (len(record.objects), record.size)
    assert said["began"] <= said["captured"] <= said["finished"]
    other = configuration(tmp_path / "new.toml", str(tmp_path / "new.lance"))
    said = json.loads(cli("restore", other, tmp_path / "dest", "--json").out)
    assert said["verified"]["findings"] == []
    assert (said["restored"], said["id"]) == (str(tmp_path / "new.lance"), record.id)
    with memwal.open(str(tmp_path / "new.lance"), settings=BY_HAND) as table:
        table.put(made.rows([30], version=3))
        table.flush()
        table.commit()
    ran = cli(load[0], other, *load[2:])
    assert (ran.code, ran.err) == (0, "")
    found = {row["id"]: row["name"] for row in rows_of(str(tmp_path / "new.lance"))}
    assert (found[29], found[30], found[31]) == ("row 29 v2", "row 30 v3", "row 31 v2")


def test_s3_options_of_the_place_of_a_backup(
    config: Path, uri: str, tmp_path: Path, s3_table: S3Table, cli: Callable[..., Any]
) -> None:
    dest, given = f"{s3_table.uri}/backup", dict(s3_table.storage_options)
    secret = given.pop("secret_access_key")
    options = [word for name, value in given.items() for word in ("--option", f"{name}={value}")]
    options += ["--option", "secret_access_key=env:BACKUP_SECRET"]
    ran = cli("backup", config, dest, *options)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "--option.secret_access_key: the environment variable BACKUP_SECRET is not set" in ran.err
    ran = cli("backup", config, dest, *options, env={"BACKUP_SECRET": secret})
    assert (ran.code, ran.err) == (0, "")
    # The table of this configuration is on S3 too, so the same options serve both.
    remote = configuration(tmp_path / "s3.toml", f"{s3_table.uri}/new", s3_table.storage_options)
    ran = cli("restore", remote, dest)
    assert (ran.code, ran.err) == (0, "")
    assert rows_of(f"{s3_table.uri}/new", s3_table.storage_options) == rows_of(uri)


def test_bad_input_is_one_line_and_exit_code_2(config: Path, uri: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    filled = tmp_path / "filled"
    filled.mkdir()
    (filled / "mine").touch()
    nothing = configuration(tmp_path / "nothing.toml", str(tmp_path / "nothing.lance"))
    for words, says in (
        (("backup", config, filled), "it is not empty; give an empty place"),
        (("backup", config, f"{uri}/below"), "it is in the table that is backed up"),
        (("backup", config, "gs://bucket/x"), "storage scheme 'gs' is not supported"),
        (("backup", config, tmp_path / "x", "--option", "a=b"), "is a local path, which has no storage options"),
        (("backup", config, "s3://bucket/x", "--option", "region"), "write NAME=VALUE"),
        (("backup", nothing, tmp_path / "x"), "the table does not exist"),
        (("restore", nothing, filled), "no backup is there, backup.json is missing"),
        (("restore", nothing, tmp_path / "missing"), "no backup is there, backup.json is missing"),
        (("restore", config, tmp_path / "whole"), "a restore writes over nothing; set table.uri to a new place"),
    ):
        if words[-1] == tmp_path / "whole":
            assert cli("backup", config, tmp_path / "whole").code == 0
        ran = cli(*words)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
        assert says in ran.err
    assert not (tmp_path / "nothing.lance").exists()
    assert not (tmp_path / "x").exists()


def test_a_damaged_backup_is_refused_and_a_killed_one_resumed(
    config: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    dest = tmp_path / "dest"
    assert cli("backup", config, dest).code == 0
    other = configuration(tmp_path / "new.toml", str(tmp_path / "new.lance"))
    victim = next(path for path in dest.rglob("*.lance") if path.is_file())
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    ran = cli("restore", other, dest)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "its checksum is another one than recorded; the backup is damaged" in ran.err
    ran = cli("init", other)
    assert (ran.code, ran.err.count("\n")) == (2, 1), "nobody makes a table in a half restored one"
    assert "a restore is not finished here" in ran.err
    (dest / RECORD).unlink()
    (dest / "backup-unfinished.json").write_text("{}")
    ran = cli("restore", other, dest)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "the backup is not finished" in ran.err
    ran = cli("backup", config, dest)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "an unfinished backup is there; if no process works on it, go on with --resume" in ran.err


def test_a_backup_whose_process_is_killed_is_resumed(
    config: Path,
    uri: str,
    tmp_path: Path,
    s3_table_through_proxy: S3Table,
    fault_proxy: FaultProxy,
    start: Callable[..., Any],
    cli: Callable[..., Any],
) -> None:
    dest, options = f"{s3_table_through_proxy.uri}/backup", s3_table_through_proxy.storage_options
    words = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
    fault_proxy.latency = 0.2
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "backup", str(config), dest, *words])
    wait_until(lambda: fault_proxy.count("PUT", "/wal/"))
    running.process.send_signal(signal.SIGKILL)
    running.process.wait()
    fault_proxy.latency = 0.0
    assert len(tags(uri)) == 1
    ran = cli("backup", config, dest, *words)
    assert (ran.code, "go on with --resume" in ran.err) == (2, True)
    ran = cli("backup", config, dest, *words, "--resume")
    assert (ran.code, ran.err) == (0, "")
    assert tags(uri) == []
    new = configuration(tmp_path / "new.toml", str(tmp_path / "new.lance"))
    assert cli("restore", new, dest, *words).code == 0
    assert rows_of(str(tmp_path / "new.lance")) == rows_of(uri)


@pytest.mark.parametrize("key", ["id", ()])
@pytest.mark.parametrize("token", ["6f1c2f8e-6f0a-4d0e-9c8e-0a3a5d0c7f11:0", "loader:0"])
def test_a_table_without_a_key_that_a_query_wrote_needs_its_checkpoint(
    key: str | tuple[()], token: str, uri: str, tmp_path: Path, made: Any, cli: Callable[..., Any]
) -> None:
    with memwal.open(uri, schema=made.schema, key=key, settings=BY_HAND) as table:
        table.put(made.rows(range(20)), token=token)
    assert cli("backup", configuration(tmp_path / "table.toml", uri), tmp_path / "dest").code == 0
    ran = cli("restore", configuration(tmp_path / "new.toml", str(tmp_path / "new.lance")), tmp_path / "dest")
    assert (ran.code, ran.err) == (0, "")
    told = "the table has no key: begin with the checkpoint of the original table" in ran.out
    assert told == (key == () and not token.startswith("loader"))


# ---- a pipeline ------------------------------------------------------------------------------------------------------


def test_a_pipeline_goes_on_from_its_checkpoint(
    small_config: Callable[..., Path], tmp_path: Path, uri: str, made: Any, cli: Callable[..., Any]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(made.table(range(30)), source / "0.parquet")
    config = small_config(source={"path": str(source)})
    assert cli("run", config, "--once").code == 0
    assert cli("backup", config, tmp_path / "backup").code == 0
    pq.write_table(made.table(range(20, 50), version=1), source / "1.parquet")
    assert cli("run", config, "--once").code == 0
    (query,) = read_record(open_store(str(tmp_path / "backup"))).queries
    shutil.move(uri, tmp_path / "lost.lance")
    ran = cli("restore", config, tmp_path / "backup")
    assert f"query {query}: micro-batch 0 is the last one in it" in ran.out
    ran = cli("run", config, "--once")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "notes micro-batch 1 as done, the backup has up to 0, so rows may be left out" in ran.err
    assert "remove numbers above 0 from its offsets, above -1 from its commits" in ran.err
    for name, above in (("offsets", 0), ("commits", -1)):
        for file in Path(f"{uri}.checkpoint", name).iterdir():
            if int(file.name.strip(".").removesuffix(".crc")) > above:
                file.unlink()
    ran = cli("run", config, "--once")
    assert (ran.code, ran.err) == (0, "")
    assert {row["id"]: row["name"] for row in rows_of(uri)} == {n: f"row {n} v{n >= 20:d}" for n in range(50)}
    assert flush.BaseTable.open(uri).restored is not None
