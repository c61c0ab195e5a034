"""The policy that decides when a table commits by itself."""

from __future__ import annotations

import pytest

from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.table.upkeep import Decision, decide
from memwal.ingest.settings.sections import CommitSettings

LIMITS = CommitSettings.model_construct(interval=30.0, size_max=1000)
IDLE = Backlog(0, 0, None)


@pytest.mark.parametrize(
    ("regions", "decision"),
    [
        ([], "nothing"),
        ([IDLE, IDLE], "nothing"),
        ([Backlog(0, 0, 29.9)], "nothing"),
        ([IDLE, Backlog(0, 0, 30.0)], "flush"),  # a row still in a memtable
        ([Backlog(1, 10, 30.0)], "flush"),  # in an SST
        ([Backlog(8, 10, 1.0)], "commit"),
        ([Backlog(7, 10, 1.0), Backlog(7, 10, 1.0)], "nothing"),  # the number of SSTs counts per region
        ([Backlog(1, 600, 1.0), Backlog(1, 400, 1.0)], "commit"),  # the bytes count over all regions
        ([Backlog(8, 1000, 31.0)], "flush"),  # a late commit includes the rows of the memtables
    ],
)
def test_the_oldest_row_the_ssts_of_a_region_and_all_bytes_decide(regions: list[Backlog], decision: Decision) -> None:
    assert decide(regions, LIMITS, lead=0.0) == decision


def test_it_begins_early_by_what_flush_and_commit_take() -> None:
    assert decide([Backlog(0, 0, 25.0)], LIMITS, lead=4.9) == "nothing"
    assert decide([Backlog(0, 0, 25.0)], LIMITS, lead=5.0) == "flush"


def test_slow_storage_gets_no_commit_before_half_the_interval() -> None:
    assert decide([Backlog(0, 0, 14.9)], LIMITS, lead=300.0) == "nothing"
    assert decide([Backlog(0, 0, 15.0)], LIMITS, lead=300.0) == "flush"


def test_an_interval_of_0_leaves_it_to_the_user() -> None:
    assert (
        decide([Backlog(99, 10_000, 1e6)], CommitSettings.model_construct(interval=0.0, size_max=1000), lead=0.0)
        == "nothing"
    )
