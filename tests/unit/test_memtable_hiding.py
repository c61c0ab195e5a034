"""Rows of a memtable that newer memtables hide, compared with a plain walk over the keys."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.memtable import MemTable, Snapshot, row_schema
from memwal.memtable.key.hiding import HiddenRows
from tests.conftest import extent
from tests.messages import raises
from tests.support.together import together

KINDS: dict[str, Any] = {"int64": int, "string": lambda number: f"key {number}", "binary": lambda n: bytes([n])}
Put = Sequence[tuple[int, bool]]
"""Keys, and whether the row deletes its key."""
puts = st.lists(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=6), max_size=5)


class Levels:
    """Memtables with keys of one type, oldest first; only the last one accepts rows."""

    def __init__(self, kind: str) -> None:
        self._key = KINDS[kind]
        base = pa.schema([pa.field("id", getattr(pa, kind)(), nullable=False), pa.field("v", pa.int64())])
        self.schema = row_schema(base, ["id"])
        self.tables: list[MemTable] = []
        self.rows: list[list[tuple[int, bool]]] = []

    def begin(self) -> None:
        if self.tables:
            self.tables[-1].freeze()
        self.tables.append(MemTable(self.schema, ["id"], [], len(self.tables) + 1))
        self.rows.append([])

    def put(self, rows: Put) -> None:
        ids = [self._key(number) for number, _ in rows]
        columns = [pa.array(ids), pa.array(range(len(rows))), pa.array([deletes for _, deletes in rows])]
        fields = zip(self.schema.names, columns, strict=True)
        self.tables[-1].apply(pa.table(dict(fields)).cast(self.schema))
        self.rows[-1].extend(rows)

    def captured(self) -> tuple[list[Snapshot], list[list[tuple[int, bool]]]]:
        """Return the snapshots and their rows, newest first."""
        return [table.snapshot() for table in self.tables][::-1], [list(rows) for rows in self.rows][::-1]


def visible(levels: Sequence[Sequence[tuple[int, bool]]], place: int) -> list[bool]:
    """Return the visible rows by a walk over all keys."""
    newer = {number for rows in levels[:place] for number, _ in rows}
    rows = levels[place]
    last = {number: at for at, (number, _) in enumerate(rows)}
    return [last[n] == at and not deletes and n not in newer for at, (n, deletes) in enumerate(rows)]


def check(snapshots: Sequence[Snapshot], levels: Sequence[Sequence[tuple[int, bool]]]) -> None:
    for place, snapshot in enumerate(snapshots):
        found = snapshot.uncovered(snapshot.live(), snapshots[:place])
        assert found.tolist() == visible(levels, place)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=extent(30, 100))
@given(history=st.lists(puts, min_size=1, max_size=4), asked=st.data())
def test_a_row_is_visible_where_no_newer_memtable_has_its_key(kind: str, history: Any, asked: Any) -> None:
    levels, captured = Levels(kind), []
    for generation in history:
        levels.begin()
        for rows in generation:
            levels.put(rows)
            if asked.draw(st.booleans()):
                captured.append(levels.captured())
            if asked.draw(st.booleans()):
                check(*levels.captured())
    captured.append(levels.captured())
    for snapshots, rows in asked.draw(st.permutations(captured)):  # in any order, also older snapshots after newer ones
        check(snapshots, rows)


def test_every_row_of_a_newer_memtable_is_looked_up_once() -> None:
    hidden, newer, looked_up = HiddenRows(), Newer(), []

    def lookup(first: int, end: int) -> Any:
        looked_up.append((first, end))
        return np.full(end - first, -1)

    for n in (0, 3, 3, 8, 5, 8, 9):
        assert not hidden.by(newer, 4, n, lookup).any()
    assert looked_up == [(0, 3), (3, 8), (8, 9)]


def test_what_a_memtable_that_is_gone_hid_is_not_kept() -> None:
    hidden, newer = HiddenRows(), Newer()
    hidden.by(newer, 1_000, 0, lambda *_: np.empty(0, np.int64))
    assert hidden.bytes == 5_000
    del newer
    gc.collect()
    assert hidden.bytes == 0


def test_an_interrupt_in_the_middle_of_a_lookup_is_made_good() -> None:
    hidden, newer, rows = HiddenRows(), Newer(), np.array([2, -1, 0, 2])

    def interrupted(*_: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hidden.by(newer, 3, 4, interrupted)
    found = hidden.by(newer, 3, 4, lambda first, end: rows[first:end])
    assert found.tolist() == [True, False, True]
    assert hidden.by(newer, 3, 1, interrupted).tolist() == [False, False, True]
    assert hidden.by(newer, 3, 2, interrupted).tolist() == [False, False, True]
    with raises(ValueError):
        found[0] = False


def test_threads_that_ask_at_once_get_the_same() -> None:
    levels = Levels("int64")
    levels.begin()
    levels.put([(number, False) for number in range(2_000)])
    levels.begin()
    for first in range(0, 2_000, 2):
        levels.put([(first, False)])
    snapshots, rows = levels.captured()
    expected, found = visible(rows, 1), list[list[bool]]()
    gate = threading.Barrier(8)

    def ask() -> None:
        gate.wait(10)
        found.append(snapshots[1].uncovered(snapshots[1].live(), snapshots[:1]).tolist())

    together(*[ask] * 8)
    assert found == [expected] * 8


class Newer:
    """A stand-in for a newer memtable."""
