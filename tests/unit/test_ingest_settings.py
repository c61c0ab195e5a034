"""Loading a configuration: the settings, and the messages for mistakes."""

from __future__ import annotations

import pickle
import tomllib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve_spark
from memwal.ingest.settings.configuration import with_absolute_paths
from memwal.ingest.settings.fleet import table_names
from memwal.ingest.settings.load import Settings, load, load_tables, pipelines_of
from memwal.ingest.settings.reference import render_settings, to_dict, toml_value
from memwal.ingest.settings.values import (
    check_table_name,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from memwal.wal import REQUESTS
from tests.messages import raises

TABLE: dict[str, Any] = {
    "uri": "data/t.lance",
    "key": ["id"],
    "columns": {"id": "int64", "body": "string", "price": "float64", "v": "vector[4]"},
    "indexes": {"body": "fts", "v": {"type": "ivf_pq", "metric": "cosine"}, "price": "btree"},
}


def lines_of(source: Any, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    """Return the lines that a user reads when the configuration is rejected."""
    with pytest.raises(Invalid) as caught:
        load(source, environ or {})
    assert caught.value.exit_code == 2
    return caught.value.lines


def table(**changes: Any) -> dict[str, Any]:
    return {"table": {**TABLE, **changes}}


def test_a_file_gives_schema_and_indexes(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[table]\nuri = "t.lance"\nkey = ["id"]\n[table.columns]\nid = "string"\nv = "vector[3]"\n'
        '[table.indexes]\nv = "ivf_pq"\n[memtable]\nvector_train_rows = 500\nsize_max = "8MiB"\n',
        encoding="utf-8",
    )
    settings = load(path, {})
    assert settings.arrow_schema() == pa.schema(
        [pa.field("id", pa.string(), nullable=False), pa.field("v", pa.list_(pa.float32(), 3))]
    )
    (index,) = settings.index_specs()
    assert (index.column, index.kind, index.parameters["train_rows"]) == ("v", "ivf_pq", 500)
    assert settings.memtable.size_max == 8 * 1024 * 1024
    assert settings.checkpoint == "t.lance.checkpoint"


def test_environment_overrides_every_kind_of_value() -> None:
    settings = load(
        table(),
        {
            "MEMWAL__TABLE__KEY": '["body"]',
            "MEMWAL__TABLE__URI": "other.lance",
            "MEMWAL__REGIONS__COUNT": "5",
            "MEMWAL__WAL__LINGER_MAX": "7ms",
            "MEMWAL__MEMTABLE__SIZE_MAX": "64KiB",
            "MEMWAL__SOURCE__OPTIONS": '{"header": "true"}',
            "MEMWAL__SOURCE__SPARK": '{ "spark.master" = "local[1]" }',
            "HOME": "/nowhere",
        },
    )
    assert settings.table.key == ["body"]
    assert settings.table.uri == "other.lance"
    assert settings.regions.count == 5
    assert settings.wal.linger_max == pytest.approx(0.007)
    assert settings.memtable.size_max == 65536
    assert {name: each.get_secret_value() for name, each in settings.source.options.items()} == {"header": "true"}
    assert to_dict(settings)["source"]["spark"] == {"spark.master": "local[1]"}


def test_every_key_can_be_set_from_the_environment() -> None:
    settings = load(table(), {})
    for section, values in to_dict(settings).items():
        for key, value in values.items():
            text = value if isinstance(value, str) else toml_value(value)
            assert load(table(), {f"MEMWAL__{section}__{key}".upper(): text}) == settings, (section, key)


def test_overrides_win_over_file_and_environment() -> None:
    settings = load(table(), {"MEMWAL__TABLE__URI": "env"}, {"table": {"uri": "argument"}})
    assert settings.table.uri == "argument"


def test_all_violations_are_reported_at_once_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        '[table]\nuri = "t"\nkye = ["id"]\n[regions]\ncount = 0\n'
        '[wal]\nlinger_max = 50\nput_timeout = "1m in"\n[gcc]\na = 1\n',
        encoding="utf-8",
    )
    lines = lines_of(path, {"MEMWAL__REGIONS__CUONT": "3"})
    assert f"{path}: [table] unknown setting 'kye'; did you mean 'key'?" in lines
    assert f"{path}: [regions] count = 0 must be at least 1" in lines
    assert any(line.startswith(f"{path}: [wal] linger_max = 50 has no unit; write a duration") for line in lines)
    assert any("put_timeout = '1m in' is not a duration" in line for line in lines)
    assert any(line.startswith(f"{path}: unknown section [gcc]") for line in lines)
    assert "MEMWAL__REGIONS__CUONT: [regions] unknown setting 'cuont'; did you mean 'count'?" in lines
    assert len(lines) == 6


NAN, DAEMON = float("nan"), "grpc://10.0.0.1:7000"
MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("table", {"key": ["id", "id"]}),
    ("table", {"key": ["idd"]}),
    ("table", {"key": []}),
    ("table", {"key": "id"}),
    ("table", {"key": ["v"]}),
    ("table", {"uri": ""}),
    ("table", {"indexes": {"body": "ftss"}}),
    ("table", {"indexes": {"bodi": "fts"}}),
    ("table", {"indexes": {"price": "fts"}}),
    ("table", {"indexes": {"v": {"metric": "l2"}}}),
    ("table", {"indexes": {"v": {"type": "ivf_pq", "metrik": "l2"}}}),
    ("table", {"indexes": {"v": 3}}),
    ("table", {"columns": {"id": "int46"}}),
    ("table", {"columns": {"id": "int46", "body": "string", "price": "float64", "v": "vector[4]"}}),
    ("table", {"columns": {"id": "int64", "v": "vector[0]"}, "indexes": {}}),
    ("table", {"columns": {"id": "int64", "_tombstone": "bool"}, "indexes": {}}),
    ("table", {"storage_options": {"secret_access_key": 12345678}}),
    ("memtable", {"size_max": "2GiB"}),
    ("memtable", {"age_max": "36501d"}),  # longer than a thread can wait
    ("wal", {"put_timeout": "1min"}),
    ("wal", {"format": "lanse"}),
    ("wal", {"retry_budget": "36501d"}),
    ("commit", {"pending_max": 8}),
    ("gc", {"interval": "36501d"}),
    ("daemon", {"port": 70000}),
    ("daemon", {"endpoints": ["localhost:1"]}),
    ("daemon", {"endpoints": [DAEMON, DAEMON]}),
    ("daemon", {"endpoints": [DAEMON, "grpc://10.0.0.1:7001"], "workers": 2}),
    ("daemon", {"endpoints": [DAEMON], "advertise": "grpc://10.0.0.1:7001"}),
    ("daemon", {"on_spark": 2, "endpoints": [DAEMON]}),
    ("daemon", {"on_spark": 2, "advertise": DAEMON}),
    ("source", {"feed": "a"}),
    ("source", {"order_by": ["prise"]}),
    ("source", {"format": "csv", "schema_drift": "add"}),
    ("source", {"format": "avro", "schema_drift": "fail"}),
    ("source", {"format": "json", "schema_drift": "adds"}),
    ("log", {"level": "warn"}),
    ("regions", {"count": True}),
    ("regions", {"count": "many"}),
    *(("cost", {"put_price": price}) for price in ("cheap", NAN, float("inf"), -1)),
]


