"""Several daemons: their endpoints as worker processes and on Spark, slots, ports, and the channel to the driver."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.service.daemon.workers import ports_of, worker_settings
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.settings import endpoints as addresses
from memwal.ingest.settings.configuration import with_absolute_paths
from memwal.ingest.settings.load import load
from memwal.ingest.spark.fleet.channel import STRANGERS_MAX, DriverChannel, TaskChannel
from memwal.ingest.spark.fleet.driver import check_configuration, of_job, slots_of
from memwal.ingest.spark.fleet.task import daemons_of, host_of, offset_of
from memwal.ingest.spark.pipeline.daemons import beside, sending_tasks
from tests.messages import raises


def settings(**daemon: Any) -> Any:
    return load({"table": {"uri": "t.lance"}, "daemon": daemon}, {})


@pytest.mark.parametrize(
    ("master", "more", "slots"),
    [
        ("local", {}, 1),
        ("local[3]", {}, 3),
        ("local[4, 2]", {"spark.task.cpus": "2"}, 2),
        ("local[*]", {}, os.cpu_count()),
        ("local-cluster[2,1,1024]", {}, 2),
        ("local-cluster[2, 3, 1024]", {"spark.task.cpus": "2"}, 2),
        ("spark://host:7077", {}, None),
        ("spark://host:7077", {"spark.cores.max": "6"}, 6),
        ("yarn", {}, None),
    ],
)
def test_a_master_of_fixed_size_says_how_many_tasks_it_runs(
    master: str, more: dict[str, str], slots: int | None
) -> None:
    assert slots_of({"spark.master": master, **more}) == slots


def test_a_spark_without_room_is_refused_before_it_starts() -> None:
    conf = {"spark.master": "local[2]"}
    check_configuration(conf, 2)
    with raises(Invalid):
        check_configuration(conf, 2, beside=1)
    with raises(Invalid):
        check_configuration({"spark.master": "yarn", "spark.dynamicAllocation.enabled": "true"}, 2)


def test_a_stream_leaves_room_for_the_next_start_of_the_daemons() -> None:
    one = settings(on_spark=2)
    other = load({"table": {"uri": "other.lance"}, "daemon": {"on_spark": 3}}, {})
    assert (beside(one, [one]), beside(one, [one, other]), beside(other, [one, one, other])) == (1, 5, 5)
    assert [sending_tasks(slots, one, [one]) for slots in (3, 4, 6, 12)] == [1, 1, 2, 5]
    assert sending_tasks(17, one, [one, other]) == 3


def test_tasks_of_one_host_have_ports_of_their_own() -> None:
    hosts = ["a", "b", "a", "a"]
    assert [offset_of(hosts, task, 2) for task in range(4)] == [0, 0, 2, 4]
    assert [host_of(address) for address in ("10.0.0.5:4040", "[::1]:4040")] == ["10.0.0.5", "::1"]


def test_daemons_listen_where_others_reach_them_and_know_all() -> None:
    every = ["grpc://10.0.0.5:7002", "grpc://10.0.0.5:7003", "grpc://10.0.0.6:7000"]
    found = daemons_of(settings(http_port=9000, workers=2, on_spark=2), "10.0.0.5", [7002, 7003], every, 2)
    daemons = [each.daemon for each in found]
    assert [(each.host, each.port, each.advertise) for each in daemons] == [
        ("10.0.0.5", 7002, every[0]),
        ("10.0.0.5", 7003, every[1]),
    ]
    assert [each.http_port for each in daemons] == [9002, 9003]
    assert all((each.endpoints, each.workers, each.on_spark) == (every, 1, 0) for each in daemons)


def test_daemons_listen_where_they_are_told_to() -> None:
    found = daemons_of(settings(host="0.0.0.0"), "10.0.0.5", [7000], ["grpc://10.0.0.5:7000"], 0)
    assert (found[0].daemon.host, found[0].daemon.advertise) == ("0.0.0.0", "grpc://10.0.0.5:7000")


def test_executors_get_paths_that_do_not_depend_on_where_they_run() -> None:
    found = with_absolute_paths(settings(tls_cert="c.pem", tls_key="/etc/k.pem", tls_ca="ca.pem", token="file:token"))
    here = Path.cwd()
    assert found.table.uri == str(here / "t.lance")
    assert found.dead_letters == str(here / "t.lance.dlq")
    assert (found.daemon.tls_cert, found.daemon.tls_key) == (str(here / "c.pem"), "/etc/k.pem")
    assert Access.of(found) == Access(f"file:{here / 'token'}", str(here / "ca.pem"))
    assert found.daemon.token.get_secret_value() == f"file:{here / 'token'}"


def test_addresses_and_secrets_that_are_no_paths_stay_as_they_are() -> None:
    sections = {
        "table": {"uri": "s3://lake/t", "storage_options": {"secret_access_key": "env:KEY", "region": "eu-west-1"}},
        "dlq": {"uri": "s3://lake/bad"},
    }
    found = load(sections, {})
    assert with_absolute_paths(found) == found


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x\nModuleNotFoundError: No module named 'ingest'\n", Invalid),
        ('java.io.IOException: Cannot run program "/opt/py": error=2', Invalid),
        ("pyspark.errors.E: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10.\nPlease", Invalid),
        ("x\nExecutorLostFailure (executor 0 exited) Reason: y\nz", Unavailable),
    ],
)
def test_what_ended_a_job_is_one_line(text: str, kind: type[Exception]) -> None:
    with raises(kind):
        raise of_job(RuntimeError(text))


# ---- the channel ----------------------------------------------------------------------------------------------------


@pytest.fixture
def channel() -> Iterator[DriverChannel]:
    """Yield the channel of a driver, which is closed after the test."""
    made = DriverChannel("127.0.0.1", "127.0.0.1", "secret")
    yield made
    made.close()


def test_the_driver_hears_of_all_tasks_in_their_order(channel: DriverChannel, wait_until: Callable[..., Any]) -> None:
    told: list[list[str]] = []
    channel.expect(1, 2, told.append)
    tasks = [TaskChannel(channel.address, "secret", 1, task) for task in (1, 0)]
    for name, task in zip("ba", tasks, strict=True):
        task.serves([name])
    wait_until(lambda: told)
    assert told == [["a", "b"]]
    assert not any(task.ended.is_set() for task in tasks)
    channel.hang_up()
    assert all(task.ended.wait(90) for task in tasks)


@pytest.mark.parametrize(("secret", "attempt"), [("wrong", 2), ("secret", 1)])
def test_strangers_and_tasks_of_before_are_hung_up_on(channel: DriverChannel, secret: str, attempt: int) -> None:
    told: list[list[str]] = []
    channel.expect(2, 1, told.append)
    task = TaskChannel(channel.address, secret, attempt, 0)
    task.serves(["a"])
    assert task.ended.wait(90)
    assert told == []


def test_a_new_attempt_ends_the_connections_of_the_one_before(
    channel: DriverChannel, wait_until: Callable[..., Any]
) -> None:
    told: list[list[str]] = []
    channel.expect(1, 1, told.append)
    task = TaskChannel(channel.address, "secret", 1, 0)
    task.serves(["a"])
    wait_until(lambda: told)
    channel.expect(2, 1, told.append)
    assert task.ended.wait(90)
    task.serves(["b"])  # ignored: the driver expects attempt 2
    task.close()


def test_a_task_that_is_lost_ends_the_others_so_that_all_start_again(channel: DriverChannel) -> None:
    channel.expect(1, 2, lambda _: None)
    lost, other = (TaskChannel(channel.address, "secret", 1, task) for task in (0, 1))
    lost.close()
    assert other.ended.wait(90)


def test_a_failed_accept_does_not_end_the_channel(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    """The process temporarily has no free file descriptor."""
    failures, real = [OSError(errno.EMFILE, "Too many open files")] * 3, socket.socket.accept

    def accept(listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(listening)

    monkeypatch.setattr(socket.socket, "accept", accept)
    told: list[list[str]] = []
    channel = DriverChannel("127.0.0.1", "127.0.0.1", "secret")
    try:
        channel.expect(1, 1, told.append)
        TaskChannel(channel.address, "secret", 1, 0).serves(["a"])
        wait_until(lambda: told)
        assert not failures
    finally:
        channel.close()


def test_connections_without_the_secret_are_bounded_and_keep_no_task_out(
    channel: DriverChannel, wait_until: Callable[..., Any]
) -> None:
    told: list[list[str]] = []
    channel.expect(1, 1, told.append)
    before = threading.active_count()
    strangers = [socket.create_connection(channel.address) for _ in range(3 * STRANGERS_MAX)]
    strangers[-1].sendall(b"[" * 5000 + b"\n")
    for stranger in strangers[:STRANGERS_MAX]:
        stranger.settimeout(90)
        assert stranger.recv(1) == b""
    wait_until(lambda: threading.active_count() <= before + 2 * STRANGERS_MAX + 2)
    TaskChannel(channel.address, "secret", 1, 0).serves(["a"])
    wait_until(lambda: told)
    for stranger in strangers:
        stranger.close()


def test_a_secret_that_comes_bit_by_bit_is_not_waited_for(
    channel: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal.ingest.spark.fleet.channel.HELLO_WITHIN", 0.3)
    with socket.create_connection(channel.address) as stranger:
        stranger.settimeout(0.05)
        for _ in range(200):
            with suppress(TimeoutError):
                stranger.sendall(b"x")
                if stranger.recv(1) == b"":
                    break
        else:
            raise AssertionError("the driver waits for it")


def test_a_driver_that_is_gone_is_told_with_what_to_set(channel: DriverChannel) -> None:
    channel.close()
    with raises(Unavailable):
        TaskChannel(channel.address, "secret", 1, 0)


ONE, OTHER = "grpc://10.0.0.1:7000", "grpc://10.0.0.2:8000"


def test_every_host_has_its_workers_at_ports_from_its_own_on() -> None:
    assert addresses.expanded([ONE, OTHER], 2) == [ONE, "grpc://10.0.0.1:7001", OTHER, "grpc://10.0.0.2:8001"]
    both = [ONE, OTHER]
    assert addresses.own_endpoint(settings(endpoints=both, host="10.0.0.2", port=8000).daemon) == OTHER
    assert addresses.own_endpoint(settings(endpoints=both, port=8000, advertise=ONE).daemon) == ONE
    assert addresses.own_endpoint(settings(port=8000).daemon) is None
    with pytest.raises(Invalid):
        addresses.own_endpoint(settings(endpoints=both, port=8000).daemon)


def test_workers_know_each_other_and_the_other_hosts() -> None:
    found = settings(endpoints=[ONE, OTHER], host="127.0.0.1", port=9000, advertise=OTHER, workers=2, http_port=9100)
    workers = [each.daemon for each in worker_settings(found, ports_of("127.0.0.1", 9000, 2))]
    assert [each.port for each in workers] == [9000, 9001]
    assert [each.advertise for each in workers] == [OTHER, "grpc://10.0.0.2:8001"]
    assert [each.http_port for each in workers] == [9100, 9101]
    assert all(each.workers == 1 and len(each.endpoints) == 4 for each in workers)


def test_workers_without_endpoints_are_each_others_peers() -> None:
    found = settings(workers=3)
    ports = ports_of("127.0.0.1", 0, 3)
    workers = [each.daemon for each in worker_settings(found, ports)]
    every = [f"grpc://127.0.0.1:{port}" for port in ports]
    assert len(set(ports)) == 3
    assert [each.advertise for each in workers] == every
    assert all(each.endpoints == every for each in workers)


def test_a_daemon_that_is_none_of_the_endpoints_is_told() -> None:
    with raises(Invalid):
        worker_settings(settings(endpoints=[ONE, OTHER], port=9000, workers=2), [9000, 9001])
