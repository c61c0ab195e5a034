"""Random filters: every level finds the same rows, and no allowed filter ends a process or fills its memory.

Each search has a seed, and finds a planted fault.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.ingest.engine.read import lance_scans
from memwal.memtable import InvalidRows
from memwal.memtable.filter import allowed, translation
from memwal.memtable.filter import predicate as predicates
from tests.conftest import environment, extent
from tests.support.snapshots import snapshot

pytestmark = pytest.mark.usefixtures("every_index")
RUNNER = Path(__file__).parents[1] / "scripts" / "filter_runner.py"
DEEP = pa.struct([("i", pa.int64()), ("s", pa.string())])
FIELDS = pa.struct([("i", pa.int64()), ("s", pa.string()), ("b", pa.bool_()), ("g", pa.float32()), ("deep", DEEP)])
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("i", pa.int64()),
        ("u", pa.uint8()),
        ("f", pa.float64()),
        ("g", pa.float32()),
        ("m", pa.decimal128(10, 2)),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("d", pa.date32()),
        ("sec", pa.timestamp("s")),
        ("us", pa.timestamp("us")),
        ("t", pa.timestamp("ns")),
        ("st", FIELDS),
        ("l", pa.list_(pa.struct([("i", pa.int64()), ("g", pa.float32())]))),
    ]
)
INDEXED = ("i", "f", "g", "s", "b", "us")
TEXTS = ("", "a", "aB", "a\\B", "aBc", "abc", "%", "10", "1")
NUMBERS = (
    *("i", "id", "u", "f", "g", "m", "st.g", "st.i", "st.deep.i", "l[1].i", "l[i].i", "l[1].g", "length(s)", "abs(f)"),
    *("coalesce(i, u)", "coalesce(st.i, i)", "-f", "i + u", "round(f, -1)", "trunc(m)", "sqrt(f)", "power(f, 2)"),
    *("array_length(l)", "regexp_count(s, 'a')", "nullif(f, 0)", "i % 3"),
)
WORDS = (
    *("s", "st.s", "st.deep.s", "upper(s)", "replace(s, '', 'x')", "concat(s, 'B')", "coalesce(st.s, s)"),
    "substr(s, 2, 1)",
)
TIMES = ("sec", "us", "coalesce(sec, us)", "date_trunc('minute', us)", "timestamp '1970-01-01 00:00:01'")
FINE = "1970-01-01 00:00:00.000000001"
FINE_TIMES = (
    *("timestamp '1970-01-01'", "cast('1970-01-01' as timestamp)", f"to_timestamp_nanos('{FINE}')"),
    "date '1970-01-01'",
)
LITERALS = (
    *("0", "-0.0", "0.1", "1", "-2", "2 - 3", "0.05 + 0.05", "1 - 1", "2.5", "255 + 1", "cast(0 as double)", "1e1"),
    "3",
)
PATTERNS = ("a%", "a\\\\B%", "a\\B%", "\\a%", "%B", "_", "a\\%", "%")
OTHERS = (
    *(
        "m + 1 > 1.5",
        "abs(i) > 1",
        "d > date '1970-01-01'",
        "m > decimal(8, 3) '0.500'",
        "isnan(f)",
        "regexp_like(s, 'a')",
        "st.b",
        "b",
    ),
    *("regexp_match(s, '^1') is null", "regexp_match(st.s, 'B$')", "st.deep is null", "not regexp_match(s, 'a')"),
)


def rows(draw: random.Random, count: int) -> pa.Table:
    floats = (0.0, -0.0, 0.1, 1.0, 1.5, -2.0, 2.5, float("nan"))

    def column(values: Any) -> list[Any]:
        return [None if draw.random() < 0.15 else draw.choice(values) for _ in range(count)]

    def structs(**fields: list[Any]) -> list[Any]:
        made = [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
        return [None if draw.random() < 0.1 else struct for struct in made]

    integers, texts = range(-2, 4), TEXTS
    deep = structs(i=column(integers), s=column(texts))
    items = structs(i=column(integers), g=column(floats))
    columns = {
        "id": list(range(count)),
        "i": column(integers),
        "u": column((0, 1, 3, 255)),
        "f": column(floats),
        "g": column(floats),
        "m": [None if value is None else Decimal(value) / 2 for value in column(range(-4, 5))],
        "s": column(texts),
        "b": column((True, False)),
        "d": column(range(3)),
        "sec": column(range(3)),
        "us": column((0, 1, 1_000_000, 1_500_000)),
        "t": column(integers),
        "st": structs(i=column(integers), s=column(texts), b=column((True, False)), g=column(floats), deep=deep),
        "l": [None if draw.random() < 0.1 else draw.choices(items, k=draw.randrange(3)) for _ in range(count)],
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def condition(draw: random.Random) -> str:
    operator = draw.choice(("=", "!=", "<", "<=", ">", ">=", "is distinct from", "is not distinct from"))
    negated = draw.choice(("", "not "))
    number, literal = draw.choice(NUMBERS), draw.choice(LITERALS)
    kind = draw.randrange(12)
    if kind < 3:
        return f"{number} {operator} {literal}" if kind else f"{literal} {operator} {number}"
    if kind == 3:
        return f"{number} {negated}in ({', '.join(draw.choice(LITERALS) for _ in range(draw.randrange(1, 6)))})"
    if kind == 4:
        return f"{number} {negated}between {draw.choice(LITERALS)} and {literal}"
    if kind == 5:
        return f"{draw.choice(WORDS)} {negated}{draw.choice(('like', 'ilike'))} '{draw.choice(PATTERNS)}'"
    if kind == 6:
        text = draw.choice(TEXTS)
        return draw.choice(
            (f"{draw.choice(WORDS)} {operator} '{text}'", f"starts_with(s, '{text}')", "regexp_match(s, 'a')")
        )
    if kind == 7:
        return f"{draw.choice(TIMES)} {operator} {draw.choice(TIMES)}"
    if kind == 8:
        return f"t {operator} {draw.choice(FINE_TIMES)}"
    if kind == 9:
        return f"{draw.choice((*SCHEMA.names, *NUMBERS, *WORDS))} is {negated}null"
    if kind == 10:
        return draw.choice(OTHERS)
    return f"b is {negated}{draw.choice(('true', 'false', 'null'))}"


def predicate(draw: random.Random, depth: int = 0) -> str:
    kind = draw.random()
    if depth > 2 or kind < 0.5:
        return condition(draw)
    if kind < 0.65:
        return f"not ({predicate(draw, depth + 1)})"
    if kind < 0.75:
        return f"({predicate(draw, depth + 1)}) is {draw.choice(('null', 'true', 'not false'))}"
    return f"({predicate(draw, depth + 1)} {draw.choice(('and', 'or'))} {predicate(draw, depth + 1)})"


def compared(seed: int, count: int, place: Path) -> Iterator[str]:
    """Yield "" for each filter that Lance accepts, or the filter if its rows differ in memory, in the base and beside
    indexes.
    """
    draw = random.Random(seed)
    table = rows(draw, 60)
    base = lance.write_dataset(table, "memory://")
    indexed = lance.write_dataset(table, place / str(seed))
    for name in INDEXED:
        indexed.create_scalar_index(name, "BTREE")
    indexed, above = lance.dataset(place / str(seed)), snapshot(table, *INDEXED)

    def found(read: Callable[[str], Any], filter: str) -> Any:
        try:
            return read(filter)
        except (ValueError, OSError, RuntimeError, InvalidRows):
            return "fails"

    def in_base(filter: str) -> Any:
        return base.to_table(filter=filter)["id"].to_pylist()

    def by_index(filter: str) -> Any:
        return indexed.scanner(**lance_scans.filtered(filter)).to_table()["id"].to_pylist()

    def in_memory(filter: str) -> Any:
        return np.flatnonzero(above.where(filter, above.live())).tolist()

    for filter in (predicate(draw) for _ in range(count)):
        try:
            base.scanner(filter=filter).explain_plan()
        except (ValueError, OSError, RuntimeError):
            continue  # Lance rejects it, and so does a reader
        wanted = found(in_base, filter)
        differs = wanted != "fails" and (found(by_index, filter), found(in_memory, filter)) != (wanted, wanted)
        yield filter if differs else ""


@pytest.mark.parametrize("seed", range(extent(1, 10)))
def test_every_level_finds_the_same_rows(seed: int, tmp_path: Path) -> None:
    found = list(compared(seed, 400, tmp_path))
    assert [filter for filter in found if filter] == []
    assert len(found) > 150


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Forget the plans of filters before and after a test that plants a fault in them."""
    plans = predicates._kept
    plans.cache_clear()
    yield
    plans.cache_clear()


