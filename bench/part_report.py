"""Render the parts of a result: tables for README.md, lines for the terminal, and a comparison of two results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.parts import Curve, Measured, PartResult
from bench.result import RunResult


def three(value: float) -> str:
    """Format a number with three digits and without an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def lines(part: PartResult) -> Iterator[str]:
    """Return the lines of a part for the terminal."""
    if part.missing:
        yield f"  not measured: {part.missing}"
    for figure in part.figures:
        yield f"  {_shown(figure):<28}{figure.verdict:<8}{figure.name}"
    if part.name in _WITH_EXPONENT | _WITH_VALUES:
        for panel, curves in part.panels().items():
            yield f"  {panel}, by {curves[0].over}"
            for curve in curves:
                slope = (
                    f"{curve.exponent:5.2f}, last step {curve.last_step:5.2f}  " if part.name in _WITH_EXPONENT else ""
                )
                yield f"    {slope}{curve.name}, {curve.unit}: {_points(curve)}"


def markdown(parts: Sequence[PartResult]) -> Iterator[str]:
    """Return the sections for the generated text of README.md: figures, and curves as a picture."""
    for part in parts:
        yield f"### {part.title}"
        if part.missing:
            yield f"Not measured: {part.missing}."
            continue
        told = ", ".join(f"{name} {value}" for name, value in part.parameters.items())
        yield f"![{part.title}]({part.name}.svg)"
        yield f"`{part.name}`, {part.seconds:.0f} s; {told}."
        if part.figures:
            yield "\n".join(_figure_table(part.figures))


def changes(a: RunResult, b: RunResult) -> Iterator[str]:
    """Compare parts that both results measured with the same parameters, and the verdicts on their bars.

    A part has one value per run and no rounds, so no change is called faster or slower.
    """
    differing = bars = 0
    for ours, theirs in _pairs(a.parts, b.parts):
        if ours.parameters != theirs.parameters:
            yield f"{ours.name}: not compared, the parameters differ"
            continue
        in_b = {name: (value, said) for name, value, said in _values(theirs)}
        for name, value, said in _values(ours):
            if name in in_b:
                other, other_said = in_b[name]
                bars, differing = bars + bool(said), differing + (said != other_said)
                told = f"  {said} in A, {other_said} in B" if said else ""
                yield f"{ours.name}: {name}: {three(value)} in A, {three(other)} in B{told}"
    if bars:
        yield f"verdicts on bars {'do not agree' if differing else 'agree'}: {differing} of {bars} differ"


_WITH_EXPONENT, _WITH_VALUES = frozenset({"growth"}), frozenset({"crossover"})


def _pairs(a: Sequence[PartResult], b: Sequence[PartResult]) -> Iterator[tuple[PartResult, PartResult]]:
    in_b = {part.name: part for part in b}
    for part in a:
        other = in_b.get(part.name)
        if other is not None and not part.missing and not other.missing:
            yield part, other


def _values(part: PartResult) -> Iterator[tuple[str, float, str]]:
    """Return the compared values: figures with their verdicts, and exponents of curves."""
    for figure in part.figures:
        yield f"{figure.name} ({figure.unit})", figure.value, figure.verdict
    if part.name in _WITH_EXPONENT:
        for curve in part.curves:
            yield f"{curve.panel}, {curve.name}, exponent", curve.exponent, ""


def _shown(figure: Measured) -> str:
    bar = f" (bar {three(figure.bar)})" if figure.bar is not None else ""
    return f"{three(figure.value)} {figure.unit}{bar}"


def _figure_table(figures: Sequence[Measured]) -> Iterator[str]:
    if all(figure.bar is None for figure in figures):
        yield "| what | measured |"
        yield "|---|---|"
        for figure in figures:
            yield f"| {figure.name} | {three(figure.value)} {figure.unit} |"
        return
    yield "| what | measured | bar: at most | |"
    yield "|---|---|---|---|"
    for figure in figures:
        bar = f"{three(figure.bar)} {figure.unit}" if figure.bar is not None else ""
        said = f"**{figure.verdict}**" if figure.verdict == "missed" else figure.verdict
        yield f"| {figure.name} | {three(figure.value)} {figure.unit} | {bar} | {said} |"


def _points(curve: Curve) -> str:
    return ", ".join(f"{size:,.0f}: {three(value)}" for size, value in curve.points)