@pytest.mark.parametrize(("section", "values"), MISTAKES, ids=[f"{name} {' '.join(keys)}" for name, keys in MISTAKES])
def test_a_mistake_is_one_line_that_names_field_and_fix(section: str, values: dict[str, Any]) -> None:
    """None of the lines shows a secret."""
    with raises(Invalid) as refused:
        load(table() | {section: (TABLE if section == "table" else {}) | values}, {})
    (line,) = refused.value.lines
    assert line.startswith(f"settings: [{section}] ")
    assert "12345678" not in line


def test_a_setting_outside_every_section_is_told_its_place() -> None:
    assert lines_of({**table(), "interval": "1s"}) == (
        "settings: setting 'interval' is outside every section; put it under [commit]",
    )


@pytest.mark.parametrize("content", [None, "[table\n", b"\xff\xfe"])
def test_an_unreadable_file_is_one_line(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    (line,) = lines_of(path)
    assert line.startswith(f"{path}: ")


UNQUOTED = {
    "[table]\nuri = data/x.lance\n": 'line 2, column 7: text needs quotes, such as uri = "…"',
    "[table]\r\nkey = [id]\r\n": 'line 2, column 8: text needs quotes, such as key = ["…"]',
    '[table]\nkey = ["id", day]\n': 'line 2, column 14: text needs quotes, such as key = ["…"]',
    "[table]\nkey = [\n  id\n]\n": "line 3, column 3: text needs quotes",
    '[table]\ncolumns = { id = "int64", v = string }\n': 'line 2, column 31: text needs quotes, such as v = "…"',
    "[commit]\ninterval = 10s\n": 'line 2, column 14: text needs quotes, such as interval = "…"',
    "[table]\nappend_only = True\n": "line 2, column 15: true and false have no capitals",
    '[table]\nkey = ["id"] uri = "x"\n': "not TOML: Expected newline",
    "[table]\nuri = \n": "not TOML: Invalid value (at line 2, column 7)",
}


@pytest.mark.parametrize("text", UNQUOTED)
def test_text_without_quotes_is_told_its_place(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_bytes(text.encode())
    (line,) = lines_of(tmp_path / "c.toml")
    assert line.startswith(f"{tmp_path / 'c.toml'}: {UNQUOTED[text]}")


def test_a_value_without_quotes_is_not_printed(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[table.storage_options]\nsecret_access_key = HIDE\n")
    (line,) = lines_of(tmp_path / "c.toml")
    assert "HIDE" not in line


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("integer", "write int32 or int64"),
        ("VARCHAR(20)", "write string"),
        ("timestamp", "write timestamp[us] or timestamp[us, UTC]"),
        ("vector", "write vector[N], where N is the width of your vectors"),
        ("int46", "did you mean 'int64'?"),
    ],
)
def test_a_type_of_another_system_names_the_type_of_memwal(name: str, remedy: str) -> None:
    (line,) = lines_of(table(columns={"id": "int64", "x": name}, key=["id"], indexes={}))
    assert line == f"settings: [table] columns.x = {name!r} is not a column type; {remedy}"


def test_secrets_are_resolved_by_reference_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-file\n", encoding="utf-8")
    options = {
        "access_key_id": "env:KEY_ID",
        "secret_access_key": f"file:{tmp_path / 'secret'}",
        "session_token": "literal-token",
        "region": "eu-west-1",
    }
    settings = load(table(storage_options=options), {})
    assert settings.storage_options({"KEY_ID": "from-env"}) == {
        "access_key_id": "from-env",
        "secret_access_key": "from-file",
        "session_token": "literal-token",
        "region": "eu-west-1",
    }
    shown = render_settings(settings) + repr(settings) + str(settings)
    assert "literal-token" not in shown
    assert "env:KEY_ID" in render_settings(settings)
    assert "eu-west-1" in render_settings(settings)


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ("source", {"spark": {"spark.driver.extraJavaOptions": "-Dpassword=HIDE"}}),
        ("source", {"spark": {"spark.executor.extraJavaOptions": "-Dpassword=HIDE"}}),
        ("source", {"spark": {"spark.jars.repositories": "https://me:HIDE@host/maven,https://host/?apikey=HIDE"}}),
        ("source", {"spark": {"spark.some.plugin.setting": "HIDE"}}),
        ("source", {"options": {"url": "jdbc:postgresql://host/db?user=me&password=HIDE"}}),
        ("source", {"options": {"dbtable": "HIDE"}}),
        ("source", {"path": "s3a://me:HIDE@bucket/landing"}),
        ("source", {"format": "kafka", "registry": "https://host/?apikey=HIDE"}),
        ("table", {"storage_options": {"proxy_url": "http://me:HIDE@host", "unknown": "HIDE"}}),
        ("table", {"storage_options": {"endpoint": "https://host/?sig=HIDE#HIDE"}}),
        ("tracing", {"endpoint": "http://me:p@HIDE@host:4318/x"}),
    ],
)
def test_values_that_may_hold_secrets_are_not_printed(section: str, given: Any) -> None:
    printed = render_settings(Settings.model_validate({section: given}))
    assert "HIDE" not in printed
    assert "(hidden)" in printed


