"""A table whose storage gives no answer, or is slower than its writers."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush import SstInvalid
from memwal.ingest.errors import Invalid, Unavailable, UnknownOutcome
from memwal.wal.layout import manifest_key
from memwal.wal.retries import Backoff
from tests.conftest import wait_until
from tests.failure_matrix import FAULTS, Call, FaultyStore
from tests.fault_proxy import FaultProxy, swallows
from tests.messages import raises
from tests.s3_fixtures import S3Table
from tests.s3_server import S3Server
from tests.support.clock import FakeClock
from tests.support.interpose import puts_answered
from tests.table_stages import REGION, Owner, read
from tests.table_stages import SCHEMA as STAGED

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])


def _open(path: Path, **sections: Any) -> Any:
    settings = {"commit": {"interval": 0}, **sections}
    return memwal.open(path / "t.lance", schema=SCHEMA, key="id", settings=settings)


def test_no_answer_is_an_unknown_outcome_and_ends_the_writer(tmp_path: Path) -> None:
    """The outcome is never success and never a conflict: the caller retries with its token on a reopened table."""
    table = _open(tmp_path, wal={"put_timeout": "50ms", "retry_budget": "200ms"})
    table.put([{"id": 1, "v": 1}], token="writer:1")
    assert table.broken() is None
    with puts_answered(wal.PutOutcome.OUTCOME_UNKNOWN), pytest.raises(UnknownOutcome):
        table.put([{"id": 2, "v": 2}], token="writer:2")
    with raises(Unavailable):
        table.put([{"id": 2, "v": 2}], token="writer:2")
    assert "stopped itself" in str(table.broken())
    table.close()
    with _open(tmp_path) as again:
        assert again.put([{"id": 2, "v": 2}], token="writer:2").applied
        assert sorted(again.scan(["id"]).read_all()["id"].to_pylist()) == [1, 2]


def test_unavailable_storage_costs_the_put_and_not_the_writer(tmp_path: Path) -> None:
    with _open(tmp_path, wal={"put_timeout": "50ms", "retry_budget": "200ms"}) as table:
        with puts_answered(wal.PutOutcome.UNAVAILABLE):
            with pytest.raises(Unavailable):
                table.put([{"id": 1, "v": 1}], token="writer:1")
            assert table.count() == 0
        assert table.put([{"id": 1, "v": 1}], token="writer:1").applied
        assert table.count() == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, Unavailable), (errno.EROFS, Invalid)],
    ids=["full disk", "read-only file system"],
)
def test_a_disk_that_takes_nothing_costs_the_put_names_the_object_and_is_not_hammered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    settings = {"put_timeout": "100ms", "retry_budget": "800ms"}
    with _open(tmp_path, wal=settings, memtable={"age_max": "100ms"}, flush={"retry_delay": "100ms"}) as table:
        table.put([{"id": 1, "v": 1}], token="writer:1")
        asked: list[str] = []
        began = time.monotonic()

        def refuse(store: wal.LocalStore, directory: Any, data: bytes, *, sync: bool) -> str:
            asked.append(directory.path)
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as full:
            full.setattr(wal.LocalStore, "_write_temporary", refuse)
            with raises(kind):
                table.put([{"id": 2, "v": 2}], token="writer:2")
            time.sleep(0.7)  # flushes are due in this time, and fail
            assert 0 < len(asked) < 30 * (time.monotonic() - began), "a few times a second, and not thousands"
            assert table.count() == 1
            assert table.broken() is None
        assert table.put([{"id": 2, "v": 2}], token="writer:2").applied
        table.flush()
    with _open(tmp_path) as again:
        assert again.count() == 2


def test_a_flush_that_keeps_failing_backs_off_and_keeps_one_sst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Recorded(Backoff):
        def pause(self) -> float:
            pauses.append(super().pause())
            return 0.0 if len(pauses) < 30 else 0.01

    monkeypatch.setattr("memwal.ingest.engine.region.writer.Backoff", Recorded)
    settings = {"put_timeout": "5ms", "retry_budget": "5ms"}
    with _open(tmp_path, wal=settings, memtable={"rows_max": 1}, flush={"retry_delay": "100ms"}) as table:
        with puts_answered(wal.PutOutcome.OUTCOME_UNKNOWN, of="/manifest/"):
            table.put([{"id": 1, "v": 1}])
            wait_until(lambda: len(pauses) >= 30)
            assert len(list((tmp_path / "t.lance" / "_mem_wal").glob("*/*_gen_*"))) == 1
        wait_until(lambda: table.count(level="flushed") == 1)
        assert len(list((tmp_path / "t.lance" / "_mem_wal").glob("*/*_gen_*"))) == 1
    bounds = [min(0.1 * 2**number, 1.6) for number in range(30)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=False))
    assert len(set(pauses[5:30])) > 20, "jitter"


def test_a_flush_after_an_outage_does_not_report_the_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry of the failed flush is due in a minute or more; the call starts it at once."""
    failures: list[float] = []

    def refused(*_: Any, **__: Any) -> Any:
        failures.append(time.monotonic())
        raise wal.StoreUnavailable("no answer")

    with _open(tmp_path, wal={"put_timeout": "1s", "retry_budget": "1s"}, flush={"retry_delay": "2min"}) as table:
        table.put([{"id": 1, "v": 1}])
        with monkeypatch.context() as outage:
            outage.setattr("memwal.flush.flush", refused)
            for number in range(2):
                with raises(Unavailable):
                    table.flush()
                assert len(failures) > number, "each call makes an attempt of its own"
        table.flush()
        assert table.commit().rows_inserted == 1
        assert table.status()["regions"][0]["state"] == "serving"


