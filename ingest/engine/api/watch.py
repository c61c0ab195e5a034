"""Collect the explanation of one read for the caller's `explain`.

1. A method of `Reads` with `explain` creates a `Watch` and passes it on; without `explain` it is None.
2. Each process that answers adds one part to the watch: a table in this process its own, a client those that the
   daemons send with their answers. A part is made when the answer is complete.
3. When the answer is complete, the watch calls `explain` with the `Explanation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from memwal.ingest.engine.api.arguments import brief
from memwal.ingest.engine.api.explanation import ExplainedPart, Explanation
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.errors import Invalid

if TYPE_CHECKING:
    from memwal.wal.clock import Clock

T = TypeVar("T")
Explain = Callable[[Explanation], object]


class Watch:
    """Collect the explanation of one read.

    Thread safety. One thread at a time; `add` from any.
    """

    def __init__(self, read: str, level: str, explain: Explain, clock: Clock) -> None:
        self.clock = clock
        self._read, self._level, self._explain = read, level, explain
        self._parts: list[Callable[[float], ExplainedPart | None]] = []
        self._attempts, self._busy, self._since = 0, 0.0, clock.monotonic()

    def add(self, part: Callable[[float], ExplainedPart | None]) -> None:
        """Add the part of a process that answers.

        It is called when the answer is complete, with the milliseconds of the read; None: the process sent no part.
        """
        self._parts.append(part)

    def again(self) -> None:
        """Begin an attempt; parts of earlier ones are dropped."""
        self._attempts, self._parts = self._attempts + 1, []

    def heard(self, endpoint: str) -> Callable[[Mapping[str, Any]], None]:
        """Return a receiver for the explanation that the daemon at `endpoint` sends, in the form of
        `Explanation.as_dict`.
        """
        sent: list[Mapping[str, Any]] = []
        self.add(lambda _: replace(Explanation.of(sent[0]).parts[0], endpoint=endpoint) if sent else None)
        return sent.append

    def ended(self, answer: T) -> T:
        """Call `explain` (for a stream at its end) and return the answer."""
        self._pause()
        if isinstance(answer, RowStream):
            return RowStream(answer.schema, self._batches(answer), answer.close)  # type: ignore[return-value]
        self._tell(answer.num_rows if isinstance(answer, pa.Table) else int(answer))  # type: ignore[call-overload]
        return answer

    def _batches(self, rows: RowStream) -> Iterator[pa.RecordBatch]:
        given = 0
        self._resume()
        with rows:
            for batch in rows:
                given += batch.num_rows
                self._pause()
                try:
                    yield batch
                except GeneratorExit:
                    self._tell(given, complete=False)
                    raise
                self._resume()
        self._pause()
        self._tell(given)

    def _pause(self) -> None:
        self._busy += self.clock.monotonic() - self._since

    def _resume(self) -> None:
        self._since = self.clock.monotonic()

    def _tell(self, rows: int, *, complete: bool = True) -> None:
        ms = 1e3 * self._busy
        parts = tuple(part for made in self._parts if (part := made(ms)) is not None)
        slowest = max((part.ms for part in parts if part.endpoint), default=ms)
        attempts = max(1, self._attempts)
        self._explain(Explanation(self._read, self._level, rows, ms, parts, attempts, max(0.0, ms - slowest), complete))


def watching(read: str, level: str, explain: Explain | None) -> Watch | None:
    """Return a watch that calls `explain`, None for None. Raises: Invalid if it is not a function."""
    if explain is None:
        return None
    if not callable(explain):
        raise Invalid(f"explain = {brief(explain)}: give a function that takes the explanation, such as explain=print")
    # Imported here: this package is heavy, and reads without an explanation do not need it.
    from memwal.wal.clock import SystemClock

    return Watch(read, level, explain, SystemClock())


def heard(watch: Watch | None, endpoint: str) -> Callable[[Mapping[str, Any]], None] | None:
    """Return a receiver for the explanation of the daemon at `endpoint`; None without a watch."""
    return None if watch is None else watch.heard(endpoint)


def ended(watch: Watch | None, answer: T) -> T:
    """Return `answer`, reported to `watch`."""
    return answer if watch is None else watch.ended(answer)
