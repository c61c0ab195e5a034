"""Rows routed without storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.flush import BaseTable
from memwal.flush.base.sharding import Routing

SCHEMA = pa.schema(
    [
        pa.field("a", pa.string(), nullable=False),
        pa.field("b", pa.int32(), nullable=False),
        pa.field("raw", pa.binary()),
    ]
)
ROWS = pa.table(
    {"a": [f"k{n}" for n in range(300)], "b": list(range(300)), "raw": [bytes([n % 256]) for n in range(300)]},
    schema=SCHEMA,
)


@pytest.mark.parametrize(
    ("key", "append_by"), [(("a",), None), (("b", "a"), None), ((), ()), ((), ("b",)), ((), ("raw", "a"))]
)
def test_a_row_goes_where_the_table_itself_would_send_it(tmp_path: Path, key: Any, append_by: Any) -> None:
    base = BaseTable.create(str(tmp_path / "t.lance"), SCHEMA, key, 5, (), append_by=append_by)
    travelled = Routing.parse(json.loads(json.dumps(base.routing._asdict())))
    assert travelled == base.routing
    found = travelled.hash(base.schema)(ROWS)
    assert np.array_equal(found, base.route(ROWS))
    assert set(found.tolist()) == set(range(5))


def test_a_column_that_is_renamed_or_dropped_is_found_by_its_id(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    before = BaseTable.create(uri, SCHEMA, (), 5, (), append_by=())
    before.dataset.alter_columns({"path": "a", "name": "c"})
    after = BaseTable.open(uri)
    renamed = ROWS.rename_columns(["c", "b", "raw"])
    assert np.array_equal(after.routing.hash(after.schema)(renamed), before.route(ROWS))
