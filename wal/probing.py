"""Find the highest of consecutive numbers with few probes.

Manifest versions and WAL positions are filled in order, by put-if-absent of the next one. No number is therefore
missing between an existing one and the newest: "n exists" is true up to the newest and false behind it. Doubling steps
followed by bisection find the newest in about two probes per binary digit of the distance: 34 probes for 100,000
numbers.

If lower numbers are missing (collected entries, pruned versions), the search must start where no number above is
missing; callers state why that holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from memwal.wal.parallel_map import each

_BEYOND = 17
"""Probes behind the end, at distances that are powers of two: a gap of up to 65,536 numbers is detected."""


def newest_from(exists: Callable[[int], bool], start: int) -> int:
    """Return the highest number that follows `start` without a gap; `start` if the next one is missing.

    Requires. All numbers from `start` + 1 to the newest exist. Raises what `exists` raises.
    """
    low, step = start, 1
    while exists(low + step):
        low, step = low + step, 2 * step
    return low + bisect_left(range(low + 1, low + step), True, key=lambda number: not exists(number))


def exists_beyond(exists: Callable[[int], bool], end: int, workers: int = 1) -> int | None:
    """Return a number that exists although `end` + 1 is missing, searched at doubling distances; None if none is found.

    A gap behind `end` is detected if at least as many numbers follow it as are missing. `workers`: 1 starts no thread,
    more probe all concurrently. Raises what `exists` raises.
    """
    looked_at = [end + 1 + (1 << power) for power in range(_BEYOND)]
    found = zip(looked_at, each(exists, looked_at, 1 if workers == 1 else _BEYOND), strict=True)
    return next((number for number, there in found if there), None)
