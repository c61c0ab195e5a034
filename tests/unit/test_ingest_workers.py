"""The endpoint of each worker process of a daemon, and errors in endpoints."""

from __future__ import annotations

from typing import Any

from memwal.ingest.errors import Invalid
from memwal.ingest.service.daemon.workers import ports_of, worker_settings
from memwal.ingest.settings import endpoints as addresses
from memwal.ingest.settings.load import load
from tests.messages import raises

ONE, OTHER = "grpc://10.0.0.1:7000", "grpc://10.0.0.2:8000"


def settings(**daemon: Any) -> Any:
    return load({"table": {"uri": "t.lance"}, "daemon": daemon}, {})


def test_every_host_has_its_workers_at_ports_from_its_own_on() -> None:
    assert addresses.expanded([ONE, OTHER], 2) == [ONE, "grpc://10.0.0.1:7001", OTHER, "grpc://10.0.0.2:8001"]
    assert addresses.own_endpoint([ONE, OTHER], "10.0.0.2", 8000) == OTHER
    assert addresses.own_endpoint([ONE, OTHER], "127.0.0.1", 8000) is None
    assert addresses.own_endpoint([ONE, OTHER], "127.0.0.1", 8000, advertise=ONE) == ONE


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
