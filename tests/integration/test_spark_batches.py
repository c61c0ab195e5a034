"""Frames written into a table by name, and tables of Spark's catalog: `df.write`, CREATE TABLE and INSERT INTO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import memwal
from memwal.ingest.settings.load import load
from memwal.ingest.spark.session import configuration, start_session
from memwal.wal.layout import STAGED_PREFIX
from tests.integration.test_spark_source import refused
from tests.ways import served


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = load({"table": {"uri": str(tmp_path_factory.mktemp("unused"))}}, {})
    warehouse = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    session = start_session({**configuration(settings, 2, once=True), **warehouse})
    memwal.register_spark(session)
    yield session
    session.stop()


@pytest.fixture
def table(tmp_path: Path, ends: ExitStack) -> Any:
    opened: Any = memwal.open(tmp_path / "t.lance", schema={"id": "int64", "name": "string"}, key="id", regions=2)
    ends.callback(opened.close)
    opened.endpoint = served(opened, ends)
    return opened


def stored(table: Any) -> dict[int, str]:
    return {row["id"]: row["name"] for row in table.scan().read_all().to_pylist()}


def test_a_frame_is_appended_once(spark: Any, table: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(id, f"n{id}") for id in range(1000)], "id long, name string").repartition(3)
    for _ in range(2):  # a row replaces the row of its key
        frame.write.format("memwal").mode("append").option("endpoint", table.endpoint).save(str(tmp_path / "t.lance"))
        assert stored(table) == {id: f"n{id}" for id in range(1000)}
    assert not list((tmp_path / "t.lance" / STAGED_PREFIX).glob("**/*.arrow"))


def test_a_frame_that_cannot_be_written_changes_nothing(spark: Any, table: Any, tmp_path: Path) -> None:
    frame, uri = spark.createDataFrame([(1, "a")], "id long, name string"), str(tmp_path / "t.lance")
    table.put([{"id": 9, "name": "kept"}])
    for write, said in (
        (frame.write.format("memwal").mode("overwrite").option("endpoint", table.endpoint), "overwrite"),
        (frame.write.format("memwal").mode("append").option("endpiont", table.endpoint), "endpoint"),
        (frame.drop("name").write.format("memwal").mode("append").option("endpoint", table.endpoint), "name"),
    ):
        assert said in refused(lambda write=write: write.save(uri))
    for use in (
        lambda: frame.write.format("memwal").mode("append").save(),
        lambda: spark.read.format("memwal").load(),
        lambda: spark.read.schema("id long").format("memwal").load().collect(),
        lambda: spark.readStream.format("memwal").option("since", "earliest").load(),
    ):
        assert refused(use).startswith("Invalid: option path is missing: write ")
    assert stored(table) == {9: "kept"}


def test_a_table_of_the_catalog_is_read_and_inserted_into(spark: Any, table: Any, tmp_path: Path) -> None:
    table.put([{"id": 1, "name": "put"}])
    options = f"OPTIONS (path '{tmp_path / 't.lance'}', endpoint '{table.endpoint}')"
    spark.sql(f"CREATE TABLE things USING memwal {options}")
    spark.sql("INSERT INTO things VALUES (2, 'inserted'), (3, 'too')")
    spark.sql("INSERT INTO things (name, id) SELECT concat(name, '!'), id + 10 FROM things WHERE id < 3")
    expected = {1: "put", 2: "inserted", 3: "too", 11: "put!", 12: "inserted!"}
    assert stored(table) == expected
    assert {row.id: row.name for row in spark.sql("SELECT * FROM things").collect()} == expected
    assert spark.sql("SELECT count(*) FROM things WHERE name LIKE '%!'").first()[0] == 2
    spark.sql("DROP TABLE things")
    assert stored(table) == expected


@pytest.fixture
def created(spark: Any, table: Any, tmp_path: Path, ends: ExitStack) -> Any:
    """Return a function that creates a table of the catalog from SQL with its options; the test's end drops it."""

    def create(sql: str, uri: str = str(tmp_path / "t.lance"), endpoint: str = table.endpoint) -> None:
        name = sql.split(maxsplit=1)[0]
        ends.callback(lambda: spark.sql(f"DROP TABLE IF EXISTS {name}"))
        options = f"path '{uri}', endpoint '{endpoint}'"
        spark.sql(f"CREATE TABLE {sql.format(options=options)}")

    return create


def test_options_of_reads_and_writes_are_for_these(spark: Any, table: Any, created: Any) -> None:
    table.put([{"id": 9, "name": "put"}])
    created("both USING memwal OPTIONS ({options}, level 'durable', columns 'id', missing 'null', filter 'id < 5')")
    spark.sql("INSERT INTO both VALUES (2), (7)")
    assert stored(table) == {2: None, 7: None, 9: "put"}
    assert [row.id for row in spark.table("both").collect()] == [2]
    assert spark.read.option("filter", "id > 5").table("both").count() == 2
    assert "'endpiont' is unknown" in refused(lambda: created("wrong USING memwal OPTIONS ({options}, endpiont '')"))
    assert "'since' is unknown" in refused(lambda: created("wrong USING memwal OPTIONS ({options}, since 'latest')"))


def test_an_insert_never_writes_to_the_table_that_its_query_reads(
    spark: Any, table: Any, created: Any, tmp_path: Path, ends: ExitStack
) -> None:
    """Spark passes the options of a catalog's table as metadata of columns, and those of the query if they fit."""
    table.put([{"id": 1, "name": "put"}])
    other: Any = memwal.open(tmp_path / "o.lance", schema=table.schema, key="id", regions=2)
    ends.callback(other.close)
    where = str(tmp_path / "o.lance"), served(other, ends)
    created("source_of_rows USING memwal OPTIONS ({options})")
    created("target USING memwal OPTIONS ({options})", *where)
    position = table.changes_position()
    for query in ("SELECT * FROM source_of_rows", "SELECT id + 0L AS id, name FROM source_of_rows WHERE id > 0"):
        assert "WITH (path" in refused(lambda query=query: spark.sql(f"INSERT INTO target {query}"))
    assert stored(other) == {}
    spark.sql("INSERT INTO target SELECT id + 1L, name FROM source_of_rows")
    spark.createDataFrame([(3, "c")], "id long, name string").createOrReplaceTempView("frame")
    spark.sql("INSERT INTO target SELECT * FROM frame")
    spark.table("frame").writeTo("target").append()
    uri, endpoint = where
    spark.sql(f"INSERT INTO target WITH (path = '{uri}', endpoint = '{endpoint}') SELECT * FROM source_of_rows")
    assert stored(other) == {1: "put", 2: "put", 3: "c"}
    assert table.changes_position() == position


def test_a_table_with_listed_columns_is_refused_where_it_is_used(spark: Any, created: Any) -> None:
    """Spark creates it without a call of the data source, and gives its options to no read and no write."""
    created("listed (id BIGINT, name STRING) USING memwal OPTIONS ({options})")
    for use in ("SELECT * FROM listed", "INSERT INTO listed VALUES (1, 'a')"):
        (line,) = refused(lambda use=use: spark.sql(use).collect()).partition("\n SQLSTATE")[0].splitlines()
        assert line.startswith("Invalid: option path is missing: ")
        assert "leave the columns out" in line
