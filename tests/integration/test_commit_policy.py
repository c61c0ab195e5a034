"""A table that commits by itself: the freshness of the base table, and its number of fragments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.ingest.engine.table.commit_loop import CommitLoop
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.settings.load import load
from tests.opened import open_table

BATCHES, ROWS = 150, 100
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("price", pa.int64())])


class Ahead(wal.SystemClock):
    """The system's clock, except for its monotonic reading, which moves only when the test moves it."""

    def __init__(self) -> None:
        self.by = 0.0

    def monotonic(self) -> float:
        return self.by


@pytest.fixture
def stepped(uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Table, CommitLoop, Ahead]]:
    """A table with default settings; the test runs the steps of its commit loop and moves its clock."""
    loops: list[CommitLoop] = []
    monkeypatch.setattr(CommitLoop, "start", lambda loop: loops.append(loop))  # noqa: PLW0108 - as a method
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the duration of disk writes does not matter here
    clock = Ahead()
    given = {"table": {"uri": uri, "key": ["id"], "indexes": {"price": "btree"}}, "regions": {"count": 1}}
    with open_table(load(given, os.environ), os.environ, SCHEMA, clock=clock) as table:
        yield table, loops[0], clock


def batch(number: int) -> pa.Table:
    """Return a batch: nine of ten keys are new, and the others replace earlier rows."""
    rng = np.random.default_rng(number)
    ids = np.arange(number * ROWS, (number + 1) * ROWS)
    ids[: ROWS // 10] = rng.choice(max(number, 1) * ROWS, ROWS // 10, replace=False)
    return pa.table([ids, rng.integers(0, 1000, ROWS)], schema=SCHEMA)


def test_a_stream_of_micro_batches_leaves_few_fragments_segments_and_ssts(
    stepped: tuple[Table, CommitLoop, Ahead], uri: str
) -> None:
    """One micro-batch every 10 s, for 25 minutes. 1,000 micro-batches of 1,000 rows stay within the bounds too."""
    table, loop, clock = stepped
    commits, fragments, segments, ssts = 0, 0, 0, 0
    keys: set[int] = set()
    for number in range(BATCHES):
        rows = batch(number)
        keys.update(rows["id"].to_pylist())
        table.put(rows)
        clock.by += 10.0
        commits += loop.step() == "flush"
        dataset = lance.dataset(uri)
        fragments = max(fragments, len(dataset.get_fragments()))
        segments = max([segments, *(len(each.segments) for each in dataset.describe_indices())])
        ssts = max([ssts, *(len(region["ssts"]) for region in table.status()["regions"])])
    assert BATCHES / 4 <= commits <= BATCHES / 3
    assert ssts < 10
    assert fragments <= 24
    assert segments <= 24
    found = table.scan(["id"]).read_all()["id"].to_pylist()
    assert (len(found), set(found)) == (len(keys), keys)
    assert dataset.count_rows() >= len(keys) - 3 * ROWS


def test_a_row_reaches_the_base_table_by_itself_and_an_idle_table_is_left_alone(
    open_small: Callable[..., Any], uri: str, made: Any, wait_until: Callable[..., Any], tree: Callable[..., Any]
) -> None:
    """`test_ingest_commit_loop.py` checks with its own clock that the commit takes no longer than the interval."""
    seen: list[Any] = []

    def unchanged() -> bool:
        seen.append(tree(Path(uri)))
        return len(seen) > 1 and seen[-2] == seen[-1]

    with open_small(commit="1s") as table:
        table.put(made.rows(range(5)))
        wait_until(lambda: table.count(level="committed") == 5)
        wait_until(unchanged, every=1.5)  # longer than the interval, within which a table that is not idle writes again


def test_rows_of_a_reopened_table_are_committed_too(
    open_small: Callable[..., Any], made: Any, wait_until: Callable[..., Any]
) -> None:
    with open_small() as table:
        table.put(made.rows(range(5)))
        table.flush()
        table.put(made.rows(range(5, 10)))
    with open_small(commit="500ms") as table:
        wait_until(lambda: table.count(level="committed") == 10)


@pytest.mark.parametrize("limit", [{"ssts_max": 3}, {"size_max": "1KiB"}])
def test_many_or_large_ssts_are_committed_before_the_interval(
    uri: str, made: Any, wait_until: Callable[..., Any], limit: dict[str, Any]
) -> None:
    settings = {"commit": {"interval": "1h", **limit}, "memtable": {"rows_max": 5}}
    with memwal.open(uri, schema=made.schema, key="id", regions=1, settings=settings) as table:
        for first in range(0, 20, 5):
            table.put(made.rows(range(first, first + 5)))
        wait_until(lambda: table.count(level="committed") >= 15)


def test_an_idle_table_on_s3_makes_no_request(
    s3_table_through_proxy: Any, fault_proxy: Any, made: Any, wait_until: Callable[..., Any]
) -> None:
    uri, options = s3_table_through_proxy
    settings = {"commit": {"interval": "500ms"}, "gc": {"interval": "0s"}}
    with memwal.open(uri, schema=made.schema, key="id", storage_options=options, settings=settings) as table:
        table.put(made.rows(range(10)))
        wait_until(lambda: table.count(level="committed") == 10)
        wait_until(lambda: not any(region["ssts"] for region in table.status()["regions"]))
        assert fault_proxy.falls_silent(2.0)  # maintenance runs once; wait four intervals
