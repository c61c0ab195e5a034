"""Files in memory that are read by path: each thread and each process has its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from memwal.wal.codec.lance import ScratchFile


def test_a_file_holds_exactly_what_was_put_last() -> None:
    scratch = ScratchFile()
    for data in (b"a" * 100_000, b"short", b"", b"b" * 3):
        assert Path(scratch.holding(data)).read_bytes() == data


def test_threads_do_not_see_each_others_bytes() -> None:
    scratch, start = ScratchFile(), threading.Barrier(4)
    wrong: list[bytes] = []

    def work(number: int) -> None:
        mine = bytes([number]) * 50_000
        start.wait(60)
        found = (Path(scratch.holding(mine)).read_bytes() for _ in range(100))
        wrong.extend(each for each in found if each != mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")
def test_a_forked_child_does_not_write_into_its_parents_file() -> None:
    scratch = ScratchFile()
    path = scratch.holding(b"parent")
    child = os.fork()
    if not child:
        os._exit(0 if Path(scratch.holding(b"child!")).read_bytes() == b"child!" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert Path(path).read_bytes() == b"parent"


def test_nothing_is_left_open_when_threads_end() -> None:
    scratch = ScratchFile()

    def descriptors() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    before = descriptors()
    for _ in range(20):
        thread = threading.Thread(target=scratch.holding, args=(b"x",))
        thread.start()
        thread.join()
    assert descriptors() <= before + 1
