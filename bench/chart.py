"""The picture of a result: one bar per ratio on a logarithmic scale, to the right where memwal is faster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from bench.report import setting, times, verdict
from bench.result import Ratio, RunResult

WIDTH, LEFT, RIGHT = 1000, 390, 160
ROW, GAP, TOP, BOTTOM = 18, 14, 64, 34
COLOURS = {"faster": "#2f855a", "even": "#8a8f98", "unclear": "#8a8f98", "slower": "#c2410c"}


def svg(result: RunResult) -> str:
    """The chart as an SVG document."""
    ratios = [each for benchmark in result.benchmarks for each in benchmark.ratios()]
    least = math.floor(min([-1.0, *(math.log10(each.low) for each in ratios)]))
    most = math.ceil(max([1.0, *(math.log10(each.high) for each in ratios)]))
    height = TOP + len(ratios) * ROW + len(result.benchmarks) * (GAP + ROW) + BOTTOM
    body = [*_frame(height, least, most), *_bars(result, least, most)]
    return "\n".join([_open(height), *body, "</svg>"]) + "\n"


def _open(height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">\n'
        "<title>memwal beside Lance</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )


def _frame(height: int, least: int, most: int) -> Iterator[str]:
    yield _text(16, 24, "How many times as fast as Lance is memwal?", size=16, weight="600")
    yield _text(
        16,
        44,
        "Median of the rounds, line from lowest to highest. Green faster, red slower, grey undecided. † see the table",
        fill="#555b65",
    )
    for power in range(least, most + 1):
        x = _x(power, least, most)
        strong = "#30343b" if power == 0 else "#e2e5ea"
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - BOTTOM}" stroke="{strong}"/>'
        label = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        yield _text(x, height - 14, f"{label} ×", anchor="middle", fill="#555b65")


def _bars(result: RunResult, least: int, most: int) -> Iterator[str]:
    y = TOP
    for benchmark in result.benchmarks:
        y += GAP
        yield _text(16, y + 13, benchmark.title, weight="600")
        y += ROW
        noted = {each.name for each in benchmark.contenders if each.note}
        for ratio in benchmark.ratios():
            name = f"{ratio.lance} †" if ratio.lance in noted else ratio.lance
            yield from _bar(ratio, f"as {name}{setting(benchmark, ratio.memwal)}", y, least, most)
            y += ROW


def _bar(ratio: Ratio, name: str, y: int, least: int, most: int) -> Iterator[str]:
    colour = COLOURS[verdict(ratio)]
    one, end = _x(0, least, most), _x(math.log10(ratio.median), least, most)
    low, high = (_x(math.log10(each), least, most) for each in (ratio.low, ratio.high))
    middle = y + ROW / 2
    yield _text(LEFT - 10, y + 13, name, anchor="end", fill="#30343b")
    yield f'<rect x="{min(one, end):.1f}" y="{y + 3}" width="{abs(end - one):.1f}" height="{ROW - 6}" fill="{colour}"/>'
    yield f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="#30343b"/>'
    yield _text(WIDTH - RIGHT + 16, y + 13, times(ratio), fill=colour)


def _x(power: float, least: int, most: int) -> float:
    return LEFT + (power - least) / (most - least) * (WIDTH - LEFT - RIGHT)


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", weight: str = "400", fill: str = "#17191c"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}">{escape(text)}</text>'
    )
