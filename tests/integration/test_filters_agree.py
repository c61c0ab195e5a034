"""A filter finds the same rows at every level, or every level rejects it with the same kind of error."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memwal
from memwal.ingest.errors import Invalid
from memwal.memtable import IndexSpec, InvalidRows, MemTable, row_schema, with_tombstone
from tests.messages import raises

DEEP = pa.struct([("i", pa.int64()), ("s", pa.string())])
FIELDS = pa.struct([("i", pa.int64()), ("s", pa.string()), ("b", pa.bool_()), ("g", pa.float32()), ("deep", DEEP)])
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("i", pa.int64()),
        pa.field("f", pa.float64()),
        pa.field("g", pa.float32()),
        pa.field("s", pa.string()),
        pa.field("b", pa.bool_()),
        pa.field("d", pa.date32()),
        pa.field("t", pa.timestamp("ns")),
        pa.field("m", pa.decimal128(10, 2)),
        pa.field("st", FIELDS),
        pa.field("l", pa.list_(pa.struct([("i", pa.int64()), ("g", pa.float32())]))),
    ]
)
NUMBERS = ("i", "id", "st.i", "st.deep.i", "l[1].i", "l[i].i", "length(s)", "abs(i)", "coalesce(st.i, i)")
TEXTS = ("s", "st.s", "st.deep.s", "upper(s)", "coalesce(st.s, 'z')", "concat(s, 'a')")
FLOATS, TRUTHS = ("f", "g", "st.g", "l[1].g"), ("b", "st.b")
FINE = "1970-01-01 00:00:00.000000001"
TIMES = (
    "timestamp '1970-01-01'",
    "cast('1970-01-01' as timestamp)",
    f"to_timestamp_nanos('{FINE}')",
    "date '1970-01-01'",
)
OTHERS = (
    "d > date '1970-01-01'",
    "m = 1",
    "m > decimal(8, 3) '0.500'",
    "m + 1 > 1.5",
    "isnan(f)",
    "regexp_like(s, 'a')",
    "array_length(l) = 1",
)
FAILING = ("i / 0 = 1", "i % (i - i) = 0", "CAST(s AS INT) = 5", "CAST(st.s AS INT) > 0", "regexp_match(s, '(')")


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        found: st.SearchStrategy[Any] = st.fixed_dictionaries({each.name: values(each.type) for each in kind})
    elif pa.types.is_list(kind):
        found = st.lists(values(kind.value_type), max_size=2)
    elif pa.types.is_floating(kind):
        found = st.sampled_from([0.0, -0.0, 0.1, 1.5, -2.0, float("nan")])
    elif pa.types.is_string(kind):
        found = st.sampled_from(["", "a", "b", "ab", "1", "A"])
    elif pa.types.is_boolean(kind):
        found = st.booleans()
    elif pa.types.is_date(kind):
        found = st.dates(datetime.date(1970, 1, 1), datetime.date(1970, 1, 3))
    elif pa.types.is_decimal(kind):
        found = st.integers(-2, 3).map(lambda number: Decimal(number) / 2)
    else:
        found = st.integers(-2, 3)
    return st.none() | found


ZEROS = st.sampled_from(["0", "0.0", "-0.0"])


def compared(sides: tuple[str, ...], literals: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = st.sampled_from(["=", "<", ">", "<=", ">=", "!="])
    return st.builds("{} {} {}".format, st.sampled_from(sides), operators, literals)


def conditions() -> st.SearchStrategy[str]:
    number = st.integers(-2, 3).map(str)
    several = st.lists(number, min_size=1, max_size=3).map(", ".join)
    match = "regexp_match({}, '{}'){}".format
    patterns = st.sampled_from(["a", "^1", "b$", "^$"])
    return st.one_of(
        compared(NUMBERS, number | st.sampled_from(NUMBERS)),
        compared(TEXTS, st.sampled_from(["''", "'a'", "'1'"])),
        compared(FLOATS, st.sampled_from(["0", "0.1", "1.5", "-2.0"])),
        st.builds("{} {}IN ({})".format, st.sampled_from(NUMBERS), st.sampled_from(["", "NOT "]), several),
        st.builds("{} {}IN (0.1, 1)".format, st.sampled_from(FLOATS), st.sampled_from(["", "NOT "])),
        st.builds("{} {}IN ({}, 1.5, 7, 8)".format, st.sampled_from(FLOATS), st.sampled_from(["", "NOT "]), ZEROS),
        st.builds("({0} = {1} OR {0} = 7 OR {0} = 8 OR {0} = 9)".format, st.sampled_from(FLOATS), ZEROS),
        compared(("t",), st.sampled_from(TIMES)),
        st.builds("{} BETWEEN {} AND {}".format, st.sampled_from((*NUMBERS, *FLOATS)), number, number),
        st.builds("{} LIKE '{}'".format, st.sampled_from(TEXTS), st.sampled_from(["a%", "%b", "_", "%"])),
        st.builds(match, st.sampled_from(TEXTS), patterns, st.sampled_from(["", "", " IS NULL", " IS NOT NULL"])),
        st.builds("{} IS {}".format, st.sampled_from(TRUTHS), st.sampled_from(["TRUE", "NOT TRUE", "FALSE"])),
        st.sampled_from([*SCHEMA.names, *NUMBERS, *TEXTS, *FLOATS, "st.deep"]).map("{} IS NULL".format),
        st.sampled_from([*TRUTHS, *OTHERS]),
    )


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("NOT {}".format, inner),
        st.builds("NOT ({})".format, inner),
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("({}) IS NULL".format, inner),
    )


ROWS = st.lists(st.fixed_dictionaries({field.name: values(field.type) for field in list(SCHEMA)[1:]}), max_size=12)
FILTERS = st.lists(st.recursive(conditions(), joined, max_leaves=4), min_size=4, max_size=8)


def by_lance(dataset: lance.LanceDataset, filter: str) -> list[int] | None:
    """Return the ids that Lance finds; None if Lance rejects the filter, as a reader then does at every level."""
    try:
        dataset.scanner(columns=["id"], filter=filter).explain_plan()
    except (ValueError, OSError):
        return None
    return sorted(dataset.to_table(columns=["id"], filter=filter)["id"].to_pylist())


@pytest.mark.parametrize("indexed", [False, True], ids=["no index", "indexes"])
@settings(max_examples=40)
@given(rows=ROWS, filters=FILTERS)
def test_a_memtable_finds_what_lance_finds(indexed: bool, rows: list[dict[str, Any]], filters: list[str]) -> None:
    table = pa.Table.from_pylist([{"id": number, **row} for number, row in enumerate(rows)], schema=SCHEMA)
    dataset = lance.write_dataset(table, "memory://")
    specs = [IndexSpec(name, "btree") for name in ("i", "s", "b", "d")] if indexed else []
    memtable = MemTable(row_schema(SCHEMA, ["id"]), ["id"], specs, 1)
    memtable.apply(with_tombstone(table, memtable.schema))
    snapshot = memtable.snapshot()
    for filter in filters:
        if (wanted := by_lance(dataset, filter)) is not None:
            assert np.flatnonzero(snapshot.where(filter, snapshot.live())).tolist() == wanted, filter


def test_datafusion_is_the_release_inside_pylance() -> None:
    """DataFusion evaluates filters above the base; Lance evaluates filters in the base with its own
    copy of DataFusion.
    """
    library = next(Path(lance.__file__).parent.glob("lance*.so")).read_bytes()
    assert {found.decode() for found in re.findall(rb"datafusion-sql-(\d+\.\d+\.\d+)[/\\]", library)} == {
        version("datafusion")
    }


LEVELS = ("committed", "flushed", "durable", "latest")


def chosen(rng: np.random.Generator, kind: pa.DataType) -> Any:
    """Return a random value of a type; some values are null."""
    if rng.random() < 0.3:
        return None
    if pa.types.is_struct(kind):
        return {each.name: chosen(rng, each.type) for each in kind}
    if pa.types.is_list(kind):
        return [chosen(rng, kind.value_type) for _ in range(rng.integers(3))]
    if pa.types.is_string(kind):
        return str(rng.choice(["", "a", "b", "1"]))
    number = int(rng.integers(-2, 4))
    if pa.types.is_boolean(kind):
        return number > 0
    return datetime.date(1970, 1, 3 + number) if pa.types.is_date(kind) else number


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Any, str]]]:
    """Yield the same rows once per level: a table, and the read level that covers only that level."""
    rng = np.random.default_rng(3)
    rows = [{"id": n, **{field.name: chosen(rng, field.type) for field in list(SCHEMA)[1:]}} for n in range(60)]
    found, path = [], tmp_path_factory.mktemp("levels")
    for level in LEVELS:
        table = memwal.open(path / level, schema=SCHEMA, key="id", regions=2, settings={"commit": {"interval": 0}})
        table.put(pa.Table.from_pylist(rows, schema=SCHEMA))
        if level in ("committed", "flushed"):
            table.flush()
        if level == "committed":
            table.commit()
        found.append((table, level))
    yield found
    for table, _ in found:
        table.close()


def answer(table: Any, level: str, filter: str) -> Any:
    """Return the ids found and whether the count agrees; or the kind of the error."""
    try:
        found = sorted(table.scan(["id"], filter=filter, level=level).read_all()["id"].to_pylist())
        return found, table.count(filter, level=level) == len(found)
    except Invalid as error:
        return error.kind if len(error.lines) == 1 else error.lines


NOT_TRUE = ("NOT (b IS TRUE)", "not(b is /* so */ true)", "NOT (b IS TRUE OR id = 1)", "(b IS TRUE) = false")


@pytest.mark.parametrize("filter", [*NOT_TRUE, "NOT (b IS FALSE)", "b IS NOT TRUE", "NOT (NOT (b IS NOT TRUE))"])
def test_what_is_not_true_includes_null_beside_an_index(tmp_path: Path, filter: str) -> None:
    """Lance's index of a boolean column would leave out the nulls."""
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("b", pa.bool_()),
            pa.field("s", pa.string()),
            pa.field("v", pa.list_(pa.float32(), 2)),
        ]
    )
    rows = [{"id": id, "b": (True, False, None)[id % 3], "s": "web", "v": [id, 0.0]} for id in range(30)]
    wanted = [row["id"] for row in rows if row["b"] is not ("FALSE" not in filter)]
    wanted = [id for id in wanted if id != 1 or "id = 1" not in filter]
    indexes = {"b": "btree", "s": "fts", "v": "ivf_pq"}
    with memwal.open(
        tmp_path / "t", schema=schema, key="id", indexes=indexes, settings={"commit": {"interval": 0}}
    ) as t:
        t.put(rows)
        for level in ("memory", "SST", "base"):
            if level == "SST":
                t.flush()
            elif level == "base":
                t.commit()
            assert sorted(t.scan(["id"], filter=filter).read_all()["id"].to_pylist()) == wanted, level
            assert t.count(filter) == len(wanted)
            assert t.scan(["id"], filter=filter, order_by="id", limit=50).read_all()["id"].to_pylist() == wanted
            assert sorted(t.search("v", [0.0, 0.0], k=50, filter=filter)["id"].to_pylist()) == wanted
            assert sorted(t.match("s", "web", k=50, filter=filter)["id"].to_pylist()) == wanted
            assert t.sql(f"SELECT count(*) AS n FROM t WHERE {filter}").read_all().to_pylist() == [{"n": len(wanted)}]
            t.put(rows[:1])
        t.flush()
        t.commit()
        assert t.delete(filter=filter).rows == len(wanted)


