"""The data source for Spark, tested without Spark: options, the division of a moment, and rows in Spark's types."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from memwal import wal
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
from tests.messages import raises

SECRET = "never-to-be-shown-6174"


# ---- options -------------------------------------------------------------------------------------------------------


def test_options_have_the_defaults_of_every_read() -> None:
    read = ReadOptions.of({"path": "t.lance"})
    assert (read.uri, read.level, read.columns, read.filter) == ("t.lance", "latest", None, None)
    assert read.rows_per_partition == ROWS_PER_PARTITION
    assert read.storage_options() == {}


def test_all_wrong_options_are_named_at_once() -> None:
    options = {"levl": "x", "level": "durabel", "columns": " ", "rows_per_partition": "-1", "filter": "", "path": " "}
    with raises(Invalid):
        ReadOptions.of(options)


@pytest.mark.parametrize("name", ["storage_options", "storage_options.", "paths", "storage_optoins.region"])
def test_names_that_only_look_like_options_are_refused(name: str) -> None:
    with raises(Invalid):
        ReadOptions.of({"path": "t.lance", name: "x"})


@pytest.mark.parametrize(
    ("text", "names"),
    [("a, b,a", ("a", "b")), ('["a,b", "c"]', ("a,b", "c")), ("[1]", None), ("[", None), ("[]", None)],
)
def test_columns_are_names_by_commas_or_a_json_list(text: str, names: tuple[str, ...] | None) -> None:
    options = {"path": "t.lance", "columns": text}
    if names is not None:
        assert ReadOptions.of(options).columns == names
        return
    with raises(Invalid):
        ReadOptions.of(options)


def test_secrets_are_resolved_where_they_are_used_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"path": "s3://b/t", "storage_options.secret_access_key": "env:S3_SECRET", "storage_options.region": "eu"}
    read = pickle.loads(pickle.dumps(ReadOptions.of({**options, "token": "env:TOKEN"})))
    monkeypatch.setenv("S3_SECRET", SECRET)
    assert read.storage_options() == {"secret_access_key": SECRET, "region": "eu"}
    assert SECRET.encode() not in pickle.dumps(read)
    literal = ReadOptions.of({**options, "storage_options.secret_access_key": SECRET, "token": SECRET})
    assert SECRET not in repr(literal)
    assert SECRET not in str(vars(MemWalSource({**options, "storage_options.secret_access_key": SECRET})))


def test_a_client_certificate_needs_its_key() -> None:
    given = {"path": "t.lance", "tls_ca": "ca.pem", "tls_cert": "c.pem"}
    with raises(Invalid):
        ReadOptions.of(given)
    access = ReadOptions.of({**given, "tls_key": "k.pem"}).access
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
