"""A daemon on a file system of a few MiB that fills up: its puts fail in time, and its messages help."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import memwal
from memwal.flush import SstInvalid
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.errors import classify
from memwal.ingest.log_limit import LogLimit
from memwal.ingest.settings.load import load
from memwal.wal.panics import RustPanic
from tests.opened import open_table
from tests.support.clock import FakeClock
from tests.ways import entered

BUILD_MACHINE = "/build/lance/rust/lance-file/src/writer.rs:254:9"
SMALL_DISK = 'mount -t tmpfs -o size=6m tmpfs "$0" && exec "$@"'
"""Mounts the disk in a separate namespace, so that the mount ends with the process."""


def on_small_disk(directory: Path, *command: str) -> list[str]:
    """Return `command` wrapped so that its process sees `directory` as a file system of 6 MiB."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--mount", *user, "sh", "-c", SMALL_DISK, str(directory), *command]


def test_a_full_disk_fails_puts_in_time_and_is_reported_once_a_minute(
    tmp_path: Path, small_config: Callable[..., Path], start: Callable[..., Any]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    uri = str(disk / "t.lance")
    config = small_config(
        table={"uri": uri, "columns": {"id": "int64", "name": "string"}, "indexes": {}, "key": ["id"]},
        regions={"count": 2},
        commit={"interval": "1s"},
        memtable={"size_max": "256KiB"},
        flush={"retry_delay": "100ms"},
        wal={"put_timeout": "500ms", "retry_budget": "2s"},
    )
    command = [sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)]
    daemon = start(on_small_disk(disk, *command))
    failures = []
    with memwal.connect(daemon.line_with("serving").rsplit(" ", 1)[1]) as table:
        deadline, first = time.monotonic() + 60, 0
        while len(failures) < 4 and time.monotonic() < deadline:
            began = time.monotonic()
            try:
                table.put([{"id": first + at, "name": f"{first} {at} " * 20} for at in range(500)])
                first += 500
            except (memwal.Unavailable, memwal.UnknownOutcome) as error:  # one of the two regions may have room
                failures.append((time.monotonic() - began, str(error)))
    assert len(failures) == 4
    assert max(seconds for seconds, _ in failures) < 8, failures
    log = [line for line in daemon.errors if "WARNING" in line]
    for text in [*log, *(text for _, text in failures)]:
        assert uri in text
        assert ".rs:" not in text, text
    assert "No space left on device" in failures[-1][1]
    assert all(re.search(r"_mem_wal/[0-9a-f-]{36}/|region \d+", text) for _, text in failures)
    for step in ("flush of generation", "append failed"):
        lines = [line for line in log if step in line]
        assert len(lines) == len({re.search(r"region (\d+)", line)[1] for line in lines}), lines  # type: ignore[index]
    assert [line for line in log if "flush of generation" in line]
    assert len([line for line in log if "commit failed" in line]) <= 1


def test_a_put_does_not_wait_for_flushes_that_fail(
    small_config: Callable[..., Path], made: Any, monkeypatch: pytest.MonkeyPatch, ends: ExitStack
) -> None:
    """A client waits for a busy owner; here waiting helps only after an operator has freed space."""

    def full(*_: Any) -> bool:
        raise OSError(f"LanceError(IO): No space left on device (os error 28), {BUILD_MACHINE}")

    monkeypatch.setattr(RegionCore, "publish_next", full)
    config = small_config(
        regions={"count": 1},
        commit={"interval": "0s"},
        memtable={"size_max": "4KiB", "unflushed_max": "64KiB"},
        wal={"put_timeout": "500ms"},
    )
    with open_table(load(config, {}), {}) as table:
        client = entered("flight", table, ends)
        began, said = time.monotonic(), None
        for first in range(0, 10_000, 100):
            began = time.monotonic()
            try:
                client.put(made.rows(range(first, first + 100)))
            except memwal.Unavailable as error:
                said = error
                break
        assert said is not None
        assert time.monotonic() - began < 5
        assert said.details["reason"] == "flush_failing"
        place = f"{table.base.uri}: region 0: "
        assert str(said).startswith(place)
        assert "the last flush failed: LanceError(IO): No space left on device (os error 28); free some space" in str(
            said
        )


@pytest.mark.parametrize("kind", [OSError, ValueError, RuntimeError, SstInvalid, RustPanic])
def test_no_error_has_the_source_location_of_a_library(kind: type[Exception]) -> None:
    assert str(classify(kind(f"it failed, {BUILD_MACHINE}"))).endswith("it failed")
    assert str(classify(kind(f"it failed at {BUILD_MACHINE}, and more"))).endswith("it failed, and more")


def test_a_failure_that_repeats_is_logged_once_a_minute() -> None:
    clock = FakeClock()
    limit = LogLimit(clock.monotonic)
    assert limit.text("flush", "no space") == "no space"
    assert limit.text("commit", "no space") == "no space"
    for _ in range(59):
        clock.advance(1)
        assert limit.text("flush", "no space") is None
    clock.advance(1)
    assert limit.text("flush", "no space") == "no space (60 failures since the last message)"
    assert limit.text("flush", "no space") is None
