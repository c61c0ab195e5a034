"""Contenders that query a table of three levels; both sides are filled with the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench import lance_side, memwal_side
from bench.benchmark import Contender, Sample, Side, Watch
from bench.lance_side import LanceShard
from bench.latencies import timed_each
from bench.memwal_side import MemwalTable

Digest = Callable[[Sequence[pa.Table]], str]
Measure = Callable[[Sequence[pa.Table]], Mapping[str, float]]


def _nothing(_: Sequence[pa.Table]) -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Levels:
    """The rows of a table: of the base, of the SST, and of the memtable."""

    base: pa.Table
    sst: pa.Table
    memtable: pa.Table
    key: str
    indexes: Mapping[str, Mapping[str, Any]]


class Queries(Contender):
    """Query a table that does not change. `opened`: creates the table. `ask`: answers one question with it."""

    def __init__(
        self,
        name: str,
        side: Side,
        settings: Mapping[str, Any],
        opened: Callable[[Path], Any],
        ask: Callable[[Any, Any], pa.Table],
        questions: Sequence[Any],
        digest: Digest,
        measure: Measure = _nothing,
        **more: str,
    ) -> None:
        super().__init__(name, side, settings, **more)
        self._opened, self._ask, self._questions = opened, ask, questions
        self._digest, self._measure = digest, measure
        self._table: Any = None

    def prepare(self, at: Path) -> None:
        """Fill the table and ask once, so that both sides have loaded what a first question loads."""
        self._table = self._opened(at)
        self._ask(self._table, self._questions[0])

    def round(self, at: Path, watch: Watch) -> Sample:  # noqa: ARG002 - the table was made in `prepare`
        """Ask every question once."""
        answers: list[pa.Table] = []
        with watch.timed():
            latencies = timed_each(lambda each: answers.append(self._ask(self._table, each)), self._questions)
        rows = sum(answer.num_rows for answer in answers)
        return Sample(np.asarray(latencies), watch.seconds, rows, self._digest(answers), self._measure(answers))

    def close(self) -> None:
        """Close the table."""
        if self._table is not None:
            self._table.close()


def of_memwal(
    levels: Levels,
    level: str,
    ask: Callable[[MemwalTable, Any], pa.Table],
    questions: Sequence[Any],
    digest: Digest,
    measure: Measure = _nothing,
) -> Queries:
    """Return the contender of memwal at a read level."""

    def opened(at: Path) -> MemwalTable:
        table = MemwalTable(at, levels.base, levels.key, levels.indexes, settings=memwal_side.HOLD)
        table.put(levels.sst)
        table.flush()
        table.put(levels.memtable)
        return table

    settings = memwal_side.resolved(memwal_side.HOLD, level=level, regions=1)
    return Queries(f"memwal, level {level}", "memwal", settings, opened, ask, questions, digest, measure)


def of_lance(
    name: str,
    levels: Levels,
    ask: Callable[[LanceShard, Any], pa.Table],
    questions: Sequence[Any],
    digest: Digest,
    measure: Measure = _nothing,
    settings: Mapping[str, Any] | None = None,
    *,
    question: str = "same",
    note: str = "",
) -> Queries:
    """Return a contender that uses one of Lance's readers, with `settings` of that reader."""

    def opened(at: Path) -> LanceShard:
        table = LanceShard(at, levels.base, levels.key, levels.indexes, lance_side.DURABLE_BEST)
        table.put(levels.sst)
        table.flush()
        table.put(levels.memtable)
        return table

    return Queries(name, "lance", settings or {}, opened, ask, questions, digest, measure, question=question, note=note)
