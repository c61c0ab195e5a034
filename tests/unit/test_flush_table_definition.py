"""Invalid table definitions and their messages; the check opens no table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from memwal.flush import WriteRules
from memwal.flush.base.create import check_definition
from memwal.flush.base.setup import Setup
from memwal.memtable import IndexSpec, InvalidRows
from tests.messages import raises

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("blob", pa.binary(), nullable=False),
        pa.field("day", pa.date32(), nullable=False),
        pa.field("price", pa.float64()),
        pa.field("seen", pa.timestamp("us")),
        pa.field("tags", pa.list_(pa.string())),
    ]
)


def setup(**more: Any) -> Setup:
    return Setup(**{"buckets": 4, "indexes": (), "wal_format": "lance"} | more)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        (["id"], setup()),
        (["blob"], setup()),
        (["id", "blob"], setup(wal_format="arrow")),
        (["id"], setup(rules=WriteRules(version="seen"))),
        (["id"], setup(indexes=(IndexSpec("price", "btree"),))),
        ([], setup(append_by=())),
        ([], setup(append_by=("day", "price"))),
    ],
)
def test_what_a_table_can_be(key: list[str], given: Setup) -> None:
    check_definition(SCHEMA, key, given)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        (["nope"], setup()),
        (["id", "id"], setup()),
        (["tags"], setup()),
        (["id"], setup(buckets=0)),
        (["id"], setup(indexes=(IndexSpec("price", "fts"),))),
        (["id"], setup(indexes=(IndexSpec("pric", "btree"),))),
        ([], setup()),
        (["blob"], setup(wal_format="arrow")),
        (["day"], setup()),
        (["id"], setup(rules=WriteRules(version="sen"))),
        (["id"], setup(rules=WriteRules(version="id"))),
        ([], setup(append_by=(), rules=WriteRules(version="seen"))),
        (["id"], setup(rules=WriteRules(version="price"))),
        (["id"], setup(rules=WriteRules("insert", version="seen"))),
        (["id"], setup(append_by=())),
        ([], setup(append_by=(), wal_format="arrow")),
        ([], setup(append_by=("dy",))),
        ([], setup(append_by=("day", "day"))),
        ([], setup(append_by=("tags",))),
    ],
)
def test_what_a_table_cannot_be_is_said_with_what_to_do(key: list[str], given: Setup) -> None:
    with raises(InvalidRows):
        check_definition(SCHEMA, key, given)
