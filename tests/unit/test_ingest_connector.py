"""The data source for Spark, without Spark: options, rows in Spark's types, and the stream of changes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StringType, StructField, StructType

import memwal
from memwal import flush, wal
from memwal.ingest.engine.read.pinned import Fragment, Pinned, PinnedRegion
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.connector.options import ROWS_PER_PARTITION, ReadOptions
from memwal.ingest.spark.connector.source import (
    BYTES_PER_PARTITION,
    ROWS_PER_BATCH,
    MemWalSource,
    Share,
    arrow_schema,
    captured,
    expect_types,
    schema_of_columns,
    shares,
    spark_batches,
)
from tests.conftest import extent
from tests.messages import raises
from tests.support.garbage import collect

SECRET = "never-to-be-shown-6174"


# ---- options -------------------------------------------------------------------------------------------------------


def test_options_have_the_defaults_of_every_read() -> None:
    read = ReadOptions.of({"path": "t.lance"})
    assert (read.uri, read.level, read.columns, read.filter) == ("t.lance", "latest", None, None)
    assert read.rows_per_partition == ROWS_PER_PARTITION
    assert read.storage_options() == {}


WRONG_OPTIONS: dict[str, dict[str, str]] = {
    "all at once": {
        "levl": "x",
        "level": "durabel",
        "columns": " ",
        "rows_per_partition": "-1",
        "filter": "",
        "path": " ",
    },
    **{name: {name: "x"} for name in ("storage_options", "storage_options.", "paths", "storage_optoins.region")},
    **{f"columns = {text}": {"columns": text} for text in ("[1]", "[", "[]")},
    "a certificate without its key": {"tls_ca": "ca.pem", "tls_cert": "c.pem"},
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_options_are_refused_by_name(case: str) -> None:
    with raises(Invalid):
        ReadOptions.of({"path": "t.lance"} | WRONG_OPTIONS[case])


@pytest.mark.parametrize(("text", "names"), [("a, b,a", ("a", "b")), ('["a,b", "c"]', ("a,b", "c"))])
def test_columns_are_names_by_commas_or_a_json_list(text: str, names: tuple[str, ...]) -> None:
    assert ReadOptions.of({"path": "t.lance", "columns": text}).columns == names


def test_secrets_are_resolved_where_they_are_used_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"path": "s3://b/t", "storage_options.secret_access_key": "env:S3_SECRET", "storage_options.region": "eu"}
    read = pickle.loads(pickle.dumps(ReadOptions.of({**options, "token": "env:TOKEN"})))
    monkeypatch.setenv("S3_SECRET", SECRET)
    assert read.storage_options() == {"secret_access_key": SECRET, "region": "eu"}
    assert SECRET.encode() not in pickle.dumps(read)
    literal = ReadOptions.of({**options, "storage_options.secret_access_key": SECRET, "token": SECRET})
    assert SECRET not in repr(literal)
    assert SECRET not in str(vars(MemWalSource({**options, "storage_options.secret_access_key": SECRET})))


def test_access_is_by_a_certificate_and_its_key() -> None:
    access = ReadOptions.of({"path": "t.lance", "tls_ca": "ca.pem", "tls_cert": "c.pem", "tls_key": "k.pem"}).access
    assert (access.tls_ca, access.tls_cert, access.tls_key) == ("ca.pem", "c.pem", "k.pem")


def test_a_use_without_an_address_says_how_to_name_the_table() -> None:
    source = pickle.loads(pickle.dumps(MemWalSource({})))
    for use in (
        lambda: source.reader(StructType()),
        lambda: source.streamWriter(StructType(), False),
        MemWalSource({"since": "latest"}).schema,
    ):
        with raises(Invalid):
            use()


def test_the_columns_of_a_table_in_the_catalog_keep_its_options(open_small: Callable[..., Any], uri: str) -> None:
    open_small().close()
    schema = MemWalSource({"provider": "memwal", "path": uri, "level": "durable", "columns": "name,id"}).schema()
    assert [(field.name, field.nullable) for field in schema] == [("name", True), ("id", False)]
    reader = MemWalSource({"filter": "id < 3"}).reader(schema)
    options = reader._options
    assert (options.uri, options.level, options.filter) == (uri, "durable", "id < 3")
    with raises(Invalid):  # the columns of a query that reads the table
        MemWalSource({}).writer(schema, overwrite=False)
    del schema["name"].metadata["__CHAR_VARCHAR_TYPE_STRING"]  # as Spark passes the columns of the table to write
    with raises(Unavailable):
        MemWalSource({}).writer(schema, overwrite=False)
    for use in (MemWalSource({}).writer, lambda schema, _: MemWalSource({"level": "latest"}).reader(schema)):
        with raises(Invalid):
            use(StructType([StructField("id", LongType())]), False)


# ---- the moment ----------------------------------------------------------------------------------------------------


def test_a_wrong_table_column_filter_endpoint_or_reference_is_said_when_the_moment_is_captured(
    open_small: Callable[..., Any], uri: str
) -> None:
    open_small()
    for options in (
        {"path": f"{uri}x"},
        {"filter": "pric < 3"},
        {"storage_options.x": "env:NO_SUCH_VARIABLE"},
    ):
        with raises(Invalid):
            captured(ReadOptions.of({"path": uri, **options}))
    with raises(Unavailable):
        captured(ReadOptions.of({"path": uri, "endpoint": "grpc://127.0.0.1:9"}))


def test_fragments_are_grouped_by_rows_and_by_bytes() -> None:
    region = wal.bucket_region(0)
    sizes = [(4, 1), (4, 1), (4, 1), (30, 1), (1, BYTES_PER_PARTITION), (1, 1), (1, 0)]
    fragments = tuple(Fragment(number, rows, size) for number, (rows, size) in enumerate(sizes))
    moment = Pinned("t", "", 7, (PinnedRegion(region, (), 0, 3),), fragments)
    groups = [(0, 1), (2,), (3,), (4,), (5, 6)]
    assert shares(moment, 10) == [Share(region=region), *(Share(fragments=group) for group in groups)]


# ---- rows ----------------------------------------------------------------------------------------------------------

NESTED = pa.struct([("i", pa.uint8()), ("v", pa.list_(pa.float32(), 2))])
ROWS = pa.table(
    {
        "id": pa.array([1, 2]),
        "u": pa.array([2**64 - 1, None], pa.uint64()),
        "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4), pa.float16()), 2),
        "t": pa.array(["x", None], pa.large_string()),
        "d": pa.array([date(2020, 1, 2), None]),
        "ns": pa.array([1_000, 2_000], pa.timestamp("ns")),
        "utc": pa.array([1, None], pa.timestamp("s", "Asia/Tokyo")),
        "m": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
        "st": pa.array([{"i": 255, "v": [1.0, 2.0]}, None], NESTED),
    }
)


def as_spark_takes_them(rows: pa.Table) -> pa.Table:
    schema = arrow_schema(schema_of_columns(rows.schema, None))
    batches = list(spark_batches(iter([rows]), schema))
    assert all(batch.schema.equals(schema) for batch in batches)
    return pa.Table.from_batches(batches, schema)


def test_values_are_the_same_in_the_types_of_spark() -> None:
    one, two = as_spark_takes_them(ROWS).to_pylist()
    assert one == {
        "id": 1,
        "u": Decimal(2**64 - 1),
        "v": [0.0, 1.0],
        "t": "x",
        "d": date(2020, 1, 2),
        "ns": datetime(1970, 1, 1, 0, 0, 0, 1),  # noqa: DTZ001 - without a time zone
        "utc": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        "m": Decimal("1.50"),
        "st": {"i": 255, "v": [1.0, 2.0]},
    }
    assert [name for name, value in two.items() if value is None] == ["u", "t", "d", "utc", "m", "st"]


def test_batches_are_bounded_and_slices_of_vectors_keep_their_rows() -> None:
    n = 2 * ROWS_PER_BATCH + 5
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * n), pa.float32()), 2)
    rows = pa.table({"id": pa.array(np.arange(n)), "v": vectors}).slice(3)
    schema = arrow_schema(schema_of_columns(rows.schema, None))
    batches = list(spark_batches(iter([rows]), schema))
    assert max(batch.num_rows for batch in batches) == ROWS_PER_BATCH
    found = pa.Table.from_batches(batches)
    assert found.column("v").to_pylist() == rows.column("v").to_pylist()


def test_a_time_between_microseconds_is_refused_by_its_column() -> None:
    rows = pa.table({"id": pa.array([1]), "ns": pa.array([1_001], pa.timestamp("ns"))})
    with raises(Invalid):
        as_spark_takes_them(rows)


def test_each_column_of_a_type_that_spark_lacks_is_named_unless_it_is_left_out() -> None:
    schema = ROWS.schema.append(pa.field("took", pa.duration("s"))).append(pa.field("at", pa.time64("us")))
    with pytest.raises(Invalid) as caught:
        schema_of_columns(schema, None)
    assert [line.partition(";")[0] for line in caught.value.lines] == [
        "column 'took': Spark has no type for duration[s]",
        "column 'at': Spark has no type for time64[us]",
    ]
    assert schema_of_columns(schema, ["st", "id"]).fieldNames() == ["st", "id"]
    with raises(Invalid):
        schema_of_columns(schema, ["idd"])


def test_a_schema_of_the_user_must_have_the_types_of_the_table() -> None:
    expect_types(StructType([StructField("id", LongType())]), ROWS.schema)
    with raises(Invalid):
        expect_types(StructType([StructField("id", StringType())]), ROWS.schema)
    with raises(Invalid):
        expect_types(StructType([StructField("nope", StringType())]), ROWS.schema)


QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}, "wal": {"read_lease": "0s"}}
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
Rows = list[tuple[Any, ...]]


def table_of(uri: str, **options: Any) -> Any:
    new = {"schema": SCHEMA, "key": "id", "regions": 3} | options
    return memwal.open(uri, settings=QUIET, **({} if Path(uri).exists() else new))


def put(table: Any, ids: Any, n: int) -> None:
    table.put([{"id": id, "n": n} for id in ids])


class Query:
    """A stand-in for Spark: it stores the ends of micro-batches as text, and may repeat the last one anywhere."""

    def __init__(self, uri: str, **options: str) -> None:
        source = MemWalSource({"path": uri, "since": "earliest"} | options)
        schema = source.schema()
        self.reader = pickle.loads(pickle.dumps(source)).streamReader(schema)
        self.ends: list[str] = []

    def start(self, number: int) -> dict[str, Any]:
        return json.loads(self.ends[number - 1]) if number else json.loads(json.dumps(self.reader.initialOffset()))

    def plan(self, *, everything: bool = False) -> bool:
        """Plan a micro-batch; return whether there is one."""
        start = self.start(len(self.ends))
        limit = ReadAllAvailable() if everything else self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(start, limit))
        if end == json.dumps(start):
            return False
        self.ends.append(end)
        return True

    def parts(self, number: int) -> list[Rows]:
        """Return the rows of a micro-batch by partition; each partition is read as by a separate process."""
        parts = self.reader.partitions(self.start(number), json.loads(self.ends[number]))
        found = []
        for part in parts:
            reader, sent = pickle.loads(pickle.dumps((self.reader, part)))
            batches = list(reader.read(sent))
            found.append([tuple(row.values()) for batch in batches for row in batch.to_pylist()])
        return found

    def rows(self, number: int) -> Rows:
        return [row for part in self.parts(number) for row in part]

    def all(self) -> Rows:
        while self.plan():
            pass
        return [row for number in range(len(self.ends)) for row in self.rows(number)]


def told(uri: str, since: Any = None, **options: Any) -> Rows:
    changes = memwal.open(uri, read_only=True).changes(since, **options).read_all()
    return [tuple(row.values()) for row in changes.to_pylist()]


def resized(uri: str, to: int) -> None:
    flush.resize(uri, None, wal.open_store(uri), to, clock=wal.SystemClock(), ids=wal.SystemIds())


@pytest.mark.parametrize(("key", "most"), [("id", "1"), ("id", "7"), ("id", None), ((), "7")])
def test_micro_batches_of_any_size_have_every_change_once_over_resizes(uri: str, key: Any, most: str | None) -> None:
    regions = (3, 1, 4)
    table = table_of(uri, key=key)
    query = Query(uri, **({} if most is None else {"max_rows_per_batch": most}))
    assert query.plan()  # empty: it fixes where the stream begins
    for number, count in enumerate(regions):
        if number:
            table.close()
            resized(uri, count)
            table = table_of(uri)
        for n in range(extent(3, 5)):
            put(table, range(n, n + 6), 10 * number + n)
            if key:
                table.delete([n])
    table.close()
    begin = json.loads(query.ends[0])["start"]
    assert sorted(query.all(), key=repr) == sorted(told(uri, begin), key=repr)
    batches = [query.rows(number) for number in range(len(query.ends))]
    if most is not None:
        assert max(map(len, batches)) <= max(6, int(most))  # 6: the most rows of an entry here
        assert len(batches) > 3
    for id in range(10 if key else 0):  # without a key, rows with the same id may lie in different regions
        of_key = [row[-1] for batch in batches for row in batch if row[-2] == id and row[-1] is not None]
        assert of_key == sorted(of_key)


def test_a_micro_batch_is_the_same_whenever_it_is_read(uri: str) -> None:
    with table_of(uri) as table:
        put(table, range(9), 0)
        query = Query(uri, images="both", max_rows_per_batch="10")
        put(table, range(6), 1)
        table.delete([2, 77])
        put(table, [2, 3], 2)
        query.all()
        before = [query.parts(number) for number in range(len(query.ends))]
        assert sum(len(part) for batch in before for part in batch) == 9 + 2 * 6 + 1 + 1 + 2
        put(table, range(9), 3)
        for step in (table.flush, table.commit, lambda: collect(uri, changes=3600.0), table.close):
            step()
            assert [query.parts(number) for number in range(len(before))] == before
    with memwal.open(uri, settings=QUIET, take_over=True) as table:
        put(table, range(3), 4)
        assert [query.parts(number) for number in range(len(before))] == before


def test_the_keys_of_a_micro_batch_are_divided_by_region(uri: str) -> None:
    with table_of(uri) as table:
        query = Query(uri)
        put(table, range(20), 0)
        put(table, range(20), 1)
        query.all()
        parts = query.parts(0)
    assert len(parts) == 3
    assert [[row[-1] for row in part if row[-2] == id] for part in parts for id in {row[-2] for row in part}] == (
        [[0, 1]] * 20
    )


def test_latest_is_fixed_by_the_first_micro_batch_and_stays_so_when_it_is_repeated(uri: str) -> None:
    with table_of(uri) as table:
        put(table, range(5), 0)
        query = Query(uri, since="latest")
        assert query.plan()
        assert not query.plan()
        put(table, range(3), 1)
        assert query.plan()
        query.reader = Query(uri, since="latest").reader  # a new process, which asks for the initial offset again
        assert query.rows(0) == []
        assert sorted(row[-2:] for row in query.rows(1)) == [(0, 1), (1, 1), (2, 1)]


def test_available_now_ends_where_the_table_ended_when_it_began(uri: str) -> None:
    with table_of(uri) as table:
        put(table, range(5), 0)
        query = Query(uri, max_rows_per_batch="2")
        query.reader.prepareForTriggerAvailableNow()
        put(table, range(5), 1)
        assert {row[-1] for row in query.all()} == {0}
        query.reader = Query(uri, max_rows_per_batch="2").reader
        assert query.plan(everything=True)
        assert {row[-1] for row in query.rows(len(query.ends) - 1)} == {1}
        assert not query.plan()
        position = json.dumps(table.changes_position())
        put(table, [1], 2)
        assert [row[-2:] for row in Query(uri, since=position).all()] == [(1, 2)]


def test_changed_columns_end_a_stream_of_all_columns_and_no_other(uri: str) -> None:
    with table_of(uri) as table:
        put(table, [1], 0)
        whole, named = Query(uri), Query(uri, columns="n")
        for query in (whole, named):
            query.plan()
        lance.dataset(uri).add_columns(pa.field("more", pa.int64()))
        table.put([{"id": 2, "n": 5, "more": 7}])
        with raises(Invalid):
            whole.plan()
        assert [row[-2:] for row in named.all()] == [(1, 0), (2, 5)]
        again = Query(uri)
        again.ends = whole.ends
        assert [row[-3:] for row in again.all()] == [(1, 0, None), (2, 5, 7)]
        table.close()
        lance.dataset(uri).drop_columns(["n"])
        for query in (named, again):
            with raises(Invalid):
                query.plan()


def test_positions_that_cannot_be_read_are_refused(uri: str, tmp_path: Path) -> None:
    with table_of(uri) as table:
        query, limited = Query(uri), Query(uri, max_rows_per_batch="5")
        for n in range(4):
            for each in (query, limited) if n == 1 else ():
                each.plan()
            put(table, range(6), n)
            table.flush()
            table.commit()
        collect(uri)
        with raises(Invalid):
            limited.plan()
        assert query.plan()
        with raises(Invalid):
            query.rows(1)
        ahead = json.loads(query.ends[-1])
        ahead["regions"] = {region: position + 50 for region, position in ahead["regions"].items()}
        with raises(Invalid):
            Query(uri, since=json.dumps(ahead)).plan()
    other = str(tmp_path / "other.lance")
    with table_of(other), raises(Invalid):
        Query(other, since=query.ends[0]).plan()


def test_a_stream_needs_since_and_takes_no_options_of_a_read(uri: str) -> None:
    with table_of(uri):
        with raises(Invalid):
            MemWalSource({"path": uri}).streamReader(MemWalSource({"path": uri}).schema())
        with pytest.raises(Invalid) as caught:
            Query(uri, level="latest", since="now", images="x", max_rows_per_batch="0")
        assert [line.partition(":")[0].partition(";")[0] for line in caught.value.lines] == [
            "option 'level' is unknown",
            "option since = 'now'",
            "option images = 'x'",
            "option max_rows_per_batch = '0'",
        ]
        source = MemWalSource({"path": uri, "since": "latest"})
        schema = source.schema()
        with raises(Invalid):
            source.reader(schema)


def test_a_column_with_a_name_that_changes_need_is_refused(uri: str) -> None:
    with (
        memwal.open(uri, schema=SCHEMA.append(pa.field("_row", pa.int64())), key="id", settings=QUIET),
        raises(Invalid),
    ):
        Query(uri)


def test_a_schema_of_the_user_selects_columns(uri: str) -> None:
    with table_of(uri) as table:
        query = Query(uri)
        source = MemWalSource({"path": uri, "since": "earliest"})
        schema = StructType([StructField("n", LongType()), StructField("_change", StringType())])
        query.reader = pickle.loads(pickle.dumps(source)).streamReader(schema)
        put(table, [1], 5)
        lance.dataset(uri).add_columns(pa.field("more", pa.int64()))
        assert query.all() == [(5, "insert")]
