"""A missing standalone master, and a cluster that provides no executor."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.fleet.driver import wait_for_executors, wait_for_slots
from memwal.ingest.spark.session import check_master
from memwal.wal import SystemClock
from tests.messages import raises


def spark(slots: int, **conf: str) -> Any:
    """Return a stand-in for Spark with the attributes that the wait for executors reads; the wait times out at once."""
    conf = {"spark.executor.memory": "3g", "spark.driver.host": "10.0.0.9", **conf}
    jvm = SimpleNamespace(
        isStopped=lambda: False,
        maxNumConcurrentTasks=lambda _: slots,
        resourceProfileManager=lambda: SimpleNamespace(defaultResourceProfile=lambda: None),
        conf=lambda: SimpleNamespace(getTimeAsSeconds=lambda *_: 0),
    )
    shown = SimpleNamespace(getAll=conf.items, get=conf.get)
    return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: jvm), getConf=lambda: shown, master="spark://m:7077")


def test_one_master_of_several_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as master, socket.create_server(("127.0.0.1", 0)) as gone:
        there, nowhere = (each.getsockname()[1] for each in (master, gone))
        gone.close()
        check_master({"spark.master": f"spark://127.0.0.1:{nowhere},127.0.0.1:{there}"})
        with raises(Unavailable):
            check_master({"spark.master": f"spark://127.0.0.1:{nowhere}"})
    check_master({"spark.master": "yarn"})


@pytest.mark.parametrize("master", ["spark://", "spark://host", "spark://host:ui", "spark://127.0.0.1:1,b"])
def test_a_master_without_a_port_is_refused(master: str) -> None:
    with raises((Invalid, Unavailable)) as raised:
        check_master({"spark.master": master})
    assert isinstance(raised.value, Invalid)


def test_a_cluster_without_executors_is_told_with_what_to_look_at() -> None:
    stop = threading.Event()
    with raises(Unavailable):
        wait_for_executors(spark(0), SystemClock(), stop)
    with raises(Unavailable):
        wait_for_slots(spark(0), 2, 1, SystemClock(), stop, within=0)
    with raises(Invalid):
        wait_for_slots(spark(2), 2, 1, SystemClock(), stop, within=0)
    wait_for_executors(spark(1), SystemClock(), stop)
    wait_for_executors(spark(0, **{"spark.dynamicAllocation.enabled": "true"}), SystemClock(), stop)
    stop.set()
    wait_for_executors(spark(0), SystemClock(), stop)
