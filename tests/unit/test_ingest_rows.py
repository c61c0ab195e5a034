"""Rows in every form become one Arrow table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ingest.errors import Invalid
from ingest.rows import as_table

SCHEMA = pa.schema([pa.field("k", pa.int32(), nullable=False), pa.field("v", pa.list_(pa.float32(), 2))])
TABLE = pa.table({"k": pa.array([1, 2], pa.int32()), "v": pa.array([[1, 2], None], pa.list_(pa.float32(), 2))})


class Frame:
    """What pandas and polars look like to Arrow."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "rows",
    [
        TABLE,
        TABLE.to_batches()[0],
        TABLE.to_reader(),
        Frame(),
        [{"k": 1, "v": [1, 2]}, {"k": 2}],
    ],
    ids=["table", "batch", "reader", "frame", "dicts"],
)
def test_every_form_gives_the_same_table(rows: Any) -> None:
    assert as_table(rows, SCHEMA) == TABLE


def test_a_name_that_only_a_later_dict_has_is_kept() -> None:
    assert as_table([{"k": 1}, {"k": 2, "other": "x"}], SCHEMA).column_names == ["k", "other"]


def test_a_value_that_does_not_fit_names_its_column_and_type() -> None:
    with pytest.raises(Invalid, match="column 'k', which is int32"):
        as_table([{"k": "one"}], SCHEMA)


def test_what_holds_no_rows_is_refused_with_what_would_do() -> None:
    with pytest.raises(Invalid, match="list of dicts"):
        as_table(42, SCHEMA)
