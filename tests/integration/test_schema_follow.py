"""Another program changes the table with Lance while it is open: reads, puts and commits continue,
and no row is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table.writes import TableWrites
from tests.conftest import ROOT, Made, OpenSmall, wait_until
from tests.messages import raises
from tests.support.interpose import Once, no_pruning
from tests.ways import entered

LEVELS = ("committed", "flushed", "durable", "latest")
WAYS = ("embedded", "flight", "storage")


class Open:
    """One owner with rows at every level (0-9 base, 10-19 SST, 20-29 memtable), and a reader of the kind `way`."""

    def __init__(self, table: Any, reader: Any, uri: str, made: Made, way: str = "embedded") -> None:
        self.table, self.reader, self.uri, self.made, self.way = table, reader, uri, made, way

    @property
    def lance(self) -> Any:
        return lance.dataset(self.uri)

    def there(self, level: str = "latest") -> dict[int, Any]:
        return {row["id"]: row for row in self.reader.scan(level=level).read_all().to_pylist()}

    def expected(self, ids: Any, **changed: Any) -> dict[int, Any]:
        """Return the rows as they were put, except for `changed`: a column's new name, or None if it was dropped."""
        rows = {}
        for id in ids:
            row = {changed.get(name, name): value for name, value in self.made.row(id).items()}
            rows[id] = {name: value for name, value in row.items() if name is not None}
        return rows

    def drain(self) -> None:
        self.table.flush()
        self.table.commit()


@pytest.fixture(params=WAYS)
def opened(request: Any, open_small: OpenSmall, uri: str, made: Made, ends: ExitStack) -> Open:
    table = open_small()
    for first in (0, 10, 20):
        table.put(made.rows(range(first, first + 10)))
        if first < 20:
            table.flush()
        if first < 10:
            table.commit()
    reader = entered(request.param, table, ends)
    opened = Open(table, reader, uri, made, request.param)
    assert len(opened.there()) == 30
    return opened


def writer(opened: Open) -> Any:
    """Return the handle that can put: the daemon's client, or the owner."""
    return opened.table if opened.way == "storage" else opened.reader


def sound(uri: str) -> None:
    found = verify_table(wal.open_store(uri), uri, deep=True)
    assert not found.findings, found.findings


def test_the_recipe_in_the_document(open_small: OpenSmall, uri: str, made: Made) -> None:
    text = (ROOT / "ingest" / "engine" / "table" / "changing_columns.md").read_text()
    recipe = text.partition("```python\n")[2].partition("```")[0]
    assert "alter_columns" in recipe
    table = open_small()
    table.put(made.rows(range(10)))
    exec(recipe, {"table": table, "lance": lance, "uri": uri, "pa": pa})
    opened = Open(table, table, uri, made)
    expected = {id: row | {"grade": None} for id, row in opened.expected(range(10), price=None, body="text").items()}
    assert opened.there() == expected
    table.put([{"id": 3, "grade": 7, "text": "harbor"}], missing="null")
    opened.drain()
    assert opened.there("committed") == expected | {
        3: {"id": 3, "name": None, "text": "harbor", "vector": None, "grade": 7}
    }


# ---- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", ["name", "price", "body", "vector"])
def test_reads_of_an_open_table_go_on_without_a_dropped_column(opened: Open, dropped: str) -> None:
    opened.lance.drop_columns([dropped])
    for level in LEVELS:
        ids = {"committed": range(10), "flushed": range(20)}.get(level, range(30))
        assert opened.there(level) == opened.expected(ids, **{dropped: None})
    reader = opened.reader
    reads: list[Callable[[], Any]] = [
        lambda: reader.scan([dropped]).read_all(),
        lambda: reader.get([5], [dropped]),
        lambda: reader.count(f"{dropped} IS NOT NULL"),
        lambda: reader.search(dropped, [0.0] * 8),
        lambda: reader.match(dropped, "harbor"),
    ]
    for read in reads:
        with raises(memwal.Invalid):
            read()
    assert reader.count() == 30
    assert reader.get([5, 15, 25], ["id"]).num_rows == 3
    opened.drain()
    assert opened.there("committed") == opened.expected(range(30), **{dropped: None})
    sound(opened.uri)


