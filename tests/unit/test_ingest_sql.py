"""SQL without a table: conditions as filters, the name `table`, and the columns and rows that a plan reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datafusion import SessionConfig, SessionContext

from memwal.ingest.engine.api.sql.plan import BARRIER, any_of, filter_of, reads_again, scans_of
from memwal.ingest.engine.api.sql.sources import Provider
from memwal.ingest.engine.api.sql.statement import Statement, expect_bounded
from memwal.ingest.errors import Invalid
from tests.messages import raises

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("Name", pa.string()),
        ("x", pa.float64()),
        ("f", pa.float32()),
        ("ok", pa.bool_()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("cost", pa.decimal128(8, 2)),
        ("raw", pa.binary()),
    ]
)


@pytest.fixture(scope="module")
def session() -> SessionContext:
    context = SessionContext(SessionConfig().set("datafusion.sql_parser.enable_ident_normalization", "false"))
    context.register_table("hidden", Provider(SCHEMA))
    context.register_view("t", context.table("hidden").limit(BARRIER))
    context.deregister_table("hidden")
    return context


def plan(session: SessionContext, query: str) -> Any:
    return session.sql(query).optimized_logical_plan()


@pytest.mark.parametrize(
    ("condition", "text", "exact"),
    [
        ("id = 5", "`id` = 5", True),
        ("5 < id", "`id` > 5", True),
        ("id = -9223372036854775807", "`id` = -9223372036854775807", True),
        ("Name <> 'it''s'", "`Name` != 'it''s'", True),
        ("Name in ('a', 'b', 'c', 'd')", "`Name` IN ('a', 'b', 'c', 'd')", True),
        ("Name not like 'a%'", "`Name` NOT LIKE 'a%'", True),
        ("Name ilike 'a%'", "`Name` ILIKE 'a%'", True),
        ("Name like 'a\\%'", None, False),
        ("x >= 1.5 and ok", "(`x` >= 1.5) AND (`ok`)", True),
        ("not ok or id is null", "(NOT (`ok`)) OR (`id` IS NULL)", True),
        ("ok is not true", "`ok` IS NOT TRUE", True),
        (
            "day between '2020-01-01' and '2020-01-03'",
            "(`day` >= arrow_cast(18262, 'Date32')) AND (`day` <= arrow_cast(18264, 'Date32'))",
            True,
        ),
        (
            "at > '2020-01-01T01:00:00+01:00'",
            "`at` > arrow_cast(1577836800000000, 'Timestamp(Microsecond, Some(\"UTC\"))')",
            True,
        ),
        ("cost = 1.5", "`cost` = cast('1.50' as decimal(8, 2))", True),
        ("raw = X'00ff'", "`raw` = X'00ff'", True),
        # Conditions with another meaning, or none, in a filter are left to DataFusion.
        ("id = -9223372036854775808", None, False),  # the digits without the sign overflow
        ("id + 1 = 5", None, False),
        ("id > 1.5", None, False),
        ("x = 'NaN'::double", None, False),
        ("id = x", None, False),
        ("length(Name) > 3", None, False),
        ("x in (0.0, 1, 2, 3)", None, False),  # there -0.0 is another number than 0.0
        ("x not in (-0.0, 1, 2, 3)", None, False),
        ("x in (1, 2, 3, 4)", "`x` IN (1.0, 2.0, 3.0, 4.0)", True),
        ("id is distinct from 5", None, False),
        ("id = 5 and id + 1 = 6", "`id` = 5", False),
        ("id = 5 or id + 1 = 6", None, False),
        ("(id = 5 and id + x = 6) or id = 7", "(`id` = 5) OR (`id` = 7)", False),
        ("not (id = 5 and id + x = 6)", None, False),
        # A float32 column is compared as float64; Lance compares it as float32.
        ("f > 0.1", "`f` >= 0.09999999403953552", False),
        ("f <= 0.1", "`f` <= 0.10000000894069672", False),
        ("f = 0.5", "`f` >= 0.4999999701976776 AND `f` <= 0.5000000596046448", False),
        ("f <> 0.5", None, False),
    ],
)
def test_conditions_as_filters(session: SessionContext, condition: str, text: str | None, exact: bool) -> None:
    (scan,) = scans_of(plan(session, f"select id from t where {condition}"))
    found = filter_of(scan.conditions, SCHEMA)
    assert found == (text, exact)


def test_without_conditions_every_row_passes_and_a_scan_without_them_widens_the_others() -> None:
    assert filter_of((), SCHEMA) == (None, True)
    assert any_of(["a = 1", "a = 1"]) == "a = 1"
    assert any_of(["a = 1", "b = 2"]) == "(a = 1) OR (b = 2)"
    assert any_of(["a = 1", None]) is None
    assert any_of([f"a = {n}" for n in range(450)]) is None  # more than a filter may chain


def test_a_chain_that_is_too_long_for_a_memtable_is_left_to_datafusion(session: SessionContext) -> None:
    chain = " or ".join(f"(id = {n} and x > {n}.5)" for n in range(450))
    (scan,) = scans_of(plan(session, f"select id from t where {chain}"))
    assert filter_of(scan.conditions, SCHEMA) == (None, False)


@pytest.mark.parametrize(
    ("query", "scans"),
    [
        ("select x from t where id > 5 limit 3", [("id x", 1, 3)]),
        ("select x from t limit 3 offset 4", [("x", 0, 7)]),
        ("select x from t order by id limit 3", [("id x", 0, None)]),
        ("select x from (select * from t limit 9) where x > 1", [("x", 0, 9)]),
        ("select count(*) from t", [("", 0, None)]),
        ("select a.x from t a join t b on a.id = b.id where b.ok", [("id x", 0, None), ("id ok", 1, None)]),
    ],
)
def test_what_a_plan_reads(session: SessionContext, query: str, scans: list[tuple[str, int, int | None]]) -> None:
    planned = plan(session, query)
    found = scans_of(planned)
    assert not reads_again(planned, found)
    assert [(" ".join(each.columns or ()), len(each.conditions), each.enough) for each in found] == scans


def test_recursion_reads_again(session: SessionContext) -> None:
    query = "with recursive r as (select 1 as n union all select n + 1 from r, t where n < 5) select * from r"
    planned = plan(session, query)
    assert reads_again(planned, scans_of(planned))


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("select * from table", 'select * from "table"'),
        ("SELECT Table.id FROM Table", 'SELECT "table".id FROM "table"'),
        ("select 1 from a, table t join table", 'select 1 from a, "table" t join "table"'),
        ("select 'from table', \"table\" -- from table", "select 'from table', \"table\" -- from table"),
        ("select $$from table$$ /* from table */", "select $$from table$$ /* from table */"),
        ("select e'it\\'s from table' from table", "select e'it\\'s from table' from \"table\""),
        ("select * from table(range(3))", "select * from table(range(3))"),
    ],
)
def test_table_is_put_in_quotes_where_it_names_the_table(query: str, text: str) -> None:
    assert Statement.of(query).text == text


DEEP = {
    "sum": "select 1" + " + 1" * 401,
    "or": "select id from t where id = 1" + " or id <= 2" * 401,
    "is": "select id is true" + " is true" * 250,
    "distinct": "select 1" + " is distinct from 1" * 250,
    "cast": "select id" + "::bigint" * 250,
    "inside": f"select (1{' + 1' * 250}) + 1{' + 1' * 250}",
    "case": f"select case when id = 1 then 1{' + 1' * 250} end + 1{' + 1' * 250} from t",
    "union": " union ".join(["select 1"] * 402),
    "union in brackets": " union all ".join(["(select 1)"] * 402),
    "except": " except ".join(["select 1"] * 402),
    "join": "select 1 from t" + " join t using (id)" * 401,
    "tables": "select 1 from t" + ", t" * 401,
    "with": "with "
    + ", ".join(["c0 as (select 1 as x)", *(f"c{n} as (select x + 1 as x from c{n - 1})" for n in range(1, 250))])
    + " select * from c249",
    "names": "select 1" + ' + t.end + "case"' * 250 + " from t",
}


@pytest.mark.parametrize("query", DEEP.values(), ids=DEEP)
def test_a_query_that_nests_too_deep_is_refused(query: str) -> None:
    with raises(Invalid):
        expect_bounded(query, {})


FLAT = {
    "sum": "select 1" + " + 1" * 400,
    "list": f"select id in ({', '.join(f'-{n}' for n in range(20_000))}) from t",
    "values": f"values {', '.join(['(1, 2 + 3)'] * 20_000)}",
    "columns": f"select {', '.join(['coalesce(id, 0) + 1'] * 1000)} from t where id = 1{' or id <= 2' * 390}",
    "when": f"select case {'when id = 1 and x < 2 then 3 + 4 ' * 1000} else 5 end from t",
    "pairs": f"select 1 from t where {' or '.join(['(id = 1 and x between 2 and 3)'] * 350)}",
    "with": "with " + ", ".join(f"c{n} as (select id + 1 from t where x > 1 or ok)" for n in range(100)) + " select 1",
    "union": " union all ".join(["(select id + 1 from (select * from t where id = 1 or ok) u)"] * 390),
    "texts": f"select {', '.join(['e' + chr(39) + 'it' + chr(92) + chr(39) + 's + 1 - 2' + chr(39)] * 500)}",
}


@pytest.mark.parametrize(
    "query",
    ["select " + "cast(" * 48 + "x" + " as int)" * 48, "select " + "ceil(" * 30, "select 1 where " + "x in ((" * 25],
)
def test_a_query_that_is_read_for_ever_is_refused(query: str) -> None:
    with raises(Invalid):
        expect_bounded(query, {})


@pytest.mark.parametrize("query", FLAT.values(), ids=FLAT)
def test_what_is_beside_one_another_does_not_nest(query: str) -> None:
    expect_bounded(query, {})


@pytest.mark.parametrize(
    "query",
    [
        "select repeat('x', 250001)",
        "select REPEAT ('abc', 100000)",
        "select repeat(repeat('x', 1000), 1000)",
        "select rpad(v, 1000000000) from t",
        'select "lpad"(v, $n) from t',
        "select array_repeat(1, 1000000)",
        "select array_resize(make_array(1), 1000000, 2)",
        "select array_length(generate_series(1, 1000000))",
        "select unnest(range(1000000))",
        "select id, range(-1000000, 0) from t",
        "select range(0, 10000000, 5)",
        "select repeat('x', (300000)), lpad('x', ((3)))",
        "select lpad('x', 300000::bigint)",
        "select array_resize([1], ((300000)::int)::bigint, 0)",
        "select range((1), 1000000::bigint)",
        "select (select max(id) from t) a, range(1, 1000000) as r",
        "select 1 from t union select id, range(1, 1000000)",
        "select 1 from (select (select 1 from t), range(1, 1000000) as x)",
    ],
)
def test_values_of_any_size_are_refused(query: str) -> None:
    with raises(Invalid):
        expect_bounded(query, {"n": pa.scalar(1_000_000)})


@pytest.mark.parametrize("number", [300_000, np.int64(300_000), np.uint32(300_000), pa.scalar(300_000)])
@pytest.mark.parametrize("call", ["repeat('x', $n)", "lpad('x', $n, 'y')", "array_resize([1], $n, 0)"])
def test_a_parameter_is_bounded_as_a_number_in_the_query_is(call: str, number: object) -> None:
    with raises(Invalid):
        expect_bounded(f"select {call}", {"n": number})
    expect_bounded(f"select {call}", {"n": type(number)(30) if not isinstance(number, pa.Scalar) else pa.scalar(30)})


@pytest.mark.parametrize(
    "query",
    [
        "select repeat('x', 99), lpad(v, 1000), array_resize([1, 2], 1000, 0), repeat(v, 2) from t",
        "select 'repeat(x, 1000000)', repeat from t where repeat = 1000000",
        "select $n + 1, $$lpad(v, 1000000)$$",
        "select * from range(1, 1000000000) a, generate_series(1, 1000000000) b cross join range(1, 1000000000) c",
        "select * from (select 1 from t) a, range(1, 1000000) b join t on t.id = b.value, range(1, 1000000) c",
        "select cast(x as decimal(8, 2)), x::timestamp with time zone, arrow_cast(x, 'Int8') from t as u(x)",
        "with few (a) as (select 1), repeated as (select a, b.c from few b) select max(a) from repeated where a in (1)",
        "select ((((((1",
        "select case case case case abs((((",
        'select "upper"(v), sum(id) filter (where id > 1) over (partition by v order by id) from (values (1)) as t(a)',
    ],
)
def test_values_of_a_bounded_size_are_made(query: str) -> None:
    expect_bounded(query, {"n": 1_000_000, "t": "x"})


@pytest.mark.parametrize(
    "query",
    [
        "select * from t tablesample (10)",
        "select * from t TABLESAMPLE system (10) repeatable (3)",
        "select * from t as u tablesample 10 percent where id = 1",
        'select * from "table" /* some */ tablesample row (10 rows)',
        "select * from (select 1) tablesample (bucket 1 out of 5)",
        "select * from range(1, 5) tablesample (10)",
        "select 1 where 1 in (select id from t sample (10))",
        "select * from t sample x",
        "select * from t sample $n",
        "select * from (select 1) sample (10)",
        "select * from (select 1) sample ($n)",
    ],
)
def test_samples_are_refused(query: str) -> None:
    with raises(Invalid):
        expect_bounded(query, {})


@pytest.mark.parametrize(
    "query",
    [
        "select sample, t.tablesample, x as sample from sample where sample in (1) and tablesample = 2",
        "select id sample, x tablesample from t",
        "select id sample from t as sample join tablesample on sample > 1 order by sample limit 1",
        "with sample (a) as (select 1), tablesample (b) as (select 2) select * from sample, tablesample",
        "select * from (select 1) sample(v)",
        "select * from (values (1)) sample (v)",
        "select sum(id) over sample from t window sample as (order by id)",
        "select * from t where v = 't tablesample (10)' -- t tablesample (10)",
        'select * from t "sample" where x = 1 and not sample',
    ],
)
def test_names_of_samples_are_none(query: str) -> None:
    expect_bounded(query, {})


def test_columns_in_errors_are_those_that_were_typed() -> None:
    statement = Statement.of("select *\nfrom table wher x")
    assert statement.typed(2, len('from "table" ') + 1) == len("from table ") + 1
    assert statement.typed(1, 8) == 8


def test_a_condition_never_reaches_a_scan_as_an_expression_of_pyarrow(session: SessionContext) -> None:
    """In expressions of pyarrow NULL NOT IN (1) is true and NaN > 1 is false."""
    assert (
        "filter_expr"
        not in session.sql("select id from t where id not in (1) and x > 1").execution_plan().display_indent()
    )
    with raises(Exception):
        Provider(SCHEMA).scanner(columns=["id"], filter=pa.compute.field("id") == 1)
    with raises(Invalid):
        Statement.of(" -- nothing")
