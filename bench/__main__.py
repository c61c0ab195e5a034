"""`python -m bench`: run benchmarks, store the result, render it, or profile one benchmark.

python -m bench                      run everything; replace results/full.json, the tables of README.md, the pictures
python -m bench put_durable 'get_*'  run some benchmarks and print them; --out FILE stores the result
python -m bench growth freshness     run parts of the whole system, which have no peer
python -m bench --smoke              run with tiny values, to check that everything works
python -m bench --profile NAME       print where memwal spends its time in one benchmark
python -m bench --render             write README.md and the pictures again from results/full.json
python -m bench compare A B          print what changed beyond the noise between two stored results
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Lance logs a line for each index that it cannot describe. Set before its import, with a level that its Python and its
# Rust code both accept.
os.environ.setdefault("LANCE_LOG", "critical")

from rich.console import Console

from bench import part_report, report
from bench.benchmark import Benchmark
from bench.chart import svg
from bench.compare import NOISE, compare, kept, summary, table
from bench.hotspots import profile
from bench.parts import Part, PartResult
from bench.plots import pictures
from bench.registry import ALL, chosen, matching
from bench.result import BenchmarkResult, RunResult
from bench.rounds import ResultsDiffer, run
from bench.surroundings import host, versions
from bench.whole_system import FAILED, PARTS, measured

HERE = Path(__file__).resolve().parent
KEPT = HERE / "results" / "full.json"
ROUNDS = {"smoke": 2, "full": 5}
COLOURS = {"faster": "green", "slower": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    2: invalid request. 1: the sides returned different rows, a part failed, or `compare --fail-on-slower` found
    something slower.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["compare"]:
        return _compare(words[1:])
    given = _parser().parse_args(words)
    try:
        if given.list:
            titles = {each.name: each.title for each in ALL} | {part.name: part.title for part in PARTS}
            print("\n".join(f"{name:<20} {title}" for name, title in titles.items()))
        elif given.render:
            render(RunResult.read(KEPT))
        elif given.profile:
            with _directory(given.workdir) as at:
                print(profile(chosen([given.profile])[0], Path(at), smoke=given.smoke))
        else:
            return _run(given)
    except (LookupError, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except ResultsDiffer as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def measure(
    benchmarks: Sequence[Benchmark],
    at: Path,
    *,
    smoke: bool,
    rounds: int,
    console: Console,
    parts: Sequence[Part] = (),
) -> RunResult:
    """Run benchmarks, then parts, below the directory `at`, and print each result as it ends. Raises: ResultsDiffer."""
    began = time.perf_counter()
    found, of_parts = [], []
    with console.status("") as status:
        for each in benchmarks:
            found.append(run(each, at / each.name, smoke=smoke, rounds=rounds, progress=status.update))
            _show(found[-1], console)
        for part in parts:
            status.update(f"{part.name}: {part.title}")
            of_parts.append(measured(part, at / part.name, smoke=smoke))
            _show_part(of_parts[-1], console)
    seconds, mode = time.perf_counter() - began, "smoke" if smoke else "full"
    return RunResult(mode, rounds, seconds, versions(), host(), tuple(found), tuple(of_parts))


def render(result: RunResult) -> None:
    """Write the tables of README.md and the pictures of a stored result."""
    report.update(HERE / "README.md", result)
    for name, drawn in {"ratios.svg": svg(result), **pictures(result)}.items():
        (HERE / name).write_text(drawn, encoding="utf-8")


def _run(given: argparse.Namespace) -> int:
    rounds = given.rounds or ROUNDS["smoke" if given.smoke else "full"]
    known = [*(each.name for each in ALL), *(part.name for part in PARTS)]
    names = matching(given.names, known) if given.names else known
    benchmarks, parts = [each for each in ALL if each.name in names], [part for part in PARTS if part.name in names]
    console = Console(highlight=False, soft_wrap=True)
    with _directory(given.workdir) as at:
        result = measure(benchmarks, Path(at), smoke=given.smoke, rounds=rounds, console=console, parts=parts)
    if given.out:
        result.write(given.out)
    elif not given.names and not given.smoke:
        result.write(KEPT)
        render(RunResult.read(KEPT))
        console.print(f"\nkept in {KEPT.relative_to(HERE.parent)}; tables and pictures in bench/ are rendered anew")
    return int(any(each.missing.startswith(FAILED) for each in result.parts))


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
    for line in (*part_report.changes(a, b), *summary(found)):
        console.print(line)
    return int(given.fail_on_slower and found.count("slower") > 0)


def _show(result: BenchmarkResult, console: Console) -> None:
    console.print(f"\n[bold]{result.name}[/]  {result.title}")
    for memwal, lance, figure, ratio, said, bar in report.rows(result):
        colour = COLOURS.get(said, "default")
        told = f"[{colour}]{ratio:<24}{said:<8}[/]bar {bar:<13}"
        console.print(f"  {told} memwal {memwal}, Lance {figure}  [dim]{lance}[/]")


def _show_part(part: PartResult, console: Console) -> None:
    console.print(f"\n[bold]{part.name}[/]  {part.title}")
    for line in part_report.lines(part):
        style = {"held": "green", "missed": "red"}.get(next((each for each in ("held", "missed") if each in line), ""))
        console.print(line, style=style, markup=False)


def _directory(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """Create a directory for tables on the disk to be measured; the system's temporary directory may be in memory."""
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
    parser.add_argument("--render", action="store_true", help="tables and pictures anew from results/full.json")
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
