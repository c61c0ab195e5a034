"""Daemons and streams on a real Spark cluster: a standalone master and two workers as separate processes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memwal
from tests.conftest import Cli, Running, SmallConfig, Start, WaitUntil, toml
from tests.s3_server import free_ports
from tests.spark_cluster import HOSTS, SparkCluster, quick

TOKEN = {"TABLE_TOKEN": "known to workers"}
"""The daemons' token; executors get it from their worker."""
COLUMNS = {"id": "int64", "name": "string"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """Start a master and two workers with two cores each."""
    with SparkCluster.started(tmp_path_factory.mktemp("spark"), TOKEN) as started:
        yield started


@pytest.fixture
def config(cluster: SparkCluster, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a configuration like a user of the cluster, with relative paths, and returns its
    path.
    """

    def write(**sections: dict[str, Any]) -> Path:
        spark = quick(cluster.master) | sections.pop("spark", {})
        whole: dict[str, dict[str, Any]] = {
            "table": {"uri": "table.lance", "columns": COLUMNS, "key": ["id"]},
            "regions": {"count": 8},
            "source": {"spark": spark},
            "daemon": {"token": "env:TABLE_TOKEN"},
        }
        for name, values in sections.items():
            whole[name] = whole.get(name, {}) | values
        path = tmp_path / "config.toml"
        path.write_text(toml(whole))
        return path

    return write


@pytest.fixture
def command(start: Start, tmp_path: Path) -> Callable[..., Running]:
    """Start a command of memwal in the directory of its configuration."""
    return lambda *words: start(
        [sys.executable, "-m", "memwal.ingest.cli.app", *map(str, words)], cwd=tmp_path, env=TOKEN
    )


def rows(ids: range, version: int) -> list[dict[str, Any]]:
    return [{"id": id, "name": f"row {id} v{version}"} for id in ids]


def land(file: Path, ids: range, *more: str) -> None:
    """Write a file that Spark sees only when it is complete; `more`: lines that are not rows."""
    lines = [*map(json.dumps, rows(ids, 1)), *more]
    part = file.parent.parent / file.name
    part.write_text("\n".join(lines) + "\n")
    part.rename(file)


def endpoints_in(line: str) -> list[str]:
    return line.rpartition(" at ")[2].split(", ")


def test_daemons_on_spark_end_in_order_by_a_signal(
    config: Callable[..., Path], command: Callable[..., Running], tmp_path: Path
) -> None:
    driver = command("serve", config(spark={"spark.master": "local[2]"}), "--on-spark", "2")
    endpoints = endpoints_in(driver.line_with("serving"))
    assert len(endpoints) == 2
    with memwal.connect(endpoints, token=TOKEN["TABLE_TOKEN"]) as table:
        assert {region["owner"] for region in table.status()["regions"]} <= set(endpoints)
        assert table.put(rows(range(100), 1)).applied
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    with memwal.open(str(tmp_path / "table.lance")) as table:
        assert len(table) == 100


@pytest.mark.long
def test_a_worker_that_is_killed_costs_no_acked_row(
    cluster: SparkCluster,
    config: Callable[..., Path],
    command: Callable[..., Running],
    tmp_path: Path,
    wait_until: WaitUntil,
) -> None:
    together = {"spark.cores.max": "4", "spark.scheduler.minRegisteredResourcesRatio": "1.0"}
    driver = command("serve", config(spark=together), "--on-spark", "2")
    before = endpoints_in(driver.line_with("serving"))
    assert [len(worker.running("memwal.ingest.service.daemon")) for worker in cluster.workers] == [1, 1]
    token = TOKEN["TABLE_TOKEN"]
    with memwal.connect(before[0], token=token) as table:
        assert table.put(rows(range(100), 1)).applied

    cluster.workers[1].kill()
    after = endpoints_in(driver.line_with("serving"))
    assert len(after) == 2
    assert not set(before) & set(after)
    with memwal.connect(after[1], token=token) as table:
        assert table.get([7, 99]).to_pylist() == rows(range(7, 100, 92), 1)
        table.put(rows(range(50), 2))
    cluster.add_worker(HOSTS[1])

    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    wait_until(lambda: not cluster.started_by_workers())
    with memwal.open(str(tmp_path / "table.lance")) as table:
        found = sorted(table.scan().read_all().to_pylist(), key=lambda row: row["id"])
    assert found == rows(range(50), 2) + rows(range(50, 100), 1)


def test_more_daemons_than_the_cluster_has_slots_is_one_line(
    config: Callable[..., Path], cli: Cli, tmp_path: Path
) -> None:
    ran = cli("serve", config(spark={"spark.cores.max": "4"}), "--on-spark", "5", cwd=tmp_path, env=TOKEN, process=True)
    assert (ran.code, len(ran.error_lines), ran.out) == (2, 1, "")
    assert "daemon.on_spark: 5 daemons need 5 slots at the same time, and Spark at spark://127.0.0.1" in ran.err


def test_an_address_that_others_reach_needs_protection(small_config: SmallConfig, cli: Cli) -> None:
    config = small_config(daemon={"host": "0.0.0.0", "port": 1}, source={"spark": quick("local[2]")})
    ran = cli("serve", config, "--on-spark", "2")
    assert (ran.code, len(ran.error_lines), ran.out) == (2, 1, "")
    assert "daemon.host: 0.0.0.0 is not a loopback address" in ran.err


def test_a_cluster_that_has_no_room_for_an_executor_is_one_line(
    config: Callable[..., Path], cli: Cli, tmp_path: Path
) -> None:
    too_large = {"spark.executor.memory": "64g", "spark.scheduler.maxRegisteredResourcesWaitingTime": "1s"}
    (tmp_path / "in").mkdir()
    path = config(spark=too_large, source={"path": "in"}, daemon={"on_spark": 2})
    ran = cli("run", path, cwd=tmp_path, env=TOKEN, process=True)
    assert (ran.code, len(ran.error_lines)) == (1, 1)
    assert "gave no executor within 1 s; see on its page whether a worker has room for one of all cores" in ran.err


@pytest.mark.parametrize("words", [("serve", "--on-spark", "2"), ("run",)])
def test_a_master_that_is_not_there_is_told_at_once(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    (port,) = free_ports(1)
    (tmp_path / "in").mkdir()
    master = f"spark://127.0.0.1:{port}"
    path = tmp_path / "config.toml"
    source = {"path": "in", "spark": {"spark.master": master}}
    path.write_text(toml({"table": {"uri": "t.lance", "columns": COLUMNS, "key": ["id"]}, "source": source}))
    ran = cli(words[0], path, *words[1:], cwd=tmp_path)
    assert (ran.code, len(ran.error_lines), ran.out) == (1, 1, "")
    assert f"Spark's master does not answer at {master} (Connection refused); start it" in ran.err
    assert not (tmp_path / "t.lance").exists()


def test_a_stream_outlives_a_worker_and_the_master_with_every_row_once(
    cluster: SparkCluster,
    config: Callable[..., Path],
    command: Callable[..., Running],
    cli: Cli,
    tmp_path: Path,
    wait_until: WaitUntil,
) -> None:
    landing = tmp_path / "in"
    landing.mkdir()
    path = config(
        table={"uri": "table.lance", "columns": COLUMNS, "key": [], "append_only": True},
        source={"format": "json", "path": "in"},
        spark={"spark.cores.max": "3"},  # just enough: two daemons and the stream
        daemon={"on_spark": 2, "token": "env:TABLE_TOKEN"},
        dlq={"mode": "table"},
    )
    land(landing / "1.json", range(100), "no row")
    running = command("run", path)
    running.line_with("micro-batch 0")
    cluster.workers[0].kill()  # its executor ends too
    cluster.add_worker().says("Asked to launch executor")  # which needs the master
    land(landing / "2.json", range(100, 200))
    running.line_with("micro-batch 1")
    cluster.leader().kill()
    land(landing / "3.json", range(200, 300))
    running.line_with("micro-batch 2")
    found = cli("query", path, "--format", "json", "--limit", "1000", cwd=tmp_path, env=TOKEN)
    assert sorted(row["id"] for row in json.loads(found.out)) == list(range(300))

    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    wait_until(lambda: not cluster.started_by_workers())
    with memwal.open(str(tmp_path / "table.lance")) as table:
        assert sorted(table.scan().read_all().column("id").to_pylist()) == list(range(300))
    letters = cli("dlq", "list", path, "--format", "json", cwd=tmp_path)
    assert json.loads(letters.out)["letters"] == 1
