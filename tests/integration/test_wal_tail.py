"""A tailer in this process, writers in others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from memwal.wal import Entry, LanceCodec, LocalStore, SystemClock, WalOptions, WalTailer, bucket_region
from memwal.wal.layout import wal_prefix

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), nullable=False)])
REGION = bucket_region(0)


def acked(running: Any) -> list[int]:
    return [int(line.split()[1]) for line in list(running.lines) if line.startswith("acked")]


def test_following_one_writer_while_another_takes_over(
    tmp_path: Path, script: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    store = LocalStore(tmp_path)
    tailer = WalTailer(store, REGION, LanceCodec(SCHEMA), 0, clock=SystemClock(), options=WalOptions(readers=4))
    seen: list[Entry] = []

    def look() -> int:
        seen.extend(tailer.poll())
        return len(seen)

    older = script("log_writer.py", tmp_path, 0, 100_000)
    wait_until(lambda: look() > 50)
    newer = script("log_writer.py", tmp_path, 200_000, 100)
    wait_until(lambda: look() and "done" in newer.lines)
    wait_until(lambda: "fenced" in older.lines)
    wait_until(lambda: look() == len(store.list(wal_prefix(REGION))) - 1)  # all but the sentinel
    ids = [entry.rows["id"].to_pylist()[0] for entry in seen]
    assert ids == acked(older) + acked(newer)
    assert acked(newer) == list(range(200_000, 200_100))
    assert [entry.header.writer_epoch for entry in seen] == [1] * len(acked(older)) + [2] * 100
