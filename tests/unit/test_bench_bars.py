"""Bars of benchmarks: each names existing settings, and reports by the median whether it is held or missed."""

from __future__ import annotations

import pytest

from bench import bars, registry, report
from bench.benchmark import Figure
from bench.result import BenchmarkResult, ContenderResult, Ratio, Round


def ratio(median: float, memwal: str = "memwal, default", peer: str = "ShardWriter, best") -> Ratio:
    return Ratio(memwal, peer, median, median, median, 1, 1)


@pytest.mark.parametrize(("name", "memwal", "peer"), bars.BARS)
def test_a_bar_names_settings_that_there_are(name: str, memwal: str, peer: str) -> None:
    (benchmark,) = [each for each in registry.ALL if each.name == name]
    contenders = benchmark.contenders(benchmark.values(smoke=True))
    sides = {each.name: each.side for each in contenders}
    assert (sides[memwal], sides[peer]) == ("memwal", "lance")


@pytest.mark.parametrize(
    ("name", "median", "held"),
    [("put_durable", 0.79, False), ("put_durable", 0.8, True), ("put_sustained", 2.9, False), ("commit", 1.0, True)],
)
def test_a_bar_is_held_by_the_median(name: str, median: float, held: bool) -> None:
    assert bars.held(name, ratio(median)) is held


@pytest.mark.parametrize(("figure", "said"), [("p50_ms", "0.8 ×, missed"), ("rows_per_second", "0.8 ×, held")])
def test_a_row_of_a_result_tells_its_bar(figure: Figure, said: str) -> None:
    rounds = {"memwal, default": Round(2.0, 2.0, 2000.0, "", {}), "ShardWriter, best": Round(1.0, 1.0, 1000.0, "", {})}
    contenders = tuple(
        ContenderResult(name, "memwal" if name.startswith("memwal") else "lance", "same", "", {}, (each,))
        for name, each in rounds.items()
    )
    result = BenchmarkResult("put_durable", "Durable put", figure, {}, contenders)
    assert [row[-1] for row in report.rows(result)] == [said]
