"""`memwal regions resize` beside a daemon, on S3, and under Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import pytest

import memwal
from memwal.flush import resize
from memwal.wal import SystemClock, SystemIds, open_store
from tests.cluster import Cluster, spread, start_daemon
from tests.conftest import INDEXES, SCHEMA, Cli, OpenSmall, Serve, SmallConfig, Start, wait_until
from tests.integration.test_http_edge import reasons
from tests.s3_server import free_ports
from tests.support.clock import FakeClock
from tests.support.interpose import no_pruning


def test_a_daemon_goes_on_with_the_new_regions(
    small_config: SmallConfig, serve: Serve, cli: Cli, uri: str, made: Any
) -> None:
    config = small_config()
    running, endpoint = serve(config)
    with memwal.connect(endpoint) as table:
        table.put(made.rows(range(100)), token="a:1")
        ran = cli("regions", "resize", config, "--to", 5)
        assert (ran.code, ran.err) == (0, "")
        assert "resized from 2 to 5 regions, routing version 2, version " in ran.out
        assert "0 rows drained from the log" in ran.out  # the daemon flushed and committed before it blocked writers
        assert len(ran.out.splitlines()) == 1
        assert not table.put(made.rows(range(100)), token="a:1").applied  # by a client that connected before the resize
        table.put(made.rows(range(50, 150), 1), token="a:2")
        assert table.count() == 150
        assert (table.status()["routing"], len(table.status()["regions"])) == (2, 5)
    assert [line for line in running.errors if "routing version 2 holds, not 1; this process takes its share" in line]
    assert len(running.errors) == 1
    assert "routing version 2" in cli("status", config).out
    assert "5 regions (routing version 2)" in cli("init", config).out
    report = json.loads(cli("regions", "resize", config, "--to", 3, "--json").out)
    assert (report["table"], report["before"], report["regions"], report["routing"]) == (uri, 5, 3, 3)
    with memwal.connect(endpoint) as table:
        assert table.count() == 150
    running.process.terminate()
    assert running.wait() == 0
    assert cli("verify", config, "--deep").code == 0


class _Broken(Exception):
    """Ends the resize here, as a kill would."""


def test_a_resize_that_broke_off_is_said_and_calls_wait_for_it(
    small_config: SmallConfig, watchful: Serve, uri: str, made: Any
) -> None:
    url = f"http://127.0.0.1:{(port := free_ports(1)[0])}"
    running, endpoint = watchful(small_config(daemon={"http_port": port}))

    def breaks_off(step: str) -> None:
        if step == "switching":
            raise _Broken

    def again(on_step: Callable[[str], None]) -> Any:
        store = open_store(uri, {})
        return resize(uri, {}, store, 3, clock=SystemClock(), ids=SystemIds(), on_step=on_step)

    with memwal.connect(endpoint) as table, ThreadPoolExecutor(1) as caller:
        table.put(made.rows(range(60)), token="a:1")
        with pytest.raises(_Broken):
            again(breaks_off)
        waits = caller.submit(table.put, made.rows(range(40, 80), 1), token="a:2")
        assert wait_until(lambda: [line for line in running.errors if "run `memwal regions resize` again" in line])
        assert "resizing" in reasons(url)
        assert not waits.done()
        assert again(lambda _: None).regions == 3
        assert waits.result(60).applied
        assert table.count() == 80
        wait_until(lambda: reasons(url) == [])


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (2, "the table has 2 regions already; give another number"),
        (0, "--to 0: give a number of regions from 1 to 4096"),
        (4097, "--to 4097: give a number of regions from 1 to 4096"),
        ("many", "Invalid value for '--to': Input should be a valid integer"),
    ],
)
def test_a_number_that_cannot_be_had_is_one_line(
    small_config: SmallConfig, open_small: OpenSmall, cli: Cli, made: Any, to: object, said: str
) -> None:
    with open_small() as table:
        ran = cli("regions", "resize", small_config(), "--to", to)
        assert (ran.code, ran.out, len(ran.error_lines)) == (2, "", 1)
        assert said in ran.err
        table.put(made.rows(range(3)))  # the owner was not fenced


def test_no_table_to_resize(small_config: SmallConfig, cli: Cli) -> None:
    ran = cli("regions", "resize", small_config(), "--to", 3)
    assert (ran.code, len(ran.error_lines)) == (2, 1)


def test_after_a_power_cut_it_goes_back_to_the_last_whole_version_as_an_opening_does(
    small_config: SmallConfig, open_small: OpenSmall, cli: Cli, made: Any, uri: str
) -> None:
    """An opening may start the resize; the resize must not start an opening then."""
    with open_small() as table, no_pruning():
        table.put(made.rows(range(20)))
        table.flush()
        table.commit()
    newest = next(Path(uri, "_versions").glob(f"*{2**64 - 1 - lance.dataset(uri).version}.manifest"))
    newest.write_bytes(b"")
    ran = cli("regions", "resize", small_config(), "--to", 3)
    assert ran.code == 0, ran.err
    assert "resized from 2 to 3 regions" in ran.out
    with open_small() as table:
        assert table.count() == 20


def test_on_s3(s3_table: Any, made: Any) -> None:
    uri, options = s3_table
    new = {"schema": SCHEMA, "key": "id", "indexes": INDEXES, "regions": 2}
    with memwal.open(uri, storage_options=options, **new) as table:
        table.put(made.rows(range(60)), token="a:1")
    report = resize(uri, options, open_store(uri, options), 3, clock=FakeClock(), ids=SystemIds())
    assert (report.regions, report.rows_drained) == (3, 60)
    with memwal.open(uri, storage_options=options) as table:
        assert len(table.status()["regions"]) == 3
        assert not table.put(made.rows(range(60)), token="a:1").applied
        table.put(made.rows(range(50, 90), 1), token="a:2")
        assert table.count() == 90


def test_daemons_that_share_a_table_share_the_new_regions(
    small_config: SmallConfig, start: Start, cli: Cli, uri: str, made: Any
) -> None:
    endpoints = spread(2, 3)
    config = small_config(regions={"count": 3}, daemon={"endpoints": endpoints})
    cluster = Cluster(uri, endpoints, lambda endpoint: start_daemon(start, config, endpoint))
    running = [cluster.start(endpoint) for endpoint in endpoints]
    wait_until(lambda: running[0].line_with("serving") and running[1].line_with("serving"))
    before = memwal.connect(endpoints)
    before.put(made.rows(range(60)), token="a:1")
    assert cli("regions", "resize", config, "--to", 5).code == 0
    with before as table:
        assert not table.put(made.rows(range(60)), token="a:1").applied
        table.put(made.rows(range(40, 80), 2), token="a:2")
        assert table.count() == 80
        assert len(table.status()["regions"]) == 5
    wait_until(lambda: cluster.placed(endpoints))
    for each in running:
        assert any("the table was resized: routing version 2 holds, not 1" in line for line in each.errors)
