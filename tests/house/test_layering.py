"""One direction, no cycles: `memtable` and `wal` import no other package, `flush` imports both, `ingest` all three.

`import memwal` loads no heavy module.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

MAY_IMPORT = {
    "memtable": {"memtable"},
    "wal": {"wal"},
    "flush": {"flush", "memtable", "wal"},
    "ingest": {"ingest", "flush", "memtable", "wal"},
}
ROOT = Path(__file__).resolve().parent.parent.parent
OURS = {*MAY_IMPORT, "tests", "bench"}


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the top-level name of each import of a file, including imports in functions and by `import_module("…")`.

    For imports of memwal, yield the package inside memwal.
    """
    return (name.removeprefix("memwal.").split(".")[0] for name in dotted(tree, package))


def dotted(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (package if node.level else f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                yield str(node.args[0].value)


def violations(sources: Sequence[Any]) -> list[str]:
    return [
        f"{source.path} imports {name}"
        for source in sources
        for name in imported(source.tree, source.package)
        if name in OURS and name not in MAY_IMPORT[source.package]
    ]


def test_imports_point_down(sources: Sequence[Any]) -> None:
    assert violations(sources) == []


@pytest.mark.parametrize(
    "code",
    [
        "import memwal.flush.sst.files",
        "def f():\n    from memwal.ingest import errors",
        "def f():\n    from memwal import wal",
        "import importlib\nimportlib.import_module('memwal.wal')",
    ],
)
def test_the_rule_sees_every_way_to_import(code: str) -> None:
    assert set(imported(ast.parse(code), "memtable")) & {"flush", "ingest", "wal"}


def test_modules_have_no_name_that_hides_or_says_nothing(sources: Sequence[Any]) -> None:
    meaningless = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    taken = [
        source.path
        for source in sources
        if (name := source.path.rsplit("/", 1)[1].removesuffix(".py")) in meaningless or name in sys.stdlib_module_names
    ]
    assert taken == []


HEAVY = (
    *("lance", "pyarrow", "pyarrow.flight", "numpy", "pandas", "polars", "datafusion", "faiss", "tantivy", "sqlglot"),
    *("pyspark", "py4j", "pydantic", "typer", "rich", "aiobotocore", "confluent_kafka", "fastavro", "opentelemetry"),
    *("asyncio", "dataclasses", "difflib", "importlib.metadata", "inspect", "json", "logging"),
)
"""Modules that take from 1 ms (`inspect`) to 1 s (`pyspark`) to import; `memwal` loads them when they are needed."""


def test_importing_memwal_loads_no_heavy_module() -> None:
    code = f"import sys; import memwal; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []


def test_the_heavy_modules_are_installed() -> None:
    assert [name for name in HEAVY if importlib.util.find_spec(name) is None] == []