ESCAPING = (r"a\B%", r"\a%", r"a\\B%", r"a\%%", r"\a_\\", r"%\B", r"\%", r"a\\\B%", "a\\", r"aB\a%")
FORMS_OF_LIKE = ("s LIKE '{}'", "NOT (s LIKE '{}')", r"s LIKE '{}' ESCAPE '\'", "s ILIKE '{}'", "s NOT LIKE '{}'")


def test_a_backslash_before_a_letter_finds_the_same_rows_beside_an_index(tmp_path: Path) -> None:
    r"""Lance's B-tree would search for texts that begin with `a\B`, where the pattern means `aB`."""
    texts = ["".join(letters) for n in range(4) for letters in itertools.product("aB\\%", repeat=n)]
    rows = pa.table({"id": range(len(texts)), "s": texts}, schema=pa.schema([SCHEMA.field("id"), SCHEMA.field("s")]))
    unindexed = lance.write_dataset(rows, "memory://")
    with memwal.open(
        tmp_path / "t", schema=rows.schema, key="id", indexes={"s": "btree"}, settings={"commit": {"interval": 0}}
    ) as table:
        table.put(rows)
        for level in ("memory", "base"):
            for filter in (form.format(pattern) for form in FORMS_OF_LIKE for pattern in ESCAPING):
                wanted = by_lance(unindexed, filter)
                assert answer(table, "latest", filter) == (wanted, True), (level, filter)
            table.flush()
            table.commit()
        wanted = by_lance(unindexed, r"s LIKE 'a\B%'")
        assert wanted
        assert table.delete(filter=r"s LIKE 'a\B%'").rows == len(wanted)


