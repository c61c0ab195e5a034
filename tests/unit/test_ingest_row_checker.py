"""The checks of a row before it is sent to its region."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from memwal import Invalid
from memwal.flush import WriteRules
from memwal.ingest.engine.api.rows import RowChecker
from memwal.memtable import TOMBSTONE, InvalidRows, MemTable, row_schema
from tests.messages import raises

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("count", pa.int64()),
        pa.field("at", pa.int64()),
    ]
)


def checker(**rules: str) -> RowChecker:
    return RowChecker(
        MemTable(row_schema(SCHEMA, ["id"]), ["id"], [], generation=0), ("name", "at"), WriteRules(**rules)
    )


def test_rows_get_every_column_and_say_that_they_delete_nothing() -> None:
    rows = pa.table({"at": [1, 2], "name": ["a", "b"], "id": pa.array([1, 2], pa.int32())})
    assert checker().check(rows).to_pylist() == [
        {"id": 1, "name": "a", "count": None, "at": 1, TOMBSTONE: False},
        {"id": 2, "name": "b", "count": None, "at": 2, TOMBSTONE: False},
    ]


@pytest.mark.parametrize("given", [{"id": [1], "at": [1]}, {"id": [1], "name": [None], "at": [1]}])
def test_a_required_column_is_there_and_not_null(given: dict[str, list[object]]) -> None:
    with raises(InvalidRows):
        checker(upsert="insert").check(pa.table(given, schema=pa.schema([SCHEMA.field(name) for name in given])))


@pytest.mark.parametrize("upsert", ["replace", "merge"])
def test_a_put_that_keeps_stored_values_may_lack_all_but_the_version(upsert: str) -> None:
    keeping = checker(upsert=upsert, version="at")
    assert keeping.check(pa.table({"id": [1], "at": [1]})).num_rows == 1
    with raises(InvalidRows):
        keeping.check(pa.table({"id": [1], "count": [1]}))


def test_rows_that_delete_need_their_key_alone() -> None:
    rows = pa.table({"id": [1, 2], "name": ["a", None], "at": pa.array([1, None], pa.int64())})
    whole = checker().check(rows, np.array([False, True]))
    assert whole[TOMBSTONE].to_pylist() == [False, True]
    assert checker().check(rows.select(["id"]), True).num_rows == 2
    checker().check_keys(rows.select(["id"]))


def test_text_that_is_not_utf8_is_refused_by_row() -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    with raises(Invalid):
        checker().check(pa.table({"id": [1], "name": bad, "at": [1]}))
