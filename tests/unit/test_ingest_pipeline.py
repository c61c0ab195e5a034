"""Parts of `memwal run` that need neither Spark nor a daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from memwal.flush import BaseTable, WriteRules
from memwal.ingest.service.daemon.child import how_it_ended
from memwal.ingest.settings.endpoints import configured_endpoint
from memwal.ingest.settings.load import load
from memwal.ingest.spark.pipeline.checks import written_schema
from memwal.ingest.spark.pipeline.run import stream
from memwal.ingest.threads import stop_signals
from tests.conftest import PATIENCE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_the_handlers_before_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(60)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("made", ["stop = stop_event(None)", "entered = stop_signals(); stop = entered.__enter__()"])
def test_a_signal_in_the_middle_of_a_wait_for_it(made: str) -> None:
    program = f"""
import os, signal
from memwal.ingest.threads import stop_event, stop_signals
{made}
with stop._cond:  # as inside of stop.wait, where a handler may run
    os.kill(os.getpid(), signal.SIGTERM)
    list(map(str, range(100)))
assert stop.wait(60)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


class Streaming:
    """A pipeline of a run; its end waits for the end of the others."""

    def __init__(self, together: threading.Barrier) -> None:
        self._together = together
        self.said: list[str] = []
        self.drained = threading.Event()

    def phase(self, text: str) -> None:
        self.said.append(text)

    def start(self, *, once: bool) -> None:
        self.said.append(f"started, once: {once}")

    def look(self, *, show: bool) -> None:
        self.drained.set()

    def stop(self) -> None:
        self._together.wait(60)
        self.said.append("stopped")


@pytest.mark.parametrize(
    ("stopped", "said"), [(True, ["stopping", "stopped"]), (False, ["started, once: True", "stopped"])]
)
def test_pipelines_end_side_by_side_and_none_starts_once_a_signal_came(stopped: bool, said: list[str]) -> None:
    together, stop = threading.Barrier(2), threading.Event()
    runs: list[Any] = [Streaming(together), Streaming(together)]
    if stopped:
        stop.set()
    assert stream(runs, once=True, stop=stop) is not stopped
    assert [each.said for each in runs] == [said, said]


def test_how_a_daemon_ended_is_told() -> None:
    assert how_it_ended(-9) == "signal 9"
    assert how_it_ended(3) == "exit code 3"


def test_a_configuration_may_name_some_columns_where_upserts_merge(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.int64())])
    for upsert, read in (("merge", ["id", "b"]), ("insert", ["id", "a", "b"])):
        uri = str(tmp_path / upsert)
        base = BaseTable.create(uri, schema, ["id"], 1, [], rules=WriteRules(upsert))
        some = {"table": {"uri": uri, "key": ["id"], "columns": {"b": "int64", "id": "int64"}}}
        assert written_schema(load(some, {}), base).names == read
        assert written_schema(load({"table": {"uri": uri}}, {}), base).names == schema.names


def test_the_configured_daemons_are_all_asked(tmp_path: Path) -> None:
    one, two = "grpc://127.0.0.1:1", "grpc://127.0.0.1:2"
    table = {"uri": str(tmp_path)}
    assert configured_endpoint(load({"table": table}, {})) is None
    assert configured_endpoint(load({"table": table, "daemon": {"endpoints": [one, two]}}, {})) == f"{one},{two}"
