"""Compare two stored results: `python -m bench compare A B`.

Milliseconds depend on the host and its load, so the comparison uses ratios to a Lance contender, computed round by
round in each run. A benchmark without a Lance contender is compared by its own figure. In both, more is faster.

B is faster or slower than A if both conditions hold; otherwise they are the same:

1. The ranges of the rounds, lowest to highest, do not overlap.
2. The medians differ by more than NOISE.

Whole ranges are used, not interquartile ranges. For two runs of five rounds with the same speed, chance separates the
whole ranges in 2 of the 252 orders of the ten rounds, and the interquartile ranges in 52. With four rounds it is 2 of
70, and a full result has more than 60 ratios; therefore fewer than FEWEST rounds are unclear.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from bench.benchmark import Figure
from bench.report import EVEN, verdict
from bench.result import BenchmarkResult, ContenderResult, RunResult

FEWEST = 5
"""A comparison with fewer rounds in either run is unclear."""
NOISE = EVEN
"""Medians this near to each other are the same, however little the rounds of each run differ."""

Verdict = Literal["slower", "faster", "unclear", "same"]
_HEADING = ("verdict", "  change", "A", "B", "benchmark", "memwal", "Lance")
_MEND = "name a file that `python -m bench --out FILE` wrote"


@dataclass(frozen=True, slots=True)
class Pair:
    """A setting of memwal and the setting of Lance beside it; `lance` is "" if the benchmark has none."""

    benchmark: str
    memwal: str
    lance: str

    def __str__(self) -> str:
        beside = f" beside {self.lance}" if self.lance else ""
        return f"{self.benchmark} ({self.memwal}{beside})"


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a pair in one run: median, lowest and highest round; more is faster.

    `shown`: the same as text. `beside_lance`: the verdict of the report, "" without a Lance contender.
    """

    median: float
    low: float
    high: float
    rounds: int
    shown: str
    beside_lance: str


