"""The output of `memwal status` for people."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from memwal.ingest.cli.status import render
from memwal.wal import bucket_region

FIRST, SECOND = "grpc+tls://ingest-0.example.org:17447", "grpc+tls://ingest-1.example.org:17447"


def region(bucket: int, owner: str | None, **changed: Any) -> dict[str, Any]:
    found = {
        "bucket": bucket,
        "id": str(bucket_region(bucket)),
        "epoch": 12,
        "wal_position": 1_234_567,
        "replay_after": 1_234_000,
        "generation": 4321,
        "memtable_rows": 1_000_000,
        "state": "serving",
        "failure": None,
        "flush_error": None,
        "last_errors": {},
        "ssts": [],
        "behind": {"committed": 27.5} if owner else None,
        "owner": owner,
    }
    return found | changed


def printed(status: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80, emoji=False).print(render(status))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("place", ["data/t.lance", "/data/[prod]/t:a:.lance"])
def test_nothing_is_cut_at_80_columns(place: str) -> None:
    """Long addresses and headings are the texts at risk."""
    regions = [region(bucket, FIRST if bucket in (0, 1, 3) else SECOND) for bucket in range(5)]
    lines = printed({"table": place, "base_version": 7, "rows": 3, "regions": regions})
    assert lines[0].startswith(f"{place}: version 7, 3 rows committed")
    assert f"{FIRST} serves regions 0–1, 3" in lines
    assert f"{SECOND} serves regions 2, 4" in lines
    assert not any("…" in line for line in lines)
    (head,) = [line.split() for line in lines if line.lstrip().startswith("region  id")]
    assert head == ["region", "id", "epoch", "WAL", "flushed", "gen", "in", "memory", "SSTs", "behind"]
    (row,) = [line.split() for line in lines if line.split()[:1] == ["3"]]
    assert row[2:] == ["12", "1234567", "1234000", "4321", "1,000,000", "0", "27.5", "s"]


def test_regions_that_nobody_serves_say_who_did() -> None:
    status = {"table": "t", "base_version": 1, "rows": 0, "regions": [region(0, None)], "served_last_by": [FIRST]}
    lines = printed(status)
    assert "no owner answers for region 0; shown as stored" in lines
    assert f"last served by {FIRST}" in lines


def test_the_newest_error_of_a_region_is_told_with_its_time_also_when_it_is_over() -> None:
    errors = {"flush": {"at": 90.0, "error": "disk full"}, "append": {"at": 86_400.5, "error": "no answer"}}
    status = {"table": "t", "base_version": 1, "rows": 0, "regions": [region(0, FIRST, last_errors=errors)]}
    assert "region 0: last error at 1970-01-02 00:00:00 UTC, append: no answer" in printed(status)
    troubled = region(0, FIRST, last_errors=errors, state="flush_failing", flush_error="disk full")
    lines = printed(status | {"regions": [troubled]})
    assert "region 0 is flush failing: disk full" in lines
    assert not any("last error" in line for line in lines)