def test_reads_of_an_open_table_show_an_added_column_as_null(opened: Open) -> None:
    opened.lance.add_columns(pa.field("grade", pa.int64()))
    for level in LEVELS:
        ids = {"committed": range(10), "flushed": range(20)}.get(level, range(30))
        assert opened.there(level) == {id: row | {"grade": None} for id, row in opened.expected(ids).items()}
    assert opened.reader.count("grade IS NULL") == 30
    assert opened.reader.count("grade = 7") == 0


@pytest.mark.parametrize("old", ["name", "price", "body", "vector"])
def test_a_renamed_column_keeps_its_values_at_every_level(opened: Open, old: str) -> None:
    opened.lance.alter_columns({"path": old, "name": "other"})
    expected = opened.expected(range(30), **{old: "other"})
    for level in LEVELS:
        ids = {"committed": range(10), "flushed": range(20)}.get(level, range(30))
        assert opened.there(level) == {id: expected[id] for id in ids}
    with raises(memwal.Invalid):
        opened.reader.scan([old])
    if old == "vector":  # the index is dropped with its column
        assert opened.reader.search("other", expected[25]["other"], k=1)["id"].to_pylist() == [25]
    if old == "body":
        word = expected[25]["other"].split()[0]
        found = opened.reader.match("other", word, k=100)["id"].to_pylist()
        assert sorted(found) == [id for id, row in expected.items() if word in row["other"]]
    opened.drain()
    assert opened.there("committed") == expected
    assert {spec.name for spec in flush.BaseTable.open(opened.uri).indexes} == {"vector_idx", "body_idx", "price_idx"}
    sound(opened.uri)


def test_a_column_dropped_and_added_anew_has_no_values_of_the_old_one(opened: Open) -> None:
    opened.lance.drop_columns(["price"])
    opened.lance.add_columns(pa.field("price", pa.int64()))
    expected = {id: row | {"price": None} for id, row in opened.expected(range(30)).items()}
    assert opened.there() == expected
    opened.drain()
    assert opened.there("committed") == expected


# ---- puts, flushes, commits ------------------------------------------------------------------------------------------


def test_a_put_with_an_added_column_is_taken_at_once(opened: Open, made: Made) -> None:
    """No read or commit came in between: the put itself detects the new column."""
    opened.lance.add_columns(pa.field("grade", pa.int64()))
    writer(opened).put([made.row(5, 1) | {"grade": 7}, made.row(40) | {"grade": 8}])
    writer(opened).put(made.rows([41]), missing="null")  # and a row without it
    expected = {id: row | {"grade": None} for id, row in opened.expected([*range(30), 40, 41]).items()}
    expected[5] = made.row(5, 1) | {"grade": 7}
    expected[40]["grade"] = 8
    assert opened.there() == expected
    opened.drain()
    assert opened.there("committed") == expected
    sound(opened.uri)


def test_a_put_with_a_dropped_column_is_refused_in_one_line_once_it_is_known(opened: Open, made: Made) -> None:
    opened.lance.drop_columns(["price"])
    opened.table.put(made.rows([30]))  # the change is not detected yet: accepted, and the commit leaves it out
    assert len(opened.there()) == 31
    assert opened.table.count() == 31
    with raises(memwal.Invalid):
        writer(opened).put(made.rows([31]))
    writer(opened).put([{name: value for name, value in made.row(31).items() if name != "price"}])
    writer(opened).delete([0, 20])
    expected = opened.expected([*range(1, 20), *range(21, 32)], price=None)
    assert opened.there() == expected
    opened.drain()
    assert opened.there("committed") == expected
    sound(opened.uri)