@settings(max_examples=12)
@given(filters=FILTERS)
def test_all_levels_give_one_answer(tables: list[tuple[Any, str]], filters: list[str]) -> None:
    for filter in filters:
        first, *others = (answer(table, level, filter) for table, level in tables)
        assert others == [first] * 3, filter


@pytest.mark.parametrize("filter", [*FAILING, "CAST('x' AS INT) = i", "regexp_match(s, 'a') = true", "l[1].x = 1"])
def test_a_filter_that_fails_over_a_row_is_invalid_at_every_level(tables: list[tuple[Any, str]], filter: str) -> None:
    assert [answer(table, level, filter) for table, level in tables] == ["INVALID"] * 4


def test_a_filter_that_fails_on_a_row_is_invalid_at_every_level(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("i", pa.int8())])
    rows = [{"id": id, "i": -128 if id == 0 else 1 if id < 30 else 50} for id in range(1000)]
    with memwal.open(tmp_path / "t", schema=schema, key="id", settings={"commit": {"interval": 0}}) as table:
        table.put(rows)
        failing = "abs(i) NOT IN (100) AND i = 1"
        for _ in range(2):  # in the memtable, then in the base
            for read in (table.count, lambda filter: table.scan(["id"], filter=filter).read_all()):
                with raises(Invalid):
                    read(failing)
            table.flush()
            table.commit()


