"""Kafka records without Kafka: batches in the form of Spark's source, and mappings from a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from memwal.ingest.settings.load import Settings, load
from memwal.ingest.spark.source.columns import DELETE, PROBLEM
from memwal.ingest.spark.source.kafka.rows import column_name, mapped, record_mapping
from memwal.ingest.values.spec import RecordMapping
from tests.kafka_server import Record

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def kafka_settings(table: Mapping[str, str], *, key: Sequence[str] = ("id",), **source: Any) -> Settings:
    """Return the configuration of a table with a Kafka source."""
    keyed = {"key": list(key)} if key else {"append_only": True}
    given = {"format": "kafka", "brokers": "127.0.0.1:9092", "topics": ["t"], **source}
    return load({"table": {"uri": "t.lance", "columns": dict(table), **keyed}, "source": given}, {})


def mapping_of(settings: Settings) -> RecordMapping:
    """Return the mapping that a configuration declares."""
    return record_mapping(settings.source, settings.arrow_schema(), tuple(settings.table.key))


def batch_of(records: Sequence[Record]) -> pa.RecordBatch:
    """Return records of topic t, partition 0, with offsets from 0."""
    count = len(records)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([each.key for each in records], pa.binary()),
            "value": pa.array([each.value for each in records], pa.binary()),
            "topic": pa.array(["t"] * count, pa.string()),
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array(range(count), pa.int64()),
            "timestamp": pa.array([WHEN] * count, pa.timestamp("us", "UTC")),
            "headers": pa.array(
                [[{"key": name, "value": value} for name, value in each.headers.items()] for each in records], _HEADERS
            ),
        }
    )


def rows_of(settings: Settings, *records: Record) -> list[dict[str, Any]]:
    """Return the mapping's result for each record: its columns, `delete` if it deletes, `problem` if it has one."""
    mapping = mapping_of(settings)
    found = []
    for row in mapped(batch_of(records), mapping).to_pylist():
        values = {c.name: row[column_name(n)] for n, c in enumerate(mapping.columns) if c.leaf is not None}
        if row[PROBLEM] is not None:
            found.append({"problem": row[PROBLEM]})
        else:
            found.append(({"delete": True} if row[DELETE] else {}) | values)
    return found
