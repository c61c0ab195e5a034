"""Compare structures that answer ranges while rows are put: the evidence for memtable/filter/scalar_index.py.

`python -m bench.micro.ordered_index` prints a table. A step puts a thousand rows, or one, then asks for one range that
a thousandth of all rows pass. There are a hundred steps from an empty column and a hundred from 900,000 rows (fewer for
a candidate that takes too long). A candidate may return rows that do not pass, which the filter checks afterwards, but
must not miss one. It may update itself at the put or at the range.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sortedcontainers import SortedList

from memwal.memtable.filter import scalar_index
from memwal.memtable.filter.scalar_index import Asked, ScalarIndex, sort_form
from memwal.memtable.snapshot import WORTH

Integers = npt.NDArray[np.int64]

BATCHES = (1_000, 1)
"""Rows of a put: a batch, and a caller that puts rows one by one."""
STEPS = 100
HELD = (0, 900_000)
"""Rows in the column before the first step."""
ONE_IN = 1_000
BUDGET = 0.5
"""Seconds after which no further step runs."""
SEED = 20_240_607


class Ordered(ABC):
    """The rows of one column by value. Before each put and range, the benchmark sets `column` to all rows so far."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.column = pa.chunked_array([], kind)

    def put(self, rows: pa.Array, first: int) -> None:  # noqa: B027 - most do nothing
        """Note that rows were added to the column, beginning with row `first`."""

    @abstractmethod
    def between(self, low: Any, high: Any) -> Integers:
        """Return rows that may satisfy low <= value < high."""

    def asked(self, low: Any, high: Any) -> Asked:
        """Return the range in the form of the memtable's filters."""
        first, last = (sort_form(pa.array([end], self.kind)) for end in (low, high))
        return Asked(first, last, high_inclusive=False)


