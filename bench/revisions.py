"""Compare this tree with an older revision: is anything slower?

    python -m bench.revisions REVISION [NAME …] [--rounds N] [--smoke]

memwal's side of the benchmarks runs in turn from both trees, each in a process of its own; both must return the same
rows. Ratios are computed round by round: above 1 this tree is faster. The older tree is checked out temporarily and
uses the same installed libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import spark_path
from bench.benchmark import Benchmark, Contender, Sample, Side, Values, Watch
from bench.registry import chosen
from bench.result import BenchmarkResult
from bench.rounds import ResultsDiffer, run

HERE = Path(__file__).resolve().parent


class OfATree(Contender):
    """A contender that runs the code of `tree` in a process of its own, with `tree` as the package memwal.

    Raises: ChildProcessError if that process ends; its standard error has the reason.
    """

    def __init__(self, tree: Path, side: Side, benchmark: str, number: int, like: Contender, mode: str) -> None:
        super().__init__(like.name, side, like.settings, question=like.name, note=like.note)
        command = [sys.executable, "-P", str(HERE / "contender_process.py"), benchmark, str(number), mode]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, tree.parent)))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree
        )

    def prepare(self, at: Path) -> None:
        self._ask(prepare=str(at))

    def round(self, at: Path, _: Watch) -> Sample:
        found = self._ask(round=str(at))
        return Sample(**{**found, "latencies": np.array(found["latencies"])})

    def close(self) -> None:
        self._process.communicate(timeout=120)

    def _ask(self, **what: str) -> dict[str, Any]:
        asking, answering = self._process.stdin, self._process.stdout
        assert asking is not None
        assert answering is not None
        print(json.dumps(what), file=asking, flush=True)
        if not (line := answering.readline()):
            raise ChildProcessError(f"{self.name}: the process that measures it has ended")
        found: dict[str, Any] = json.loads(line)
        return found


def beside(benchmark: Benchmark, newer: Path, older: Path, mode: str) -> Benchmark:
    """Return the same benchmark with memwal's contenders of two trees."""

    def contenders(values: Values) -> Sequence[Contender]:
        ours = [(n, each) for n, each in enumerate(benchmark.contenders(values)) if each.side == "memwal"]
        trees: tuple[tuple[Path, Side], ...] = ((newer, "memwal"), (older, "lance"))
        return [OfATree(tree, side, benchmark.name, n, each, mode) for n, each in ours for tree, side in trees]

    return replace(benchmark, contenders=contenders)


def lines(result: BenchmarkResult) -> Iterator[str]:
    """Yield a line per contender with the ratio of its rounds."""
    for ratio in result.ratios():
        if ratio.memwal == ratio.lance:
            name = result.name if len(result.of("memwal")) == 1 else f"{result.name}, {ratio.memwal}"
            yield f"{name:<50} {ratio.median:.3f} x  ({ratio.low:.2f} to {ratio.high:.2f}, {ratio.rounds} rounds)"


@contextmanager
def checked_out(revision: str, at: Path) -> Iterator[Path]:
    """Check out a revision below `at`, and remove it afterwards. Raises: ValueError for an unknown revision."""
    made = _git("worktree", "add", "--detach", "--force", str(at), revision)
    if made.returncode:
        raise ValueError(f"no tree of revision {revision!r}: {made.stderr.strip().splitlines()[-1]}")
    try:
        yield at
    finally:
        _git("worktree", "remove", "--force", str(at))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=HERE.parent, capture_output=True, text=True, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; return 2 for an invalid request, 1 if the trees returned different rows, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.revisions", description=__doc__.partition("\n")[0])
    parser.add_argument("revision", help="the older tree, as git names it")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks or patterns such as 'put_*'; none: all but Spark's"
    )
    parser.add_argument("--rounds", type=int, default=9, help="times that each tree's turn comes (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny values: does it run at all")
    parser.add_argument("--workdir", type=Path, default=HERE.parent / "build", help="where tables are put meanwhile")
    given = parser.parse_args(arguments)
    mode = "smoke" if given.smoke else "full"
    given.workdir.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(dir=given.workdir) as directory,
            checked_out(given.revision, Path(directory) / "older" / "memwal") as older,
        ):
            newer = Path(directory) / "newer" / "memwal"
            newer.parent.mkdir()
            newer.symlink_to(HERE.parent, target_is_directory=True)
            for each in chosen(given.names, spark_path.BENCHMARKS):
                at = Path(directory) / each.name
                for line in lines(run(beside(each, newer, older, mode), at, smoke=given.smoke, rounds=given.rounds)):
                    print(line, flush=True)
    except (LookupError, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except ResultsDiffer as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
