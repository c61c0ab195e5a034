"""Pure functions that decide whether a series of samples is flat.

The growth of a series is its Theil-Sen slope (the median of the slopes between all pairs of samples) times its length:
waves and a few outliers do not move a median. A bar limits the growth: a constant amount, plus an amount for each hour.
The first samples of a series, while caches fill, do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

Points = Sequence[tuple[float, float]]
"""(seconds, value), by rising seconds."""
FEWEST = 8
"""Minimum number of samples for a verdict on growth."""
_PAIRED = 240
"""Maximum number of samples that are paired; longer series are thinned out."""
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Bar:
    """How much a series may grow after `warm_up` seconds.

    The limit is the larger of `slack` and `share` of its level, plus `per_hour` for each hour of its length. A series
    shorter than `shortest` seconds is not judged. No value may exceed `most`.
    """

    slack: float
    per_hour: float = 0.0
    share: float = 0.0
    warm_up: float = 60.0
    most: float = float("inf")
    shortest: float = 240.0

    def allows(self, level: float, seconds: float) -> float:
        """Return the growth allowed for a series of this level and length."""
        return max(self.slack, self.share * level) + self.per_hour * seconds / 3600


@dataclass(frozen=True)
class Verdict:
    """The result for a series; `level`, `grown` and `allowed` in its own unit, `seconds` without the warm-up."""

    name: str
    level: float
    grown: float
    allowed: float
    highest: float
    most: float
    seconds: float
    picture: str
    judged: bool
    """Whether the series was long enough to judge its growth."""

    @property
    def broken(self) -> str:
        """Describe the violation of the bar in a line; "" if the series keeps it."""
        if self.highest > self.most:
            return f"{self.name}: reached {self.highest:,.1f}, at most {self.most:,.1f} is allowed"
        if self.judged and self.grown > self.allowed:
            return (
                f"{self.name}: grew by {self.grown:,.1f} in {self.seconds:,.0f} s from a level of {self.level:,.1f}; "
                f"{self.allowed:,.1f} is allowed"
            )
        return ""


def judge(name: str, points: Points, bar: Bar) -> Verdict:
    """Judge a series by a bar. `warm_up` counts from its first sample."""
    settled = [point for point in points if point[0] - points[0][0] >= bar.warm_up]
    seconds = settled[-1][0] - settled[0][0] if settled else 0.0
    level = statistics.median(value for _, value in settled) if settled else 0.0
    return Verdict(
        name=name,
        level=level,
        grown=slope(settled) * seconds,
        allowed=bar.allows(level, seconds),
        highest=max((value for _, value in points), default=0.0),
        most=bar.most,
        seconds=seconds,
        picture=sparkline(value for _, value in points),
        judged=len(settled) >= FEWEST and seconds >= bar.shortest,
    )


def slope(points: Points) -> float:
    """Return the Theil-Sen slope of a series per second; 0 for fewer than two samples."""
    thinned = points[:: max(1, len(points) // _PAIRED)]
    slopes = [(later[1] - one[1]) / (later[0] - one[0]) for one, later in combinations(thinned, 2) if later[0] > one[0]]
    return statistics.median(slopes) if slopes else 0.0


def sparkline(values: Iterable[float], width: int = 32) -> str:
    """Draw a series as a line of blocks from 0 to its highest value: means of at most `width` parts."""
    series = list(values)
    parts = min(width, len(series))
    cuts = [len(series) * number // parts for number in range(parts + 1)] if parts else []
    means = [statistics.fmean(series[begin:end]) for begin, end in pairwise(cuts)]
    top = max(means, default=0.0) or 1.0
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(len(_SPARKS) * mean / top))] for mean in means)
