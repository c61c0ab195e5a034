"""SQL over tables: answers, one snapshot, push-down, streams and their end, errors, the command."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest
from datafusion import SessionConfig, SessionContext

import memwal
from memwal.ingest.engine.api.reads import LEVELS, SQL_MEMORY
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.api.sql import sources
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.settings.sections import SqlSettings
from tests.conftest import Cli, OpenSmall, SmallConfig
from tests.messages import raises
from tests.support.views import within
from tests.ways import entered

WAYS = ("embedded", "flight", "two daemons", "storage")
NAN, INF = float("nan"), float("inf")
VALUES: dict[str, tuple[pa.DataType, list[Any], list[str]]] = {
    "n": (pa.int8(), [-128, -1, 0, 5, 127], ["5", "-128", "200", "1.5"]),
    "x": (pa.float64(), [0.0, -0.0, 1.5, NAN, INF, -2.5], ["0.0", "-0.0", "1.5", "'NaN'::double"]),
    "f": (pa.float32(), [0.1, -0.0, 0.5, NAN, INF], ["0.1", "0.5", "1e39", "cast(0.1 as float)"]),
    "Name": (pa.string(), ["", "a", "ab", "a'b", "A%", "table"], ["'a'", "'a''b'", "''", "'table'", "NULL"]),
    "select": (pa.binary(), [b"", b"\x00", b"a"], ["X''", "X'61'"]),
    "ok": (pa.bool_(), [True, False], ["true", "NULL"]),
    "day": (
        pa.date32(),
        [date(1970, 1, 1), date(2020, 1, 1), date(2020, 3, 29)],
        ["'2020-01-01'", "timestamp '2020-01-01 00:00:00'"],
    ),
    "at": (
        pa.timestamp("ms", "Europe/Berlin"),
        [0, 1585438200000],
        ["'2020-03-29T01:30:00'", "'1970-01-01T00:00:00Z'"],
    ),
    "cost": (pa.decimal128(8, 2), ["1.50", "-1.25", "0.00"], ["1.5", "-1.25", "1.505"]),
}
SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), *((name, kind) for name, (kind, _, _) in VALUES.items())]
)


def rows(ids: range, seed: int) -> pa.Table:
    draw = random.Random(seed)
    columns = [pa.array(ids, pa.int64())]
    for kind, values, _ in VALUES.values():
        taken = [None if draw.random() < 0.2 else draw.choice(values) for _ in ids]
        columns.append(pa.array(taken).cast(kind))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def condition(draw: random.Random, depth: int = 0) -> str:
    """Return a random condition, which DataFusion may be able to plan or not."""
    kind = draw.random()
    if depth < 3 and kind < 0.5:
        parts = [condition(draw, depth + 1) for _ in range(2)]
        joined = f" {draw.choice(['and', 'or'])} ".join(parts)
        return f"not ({parts[0]})" if kind < 0.1 else f"({joined})"
    name = draw.choice(list(VALUES))
    literals = VALUES[name][2]
    few = ", ".join(draw.choice(literals) for _ in range(draw.choice([1, 2, 5])))
    forms = [
        f'"{name}" {draw.choice(["<", "<=", ">", ">=", "=", "<>"])} {draw.choice(literals)}',
        f'{draw.choice(literals)} {draw.choice(["<", ">=", "="])} "{name}"',
        f'"{name}" {draw.choice(["", "not "])}in ({few})',
        f'"{name}" {draw.choice(["", "not "])}between {draw.choice(literals)} and {draw.choice(literals)}',
        f'"{name}" is {draw.choice(["", "not "])}null',
        f"\"Name\" {draw.choice(['like', 'not like', 'ilike'])} '{draw.choice(['a%', '%b', 'a_b', 'A'])}'",
        f"ok is {draw.choice(['', 'not '])}{draw.choice(['true', 'false', 'unknown'])}",
        "n + 1 < 6",
    ]
    return draw.choice(forms)


def filled(directory: Path, ends: ExitStack) -> Any:
    """Return a table with rows of every type at every level, newer versions and deletes above older ones; some
    columns are indexed.
    """
    indexes = {"n": "btree", "x": "btree", "Name": "btree", "day": "btree"}
    settings = {"commit": {"interval": "0s"}}
    uri = directory / "orders.v2.lance"
    table = ends.enter_context(memwal.open(uri, schema=SCHEMA, key="id", regions=2, indexes=indexes, settings=settings))
    table.put(rows(range(300), 1))
    table.flush()
    table.commit()
    table.put(rows(range(250, 350), 2))
    table.delete([3, 260])
    table.flush()
    table.put(rows(range(330, 400), 3))
    table.put(rows(range(10), 4))
    return table


@pytest.fixture(scope="module")
def module_ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory, module_ends: ExitStack) -> Any:
    """Return a filled table. Tests only read it."""
    return filled(tmp_path_factory.mktemp("owner"), module_ends)


@pytest.fixture(scope="module", params=WAYS)
def table(request: pytest.FixtureRequest, owner: Any, module_ends: ExitStack) -> Any:
    return entered(request.param, owner, module_ends)


@pytest.fixture(params=WAYS)
def changed(request: pytest.FixtureRequest, tmp_path: Path, ends: ExitStack) -> tuple[Any, Any]:
    """Return another filled table, which a test changes: a way into it, and its owner."""
    owner = filled(tmp_path, ends)
    return entered(request.param, owner, ends), owner


def by_datafusion(found: pa.Table, query: str) -> list[Any]:
    session = SessionContext(SessionConfig().set("datafusion.sql_parser.enable_ident_normalization", "false"))
    session.register_record_batches("table", [found.to_batches()])
    return values(session.sql(query).to_arrow_table())


def values(found: pa.Table) -> list[Any]:
    return sorted(map(repr, zip(*(column.to_pylist() for column in found.columns), strict=True)))


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("sql")]


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a table whose rows do not matter."""
    with memwal.open(tmp_path_factory.mktemp("sql") / "orders.lance", schema=SCHEMA, key="id") as table:
        yield table


