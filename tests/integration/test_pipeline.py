"""`memwal run` as a user starts it: once, again, into errors, and killed in the middle."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.ingest.engine.table.create import find_or_create
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import load
from memwal.ingest.spark.pipeline.checkpoint import MARKER
from memwal.ingest.spark.pipeline.checks import check
from tests.conftest import Cli, Running, SmallConfig, Start, WaitUntil
from tests.messages import raises

_YEAR_2300 = 10_413_792_000.0


def write_feed(directory: Path, *tables: pa.Table) -> str:
    directory.mkdir(exist_ok=True)
    for number, table in enumerate(tables):
        pq.write_table(table, directory / f"{number:03d}.parquet")
    return str(directory)


def names(uri: str) -> dict[int, str]:
    """Return the rows that plain Lance finds in the base table."""
    rows = lance.dataset(uri).to_table(["id", "name"]).to_pylist()
    found = {row["id"]: row["name"] for row in rows}
    assert len(found) == len(rows), "a key is there twice"
    return found


def narrow_vector(made: Any) -> pa.Table:
    """Return rows; one of them has a vector that is too short for the table: readable, and rejected in the stream."""
    rows = made.rows(range(5))
    rows[3]["vector"] = [1.0, 2.0]
    loose = pa.schema([*list(made.schema)[:4], pa.field("vector", pa.list_(pa.float32()))])
    return pa.Table.from_pylist(rows, schema=loose)


@pytest.fixture
def fed(small_config: SmallConfig, tmp_path: Path, made: Any) -> Callable[..., Path]:
    """Return a configuration with a feed of ten files: 200 rows, and 100 of them once more."""

    def write(**source: Any) -> Path:
        tables = [made.table(range(start, start + 40)) for start in range(0, 200, 40)]
        tables += [made.table(range(start, start + 20), version=1) for start in range(0, 100, 20)]
        feed = write_feed(tmp_path / "feed", *tables)
        return small_config(source={"feed": feed, "path": str(tmp_path / "in"), **source})

    return write


EXPECTED = {id: f"row {id} v{1 if id < 100 else 0}" for id in range(200)}


def test_once_then_again(fed: Callable[..., Path], uri: str, cli: Cli) -> None:
    config = fed()
    first = cli("run", config, "--once")
    assert (first.code, first.error_lines) == (0, [])
    assert names(uri) == EXPECTED
    assert "300 in 10 micro-batches" in first.out
    assert "micro-batch 9: 300 rows in" in first.out
    assert all(f"by {name}" in first.out for name in ("key", "filter", "vector", "text"))
    assert not any(character in first.out for character in "\x1b\r")
    version = lance.dataset(uri).version
    again = cli("run", config, "--once")
    assert (again.code, again.error_lines) == (0, [])
    assert "0: the source holds nothing new" in again.out
    assert (names(uri), lance.dataset(uri).version) == (EXPECTED, version)


def test_a_run_killed_while_it_wrote_its_first_offsets_is_followed_by_another(
    small_config: SmallConfig, tmp_path: Path, uri: str, made: Any, cli: Cli
) -> None:
    """Spark writes a temporary file and renames it; a kill between the two leaves the file."""
    directory = write_feed(tmp_path / "in", made.table(range(30)))
    checkpoint = Path(f"{uri}.checkpoint")
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / ".0.3f0f3d9c-6a52-4f6e-9b0a-0a5c0f6d6c11.tmp").write_text("v1\n")
    config = small_config(source={"path": str(directory)})
    assert cli("init", config).code == 0
    (checkpoint / MARKER).write_text(BaseTable.open(uri).table_id)
    ran = cli("run", config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert sorted(names(uri)) == list(range(30))


def test_a_file_dated_far_ahead_hides_no_later_file(
    small_config: SmallConfig, tmp_path: Path, uri: str, made: Any, cli: Cli
) -> None:
    directory = write_feed(tmp_path / "in", made.table(range(30)))
    os.utime(Path(directory) / "000.parquet", (_YEAR_2300, _YEAR_2300))
    config = small_config(source={"path": directory})
    assert cli("run", config, "--once").code == 0
    pq.write_table(made.table(range(30, 50)), Path(directory) / "later.parquet")
    pq.write_table(made.table(range(50, 60)), Path(directory) / "older.parquet")
    os.utime(Path(directory) / "older.parquet", (-86_400, -86_400))
    ran = cli("run", config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert sorted(names(uri)) == list(range(60))


@pytest.mark.parametrize("batches", [1, 9])  # Spark compacts its list of files at the tenth
def test_a_deleted_file_of_a_failed_micro_batch_is_named(
    small_config: SmallConfig, tmp_path: Path, uri: str, made: Any, cli: Cli, batches: int
) -> None:
    landing = tmp_path / "in"
    write_feed(landing, *(made.table(range(at * 10, at * 10 + 10)) for at in range(batches)))
    config = small_config(source={"path": str(landing), "files_per_trigger": 1})
    if batches > 1:
        assert cli("run", config, "--once").code == 0
    pq.write_table(narrow_vector(made), landing / "has a problem.parquet")
    assert cli("run", config, "--once").code == 2
    (landing / "has a problem.parquet").unlink()
    for lines in (1, 0):
        ran = cli("run", config, "--once")
        assert (ran.code, len(ran.error_lines)) == (0, lines)
        assert ran.err.count("has%20a%20problem.parquet; to load a file, land it under another name") == lines
    assert sorted(names(uri)) == list(range(batches * 10))


def test_a_killed_daemon_costs_time_only_and_a_signal_ends_the_run_in_order(
    fed: Callable[..., Path], uri: str, start: Start, wait_until: WaitUntil
) -> None:
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(fed())])
    running.line_with("micro-batch")
    (daemon,) = [each for each in below(running) if "memwal.ingest.service.daemon" in command_of(each)]
    daemon.kill()
    running.line_with("micro-batch 9")
    wait_until(lambda: running.errors)
    every = below(running)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    (said,) = [line for line in running.errors if line.strip()]
    assert said.endswith(": the daemon ended (signal 9) and is started again")
    assert running.lines[-1].startswith("stopped after ")
    _, alive = psutil.wait_procs(every, timeout=60)
    assert alive == []
    with memwal.open(uri, read_only=True) as table:
        assert {row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()} == EXPECTED


def below(running: Running) -> list[psutil.Process]:
    return psutil.Process(running.process.pid).children(recursive=True)


def command_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # some of Spark's processes live only for a moment
        return " ".join(process.cmdline())
    return ""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path, made: None, "source.path"),
        (lambda path, made: write_feed(path, made.table(range(3)).drop_columns(["body"])), "no column 'body'"),
        (lambda path, made: write_feed(path, made.table([1]).append_column("more", pa.array([1]))), "'more' that"),
        (lambda path, made: (path.mkdir(), (path / "a.parquet").write_text("no")), "a.parquet is no readable Parquet"),
    ],
    ids=["missing", "column missing", "column extra", "not parquet"],
)
def test_a_source_that_cannot_be_read_is_refused_before_anything_is_written(
    make: Callable[[Path, Any], object],
    says: str,
    small_config: SmallConfig,
    tmp_path: Path,
    made: Any,
    cli: Cli,
    tree: Any,
) -> None:
    make(tmp_path / "in", made)
    drift = "fail" if "more" in says else "ignore"  # leaves out columns that the table does not have
    config = small_config(source={"path": str(tmp_path / "in"), "schema_drift": drift})
    before = tree(tmp_path)
    ran = cli("run", config, "--once")
    assert ran.code == 2
    assert len(ran.error_lines) == 1
    assert says in ran.err
    assert tree(tmp_path) == before


def test_a_path_that_is_no_table_and_a_checkpoint_without_its_table(
    fed: Callable[..., Path], tmp_path: Path, uri: str, cli: Cli, tree: Any
) -> None:
    config = fed()
    Path(uri).mkdir()
    (Path(uri) / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    ran = cli("run", config, "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert uri in ran.err
    assert tree(tmp_path) == before
    (Path(uri) / "notes.txt").unlink()
    Path(uri).rmdir()
    offsets = Path(f"{uri}.checkpoint") / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text("v1")
    before = tree(tmp_path)
    ran = cli("run", config, "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "sink.checkpoint" in ran.err
    assert tree(tmp_path) == before


def test_a_port_in_use_is_refused_before_anything_is_written(
    fed: Callable[..., Path], small_config: SmallConfig, tmp_path: Path, cli: Cli, tree: Any
) -> None:
    fed()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        source = {"feed": str(tmp_path / "feed"), "path": str(tmp_path / "in")}
        config = small_config(source=source, daemon={"port": port})
        before = tree(tmp_path)
        ran = cli("run", config, "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "daemon.port" in ran.err
    assert str(port) in ran.err
    assert tree(tmp_path) == before


def test_without_java_one_line_says_what_to_install(
    fed: Callable[..., Path], tmp_path: Path, cli: Cli, tree: Any
) -> None:
    config = fed()
    before = tree(tmp_path)
    ran = cli("run", config, "--once", env={"PATH": str(tmp_path), "JAVA_HOME": None})
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "openjdk-17-jre-headless" in ran.err
    assert tree(tmp_path) == before


def test_a_refused_row_in_the_stream_is_one_line(
    small_config: SmallConfig, tmp_path: Path, made: Any, cli: Cli
) -> None:
    directory = write_feed(tmp_path / "in", narrow_vector(made))
    config = small_config(source={"path": directory})
    ran = cli("run", config, "--once")
    assert ran.code == 2
    assert len(ran.error_lines) == 1
    assert "'vector' has 2 numbers" in ran.err
    assert "the table wants 8" in ran.err
    assert "row 3 of 000.parquet" in ran.err
    left = cli("query", config, "--format", "json")
    assert (left.code, left.out.strip()) == (0, "[]")


def test_a_checkpoint_of_another_table_is_refused(tmp_path: Path) -> None:
    """A table created again at the same path has none of the rows that the old checkpoint counts as done."""
    landing = tmp_path / "landing"
    landing.mkdir()
    section = {"uri": str(tmp_path / "t.lance"), "key": ["id"], "columns": {"id": "int64"}}
    settings = load({"table": section, "source": {"path": str(landing)}}, {})
    checkpoint = Path(settings.checkpoint)
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "0").touch()
    base, _ = find_or_create(settings, {})
    for content in (None, "0" * 32):
        if content is not None:
            (checkpoint / MARKER).write_text(content)
        with raises(Invalid):
            check(settings, os.environ)
    (checkpoint / MARKER).write_text(base.table_id)
    assert check(settings, os.environ) is not None


@pytest.mark.parametrize("kept", [0, 1], ids=["offsets deleted", "last micro-batch missing"])
def test_a_checkpoint_that_lacks_a_micro_batch_of_the_table_is_refused(
    kept: int, small_config: SmallConfig, tmp_path: Path, made: Any, uri: str, cli: Cli
) -> None:
    """Spark would give that number to the next rows, and the regions would treat them as applied."""
    source, parts = tmp_path / "in", [made.table(range(start, start + 10)) for start in range(0, 40, 10)]
    config = small_config(source={"path": write_feed(source, *parts[: kept + 1]), "files_per_trigger": 1})
    assert cli("run", config, "--once").code == 0
    for name in ("offsets", "commits", "sources/0"):
        (Path(f"{uri}.checkpoint") / name / str(kept)).unlink()
    write_feed(source, *parts)
    ran = cli("run", config, "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert f"the checkpoint is older than the table: regions have micro-batches up to {kept} " in ran.err
    assert set(names(uri)) == set(range(10 * (kept + 1)))
    ran = cli("run", config, "--once", env={"MEMWAL__SINK__CHECKPOINT": str(tmp_path / "anew")})
    assert ran.code == 0
    assert set(names(uri)) == set(range(40)), "a new checkpoint reads all of it"
