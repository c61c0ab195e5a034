"""A caller's mistake never loses an acknowledged row, and never ends a region."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.errors import FencedError, Invalid
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.daemon.child import start_child
from memwal.ingest.settings.load import load
from tests.conftest import wait_until
from tests.messages import raises
from tests.opened import open_table

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64()), pa.field("s", pa.string())])


def _open(path: Path, **options: Any) -> Any:
    options = {"settings": {"commit": {"interval": 0}}} | options
    return memwal.open(path / "t.lance", schema=SCHEMA, key="id", regions=1, **options, take_over=True)


def _not_utf8(rows: int) -> pa.Array:
    """Return text that Arrow accepts without validation: its last value is the byte FF."""
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(b"a" * (rows - 1) + b"\xff")])


def test_arrays_that_are_used_again_do_not_change_acknowledged_rows(tmp_path: Path) -> None:
    ids, values = np.arange(5), np.full(5, 7)
    with _open(tmp_path) as table:
        table.put(pa.table({"id": ids, "v": values}), missing="null")
        table.delete(ids[:1])
        ids[:], values[:] = 99, 666
        assert sorted(table.scan(["id", "v"]).read_all().to_pylist(), key=lambda row: row["id"]) == [
            {"id": key, "v": 7} for key in range(1, 5)
        ]
        table.flush()
        table.commit()
        assert sorted(table.scan(["id"], level="committed").read_all()["id"].to_pylist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("indexes", [{}, {"s": "fts"}], ids=["plain", "fts"])
def test_text_that_is_not_utf8_is_refused_and_the_table_lives_on(tmp_path: Path, indexes: dict[str, str]) -> None:
    with _open(tmp_path, indexes=indexes) as table:
        with raises(Invalid):
            table.put(pa.table({"id": [1, 2], "v": [1, 2], "s": _not_utf8(2)}))
        table.put([{"id": 3, "v": 3, "s": "fine"}])
    with memwal.open(tmp_path / "t.lance") as table:
        assert table.scan(["id"]).read_all()["id"].to_pylist() == [3]


@pytest.mark.parametrize(("producer", "sequence"), [("x", "5"), ("x", -1), ("", 1), (None, 1), ("x", True)])
def test_a_token_that_is_none_is_refused_when_it_is_made(producer: Any, sequence: Any) -> None:
    with raises(Invalid):
        memwal.Token(producer, sequence)


def test_a_table_removed_under_its_writer_acknowledges_nothing_more(tmp_path: Path) -> None:
    table = _open(tmp_path)
    table.put([{"id": 1, "v": 1}], missing="null")
    shutil.rmtree(tmp_path / "t.lance")
    with _open(tmp_path) as again:
        for _ in range(2):
            with raises(Invalid):
                table.put([{"id": 2, "v": 2}], missing="null")
        again.put([{"id": 3, "v": 3}], missing="null")
        table.close()
        assert again.scan(["id"]).read_all()["id"].to_pylist() == [3]
    with memwal.open(tmp_path / "t.lance") as reopened:
        assert reopened.scan(["id"]).read_all()["id"].to_pylist() == [3]


def test_a_writer_that_knows_it_is_fenced_answers_no_more_reads(tmp_path: Path) -> None:
    older = _open(tmp_path)
    older.put([{"id": 1, "v": 1}], missing="null")
    with _open(tmp_path) as newer:
        newer.put([{"id": 1, "v": 2}], missing="null")
        with pytest.raises(FencedError):
            older.commit()
        with raises(FencedError):
            older.get([1])
        older.close()
        assert newer.get([1])["v"].to_pylist() == [2]


def test_a_fraction_for_an_integer_is_refused(tmp_path: Path) -> None:
    with _open(tmp_path) as table:
        with raises(Invalid):
            table.put([{"id": 1, "v": 2.7}])
        assert table.count() == 0


@pytest.mark.parametrize(
    "arguments",
    [{"regions": 5}, {"indexes": {"v": "btree"}}, {"schema": SCHEMA.remove(1)}],
    ids=["regions", "indexes", "schema"],
)
def test_an_argument_that_contradicts_the_table_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    _open(tmp_path).close()
    with raises(Invalid):
        memwal.open(tmp_path / "t.lance", **arguments)


def test_a_column_added_by_a_stranger_is_null_in_rows_that_waited(tmp_path: Path) -> None:
    """Lance allows other programs to add a column of nulls beside MemWAL; rows put before it read null for it."""
    with _open(tmp_path) as table:
        table.put([{"id": 1, "v": 1}], missing="null")
        table.flush()
        table.put([{"id": 2, "v": 2}], missing="null")
        lance.dataset(tmp_path / "t.lance").add_columns(pa.field("extra", pa.int64()))
        assert table.count() == 2
        table.flush()
        assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [1, 2]
        table.commit()
    with memwal.open(tmp_path / "t.lance") as table:
        table.put([{"id": 3, "v": 3, "extra": 30}], missing="null")
        rows = table.scan(["id", "extra"]).read_all().to_pylist()
    assert sorted((row["id"], row["extra"]) for row in rows) == [(1, None), (2, None), (3, 30)]


def test_the_lowest_integer_is_a_key_like_any_other(tmp_path: Path) -> None:
    lowest = -(2**63)
    with _open(tmp_path) as table:
        table.put([{"id": lowest, "v": 1}, {"id": 0, "v": 0}], missing="null")
        table.flush()
        table.commit()
        table.put([{"id": lowest, "v": 2}], missing="null")
        assert table.get([lowest])["v"].to_pylist() == [2]
        assert table.count() == 2
        assert table.get([lowest], level="committed")["v"].to_pylist() == [1]


def test_a_failed_flush_leaves_no_sst_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "no more")

    with _open(tmp_path, settings={"commit": {"interval": 0}, "flush": {"retry_delay": "10ms"}}) as table:
        table.put([{"id": 1, "v": 1}], missing="null")
        with monkeypatch.context() as patched:
            patched.setattr("memwal.flush.sst.files.sync_tree", broken)
            flushing = threading.Thread(target=table.flush)
            flushing.start()
            flushing.join(1.0)
            assert flushing.is_alive()
        flushing.join(60)
        ssts = [path for path in (tmp_path / "t.lance").glob("_mem_wal/*/*_gen_*") if any(path.rglob("*.lance"))]
        assert len(ssts) == 1


def test_a_commit_that_fails_for_any_reason_is_tried_at_the_next_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = flush.commit, []

    def once_broken(*args: Any, **kwargs: Any) -> flush.CommitReport:
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("anything")
        return real(*args, **kwargs)

    monkeypatch.setattr("memwal.flush.commit", once_broken)
    with _open(tmp_path, settings={"commit": {"interval": "100ms"}}) as table:
        table.put([{"id": 1, "v": 1}], missing="null")
        table.flush()
        wait_until(lambda: table.count(level="committed") == 1)


def test_a_stale_note_does_not_lead_to_another_tables_daemon(tmp_path: Path) -> None:
    """Both tables have the same region ids; the owner note of the first names the port of the second's daemon."""
    columns = {"id": "int64", "v": "int64"}
    settings = [
        load({"table": {"uri": str(tmp_path / name), "key": ["id"], "columns": columns}}, {}) for name in ("a", "b")
    ]
    for number, each in enumerate(settings):
        with open_table(each, {}) as table:
            table.put([{"id": 1, "v": number}])
    child = start_child(settings[1])
    try:
        store = wal.open_store(settings[0].table.uri)
        for bucket in range(2):
            owners.announce(store, wal.bucket_region(bucket), 2, child.endpoint)
        assert open_for_reading(Call(settings[0], {})).get([1])["v"].to_pylist() == [0]
        assert open_for_reading(Call(settings[1], {})).get([1])["v"].to_pylist() == [1]
        assert isinstance(open_for_reading(Call(settings[1], {})), RemoteTable)
    finally:
        child.stop()