# ---- answers -------------------------------------------------------------------------------------------------------


def test_a_field_of_a_null_struct_is_null_at_every_level(tmp_path: Path) -> None:
    """Arrow allows any value there, and DataFusion reads it."""
    fields = [pa.field("i", pa.int64()), pa.field("s", pa.string())]
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("st", pa.struct(fields))])
    hidden = pa.StructArray.from_arrays(
        [pa.array([7, 5]), pa.array(["x", "y"])], fields=fields, mask=pa.array([True, False])
    )
    rows = pa.table({"id": [1, 2], "st": hidden})
    query = "select id, st.i as i, coalesce(st.s, '-') as s, st.i is null as n from {} order by id"
    wanted = [{"id": 1, "i": None, "s": "-", "n": True}, {"id": 2, "i": 5, "s": "y", "n": False}]
    with memwal.open(tmp_path / "t", schema=schema, key="id", settings={"commit": {"interval": 0}}) as table:
        table.put(rows)
        for step in (table.flush, table.commit, lambda: None):
            own = query.format('"table"')
            assert table.sql(own).read_all().to_pylist() == wanted
            twice = f"select * from ({own}) union all ({own}) order by id"
            assert table.sql(twice).read_all().num_rows == 4
            assert table.sql('select sum(st.i) as n from "table"').read_all().to_pylist() == [{"n": 5}]
            assert table.sql(query.format("p"), tables={"p": rows}).read_all().to_pylist() == wanted
            step()


def test_conditions_mean_what_datafusion_says_of_the_same_rows(table: Any, request: pytest.FixtureRequest) -> None:
    draw = random.Random(request.node.callspec.indices["table"])
    levels = {level: table.scan(level=level).read_all() for level in LEVELS}
    refused = 0
    for _ in range(30):
        query, level = f'select id from "table" where {condition(draw)}', draw.choice(LEVELS)
        try:
            expected = by_datafusion(levels[level], query)
        except Exception:  # noqa: BLE001 - DataFusion raises bare exceptions
            refused += 1
            with pytest.raises(memwal.Invalid):
                table.sql(query, level=level).read_all()
        else:
            assert values(table.sql(query, level=level).read_all()) == expected, query
    assert refused < 10


QUERIES = [
    'select ok, count(*) as n, sum(n) as total from "table" group by 1 order by n',
    'select count(*) from "table"',
    'select a.id, b.id, a."Name" from "table" a join "table" b on a.id = b.id + 1 where a.ok and b.n > 0',
    'select id from "table" t where not exists (select 1 from "table" u where u.id = t.id + 1)',
    'with few as (select * from "table" where n = 5) select count(*), max(few.f) from few, few as g where not few.ok',
    'select id, row_number() over (partition by day order by id) from "table" where cost = 1.5',
    'with recursive r as (select 1 v union all select v + 1 from r where v < 9) select v from r join "table" on id = v',
    'select (select count(*) from "table"), (select min(id) from "table" where ok)',
    "select 1 as one",
]