def test_values_that_hold_no_secret_are_printed() -> None:
    spark = {"spark.master": "spark://host:7077", "spark.jars": "file:/x.jar", "spark.sql.shuffle.partitions": "8"}
    storage = {"region": "eu-west-1", "AWS_ENDPOINT": "https://host:9000/a@b", "secret_access_key": "env:KEY"}
    settings = load(table(storage_options=storage) | {"source": {"spark": spark}}, {})
    printed = tomllib.loads(render_settings(settings))
    assert (printed["source"]["spark"], printed["table"]["storage_options"]) == (spark, storage)


def test_references_in_sparks_configuration(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-file\n", encoding="utf-8")
    file = f"file:{tmp_path / 'secret'}"
    conf = {
        "spark.hadoop.fs.s3a.secret.key": file,
        "spark.driver.extraJavaOptions": file,
        "spark.jars": file,
        "spark.eventLog.dir": "env:DIRECTORY",
    }
    settings = load(table() | {"source": {"spark": conf}}, {})
    assert resolve_spark(settings.source.spark, {"DIRECTORY": "/events"}) == {
        "spark.hadoop.fs.s3a.secret.key": "from-file",
        "spark.driver.extraJavaOptions": "from-file",
        "spark.jars": file,
        "spark.eventLog.dir": "/events",
    }
    with raises(Invalid):
        resolve_spark(settings.source.spark, {})


def test_references_to_nothing_are_all_named(tmp_path: Path) -> None:
    options = {"access_key_id": "env:NOT_SET", "secret_access_key": f"file:{tmp_path / 'none'}"}
    settings = load(table(storage_options=options), {})
    with pytest.raises(Invalid) as caught:
        settings.storage_options({})
    assert len(caught.value.lines) == 2
    assert "[table] storage_options.access_key_id: the environment variable NOT_SET is not set" in caught.value.lines[0]
    (line,) = lines_of(table(storage_options={"access_key_id": "env:"}))
    assert "storage_options.access_key_id has no name" in line


def test_plain_values_load_back_as_the_same_settings() -> None:
    settings = load(table(storage_options={"secret_access_key": "literal"}), {"MEMWAL__COMMIT__INTERVAL": "0"})
    assert load(to_dict(settings), {}) == settings


@given(st.floats(min_value=0, max_value=1e7, allow_nan=False).map(lambda seconds: round(seconds, 6)))
def test_durations_are_read_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_sizes_are_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("100ms", 0.1), ("1.5 h", 5400), ("5min", 300), (0, 0), ("0", 0), ("50us", 5e-5)]
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"), [("1KiB", 1024), ("1kB", 1000), ("256MiB", 1 << 28), ("1.5GiB", 3 << 29), (0, 0)]
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["-1s", "1 parsec", "soon", "", True, None, 5, 1.5])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with raises(ValueError):
        parse_duration(text)