def test_a_put_with_the_name_of_a_dropped_column_that_another_has_now(opened: Open, made: Made) -> None:
    opened.lance.drop_columns(["price"])
    opened.table.count()  # the table knows that the column was dropped
    opened.lance.alter_columns({"path": "name", "name": "price"})
    row = {name: value for name, value in made.row(40).items() if name not in {"name", "price"}}
    opened.table.put([row | {"price": "ten"}])
    assert opened.there()[40]["price"] == "ten"


def test_a_column_that_never_was_is_refused_as_before(opened: Open, made: Made) -> None:
    with raises(memwal.Invalid):
        writer(opened).put([made.row(5) | {"grade": 7}])


@pytest.mark.parametrize("first", ["flush", "commit", "put"])
def test_whatever_comes_first_after_a_change_loses_nothing(opened: Open, made: Made, first: str) -> None:
    opened.lance.alter_columns({"path": "price", "name": "cost"})
    opened.lance.add_columns(pa.field("grade", pa.int64()))
    opened.lance.drop_columns(["name"])
    {"flush": opened.table.flush, "commit": opened.table.commit, "put": lambda: opened.table.put(made.rows([30]))}[
        first
    ]()
    ids = range(31 if first == "put" else 30)
    expected = {id: row | {"grade": None} for id, row in opened.expected(ids, price="cost", name=None).items()}
    assert opened.there() == expected
    opened.drain()
    assert opened.there("committed") == expected
    sound(opened.uri)


def test_rows_in_the_log_of_a_table_that_crashed_before_the_change(opened: Open) -> None:
    """Replayed and flushed rows have the old columns."""
    opened.lance.alter_columns({"path": "price", "name": "cost"}, {"path": "vector", "name": "at"})
    opened.lance.drop_columns(["name"])
    opened.lance.add_columns(pa.field("grade", pa.int64()))
    columns = {"price": "cost", "vector": "at", "name": None}
    expected = {id: row | {"grade": None} for id, row in opened.expected(range(30), **columns).items()}
    with memwal.open(
        opened.uri, settings={"commit": {"interval": "0s"}}, take_over=True
    ) as again:  # fences the first owner
        assert {row["id"]: row for row in again.scan().read_all().to_pylist()} == expected
        again.flush()
        again.commit()
        assert {row["id"]: row for row in again.scan(level="committed").read_all().to_pylist()} == expected
    sound(opened.uri)


def test_a_table_that_commits_by_itself_takes_a_change_over(open_small: OpenSmall, uri: str, made: Made) -> None:
    table = open_small(commit="100ms")
    table.put(made.rows(range(10)))
    wait_until(lambda: table.count(level="committed") == 10)
    lance.dataset(uri).add_columns(pa.field("grade", pa.int64()))
    table.put(made.rows(range(10, 20)))
    wait_until(lambda: table.count(level="committed") == 20)
    wait_until(lambda: "grade" in table.schema.names)


# ---- indexes, and older versions -------------------------------------------------------------------------------------


def test_an_index_dropped_by_somebody_is_missed_by_no_read_and_built_again(opened: Open, made: Made) -> None:
    """The index belongs to the table's set-up; a user who does not want it drops the column."""
    for name in ("body_idx", "price_idx"):
        opened.lance.drop_index(name)
    expected = opened.expected(range(30))
    word = expected[5]["body"].split()[0]
    matching = [id for id, row in expected.items() if word in row["body"].split()]
    assert sorted(opened.reader.match("body", word, k=100)["id"].to_pylist()) == matching
    assert opened.reader.count("price >= 0") == 30
    opened.drain()
    assert {"body_idx", "price_idx"} <= {index.name for index in opened.lance.describe_indices()}
    assert sorted(opened.reader.match("body", word, k=100)["id"].to_pylist()) == matching


