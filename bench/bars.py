"""Bars: the ratio to a peer that memwal should reach. No peer should be faster; some rows should be further ahead.

A bar applies to the median of a run. It states the target; `report.verdict` states which side is faster beyond the
noise of the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.result import Ratio

LEAST = 1.0
"""The bar of every row that BARS does not name."""
BARS: Mapping[tuple[str, str, str], float] = {
    ("put_durable", "memwal, default", "ShardWriter, best"): 0.8,  # the peer does not sync
    ("put_sustained", "memwal, default", "ShardWriter, best"): 3.0,
    ("packages_sustained", "memwal, default", "ShardWriter, best"): 3.0,
    ("flush_vectors", "memwal, default", "ShardWriter.close, best"): 1.3,
    ("replay", "memwal, lance format", "ShardWriter"): 1.3,
}
"""Keys: benchmark, setting of memwal, setting of the peer."""


def bar(benchmark: str, ratio: Ratio) -> float:
    """Return the bar of one ratio of a benchmark."""
    return BARS.get((benchmark, ratio.memwal, ratio.lance), LEAST)


def held(benchmark: str, ratio: Ratio) -> bool:
    """Return whether the median of a ratio reaches its bar."""
    return ratio.median >= bar(benchmark, ratio)
