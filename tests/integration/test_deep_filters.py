"""Filters with many chained operators or values of any size: rejected before planning, since a planner's stack or
memory use would end the process.
"""

from __future__ import annotations

import subprocess
import sys
from bisect import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal.ingest.errors import Invalid
from memwal.memtable import InvalidRows
from memwal.memtable.filter.expression import parse
from tests.conftest import environment
from tests.messages import raises

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
CHAINS: dict[str, Callable[[int], str]] = {
    "sum": lambda n: "id = 1" + " + 1" * n,
    "or": lambda n: "id = 1" + " or id = 2" * n,
    "and not": lambda n: "id = 1" + " and not id = 2" * n,
    "is true": lambda n: "id = 1" + " is true" * n,
    "is null": lambda n: "id is null" + " is null" * n,
    "equal": lambda n: "id = 1" + " = true" * n,
    "cast": lambda n: "id" + "::bigint" * n + " = 1",
    "shift": lambda n: "id" + " << 0" * n + " = 1",
    "bits": lambda n: "id" + " & 1" * n + " = 1",
    "like": lambda n: "v" + " like 'a'" * n,
    "in": lambda n: "id = 1" + " in (true)" * n,
    "not": lambda n: "not " * n + "id = 1",
    "minus": lambda n: "id = " + "- " * n + "1",
    "text": lambda n: "v = 'a'" + " || 'a'" * n,
    "case": lambda n: "id = case" + " when id = 1 then 2" * n + " else 3 end",
}
FAR = 1_500
RUN = """
import sys, memwal
table = memwal.open(sys.argv[1], read_only=True)
for line in sys.stdin:
    for level in ("latest", "committed"):
        try:
            table.scan(filter=line.strip(), level=level).read_all()
        except memwal.Invalid:
            pass  # Lance knows no such operator
print("alive")
"""


@pytest.fixture
def table(tmp_path: Path) -> Any:
    with memwal.open(
        tmp_path / "t.lance", schema=SCHEMA, key="id", regions=1, settings={"commit": {"interval": "0s"}}
    ) as opened:
        opened.put([{"id": 1, "v": "a"}, {"id": 2, "v": "b"}])
        opened.flush()
        opened.commit()
        opened.put([{"id": 3, "v": "c"}])
        yield opened


def expect_refused(table: Any, filter: str) -> None:
    """Check that every read and a delete reject a filter, and that no row is deleted."""
    for call in (
        lambda: table.scan(filter=filter).read_all(),
        lambda: table.scan(filter=filter, level="committed").read_all(),
        lambda: table.count(filter=filter),
        lambda: table.delete(filter=filter),
    ):
        with raises(Invalid) as refused:
            call()
        assert len(str(refused.value)) < 500
    assert table.count() == 3


def test_a_long_chain_is_refused_by_every_read(table: Any) -> None:
    for chain in CHAINS.values():
        expect_refused(table, chain(FAR))


def test_a_filter_that_makes_values_of_any_size_is_refused_by_every_read(table: Any) -> None:
    for filter in ("v = repeat('x', 1000000000)", "lpad(v, 1000000000) = 'x'", "repeat(v, id) = 'x'"):
        expect_refused(table, filter)
    assert table.count(filter="lpad(v, 3, '0') = '00a' or repeat(v, 2) = 'cc'") == 2


def test_a_filter_that_its_parser_reads_for_ever_is_refused_by_every_read(table: Any) -> None:
    for filter in ("cast(" * 49 + "id" + " as int)" * 49 + " = 1", "ceil(" * 30):
        expect_refused(table, filter)
        with raises(Invalid):
            table.sql(f"select id from table where {filter}")
    assert table.count(filter="cast(" * 12 + "id" + " as bigint)" * 12 + " = 1") == 1


def longest(chain: Callable[[int], str]) -> str:
    """Return the longest chain that is allowed."""

    def is_refused(length: int) -> bool:
        try:
            parse(chain(length), SCHEMA.names)
        except InvalidRows:
            return True
        return False

    return chain(bisect(range(1, 500), False, key=is_refused))


def test_the_longest_chains_that_are_allowed_end_no_process(table: Any) -> None:
    """Evaluate the chains in a separate process, both on the base alone, which Lance plans, and at all levels."""
    lines = "\n".join(longest(chain) for chain in CHAINS.values())
    uri = str(table.status()["table"])
    table.flush()
    ran = subprocess.run(
        [sys.executable, "-c", RUN, uri],
        input=lines,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "alive\n"), ran.stderr[-2000:]


def test_filters_as_people_write_them_are_allowed() -> None:
    values = ", ".join(str(-n) for n in range(20_000))
    ranges = " or ".join(f"id between {n} and {n + 1}" for n in range(120))
    words = " and ".join(f"not (v like '{n}%' or v is null)" for n in range(60))
    for filter in (f"id in ({values})", ranges, words, "id = 1" + " or id = 2" * 399):
        assert parse(filter, SCHEMA.names)
