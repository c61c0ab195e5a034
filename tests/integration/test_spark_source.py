"""`spark.read.format("memwal")` in a real Spark: levels, partitions, options, one snapshot per frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.api.reads import LEVELS
from memwal.ingest.settings.load import load
from memwal.ingest.spark.session import configuration, start_session
from tests.conftest import Cli, OpenSmall, Serve, SmallConfig
from tests.messages import raises

BY_HAND = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start one Spark for the module; its new sessions do not have memwal registered."""
    settings = load({"table": {"uri": str(tmp_path_factory.mktemp("unused"))}}, {})
    spark = start_session(configuration(settings, 2, once=True))
    yield spark
    spark.stop()


@pytest.fixture(scope="module")
def spark(session: Any) -> Any:
    """Return the session with the source registered, as a user does it."""
    memwal.register_spark(session)
    return session


def frame(spark: Any, uri: str, options: Mapping[str, Any] | None = None, **more: Any) -> Any:
    return spark.read.format("memwal").options(**(options or {}), **more).load(uri)


def rows(found: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in found.collect()), key=repr)


def plain(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


def refused(act: Callable[[], Any]) -> str:
    """Return memwal's lines in Spark's exception."""
    with pytest.raises(Exception, match="memwal") as caught:
        act()
    return str(caught.value).partition("memwal.ingest.errors.")[2]


def layered(table: Any, made: Any) -> None:
    """Fill every level: the base in several fragments, SSTs of all regions, and the WAL tail; with deletes."""
    for start in range(0, 90, 30):
        table.put(made.table(range(start, start + 30)))
        table.flush()
        table.commit()
    table.put(made.table(range(40), 1))
    table.delete([5, 50])
    table.flush()
    table.put(made.table([*range(20), *range(100, 110)], 2))
    table.delete([6, 51])


def test_every_level_has_the_rows_of_a_scan(spark: Any, open_small: OpenSmall, uri: str, made: Any) -> None:
    table = open_small(regions=3)
    layered(table, made)
    counts = {}
    for level in LEVELS:
        read = frame(spark, uri, level=level, rows_per_partition=40)
        assert rows(read) == plain(table.scan(level=level).read_all()), level
        counts[level] = read.rdd.getNumPartitions()
    assert counts == {"committed": 3, "flushed": 6, "durable": 6, "latest": 6}


def test_filters_of_spark_and_the_option_filter_never_bring_an_older_row_back(
    spark: Any, open_small: OpenSmall, uri: str, made: Any
) -> None:
    table = open_small(regions=2)
    layered(table, made)
    read = frame(spark, uri, columns="id,name,price")
    everything = {row["id"]: row for row in table.scan(["id", "name", "price"]).read_all().to_pylist()}
    for condition in ("price < 300", "name LIKE '%v0'", "id IN (1, 6, 51, 70)", "price >= 300 AND name LIKE '%v1'"):
        wanted = plain(table.scan(["id", "name", "price"], condition).read_all())
        assert rows(read.where(condition)) == wanted, condition
        assert rows(frame(spark, uri, columns="id,name,price", filter=condition)) == wanted, condition
    assert len(wanted) < len(everything)
    assert frame(spark, uri, columns="id", filter="price < 300").columns == ["id"]


def test_a_frame_is_one_moment_for_all_its_reads_also_beside_a_writer(
    spark: Any, open_small: OpenSmall, uri: str, made: Any
) -> None:
    table = open_small(regions=2)
    layered(table, made)
    before = plain(table.scan(["id", "name"]).read_all())
    read = frame(spark, uri, columns="id,name", rows_per_partition=30)
    given = spark.read.format("memwal").schema("name string, id long").load(uri)
    assert given.count() == len(before)  # a frame with a user's schema gets its snapshot here
    table.put(made.table(range(60), 7))
    table.delete([70])
    table.flush()
    table.commit()
    assert rows(read) == before
    assert rows(given.select("id", "name")) == before
    low, high = read.where("id < 10"), read.where("id >= 10")
    assert rows(low.union(high)) == before
    assert read.join(read.withColumnRenamed("name", "other"), "id").where("name = other").count() == len(before)
    assert rows(frame(spark, uri, columns="id,name")) == plain(table.scan(["id", "name"]).read_all())


def test_a_table_without_a_key_has_every_row_once(spark: Any, uri: str) -> None:
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("s", pa.string())])
    with memwal.open(uri, schema=schema, key=(), regions=2, settings=BY_HAND) as table:
        for step in range(4):
            table.put([{"n": number % 3, "s": "same"} for number in range(10)])
            if step < 3:
                table.flush()
            if step == 1:
                table.commit()
        assert rows(frame(spark, uri)) == plain(table.scan().read_all())
        assert frame(spark, uri).count() == 40
        assert frame(spark, uri, filter="n = 1").count() == 12


def test_an_empty_table_has_no_rows(spark: Any, open_small: OpenSmall, uri: str) -> None:
    open_small()
    assert rows(frame(spark, uri)) == []


def test_latest_has_rows_that_a_daemon_acknowledged_and_holds_in_memory_only(
    spark: Any, serve: Serve, small_config: SmallConfig, uri: str, made: Any
) -> None:
    _, endpoint = serve(small_config(wal={"linger_max": "1h"}))
    with memwal.connect(endpoint) as table:
        table.put(made.table(range(10)))
        table.put(made.table(range(5, 12), 1), durable=False)
        durable = [(id, f"row {id} v0") for id in range(10)]
        assert rows(frame(spark, uri, level="durable", columns="id,name")) == sorted(durable, key=repr)
        newest = [(id, f"row {id} v{int(id >= 5)}") for id in range(12)]
        for options in ({}, {"endpoint": endpoint}):
            assert rows(frame(spark, uri, options, columns="id,name")) == sorted(newest, key=repr)


