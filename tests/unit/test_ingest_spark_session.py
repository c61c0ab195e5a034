"""The search for Java and for a master, the configuration of Spark, and the log of a JVM that has ended."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import ERROR_ON_RECEIVE, Py4JError, Py4JNetworkError

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.settings.load import load
from memwal.ingest.spark.fleet.driver import wait_for_executors, wait_for_slots
from memwal.ingest.spark.session import (
    _not_started,
    check_java,
    check_master,
    configuration,
    silence_py4j,
    write_properties,
)
from memwal.ingest.spark.source.files import reads_local
from memwal.wal import SystemClock
from tests.messages import raises


def java(directory: Path, version: str, *, release: bool) -> Path:
    """Create a Java home whose version is in the output of `java`, or only in the release file."""
    (directory / "bin").mkdir(parents=True)
    program = directory / "bin" / "java"
    program.write_text(
        f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n" if not release else "#!/bin/sh\nexit 1\n"
    )
    program.chmod(0o755)
    if release:
        (directory / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return directory


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("21", 21), ("25-ea", 25)])
def test_java_is_found_by_home_and_by_path(tmp_path: Path, version: str, major: int, release: bool) -> None:
    home = java(tmp_path / "jdk", version, release=release)
    assert check_java({"JAVA_HOME": str(home)}) == major
    assert check_java({"PATH": f"{home / 'bin'}{os.pathsep}/bin"}) == major


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.21"])
def test_an_old_java_is_refused_with_the_package_to_install(tmp_path: Path, version: str, release: bool) -> None:
    home = java(tmp_path / "jdk", version, release=release)
    with raises(Invalid) as raised:
        check_java({"JAVA_HOME": str(home)})
    assert str(home) in str(raised.value)


def test_no_java_and_a_broken_one(tmp_path: Path) -> None:
    with raises(Invalid):
        check_java({"PATH": str(tmp_path)})
    with raises(Invalid):
        check_java({"JAVA_HOME": str(tmp_path / "nowhere")})


def test_the_users_spark_configuration_wins() -> None:
    source = {"spark": {"spark.master": "local[7]", "spark.ui.enabled": "true"}}
    conf = configuration(load({"table": {"uri": "t"}, "source": source}, {}), 3, once=True)
    assert (conf["spark.master"], conf["spark.ui.enabled"]) == ("local[7]", "true")
    assert (conf["spark.sql.shuffle.partitions"], conf["spark.sql.session.timeZone"]) == ("3", "UTC")


def test_how_checkpoints_are_written_is_left_to_spark_unless_all_are_on_local_disks() -> None:
    settings, name = load({"table": {"uri": "t"}}, {}), "spark.sql.streaming.checkpointFileManagerClass"
    plain = "spark.hadoop.fs.file.impl"
    both = configuration(settings, 1, once=True)
    assert {name, plain} <= set(both)
    assert {name, plain} & set(configuration(settings, 1, once=True, local_checkpoints=False)) == set()
    assert {name, plain} & set(configuration(settings, 1, once=True, local_sources=False)) == {name}


@pytest.mark.parametrize(
    ("source", "local"),
    [
        ({"path": "landing"}, True),
        ({"path": "file:///data/landing", "format": "json"}, True),
        ({"path": "s3a://bucket/landing"}, False),
        ({"format": "kafka", "brokers": "broker:9092", "topics": ["orders"]}, True),
        ({"format": "rate"}, False),
    ],
)
def test_a_source_that_reads_local_files_only(source: dict[str, str], local: bool) -> None:
    assert reads_local(load({"table": {"uri": "t"}, "source": source}, {}).source) is local


def test_on_a_cluster_files_are_cut_alike_however_many_executors_there_are() -> None:
    """The id of a dead letter depends on the partition of its row, so the partitions must not depend on the number of
    executors."""
    name, cluster = "spark.sql.files.minPartitionNum", {"spark": {"spark.master": "spark://host:7077"}}
    assert name in configuration(load({"table": {"uri": "t"}, "source": cluster}, {}), 1, once=True)
    assert name not in configuration(load({"table": {"uri": "t"}}, {}), 1, once=True)


@pytest.mark.parametrize(
    ("error", "tail", "said"),
    [
        (
            Py4JError("An error occurred while calling X.\n: java.lang.X: no memory\n\tat y"),
            ["z\n"],
            "java.lang.X: no memory",
        ),
        (OSError("no java"), ["Exception in thread\n", "bad option\n", "\n"], "bad option"),
        (OSError("no java"), [], "no java"),
    ],
)
def test_why_spark_did_not_start_is_one_line(error: Exception, tail: list[str], said: str) -> None:
    told = _not_started(error, {"spark.master": "spark://h:8080"}, tail).lines
    assert len(told) == 1
    assert told[0].startswith(f"Spark did not start: {said}; check [source] spark, and see that a master of Spark ")
    assert _not_started(error, {"spark.master": "local[2]"}, tail).message.endswith("check [source] spark")


_ASKED = """
import json, sys
from pathlib import Path
from memwal.ingest.spark.session import configuration, start_context
from memwal.ingest.settings.load import load

