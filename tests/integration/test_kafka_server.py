"""The tests' Kafka broker stores records, and starts and stops as it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import kafka_server as module
from tests.kafka_server import KafkaServer
from tests.messages import raises


def test_a_machine_without_the_jars_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cache", lambda: tmp_path / "absent")
    with raises(RuntimeError):
        KafkaServer.start(tmp_path)
    nowhere = " ".join(f"-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort=9" for scheme in ("http", "https"))
    offline = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAVA_TOOL_OPTIONS": nowhere}
    command = [sys.executable, "-m", "tests.kafka_server"]
    ran = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    begins, ends = ran.stderr.splitlines()
    assert "once per machine" in begins
    assert ends.startswith("memwal: the tests' Kafka broker and Spark's connector cannot be fetched: ")
    assert [each.name for each in (tmp_path / "memwal" / "kafka").iterdir()] == ["fetching"]
