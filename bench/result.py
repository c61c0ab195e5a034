"""The result of a run: medians over rounds, ratios of rounds that ran side by side, and the JSON file that stores them.

{"format": 1, "mode": "full" | "smoke", "rounds": n, "seconds": s, "versions": {…}, "host": {…},
 "benchmarks": [{"name", "title", "figure": "p50_ms" | "rows_per_second", "parameters": {…},
                 "contenders": [{"name", "side", "question", "note", "settings": {…},
                                 "rounds": [{"p50_ms", "p99_ms", "rows_per_second", "digest", "measures"}]}],
                 "ratios": [{"memwal", "lance", "median", "low", "high", "won", "rounds"}]}],
 "parts": [see bench.parts; optional]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.benchmark import Contender, Figure, Side
from bench.parts import PartResult

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one contender: milliseconds per operation, rows per second of wall time."""

    p50_ms: float
    p99_ms: float
    rows_per_second: float
    digest: str
    measures: dict[str, float]


@dataclass(frozen=True, slots=True)
class ContenderResult:
    """The rounds of one contender."""

    name: str
    side: Side
    question: str
    note: str
    settings: dict[str, Any]
    rounds: tuple[Round, ...]

    @staticmethod
    def of(contender: Contender, rounds: list[Round]) -> ContenderResult:
        """Return the result of `contender`."""
        return ContenderResult(
            contender.name, contender.side, contender.question, contender.note, contender.settings, tuple(rounds)
        )

    def median(self, figure: str) -> float:
        """Return the median over the rounds of a field of Round."""
        return float(median(getattr(each, figure) for each in self.rounds))

    def measures(self) -> dict[str, float]:
        """Return the medians of the further figures."""
        names = self.rounds[0].measures if self.rounds else {}
        return {name: float(median(each.measures[name] for each in self.rounds)) for name in names}


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast `memwal` was as `lance`: median, lowest and highest round; below 1 memwal is slower.

    `won`: the number of rounds that memwal won, out of `rounds`.
    """

    memwal: str
    lance: str
    median: float
    low: float
    high: float
    won: int
    rounds: int


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """The result of one benchmark; the first contender is memwal."""

    name: str
    title: str
    figure: Figure
    parameters: dict[str, int]
    contenders: tuple[ContenderResult, ...]

    def ratios(self) -> list[Ratio]:
        """Return the ratio of each setting of memwal to each setting of Lance and other peers, round by round."""
        peers = self.of("lance") + self.of("peer")
        return [_ratio(self.figure, ours, theirs) for ours in self.of("memwal") for theirs in peers]

    def of(self, side: Side) -> list[ContenderResult]:
        """Return the contenders of one side."""
        return [each for each in self.contenders if each.side == side]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a whole run."""

    mode: str
    rounds: int
    seconds: float
    versions: dict[str, str]
    host: dict[str, str]
    benchmarks: tuple[BenchmarkResult, ...]
    parts: tuple[PartResult, ...] = ()

    def write(self, path: Path) -> None:
        """Write the result as JSON, with floats of five digits; further digits are noise."""
        benchmarks = [
            {**asdict(each), "ratios": [asdict(ratio) for ratio in each.ratios()]} for each in self.benchmarks
        ]
        content = {"format": FORMAT, **asdict(self), "benchmarks": benchmarks}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> RunResult:
        """Read a result. Raises: ValueError for a file of another format."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: not a result of format {FORMAT}; run `python -m bench` to make one")
        benchmarks = tuple(_benchmark(each) for each in content.pop("benchmarks"))
        parts = tuple(PartResult.of(each) for each in content.pop("parts", ()))
        return RunResult(**content, benchmarks=benchmarks, parts=parts)


def _ratio(figure: Figure, memwal: ContenderResult, lance: ContenderResult) -> Ratio:
    pairs = [(getattr(a, figure), getattr(b, figure)) for a, b in zip(memwal.rounds, lance.rounds, strict=True)]
    lower_is_better = figure == "p50_ms"
    found = [b / a if lower_is_better else a / b for a, b in pairs]
    won = sum(each > 1 for each in found)
    return Ratio(memwal.name, lance.name, float(median(found)), min(found), max(found), won, len(found))


def _benchmark(content: Mapping[str, Any]) -> BenchmarkResult:
    contenders = tuple(
        ContenderResult(**{**each, "rounds": tuple(Round(**one) for one in each["rounds"])})
        for each in content["contenders"]
    )
    kept = {name: value for name, value in content.items() if name not in ("contenders", "ratios")}
    return BenchmarkResult(**kept, contenders=contenders)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