def test_queries_give_what_datafusion_gives_for_the_same_rows(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = table.scan().read_all()
    for query in QUERIES:
        assert values(table.sql(query).read_all()) == by_datafusion(everything, query), query
    monkeypatch.setattr(sources, "IN_MEMORY", 0)  # rows that a query reads twice go to a file
    for query in QUERIES:
        assert values(table.sql(query).read_all()) == by_datafusion(everything, query), query


def test_names_of_tables_and_columns(owner: Any) -> None:
    rows = len(owner)
    for query in (
        "select count(*) from table",
        "SELECT COUNT(*) FROM Table",
        "select count(*) from orders",
        "select count(*) from table as t where t.id >= 0",
        "select count(table.id) from ORDERS, table where orders.id = table.id",
    ):
        assert owner.sql(query).read_all()[0].to_pylist() == [rows], query
    assert owner.sql('SELECT Name, "select" AS Other FROM table LIMIT 3').schema.names == ["Name", "Other"]
    both = owner.sql("select a.id, b.id, a.x, b.x from table a join table b on a.id = b.id limit 1")
    assert both.schema.names == ["id", "id_1", "x", "x_1"]
    assert type(owner.sql("select concat(Name, 'x') as t from table").to_pandas()) is pd.DataFrame


def test_other_tables_and_parameters(owner: Any, tmp_path: Path, ends: ExitStack) -> None:
    prices = pa.table({"id": [1, 2, 390], "price": [10, 20, 30]})
    new = ends.enter_context(memwal.open(tmp_path / "prices.lance", schema=prices.schema, key="id"))
    new.put(prices)
    query = "select sum(p.price) from table t join prices p on t.id = p.id where p.price >= $least"
    forms = [
        prices,
        prices.to_batches()[0],
        prices.to_pandas().assign(_engine=0),
        polars.DataFrame(prices),
        prices.to_reader(),
        new.scan(),
        new,
    ]
    for form in [*forms, new.sql("select * from table")]:
        assert owner.sql(query, tables={"prices": form}, parameters={"least": 20}).read_all()[0].to_pylist() == [50]
    twice = "select count(*) from p a join p b on a.id = b.id"
    assert owner.sql(twice, tables={"p": prices.to_reader()}).read_all()[0].to_pylist() == [3]
    text = "'; drop table x --"
    assert owner.sql("select $t, $n::bigint", parameters={"t": text, "n": None}).read_all().to_pylist()[0] == {
        "$t": text,
        "$n": None,
    }


NOON = datetime(2020, 1, 1, 12, tzinfo=UTC)
HOLDING: dict[str, Callable[[datetime], Any]] = {
    "plain": lambda time: time,
    "a list": lambda time: [None, NOON, time],
    "a tuple": lambda time: (time,),
    "an array": lambda time: np.array([time]),
    "an object": lambda time: {"x": "a", "y": time},
    "an object in a list": lambda time: [{"x": 1}, {"y": [time]}],
}


@pytest.mark.parametrize("form", HOLDING)
def test_times_in_a_parameter_are_exact_or_refused(orders: Any, form: str) -> None:
    """Arrow drops the microseconds of a UTC offset."""
    whole, odd = (NOON.astimezone(timezone(timedelta(hours=1, microseconds=us))) for us in (0, 5))
    with raises(memwal.Invalid):
        orders.sql("select $a", parameters={"a": HOLDING[form](odd)})
    (found,) = orders.sql("select $a", parameters={"a": HOLDING[form](whole)}).read_all()[0].to_pylist()
    assert found == pa.scalar(HOLDING[form](NOON)).as_py()


def test_a_table_without_rows_and_one_without_a_key(tmp_path: Path) -> None:
    with memwal.open(tmp_path / "log.lance", schema={"x": "int64"}, key=()) as log:
        assert log.sql("select count(*), sum(x) from table").read_all().to_pylist()[0]["count(*)"] == 0
        assert log.sql("select * from table where x > 1").read_all().num_rows == 0
        log.put([{"x": 1}] * 3)
        assert log.sql("select count(*) from log a, log b").read_all()[0].to_pylist() == [9]


def test_columns_that_somebody_added(changed: tuple[Any, Any]) -> None:
    table, owner = changed
    rows = table.count()
    lance.dataset(owner.base.uri).add_columns(pa.field("added", pa.int64()))
    assert table.sql("select count(*) from table where added is null").read_all()[0].to_pylist() == [rows]
    assert "added" in table.sql("select * from table").schema.names


# ---- one snapshot, and push-down -----------------------------------------------------------------------------------


def test_a_query_reads_one_moment(changed: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A put follows each scan that a query makes."""
    table, owner = changed
    through, puts = table.scan, list[int]()

    def scan(*args: Any, **request: Any) -> RowStream:
        found: RowStream = through(*args, **request)
        if request.get("limit") != 0:
            puts.append(1)
            owner.put(rows(range(400), 10 + len(puts)))
        return found

    monkeypatch.setattr(table, "scan", scan)
    for query in (
        "select count(*) from table a join table b on a.id = b.id where (a.n is distinct from b.n) or a.x <> b.x",
        "select count(*) from (select id, n from table where ok except select id, n from table)",
    ):
        puts.clear()
        assert table.sql(query).read_all()[0].to_pylist() == [0], query
        assert puts


@pytest.mark.parametrize(
    ("query", "columns", "filter", "limit"),
    [
        ("select Name from table where n = 5", ["n", "Name"], "`n` = 5", None),
        ("select id from table where n = 5 limit 7", ["id", "n"], "`n` = 5", 7),
        ("select id from table where n + 1 = 5 limit 7", ["id", "n"], None, None),
        ("select id from table limit 2", ["id"], None, 2),
        ("select id from table order by x limit 2", ["id", "x"], None, None),
        ("select count(*) from table where day is null", ["day"], "`day` IS NULL", None),
        (
            "select a.id from table a join table b on a.id = b.id where a.n = 5 and b.ok",
            ["id", "n", "ok"],
            "(`n` = 5) OR (`ok`)",
            None,
        ),
    ],
)
def test_what_is_asked_of_the_owner(
    orders: Any, monkeypatch: pytest.MonkeyPatch, query: str, columns: list[str], filter: str | None, limit: int | None
) -> None:
    through, asked = Table.scan, list[Any]()

    def scan(self: Any, columns: Any = None, filter: Any = None, limit: Any = None, **request: Any) -> RowStream:
        if limit != 0:
            asked.append((columns, filter, limit))
        return through(self, columns, filter, limit, **request)

    monkeypatch.setattr(Table, "scan", scan)
    orders.sql(query).read_all()
    assert asked == [(columns, filter, limit)]


def test_a_count_reads_no_column(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(*args: Any, **request: Any) -> RowStream:
        assert request.get("limit") == 0
        found: RowStream = through(*args, **request)
        return found

    through = table.scan
    monkeypatch.setattr(table, "scan", scan)
    assert table.sql("select count(*), count(1) from table").read_all()[0].to_pylist() == [table.count()]


# ---- streams -------------------------------------------------------------------------------------------------------


@pytest.fixture
def endless(orders: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every scan return rows without end; collect the number of batches of each scan, and -1 at its end."""
    given: list[int] = []

    def batches(schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        try:
            while True:
                given.append(1)
                yield pa.RecordBatch.from_arrays([pa.nulls(1000, field.type) for field in schema], schema=schema)
        finally:
            given.append(-1)

    def scan(self: Any, columns: Any = None, *args: Any, limit: Any = None, **request: Any) -> RowStream:
        del args, request
        if limit == 0:
            return through(self, columns, limit=0)
        schema = pa.schema([pa.field(name, SCHEMA.field(name).type) for name in columns])
        return RowStream(schema, batches(schema))

    through = Table.scan
    monkeypatch.setattr(Table, "scan", scan)
    return given


@pytest.mark.parametrize("end", ["close", "drop", "limit"])
def test_rows_stream_and_a_result_that_is_let_go_ends_its_scan(orders: Any, endless: list[int], end: str) -> None:
    result = orders.sql(f"select Name from table where n is null {'limit 1500' if end == 'limit' else ''}")
    if end == "limit":
        assert result.read_all().num_rows == 1500
    else:
        next(result)
        time.sleep(0.05)
        assert sum(endless) < 30
    if end == "close":
        result.close()
        with raises(memwal.Invalid):
            next(result)
    del result
    assert within(1.0, lambda: endless[-1] == -1 and not threads())


def test_a_result_that_is_closed_while_it_is_computed(orders: Any, endless: list[int]) -> None:
    result = orders.sql("select 1 as n union all select count(n) from table")
    computing = [result]
    failures: list[BaseException] = []

    def read() -> None:
        try:
            computing[0].read_all()
        except memwal.MemWalError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.1)
    result.close()
    reader.join(60)
    assert [str(each) for each in failures] == ["the result was closed; make the read again"]
    assert within(60, lambda: not threads())


def test_a_computation_without_scans_ends_with_its_result(orders: Any) -> None:
    result = orders.sql(
        "select 1 as n union all select count(*) from generate_series(1, 1000000000000) s where s.value < 0"
    )
    result.close()
    assert within(30, lambda: not threads())


def test_more_scans_than_threads_of_datafusion(owner: Any) -> None:
    """Scans of memtables evaluate filters with DataFusion, and results used as tables run in DataFusion too."""
    every = {f"t{n}": owner.sql(f"select id from table where n <> {n} or n is null or id >= 0") for n in range(8)}
    union = " union all ".join(f"select id from {name} where id < 9000" for name in every)
    assert owner.sql(union, tables=every).read_all().num_rows == 8 * len(owner)


def test_a_scan_that_fails_says_why(orders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
        raise memwal.Unavailable("the daemon was lost", {"reason": "lost"})

    through = Table.scan

    def scan(self: Any, columns: Any = None, *_: Any, limit: Any = None, **__: Any) -> RowStream:
        if limit == 0:
            return through(self, columns, limit=0)
        schema = pa.schema([pa.field(name, SCHEMA.field(name).type) for name in columns])
        return RowStream(schema, failing(schema))

    monkeypatch.setattr(Table, "scan", scan)
    for query in ("select count(n) from table", "select count(*) from table a join table b on a.n = b.n"):
        with raises(memwal.Unavailable) as lost:
            orders.sql(query).read_all()
        assert lost.value.details == {"reason": "lost"}
    assert within(60, lambda: not threads())


WIDE = "(select value as v, repeat('x', 99) as t from generate_series(1, 500000))"
JOIN = f"select max(a.t), max(b.t) from {WIDE} a join {WIDE} b on a.v = b.v"


def test_a_sort_larger_than_memory_uses_files(orders: Any, tmp_path: Path) -> None:
    """The limit is `sql.memory_max` of each way into a table; other queries name it."""
    uri = str(tmp_path / "small.lance")
    small = memwal.open(uri, schema=SCHEMA, key="id", settings={"sql": {"memory_max": "20MiB"}})
    with small as table:
        ordered = table.sql(
            "select value, repeat('x', 40) as t from generate_series(1, 500000) order by value % 1000, t, value"
        )
        first = next(ordered)["value"].to_pylist()[:3]
        assert first == [1000, 2000, 3000]
        ordered.close()
        with raises(memwal.Invalid):
            table.sql(JOIN)
    stored = memwal.open(uri, read_only=True, settings={"sql": {"memory_max": "20MiB"}})
    durable = memwal.connect(uri, fallback="durable", sql_memory_max=20 << 20)
    for table in (stored, durable):
        with table, pytest.raises(memwal.Invalid, match=r"needs more than sql\.memory_max = 20MiB at once"):
            table.sql(JOIN)
    stored = memwal.open(uri, read_only=True, settings={"sql": {"memory_max": "20MiB"}})
    stored.checkout(stored.version)
    with stored, pytest.raises(memwal.Invalid, match="20MiB"):
        stored.sql(JOIN)
    assert orders.sql(JOIN).read_all().num_rows == 1


def test_the_setting_of_sql_memory_has_one_default_and_a_least_value(tmp_path: Path) -> None:
    assert SqlSettings().memory_max == SQL_MEMORY
    with raises(memwal.Invalid):
        memwal.open(tmp_path / "t.lance", settings={"sql": {"memory_max": "1kB"}})
    with pytest.raises(memwal.Invalid, match="sql_memory_max"):
        memwal.connect(str(tmp_path), sql_memory_max=0)
    least = memwal.open(tmp_path / "t.lance", schema=SCHEMA, key="id", settings={"sql": {"memory_max": "1MiB"}})
    with least as table:
        assert table.sql("select count(*) as n from table group by id").read_all().num_rows == 0


def test_memwal_sql_reads_the_setting(cli: Cli, small_config: SmallConfig, open_small: OpenSmall) -> None:
    open_small().close()
    ran = cli("sql", small_config(sql={"memory_max": "20MiB"}), JOIN)
    assert ran.code == 2
    assert "sql.memory_max = 20MiB" in ran.err


# ---- errors --------------------------------------------------------------------------------------------------------


REFUSED = [
    "selec 1",
    "select *\nfrom table wher x = 1",
    "select nam from table",
    "select NAME from table",
    "select b.id from table a",
    "select * from oders",
    "select * from '/etc/passwd'",
    "select read_file('/etc/passwd')",
    "select * from read_csv('/etc/passwd')",
    "insert into table values (1)",
    "/* */ delete from table",
    "copy (select 1) to 'out.csv'",
    "create external table t stored as csv location '/etc/passwd'",
    "set a = 1",
    "explain select 1",
    "select 1 from table where",
    "select 1; drop table x",
    "",
    "select $x",
    "select sum(Name) from table",
    "select id, count(*) from table",
    "select * from table where id like 'a'",
    "select 1 / 0",
    "select lpad('x', 2000000000, 'y')",
    "select range(2000000000)",
    "select id from table t TableSample Bernoulli (10)",
]


@pytest.mark.parametrize("query", REFUSED)
def test_a_wrong_query_is_told_in_one_line(
    orders: Any, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with raises(memwal.Invalid):
        orders.sql(query, tables={"p": pa.table({"id": [1]})})
    assert sorted(tmp_path.rglob("*")) == before
    assert within(60, lambda: not threads())


def test_a_query_that_nests_too_deep_is_refused_at_once(orders: Any) -> None:
    started = time.monotonic()
    with raises(memwal.Invalid):
        orders.sql("select 1" + " + 1" * 5000)
    assert time.monotonic() - started < 10  # DataFusion's planning would take minutes
    with raises(memwal.Invalid):
        orders.sql("select repeat(Name, $n) from table", parameters={"n": 300_000})


def test_long_queries_that_do_not_nest(owner: Any) -> None:
    numbers = ", ".join(map(str, range(600)))
    rows = ", ".join(f"({n}, -{n})" for n in range(5000))
    totals = ", ".join(f"sum(case when id = {n} then n + 1 else 0 end) as s{n}" for n in range(100))
    pairs = " or ".join(f"(id = {n} and n <= {n})" for n in range(300))
    for query, found in (
        ("select 1" + " + 1" * 400, 1),
        (f"select count(*) from table where id in ({numbers})", 1),
        (f"select * from (values {rows})", 5000),
        (f"select {totals} from table", 1),
        (f"select count(*) from table where {pairs}", 1),
        (" union all ".join(["select 1"] * 200), 200),
        ("select id from table order by random() limit 3", 3),
        ("select value from range(1, 300000)", 299_999),
    ):
        assert owner.sql(query).read_all().num_rows == found, query[:60]
    assert 0 < owner.sql("select id from table where random() < 0.5").read_all().num_rows < len(owner)


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": 5},
        {"query": "select 1", "level": "newest"},
        {"query": "select 1", "tables": [1]},
        {"query": "select 1", "tables": {"a b": 1}},
        {"query": "select 1", "tables": {"Table": pa.table({"id": [1]})}},
        {"query": "select 1", "tables": {"p": 5}},
        {"query": "select $x", "parameters": {"x": object()}},
    ],
)
def test_wrong_arguments(orders: Any, arguments: dict[str, Any]) -> None:
    with raises(memwal.Invalid):
        orders.sql(**arguments)


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command(open_small: OpenSmall, small_config: SmallConfig, made: Any, cli: Any) -> None:
    table = open_small()
    table.put(made.rows(range(1500)))
    table.close()
    config = small_config()
    few = "select id, name from table where id < 3 order by id"
    expected = [{"id": row["id"], "name": row["name"]} for row in made.rows(range(3))]
    assert json.loads(cli("sql", config, few, "--format", "json").out) == expected
    assert cli("sql", config, few, "--format", "csv").out.splitlines() == [
        "id,name",
        *(f"{r['id']},{r['name']}" for r in expected),
    ]
    assert json.loads(cli("sql", config, "select id from table where id < 0", "--format", "json").out) == []
    assert "0 rows" in cli("sql", config, few, "--level", "committed").out
    assert cli("sql", config, "select id from table").out.count(" id ") == 4  # two per region
    many = cli("sql", config, "select * from table order by id", "--format", "json")
    assert [row["id"] for row in json.loads(many.out)] == list(range(1500))
    for query, text in (
        ("select nam from table", "sql: column 'nam' does not exist"),
        ("-", "sql: the query is empty"),
    ):
        ran = cli("sql", config, query)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"memwal: {text}")
        assert ran.err.count("\n") == 1
