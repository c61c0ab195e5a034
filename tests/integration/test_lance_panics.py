"""A panic of Lance's Rust code is an ordinary error of one of the six kinds, and does not block a region."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
import memwal.flush.sst.data
from memwal.flush.commits import committer, rounds
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import Internal, MemWalError, Unavailable
from memwal.wal import LanceCodec, LocalStore, SsTable, bucket_region
from memwal.wal.panics import RustPanic, as_exception, panics_as_errors
from tests.conftest import wait_until
from tests.messages import raises
from tests.ways import entered

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
QUICK = {"commit": {"interval": 0}, "wal": {"put_timeout": "500ms", "retry_budget": "500ms"}}


class PanicException(BaseException):
    """The exception that pylance raises when its Rust code panics."""


def panics(*_: Any, **__: Any) -> Any:
    raise PanicException("assertion failed: end <= self.len()")


def rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": number, "v": f"v{number}"} for number in ids]


def opened(path: Path, **more: Any) -> Any:
    return memwal.open(path / "t.lance", schema=SCHEMA, key="id", regions=1, settings={**QUICK, **more})


def test_a_panic_is_an_error_and_an_interrupt_stays_one() -> None:
    with raises(RustPanic) as raised, panics_as_errors:
        panics()
    assert isinstance(raised.value.__cause__, PanicException)
    assert as_exception(raised.value) is raised.value
    for interrupt in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(interrupt), panics_as_errors:
            raise interrupt
        with pytest.raises(interrupt):
            as_exception(interrupt())


def test_a_flush_that_panics_says_why_and_everything_else_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as table:
        table.put(rows(1, 2))
        with monkeypatch.context() as broken:
            broken.setattr(memwal.flush.sst.data.lance, "write_dataset", panics)
            with raises(Unavailable):
                table.flush()
            (region,) = table.status()["regions"]
            assert (region["state"], region["failure"]) == ("flush_failing", None)
            assert "PanicException" in region["flush_error"]
            table.put(rows(3))
            assert table.get([1, 3]).num_rows == 2
            assert table.count() == 3
            assert not list((tmp_path / "t.lance" / "_mem_wal").glob("*/*_gen_*")), "an attempt leaves nothing behind"

        def flushed() -> bool:
            with suppress(Unavailable):  # the next attempt waits as long as the back-off requires by then
                table.flush()
                return True
            return False

        wait_until(flushed)
        assert table.count(level="flushed") == 3


def test_a_table_whose_flushes_panic_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memwal.flush.sst.data.lance, "write_dataset", panics_for_ssts(lance.write_dataset))
    with opened(tmp_path, memtable={"rows_max": 10}) as table:
        table.put(rows(*range(25)))
    for first in (100, 200):
        with opened(tmp_path, memtable={"rows_max": 10}) as table:
            table.put(rows(first))
            assert table.get([first, 24]).num_rows == 2
    monkeypatch.undo()
    with opened(tmp_path) as table:
        table.flush()
        assert table.count(level="flushed") == 27


def panics_for_ssts(write: Callable[..., Any]) -> Callable[..., Any]:
    return lambda data, uri, *given, **named: panics() if "_mem_wal" in str(uri) else write(data, uri, *given, **named)


def test_rows_that_lance_cannot_encode_are_refused_and_the_region_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as table:
        with monkeypatch.context() as broken:
            broken.setattr(LanceCodec, "_write", panics)
            with raises(Internal):
                table.put(rows(1))
        table.put(rows(2))
        assert table.count() == 1


def test_a_commit_that_panics_is_one_of_the_six_kinds_and_the_next_one_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as table:
        table.put(rows(1))
        table.flush()
        for owner, call in ((rounds, "upsert_pass"), (committer, "catch_up"), (committer, "sync_table")):
            with monkeypatch.context() as broken:
                broken.setattr(owner, call, panics)
                with raises(Internal):
                    table.commit()
        table.commit()
        assert table.count(level="committed") == 1


def test_a_read_that_panics_is_one_of_the_six_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Callable[[Any], Any]] = [
        lambda table: table.scan().read_all(),
        lambda table: table.count("v = 'x'"),
        lambda table: table.get([1]),
    ]
    with opened(tmp_path) as table:
        table.put(rows(1))
        table.flush()
        table.commit()
        for read in reads:
            with monkeypatch.context() as broken:
                for method in ("scanner", "count_rows", "take"):
                    broken.setattr(lance.LanceDataset, method, panics)
                with raises(MemWalError):
                    read(table)
            assert read(table) is not None


def test_an_sst_over_which_lance_panics_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    store = LocalStore(str(tmp_path / "t"))
    monkeypatch.setattr(memwal.flush.sst.data.lance, "dataset", panics)
    with raises(memwal.flush.sst.files.Corrupt):
        memwal.flush.read_sst(store, bucket_region(0), SsTable(1, "0a1b2c3d_gen_1"))


def test_a_thread_of_a_daemon_answers_with_a_kind(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would turn a BaseException of a Flight handler that is not an Exception into a text without a kind."""
    with opened(tmp_path) as table:
        client = entered("flight", table, ends)
        with monkeypatch.context() as broken:
            broken.setattr(Table, "status", panics)
            with raises(Internal):
                client.status()
        assert client.count() == 0
