"""The benchmarks of reads beside writes run briefly, and their checks of the answers are correct."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import memwal
from bench import reads, runbooks, search_under_writes, stored_looks
from bench.mixtures import column, mixed, nearest, queries, real
from bench.runbooks import RUNBOOKS, Live, Outcome, Step, WrongAnswer
from bench.search_under_writes import Searched
from tests.messages import raises


def test_made_vectors_are_fixed_different_and_near_real_ones() -> None:
    made = mixed(300, 1)
    assert np.array_equal(made, mixed(300, 1))
    assert np.allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    apart, _ = nearest(made, np.arange(300), made, 2)
    assert apart[:, 1].min() > 1e-3
    to_real = nearest(real(), np.arange(len(real())), made, 1)[0]
    among_real = nearest(real(), np.arange(len(real())), real(), 11)[0][:, 10]
    assert np.median(to_real) < np.median(among_real)
    assert nearest(made, np.arange(300), queries(100), 1)[0].min() > 1e-3


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_puts_new_or_live_rows_and_deletes_only_live_ones(name: str) -> None:
    steps, live, alive = list(RUNBOOKS[name](600, 12)), Live(), []
    assert len(steps) == 12
    for step, again in zip(steps, RUNBOOKS[name](600, 12), strict=True):
        assert np.array_equal(step.vectors, again.vectors)
        live.take(step)  # raises KeyError if a row to delete does not exist
        alive.append(len(live.vectors))
    assert min(alive) > 0
    put = np.concatenate([step.put for step in steps])
    if name == "random_replace":
        assert alive == [300] * 12
        assert len(put) > len(np.unique(put)) == 300
    else:
        assert sorted(put.tolist()) == list(range(600))
        assert alive[-1] < 600


def test_recall_of_a_runbook_counts_what_is_no_farther_than_the_tenth() -> None:
    vectors = mixed(40, 1)
    live = Live()
    live.take(Step(np.arange(40), vectors, np.empty(0, np.int64)))
    asked = queries(2)
    _, right = nearest(vectors, np.arange(40), asked, 40)
    answers = [pa.table({"id": right[0, :10]}), pa.table({"id": [*right[1, :8], *right[1, 30:32]]})]
    assert runbooks.recall(live, asked, answers) == 18 / 20
    live.take(Step(np.empty(0, np.int64), vectors[:0], right[0, :1]))
    with raises(WrongAnswer):
        runbooks.recall(live, asked, answers)


def test_recall_under_writes_asks_for_the_rows_acknowledged_before_and_takes_newer_ones() -> None:
    vectors, asked = mixed(100, 1), queries(1)
    _, before = nearest(vectors[:50], np.arange(50), asked, 12)
    _, after = nearest(vectors, np.arange(100), asked, 10)

    def recall(*ids: int, acked: int = 50) -> float:
        return search_under_writes.recall(vectors, asked, [Searched(0, 0.0, 0.0, 1.0, acked, ids)])

    assert recall(*before[0, :10].tolist()) == 1
    assert recall(*after[0].tolist()) == 1
    assert recall(*after[0].tolist(), acked=100) == 1
    assert recall(*before[0, 2:12].tolist()) == 0.8
    assert recall(*before[0, :10].tolist(), acked=100) < 1
    with pytest.raises(WrongAnswer):
        recall(*before[0, :9].tolist())


@pytest.mark.long
def test_the_runbooks_run(tmp_path: Path) -> None:
    for name in RUNBOOKS:
        outcomes = list(runbooks.run(name, 600, 4, 5, tmp_path))
        assert [type(each) for each in outcomes] == [Outcome] * 4
        assert min(each.recall for each in outcomes) >= runbooks.BAR
    shown = list(runbooks.summary({"sliding_window": outcomes}))
    assert shown[2].startswith("| sliding_window | 4 | ")
    assert shown[2].endswith("| held |")


def test_search_under_writes_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "1200", "--rates", "500", "--searchers", "2", "--window", "0.3", "--offered", "20"]
    assert search_under_writes.main(arguments) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^\| 500 \| (?:50%|80%|after) \| (?:closed|open) \| 2 \|", shown, re.MULTILINE)) == 6
    assert len(re.findall(r"^\| 500 \(\d+\) \|", shown, re.MULTILINE)) == 2
    assert "bar 0.98: held" in shown


def test_looks_at_storage_run_and_miss_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert stored_looks.main(["--smoke"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^\| kept open \|.*\| 6 \(4 get, 2 head\) for 2 regions \| 0 \|$", shown, re.MULTILINE)


def test_an_index_trained_on_a_few_rows_of_one_kind_finds_the_rows_of_others(tmp_path: Path) -> None:
    """Upkeep alone trains the index anew while the table is small."""
    asked, live, found = queries(50), Live(), []
    settings = {"commit": {"interval": "0s", "optimize_interval": "1ms"}, "memtable": {"age_max": "1h"}}
    with memwal.open(
        str(tmp_path / "t.lance"),
        schema=runbooks.SCHEMA,
        key="id",
        regions=1,
        indexes={"embedding": "ivf_pq"},
        settings=settings,
    ) as table:
        for at, step in enumerate(RUNBOOKS["clustered_expiration"](6_000, 12), 1):
            table.put(pa.table([pa.array(step.put), column(step.vectors)], schema=runbooks.SCHEMA))
            if len(step.deleted):
                table.delete(step.deleted.tolist())
            live.take(step)
            table.flush()
            table.commit()
            if at > 6:
                answers = [table.search("embedding", query, k=10, columns=["id"], level="committed") for query in asked]
                found.append(runbooks.recall(live, asked, answers))
    assert min(found) >= runbooks.BAR, found


@pytest.mark.long
def test_every_kind_of_read_runs_beside_lance_and_both_find_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert reads.main(["--smoke", "--rounds", "1", "get", "scan_btree", "range_ordered", "count", "match"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"memwal, flushed is \d+\.\d+ x .* as fast as LsmPointLookupPlanner", said)
    assert re.search(r"memwal, committed is \d+\.\d+ x .* as fast as LanceDataset, the base alone", said)
    assert reads.main(["--smoke", "--rounds", "1", "--processor", "search", "hybrid"]) == 0
    recalls = [float(number) for number in re.findall(r"memwal, .* recall (\d\.\d+)", capsys.readouterr().out)]
    assert len(recalls) == 4
    assert min(recalls) > 0.9
