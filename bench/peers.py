"""Compare memwal with SlateDB, LanceDB's LSM merge, Milvus Lite, Qdrant, Delta Lake and Iceberg.

    python -m bench.peers [NAME …] [--smoke] [--rounds N] [--out FILE] [--fetch]

NAME may be a pattern such as `delta_*`. memwal and its peers take turns in one run, round after round, with the same
rows. The final contents of all must have the same hash, and ratios are computed round by round, as in
`python -m bench`. Packages that the project's environment lacks are fetched once per machine (`bench.peers_fetch`);
`--fetch` only fetches them, except those of Spark. Exit code 2: a peer is not available here; 1: rows differ.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("LANCE_LOG", "critical")  # before its import: Lance logs each index it cannot describe

from bench import peers_fetch, peers_puts, peers_search, peers_spark, report
from bench.benchmark import Benchmark
from bench.peers_fetch import NotAvailable
from bench.result import BenchmarkResult, RunResult
from bench.rounds import ResultsDiffer, run
from bench.surroundings import host, versions

HERE_ALONE: tuple[Benchmark, ...] = (*peers_puts.BENCHMARKS, *peers_search.BENCHMARKS)
"""Benchmarks that run in this process; the others need a Spark of their own."""
_DISTRIBUTIONS = ("slatedb", "lancedb", "pymilvus", "milvus-lite", "qdrant-client")
_ROOT = Path(__file__).resolve().parent.parent
_LONGEST = 3600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, or all; return the exit code."""
    given = _parser().parse_args(arguments)
    given.workdir.mkdir(parents=True, exist_ok=True)
    try:
        peers_fetch.importable()
        if given.fetch:
            return 0
        names = _chosen(given.names)
        with tempfile.TemporaryDirectory(dir=given.workdir, prefix="bench-") as at:
            result = _measured(names, Path(at), given)
    except (NotAvailable, LookupError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except ResultsDiffer as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if given.out:
        result.write(given.out)
    return 0


def _measured(names: Sequence[str], at: Path, given: argparse.Namespace) -> RunResult:
    """Run every benchmark of `names`, and print each result as it ends. Raises: NotAvailable, ResultsDiffer."""
    began, found = time.perf_counter(), []
    known = {**versions(), **{name: version(name) for name in _DISTRIBUTIONS}}
    for benchmark in HERE_ALONE:
        if benchmark.name in names:
            found.append(run(benchmark, at / benchmark.name, smoke=given.smoke, rounds=given.rounds))
            print("\n".join(lines(found[-1])), flush=True)
    for title in peers_spark.BY_CONNECTOR:
        if wanted := [name for name in names if name.partition("_")[0] == title]:
            of_spark = _in_a_process(title, wanted, at, given)
            known[f"pyspark beside {title}"] = of_spark.versions["pyspark"]
            found += of_spark.benchmarks
            for each in of_spark.benchmarks:
                print("\n".join(lines(each)), flush=True)
    mode = "smoke" if given.smoke else "full"
    return RunResult(mode, given.rounds, time.perf_counter() - began, known, host(), tuple(found))


def _in_a_process(title: str, names: Sequence[str], at: Path, given: argparse.Namespace) -> RunResult:
    """Run benchmarks of one Spark connector, with the Spark that it needs. Raises: NotAvailable, ResultsDiffer."""
    connector, _ = peers_spark.BY_CONNECTOR[title]
    paths = [str(peers_fetch.spark(connector.spark))] if connector.spark else []
    paths += [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    out = at / f"{title}.json"
    options = ["--rounds", str(given.rounds), "--workdir", str(at / title), "--out", str(out)]
    command = [sys.executable, "-m", "bench.peers_spark", *names, *options, *(["--smoke"] if given.smoke else [])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        command, env=environ, cwd=_ROOT, stderr=subprocess.PIPE, text=True, timeout=_LONGEST, check=False
    )
    if ran.returncode:
        said = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise ResultsDiffer(said) if ran.returncode == peers_spark.DIFFER else NotAvailable(said)
    return RunResult.read(out)


def lines(result: BenchmarkResult) -> Iterator[str]:
    """Yield a result as text: memwal's figure, then each peer's figure and memwal's ratio to it."""
    ours, *_ = result.contenders
    yield f"{result.name}  {result.title}"
    yield f"  {ours.name:<40} {report.shown(result.figure, ours)}"
    for _, name, figure, ratio, said, _ in report.rows(result):
        yield f"  {name:<40} {figure}   {ratio}  {said}"
    for each in result.of("floor"):
        yield f"  {'storage alone':<40} {each.median('p50_ms'):.3g} ms for each, one caller"


def _chosen(names: Sequence[str]) -> list[str]:
    """Return the names of the chosen benchmarks. Raises: LookupError."""
    of_spark = [each for _, benchmarks in peers_spark.BY_CONNECTOR.values() for each in benchmarks]
    known = [each.name for each in (*HERE_ALONE, *of_spark)]
    for name in names:
        if not fnmatch.filter(known, name):
            raise LookupError(f"no benchmark is called {name}; there are {', '.join(known)}")
    return [each for each in known if not names or any(fnmatch.fnmatch(each, name) for name in names)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench.peers", description="memwal beside peers other than Lance")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks or patterns; none: all")
    parser.add_argument("--smoke", action="store_true", help="tiny values: does it run at all")
    parser.add_argument("--rounds", type=int, default=3, help="times that every contender's turn comes (3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the result")
    parser.add_argument("--workdir", type=Path, default=_ROOT / "build", help="where tables are put meanwhile")
    parser.add_argument("--fetch", action="store_true", help="bring the packages into the user's cache, nothing else")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
