"""A filter finds the same rows at every level, or every level rejects it with the same kind of error."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.errors import Invalid
from memwal.memtable import InvalidRows, MemTable, row_schema, with_tombstone
from tests.conftest import extent
from tests.integration.test_filter_fuzz import FINE, SCHEMA, predicate, rows
from tests.messages import raises

FAILING = ("i / 0 = 1", "i % (i - i) = 0", "CAST(s AS INT) = 5", "CAST(st.s AS INT) > 0", "regexp_match(s, '(')")


def by_lance(dataset: lance.LanceDataset, filter: str) -> list[int] | None:
    """Return the ids that Lance finds; None if Lance rejects the filter, as a reader then does at every level."""
    try:
        dataset.scanner(columns=["id"], filter=filter).explain_plan()
    except (ValueError, OSError):
        return None
    return sorted(dataset.to_table(columns=["id"], filter=filter)["id"].to_pylist())


def test_datafusion_is_the_release_inside_pylance() -> None:
    """DataFusion evaluates filters above the base; Lance evaluates filters in the base with its own
    copy of DataFusion.
    """
    library = next(Path(lance.__file__).parent.glob("lance*.so")).read_bytes()
    assert {found.decode() for found in re.findall(rb"datafusion-sql-(\d+\.\d+\.\d+)[/\\]", library)} == {
        version("datafusion")
    }


LEVELS = ("committed", "flushed", "durable", "latest")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Any, str]]]:
    """Yield the same rows once per level: a table, and the read level that covers only that level."""
    found, path = [], tmp_path_factory.mktemp("levels")
    for level in LEVELS:
        table = memwal.open(path / level, schema=SCHEMA, key="id", regions=2, settings={"commit": {"interval": 0}})
        table.put(rows(random.Random(3), 60))
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


@pytest.mark.parametrize("seed", range(extent(1, 10)))
def test_all_levels_give_one_answer(tables: list[tuple[Any, str]], seed: int) -> None:
    draw = random.Random(seed)
    for filter in (predicate(draw) for _ in range(70)):
        first, *others = (answer(table, level, filter) for table, level in tables)
        assert others == [first] * 3, filter


NOT_TRUE = ("NOT (b IS TRUE)", "not(b is /* so */ true)", "NOT (b IS TRUE OR id = 1)", "(b IS TRUE) = false")
TRUTHS = (*NOT_TRUE, "NOT (b IS FALSE)", "b IS NOT TRUE", "NOT (NOT (b IS NOT TRUE))")


def test_what_is_not_true_includes_null_beside_an_index(tmp_path: Path) -> None:
    """Lance's index of a boolean column would leave out the nulls."""
    fields = [("b", pa.bool_()), ("s", pa.string()), ("v", pa.list_(pa.float32(), 2))]
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *fields])
    rows = [{"id": id, "b": (True, False, None)[id % 3], "s": "web", "v": [id, 0.0]} for id in range(30)]
    wanted = {filter: [row["id"] for row in rows if row["b"] is not ("FALSE" not in filter)] for filter in TRUTHS}
    wanted["NOT (b IS TRUE OR id = 1)"].remove(1)
    indexes = {"b": "btree", "s": "fts", "v": "ivf_pq"}
    with memwal.open(
        tmp_path / "t", schema=schema, key="id", indexes=indexes, settings={"commit": {"interval": 0}}
    ) as t:
        t.put(rows)
        for level, step in (("memory", lambda: None), ("SST", t.flush), ("base", t.commit)):
            step()
            for filter, ids in wanted.items():
                assert sorted(t.scan(["id"], filter=filter).read_all()["id"].to_pylist()) == ids, (level, filter)
                assert t.count(filter) == len(ids)
                assert t.scan(["id"], filter=filter, order_by="id", limit=50).read_all()["id"].to_pylist() == ids
                assert sorted(t.search("v", [0.0, 0.0], k=50, filter=filter)["id"].to_pylist()) == ids
                assert sorted(t.match("s", "web", k=50, filter=filter)["id"].to_pylist()) == ids
                counted = t.sql(f"SELECT count(*) AS n FROM t WHERE {filter}").read_all().to_pylist()
                assert counted == [{"n": len(ids)}]
            t.put(rows[:1])
        t.flush()
        t.commit()
        for filter in TRUTHS:
            t.put(rows)
            t.flush()
            t.commit()
            assert t.delete(filter=filter).rows == len(wanted[filter])


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


def test_zeros_of_both_signs_are_equal_at_every_level(tmp_path: Path) -> None:
    schema = pa.schema(
        [pa.field("id", pa.int64(), nullable=False), ("f", pa.float64()), ("g", pa.float32()), ("h", pa.float16())]
    )
    numbers = np.array([0.0, -0.0, 1.5, np.nan])
    columns = [pa.array(numbers.astype(np.dtype(width))) for width in ("f8", "f4", "f2")]
    rows = pa.table([pa.array(range(4)), *columns], schema=schema)
    with memwal.open(tmp_path / "t", schema=schema, key="id", settings={"commit": {"interval": 0}}) as table:
        table.put(rows)
        for _ in range(2):  # in the memtable, then in the base
            for name, zero in itertools.product("fgh", ("0", "0.0", "-0.0")):
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
