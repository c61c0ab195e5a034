"""Vector search while rows are written: latency and recall under a stream of puts, beside the same table at rest.

    python -m bench.search_under_writes [--smoke] [--rows N] [--rates N …] [--searchers N …] [--window SECONDS]
                                        [--offered SEARCHES_PER_SECOND]

It implements the streaming protocol of VectorDBBench: rows arrive at a fixed rate, and searchers measure after 50 % and
80 % of the rows and after the last row. One daemon owns the table, as if several programs shared it, because callers of
an embedded table would share one interpreter. A writer in a process of its own puts batches durably, at a rate that it
keeps on average. Searchers are threads of this process, each with a client of its own, at level `latest` and default
settings. Rows have 384-d vectors that resemble real ones (`bench.mixtures`) and new keys; the index is IVF-PQ; flushes,
commits and index upkeep run all the time.

For each rate, half of the rows are loaded and committed first. At 50 % and at 80 % the writer pauses, and each number
of searchers measures the table at rest; then the writer continues, and they measure under writes. Therefore idle and
busy differ only by the rows of the windows. Rows between a window and the next place are written without searches.
After the last row the searchers measure at rest again. There are two kinds of load:

* closed: every searcher sends the next search when it has its answer. On two cores the searchers, the daemon, its
  flushes and the writer compete for the processors by design, also at rest. It shows throughput, and latency under
  saturation.
* open: a fixed number of searches per second are due, and any free searcher takes the next. The time of a search starts
  when it was due, so waiting counts. It shows latency at a load that the host can sustain; the bar is for this load.

Recall@10 of a search that began at time b, with A the rows that were acknowledged before b: an answer counts if its row
is no farther from the query than the tenth nearest row of A (faiss, exact; within 1e-5). A search must see A and may
see rows acknowledged later. An exact search gets 1 whichever of those it sees, because they only bring the tenth
nearest closer. A missed row of A is unnoticed only if a newer row takes its place; one second of the stream is about
one row in a hundred. Fewer than ten answers, or a duplicate row, fail the run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

import memwal
from bench.mixtures import Vectors, mixed, nearest, queries
from bench.paced_writer import Writer, fill, serving
from bench.runbooks import BAR as RECALL_BAR
from bench.runbooks import K, WrongAnswer
from bench.surroundings import host, versions

TIMES_BAR = 1.5
"""The highest accepted ratio of a p99 under load to the p99 at rest."""
ROWS, RATES, SEARCHERS, WINDOW, OFFERED = 100_000, (500, 1_000), (5, 10), 5.0, 30
SMOKE_ROWS, SMOKE_RATES, SMOKE_SEARCHERS, SMOKE_WINDOW, SMOKE_OFFERED = 2_000, (500,), (2,), 0.4, 20
CHECKPOINTS = (0.5, 0.8)
QUERIES = 1_000
_SETTLE = 2.0
Load = Literal["closed", "open"]


# ---- searching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Searched:
    """One search: its query, when it was due, began and ended, and the returned ids.

    `acked`: the number of rows acknowledged before it began.
    """

    query: int
    due: float
    began: float
    ended: float
    acked: int
    ids: tuple[int, ...]


@dataclass
class Window:
    """The measurements of one window. `phase`: "idle" or "writes"."""

    rate: int
    place: str
    phase: str
    load: Load
    searchers: int
    seconds: float
    searches: list[Searched] = field(default_factory=list)
    cores: dict[str, float] = field(default_factory=dict)
    recall: float = 0.0
    puts: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Return p50 and p99 of a search; under open load from the time when it was due."""
        begins = [each.due if self.load == "open" else each.began for each in self.searches]
        taken = [each.ended - began for each, began in zip(self.searches, begins, strict=True)]
        return tuple(np.percentile(taken, [50, 99]) * 1e3)


