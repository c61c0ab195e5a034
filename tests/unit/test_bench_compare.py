"""Comparison of two kept results: differences beyond the noise, cases that are not compared, and exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.benchmark import Figure, Side
from bench.compare import Comparison, Pair, compare, kept, summary, table
from bench.result import BenchmarkResult, ContenderResult, Round, RunResult
from tests.messages import raises

PEER = (10.0, 10.0, 10.0, 10.0, 10.0)
STEADY = (5.0, 5.1, 4.9, 5.05, 4.95)


def contender(name: str, side: Side, figures: Sequence[float]) -> ContenderResult:
    """Return a contender whose rounds have these figures, both as milliseconds and as rows per second."""
    rounds = tuple(Round(each, each, each, "digest", {}) for each in figures)
    return ContenderResult(name, side, "same", "", {}, rounds)


def benchmark(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float] | None = PEER,
    *,
    figure: Figure = "p50_ms",
    puts: int = 90,
) -> BenchmarkResult:
    """Return a result with one contender of memwal and, unless `theirs` is None, one of Lance."""
    contenders = [contender("memwal, default", "memwal", ours)]
    if theirs is not None:
        contenders.append(contender("ShardWriter, best", "lance", theirs[: len(ours)]))
    return BenchmarkResult(name, "Made up", figure, {"puts": puts}, tuple(contenders))


def run(*benchmarks: BenchmarkResult) -> RunResult:
    return RunResult("full", 5, 1.0, {"pylance": "14.0.2"}, {"cores": "2", "memory": "24 GiB"}, benchmarks)


def scaled(by: float, figures: Sequence[float] = STEADY) -> list[float]:
    return [by * each for each in figures]


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {each.pair.benchmark: each.verdict for each in comparison.changes}


def last_lines(comparison: Comparison) -> list[str]:
    return list(summary(comparison))[-2:]


def written(path: Path, result: RunResult) -> str:
    result.write(path)
    return str(path)


def test_a_change_beyond_the_noise_is_faster_or_slower_and_slower_comes_first() -> None:
    a = run(*(benchmark(name, STEADY) for name in ("even", "better", "worse", "worst")))
    b = run(
        benchmark("even", scaled(1.01)),
        benchmark("better", scaled(0.5)),
        benchmark("worse", scaled(1.25)),
        benchmark("worst", scaled(2)),
    )
    found = compare(a, b)
    assert list(verdicts(found).items()) == [
        ("worst", "slower"),
        ("worse", "slower"),
        ("better", "faster"),
        ("even", "same"),
    ]
    assert [round(each.percent, 6) for each in found.changes[:3]] == [-50, -20, 100]
    assert last_lines(found)[1] == "1 faster, 2 slower, 1 the same"


@pytest.mark.parametrize(
    ("figure", "a", "b", "verdict", "said"),
    [
        ("rows_per_second", STEADY, scaled(2), "faster", "1 faster"),
        ("rows_per_second", scaled(2), STEADY, "slower", "1 slower"),
        ("rows_per_second", [10.0] * 5, [10.4] * 5, "same", "1 the same"),
        ("rows_per_second", [10.0] * 5, [10.6] * 5, "faster", "1 faster"),
        ("p50_ms", STEADY, [10, 10, 10, 10, 5], "same", "noise: 1 of the same have medians more than 5 % apart"),
        ("p50_ms", STEADY, [50.0] * 4, "unclear", "1 unclear (fewer than 5 rounds)"),
    ],
    ids=["more rows", "fewer rows", "4 percent", "6 percent", "ranges overlap", "few rounds"],
)
def test_verdicts(figure: Figure, a: Sequence[float], b: Sequence[float], verdict: str, said: str) -> None:
    found = compare(run(benchmark("put", a, figure=figure)), run(benchmark("put", b, figure=figure)))
    assert verdicts(found) == {"put": verdict}
    assert any(said in line for line in summary(found))


def test_the_ratio_is_compared_so_a_slow_hour_of_the_host_changes_nothing() -> None:
    hour = (1.0, 3.0, 2.0, 5.0, 4.0)
    slow = benchmark(
        "put",
        [by * each for by, each in zip(hour, STEADY, strict=True)],
        [by * each for by, each in zip(hour, PEER, strict=True)],
    )
    (change,) = compare(run(benchmark("put", STEADY)), run(slow)).changes
    assert change.verdict == "same"
    assert not change.noisy
    assert change.percent == pytest.approx(0)
    assert change.pair == Pair("put", "memwal, default", "ShardWriter, best")


@pytest.mark.parametrize(
    ("figure", "said", "shown"), [("p50_ms", "slower", "5 ms (4.9 – 5.1)"), ("rows_per_second", "faster", "5 rows/s (")]
)
def test_without_a_peer_the_figure_itself_is_compared(figure: Figure, said: str, shown: str) -> None:
    a, b = (run(benchmark("put", figures, None, figure=figure)) for figures in (STEADY, scaled(2)))
    found = compare(a, b)
    (change,) = found.changes
    assert change.verdict == said
    assert change.a.shown.startswith(shown)
    assert last_lines(found)[0] == "no verdicts beside Lance in both"


def test_what_one_run_has_alone_is_named() -> None:
    both = benchmark("both", STEADY)
    more = replace(both, contenders=(*both.contenders, contender("ShardWriter, default", "lance", PEER)))
    found = compare(run(both, benchmark("old", STEADY)), run(more, benchmark("new", STEADY)))
    assert verdicts(found) == {"both": "same"}
    assert found.only_a == ("old",)
    assert found.only_b == ("both (memwal, default beside ShardWriter, default)", "new")
    assert {"only in A: old", f"only in B: {'; '.join(found.only_b)}"} <= set(summary(found))
    assert last_lines(found)[0] == "verdicts beside Lance agree: all 1; 3 more are in one run alone or not compared"


def test_benchmarks_with_other_parameters_are_not_compared() -> None:
    a = run(benchmark("put", STEADY), benchmark("get", STEADY), benchmark("scan", STEADY))
    b = run(benchmark("put", scaled(9), puts=40), benchmark("get", STEADY, figure="rows_per_second"), a.benchmarks[2])
    found = compare(a, b)
    assert verdicts(found) == {"scan": "same"}
    put, get = "put (puts 90 in A, 40 in B)", "get (figure p50_ms in A, rows_per_second in B)"
    assert f"not compared, the parameters differ: {put}; {get}" in summary(found)
    assert last_lines(found)[0] == "verdicts beside Lance agree: all 1; 2 more are in one run alone or not compared"


def test_nothing_in_common_is_told() -> None:
    found = compare(run(benchmark("a", STEADY)), run(benchmark("b", STEADY)))
    assert list(table(found)) == []
    assert last_lines(found)[1] == "nothing to compare"


def test_other_hosts_versions_and_modes_are_told_in_a_line_each() -> None:
    a = run(benchmark("put", STEADY))
    b = replace(a, mode="smoke", host={"cores": "8", "memory": "24 GiB"}, versions={"pylance": "14.0.2", "new": "1"})
    assert compare(a, a).circumstances == ()
    assert compare(a, b).circumstances == (
        "modes differ: mode full in A, smoke in B",
        "hosts differ: cores 2 in A, 8 in B",
        "versions differ: new missing in A, 1 in B",
    )


def test_verdicts_beside_lance_that_changed_are_named() -> None:
    a = run(benchmark("put", STEADY), benchmark("get", scaled(2.2)))
    b = run(benchmark("put", STEADY), benchmark("get", scaled(2)))
    assert last_lines(compare(a, a))[0] == "verdicts beside Lance agree: all 2"
    found = compare(a, b)
    assert last_lines(found)[0] == "verdicts beside Lance do not agree: 1 of 2 differ"
    named = "verdict beside Lance differs: get (memwal, default beside ShardWriter, best): slower in A, even in B"
    assert named in summary(found)


def test_the_table_has_a_row_per_pair() -> None:
    found = compare(run(benchmark("put", [2.0] * 5)), run(benchmark("put", [4.0] * 5)))
    (heading, none), (row, said) = table(found)
    assert heading.split() == ["verdict", "change", "A", "B", "benchmark", "memwal", "Lance"]
    assert none == ""
    assert said == "slower"
    cells = [cell.strip() for cell in re.split(r" {2,}", row)]
    assert cells == ["slower", "-50.0 %", "5 × (5 – 5)", "2.5 × (2.5 – 2.5)", "put", "default", "ShardWriter, best"]
    assert heading.index("benchmark") == row.index("put")


def test_the_command_fails_on_slower_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a.json", run(benchmark("put", STEADY)))
    b = written(tmp_path / "b.json", run(benchmark("put", scaled(1.5))))
    assert main(["compare", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"A: {a}, full, rounds: 5", f"B: {b}, full, rounds: 5"]
    assert lines[-2:] == ["verdicts beside Lance agree: all 1", "0 faster, 1 slower, 0 the same"]
    assert main(["compare", a, b, "--fail-on-slower"]) == 1
    assert main(["compare", b, a, "--fail-on-slower"]) == 0


def whole() -> dict[str, Any]:
    """Return a result of one round in the form of its file."""
    rounds = [{"p50_ms": 1.0, "p99_ms": 1.0, "rows_per_second": 1.0, "digest": "", "measures": {}}]
    ours = {"name": "memwal", "side": "memwal", "question": "", "note": "", "settings": {}, "rounds": rounds}
    put = {"name": "put", "title": "", "figure": "p50_ms", "parameters": {}, "contenders": [ours], "ratios": []}
    return {
        "format": 1, "mode": "full", "rounds": 1, "seconds": 1.0, "versions": {}, "host": {}, "benchmarks": [put]
    }  # fmt: skip


def broken(*where: str | int, value: Any) -> str:
    """Write the file of a result with one replaced value."""
    content: Any = whole()
    inner = content
    for each in where[:-1]:
        inner = inner[each]
    inner[where[-1]] = value
    return json.dumps(content)


CONTENDERS = ("benchmarks", 0, "contenders")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# Benchmarks\n", "not JSON"),
        ("[]", "not a result"),
        ("5", "not a result"),
        ("{}", "not a result of format 1"),
        (broken("format", value=2), "not a result of format 1"),
        ('{"format": 1}', "a field is missing or of another type"),
        (broken("more", value=1), "a field is missing or of another type"),
        (broken(*CONTENDERS, 0, "rounds", 0, "p50_ms", value=None), "a field is missing or of another type"),
        (broken(*CONTENDERS, 0, "rounds", 0, "p50_ms", value=0), "put, memwal has no rounds, or one without a figure"),
        (broken(*CONTENDERS, 0, "rounds", value=[]), "put, memwal has no rounds"),
        (broken(*CONTENDERS, value=[]), "the contenders of put have different numbers of rounds"),
        (broken("benchmarks", 0, "figure", value="p95_ms"), "the unknown figure 'p95_ms'"),
        (broken("benchmarks", 0, "parameters", value=[]), "the parameters of put"),
        (broken("host", value="mine"), "versions or host"),
    ],
)
def test_a_file_that_is_not_a_result_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(whole()), encoding="utf-8")
    bad.write_text(content, encoding="utf-8")
    assert main(["compare", str(good), str(bad)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith(f"bench: {bad}: ")
    assert said in shown.err
    assert "`python -m bench" in shown.err


def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mend = "name a file that `python -m bench --out FILE` wrote"
    assert main(["compare", str(tmp_path / "none.json"), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench: {tmp_path / 'none.json'}: No such file or directory; {mend}\n"
    with raises(ValueError):
        kept(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with raises(ValueError):
        kept(tmp_path / "binary.json")


def test_other_words_stay_names_of_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["put_fats", "compare"]) == 2
    assert "did you mean put_fast?" in capsys.readouterr().err
