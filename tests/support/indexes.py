"""Limits so small that the indexes of a memtable are used for any number of rows."""

from __future__ import annotations

import pytest


def use_every_index(patch: pytest.MonkeyPatch) -> None:
    """Sort rows at the first use of an index, and narrow also by indexes that return all rows."""
    patch.setattr("memwal.memtable.filter.scalar_index.LOOKS", 0)
    patch.setattr("memwal.memtable.snapshot.WORTH", 1)
    patch.setattr("memwal.memtable.snapshot.SCANNED", 0)


@pytest.fixture
def every_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `use_every_index` for one test."""
    use_every_index(monkeypatch)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the quantiser of vectors from the first rows on."""
    monkeypatch.setattr("memwal.memtable.vector.index.EXACT_ROWS", 0)