class Searchers:
    """Threads that search, each with a client of its own."""

    def __init__(self, endpoint: str, number: int, asked: Vectors, writer: Writer, opened: ExitStack) -> None:
        self._tables = [opened.enter_context(memwal.connect(endpoint)) for _ in range(number)]
        self._asked, self._writer = asked, writer

    def measure(self, number: int, load: Load, offered: int, seconds: float) -> list[Searched]:
        """Search with `number` threads for `seconds`. Raises: the first error of any thread."""
        found: list[Searched] = []
        errors: list[BaseException] = []
        turns, began = itertools.count(), time.monotonic()

        def run(table: Any) -> None:
            try:
                while True:
                    turn = next(turns)  # atomic in CPython
                    due = began + turn / offered if load == "open" else time.monotonic()
                    if due - began >= seconds:
                        return
                    time.sleep(max(0.0, due - time.monotonic()))
                    found.append(self._search(table, turn, due))
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                errors.append(error)

        threads = [threading.Thread(target=run, args=(table,)) for table in self._tables[:number]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def _search(self, table: Any, turn: int, due: float) -> Searched:
        query, acked, began = turn % len(self._asked), self._writer.acked, time.monotonic()
        answer = table.search("embedding", self._asked[query], k=K, columns=["id"])
        ended = time.monotonic()
        return Searched(query, due, began, ended, acked, tuple(answer["id"].to_pylist()))


def recall(vectors: Vectors, asked: Vectors, searches: Sequence[Searched]) -> float:
    """Return Recall@K as the module's docstring defines it. Raises: WrongAnswer."""
    first = min(each.acked for each in searches)
    shown = sorted({each.query for each in searches})
    base = dict(zip(shown, nearest(vectors[:first], np.arange(first), asked[shown], K)[0], strict=True))
    hits = 0
    for each in searches:
        if len(each.ids) != K or len(set(each.ids)) != K:
            raise WrongAnswer(f"{each.ids}: {K} different rows were due")
        query = asked[each.query]
        since = ((vectors[first : each.acked] - query) ** 2).sum(axis=1)
        tenth = np.partition(np.concatenate([base[each.query], since]), K - 1)[K - 1]
        hits += int((((vectors[list(each.ids)] - query) ** 2).sum(axis=1) <= tenth + 1e-5).sum())
    return hits / (K * len(searches))


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The run of one rate: its windows, and the puts that ran without searches."""

    given: argparse.Namespace
    rate: int
    vectors: Vectors
    windows: list[Window] = field(default_factory=list)
    quiet_puts: list[float] = field(default_factory=list)
    achieved: float = 0.0

    def take(self, at: Path) -> None:
        """Measure. Raises: WrongAnswer; the errors of clients."""
        with ExitStack() as opened:
            endpoint, daemon = opened.enter_context(serving(at, self.given.rows))
            fill(endpoint, self.vectors[: self.given.rows // 2])
            writer = Writer(endpoint, self.given.rows, self.rate)
            opened.callback(writer.close)
            asked = queries(QUERIES)
            searchers = Searchers(endpoint, max(self.given.searchers), asked, writer, opened)
            self._warm(searchers)
            ends = [int(self.given.rows * share) for share in (*CHECKPOINTS[1:], 1.0)]
            for share, end in zip(CHECKPOINTS, ends, strict=True):
                place = f"{share:.0%}"
                self._windows(searchers, writer, daemon, asked, place, "idle")
                began, from_row = time.monotonic(), writer.acked
                writer.go(end)
                self._windows(searchers, writer, daemon, asked, place, "writes")
                quiet_since = time.monotonic()
                writer.wait(end)
                self.achieved = (end - from_row) / (writer.puts[-1][2] - began)
                self.quiet_puts += [acked - sent for _, sent, acked in writer.puts if sent >= quiet_since]
                time.sleep(_SETTLE if self.given.window >= 1 else 0.0)
            self._windows(searchers, writer, daemon, asked, "after", "idle")

    def _warm(self, searchers: Searchers) -> None:
        searchers.measure(max(self.given.searchers), "closed", 1, min(1.0, self.given.window))

    def _windows(
        self,
        searchers: Searchers,
        writer: Writer,
        daemon: subprocess.Popen[str],
        asked: Vectors,
        place: str,
        phase: str,
    ) -> None:
        watched = {"daemon": daemon.pid, "writer": writer.process.pid, "searchers": os.getpid()}
        for number in self.given.searchers:
            for load in ("closed", "open"):
                window = Window(self.rate, place, phase, load, number, self.given.window)
                before, began = _processor_seconds(watched), time.monotonic()
                window.searches = searchers.measure(number, load, self.given.offered, self.given.window)
                took, after = time.monotonic() - began, _processor_seconds(watched)
                window.cores = {name: (after[name] - before[name]) / took for name in watched}
                window.puts = [a - s for _, s, a in writer.puts if began <= s < began + took]
                window.recall = recall(self.vectors, asked, window.searches)
                self.windows.append(window)
                print(_progress(window), flush=True)


def _processor_seconds(watched: dict[str, int]) -> dict[str, float]:
    times = {name: psutil.Process(pid).cpu_times() for name, pid in watched.items()}
    return {name: each.user + each.system for name, each in times.items()}


# ---- what is printed -------------------------------------------------------------------------------------------------


def _progress(window: Window) -> str:
    p50, p99 = window.milliseconds
    return (
        f"{window.rate} rows/s, {window.place}, {window.phase}, {window.searchers} searchers, {window.load}: "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {len(window.searches) / window.seconds:.0f}/s, "
        f"recall {window.recall:.4f}, cores {sum(window.cores.values()):.2f}"
    )


def searches_table(windows: Sequence[Window]) -> Iterator[str]:
    """Yield a Markdown row for each window under writes with its idle window, and for those after the last row."""
    head = ("rows/s", "at", "load", "searchers", "idle p50, p99 ms", "writes p50, p99 ms", "p99 ratio")
    yield f"| {' | '.join((*head, 'searches/s', 'recall', 'cores'))} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    idle = {(w.rate, w.place, w.load, w.searchers): w for w in windows if w.phase == "idle"}
    busy = {(w.rate, w.place, w.load, w.searchers): w for w in windows if w.phase == "writes"}
    for (rate, place, load, number), rest in idle.items():
        under = busy.get((rate, place, load, number))
        shown = [f"{rest.milliseconds[0]:.1f}, {rest.milliseconds[1]:.1f}"]
        if under is None:
            shown += ["", "", f"{len(rest.searches) / rest.seconds:.0f}", f"{rest.recall:.4f}", _cores(rest)]
        else:
            times = under.milliseconds[1] / rest.milliseconds[1]
            held = "held" if times <= TIMES_BAR else "**missed**"
            shown += [f"{under.milliseconds[0]:.1f}, {under.milliseconds[1]:.1f}", f"{times:.2f} x, {held}"]
            shown += [f"{len(rest.searches) / rest.seconds:.0f}, {len(under.searches) / under.seconds:.0f}"]
            shown += [f"{rest.recall:.4f}, {under.recall:.4f}", f"{_cores(rest)}; {_cores(under)}"]
        yield f"| {rate} | {place} | {load} | {number} | {' | '.join(shown)} |"


def _cores(window: Window) -> str:
    return "+".join(f"{cores:.1f}" for cores in window.cores.values())


def puts_table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield Markdown rows for the puts of each rate: without searches, and under each load."""
    yield "| rows/s (achieved) | puts alone: p50, p99 ms (puts) | load | puts under searches: p50, p99 ms | p99 ratio |"
    yield "|---|---|---|---|---|"
    for run in runs:
        quiet = np.percentile(run.quiet_puts or [np.nan], [50, 99]) * 1e3
        for load in ("open", "closed"):
            puts = [each for window in run.windows if window.load == load for each in window.puts]
            p50, p99 = np.percentile(puts or [np.nan], [50, 99]) * 1e3
            held = "held" if p99 <= TIMES_BAR * quiet[1] else "**missed**"
            yield (
                f"| {run.rate} ({run.achieved:.0f}) | {quiet[0]:.1f}, {quiet[1]:.1f} ({len(run.quiet_puts)}) | {load} "
                f"| {p50:.1f}, {p99:.1f} ({len(puts)}) | {p99 / quiet[1]:.2f} x, {held} |"
            )


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """Yield both tables, the bar of recall, and the environment."""
    windows = [window for run in runs for window in run.windows]
    yield from searches_table(windows)
    yield ""
    yield from puts_table(runs)
    least = min(window.recall for window in windows)
    held = "held" if least >= RECALL_BAR else "missed"
    yield f"\nlowest recall@{K} of a window {least:.4f}, bar {RECALL_BAR}: {held}"
    yield "cores: daemon + writer + searchers. " + ", ".join(f"{n} {v}" for n, v in {**versions(), **host()}.items())


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.search_under_writes", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    parser.add_argument("--rows", type=int, help=f"rows of a rate, half of them loaded first ({ROWS:,})")
    parser.add_argument("--rates", type=int, nargs="+", help=f"rows per second ({' '.join(map(str, RATES))})")
    parser.add_argument("--searchers", type=int, nargs="+", help=f"({' '.join(map(str, SEARCHERS))})")
    parser.add_argument("--window", type=float, help=f"seconds of one measurement ({WINDOW:g})")
    parser.add_argument("--offered", type=int, help=f"searches per second under open load ({OFFERED})")
    given = parser.parse_args(arguments)
    full = (ROWS, RATES, SEARCHERS, WINDOW, OFFERED)
    small = (SMOKE_ROWS, SMOKE_RATES, SMOKE_SEARCHERS, SMOKE_WINDOW, SMOKE_OFFERED)
    names = ("rows", "rates", "searchers", "window", "offered")
    for name, value in zip(names, small if given.smoke else full, strict=True):
        setattr(given, name, value if getattr(given, name) is None else getattr(given, name))
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if recall missed its bar, else 0."""
    given = options_of(arguments)
    vectors, runs = mixed(given.rows, 0), []
    for rate in given.rates:
        with tempfile.TemporaryDirectory() as directory:
            run = Run(given, rate, vectors)
            run.take(Path(directory))
            runs.append(run)
    print("\n".join(summary(runs)), flush=True)
    return 0 if all(window.recall >= RECALL_BAR for run in runs for window in run.windows) else 1


if __name__ == "__main__":
    sys.exit(main())
