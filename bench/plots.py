"""Draw the pictures of a result, except the ratios (`chart`): throughput, latency, and one for each measured part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench import drawing
from bench.benchmark import Figure
from bench.drawing import WIDTH, Drawn, Scale
from bench.part_report import three
from bench.parts import Curve, PartResult
from bench.result import BenchmarkResult, ContenderResult, RunResult

LEFT, RIGHT, ROW, GAP, TOP, BOTTOM = 390, 170, 18, 14, 64, 36
_COLUMNS, _MARGIN, _BETWEEN = 2, 16, 48
_SIDES = {"memwal": "ours", "lance": "theirs", "floor": "grid"}


def pictures(result: RunResult) -> dict[str, str]:
    """Return the pictures by file name, as far as the result has figures for them."""
    drawn = {}
    for name, figure, title in (
        ("throughput", "rows_per_second", "Throughput, rows a second"),
        ("latency", "p50_ms", "Latency, milliseconds"),
    ):
        benchmarks = [each for each in result.benchmarks if each.figure == figure]
        if benchmarks:
            drawn[f"{name}.svg"] = _bars(title, benchmarks, figure)  # type: ignore[arg-type] # of two literals
    for part in result.parts:
        if not part.missing and part.name in _OF_PARTS:
            drawn[f"{part.name}.svg"] = _OF_PARTS[part.name](part)
    return drawn


# ---- bars of benchmarks --------------------------------------------------------------------------------------------


def _bars(title: str, benchmarks: Sequence[BenchmarkResult], figure: Figure) -> str:
    contenders = [(each, one) for each in benchmarks for one in each.contenders]
    low, high = ("p50_ms", "p99_ms") if figure == "p50_ms" else (figure, figure)
    values = [one.median(name) for _, one in contenders for name in (low, high)]
    scale = Scale.over(values, LEFT, WIDTH - RIGHT)
    height = TOP + len(contenders) * ROW + len(benchmarks) * (GAP + ROW) + BOTTOM
    more = "to p50, line to p99; shorter is faster" if figure == "p50_ms" else "longer is faster"
    subtitle = f"Median of the rounds, {more}. Blue memwal, grey Lance, pale storage alone. The axis is logarithmic"
    return drawing.document(title, height, _bar_lines(title, subtitle, benchmarks, scale, height))


def _bar_lines(
    title: str, subtitle: str, benchmarks: Sequence[BenchmarkResult], scale: Scale, height: float
) -> Iterator[str]:
    yield from drawing.heading(title, subtitle)
    for tick in scale.ticks:
        yield drawing.line(scale(tick), TOP, scale(tick), height - BOTTOM, "grid")
        yield drawing.text(scale(tick), height - 14, drawing.short(tick), anchor="middle", colour="soft")
    y: float = TOP
    for benchmark in benchmarks:
        y += GAP
        yield drawing.text(16, y + 13, benchmark.title, weight=600)
        y += ROW
        for contender in benchmark.contenders:
            yield from _bar(benchmark.figure, contender, y, scale)
            y += ROW


def _bar(figure: Figure, contender: ContenderResult, y: float, scale: Scale) -> Iterator[str]:
    value = contender.median(figure)
    end, colour = scale(value), _SIDES[contender.side]
    yield drawing.text(LEFT - 10, y + 13, contender.name, anchor="end")
    yield drawing.rectangle(LEFT, y + 3, end - LEFT, ROW - 6, colour)
    if figure == "p50_ms":
        yield drawing.line(end, y + ROW / 2, scale(contender.median("p99_ms")), y + ROW / 2, "axis")
    shown = f"{three(value)} ms" if figure == "p50_ms" else f"{value:,.0f} rows/s"
    strong = "ours" if contender.side == "memwal" else "soft"
    yield drawing.text(WIDTH - RIGHT + 16, y + 13, shown, colour=strong)


# ---- panels of curves ----------------------------------------------------------------------------------------------


def _growth(part: PartResult) -> str:
    title = "Growth: medians over the size, both axes logarithmic"
    subtitle = "In brackets the exponent of the fitted line: 0 does not grow, 1 grows with the size"
    return _panels(title, subtitle, part, lambda curve: f"{curve.name} ({curve.exponent:.2f})")


def _crossover(part: PartResult) -> str:
    title = f"Direct merge_insert beside memwal, into {part.parameters['base']:,} rows"
    subtitle = "Milliseconds for each batch, by its rows; all work: until its rows are in the base table"
    return _panels(title, subtitle, part, lambda curve: curve.name)


def _panels(title: str, subtitle: str, part: PartResult, label: Callable[[Curve], str]) -> str:
    panels = [
        (name, unit, [curve for curve in curves if curve.unit == unit])
        for name, curves in part.panels().items()
        for unit in dict.fromkeys(curve.unit for curve in curves)
    ]
    width = (WIDTH - 2 * _MARGIN - (_COLUMNS - 1) * _BETWEEN) / _COLUMNS
    y, body = float(TOP), list(drawing.heading(title, subtitle))
    for first in range(0, len(panels), _COLUMNS):
        row = panels[first : first + _COLUMNS]
        height = drawing.panel_height(max(len(curves) for _, _, curves in row))
        for number, (name, unit, curves) in enumerate(row):
            drawn = [Drawn(label(curve), curve.points, f"c{n % drawing.CURVES}") for n, curve in enumerate(curves)]
            left = _MARGIN + number * (width + _BETWEEN)
            body += drawing.panel(name, curves[0].over, unit, drawn, (left, y, width, y + height))
        y += height + GAP
    return drawing.document(title, y, body)


# ---- freshness and take-over ---------------------------------------------------------------------------------------


def _freshness(part: PartResult) -> str:
    (curve,) = part.curves
    height, bottom = 400.0, 340.0
    most = max(*(size for size, _ in curve.points), *(each.bar or 0.0 for each in part.figures))
    across, up = Scale(0, most * 1.05, 60, WIDTH - 24, log=False), Scale(0, 100, bottom, TOP + 12, log=False)
    body = list(drawing.heading(part.title, "Share of events that a read has found, by milliseconds; dashed: the bars"))
    for tick in up.ticks:
        body.append(drawing.line(across.start, up(tick), across.end, up(tick), "grid"))
        body.append(drawing.text(across.start - 8, up(tick) + 4, f"{tick:g} %", anchor="end", colour="soft"))
    for tick in across.ticks:
        body.append(drawing.line(across(tick), up.start, across(tick), up.end, "grid"))
        body.append(drawing.text(across(tick), bottom + 18, f"{tick:,.0f}", anchor="middle", colour="soft"))
    for figure, words_at in zip((each for each in part.figures if each.bar), (92, 70), strict=False):
        colour = {"held": "faster", "missed": "slower"}[figure.verdict]
        body.append(
            drawing.line(across(figure.bar or 0), up.start, across(figure.bar or 0), up.end, colour, dashed=True)
        )
        shown = f"{figure.name}: {three(figure.value)} ms, bar {three(figure.bar or 0)} ms, {figure.verdict}"
        body.append(drawing.text(across.end - 8, bottom - words_at, shown, anchor="end", colour=colour))
    body.append(drawing.path([(across(x), up(share)) for x, share in curve.points], "c0"))
    body.append(drawing.line(across.start, up.start, across.end, up.start, "axis"))
    body.append(
        drawing.text((across.start + across.end) / 2, bottom + 40, "milliseconds", anchor="middle", colour="soft")
    )
    return drawing.document(part.title, height, body)


def _take_over(part: PartResult) -> str:
    row, bars = 54, {each.name.partition(",")[0]: each for each in part.figures if each.bar is not None}
    height = TOP + row * len(part.curves) + BOTTOM + 14
    values = [value for curve in part.curves for _, value in curve.points]
    most = max(*values, *(each.bar or 0.0 for each in bars.values()))
    scale = Scale(0, most * 1.05, 230, WIDTH - 24, log=False)
    body = list(drawing.heading(part.title, "Milliseconds; a dot for each trial; dashed: the bar, and what it is for"))
    for tick in scale.ticks:
        body.append(drawing.line(scale(tick), TOP, scale(tick), height - BOTTOM - 8, "grid"))
        body.append(drawing.text(scale(tick), height - BOTTOM + 12, f"{tick:,.0f}", anchor="middle", colour="soft"))
    for number, curve in enumerate(part.curves):
        middle = TOP + row * number + row / 2
        body.append(drawing.text(16, middle - 3, curve.name, weight=600))
        figure = bars.get(curve.name)
        if figure is not None and figure.bar is not None:
            colour = "faster" if figure.verdict == "held" else "slower"
            shown = f"{figure.name.partition(', ')[2]} {three(figure.value)} ms: {figure.verdict}"
            body.append(drawing.text(16, middle + 14, shown, colour=colour))
            body.append(
                drawing.line(scale(figure.bar), middle - 20, scale(figure.bar), middle + 20, colour, dashed=True)
            )
        body += [drawing.dot(scale(value), middle, "c0", 5) for _, value in curve.points]
    return drawing.document(part.title, height, body)


_OF_PARTS: dict[str, Callable[[PartResult], str]] = {
    "freshness": _freshness,
    "take_over": _take_over,
    "growth": _growth,
    "crossover": _crossover,
}
