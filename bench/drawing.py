"""Write SVG: text, lines, bars, and panels with axes. Colours follow the reader's light or dark theme.

A plotting library would add nine packages to the lock file, and its output changes with its version, while a test
compares each picture with the one that the stored result gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1000
CURVES = 6
"""Number of curve colours: classes c0, c1 and so on."""
_LIGHT = {
    "paper": "#ffffff",
    "ink": "#17191c",
    "soft": "#555b65",
    "grid": "#e2e5ea",
    "axis": "#30343b",
    "faster": "#2f855a",
    "slower": "#c2410c",
    "even": "#6b7280",
    "ours": "#1d6fb8",
    "theirs": "#9aa1ac",
    "c0": "#1d6fb8",
    "c1": "#c2410c",
    "c2": "#2f855a",
    "c3": "#8b5cf6",
    "c4": "#a16207",
    "c5": "#be185d",
}
_DARK = {
    "paper": "#0d1117",
    "ink": "#e6e8eb",
    "soft": "#a3abb8",
    "grid": "#2a313c",
    "axis": "#9aa4b2",
    "faster": "#4cc38a",
    "slower": "#f4845f",
    "even": "#9aa4b2",
    "ours": "#58a6ff",
    "theirs": "#6b7480",
    "c0": "#58a6ff",
    "c1": "#f4845f",
    "c2": "#4cc38a",
    "c3": "#b79cff",
    "c4": "#e0b23f",
    "c5": "#f178b6",
}


def document(title: str, height: float, body: Iterable[str]) -> str:
    """Return a picture of width WIDTH.

    The background is painted, so that a viewer without themes shows the light theme.
    """
    dark = "".join(f".{name}{{color:{colour}}}" for name, colour in _DARK.items())
    style = "".join(f".{name}{{color:{colour}}}" for name, colour in _LIGHT.items())
    size, font = f'viewBox="0 0 {WIDTH} {height:.0f}"', 'font-family="system-ui, sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
        f"<title>{escape(title)}</title>",
        f"<style>{style}@media(prefers-color-scheme:dark){{{dark}}}</style>",
        rectangle(0, 0, WIDTH, height, "paper"),
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def heading(title: str, subtitle: str) -> Iterator[str]:
    """Yield the picture's title and the explanation of its marks."""
    yield text(16, 24, title, size=16, weight=600)
    yield text(16, 44, subtitle, colour="soft")


def text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", weight: int = 400, colour: str = "ink"
) -> str:
    """Return text with its baseline at `y`."""
    strong = f' font-weight="{weight}"' if weight != 400 else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    sized = f' font-size="{size}"' if size != 12 else ""
    marks = f'class="{colour}" fill="currentColor"{sized}{placed}{strong}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {marks}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    """Return a straight line."""
    more = ' stroke-dasharray="5 4"' if dashed else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="{colour}" stroke="currentColor"{more}/>'


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a filled rectangle."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{colour}" fill="currentColor"/>'


def dot(x: float, y: float, colour: str, radius: float = 3.5) -> str:
    """Return a filled circle."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{colour}" fill="currentColor"/>'


def path(points: Iterable[tuple[float, float]], colour: str) -> str:
    """Return points joined by lines."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" class="{colour}" fill="none" stroke="currentColor" stroke-width="2"/>'


@dataclass(frozen=True, slots=True)
class Scale:
    """Map values to pixels between `start` and `end`. `log`: logarithmic, with powers of ten at both ends."""

    least: float
    most: float
    start: float
    end: float
    log: bool

    @staticmethod
    def over(values: Iterable[float], start: float, end: float) -> Scale:
        """Return a logarithmic scale of whole decades, at least one, that contains `values`, which must be above 0."""
        logs = [math.log10(value) for value in values]
        least, most = math.floor(min(logs) + 1e-9), math.ceil(max(logs) - 1e-9)
        return Scale(least, max(most, least + 1), start, end, log=True)

    def __call__(self, value: float) -> float:
        placed = math.log10(value) if self.log else value
        return self.start + (placed - self.least) / (self.most - self.least) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Return powers of ten, or about six round values from 0."""
        if self.log:
            return [10.0**power for power in range(int(self.least), int(self.most) + 1)]
        rough = (self.most - self.least) / 6
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * by for by in (1, 2, 5, 10) if unit * by >= rough)
        return [step * n for n in range(int(self.most / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Format the label of a tick: 1k, 10M, 0.1."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A curve of a panel: the label in the legend, points as (x, y), and the class of its colour."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str


PANEL_HEIGHT, _LEGEND, _LABELS = 190, 17, 46


def panel_height(curves: int) -> float:
    """Return the height of `panel` in pixels."""
    return 26 + curves * _LEGEND + PANEL_HEIGHT + _LABELS


def panel(
    title: str, x_label: str, y_label: str, curves: Sequence[Drawn], place: tuple[float, float, float, float]
) -> Iterator[str]:
    """Yield curves over two logarithmic axes, with the legend above. `place`: left, top, width and bottom in pixels."""
    left, top, width, bottom = place
    yield text(left, top + 14, title, weight=600)
    yield text(left + width, top + 14, y_label, anchor="end", colour="soft")
    y = top + 26
    for curve in curves:
        yield rectangle(left, y + 3, 18, 4, curve.colour)
        yield text(left + 26, y + 9, curve.label, colour="ink")
        y += _LEGEND
    points = [point for curve in curves for point in curve.points]
    across = Scale.over((x for x, _ in points), left + 44, left + width - 8)
    base = bottom - _LABELS
    up = Scale.over((value for _, value in points), base, base - PANEL_HEIGHT + 8)
    for tick in up.ticks:
        yield line(across.start, up(tick), across.end, up(tick), "grid")
        yield text(across.start - 6, up(tick) + 4, short(tick), anchor="end", colour="soft")
    for tick in across.ticks:
        yield line(across(tick), up.start, across(tick), up.end, "grid")
        yield text(across(tick), up.start + 16, short(tick), anchor="middle", colour="soft")
    yield line(across.start, up.start, across.end, up.start, "axis")
    yield text((across.start + across.end) / 2, up.start + 33, x_label, anchor="middle", colour="soft")
    for curve in curves:
        placed = [(across(x), up(value)) for x, value in curve.points]
        yield path(placed, curve.colour)
        yield from (dot(x, value, curve.colour) for x, value in placed)
