"""Time, randomness and ids are injected: only `wal/clock.py` may get them from the machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

ALLOWED = "wal/clock.py"
BANNED = re.compile(
    r"""
    time\.(time|monotonic|perf_counter|process_time|thread_time|sleep)(_ns)?
    | (datetime\.)?(datetime|date)\.(now|utcnow|today)
    | random(\..*)? | numpy\.random(\..*)? | secrets(\..*)?
    | uuid\.uuid[14] | os\.(urandom|getrandom)
    """,
    re.VERBOSE,
)


def references(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of each reference in a file, with import aliases resolved."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            dotted = ast.unparse(node)
            first, dot, rest = dotted.partition(".")
            if first in names:
                yield node.lineno, names[first] + dot + rest


def banned(tree: ast.AST) -> list[tuple[int, str]]:
    return sorted({(line, name) for line, name in references(tree) if BANNED.fullmatch(name)})


def test_nobody_but_the_clock_asks_for_time_or_chance(sources: Sequence[Any]) -> None:
    found = [
        f"{source.path}:{line} {name}"
        for source in sources
        if source.path != ALLOWED
        for line, name in banned(source.tree)
    ]
    assert found == [], "take a Clock or Ids object as a parameter"


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(1)",
        "import time as t\nt.monotonic_ns()",
        "from time import perf_counter\nperf_counter()",
        "import time\nclock = time.time",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime as d\nd.utcnow()",
        "import random\nrandom.random()",
        "from random import choice\nchoice([1])",
        "import numpy as np\nnp.random.default_rng()",
        "import uuid\nuuid.uuid4()",
        "from uuid import uuid4 as new\nnew()",
        "import os\nos.urandom(8)",
        "import secrets\nsecrets.token_hex()",
    ],
)
def test_the_rule_sees_every_spelling(code: str) -> None:
    assert banned(ast.parse(code))


@pytest.mark.parametrize("code", ["import uuid\nuuid.UUID(int=1)", "clock.sleep(1)", "import os\nos.getpid()"])
def test_the_rule_lets_the_rest_pass(code: str) -> None:
    assert not banned(ast.parse(code))
