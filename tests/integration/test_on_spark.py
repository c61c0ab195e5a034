"""`memwal serve --on-spark`: daemons that a barrier job starts on the executors of a Spark with several processes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from tests.cluster import ask
from tests.conftest import Ran, Running, toml
from tests.spark_cluster import quick

CLUSTER = "local-cluster[2,1,1024]"
"""Two executors, each a separate process with one core."""
REGIONS = 16


@pytest.fixture
def config(tmp_path: Path, uri: str) -> Callable[..., Path]:
    """Return a function that writes the configuration of a table for a Spark and returns its path."""

    def write(master: str = CLUSTER, **daemon: Any) -> Path:
        sections = {
            "table": {"uri": uri, "key": ["id"], "columns": {"id": "int64", "name": "string"}},
            "regions": {"count": REGIONS},
            "daemon": daemon,
            "source": {"spark": quick(master)},
        }
        path = tmp_path / "config.toml"
        path.write_text(toml(sections))
        return path

    return write


def serve(start: Callable[..., Running], config: Path, *options: str) -> Running:
    return start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config), *options])


def endpoints_in(line: str) -> list[str]:
    return line.rpartition(" at ")[2].split(", ")


def rows(ids: range, version: int) -> list[dict[str, Any]]:
    return [{"id": id, "name": f"row {id} v{version}"} for id in ids]


def write(file: Path, ids: range, version: int) -> None:
    """Write a file that Spark sees only when it is complete: Spark does not list names with a leading dot. A file that
    Spark lists while it is empty counts as read, in a micro-batch without rows.
    """
    hidden = file.with_name(f".{file.name}")
    pq.write_table(pa.Table.from_pylist(rows(ids, version)), hidden)
    hidden.rename(file)


def regions_by(endpoints: list[str]) -> list[set[str]]:
    return [set(ask(endpoint, "regions")["regions"]) for endpoint in endpoints]


def below(process: Any) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def executors(process: Any) -> Iterator[psutil.Process]:
    for each in below(process):
        with suppress(psutil.NoSuchProcess):
            if any("CoarseGrainedExecutorBackend" in word for word in each.cmdline()):
                yield each


@pytest.mark.long
def test_an_executor_that_is_killed_costs_no_acked_row_and_sigterm_drains_all_daemons(
    config: Callable[..., Path], start: Callable[..., Running], uri: str, wait_until: Callable[..., Any]
) -> None:
    driver = serve(start, config(), "--on-spark", "2")
    before = endpoints_in(driver.line_with("serving"))
    started = below(driver.process)
    one, other = regions_by(before)
    assert one
    assert other
    assert not one & other
    assert len(one | other) == REGIONS
    with memwal.connect(before[0]) as table:
        assert table.put(rows(range(100), 1)).applied

    next(executors(driver.process)).kill()
    after = endpoints_in(driver.line_with("serving"))
    started += below(driver.process)
    assert len(after) == 2
    assert not set(before) & set(after)
    with memwal.connect(after[1]) as table:
        assert table.get([7, 99]).to_pylist() == rows(range(7, 100, 92), 1)
        table.put(rows(range(50), 2))

    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started))
    with memwal.open(uri) as table:
        assert sorted(table.scan().read_all().to_pylist(), key=lambda row: row["id"]) == rows(range(50), 2) + rows(
            range(50, 100), 1
        )


@pytest.mark.long
def test_a_stream_goes_on_when_the_daemons_beside_it_are_started_anew(
    config: Callable[..., Path],
    start: Callable[..., Running],
    cli: Callable[..., Ran],
    tmp_path: Path,
    uri: str,
    wait_until: Callable[..., Any],
) -> None:
    landing, path = tmp_path / "in", config("local-cluster[2,2,1024]", on_spark=2)
    landing.mkdir()
    path.write_text(path.read_text().replace("[source]", f'[source]\npath = "{landing}"'))
    write(landing / "1.parquet", range(100), 1)
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(path)])

    def names() -> dict[int, str]:
        ran = cli("query", path, "--format", "json", "--limit", "1000")
        return {row["id"]: row["name"] for row in json.loads(ran.out)} if not ran.code else {}

    running.line_with("micro-batch 0")
    assert len(names()) == 100
    next(executors(running.process)).kill()
    write(landing / "2.parquet", range(50, 150), 2)
    running.line_with("micro-batch 1")
    expected = {row["id"]: row["name"] for row in rows(range(50), 1) + rows(range(50, 150), 2)}
    assert names() == expected
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    with memwal.open(uri) as table:
        assert {row["id"]: row["name"] for row in table.scan().read_all().to_pylist()} == expected


@pytest.mark.parametrize(
    ("master", "options", "said"),
    [
        (CLUSTER, {}, "daemon.on_spark: 3 daemons need 3 slots at the same time, and Spark at local-cluster"),
        (
            "local[3]",
            {"host": "0.0.0.0", "port": 1},
            "daemon.host: 0.0.0.0 is not a loopback address",
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    config: Callable[..., Path], cli: Callable[..., Ran], master: str, options: dict[str, Any], said: str
) -> None:
    ran = cli("serve", config(master, **options), "--on-spark", "3")
    assert (ran.code, len(ran.error_lines), ran.out) == (2, 1, "")
    assert said in ran.err
