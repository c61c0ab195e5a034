"""Measure how memwal's times grow, and where a direct `merge_insert` is better.

    python -m bench.slopes [--smoke] [--workdir DIRECTORY] [NAME …]

Names: memtable, ssts, base, regions, log, crossover; none: all. Medians of a few repetitions at rising sizes on local
disk (`bench.growing`, `bench.crossover`). The exponent of a curve is the slope of the least-squares line through
log(time) over log(size): 0 does not grow, 1 grows with the size. A fixed cost lowers it, so the exponent between the
two largest sizes is shown too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("LANCE_LOG", "critical")  # before its import: Lance logs each index it cannot describe

from bench import crossover, growing
from bench.crossover import MANY, MEMWAL, ONE, PLAIN, PROCESSOR_ONE, PROCESSOR_TEN, TEN, WAIT
from bench.part_report import lines
from bench.parts import Curve, Measured, PartResult, Points
from bench.rounds import emptied

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Slope:
    """One kind of growth. `over`: the unit of a size. `smoke`, `full`: the sizes, rising."""

    name: str
    title: str
    over: str
    smoke: tuple[int, ...]
    full: tuple[int, ...]
    measure: Callable[[Path, Sequence[int], Points], None]

    def curves(self, at: Path, *, smoke: bool) -> tuple[Curve, ...]:
        """Measure below the empty directory `at`."""
        found = Points(self.title, self.over)
        self.measure(at, self.smoke if smoke else self.full, found)
        return found.curves()


SLOPES = (
    Slope(
        "memtable", "Rows of a memtable", "rows", (200, 2_000), (10_000, 100_000, 300_000, 1_000_000), growing.memtable
    ),
    Slope("ssts", "SSTs of a region", "SSTs", (1, 4), (1, 4, 16, 64), growing.ssts),
    Slope(
        "base",
        "Rows of the base table: upserts",
        "rows",
        (2_000, 8_000),
        (100_000, 1_000_000, 10_000_000),
        growing.base,
    ),
    Slope("regions", "Regions of a table", "regions", (1, 4), (1, 4, 16, 64, 256), growing.regions),
    Slope("log", "Entries of the log", "entries", (3, 12), (10, 100, 1_000, 5_000), growing.log),
)
CROSSOVER_BASE = {"smoke": 2_000, "full": 1_000_000}
CROSSOVER_ROWS = {"smoke": (20, 200), "full": (100, 1_000, 10_000, 100_000, 1_000_000)}


class Growth:
    """The part with all slopes, or with the named ones."""

    name, title = "growth", "Growth with rows, SSTs, regions and entries of the log"

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._slopes = [each for each in SLOPES if not names or each.name in names]

    def absent(self) -> str:
        """Return "": the part needs nothing."""
        return ""

    def measure(self, at: Path, *, smoke: bool) -> PartResult:
        """Measure all curves; the sizes are the parameters."""
        began = time.perf_counter()
        curves: list[Curve] = []
        for slope in self._slopes:
            curves += slope.curves(emptied(at / slope.name), smoke=smoke)
        sizes = {each.name: ", ".join(f"{n:,}" for n in (each.smoke if smoke else each.full)) for each in self._slopes}
        return PartResult(self.name, self.title, time.perf_counter() - began, sizes, curves=tuple(curves))


class Crossover:
    """The part that compares memwal with a direct `merge_insert`, by the rows of a batch."""

    name, title = "crossover", "Where direct merge_insert is better"

    def absent(self) -> str:
        """Return "": the part needs nothing."""
        return ""

    def measure(self, at: Path, *, smoke: bool) -> PartResult:
        """Measure the curves, and the number of batches per commit above which memwal takes less work."""
        began, mode = time.perf_counter(), "smoke" if smoke else "full"
        base, sizes = CROSSOVER_BASE[mode], CROSSOVER_ROWS[mode]
        curves = crossover.measure(at, base, sizes, rounds=1 if smoke else crossover.ROUNDS)
        seconds = time.perf_counter() - began
        return PartResult(self.name, self.title, seconds, {"base": base}, crossover_figures(curves), curves)


def crossover_figures(curves: Sequence[Curve]) -> tuple[Measured, ...]:
    """Return figures per batch size.

    They are the wait of a merge relative to an acknowledgement, and the number of batches per commit above which memwal
    is less work.
    """
    found = {(each.panel, each.name): each for each in curves}
    figures = []
    for rows, wait in found[WAIT, MEMWAL].points:
        ratio = found[WAIT, PLAIN].value(rows) / wait
        figures.append(Measured(f"{rows:,.0f} rows: merge_insert until durable, beside memwal's ack", ratio, "times"))
    for one, ten, what in ((ONE, TEN, "work"), (PROCESSOR_ONE, PROCESSOR_TEN, "processor time")):
        for rows, direct in found[ten, PLAIN].points:
            batches = batches_to_break_even(found[one, MEMWAL].value(rows), found[ten, MEMWAL].value(rows), direct)
            if batches is not None:
                name = f"{rows:,.0f} rows: merge_insert is less {what} below"
                figures.append(Measured(name, batches, "batches a commit"))
    for rows, direct in found[ONE, PLAIN].points:
        if rows not in dict(found[TEN, PLAIN].points):
            ratio = found[ONE, MEMWAL].value(rows) / direct
            figures.append(
                Measured(f"{rows:,.0f} rows: memwal's work, one batch a commit", ratio, "times merge_insert")
            )
    return tuple(figures)


def batches_to_break_even(one: float, ten: float, direct: float) -> float | None:
    """Return the number of batches per commit above which memwal's work per batch is below `direct`.

    1 means always, None never. `one`, `ten`: milliseconds per batch with one batch per commit, and with MANY. The cost
    of the commit is assumed to be fixed, and that of each further batch constant.
    """
    further = (MANY * ten - one) / (MANY - 1)
    return max(1.0, (one - further) / (direct - further)) if direct > further else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named parts, or all, and print them."""
    parser = argparse.ArgumentParser("python -m bench.slopes", description="how times grow")
    names = [*(each.name for each in SLOPES), Crossover.name]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *names], help=", ".join(names))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    parser.add_argument("--workdir", type=Path, default=HERE.parent / "build", help="where tables are put meanwhile")
    given = parser.parse_args(arguments)
    given.workdir.mkdir(parents=True, exist_ok=True)
    for name in given.names or names:
        with tempfile.TemporaryDirectory(dir=given.workdir, prefix="bench-") as at:
            part = Crossover() if name == Crossover.name else Growth([name])
            found = part.measure(Path(at), smoke=given.smoke)
        print("\n".join((f"{name}, {found.seconds:.0f} s", *lines(found), "")), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