@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.put(pd.DataFrame({"id": [1, "x"]})),
        lambda table: table.put(pa.RecordBatchReader.from_batches(SCHEMA, iter([1]))),
        lambda table: table.count(filter=5),
        lambda table: table.count(level=None),
    ],
    ids=["mixed frame", "broken reader", "filter", "level"],
)
def test_what_makes_no_sense_is_the_callers_mistake_not_ours(tmp_path: Path, call: Any) -> None:
    with _open(tmp_path) as table, pytest.raises(Invalid):
        call(table)


def test_a_close_that_loses_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = _open(tmp_path, settings={"commit": {"interval": 0}, "wal": {"linger_max": "1min"}})
    table.put([{"id": 1, "v": 1}], durable=False, missing="null")

    def refuses(*_: Any) -> None:
        raise wal.StoreRefused("read-only")

    monkeypatch.setattr(wal.LocalStore, "put_if_absent", refuses)
    with raises(Invalid):
        table.close()


def test_the_base_is_synced_before_its_ssts_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def power_cut(_: str) -> None:
        raise OSError(errno.EIO, "power cut")

    with _open(tmp_path) as table:
        table.put([{"id": 1, "v": 1}], missing="null")
        table.flush()
        with monkeypatch.context() as patched:
            patched.setattr("memwal.flush.commits.committer.sync_table", power_cut)
            with pytest.raises(memwal.Unavailable):
                table.commit()
        assert len(table.status()["regions"][0]["ssts"]) == 1
        table.commit()
        assert table.status()["regions"][0]["ssts"] == []