def test_settings_survive_the_way_to_a_child_process() -> None:
    settings = load(table(storage_options={"secret_access_key": "literal"}), {})
    assert pickle.loads(pickle.dumps(settings)) == settings


PIPELINES = """
[regions]
count = 3
[source]
format = "json"
trigger = "1s"
[pipelines.orders.table]
uri = "orders.lance"
key = ["id"]
columns = { id = "int64" }
[pipelines.orders.source]
path = "in/orders"
[pipelines.users.table]
uri = "users.lance"
key = ["name"]
columns = { name = "string" }
[pipelines.users.source]
path = "in/users"
trigger = "2s"
"""


def test_a_file_of_several_pipelines_gives_each_its_own_sections_over_the_others(tmp_path: Path) -> None:
    path = tmp_path / "several.toml"
    path.write_text(PIPELINES, encoding="utf-8")
    assert pipelines_of(path) == (f"{path}:orders", f"{path}:users")
    orders, users = (load(each, {"MEMWAL__REGIONS__COUNT": "5"}) for each in pipelines_of(path))
    assert (orders.table.uri, orders.source.path, orders.source.trigger) == ("orders.lance", "in/orders", 1.0)
    assert (users.table.key, users.source.path, users.source.trigger) == (["name"], "in/users", 2.0)
    assert orders.source.format == users.source.format == "json"
    assert orders.regions.count == users.regions.count == 5
    assert pipelines_of(f"{path}:users") == (f"{path}:users",)


