"""Every benchmark runs at its smoke values and finds the same rows on both sides. The kept result is the shown one."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bench.__main__ import HERE, KEPT, main
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Values, Watch
from bench.chart import svg
from bench.digest import rows_digest
from bench.plots import pictures
from bench.registry import ALL
from bench.report import BEGIN, END, markdown
from bench.result import RunResult
from bench.rounds import ResultsDiffer, run
from bench.slopes import SLOPES, Crossover, Growth, Slope
from bench.source_data import narrow_batches

FIELDS = {"machine", "cores", "memory", "system"}


@pytest.fixture(autouse=True)
def no_disk_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not write out the machine's disks before each round, which takes a second: no test compares times."""
    monkeypatch.setattr(os, "sync", lambda: None)


class Fixed(Contender):
    """A contender whose rounds report the given seconds and digest. Each round appends the name to `turns`."""

    def __init__(self, name: str, seconds: Sequence[float], digest: str, turns: list[str], side: str = "lance") -> None:
        super().__init__(name, "memwal" if side == "memwal" else "lance", {"seconds": list(seconds)})
        self._seconds: Iterator[float] = iter(seconds)
        self._digest, self._turns = digest, turns

    def round(self, at: Path, watch: Watch) -> Sample:
        self._turns.append(self.name)
        seconds = next(self._seconds)
        return Sample(np.asarray([seconds]), seconds, 10, self._digest)


def made_of(*contenders: Contender) -> Benchmark:
    def all_of_them(values: Values) -> Sequence[Contender]:
        return contenders

    return Benchmark("fixed", "Told beforehand", "p50_ms", {"n": Parameter(1, 2, "")}, all_of_them)


SHORT = "put_durable", "memtable_put_packages", "flush_vectors", "get_many", "search_latest", "commit_4"
"""One of each path; the others run with `--long`."""


@pytest.mark.parametrize(
    "benchmark", [pytest.param(each, id=each.name, marks=[pytest.mark.long] * (each.name not in SHORT)) for each in ALL]
)
def test_runs_and_both_sides_find_the_same_rows(benchmark: Benchmark, tmp_path: Path) -> None:
    result = run(benchmark, tmp_path / "tables", smoke=True, rounds=1)
    sides = [each.side for each in result.contenders]
    assert sides[0] == "memwal"
    assert "lance" in sides
    assert all(each.median("p50_ms") > 0 and each.median("rows_per_second") > 0 for each in result.contenders)
    assert len(result.ratios()) == sides.count("memwal") * sides.count("lance")
    digests = {each.rounds[0].digest for each in result.contenders if each.question == "same"}
    assert len(digests) == 1
    if digests == {""}:
        assert all(each.measures()["recall"] >= 0.5 for each in result.contenders)
        assert result.contenders[0].measures()["recall"] >= 0.95
    assert not (tmp_path / "tables").exists()


@pytest.mark.long
@pytest.mark.parametrize("slope", SLOPES, ids=lambda each: each.name)
def test_a_slope_has_a_value_for_each_of_its_sizes(slope: Slope, tmp_path: Path) -> None:
    curves = Growth([slope.name]).measure(tmp_path, smoke=True).curves
    assert {curve.over for curve in curves} == {slope.over}
    searched = [curve for curve in curves if curve.name.startswith("search")]
    assert {tuple(size for size, _ in curve.points) for curve in curves if curve not in searched} == {slope.smoke}
    assert all(value > 0 for curve in curves for _, value in curve.points)


@pytest.mark.long
def test_the_crossover_merges_the_same_rows_in_each_way(tmp_path: Path) -> None:
    part = Crossover().measure(tmp_path, smoke=True)
    assert {curve.name for curve in part.curves} == {"memwal", "merge_insert", "merge_insert, B-tree"}
    assert len(part.panels()) == 5
    assert [figure.name.partition(":")[0] for figure in part.figures][:2] == ["20 rows", "200 rows"]
    assert all(figure.value > 0 for figure in part.figures)


def test_contenders_take_turns_and_the_ratio_is_of_rounds_side_by_side(tmp_path: Path) -> None:
    turns: list[str] = []
    slowing = made_of(Fixed("ours", [1, 2, 3], "a", turns, "memwal"), Fixed("theirs", [2, 4, 6], "a", turns))
    result = run(slowing, tmp_path / "tables", smoke=True, rounds=3)
    assert turns == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    (ratio,) = result.ratios()
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)


def test_different_rows_fail_the_run(tmp_path: Path) -> None:
    wrong = made_of(Fixed("ours", [1], "a", [], "memwal"), Fixed("theirs", [1], "b", []))
    with pytest.raises(ResultsDiffer, match="ours: a, theirs: b"):
        run(wrong, tmp_path / "tables", smoke=True, rounds=1)


def test_the_digest_is_of_the_rows_and_of_nothing_else() -> None:
    (rows,) = narrow_batches(1, 50)
    again = pa.concat_tables([rows.slice(30), rows.slice(0, 30)]).select(["label", "id", "value"])
    assert rows_digest(again, ["id"]) == rows_digest(rows, ["id"])
    assert rows_digest(rows.slice(1), ["id"]) != rows_digest(rows, ["id"])
    two = pa.table({"id": [1, 2], "text": ["ab", "c"]})
    assert rows_digest(pa.table({"id": [1, 2], "text": ["a", "bc"]}), ["id"]) != rows_digest(two, ["id"])
    assert rows_digest(pa.table({"id": [1, 2], "text": ["ab", None]}), ["id"]) != rows_digest(
        pa.table({"id": [1, 2], "text": ["ab", ""]}), ["id"]
    )


def test_seeds_are_fixed_and_later_batches_put_known_keys_again() -> None:
    first, second = narrow_batches(3, 100), narrow_batches(3, 100)
    assert all(a.equals(b) for a, b in zip(first, second, strict=True))
    keys = [set(batch.column("id").to_pylist()) for batch in first]
    assert [len(each) for each in keys] == [100, 100, 100]
    assert len(keys[0] & keys[1]) == 10


def test_the_command_keeps_a_result_and_refuses_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "result.json"
    arguments = ["put_fast", "--smoke", "--rounds", "1", "--workdir", str(tmp_path / "work"), "--out", str(kept)]
    assert main(arguments) == 0
    result = RunResult.read(kept)
    assert [each.name for each in result.benchmarks] == ["put_fast"]
    assert set(result.host) == FIELDS
    assert result.versions["pylance"]
    assert result.benchmarks[0].contenders[0].settings["wal"]["format"] == "lance"
    assert "put_fast" in capsys.readouterr().out
    assert list((tmp_path / "work").iterdir()) == []
    assert main(["put_fats"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--profile", "put_fats"]) == 2
    assert "did you mean put_fast?" in capsys.readouterr().err


def test_the_profile_names_our_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--profile", "put_fast", "--smoke", "--workdir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "put_fast" in shown
    assert re.search(r"\d %  (region|caller) +(ingest|memtable)/\w+\.py \w", shown)


def test_readme_and_chart_show_the_kept_result() -> None:
    result = RunResult.read(KEPT)
    assert result.mode == "full"
    assert result.rounds >= 3
    assert [each.name for each in result.benchmarks] == [each.name for each in ALL]
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert readme.partition(BEGIN)[2].partition(END)[0].strip() == markdown(result)
    drawn = {"ratios.svg": svg(result), **pictures(result)}
    assert {"ratios.svg", "throughput.svg", "latency.svg"} <= drawn.keys()
    for name, picture in drawn.items():
        assert (HERE / name).read_text(encoding="utf-8") == picture
        assert ET.fromstring(picture).tag.endswith("svg")
