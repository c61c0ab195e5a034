"""Requests that a reader rejects, and the errors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal.ingest.engine.api.arguments import at_least_one, checked_limit
from memwal.ingest.engine.api.reads import check_level
from memwal.ingest.engine.read.request import (
    checked_columns,
    checked_vector,
    expect_indexed,
    unknown_column,
)
from memwal.ingest.errors import Invalid
from memwal.memtable import IndexSpec
from memwal.memtable.filter.translation import checked
from tests.messages import raises

SCHEMA = pa.schema(
    {
        "package": pa.string(),
        "description": pa.string(),
        "embedding": pa.list_(pa.float32(), 3),
        "odd name": pa.int64(),
    }
)
SPECS = (IndexSpec("embedding", "ivf_pq"), IndexSpec("description", "fts"))
KNOWN: Any = SimpleNamespace(schema=SCHEMA, indexes=SPECS, gone={})
WIDE = SCHEMA.field("embedding").type


@pytest.mark.parametrize(
    "ask",
    [
        lambda: checked_columns(["pakage"], SCHEMA),
        lambda: checked_columns([], SCHEMA),
        lambda: at_least_one(0),
        lambda: at_least_one(True),
        lambda: at_least_one(2.5),
        lambda: checked_limit(-1),
        lambda: checked_vector([1, 2], "embedding", WIDE),
        lambda: checked_vector([[1, 2, 3]], "embedding", WIDE),
        lambda: checked_vector(5, "embedding", WIDE),
        lambda: checked_vector([1, float("nan"), 3], "embedding", WIDE),
        lambda: checked_vector(["a", "b", "c"], "embedding", WIDE),
        lambda: expect_indexed("embeding", "ivf_pq", "search", KNOWN),
        lambda: expect_indexed("package", "fts", "match", KNOWN),
        lambda: check_level("lastest"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line_that_names_the_field(ask: Callable[[], Any]) -> None:
    with raises(Invalid):
        ask()


def test_all_columns_are_meant_when_none_are_named_and_repeats_count_once() -> None:
    assert checked_columns(None, SCHEMA) == SCHEMA.names
    assert checked_columns(["package", "description", "package"], SCHEMA) == ["package", "description"]


@pytest.mark.parametrize("vector", [[1, 2, 3], np.arange(1, 4), pa.array([1.0, 2.0, 3.0]), (1.0, 2.0, 3.0)])
def test_a_vector_may_be_any_list_of_numbers(vector: Any) -> None:
    assert checked_vector(vector, "embedding", WIDE).tolist() == [1.0, 2.0, 3.0]


def test_a_vector_may_be_a_value_of_the_column() -> None:
    value = pa.array([[1.0, 2.0, 3.0]], WIDE)[0]

    assert checked_vector(value, "embedding", WIDE).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("filter", "says"),
    [
        ("packge = 'x'", "column 'packge' does not exist; did you mean 'package'?"),
        ("upper(descripton) LIKE '%a%'", "did you mean 'description'?"),
        ("`odd nam` > 1", "did you mean 'odd name'?"),
        ('PACKAGE = "packge" AND `odd name` IS NOT NULL', None),
        ("cast(package as bigint) > 1 AND starts_with(package, 'a') AND package > date '2020-01-01'", None),
    ],
)
def test_a_filter_is_blamed_on_the_first_word_that_names_no_column(filter: str, says: str | None) -> None:
    found = unknown_column(checked(filter, SCHEMA.names), SCHEMA.names)

    assert (found or "").endswith(says or "")
    assert (found is None) == (says is None)
