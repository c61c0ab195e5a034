"""The log of py4j when the JVM has ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import ERROR_ON_RECEIVE, Py4JNetworkError

from memwal.ingest.spark.session import silence_py4j


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
