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
    assert "address" in refused(lambda: frame.write.format("memwal").mode("append").save())
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
