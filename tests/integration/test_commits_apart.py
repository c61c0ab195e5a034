"""Each region is committed independently, another process leads after the leader ended, and held-back rows are
reported.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from rich.console import Console

import memwal
from memwal import flush, wal
from memwal.ingest.cli.status import render
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.service.daemon.pages import DaemonPages
from memwal.ingest.service.daemon.tables import OneTable
from memwal.ingest.service.ops.health import of_commits
from memwal.ingest.service.ops.metrics import COMMITTED, Scrape, families
from tests.messages import raises

pytestmark = pytest.mark.usefixtures("only_process")
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
REGIONS, ROWS = 4, 100


def opened(uri: Path, interval: str = "0s") -> Any:
    settings = {"commit": {"interval": interval}}
    return memwal.open(uri, schema=SCHEMA, key="id", regions=REGIONS, settings=settings)


def rows(v: int, ids: range = range(ROWS)) -> pa.Table:
    return pa.table({"id": pa.array(ids), "v": [v] * len(ids)}, schema=SCHEMA)


def in_base(table: Table) -> dict[int, int]:
    found = lance.dataset(table.base.uri).to_table().to_pylist()
    return {row["id"]: row["v"] for row in found}


def of_bucket(table: Table, bucket: int) -> set[int]:
    return {id for id, found in enumerate(table.base.route(rows(0)).tolist()) if found == bucket}


def shown(table: Table) -> str:
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render(table.status()))
    return console.export_text()


def held_back(table: Table) -> float:
    meter = {"": table.regions.context.meters.commits}
    (found,) = [each for each in families(COMMITTED, meter) if each.name == "memwal_commit_held_back_regions"]
    return found.samples[0].value


def test_commits_go_on_when_the_first_regions_writer_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "t", "1s") as table:
        first = table.regions.writers[0]
        wal.claim(
            table.regions.context.store,
            first.region,
            spec_id=1,
            codec=table.base.codec,
            ids=wal.SystemIds(),
            clock=wal.SystemClock(),
        )
        lost = of_bucket(table, 0)
        with pytest.raises(memwal.FencedError):
            table.put(rows(1).filter(pa.array([id in lost for id in range(ROWS)])))
        table.put(rows(2).filter(pa.array([id not in lost for id in range(ROWS)])))
        until = time.monotonic() + 30
        while len(in_base(table)) < ROWS - len(lost):
            assert time.monotonic() < until, "nobody commits"
            time.sleep(0.1)
    assert "commits for all from region 1 on" in caplog.text


def test_an_sst_that_cannot_be_read_holds_only_its_own_region_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with opened(tmp_path / "t") as table:
        table.put(rows(1))
        table.flush()
        broken = of_bucket(table, 2)
        (sst,) = table.status()["regions"][2]["ssts"]
        region = table.status()["regions"][2]["id"]
        data = next((tmp_path / "t/_mem_wal" / region / sst["path"] / "data").glob("*.lance"))
        data.rename(aside := tmp_path / "aside")

        for _ in range(2):
            with pytest.raises(memwal.MemWalError, match=sst["path"]):
                table.commit()
        assert in_base(table) == {id: 1 for id in range(ROWS) if id not in broken}
        (failure,) = table.status()["commit_failures"]
        assert failure["region"] == region
        assert sst["path"] in failure["error"]
        assert of_commits([failure])[0]["region"] == region
        assert "region 2 cannot be committed" in shown(table)
        assert held_back(table) == 1
        assert len([each for each in caplog.messages if "cannot be committed" in each]) == 1

        aside.rename(data)
        table.put(rows(3))
        table.flush()
        table.commit()
        assert in_base(table) == dict.fromkeys(range(ROWS), 3)
        assert table.status()["commit_failures"] == []
        assert held_back(table) == 0


def test_what_is_held_back_does_not_have_the_others_flushed_at_every_look(tmp_path: Path) -> None:
    with opened(tmp_path / "t", "1h") as table:
        table.put(rows(1))
        table.flush()
        region = table.status()["regions"][2]
        shutil.rmtree(tmp_path / "t/_mem_wal" / region["id"] / region["ssts"][0]["path"] / "data")
        assert len(table.upkeep.waiting()) == REGIONS
        with pytest.raises(memwal.MemWalError):
            table.commit()
        assert len(table.upkeep.waiting()) == REGIONS - 1
        assert not table.upkeep.held_back_elsewhere
        table.release(table.base.regions[2])
        assert table.upkeep.held_back_elsewhere


def test_a_key_that_a_stranger_doubled_holds_only_its_own_region_back(tmp_path: Path) -> None:
    with opened(tmp_path / "t") as table:
        table.put(rows(1))
        table.flush()
        table.commit()
        doubled = min(of_bucket(table, 1))
        lance.write_dataset(rows(9, range(doubled, doubled + 1)), table.base.uri, mode="append")

        table.put(rows(2))
        table.flush()
        for _ in range(2):
            with raises(memwal.MemWalError):
                table.commit()
            held = of_bucket(table, 1)
            assert {id for id, v in in_base(table).items() if v == 2} == set(range(ROWS)) - held
            assert f"id = {doubled}" in table.status()["commit_failures"][0]["error"]
        pages = DaemonPages(Scrape())
        pages.shows(OneTable(table))
        assert [each["region"] for each in pages.reasons() if each["reason"] == "commit_failing"] == [
            table.status()["regions"][1]["id"]
        ]

    # The reopened table does not remember the failure, and other commits are newer than the other program's row.
    with opened(tmp_path / "t") as table:
        with raises(memwal.MemWalError):
            table.commit()
        assert lance.dataset(table.base.uri).count_rows(f"id = {doubled} AND v <> 2") == 2
        lance.dataset(table.base.uri).delete(f"id = {doubled} AND v = 9")
        table.commit()
        assert in_base(table) == dict.fromkeys(range(ROWS), 2)
        assert table.status()["commit_failures"] == []


def test_a_doubled_key_that_no_put_touches_is_told_until_it_is_mended(tmp_path: Path) -> None:
    with opened(tmp_path / "t") as table:
        table.put(rows(1))
        table.flush()
        table.commit()
        lance.write_dataset(rows(9, range(7, 8)), table.base.uri, mode="append")
        for v in (2, 3):
            table.put(rows(v, range(20, 60)))
            table.flush()
            with raises(memwal.MemWalError):
                table.commit()
            assert all(in_base(table)[id] == v for id in range(20, 60))
        lance.dataset(table.base.uri).delete("id = 7 AND v = 9")
        table.put(rows(4, range(20, 60)))
        table.flush()
        table.commit()
        assert table.status()["commit_failures"] == []


def test_regions_of_a_table_without_a_key_are_committed_apart(tmp_path: Path) -> None:
    table = memwal.open(tmp_path / "t", schema=SCHEMA, key=(), regions=2, settings={"commit": {"interval": "0s"}})
    with table:
        table.put(rows(1))
        table.flush()
        region = table.status()["regions"][0]
        data = next((tmp_path / "t/_mem_wal" / region["id"] / region["ssts"][0]["path"] / "data").glob("*.lance"))
        data.rename(aside := tmp_path / "aside")
        with pytest.raises(memwal.MemWalError, match=region["ssts"][0]["path"]):
            table.commit()
        some = lance.dataset(str(tmp_path / "t")).count_rows()
        assert 0 < some < ROWS
        aside.rename(data)
        table.commit()
        assert lance.dataset(str(tmp_path / "t")).count_rows() == ROWS


def test_a_commit_tells_what_it_left_out_though_another_process_leads_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`catch_up` clears the state that only a leader reports; a commit in progress must still
    report what it left out.
    """
    commit = flush.commit
    with opened(tmp_path / "t") as table:
        table.put(rows(1))
        table.flush()

        def committing(*given: Any, held: Any, **named: Any) -> Any:
            report = commit(*given, held=held, **named)
            table.upkeep.catch_up()
            held.regions = dict.fromkeys(table.base.regions, OSError("an SST cannot be read"))
            return report

        with monkeypatch.context() as patched:
            patched.setattr(flush, "commit", committing)
            with raises(memwal.Unavailable):
                table.commit()
        table.commit()