def test_a_flush_does_not_report_an_attempt_that_began_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()
    real = flush.flush

    def late(*args: Any, **kwargs: Any) -> Any:
        if not began.is_set():
            began.set()
            ended.wait(30)
            raise wal.StoreUnavailable("reset by the peer")
        return real(*args, **kwargs)

    settings = {"memtable": {"rows_max": 1}, "flush": {"retry_delay": "2min"}}
    with _open(tmp_path, wal={"put_timeout": "500ms", "retry_budget": "500ms"}, **settings) as table:
        monkeypatch.setattr("memwal.flush.flush", late)
        table.put([{"id": 1, "v": 1}])
        assert began.wait(30)
        threading.Timer(1.0, ended.set).start()  # the call waits longer than its budget for this attempt
        table.flush()
        assert table.count(level="flushed") == 1


def test_a_flush_ends_while_others_go_on_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush waits for the memtables of its beginning, and not for those that freeze later."""
    real = flush.flush

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return real(*args, **kwargs)

    monkeypatch.setattr("memwal.flush.flush", slow)
    with _open(tmp_path, memtable={"rows_max": 20}) as table:
        table.put([{"id": 0, "v": -1}])
        stop = threading.Event()

        def write() -> None:
            number = 1
            while not stop.is_set():
                table.put([{"id": id, "v": number} for id in range(number, number + 40)], durable=False)
                number += 40
                time.sleep(0.02)

        writing = threading.Thread(target=write)
        writing.start()
        flushing = threading.Thread(target=table.flush)
        flushing.start()
        flushing.join(60)
        ended = not flushing.is_alive()
        stop.set()
        writing.join()
        assert ended
        assert 0 in table.scan(["id"], level="flushed").read_all()["id"].to_pylist()


@pytest.mark.parametrize("file", ["page_data", "page_lookup"])
def test_an_sst_without_its_key_index_is_not_published(
    s3_table_through_proxy: S3Table, s3_server: S3Server, fault_proxy: FaultProxy, prepared: dict[str, Path], file: str
) -> None:
    """Storage acknowledges the index, but does not store it. Lance's writer publishes before the index exists."""
    uri, options = s3_table_through_proxy.uri, s3_table_through_proxy.storage_options
    s3_server.upload(prepared["flush"], uri)
    owner = Owner(uri, options, wal.open_store(uri, options))
    entries = owner.claim().entries
    fault_proxy.inject(swallows(), method="PUT", key=f"_pk_index/{file}")
    with raises(SstInvalid):
        owner.flush(entries)
    assert read(owner, owner.claim()) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert owner.claimed.manifest.ssts == ()
    owner.flush(entries)
    assert [sst.generation for sst in owner.claim().manifest.ssts] == [1]


@pytest.mark.parametrize("level", ["flushed", "durable", "latest"])
def test_a_committed_sst_still_listed_does_not_shadow_a_newer_base_row(
    prepared: dict[str, Path], tmp_path: Path, level: str
) -> None:
    uri = str(shutil.copytree(prepared["commit"], tmp_path / "table.lance"))
    store = FaultyStore(wal.LocalStore(uri), FakeClock())
    owner = Owner(uri, {}, store)
    owner.claim()
    prune = manifest_key(REGION, owner.claimed.manifest.version + 1)
    store.arm(FAULTS["permanent failure"], Call("put_if_absent", prune, 1))
    with pytest.raises(wal.StoreRefused):
        owner.commit()
    assert [sst.generation for sst in owner.claim().manifest.ssts] == [2, 3]  # committed, and still listed
    other = lance.dataset(uri).merge_insert("id").when_matched_update_all()
    other.execute(pa.table({"id": [3, 5], "n": [300, 500]}, schema=STAGED))
    with memwal.open(uri, settings={"commit": {"interval": 0}, "gc": {"interval": 0}}) as table:
        found = {row["id"]: row["n"] for row in table.scan(level=level).read_all().to_pylist()}
        assert {id: found[id] for id in (3, 5)} == {3: 300, 5: 500}
        table.commit()
        assert {row["id"]: row["n"] for row in table.scan(level="committed").read_all().to_pylist()}[3] == 300
