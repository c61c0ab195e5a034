"""Deletion files of Lance: undamaged, cut off, and with blocks of zeros."""

from __future__ import annotations

import struct

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.flush.base.torn import is_whole

MANY = 200_000


DELETED = {"arrow": "id % 223 = 1", "arrays": "id % 20 = 0", "bits": "id % 7 < 3"}
"""Kind of file -> the rows that Lance deletes for it."""


@pytest.fixture(scope="module", params=DELETED)
def deletions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes, int]:
    """Return the name and the bytes of a deletion file, and the number of deleted rows."""
    root = tmp_path_factory.mktemp("table")
    dataset = lance.write_dataset(pa.table({"id": pa.array(range(MANY), pa.int64())}), str(root))
    dataset.delete(DELETED[request.param])
    (path,) = (root / "_deletions").iterdir()
    assert path.suffix == (".arrow" if request.param == "arrow" else ".bin")
    return path.name, path.read_bytes(), MANY - dataset.count_rows()


def test_a_file_that_lance_wrote_is_whole(deletions: tuple[str, bytes, int]) -> None:
    name, data, deleted = deletions
    assert is_whole(name, data, deleted)
    assert is_whole(name, data, 0)
    assert not is_whole(name, data, deleted - 1)


def test_a_file_that_is_cut_off_anywhere_is_not(deletions: tuple[str, bytes, int]) -> None:
    name, data, deleted = deletions
    for length in {*range(0, len(data), 97), len(data) - 1}:
        assert not is_whole(name, data[:length], deleted), length


def test_a_file_with_a_block_of_zeros_is_not(deletions: tuple[str, bytes, int]) -> None:
    name, data, deleted = deletions
    for start in range(0, len(data), 512):
        zeroed = data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :]
        assert not is_whole(name, zeroed, deleted), start


def test_containers_of_every_kind_are_read() -> None:
    few, many = np.arange(10, 20, dtype="<u2"), np.packbits(np.arange(65_536) % 2 == 0)
    headers = struct.pack("<6H", 0, 9, 3, 32_767, 7, 149)
    runs = struct.pack("<H4H", 2, 5, 99, 1000, 49)
    with_runs = struct.pack("<IB", 12347 + (2 << 16), 0b100) + headers + few.tobytes() + many.tobytes() + runs
    assert is_whole("0-1-2.bin", with_runs, 10 + 32_768 + 150)
    assert not is_whole("0-1-2.bin", with_runs[:-1], 0)
    assert not is_whole("0-1-2.bin", with_runs + b"\0", 0)
    assert not is_whole("0-1-2.bin", with_runs.replace(runs, bytes(len(runs))), 0)