def test_an_index_made_by_somebody_changes_nothing(opened: Open) -> None:
    opened.lance.create_scalar_index("name", "BTREE", name="theirs")
    assert opened.reader.count("name = 'row 5 v0'") == 1
    opened.drain()
    assert opened.there() == opened.expected(range(30))
    assert "theirs" in {index.name for index in opened.lance.describe_indices()}


def test_an_older_version_restored_before_its_ssts_were_pruned(opened: Open) -> None:
    """The SSTs missing in that version are still listed: they are read, and committed again."""
    before = opened.lance.version
    with no_pruning():
        opened.drain()
    lance.dataset(opened.uri, version=before).restore()
    assert opened.there() == opened.expected(range(30))
    opened.drain()
    assert opened.there("committed") == opened.expected(range(30))


def test_an_older_version_restored_after_its_ssts_were_pruned(opened: Open, made: Made) -> None:
    """The rows committed after that version are lost, as requested, and no others."""
    before = opened.lance.version
    opened.drain()
    lance.dataset(opened.uri, version=before).restore()
    writer(opened).put(made.rows([50]))
    opened.table.flush()
    assert opened.there() == opened.expected([*range(10), 50])
    opened.drain()
    assert opened.there("committed") == opened.expected([*range(10), 50])


def test_columns_of_a_version_that_was_restored_are_followed_back(opened: Open, made: Made) -> None:
    opened.drain()
    before = opened.lance.version
    opened.lance.drop_columns(["price"])
    assert opened.there() == opened.expected(range(30), price=None)
    lance.dataset(opened.uri, version=before).restore()
    assert opened.there() == opened.expected(range(30))
    writer(opened).put(made.rows([30]))
    opened.drain()
    assert opened.there("committed") == opened.expected(range(31))


def test_a_key_dropped_under_an_open_table_is_said_in_one_line_and_costs_no_row(opened: Open, made: Made) -> None:
    whole = opened.lance.version
    opened.lance.drop_columns(["id"])
    for act in (opened.reader.scan, opened.table.commit):
        with raises(memwal.Invalid):
            act()
    opened.table.put(made.rows([30]))  # an acknowledged row is in the log
    opened.table.flush()
    lance.dataset(opened.uri, version=whole).restore()
    opened.drain()
    assert opened.there() == opened.expected(range(31))


@pytest.mark.parametrize("committed", [False, True])
def test_a_key_that_lancedb_renames_is_followed(
    open_small: OpenSmall, uri: str, made: Made, *, committed: bool
) -> None:
    """Plain Lance rejects this change."""
    with open_small() as table:
        table.put(made.rows([1, 2, 3]))
        table.flush()
        if committed:
            table.commit()
        table.put(made.rows([3, 4], 2))
        lancedb.connect(str(Path(uri).parent)).open_table("table").alter_columns({"path": "id", "rename": "key"})
        table.put(made.rows([5], 3))  # the rename is not detected yet: acked, and found under the new name

        def found() -> dict[int, str]:
            return {row["key"]: row["name"] for row in table.scan().read_all().to_pylist()}

        def renamed(ids: list[int], version: int) -> pa.Table:
            return made.table(ids, version).rename_columns({"id": "key"})

        assert found() == {1: "row 1 v0", 2: "row 2 v0", 3: "row 3 v2", 4: "row 4 v2", 5: "row 5 v3"}
        with raises(memwal.Invalid):
            table.put(made.rows([6], 4))
        table.put(renamed([2, 6], 5))
        table.delete([1])
        assert table.get([2, 5])["name"].to_pylist() == ["row 2 v5", "row 5 v3"]
        now = {2: "row 2 v5", 3: "row 3 v2", 4: "row 4 v2", 5: "row 5 v3", 6: "row 6 v5"}
        assert found() == now
        table.flush()
        table.commit()
        assert found() == now
        table.put(renamed([7], 6))
    with memwal.open(uri) as table:
        assert found() == {**now, 7: "row 7 v6"}