@dataclass(frozen=True, slots=True)
class Change:
    """A pair that both runs measured with the same parameters."""

    pair: Pair
    a: Speed
    b: Speed

    @property
    def percent(self) -> float:
        """Return by how many percent B is faster than A; below 0 B is slower."""
        return (self.b.median / self.a.median - 1) * 100

    @property
    def verdict(self) -> Verdict:
        """Return the verdict by the rule in the module's docstring."""
        if min(self.a.rounds, self.b.rounds) < FEWEST:
            return "unclear"
        if not (self._medians_differ and self._ranges_part):
            return "same"
        return "faster" if self.percent > 0 else "slower"

    @property
    def noisy(self) -> bool:
        """Return whether only overlapping ranges make the verdict "same", so that the noise may hide a real change."""
        return self.verdict == "same" and self._medians_differ

    @property
    def _medians_differ(self) -> bool:
        return abs(self.percent) > NOISE * 100

    @property
    def _ranges_part(self) -> bool:
        return self.a.high < self.b.low or self.b.high < self.a.low


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs.

    `changes`: slower first, then faster, unclear and the same, each by descending change. `only_a`, `only_b`:
    benchmarks and pairs of one run only. `circumstances`: one line per difference of mode, host or versions. `unlike`:
    benchmarks with different parameters, which are not compared. `verdicts_left_out`: number of verdicts of the report
    that exist in one run only or belong to `unlike`.
    """

    changes: tuple[Change, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    circumstances: tuple[str, ...]
    unlike: tuple[str, ...]
    verdicts_left_out: int

    def count(self, said: Verdict) -> int:
        """Return the number of changes with this verdict."""
        return sum(each.verdict == said for each in self.changes)

    def beside_lance(self) -> list[Change]:
        """Return the changes with a verdict in the report."""
        return [each for each in self.changes if each.pair.lance]

    def disagreeing(self) -> list[Change]:
        """Return the changes whose verdicts beside Lance differ between the runs."""
        return [each for each in self.beside_lance() if each.a.beside_lance != each.b.beside_lance]


def kept(path: Path) -> RunResult:
    """Read a result file. Raises: ValueError with the problem and the remedy in one line."""
    try:
        result = RunResult.read(path)
        flaw = _flaw(result)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; {_MEND}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error}); {_MEND}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a result, a field is missing or of another type ({error}); {_MEND}") from error
    if flaw:
        raise ValueError(f"{path}: not a whole result, {flaw}; {_MEND}")
    return result


def compare(a: RunResult, b: RunResult) -> Comparison:
    """Return the changes from A to B."""
    in_a, in_b = ({each.name: each for each in run.benchmarks} for run in (a, b))
    unlike = {
        name: told
        for name in in_a.keys() & in_b.keys()
        if (told := _differences(_parameters(in_a[name]), _parameters(in_b[name])))
    }
    speeds_a, speeds_b = _speeds(a), _speeds(b)
    both = [pair for pair in speeds_a if pair in speeds_b and pair.benchmark not in unlike]
    changes = [Change(pair, speeds_a[pair], speeds_b[pair]) for pair in both]
    every = {pair for pair in (*speeds_a, *speeds_b) if pair.lance}
    return Comparison(
        changes=tuple(sorted(changes, key=_place)),
        only_a=tuple(_alone(speeds_a, speeds_b, in_b, unlike)),
        only_b=tuple(_alone(speeds_b, speeds_a, in_a, unlike)),
        circumstances=tuple(_circumstances(a, b)),
        unlike=tuple(f"{name} ({unlike[name]})" for name in in_a if name in unlike),
        verdicts_left_out=len(every - set(both)),
    )


def table(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Return the lines of the table, each with its verdict; the first is the heading, with verdict ""."""
    if not comparison.changes:
        return
    rows = [_HEADING, *map(_cells, comparison.changes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield line.rstrip(), "" if row is _HEADING else row[0]


def summary(comparison: Comparison) -> Iterator[str]:
    """Return the lines below the table.

    The last two state whether the verdicts agree, and the number of changes per verdict.
    """
    yield from comparison.circumstances
    if comparison.unlike:
        yield f"not compared, the parameters differ: {'; '.join(comparison.unlike)}"
    for name, pairs in (("A", comparison.only_a), ("B", comparison.only_b)):
        if pairs:
            yield f"only in {name}: {'; '.join(pairs)}"
    for each in comparison.disagreeing():
        yield f"verdict beside Lance differs: {each.pair}: {each.a.beside_lance} in A, {each.b.beside_lance} in B"
    if noisy := sum(each.noisy for each in comparison.changes):
        yield f"noise: {noisy} of the same have medians more than {NOISE * 100:.0f} % apart, but their ranges overlap"
    yield _agreement(comparison)
    unclear = comparison.count("unclear")
    told = f", {unclear} unclear (fewer than {FEWEST} rounds)" if unclear else ""
    faster, slower, same = (comparison.count(said) for said in ("faster", "slower", "same"))
    yield f"{faster} faster, {slower} slower, {same} the same{told}" if comparison.changes else "nothing to compare"


def _cells(change: Change) -> tuple[str, ...]:
    pair = change.pair
    percent = f"{round(change.percent, 1) + 0.0:+.1f} %"  # + 0.0 turns -0.0 into 0.0
    memwal = pair.memwal.removeprefix("memwal, ")
    return change.verdict, f"{percent:>8}", change.a.shown, change.b.shown, pair.benchmark, memwal, pair.lance or "–"


def _agreement(comparison: Comparison) -> str:
    count, differ = len(comparison.beside_lance()), len(comparison.disagreeing())
    left_out = comparison.verdicts_left_out
    more = f"; {left_out} more are in one run alone or not compared" if left_out else ""
    if differ:
        return f"verdicts beside Lance do not agree: {differ} of {count} differ{more}"
    return f"verdicts beside Lance agree: all {count}{more}" if count else f"no verdicts beside Lance in both{more}"


def _speeds(run: RunResult) -> dict[Pair, Speed]:
    found = {}
    for benchmark in run.benchmarks:
        for ratio in benchmark.ratios():
            shown = f"{_digits(ratio.median)} × ({_digits(ratio.low)} – {_digits(ratio.high)})"
            pair = Pair(benchmark.name, ratio.memwal, ratio.lance)
            found[pair] = Speed(ratio.median, ratio.low, ratio.high, ratio.rounds, shown, verdict(ratio))
        if not benchmark.of("lance"):
            for each in benchmark.of("memwal"):
                found[Pair(benchmark.name, each.name, "")] = _own_speed(benchmark.figure, each)
    return found


def _own_speed(figure: Figure, contender: ContenderResult) -> Speed:
    values = [float(getattr(each, figure)) for each in contender.rounds]
    unit = "ms" if figure == "p50_ms" else "rows/s"
    shown = f"{_digits(median(values))} {unit} ({_digits(min(values))} – {_digits(max(values))})"
    speeds = [1 / each for each in values] if figure == "p50_ms" else values
    return Speed(median(speeds), min(speeds), max(speeds), len(speeds), shown, "")


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _place(change: Change) -> tuple[int, float]:
    return get_args(Verdict).index(change.verdict), -abs(change.percent)


def _alone(
    mine: Mapping[Pair, Speed], others: Mapping[Pair, Speed], benchmarks: Mapping[str, Any], unlike: Mapping[str, str]
) -> list[str]:
    """Return what one run has alone: a whole benchmark by name, or a pair in full if both runs have its benchmark."""
    pairs = [each for each in mine if each not in others and each.benchmark not in unlike]
    return list(dict.fromkeys(str(each) if each.benchmark in benchmarks else each.benchmark for each in pairs))


def _parameters(benchmark: BenchmarkResult) -> dict[str, Any]:
    return {"figure": benchmark.figure, **benchmark.parameters}


def _circumstances(a: RunResult, b: RunResult) -> Iterator[str]:
    differences = {
        "modes": _differences({"mode": a.mode}, {"mode": b.mode}),
        "hosts": _differences(a.host, b.host),
        "versions": _differences(a.versions, b.versions),
    }
    yield from (f"{kind} differ: {told}" for kind, told in differences.items() if told)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return text such as `puts 90 in A, 40 in B`; "" if both are equal."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return ", ".join(f"{name} {a.get(name, 'missing')} in A, {b.get(name, 'missing')} in B" for name in names)


def _flaw(result: RunResult) -> str:
    """Return why a result cannot be compared; "" if it can."""
    if not all(isinstance(each, Mapping) for each in (result.versions, result.host)):
        return "versions or host are not names and values"
    for benchmark in result.benchmarks:
        if not isinstance(benchmark.parameters, Mapping):
            return f"the parameters of {benchmark.name} are not names and values"
        if benchmark.figure not in get_args(Figure):
            return f"{benchmark.name} has the unknown figure {benchmark.figure!r}"
        if len({len(each.rounds) for each in benchmark.contenders}) != 1:
            return f"the contenders of {benchmark.name} have different numbers of rounds"
        for each in benchmark.contenders:
            values = [getattr(one, benchmark.figure) for one in each.rounds]
            if not values or not all(0 < value < math.inf for value in values):
                return f"{benchmark.name}, {each.name} has no rounds, or one without a figure above 0"
    return ""
