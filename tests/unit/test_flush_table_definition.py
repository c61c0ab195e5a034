"""Invalid table definitions and their messages; the check opens no table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from memwal.flush import WriteRules
from memwal.flush.base.create import check_definition
from memwal.flush.base.setup import Setup
from memwal.memtable import IndexSpec, InvalidRows

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
    ("key", "given", "says"),
    [
        (["id"], setup(buckets=0), "regions.count = 0: a table has at least 1 region"),
        (["id"], setup(indexes=(IndexSpec("pric", "btree"),)), "pric"),
        ([], setup(), "the table has no key: name at least one key column, or choose append_only"),
        (["blob"], setup(wal_format="arrow"), "'blob' has the type binary, and Lance cannot shard"),
        (["day"], setup(), r"'day' has the type date32\[day\]: a key must be an integer, bool, string or binary"),
        (["id"], setup(rules=WriteRules(version="sen")), "'sen' is not in the table; did you mean 'seen'"),
        (["id"], setup(rules=WriteRules(version="id")), "'id' is part of the key"),
        ([], setup(append_by=(), rules=WriteRules(version="seen")), "needs a key, and the table has none"),
        (["id"], setup(rules=WriteRules(version="price")), "'price' has the type double"),
        (["id"], setup(rules=WriteRules("insert", version="seen")), "upsert = 'insert' never replaces one"),
        (["id"], setup(append_by=()), "the key id is given for a table whose rows are only appended"),
        ([], setup(append_by=(), wal_format="arrow"), "wal.format = 'arrow' needs a key"),
        ([], setup(append_by=("dy",)), "regions.by: column 'dy' is not in the table; did you mean 'day'"),
        ([], setup(append_by=("day", "day")), "regions.by names 'day' twice"),
        ([], setup(append_by=("tags",)), "regions.by: column 'tags' is of type list"),
    ],
)
def test_what_a_table_cannot_be_is_said_with_what_to_do(key: list[str], given: Setup, says: str) -> None:
    with pytest.raises(InvalidRows, match=says):
        check_definition(SCHEMA, key, given)
