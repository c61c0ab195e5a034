"""A process cannot open a table twice, since the second open would fence the first handle."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from tests.messages import raises

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
ROW = [{"id": 1, "v": 1}]


def opened(uri: Any, **more: Any) -> Any:
    return memwal.open(uri, settings={"commit": {"interval": "0s"}}, **more)


def test_the_first_handle_stays_whatever_the_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = tmp_path / "t.lance"
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    with opened(uri, schema=SCHEMA, key="id") as table:
        table.put(ROW, durable=False)
        for spelling in (
            uri,
            str(uri),
            f"{uri}/",
            f"file://{uri}",
            "t.lance",
            "./t.lance",
            tmp_path / "link" / "t.lance",
        ):
            with raises(memwal.Unavailable) as refused:
                opened(spelling)
            assert refused.value.details["reason"] == "served"
        with opened(uri, read_only=True) as reader:
            assert reader.count(level="committed") == 0
        assert table.count() == 1
        table.put(ROW)
    with opened(uri) as again:
        assert again.count() == 1


def test_a_handle_that_is_closed_or_was_fenced_is_not_in_the_way(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    first = opened(uri, schema=SCHEMA, key="id")
    first.put(ROW)
    with opened(uri, take_over=True) as second:
        with pytest.raises(memwal.FencedError):
            first.put(ROW)
        with raises(memwal.Unavailable):
            opened(uri)
        assert second.count() == 1
    first.close()
    with opened(uri) as third:
        assert third.count() == 1


def test_a_handle_that_was_fenced_and_has_not_noticed_is_not_in_the_way(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    first = opened(uri, schema=SCHEMA, key="id")
    opened(uri, take_over=True).close()
    with opened(uri) as third:
        assert third.count() == 0
    first.close()


def test_a_copy_and_a_new_table_at_the_same_place_are_other_tables(tmp_path: Path) -> None:
    uri, copy = tmp_path / "t.lance", tmp_path / "copy.lance"
    with opened(uri, schema=SCHEMA, key="id") as table:
        table.put(ROW)
        shutil.copytree(uri, copy)
        with opened(copy) as other:
            assert other.count() == 1
        shutil.rmtree(uri)
        with opened(uri, schema=SCHEMA, key="id") as anew:
            assert anew.count() == 0


def test_of_threads_that_open_at_once_one_gets_the_table(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    opened(uri, schema=SCHEMA, key="id").close()
    begin, handles, refused = threading.Barrier(6), list[Any](), list[BaseException]()

    def work() -> None:
        begin.wait()
        try:
            handles.append(opened(uri))
        except memwal.Unavailable as error:
            refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(handles), len(refused)) == (1, 5)
    handles[0].put(ROW)
    handles[0].close()


def test_a_failed_open_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = tmp_path / "t.lance"
    opened(uri, schema=SCHEMA, key="id").close()

    def fails(*_: Any) -> Any:
        raise OSError("no")

    with monkeypatch.context() as broken:
        broken.setattr("memwal.ingest.engine.table.embedded.RegionSet.acquire", fails)
        with pytest.raises(memwal.MemWalError):
            opened(uri)
    opened(uri).close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_forgets_the_tables_of_its_parent(tmp_path: Path) -> None:
    from memwal.ingest.engine.table import open_here

    with opened(tmp_path / "t.lance", schema=SCHEMA, key="id"):
        child = os.fork()
        if child == 0:
            os._exit(len(open_here._OPEN) + len(open_here._CLAIMING))
        assert os.waitpid(child, 0)[1] == 0
        assert len(open_here._OPEN) > 0
