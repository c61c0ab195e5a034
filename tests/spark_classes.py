"""Options for a quick start of the tests' Sparks, and the archive of loaded classes that they use.

A JVM that runs for seconds spends most of them loading Spark's classes and compiling code that it never runs again.
With the first compiler only, and the classes from an archive (Java's class data sharing), a small stream takes 6 s of
processor time instead of 15.

`python -m tests.spark_classes` (part of `make test`) writes the archive into the environment: it runs a small stream,
and the JVM archives its loaded classes at exit. Without an archive, or with one of another Java or of other jars, a JVM
loads classes from the jars.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
_COMPILER = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_LONGEST = 180.0
_CONFIG = """
[table]
uri = "table.lance"
key = ["id"]
columns = {id = "int64", name = "string"}
[source]
format = "json"
path = "in"
"""


def jvm_options() -> str:
    """Return the options for a JVM of Spark."""
    return f"{_COMPILER} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else _COMPILER


def environ() -> dict[str, str]:
    """Return the variables that Spark's scripts read, for a process that starts a Spark."""
    return {"SPARK_SUBMIT_OPTS": jvm_options(), "SPARK_LAUNCHER_OPTS": _COMPILER}


def main() -> None:
    """Write the archive. A failure prints one line: tests then take longer."""
    ARCHIVE.unlink(missing_ok=True)
    print("memwal: archiving Spark's classes for the tests: half a minute", flush=True)
    part = ARCHIVE.with_suffix(".part")
    with tempfile.TemporaryDirectory() as directory:
        _run_pipeline(Path(directory), part)
    if part.exists():
        part.replace(ARCHIVE)
    else:
        print("memwal: this Java archives no classes, so the tests take some minutes longer", file=sys.stderr)


def _run_pipeline(directory: Path, part: Path) -> None:
    """Run `memwal run --once` over one file, and let the JVM end, which writes `part`."""
    from pyspark import SparkContext

    from tests.command_line import run_here

    (directory / "in").mkdir()
    (directory / "in" / "rows.json").write_text('{"id": 1, "name": "a"}\n{"id": 2, "name": "b"}\n')
    config = directory / "config.toml"
    config.write_text(_CONFIG)
    variables = {"SPARK_SUBMIT_OPTS": f"{_COMPILER} -XX:ArchiveClassesAtExit={part}"}
    code, _, said = run_here(["run", str(config), "--once"], cwd=directory, environ={**os.environ, **variables})
    if code:
        raise SystemExit(f"memwal: no archive of Spark's classes: {said.strip()}")
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # a JVM of PySpark ends at the end of its input
    gateway.proc.wait(_LONGEST)


if __name__ == "__main__":
    main()
