"""Another program adds or drops columns with Lance while rows are not committed yet: no row is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from tests.conftest import Made
from tests.messages import raises


def filled(table: Any, made: Made) -> None:
    """Put rows into the base table, into SSTs and into memtables."""
    for first in (0, 10, 20):
        table.put(made.rows(range(first, first + 10)))
        if first < 20:
            table.flush()
        if first < 10:
            table.commit()


@pytest.mark.parametrize("reopened", [True, False])
def test_a_nullable_column_added_to_a_table_in_use(
    open_small: Callable[..., Any], uri: str, made: Made, reopened: bool
) -> None:
    table = open_small()
    filled(table, made)
    lance.dataset(uri).add_columns(pa.field("grade", pa.int64()))
    if not reopened:  # an open table works as before
        table.put(made.rows([30]))
        table.flush()
        table.commit()
        assert lance.dataset(uri).count_rows() == 31
    table.close()
    with _again(uri) as again:
        again.put([made.row(5, 1) | {"grade": 7}, made.row(40) | {"grade": 8}])
        again.flush()
        again.commit()
        found = {
            row["id"]: row["grade"] for row in again.scan(["id", "grade"], level="committed").read_all().to_pylist()
        }
    rows = range(30) if reopened else range(31)
    assert found == dict.fromkeys(rows, None) | {5: 7, 40: 8}


@pytest.mark.parametrize("dropped", ["price", "body", "vector", "name"])
def test_a_column_dropped_from_a_table_in_use(
    open_small: Callable[..., Any], uri: str, made: Made, dropped: str
) -> None:
    table = open_small()
    filled(table, made)
    lance.dataset(uri).drop_columns([dropped])
    table.flush()
    table.commit()
    assert lance.dataset(uri).count_rows() == 30
    table.close()
    with _again(uri) as again:
        rest = {name: value for name, value in made.row(5, 1).items() if name != dropped}
        again.put([rest])
        again.flush()
        again.commit()
        assert again.get([5]).to_pylist() == [rest]
        assert again.count() == 30
        assert dropped not in again.scan(limit=1).read_all().column_names


def test_a_put_with_the_name_of_a_dropped_column_that_another_has_now(
    open_small: Callable[..., Any], uri: str, made: Made
) -> None:
    table = open_small()
    filled(table, made)
    lance.dataset(uri).drop_columns(["price"])
    table.scan().read_all()  # the table knows that the column was dropped
    lance.dataset(uri).alter_columns({"path": "name", "name": "price"})
    row = {name: value for name, value in made.row(40).items() if name not in {"name", "price"}}
    table.put([row | {"price": "ten"}])
    assert [row["price"] for row in table.get([40]).to_pylist()] == ["ten"]


def test_what_lance_refuses_while_rows_may_be_on_their_way(
    open_small: Callable[..., Any], uri: str, made: Made
) -> None:
    with open_small() as table:
        filled(table, made)
    dataset = lance.dataset(uri)
    for change, said in (
        (lambda: dataset.add_columns({"double": "price * 2"}), "computed column"),
        (lambda: dataset.add_columns(pa.field("x", pa.int64(), nullable=False)), "must be nullable"),
        (lambda: dataset.alter_columns({"path": "price", "data_type": pa.int32()}), "column's type"),
        (lambda: dataset.alter_columns({"path": "price", "nullable": False}), "non-nullable"),
        (lambda: dataset.alter_columns({"path": "id", "name": "key"}), "rename a primary key"),
    ):
        with pytest.raises(OSError, match=said):
            change()
    assert lance.dataset(uri).version == dataset.version


def _again(uri: str) -> Any:

    return memwal.open(uri, settings={"commit": {"interval": "0s"}})


def test_a_table_without_its_key_is_refused_in_one_line(open_small: Callable[..., Any], uri: str, made: Made) -> None:
    """Lance drops key columns without an error."""
    table = open_small()
    filled(table, made)
    table.close()
    lance.dataset(uri).drop_columns(["id"])
    with raises(memwal.Invalid):
        _again(uri)
