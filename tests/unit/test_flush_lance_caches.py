"""Views of a table share one Lance session. It is replaced before dead index segments keep many files open."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from memwal.flush import BaseTable
from memwal.flush.base import open as lance_caches
from memwal.flush.base.open import LanceCaches
from memwal.memtable import IndexSpec

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("body", pa.string())])
MERGED = 4
"""Segments that are merged at a time."""


def _table(at: Path) -> BaseTable:
    return BaseTable.create(str(at / "table"), SCHEMA, ["id"], 1, [IndexSpec("body", "fts")])


def _grow(base: BaseTable, first: int, *, merge: bool) -> None:
    """Add rows, and either a new index segment, too large to be read at once, or merge the segments."""
    words = [" ".join(f"word{first}x{row}x{n}" for n in range(10)) for row in range(200)]
    dataset = base.dataset.checkout_version(base.version)
    dataset.insert(pa.table({"id": pa.array(range(first * 200, first * 200 + 200)), "body": words}, schema=SCHEMA))
    dataset.checkout_latest()  # type: ignore[no-untyped-call]
    dataset.optimize.optimize_indices(num_indices_to_merge=MERGED if merge else 0)


def _open_files(base: BaseTable) -> int:
    """Return the number of index files of the table that this process has open."""
    links = (Path("/proc/self/fd") / each for each in os.listdir("/proc/self/fd"))  # noqa: PTH208
    found = [each.readlink() for each in links if each.is_symlink()]
    return sum(str(each).startswith(f"{base.uri}/_indices/") for each in found)


def _match(base: BaseTable) -> None:
    base.dataset.scanner(columns=["id"], full_text_query="word0x1x1", limit=1).to_table()


def test_files_of_dead_segments_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance_caches, "DEAD_MAX", 4)
    base = _table(tmp_path)
    most = 0
    for n in range(24):
        _grow(base, n, merge=n % MERGED == MERGED - 1)
        base = base.latest()
        _match(base)
        most = max(most, _open_files(base))
    assert most <= 2 * 4 + 2 * MERGED
    (index,) = [each for each in base.dataset.describe_indices() if each.name != "__lance_mem_wal"]
    assert len(index.segments) <= 2 * MERGED


def test_views_share_a_session_while_little_of_it_is_dead(tmp_path: Path) -> None:
    first = _table(tmp_path).latest()
    assert first.latest() is first
    _grow(first, 0, merge=False)
    second = first.latest()
    assert second is not first
    assert second.session is first.session is first.caches.session
    assert BaseTable.open(first.uri, caches=first.caches).session is first.session


def test_a_view_of_an_ended_session_is_followed_by_one_of_the_new(tmp_path: Path) -> None:
    first = _table(tmp_path).latest()
    first.caches.session = LanceCaches().session
    assert first.latest() is not first
    assert first.latest().session is first.caches.session
