"""Which structure answers ranges best while rows are put: the evidence for memtable/filter/scalar_index.py.

`python -m bench.micro.ordered_index` prints a table. A thousand rows are put, or one, then one range is asked that a
thousandth of all rows pass, and so on, a hundred times from nothing and a hundred times from 900,000 rows (less often
for a candidate that takes too long). A candidate may name rows that do not pass, which the filter then looks at, but
not miss one. Where it brings itself up to date, at the put or at the range, is its own choice.
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
"""Rows there before the first of the steps."""
ONE_IN = 1_000
BUDGET = 0.5
"""Seconds after which no further step is made."""
SEED = 20_240_607


class Ordered(ABC):
    """The rows of one column by value. `column` is told before each put and range how far the rows reach."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.column = pa.chunked_array([], kind)

    def put(self, rows: pa.Array, first: int) -> None:  # noqa: B027 - most do nothing
        """Rows were added to the column, the first of them `first`."""

    @abstractmethod
    def between(self, low: Any, high: Any) -> Integers:
        """Rows which may lie in low <= value < high."""

    def asked(self, low: Any, high: Any) -> Asked:
        """The range as memtable has it."""
        first, last = (sort_form(pa.array([end], self.kind)) for end in (low, high))
        return Asked(first, last, high_inclusive=False)


class Runs(Ordered):
    """memtable's: runs merged geometrically; rows are sorted when they were looked at often enough."""

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
    """The same, rows sorted by the first range after their put."""

    looks = 0


class OneRun(Ordered):
    """One run, sorted anew when the rows behind it are more than `tail` and an eighth of it."""

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
    """Rows behind the run are all named."""

    tail = 4_096
    share = 8


class Sorted(Ordered):
    """A SortedList of value and row."""

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
    """Runs, and a SortedList of the rows behind them, which become a run when they are sixteen thousand."""

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
    """Of one candidate: microseconds per row put, milliseconds per range, rows named, steps made."""

    put: float
    median: float
    worst: float
    named: float
    steps: int


def measure(candidate: Ordered, values: pa.Array, held: int, batch: int) -> Figures:
    """Run the steps behind the first `held` of the values."""
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
    """No row that passes is missing."""
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
