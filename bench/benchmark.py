"""What a benchmark is made of: parameters with two values, contenders, and the samples they give.

A benchmark asks its contenders for rounds, in turn; `bench.rounds` does that, `bench.result` judges. A contender times
itself through the `Watch` it is given, so that the profiler can take the place of the clock (`bench.hotspots`).
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
    """A number that sets how much is measured: `smoke` inside the tests, `full` for a result that is kept."""

    smoke: int
    full: int
    meaning: str


class Watch:
    """Times the part of a round that counts.

    Thread safety. `timed` from one thread; the threads of a contender measure their own operations.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time inside the block to `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: `latencies` float64 [operations] in seconds, `rows` that went in or came out in `seconds` in all.

    `digest`: of what the round left or found, "" where there is nothing to compare. `measures`: figures besides.
    """

    latencies: npt.NDArray[np.float64]
    seconds: float
    rows: int
    digest: str
    measures: Mapping[str, float] = field(default_factory=dict)


class Contender(ABC):
    """One side of a benchmark: memwal, Lance at some setting, another peer, or the floor below all.

    Contract. `prepare` once, then any number of `round`s, then `close`, also after a failure; all from one thread.
    `question`: contenders with the same question must find the same digest. Empty: none of the others asks it.
    `note`: what a reader must know to compare fairly.
    """

    def __init__(
        self, name: str, side: Side, settings: Mapping[str, Any], *, question: str = "same", note: str = ""
    ) -> None:
        self.name, self.side, self.settings = name, side, dict(settings)
        self.question, self.note = question, note

    def prepare(self, at: Path) -> None:  # noqa: B027 - nothing to prepare is a valid answer
        """Set up below the directory `at`, which is this contender's own; not timed."""

    @abstractmethod
    def round(self, at: Path, watch: Watch) -> Sample:
        """Do the work once; only what happens inside `watch.timed()` counts. `at`: empty, for this round alone."""

    def close(self) -> None:  # noqa: B027 - nothing to close is a valid answer
        """Release what `prepare` opened."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A question put to several contenders. `figure`: what the ratio is taken of."""

    name: str
    title: str
    figure: Figure
    parameters: Mapping[str, Parameter]
    contenders: Callable[[Values], Sequence[Contender]]

    def values(self, *, smoke: bool) -> dict[str, int]:
        """The parameters' values for a smoke or a full run."""
        return {name: each.smoke if smoke else each.full for name, each in self.parameters.items()}