@pytest.mark.parametrize("fault", ["an index for every pattern", "zeros of two signs", "numbers of their own type"])
def test_the_search_finds_a_planted_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_plans: None
) -> None:
    if fault == "an index for every pattern":
        monkeypatch.setattr(lance_scans, "_is_answered", lambda _: True)
    elif fault == "zeros of two signs":
        monkeypatch.setattr(translation._Writer, "_with_zeros", lambda *_: "")
    else:
        monkeypatch.setattr(translation, "_NARROW", {})
    assert any(compared(0, 400, tmp_path))


# ---- filters that would end a process --------------------------------------------------------------------------------

HUGE = ("2147483647", "9223372036854775807", "-9223372036854775808", "0", "1e300", "1000000", "99", "id", "f", "null")
STRANGE = (
    *(
        "s",
        "l",
        "t",
        "'a'",
        "'('",
        "'%'",
        "''",
        "x'00ff'",
        "[1, 2]",
        "now()",
        "interval '1 day'",
        "true",
        f"'{'y' * 900}'",
    ),
    *(
        "'Int8'",
        "'FixedSizeList(2147483647, Int64)'",
        "'second'",
        "'hex'",
        "'%Y'",
        "make_array(id)",
        "$1",
        "N'a'",
        '"q"',
    ),
)
TYPES = (
    "int",
    "string",
    "timestamp(9)",
    "decimal(38, 10)",
    "decimal(76, 75)",
    "date",
    "int[2147483647]",
    "blob",
    "double",
)