def test_a_filter_that_fails_is_told_alike(tables: list[tuple[Any, str]]) -> None:
    said = set()
    for table, level in tables:
        with raises(Invalid) as error:
            table.count("i / 0 = 1", level=level)
        said.add(str(error.value))
    assert len(said) == 1


@pytest.mark.parametrize(
    "filter",
    [
        f"t = timestamp '{FINE}'",
        f"t >= cast('{FINE}' as timestamp)",
        f"t IN (timestamp '1970-01-01', to_timestamp('{FINE}'))",
    ],
)
def test_a_timestamp_that_lance_would_cut_short_is_refused_at_every_level(
    tables: list[tuple[Any, str]], filter: str
) -> None:
    said = set()
    for table, level in tables:
        with raises(Invalid) as error:
            table.count(filter, level=level)
        said.add(str(error.value))
        with raises(Invalid):
            table.delete(filter=filter)
    assert len(said) == 1


@pytest.mark.parametrize(
    "time", [f"to_timestamp_nanos('{FINE}')", f"arrow_cast('{FINE}', 'Timestamp(Nanosecond, None)')"]
)
def test_what_the_refusal_of_a_timestamp_advises_finds_nanoseconds_at_every_level(
    tables: list[tuple[Any, str]], time: str
) -> None:
    for filter in (f"t = {time}", f"t IN ({time}, {time})", f"t > {time}", f"t BETWEEN {time} AND {time}"):
        first, *others = (answer(table, level, filter) for table, level in tables)
        assert others == [first] * 3, filter
        assert first[0], filter