@pytest.mark.parametrize(
    ("content", "pipeline"),
    [
        (PIPELINES, ""),
        (PIPELINES, ":user"),
        ('[table]\nuri = "t"\n', ":users"),
        ("pipelines = 3\n", ""),
        (PIPELINES + "tigger = '1s'\n", ":users"),
    ],
    ids=["none chosen", "misspelt", "none in the file", "no tables", "a mistake in one"],
)
def test_a_pipeline_that_cannot_be_found_or_read_is_one_line(tmp_path: Path, content: str, pipeline: str) -> None:
    path = tmp_path / "several.toml"
    path.write_text(content, encoding="utf-8")
    with raises(Invalid) as refused:
        load(f"{path}{pipeline}", {})
    (line,) = refused.value.lines
    assert line.startswith(str(path))


def test_a_duration_may_be_as_long_as_a_thread_can_wait() -> None:
    load(table() | {"memtable": {"age_max": "36500d"}, "wal": {"retry_budget": "36500d"}}, {})


# ---- several tables -------------------------------------------------------------------------------------------------

SMALL = {"key": ["id"], "columns": {"id": "int64"}}
ORDERS = {"uri": "/t/orders.lance", **SMALL}
BELOW = {"table": SMALL, "fleet": {"prefix": "/t"}}


def two(**changes: Any) -> dict[str, Any]:
    """Return a configuration of the tables `orders` and `big.users`."""
    return {"tables": {"orders": ORDERS, "big.users": ORDERS | {"uri": "/t/users.lance"} | changes}}


def test_each_section_of_a_table_gives_the_settings_of_that_table_alone() -> None:
    settings = load_tables(two(upsert="merge") | {"wal": {"linger_max": "1s"}}, {})
    assert settings.names == ("orders", "big.users")
    orders = settings.of_table("orders")
    assert orders.name == "orders"
    assert orders.sections() == load({"table": ORDERS, "wal": {"linger_max": "1s"}}, {}).sections()
    users = settings.of_table("big.users")
    assert (users.table.uri, users.table.upsert, users.names) == ("/t/users.lance", "merge", ("users",))
    assert users.of_table("users") is users
    with raises(Invalid):
        settings.of_table("order")
    with raises(Invalid):
        load(two(), {})
    assert load({"tables": {"orders": ORDERS}}, {}) == settings.of_table("orders").model_copy(
        update={"wal": Settings().wal}
    )


def test_a_prefix_gives_each_name_the_template_and_a_location_of_its_own() -> None:
    settings = load_tables(BELOW | {"fleet": {"prefix": "s3://b/tables/", "idle_after": "1min"}}, {})
    assert (settings.names, settings.is_fleet, settings.fleet.idle_after) == ((), True, 60.0)
    orders = settings.of_table("orders")
    assert (orders.table.uri, orders.table.key) == ("s3://b/tables/orders.lance", ["id"])
    assert (orders.names, orders.is_fleet, orders.fleet.idle_after) == (("orders",), False, 60.0)
    with raises(Invalid):
        settings.of_table("../orders")
    with raises(Invalid):
        load(BELOW, {})


def test_settings_of_several_tables_survive_every_way_that_settings_go() -> None:
    for sections in (two(storage_options={"secret_access_key": "env:KEY"}), BELOW):
        settings = load_tables(sections, {})
        assert pickle.loads(pickle.dumps(settings)) == settings
        assert load_tables(to_dict(settings), {}) == settings
        assert load_tables(tomllib.loads(render_settings(settings)), {}) == settings
    relative = two(uri="users.lance") | {"fleet": {"idle_after": "0s"}}
    found = with_absolute_paths(load_tables(relative, {}))
    assert found.tables["big.users"].uri == str(Path.cwd() / "users.lance")
    assert with_absolute_paths(load_tables({"fleet": {"prefix": "x"}}, {})).fleet.prefix == str(Path.cwd() / "x")


def test_a_variable_overrides_the_section_of_one_table() -> None:
    variables = {"MEMWAL__TABLES__BIG_USERS__KEY": '["id"]', "MEMWAL__TABLES__ORDERS__CACHE_MAX": "1MiB"}
    settings = load_tables(two(key=["x"]), variables)
    assert (settings.tables["big.users"].key, settings.tables["orders"].cache_max) == (["id"], 1 << 20)
    assert load_tables(two(), {}).tables["orders"].cache_max > 1 << 20