def hostile(draw: random.Random, names: list[str], depth: int = 0) -> str:
    """Return a random filter with huge numbers, unusual types and deep calls."""

    def inner() -> str:
        return hostile(draw, names, depth + 1)

    kind = draw.random()
    if depth > 3 or kind < 0.3:
        return draw.choice((*HUGE, *STRANGE))
    if kind < 0.7:
        return f"{draw.choice(names)}({', '.join(inner() for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3, 4))))})"
    if kind < 0.8:
        return draw.choice((f"cast({inner()} as {draw.choice(TYPES)})", f"{inner()}::{draw.choice(TYPES)}"))
    operator = draw.choice(("=", "+", "||", "and", "is distinct from", "like", "<<", "*", "~", "not in ("))
    return f"({inner()} {operator} {inner()}{')' if '(' in operator else ''})"


def filters_of(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    names = sorted(
        allowed.FUNCTIONS | {"array_repeat", "range", "generate_series", "array_resize", "space", "uuid", "map"}
    )
    found = [f"{hostile(draw, names)} {draw.choice(('is null', '= 1', 'is not null', '> s'))}" for _ in range(count)]
    nested = draw.choice(("cast(", "ceil(", "not (", "coalesce(", "x in (("))
    found += [nested * n + "1 1" for n in (10, 16, 24)]
    for sized in ("repeat", "lpad", "rpad", "array_repeat"):
        number = draw.choice(("2147483647", "1000000000"))
        found.append(f"{sized}(repeat(s, 99), {number}) is null")
    found.append("arrow_cast(make_array(id), 'FixedSizeList(2147483647, Int64)') is null")
    return found


def run(filters: list[str], planted: str = "", seconds: int = 120) -> subprocess.CompletedProcess[str]:
    lines = "\n".join(map(json.dumps, filters))
    command = [sys.executable, str(RUNNER), *([planted] if planted else [])]
    return subprocess.run(
        command, input=lines, env=environment({}), capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.mark.parametrize("seed", range(extent(1, 10)))
def test_what_is_allowed_ends_no_process_and_is_parsed_at_once(seed: int) -> None:
    ran = run(filters_of(seed, 1_500))
    assert ran.returncode == 0, (ran.stdout[-500:], ran.stderr[-2000:])
    assert int(ran.stdout) > 100


@pytest.mark.parametrize("planted", ["types", "sizes"])
def test_the_search_finds_a_check_that_is_missing(planted: str) -> None:
    assert run(filters_of(0, 200), planted).returncode != 0