@pytest.mark.parametrize("name", ["f", "g", "h"])
def test_zeros_of_both_signs_are_equal_at_every_level(tmp_path: Path, name: str) -> None:
    schema = pa.schema(
        [pa.field("id", pa.int64(), nullable=False), ("f", pa.float64()), ("g", pa.float32()), ("h", pa.float16())]
    )
    numbers = np.array([0.0, -0.0, 1.5, np.nan])
    columns = [pa.array(numbers.astype(np.dtype(width))) for width in ("f8", "f4", "f2")]
    rows = pa.table([pa.array(range(4)), *columns], schema=schema)
    with memwal.open(tmp_path / "t", schema=schema, key="id", settings={"commit": {"interval": 0}}) as table:
        table.put(rows)
        for _ in range(2):  # in the memtable, then in the base
            for zero in ("0", "0.0", "-0.0"):
                assert answer(table, "latest", f"{name} IN ({zero}, 7, 8, 9)") == ([0, 1], True)
                assert answer(table, "latest", f"{name} NOT IN ({zero}, 7, 8, 9)") == ([2, 3], True)
                assert answer(table, "latest", f"{name} = {zero} OR {name} IN (7, 8, 9)") == ([0, 1], True)
            table.flush()
            table.commit()


@pytest.mark.parametrize(
    ("filter", "wanted"),
    [
        ("st.i IS NULL", [1, 2]),
        ("st.i = 0", []),
        ("st.s = ''", []),
        ("st.deep.i IS NULL", [0, 1, 2]),
        ("NOT regexp_match(s, 'a')", [1, 2]),
        ("regexp_match(s, 'a') IS NULL", [1, 2]),
    ],
)
def test_a_field_of_a_null_struct_is_null(filter: str, wanted: list[int]) -> None:
    structs, texts = [{"i": 5, "s": "x"}, None, {}], ["a", "b", None]
    rows = [{"id": n, "st": struct, "s": text} for n, (struct, text) in enumerate(zip(structs, texts, strict=True))]
    table = MemTable(row_schema(SCHEMA, ["id"]), ["id"], [], 1)
    table.apply(with_tombstone(pa.Table.from_pylist(rows, schema=SCHEMA), table.schema))
    snapshot = table.snapshot()
    assert np.flatnonzero(snapshot.where(filter, snapshot.live())).tolist() == wanted


def test_a_filter_that_datafusion_refuses_names_it() -> None:
    table = MemTable(row_schema(SCHEMA, ["id"]), ["id"], [], 1)
    with raises(InvalidRows):
        table.snapshot().where("st.nothing = 1", table.snapshot().live())