FLEET_MISTAKES: dict[str, dict[str, Any]] = {
    "table beside tables": two() | {"table": {"key": ["id"]}},
    "prefix beside tables": two() | {"fleet": {"prefix": "/t"}},
    "prefix beside uri": {"table": ORDERS, "fleet": {"prefix": "/t"}},
    "whole bucket": {"fleet": {"prefix": "s3://bucket/"}},
    "one location": two(uri="/t/orders.lance"),
    "one location by ..": two(uri="/t/x/../orders.lance"),
    "one location with a slash": two(uri="/t/orders.lance/"),
    "one location as a URL": two(uri="file:///t/orders%2elance"),
    "no uri": two(uri=""),
    "misspelt setting": two(kye=["id"]),
    "wrong type": two(key="id"),
    "key without column": two(key=["idd"]),
    "template does not fit": {"table": SMALL | {"key": ["idd"]}, "fleet": {"prefix": "/t"}},
    "dead letters in a table": two() | {"dlq": {"uri": "/t/./orders.lance"}},
    "no section": {"tables": {"orders": "/t/orders.lance"}},
    "settings without a name": {"tables": {"uri": "/t/orders.lance"}},
    "invalid name": {"tables": {"my orders": ORDERS}},
    "leading dot": {"tables": {".orders": ORDERS}},
    "long name": {"tables": {"o" * 101: ORDERS}},
    "negative time": two() | {"fleet": {"idle_after": "-1s"}},
}


@pytest.mark.parametrize("mistake", FLEET_MISTAKES)
def test_a_mistake_in_one_of_several_tables_is_one_line(mistake: str) -> None:
    with raises(Invalid) as refused:
        load_tables(FLEET_MISTAKES[mistake], {})
    assert len(refused.value.lines) == 1


@pytest.mark.parametrize("variable", ["ORDRES__KEY", "ORDERS__KYE", "ORDERS", "A_B__KEY"])
def test_a_variable_that_fits_no_table_is_one_line(variable: str) -> None:
    several = two()
    several["tables"] |= {"a.b": ORDERS | {"uri": "/t/1"}, "a-b": ORDERS | {"uri": "/t/2"}}
    for configuration in (several, table()) if variable == "ORDRES__KEY" else (several,):
        with raises(Invalid) as refused:
            load_tables(configuration, {f"MEMWAL__TABLES__{variable}": "[]"})
        assert len(refused.value.lines) == 1


def test_names_of_tables_are_those_of_lancedb(tmp_path: Path) -> None:
    """LanceDB also takes a leading dot, which hides a directory, and longer names."""
    database, rows = lancedb.connect(tmp_path), pa.table({"id": [1]})
    taken, fits = list[str](), list[str]()
    for name in ("a", "A_b-c.d", "-x", "_", "0", "a" * 100, "a b", "a/b", "é", "a$", "", "..", "a\n"):
        with suppress(ValueError):
            database.create_table(name, rows)
            taken.append(name)
        with suppress(ValueError):
            fits.append(check_table_name(name))
    assert fits == taken
    (tmp_path / "a.lance.dlq").mkdir()
    (tmp_path / "no table.lance").mkdir()
    (tmp_path / "file.lance").write_text("")
    assert table_names(load_tables({"fleet": {"prefix": str(tmp_path)}}, {}), {}) == sorted(taken)


def test_a_thousand_names_cost_one_listing(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"t{number:03}.lance" / "_versions").mkdir(parents=True)
    settings = load_tables({"fleet": {"prefix": f"{tmp_path}/"}}, {})
    before = REQUESTS.counts()
    assert table_names(settings, {}) == [f"t{number:03}" for number in range(1000)]
    assert Counter(key.operation for key in (REQUESTS.counts() - before).elements()) == {"list": 1}


def test_a_prefix_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for missing in (tmp_path / "none", tmp_path / "file"):
        with raises(Invalid):
            table_names(load_tables({"fleet": {"prefix": str(missing)}}, {}), {})
