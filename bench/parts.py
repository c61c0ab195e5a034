"""What a run measures beside no peer: figures with bars, and curves of times over sizes. Both are kept in the result.

{"name", "title", "seconds", "parameters": {…}, "missing": "why there are no figures, or empty",
 "figures": [{"name", "value", "unit", "bar": most that holds, or null}],
 "curves": [{"panel", "name", "over", "unit", "points": [[size, value], …]}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FLAT, PROPORTIONAL = 0.15, (0.85, 1.15)
"""Exponents up to FLAT do not grow; those in PROPORTIONAL grow with the size."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One number of a part. `bar`: the value may be this at most; None where no bar is set."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def verdict(self) -> str:
        """held, missed, or empty without a bar."""
        if self.bar is None:
            return ""
        return "held" if self.value <= self.bar else "missed"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over sizes. `panel`: curves of one panel are drawn together; `over`: what a size counts."""

    panel: str
    name: str
    over: str
    unit: str
    points: tuple[tuple[float, float], ...]

    @property
    def exponent(self) -> float:
        """The slope of the least-squares line through log(value) over log(size): 0 does not grow, 1 grows with it."""
        return fitted(self.points)

    @property
    def last_step(self) -> float:
        """The same between the two largest sizes: a fixed cost hides growth in `exponent`, and hides less here."""
        return fitted(self.points[-2:])

    def value(self, size: float) -> float:
        """The value at a size that was measured. Raises: KeyError."""
        return dict(self.points)[size]


@dataclass(frozen=True, slots=True)
class PartResult:
    """What one part gave. `missing`: why it gave nothing, in one line; then there are no figures and no curves."""

    name: str
    title: str
    seconds: float
    parameters: dict[str, Any]
    figures: tuple[Measured, ...] = ()
    curves: tuple[Curve, ...] = ()
    missing: str = ""

    @staticmethod
    def of(content: Mapping[str, Any]) -> PartResult:
        """The part that a kept result holds."""
        figures = tuple(Measured(**each) for each in content["figures"])
        curves = tuple(Curve(**{**each, "points": _points(each["points"])}) for each in content["curves"])
        return PartResult(**{**content, "figures": figures, "curves": curves})

    def panels(self) -> dict[str, list[Curve]]:
        """The curves by panel, in their order."""
        found: dict[str, list[Curve]] = {}
        for curve in self.curves:
            found.setdefault(curve.panel, []).append(curve)
        return found


class Part(Protocol):
    """Something that a run measures beside no peer."""

    name: str
    title: str

    def absent(self) -> str:
        """What this host lacks for it, in one line; empty if nothing."""

    def measure(self, at: Path, *, smoke: bool) -> PartResult:
        """Measure below the empty directory `at`."""


class Points:
    """Collects the values of curves, most of one panel, while they are measured."""

    def __init__(self, panel: str, over: str) -> None:
        self._panel, self._over = panel, over
        self._found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}

    def note(self, name: str, size: float, value: float, unit: str = "ms", *, panel: str = "") -> None:
        """Note one value of the curve `name`. `panel`: another one than this object's."""
        self._found.setdefault((panel or self._panel, name, unit), []).append((float(size), value))

    def curves(self) -> tuple[Curve, ...]:
        """What was noted."""
        return tuple(
            Curve(panel, name, self._over, unit, tuple(sorted(points)))
            for (panel, name, unit), points in self._found.items()
        )


def fitted(points: Sequence[tuple[float, float]]) -> float:
    """The exponent e of value = c * size ** e that fits best, by least squares of the logarithms; 0 for one point."""
    if len(points) < 2:
        return 0.0
    sizes, values = np.log(np.asarray(points, np.float64)).T
    return float(np.polyfit(sizes, values, 1)[0])


def growth(exponent: float) -> str:
    """An exponent in words."""
    least, most = PROPORTIONAL
    if exponent <= FLAT:
        return "does not grow"
    if exponent < least:
        return "grows less than the size"
    return "grows with the size" if exponent <= most else "grows more than the size"


def _points(content: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(size), float(value)) for size, value in content)