COMPARISONS = ("{} = 0.1", "{} > 0.1", "0.1 = {}", "{} IN (0.1, 0.2)", "{} BETWEEN 0.1 AND 0.2", "{} NOT IN (0.1)")
AROUND = (
    *(
        "{}",
        "({})",
        "NOT ({})",
        "b AND {}",
        "b OR ({})",
        "NOT b AND {}",
        "b = true AND {}",
        "id BETWEEN 0 AND 9 AND {}",
    ),
    *("({}) IS TRUE", "{} IS TRUE", "({}) IS NOT TRUE", "({}) IS NULL", "({}) = false", "{} = true", "b = ({})"),
    *("(({}) OR b) IS TRUE", "({} AND b) IS NOT FALSE", "({}) != b", "({}) IN (true)", "coalesce({}, false)"),
    *("b IS TRUE AND {}", "(b = true) AND ({})", "({}) BETWEEN false AND true"),
)
CALCULATED = (
    *("{1} <= {0}", "({1}) = {0}", "{1} = ({0})", "{1} < {0}::double", "{0}::double = {1}", "abs({0}) = {1}"),
    *("{} = {}", "{} <= {}", "{} IN ({})", "{} IN ({}, 0.5)", "{} BETWEEN {} AND 0.2", "{} BETWEEN 0.1 AND {}"),
    *("NOT ({} = {})", "({} = {}) IS TRUE", "{} + 0.1 * 2 > {}", "b AND {} <= {}"),
)
RESULTS = (
    *("-(0.1)", "-(-0.1)", "(-(0.1))", "- 0.1", "0.3 - (0.2)", "0.0 - -0.1", "-(0.3 - 0.2)", "-0.1 + 0.2"),
    *("0.1::double", "(0.1)::double", "(0.2 / 2)::float", "0.05 + 0.05::double", "cast(0.1 as double)", "abs(0.1)"),
    *("0.2 - abs(0.1)", "0.2 - 0.05 - abs(0.05)", "0.2 - (0.1::double)", "0.2 - -(-0.1)", "abs(0.2) - 0.1"),
    *("abs(0.05) + 0.05", "0.05 + abs(0.05)", "(abs(0.05) + 0.05)", "CASE WHEN b THEN 0.1 ELSE 0.2 END", "g", "(g)"),
    "0.2 / 2",
    "0.05 + 0.05",
    "1 / 10.0",
    "1 / 10",
    "-0.2 / -2",
    "(0.2 / 2)",
    "0.3 - 0.2",
    "(0.1)",
    "0.2 / (1 + 1)",
)


FORMS = {"g": ("(g)", "((g))"), "h": ("(h)",), "st.g": ("(st.g)", "st['g']", "(st)['g']", "(st['g'])")}
"""Alternative forms of a column."""


@pytest.mark.parametrize("name", FORMS)
def test_numbers_beside_narrow_floats_mean_the_same(tmp_path: Path, name: str) -> None:
    """0.1 differs as float32 and float64, and Lance narrows such literals in some places only."""
    kinds = {
        "id": pa.int64(),
        "g": pa.float32(),
        "h": pa.float16(),
        "b": pa.bool_(),
        "st": pa.struct({"g": pa.float32()}),
    }
    schema = pa.schema([pa.field(each, kind, nullable=each != "id") for each, kind in kinds.items()])
    numbers = [0.1, 0.5, None, 0.2, -0.1, 0.0, 1.5]
    columns = {
        "id": range(7),
        "g": numbers,
        "h": [None if each is None else np.float16(each) for each in numbers],
        "b": [True, False, None, True, False, True, None],
        "st": [{"g": each} for each in numbers],
    }
    rows = pa.table(columns, schema=schema)
    base = lance.write_dataset(rows, tmp_path / "base.lance")
    table = MemTable(row_schema(schema, ["id"]), ["id"], [], 1)
    table.apply(with_tombstone(rows, table.schema))
    snapshot = table.snapshot()
    filters = [around.format(each.format(name)) for each in COMPARISONS for around in AROUND]
    filters += [each.format(name, result) for each in CALCULATED for result in RESULTS]
    filters += [each.format(form) for each in COMPARISONS for form in FORMS[name]]
    answers = {filter: by_lance(base, filter) for filter in filters}
    differ = [
        (filter, found, expected)
        for filter, expected in answers.items()
        if expected is not None
        and (found := np.flatnonzero(snapshot.where(filter, snapshot.live())).tolist()) != expected
    ]
    assert differ == []
    assert sum(expected is None for expected in answers.values()) < len(answers) / 10, "Lance refuses too much"
