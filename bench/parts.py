"""The parts of a run, which have no peer: figures with bars, and curves of values over sizes. The result stores both.

{"name", "title", "seconds", "parameters": {…}, "missing": reason for missing figures, or "",
 "figures": [{"name", "value", "unit", "bar": highest accepted value, or null}],
 "curves": [{"panel", "name", "over", "unit", "points": [[size, value], …]}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of a part. `bar`: the highest accepted value, or None."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def verdict(self) -> str:
        """Return "held" or "missed"; "" without a bar."""
        if self.bar is None:
            return ""
        return "held" if self.value <= self.bar else "missed"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over sizes. `panel`: curves of one panel are drawn together. `over`: the unit of a size."""

    panel: str
    name: str
    over: str
    unit: str
    points: tuple[tuple[float, float], ...]

    @property
    def exponent(self) -> float:
        """Return the slope of the least-squares line through log(value) over log(size).

        0 does not grow, 1 grows with the size.
        """
        return fitted(self.points)

    @property
    def last_step(self) -> float:
        """Return the exponent between the two largest sizes. A fixed cost hides less growth here than in `exponent`."""
        return fitted(self.points[-2:])

    def value(self, size: float) -> float:
        """Return the value at a measured size. Raises: KeyError."""
        return dict(self.points)[size]


@dataclass(frozen=True, slots=True)
class PartResult:
    """The result of one part. `missing`: one line with the reason if the part has neither figures nor curves."""

    name: str
    title: str
    seconds: float
    parameters: dict[str, Any]
    figures: tuple[Measured, ...] = ()
    curves: tuple[Curve, ...] = ()
    missing: str = ""

    @staticmethod
    def of(content: Mapping[str, Any]) -> PartResult:
        """Return the part from its stored form."""
        figures = tuple(Measured(**each) for each in content["figures"])
        curves = tuple(Curve(**{**each, "points": _points(each["points"])}) for each in content["curves"])
        return PartResult(**{**content, "figures": figures, "curves": curves})

    def panels(self) -> dict[str, list[Curve]]:
        """Return the curves by panel, in their order."""
        found: dict[str, list[Curve]] = {}
        for curve in self.curves:
            found.setdefault(curve.panel, []).append(curve)
        return found


class Part(Protocol):
    """A measurement of the whole system that has no peer."""

    name: str
    title: str

    def absent(self) -> str:
        """Return in one line what this host lacks for the part; "" if nothing."""

    def measure(self, at: Path, *, smoke: bool) -> PartResult:
        """Measure below the empty directory `at`."""


class Points:
    """Collect values of curves, most of them of one panel, during a measurement."""

    def __init__(self, panel: str, over: str) -> None:
        self._panel, self._over = panel, over
        self._found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}

    def note(self, name: str, size: float, value: float, unit: str = "ms", *, panel: str = "") -> None:
        """Add one value to the curve `name`. `panel`: a panel other than that of this object."""
        self._found.setdefault((panel or self._panel, name, unit), []).append((float(size), value))

    def curves(self) -> tuple[Curve, ...]:
        """Return the collected curves."""
        return tuple(
            Curve(panel, name, self._over, unit, tuple(sorted(points)))
            for (panel, name, unit), points in self._found.items()
        )


def fitted(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent e of value = c * size ** e by least squares of the logarithms; 0 for one point."""
    if len(points) < 2:
        return 0.0
    sizes, values = np.log(np.asarray(points, np.float64)).T
    return float(np.polyfit(sizes, values, 1)[0])


def _points(content: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(size), float(value)) for size, value in content)
