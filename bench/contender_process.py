"""Run one contender in a process of its own, driven by lines of JSON; `bench.revisions` starts it in each tree.

    python -P bench/contender_process.py BENCHMARK NUMBER smoke|full        (PYTHONPATH: the tree to measure)

{"prepare": DIRECTORY} -> {}
{"round": DIRECTORY}   -> {"latencies": [seconds …], "seconds", "rows", "digest"}

It is started by its path and must import only modules that the older tree also has.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("LANCE_LOG", "critical")  # before its import: Lance logs each index it cannot describe

from bench import spark_path
from bench.benchmark import Contender, Watch
from bench.registry import ALL


def main(name: str, number: str, mode: str) -> None:
    """Serve one contender until standard input ends."""
    benchmark = next(each for each in (*ALL, *spark_path.BENCHMARKS) if each.name == name)
    contender = benchmark.contenders(benchmark.values(smoke=mode == "smoke"))[int(number)]
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        for line in sys.stdin:
            print(json.dumps(_answer(contender, json.loads(line))), file=answers, flush=True)
    finally:
        contender.close()


def _answer(contender: Contender, asked: dict[str, str]) -> dict[str, Any]:
    if "prepare" in asked:
        contender.prepare(Path(asked["prepare"]))
        return {}
    found = contender.round(Path(asked["round"]), Watch())
    took = {"latencies": found.latencies.tolist(), "seconds": found.seconds}
    return {**took, "rows": found.rows, "digest": found.digest}


if __name__ == "__main__":
    main(*sys.argv[1:])
