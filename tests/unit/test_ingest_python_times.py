"""Rows with times that Python's types cannot hold are still converted to Python values."""

from __future__ import annotations

import io
from datetime import datetime
from typing import Any, cast

import pyarrow as pa
import pytest
from rich.console import Console

from memwal.ingest.cli.print import RowTables
from memwal.ingest.engine.api.results import python_rows, python_values

FAR = pa.array([2**60, None, 0])


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (FAR.view(pa.timestamp("us")), ["38504-08-17T21:30:06.846976", None, "1970-01-01T00:00:00.000000"]),
        (FAR.view(pa.timestamp("us", "Europe/Berlin")), ["Z", None, "1970-01-01T00:00:00.000000Z"]),
        (pa.array([2**31 - 1, None], pa.int32()).view(pa.date32()), ["5881580-07-11", None]),
        (pa.array([2_000_000_000_000_000_000, None]).view(pa.duration("s")), ["2000000000000000000", None]),
        (pa.array([[2**60], None], pa.list_(pa.int64())), [[2**60], None]),
    ],
)
def test_a_time_beyond_python_is_text(column: pa.Array, expected: list[Any]) -> None:
    for given in (column, pa.chunked_array([column])):
        for found, text in zip(python_values(given), expected, strict=True):
            assert found == text or str(found).endswith(str(text))


def test_a_list_of_such_times_is_what_arrow_prints() -> None:
    column = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([2**60]).view(pa.timestamp("us")))
    assert "1152921504606846976" in python_values(column)[0]


def test_other_columns_stay_as_they_are() -> None:
    rows = pa.table({"a": [1], "at": pa.array([0]).view(pa.timestamp("us")), "far": FAR.view(pa.timestamp("us"))[:1]})
    (row,) = python_rows(rows)
    assert row["a"] == 1
    assert row["at"] == datetime(1970, 1, 1)  # noqa: DTZ001 - a column without a zone
    assert row["far"].startswith("38504-")


def test_text_that_is_not_utf8_is_still_refused() -> None:
    with pytest.raises(UnicodeDecodeError):
        python_values(pa.array([b"\xe9"]).view(pa.string()))


def test_query_prints_a_table_with_such_a_time() -> None:
    rows = pa.table({"id": [1], "at": FAR.view(pa.timestamp("us"))[:1]})
    console = Console(file=io.StringIO(), width=100)
    RowTables(console).print(rows)
    assert "38504-08-17T21:30:06" in cast("io.StringIO", console.file).getvalue()
