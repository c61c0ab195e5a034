"""Loads into the tables of `tests.commit_world` and `tests.append_world`, and the checks after a load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.flush.base.table import BaseTable
from memwal.flush.commits.load import LoadReport, RowsToLoad, load
from memwal.flush.commits.load_notes import LoadAttempt, begin_load, load_id
from memwal.wal.layout import LOADING_PREFIX
from tests.append_world import AppendWorld
from tests.clean import assert_clean, assert_collected
from tests.commit_world import WIDTH, World
from tests.support.clock import FakeClock, SeededIds


def rows_of(table: pa.Table, key: Sequence[str] = (), batch: int = 7) -> RowsToLoad:
    """Return the rows of `table`, in small batches."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches(batch)

    return RowsToLoad(table.schema, table.num_rows, table.select(list(key)) if key else None, batches)


def keyed(world: World, ids: Sequence[int], n: int) -> RowsToLoad:
    """Return rows with `ids` and `n`."""
    vectors = np.random.default_rng(n).random((len(ids), WIDTH), dtype=np.float32)
    columns = {
        "note": pa.array([f"note {id}" for id in ids]),
        "id": pa.array(list(ids), world.key_type),
        "n": pa.array([n] * len(ids)),
        "vector": pa.array(list(vectors), pa.list_(pa.float32(), WIDTH)),
    }
    return rows_of(pa.table(columns).cast(world.base.schema), ["id"])


def begun(world: World, token: str = "t", clock: FakeClock | None = None) -> LoadAttempt:
    """Begin an attempt at a load; it is the same in each copy of a table."""
    ids = SeededIds(len(world.store.list(LOADING_PREFIX)))
    return begin_load(world.store, BaseTable.open(world.uri), load_id(token), clock or FakeClock(), ids)


def load_keyed(world: World, ids: Sequence[int], n: int, token: str = "t", **more: Any) -> LoadReport:
    """Load rows with `ids` and `n`, and add them to the dict of the world."""
    attempt = more.pop("attempt", None) or begun(world, token)
    report = load(world.uri, {}, world.store, keyed(world, ids, n), token, attempt, clock=FakeClock(), **more)
    attempt.withdraw(world.store)
    world.oracle |= {} if report.already else dict.fromkeys(ids, n)
    return report


def load_appended(world: AppendWorld, numbers: Sequence[int], token: str = "t", **more: Any) -> LoadReport:
    """Load a row for each of `numbers`."""
    attempt = more.pop("attempt", None) or begun(world, token)
    rows = rows_of(world.table(numbers))
    report = load(world.uri, {}, world.store, rows, token, attempt, clock=FakeClock(), **more)
    attempt.withdraw(world.store)
    world.oracle.update([] if report.already else numbers)
    return report


def settled(world: World) -> None:
    """Check that the table has exactly the expected rows, verifies, and holds no unneeded file."""
    assert world.found() == world.oracle
    assert_clean(world.store, world.uri)
    assert_collected(world.store, world.uri)
    assert world.found() == world.oracle
