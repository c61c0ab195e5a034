"""Bars: how many times as fast as a peer memwal is to be. Nobody is to be faster; some rows are to be further ahead.

They are of the medians of a run. A bar says what is wanted, `report.verdict` who is faster beyond the noise of a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.result import Ratio

LEAST = 1.0
"""The bar of every row that is not named here."""
BARS: Mapping[tuple[str, str, str], float] = {
    ("put_durable", "memwal, default", "ShardWriter, best"): 0.8,  # which does not sync
    ("put_sustained", "memwal, default", "ShardWriter, best"): 3.0,
    ("packages_sustained", "memwal, default", "ShardWriter, best"): 3.0,
    ("flush_vectors", "memwal, default", "ShardWriter.close, best"): 1.3,
    ("replay", "memwal, lance format", "ShardWriter"): 1.3,
}
"""By benchmark, setting of memwal and setting of the peer."""


def bar(benchmark: str, ratio: Ratio) -> float:
    """The bar of one ratio of a benchmark."""
    return BARS.get((benchmark, ratio.memwal, ratio.lance), LEAST)


def held(benchmark: str, ratio: Ratio) -> bool:
    """Whether the median of a ratio reaches its bar."""
    return ratio.median >= bar(benchmark, ratio)