class Runs(Ordered):
    """memtable's structure: runs merged geometrically; rows are sorted after a number of lookups."""

    looks = scalar_index.LOOKS

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._index = ScalarIndex(kind)

    def between(self, low: Any, high: Any) -> Integers:
        """See Ordered."""
        scalar_index.LOOKS = self.looks
        n = len(self.column)
        found = self._index.candidates(self.asked(low, high), lambda: self.column, n, n // WORTH)
        return np.arange(n) if found is None else found


class EagerRuns(Runs):
    """The same, but the first range after a put sorts the rows."""

    looks = 0


class OneRun(Ordered):
    """One run, sorted again when the rows after it are more than `tail` and more than 1/`share` of it."""

    tail = 0
    share = 1_000_000

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._values, self._rows = pa.array([], kind), np.empty(0, np.int64)

    def between(self, low: Any, high: Any) -> Integers:
        """See Ordered."""
        end, n = len(self._rows), len(self.column)
        if n - end > max(self.tail, end // self.share):
            order = pc.sort_indices(self.column)
            self._values, self._rows = self.column.take(order).combine_chunks(), order.to_numpy().astype(np.int64)
            end = n
        places = pc.search_sorted(self._values, pa.array([low, high], self.kind)).to_pylist()
        return np.concatenate([self._rows[slice(*places)], np.arange(end, n)])


class RunAndTail(OneRun):
    """One run; rows after it are all returned."""

    tail = 4_096
    share = 8


class Sorted(Ordered):
    """A SortedList of pairs of value and row."""

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._pairs = SortedList()

    def put(self, rows: pa.Array, first: int) -> None:
        """See Ordered."""
        self._pairs.update(zip(rows.to_pylist(), range(first, first + len(rows)), strict=True))

    def between(self, low: Any, high: Any) -> Integers:
        """See Ordered."""
        return np.array([row for _, row in self._pairs.irange((low, -1), (high, -1))], np.int64)


class YoungSorted(Sorted):
    """Runs, and a SortedList of the rows after them, which become a run when they are sixteen thousand."""

    most = 16_384

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._runs = EagerRuns(kind)

    def put(self, rows: pa.Array, first: int) -> None:
        """See Ordered."""
        if len(self._pairs) + len(rows) > self.most:
            self._pairs, self._runs.column = SortedList(), self.column
        else:
            super().put(rows, first)

    def between(self, low: Any, high: Any) -> Integers:
        """See Ordered."""
        return np.concatenate([self._runs.between(low, high), super().between(low, high)])


CANDIDATES: Mapping[str, Callable[[pa.DataType], Ordered]] = {
    "runs, sorted after 8 looks": Runs,
    "runs, sorted at the first look": EagerRuns,
    "one run, sorted anew": OneRun,
    "one run and a tail": RunAndTail,
    "SortedList": Sorted,
    "runs and a young SortedList": YoungSorted,
}


@dataclass(frozen=True)
class Figures:
    """The figures of a candidate: microseconds per row put, milliseconds per range, rows returned, steps."""

    put: float
    median: float
    worst: float
    named: float
    steps: int


def measure(candidate: Ordered, values: pa.Array, held: int, batch: int) -> Figures:
    """Run the steps, starting after the first `held` values."""
    order = np.sort(np.asarray(values))
    chunks = [values.slice(0, held)] if held else []
    candidate.column = pa.chunked_array(chunks, values.type)
    if held:
        candidate.put(chunks[0], 0)
    for _ in range(10):
        candidate.between(order[0], order[1])
    puts: list[float] = []
    ranges: list[float] = []
    named: list[int] = []
    gc.collect()
    started = time.perf_counter()
    while len(puts) < STEPS and (not puts or time.perf_counter() - started < BUDGET):
        first = held + len(puts) * batch
        chunks.append(values.slice(first, batch))
        candidate.column = pa.chunked_array(chunks, values.type)
        before = time.perf_counter()
        candidate.put(chunks[-1], first)
        after = time.perf_counter()
        at = len(order) * len(puts) // (STEPS + 1)
        low, high = order[at], order[at + len(order) // ONE_IN]
        found = candidate.between(low, high)
        ranges.append(time.perf_counter() - after)
        puts.append(after - before)
        named.append(len(found))
    check(candidate.column, low, high, found)
    return Figures(
        float(np.mean(puts)) * 1e6 / batch,
        float(np.median(ranges)) * 1e3,
        max(ranges) * 1e3,
        float(np.median(named)),
        len(puts),
    )


def check(column: pa.ChunkedArray, low: Any, high: Any, found: Integers) -> None:
    """Check that no row that passes is missing. Raises: AssertionError."""
    passing = pc.and_(pc.greater_equal(column, pa.scalar(low)), pc.less(column, pa.scalar(high)))
    missing = np.setdiff1d(np.flatnonzero(passing.to_numpy()), found)
    if len(missing):
        raise AssertionError(f"rows {missing[:5].tolist()} are not named")


def main() -> None:
    """Measure every candidate and print the figures."""
    numbers = np.random.default_rng(SEED).integers(0, 2**62, max(HELD) + STEPS * max(BATCHES))
    texts = pa.array([f"package-{number % 10**9:09d}" for number in numbers.tolist()], pa.large_string())
    columns = f"{'put':>10} {'range p50':>10} {'worst':>9} {'named':>7} {'steps':>6}"
    print(f"{'values':<7} {'held':>8} {'a put':>6}  {'':<31} {columns}")
    for (title, values), held, batch in product((("int64", pa.array(numbers)), ("text", texts)), HELD, BATCHES):
        for name, make in CANDIDATES.items():
            found = measure(make(values.type), values, held, batch)
            print(
                f"{title:<7} {held:>8,} {batch:>6,}  {name:<31} {found.put:>7.2f} us {found.median:>7.3f} ms "
                f"{found.worst:>6.1f} ms {found.named:>7,.0f} {found.steps:>6}",
                flush=True,
            )


if __name__ == "__main__":
    main()