spark = start_context(configuration(load(json.loads(sys.argv[1]), {}), 1, once=True))
java = spark._jvm.java.lang
pid = java.ProcessHandle.current().pid()
names = json.loads(sys.argv[2])
found = {"values": {name: java.System.getProperty(name) for name in names}}
found["commands"] = [Path(f"/proc/{each}/cmdline").read_text() for each in (pid, "self")]
print(json.dumps(found))
"""


def test_no_value_of_the_configuration_is_on_a_command_line(tmp_path: Path) -> None:
    odd = " =:#! \\ ü\tend"
    conf = {
        "spark.master": "local[1]",
        "spark.hadoop.fs.s3a.secret.key": "env:SECRET",
        "spark.odd": odd,
        "spark.driver.extraJavaOptions": f'-Dfirst=plain-1 "-Dsecond=two words \\\\ in-{tmp_path.name}" -Xshare:auto',
    }
    settings = {"table": {"uri": str(tmp_path / "t"), "key": ["id"]}, "source": {"spark": conf}}
    places = tmp_path / "with a space"
    places.mkdir()
    names = [*conf, "first", "second"]
    ran = subprocess.run(
        [sys.executable, "-c", _ASKED, json.dumps(settings), json.dumps(names)],
        env=os.environ | {"SECRET": "kept-secret", "TMPDIR": str(places)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout)
    values = found["values"]
    assert values["spark.hadoop.fs.s3a.secret.key"] == "kept-secret"
    assert values["spark.odd"] == odd.strip()
    assert (values["first"], values["second"]) == ("plain-1", f"two words \\ in-{tmp_path.name}")
    command, own = found["commands"]
    assert not any(text in command for text in ("kept-secret", "plain-1", "two words", "spark.odd"))
    assert "kept-secret" not in own
    assert not list(places.glob("memwal-spark-*"))


def test_files_of_the_configuration_are_private(tmp_path: Path) -> None:
    properties = write_properties(tmp_path, {"spark.driver.extraJavaOptions": "-Da=b", "spark.b": "c d"})
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "spark.properties": 0o600,
        "spark.driver.extraJavaOptions": 0o600,
    }
    assert properties.read_text().splitlines()[0] == "spark.b=c\\ d"
    with raises(Invalid):
        write_properties(tmp_path, {"spark.driver.extraJavaOptions": '"-Da=b'})


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


class LostConnection:
    """A connection to a JVM that was killed during a request."""

    def send_command(self, _: str) -> str:
        raise Py4JNetworkError("Error while sending or receiving", ConnectionResetError(), ERROR_ON_RECEIVE)

    def close(self, _: bool) -> None:
        """Nothing is open."""


@pytest.fixture(autouse=True)
def filters() -> Iterator[None]:
    """Remove all log filters, whatever ran before in this process, and restore them after the test."""
    root = logging.getLogger()
    before = list(root.filters)
    root.filters.clear()
    yield
    root.filters[:] = before


def asked_of_a_dead_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = GatewayClient()
    monkeypatch.setattr(client, "_get_connection", LostConnection)
    client.send_command("c\n", retry=False)


def test_a_dead_jvm_shows_no_traceback(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked_of_a_dead_jvm(monkeypatch)
    assert [record.exc_info is not None for record in caplog.records] == [True], "py4j does not log it any more"
    caplog.clear()
    silence_py4j()
    silence_py4j()
    asked_of_a_dead_jvm(monkeypatch)
    assert caplog.records == []
    logging.getLogger().warning("others are shown")
    assert len(caplog.records) == 1