def test_a_table_on_s3_with_secrets_by_reference_that_no_plan_shows(
    spark: Any, s3_table: Any, made: Any, tmp_path: Path
) -> None:
    options = s3_table.storage_options
    with memwal.open(s3_table.uri, schema=made.schema, key="id", storage_options=options, settings=BY_HAND) as table:
        table.put(made.table(range(20)))
        table.flush()
        table.commit()
        table.put(made.table(range(5), 1))
        referred = dict(options)
        for name in ("secret_access_key", "access_key_id"):
            (tmp_path / name).write_text(f"{options[name]}\n")
            referred[name] = f"file:{tmp_path / name}"
        read = frame(spark, s3_table.uri, {f"storage_options.{name}": value for name, value in referred.items()})
        assert rows(read.select("id", "name")) == plain(table.scan(["id", "name"]).read_all())
    plain_options = {f"storage_options.{name}": value for name, value in options.items()}
    shown = frame(spark, s3_table.uri, plain_options)._jdf.queryExecution().toString()
    assert options["secret_access_key"] not in shown


def test_types_that_spark_lacks_arrive_in_wider_ones(spark: Any, uri: str) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("u", pa.uint64()),
            pa.field("half", pa.list_(pa.float16(), 2)),
            pa.field("st", pa.struct([("i", pa.uint8()), ("v", pa.list_(pa.float32(), 2))])),
        ]
    )
    with memwal.open(uri, schema=schema, key="id", regions=1, settings=BY_HAND) as table:
        row = {"id": 1, "u": 2**64 - 1, "half": [0.5, 1.0], "st": {"i": 255, "v": [1.0, 2.0]}}
        table.put(pa.Table.from_pylist([row, {"id": 2}], schema=schema))
        found = [each.asDict(recursive=True) for each in frame(spark, uri).orderBy("id").collect()]
        assert found == [{**row, "u": Decimal(2**64 - 1)}, dict.fromkeys(row) | {"id": 2}]


def test_what_is_wrong_reaches_the_user_in_lines_of_their_own(spark: Any, open_small: OpenSmall, uri: str) -> None:
    open_small()
    said = refused(lambda: frame(spark, uri, levl="latest", level="durabel"))
    assert said.splitlines()[:2] == [
        "Invalid: option 'levl' is unknown; did you mean 'level'?",
        "option level 'durabel' is unknown; did you mean 'durable'?",
    ]
    writer = frame(spark, uri).write.format("memwal").mode("append")
    assert "no daemon serves" in refused(lambda: writer.save(uri))
    given = spark.read.format("memwal").schema("id string").load(uri)
    assert "column 'id': the schema says string, the table has bigint" in refused(given.collect)


def test_a_session_without_the_source_says_so_and_a_wrong_argument_is_refused(session: Any, uri: str) -> None:
    with pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):
        session.newSession().read.format("memwal").load(uri)
    with raises(memwal.Invalid):
        memwal.register_spark("spark")


def test_a_read_whose_objects_were_deleted_says_read_again(
    spark: Any, open_small: OpenSmall, uri: str, made: Any, tmp_path: Path, cli: Cli
) -> None:
    table = open_small(regions=1)
    table.put(made.table(range(5)))
    table.flush()
    read = frame(spark, uri, columns="id")
    table.commit()
    config = tmp_path / "gc.toml"
    config.write_text(f'[table]\nuri = "{uri}"\n[gc]\nsst_age_min = "0s"\n')
    assert cli("gc", config).code == 0
    assert "objects of that moment were deleted since" in refused(read.collect)
    assert frame(spark, uri).count() == 5


@pytest.fixture
def pushdown(spark: Any) -> Iterator[None]:
    """Let Spark push filters down into sources written in Python."""
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, "true")
    yield
    spark.conf.unset(name)


@pytest.mark.long
def test_sparks_own_pushdown_of_filters_mixes_up_the_reads_of_a_frame(spark: Any, pushdown: None) -> None:
    """The reason why filters are an option. If this fails, Spark has fixed the fault: push filters down then."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, InputPartition

    class Pushing(DataSourceReader):
        wanted: Any = None

        def pushFilters(self, filters: list[Any]) -> Iterator[Any]:  # noqa: N802 - Spark's name
            for each in filters:
                if isinstance(each, EqualTo):
                    self.wanted = each.value
                else:
                    yield each

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(0)]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            return iter([(id,) for id in range(10) if self.wanted in (None, id)])

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "pushing"

        def schema(self) -> str:
            return "id long"

        def reader(self, schema: Any) -> Pushing:
            return Pushing()

    spark.dataSource.register(Source)
    wrong = spark.read.format("pushing").load()
    assert wrong.where("id = 3").count() == 1
    assert wrong.count() != 10


def test_sparks_own_pushdown_of_filters_is_not_used(
    spark: Any, pushdown: None, open_small: OpenSmall, uri: str, made: Any
) -> None:
    table = open_small(regions=1)
    table.put(made.table(range(10)))
    right = frame(spark, uri, columns="id")
    assert right.where("id = 3").count() == 1
    assert right.count() == 10
    assert rows(right.where("id = 3").union(right.where("id = 4"))) == [(3,), (4,)]
