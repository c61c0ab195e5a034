"""Opening a dataset distinguishes a missing dataset, a damaged one and failing storage."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal.flush import BaseTable
from memwal.flush.base.open import open_dataset, read_again
from memwal.wal import Corrupt, LocalStore, StoreUnavailable
from tests.messages import raises
from tests.support.memory_store import MemoryStore

ROWS = pa.table({"id": [1, 2, 3]})


class Down(MemoryStore):
    """A store whose listings fail."""

    def list(self, prefix: str) -> list[str]:
        raise StoreUnavailable("no connection")


def test_no_dataset_is_none(tmp_path: Path) -> None:
    assert open_dataset(LocalStore(tmp_path), str(tmp_path)) is None


def test_a_version_that_is_not_there_is_none(tmp_path: Path) -> None:
    lance.write_dataset(ROWS, tmp_path)
    store = LocalStore(tmp_path)
    found = open_dataset(store, str(tmp_path), 1)
    assert found is not None
    assert found.count_rows() == 3
    assert open_dataset(store, str(tmp_path), 7) is None


@pytest.mark.parametrize("left", [b"", b"x" * 100])
def test_a_damaged_table_is_never_taken_for_none(tmp_path: Path, left: bytes) -> None:
    lance.write_dataset(ROWS, tmp_path)
    (manifest,) = (tmp_path / "_versions").glob("*.manifest")
    manifest.write_bytes(left)
    with raises(Corrupt):
        BaseTable.find(str(tmp_path))


def test_storage_that_fails_says_so_itself(tmp_path: Path) -> None:
    def read() -> None:
        raise ValueError("Lance calls it invalid")

    with raises(StoreUnavailable):
        read_again(Down(), "x/", read)
    with raises(StoreUnavailable):
        open_dataset(Down(), str(tmp_path))
    with raises(ValueError):
        read_again(MemoryStore(), "x/", read)


def test_storage_that_recovers_is_read_again() -> None:
    answers = iter([ValueError("a passing fault"), 7])

    def read() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    assert read_again(MemoryStore(), "x/", read) == 7
