"""`python -m bench`: run benchmarks, keep the result, render it, or profile one.

python -m bench                      everything, full values; replaces results/full.json, README.md's tables, ratios.svg
python -m bench put_durable 'get_*'  some of them, shown only; --out FILE keeps the result
python -m bench --smoke              tiny values: does it run at all
python -m bench --profile NAME       where memwal spends its time in one of them
python -m bench --render             README.md and ratios.svg anew from results/full.json
python -m bench compare A B          what changed beyond the noise between two kept results
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Lance logs a line per index it cannot show. Before it is imported, and by a word that both its halves understand.
os.environ.setdefault("LANCE_LOG", "critical")

from rich.console import Console

from bench import report
from bench.benchmark import Benchmark
from bench.chart import svg
from bench.compare import NOISE, compare, kept, summary, table
from bench.hotspots import profile
from bench.registry import ALL, chosen
from bench.result import BenchmarkResult, RunResult
from bench.rounds import ResultsDiffer, run
from bench.surroundings import host, versions

HERE = Path(__file__).resolve().parent
KEPT = HERE / "results" / "full.json"
ROUNDS = {"smoke": 2, "full": 5}
COLOURS = {"faster": "green", "slower": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for a wrong request, 1 where the sides found different rows.

    `compare` returns 1 with --fail-on-slower where something is slower.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["compare"]:
        return _compare(words[1:])
    given = _parser().parse_args(words)
    try:
        if given.list:
            print("\n".join(f"{each.name:<20} {each.title}" for each in ALL))
        elif given.render:
            render(RunResult.read(KEPT))
        elif given.profile:
            with _directory(given.workdir) as at:
                print(profile(chosen([given.profile])[0], Path(at), smoke=given.smoke))
        else:
            _run(given)
    except (LookupError, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except ResultsDiffer as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def measure(benchmarks: Sequence[Benchmark], at: Path, *, smoke: bool, rounds: int, console: Console) -> RunResult:
    """Run benchmarks below the directory `at`, showing each as it ends. Raises: ResultsDiffer."""
    began = time.perf_counter()
    found = []
    with console.status("") as status:
        for each in benchmarks:
            found.append(run(each, at / each.name, smoke=smoke, rounds=rounds, progress=status.update))
            _show(found[-1], console)
    seconds = time.perf_counter() - began
    return RunResult("smoke" if smoke else "full", rounds, seconds, versions(), host(), tuple(found))


def render(result: RunResult) -> None:
    """Write README.md's tables and the chart of a kept result."""
    report.update(HERE / "README.md", result)
    (HERE / "ratios.svg").write_text(svg(result), encoding="utf-8")


def _run(given: argparse.Namespace) -> None:
    rounds = given.rounds or ROUNDS["smoke" if given.smoke else "full"]
    console = Console(highlight=False, soft_wrap=True)
    with _directory(given.workdir) as at:
        result = measure(chosen(given.names), Path(at), smoke=given.smoke, rounds=rounds, console=console)
    if given.out:
        result.write(given.out)
    elif not given.names and not given.smoke:
        result.write(KEPT)
        render(RunResult.read(KEPT))
        console.print(f"\nkept in {KEPT.relative_to(HERE.parent)}; tables and chart in bench/ are rendered anew")


def _compare(arguments: Sequence[str]) -> int:
    given = _compare_parser().parse_args(arguments)
    try:
        a, b = kept(given.a), kept(given.b)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    found = compare(a, b)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for name, path, result in (("A", given.a, a), ("B", given.b, b)):
        console.print(f"{name}: {path}, {result.mode}, rounds: {result.rounds}")
    console.print()
    for line, said in table(found):
        console.print(line, style=COLOURS.get(said, "default" if said else "bold"))
    if found.changes:
        console.print()
    for line in summary(found):
        console.print(line)
    return int(given.fail_on_slower and found.count("slower") > 0)


def _show(result: BenchmarkResult, console: Console) -> None:
    console.print(f"\n[bold]{result.name}[/]  {result.title}")
    for memwal, lance, figure, ratio, said in report.rows(result):
        colour = COLOURS.get(said, "default")
        console.print(f"  [{colour}]{ratio:<24}{said:<8}[/]memwal {memwal}, Lance {figure}  [dim]{lance}[/]")


def _directory(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """A directory for tables, on the disk that is to be measured: the system's own may be in memory."""
    parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=parent, prefix="bench-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench",
        description="memwal beside Lance, in turn, in one run",
        epilog="python -m bench compare A B: what changed between two results (compare --help)",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks or patterns such as 'put_*'; none: all")
    parser.add_argument("--smoke", action="store_true", help="tiny values: does it run at all")
    parser.add_argument("--rounds", type=int, help="times that every contender's turn comes (2 for smoke, else 5)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the result")
    parser.add_argument("--workdir", type=Path, default=HERE.parent / "build", help="where tables are put meanwhile")
    parser.add_argument("--list", action="store_true", help="names and titles")
    parser.add_argument("--profile", metavar="NAME", help="where memwal spends its time in one benchmark")
    parser.add_argument("--render", action="store_true", help="tables and chart anew from results/full.json")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench compare",
        description="What changed between two results: the ratios to Lance, taken round by round. Faster or slower: "
        f"the ranges of the rounds do not overlap and the medians differ by more than {NOISE * 100:.0f} %.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="the earlier result, as --out FILE wrote it")
    parser.add_argument("b", type=Path, metavar="B", help="the later result")
    parser.add_argument("--fail-on-slower", action="store_true", help="exit code 1 if anything is slower in B")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
