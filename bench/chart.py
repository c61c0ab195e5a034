"""Draw the ratios: one bar per ratio on a logarithmic scale, to the right where memwal is faster."""

from __future__ import annotations

from collections.abc import Iterator

from bench import drawing
from bench.drawing import WIDTH, Scale
from bench.report import setting, times, verdict
from bench.result import Ratio, RunResult

LEFT, RIGHT = 390, 160
ROW, GAP, TOP, BOTTOM = 18, 14, 64, 34
COLOURS = {"faster": "faster", "even": "even", "unclear": "even", "slower": "slower"}


def svg(result: RunResult) -> str:
    """Return the chart as an SVG document."""
    ratios = [each for benchmark in result.benchmarks for each in benchmark.ratios()]
    ends = [0.1, 10.0, *(each.low for each in ratios), *(each.high for each in ratios)]
    scale = Scale.over(ends, LEFT, WIDTH - RIGHT)
    height = TOP + len(ratios) * ROW + len(result.benchmarks) * (GAP + ROW) + BOTTOM
    return drawing.document("memwal beside Lance", height, [*_frame(height, scale), *_bars(result, scale)])


def _frame(height: int, scale: Scale) -> Iterator[str]:
    yield from drawing.heading(
        "How many times as fast as Lance is memwal?",
        "Median of the rounds, line from lowest to highest. Green faster, red slower, grey undecided. † see the table",
    )
    for tick in scale.ticks:
        yield drawing.line(scale(tick), TOP, scale(tick), height - BOTTOM, "axis" if tick == 1 else "grid")
        label = f"{tick:,.0f}" if tick >= 1 else f"{tick:g}"
        yield drawing.text(scale(tick), height - 14, f"{label} ×", anchor="middle", colour="soft")


def _bars(result: RunResult, scale: Scale) -> Iterator[str]:
    y = TOP
    for benchmark in result.benchmarks:
        y += GAP
        yield drawing.text(16, y + 13, benchmark.title, weight=600)
        y += ROW
        noted = {each.name for each in benchmark.contenders if each.note}
        for ratio in benchmark.ratios():
            name = f"{ratio.lance} †" if ratio.lance in noted else ratio.lance
            yield from _bar(ratio, f"as {name}{setting(benchmark, ratio.memwal)}", y, scale)
            y += ROW


def _bar(ratio: Ratio, name: str, y: int, scale: Scale) -> Iterator[str]:
    colour, middle = COLOURS[verdict(ratio)], y + ROW / 2
    one, end = scale(1), scale(ratio.median)
    yield drawing.text(LEFT - 10, y + 13, name, anchor="end")
    yield drawing.rectangle(min(one, end), y + 3, abs(end - one), ROW - 6, colour)
    yield drawing.line(scale(ratio.low), middle, scale(ratio.high), middle, "axis")
    yield drawing.text(WIDTH - RIGHT + 16, y + 13, times(ratio), colour=colour)