def test_a_table_without_its_key_is_not_opened(opened: Open) -> None:
    """Lance drops key columns without an error."""
    opened.table.close()
    opened.lance.drop_columns(["id"])
    with raises(memwal.Invalid):
        memwal.open(opened.uri)


def test_what_lance_refuses_while_rows_may_be_on_their_way(open_small: OpenSmall, uri: str) -> None:
    open_small().close()
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


# ---- races -----------------------------------------------------------------------------------------------------------


def test_rows_made_for_the_old_columns_fit_a_region_that_took_the_new_ones(
    open_small: OpenSmall, uri: str, made: Made, once: Once
) -> None:
    """A put was converted to the old columns; before its region gets it, another thread applies a change."""
    table = open_small()
    table.put(made.rows(range(10)))

    def change() -> None:
        lance.dataset(uri).alter_columns({"path": "price", "name": "cost"})
        lance.dataset(uri).drop_columns(["name"])
        table.count()
        assert "cost" in table.schema.names

    once(TableWrites, "acks", change)
    table.put(made.rows([10, 11], 1))
    expected = Open(table, table, uri, made).expected(range(10), price="cost", name=None)
    for id in (10, 11):
        row = made.row(id, 1)
        expected[id] = {"id": id, "cost": row["price"], "body": row["body"], "vector": row["vector"]}
    assert Open(table, table, uri, made).there() == expected


def test_a_stream_opened_before_the_change_is_applied_in_the_new_columns(
    open_small: OpenSmall, uri: str, made: Made
) -> None:
    """The Spark sink streams a region's rows in the columns that the owner had when the stream began."""
    table = open_small(regions=1)
    table.put(made.rows(range(10)))
    rows = made.table(range(10, 20))
    lance.dataset(uri).alter_columns({"path": "price", "name": "cost"})
    lance.dataset(uri).drop_columns(["body"])
    table.count()
    table.put_region(table.base.regions[0], rows, None)
    opened = Open(table, table, uri, made)
    assert opened.there() == opened.expected(range(20), price="cost", body=None)


def test_lingering_rows_are_appended_in_the_columns_they_were_put_in(
    open_small: OpenSmall, uri: str, made: Made
) -> None:
    table = open_small(wal={"linger_max": "1h"})
    table.put(made.rows(range(10)), durable=False)
    lance.dataset(uri).alter_columns({"path": "price", "name": "cost"})
    opened = Open(table, table, uri, made)
    assert opened.there() == opened.expected(range(10), price="cost")
    table.put([{"id": 10, "cost": 1}], durable=False, missing="null")
    table.close()
    with memwal.open(uri, settings={"commit": {"interval": "0s"}}) as again:
        found = Open(again, again, uri, made).there()
    assert found.pop(10)["cost"] == 1
    assert found == opened.expected(range(10), price="cost")


def test_a_search_after_the_vector_column_of_a_large_table_was_renamed(
    open_small: OpenSmall, uri: str, made: Made
) -> None:
    """An index is built, and memtables and SSTs use its model."""
    table = open_small()
    table.put(made.rows(range(400)))
    table.flush()
    table.commit()
    lance.dataset(uri).alter_columns({"path": "vector", "name": "at"})
    table.put([{"id": 1000, "at": [9.0] * 8}, {"id": 1001, "at": None}], missing="null")
    assert table.search("at", np.full(8, 9.0), k=1)["id"].to_pylist() == [1000]
    table.flush()
    table.put([{"id": 1002, "at": [8.9] * 8}], missing="null")
    assert table.search("at", np.full(8, 9.0), k=2)["id"].to_pylist() == [1000, 1002]
    table.flush()
    table.commit()
    assert table.search("at", np.full(8, 9.0), k=2, level="committed")["id"].to_pylist() == [1000, 1002]
    assert sum(index.name == "vector_idx" for index in lance.dataset(uri).describe_indices()) == 1
