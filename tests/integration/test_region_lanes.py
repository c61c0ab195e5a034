"""Regions own no threads: many regions share a few, and one region's storage does not hold up another's."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.ingest import lanes
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.writer import LOCAL_AT_ONCE
from tests.conftest import wait_until

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


@pytest.fixture(autouse=True)
def _without_threads_of_earlier_tests() -> None:
    wait_until(lambda: lanes.SCHEDULER.calls.threads <= 1)


def opened(at: Path, regions: int = 1, **sections: Any) -> Any:
    return memwal.open(at, schema=SCHEMA, key="id", regions=regions, settings=QUIET | sections)


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": list(ids), "v": list(ids)}, schema=SCHEMA)


def test_sixty_four_regions_share_a_few_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with opened(tmp_path / "t", 64) as table:
        assert threading.active_count() - before <= 8
        most = 0
        with ThreadPoolExecutor(2) as pool:
            for first in range(0, 20_000, 1_000):
                put = pool.submit(table.put, rows(*range(first, first + 1_000)), durable=bool(first % 3_000))
                while not put.done():
                    most = max(most, lanes.SCHEDULER.calls.threads)
                    put.exception() if put.done() else threading.Event().wait(0.002)
                put.result()
        assert table.count() == 20_000
        table.flush()
        assert most <= LOCAL_AT_ONCE * 2 + 2 + lanes.CAPS[lanes.Kind.INDEX] + 2, (
            "serve, append, flush.at_once, index, idle"
        )
        assert table.count(level="flushed") == 20_000
    with opened(tmp_path / "t", 64) as again:
        assert again.count() == 20_000


def test_a_table_whose_storage_hangs_does_not_hold_up_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads that its regions may have wait for storage, of durable puts and of lingering rows."""
    opened_again, stuck = threading.Event(), Counter[str]()
    real = wal.LocalStore.put_if_absent

    def hanging(store: wal.LocalStore, key: str, data: bytes) -> wal.PutOutcome:
        if "stuck" in store.url("") and "/wal/" in key:
            stuck["entries"] += 1
            assert opened_again.wait(60)
        return real(store, key, data)

    with opened(tmp_path / "stuck", 64) as hangs, opened(tmp_path / "other") as other, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(wal.LocalStore, "put_if_absent", hanging)
        puts = [pool.submit(hangs.put, rows(*range(500)), durable=durable) for durable in (False, True)]
        wait_until(lambda: stuck["entries"] >= LOCAL_AT_ONCE)
        for n in range(20):
            other.put(rows(n), durable=n % 2 == 0)
        other.flush()
        assert other.count(level="flushed") == 20
        opened_again.set()
        for put in puts:
            put.result(60)
        assert hangs.count() == 500


def test_flushes_of_a_table_run_as_many_at_a_time_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, running, most, lock = RegionCore.publish_next, Counter[str](), Counter[str](), threading.Lock()

    def counted(core: RegionCore) -> bool:
        with lock:
            running["now"] += 1
            most["ever"] = max(most["ever"], running["now"])
        try:
            threading.Event().wait(0.02)
            return publish(core)
        finally:
            with lock:
                running["now"] -= 1

    monkeypatch.setattr(RegionCore, "publish_next", counted)
    with opened(tmp_path / "t", 8, flush={"at_once": 3}) as table:
        table.put(rows(*range(100)))
        table.flush()
        assert table.count(level="flushed") == 100
    assert most["ever"] == 3


def test_all_work_of_a_table_has_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, weights = lanes.Scheduler.lane, dict[tuple[str, lanes.Kind], float]()

    def lane(scheduler: lanes.Scheduler, kind: lanes.Kind, table: str, *given: Any, weight: float, **more: Any) -> Any:
        weights[Path(table).name, kind] = weight
        return real(scheduler, kind, table, *given, weight=weight, **more)

    monkeypatch.setattr(lanes.Scheduler, "lane", lane)
    with opened(tmp_path / "heavy", 2, table={"weight": 3}) as heavy, opened(tmp_path / "light") as light:
        for table in (heavy, light):
            table.put(rows(1, 2), durable=False)
    assert weights == {(name, kind): weight for name, weight in (("heavy", 3), ("light", 1)) for kind in lanes.Kind}


def test_a_region_that_is_idle_uses_no_thread_and_no_timer(tmp_path: Path) -> None:
    with opened(tmp_path / "t", 4) as table:
        table.put(rows(*range(20)), durable=False)
        table.flush()
        table.commit()
        wait_until(lambda: lanes.SCHEDULER.calls.threads <= 1)
        assert table.count() == 20
