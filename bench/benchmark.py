"""The types of a benchmark: parameters with two values, contenders, and the samples of their rounds.

`bench.rounds` runs the contenders in turn and `bench.result` compares them. A contender measures its own time through
the `Watch` that it receives, so that the profiler can replace the clock (`bench.hotspots`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Side = Literal["memwal", "lance", "peer", "floor"]
Figure = Literal["p50_ms", "rows_per_second"]
Values = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that sets the amount of work: `smoke` for the tests, `full` for a stored result."""

    smoke: int
    full: int
    meaning: str


class Watch:
    """Measure the part of a round that counts.

    Thread safety. `timed` from one thread only; threads of a contender measure their own operations.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the duration of the block to `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: `latencies` is float64 [operations] in seconds; `rows` were written or returned in `seconds` in total.

    `digest`: hash of the rows that the round wrote or returned; "" if rows are not compared. `measures`: further
    figures.
    """

    latencies: npt.NDArray[np.float64]
    seconds: float
    rows: int
    digest: str
    measures: Mapping[str, float] = field(default_factory=dict)


class Contender(ABC):
    """One side of a benchmark: memwal, Lance with certain settings, another peer, or the floor (storage alone).

    Contract. `prepare` once, then any number of `round`s, then `close`, also after a failure; all from one thread.
    `question`: contenders with the same question must return the same digest; "" if no other contender has the
    question. `note`: a difference that a reader must know for a fair comparison.
    """

    def __init__(
        self, name: str, side: Side, settings: Mapping[str, Any], *, question: str = "same", note: str = ""
    ) -> None:
        self.name, self.side, self.settings = name, side, dict(settings)
        self.question, self.note = question, note

    def prepare(self, at: Path) -> None:  # noqa: B027 - nothing to prepare is a valid answer
        """Set up below the directory `at`, which belongs to this contender; not timed."""

    @abstractmethod
    def round(self, at: Path, watch: Watch) -> Sample:
        """Do the work once; only blocks of `watch.timed()` count. `at`: an empty directory for this round."""

    def close(self) -> None:  # noqa: B027 - nothing to close is a valid answer
        """Release what `prepare` opened."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A question that several contenders answer. `figure`: the figure that ratios compare."""

    name: str
    title: str
    figure: Figure
    parameters: Mapping[str, Parameter]
    contenders: Callable[[Values], Sequence[Contender]]

    def values(self, *, smoke: bool) -> dict[str, int]:
        """Return the values of the parameters for a smoke or a full run."""
        return {name: each.smoke if smoke else each.full for name, each in self.parameters.items()}
