"""`update`: sets columns of every row that passes when its region processes it, computed from that row; nothing is lost
or applied twice, whatever happens between the scan and the regions' turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import memwal
from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.flush.commits.load_notes import load_id
from memwal.ingest.engine.api import filter_writes
from memwal.ingest.engine.table.writes import TableWrites
from tests.messages import raises
from tests.support.together import together
from tests.ways import entered

VECTOR = [1.0] + [0.0] * 7


def rows(ids: range, price: int = 1) -> list[dict[str, Any]]:
    return [{"id": id, "name": f"n{id}", "price": price, "body": "old words", "vector": None} for id in ids]


def stored(table: Any, *columns: str) -> dict[int, Any]:
    found = table.scan(["id", *columns]).read_all().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: tuple(row[name] for name in columns) for row in found}


def at_all_levels(table: Any) -> None:
    """Put rows 0 to 9 into the base table, 10 to 19 into SSTs, and 20 to 29 into memtables."""
    for first in (0, 10, 20):
        table.put(rows(range(first, first + 10), first))
        if first < 20:
            table.flush()
        if first == 0:
            table.commit()


@pytest.mark.parametrize("way", ["embedded", "flight", "two daemons"])
def test_every_row_that_passes_has_its_new_values_and_keeps_the_others(
    way: str, open_small: Callable[..., Any], ends: ExitStack
) -> None:
    owner = open_small()
    at_all_levels(owner)
    table, width = entered(way, owner, ends), owner.schema.field("vector").type.list_size
    vector = [1.0] + [0.0] * (width - 1)
    receipt = table.update("id % 10 = 3", {"body": "fresh text", "vector": vector}, values_sql={"price": "price + id"})
    assert (receipt.rows, receipt.applied, receipt.skipped) == (3, True, 0)
    expected = {id: (id // 10 * 10, f"n{id}", "old words") for id in range(30)}
    expected |= {id: (id // 10 * 10 + id, f"n{id}", "fresh text") for id in (3, 13, 23)}
    for step in (lambda: None, owner.flush, owner.commit):
        step()
        assert stored(table, "price", "name", "body") == expected
        assert table.match("body", "fresh", columns=["id"])["id"].to_pylist() == [3, 13, 23]
        assert set(table.search("vector", vector, k=3, columns=["id"])["id"].to_pylist()) == {3, 13, 23}
    assert table.update(values={"name": None}).rows == 30
    assert {name for (name,) in stored(table, "name").values()} == {None}


@pytest.mark.parametrize("seed", range(3))
def test_any_updates_equal_those_of_a_dict(seed: int, open_small: Callable[..., Any]) -> None:
    chance, table, expected = random.Random(seed), open_small(), dict[int, int]()
    for _ in range(40):
        low = chance.randrange(40)
        match chance.randrange(5):
            case 0:
                table.put(rows(range(low, low + 8), low))
                expected |= dict.fromkeys(range(low, low + 8), low)
            case 1:
                table.delete([low])
                expected.pop(low, None)
            case 2:
                chance.choice([table.flush, table.commit])()
            case 3:
                passing = [id for id in expected if id >= low]
                assert table.update(f"id >= {low}", values_sql={"price": "price * 2 - id"}).rows == len(passing)
                expected |= {id: expected[id] * 2 - id for id in passing}
            case _:
                passing = [id for id, price in expected.items() if price > low]
                assert table.update(f"price > {low}", {"price": low}).rows == len(passing)
                expected |= dict.fromkeys(passing, low)
        assert {id: price for id, (price,) in stored(table, "price").items()} == expected
    table.close()
    assert {id: price for id, (price,) in stored(open_small(), "price").items()} == expected


@pytest.mark.parametrize("way", ["embedded", "two daemons"])
def test_updates_at_once_add_up(way: str, open_small: Callable[..., Any], ends: ExitStack) -> None:
    owner = open_small(commit="50ms")
    owner.put(rows(range(20), 0))
    table = entered(way, owner, ends)

    def count() -> None:
        for _ in range(8):
            assert table.update(values_sql={"price": "price + 1"}).rows == 20

    together(*[count] * 4)
    assert set(stored(table, "price").values()) == {(32,)}


def test_a_row_that_changes_between_the_scan_and_its_turn(
    open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, piece = open_small(), TableWrites.piece
    table.put(rows(range(6), 700))

    def changed(*given: Any, **options: Any) -> Any:
        monkeypatch.undo()
        table.put(rows(range(1, 2), 3))
        table.put(rows(range(2, 3), 900))
        table.delete([4])
        table.commit()
        return piece(*given, **options)

    monkeypatch.setattr(TableWrites, "piece", changed)
    receipt = table.update("price >= 500", values_sql={"price": "price + 1"})
    assert (receipt.rows, receipt.skipped) == (4, 2)
    assert {id: price for id, (price,) in stored(table, "price").items()} == {0: 701, 1: 3, 2: 901, 3: 701, 5: 701}


def test_a_call_that_fails_between_two_pieces_is_not_repeated(
    open_small: Callable[..., Any], ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, piece, sent = open_small(), TableWrites.piece, list[int]()
    owner.put(rows(range(10), 5))

    def failing(*given: Any, **options: Any) -> Any:
        sent.append(1)
        if len(sent) == 2:
            raise memwal.UnknownOutcome("the storage did not answer")
        return piece(*given, **options)

    monkeypatch.setattr(TableWrites, "piece", failing)
    monkeypatch.setattr(filter_writes, "UPDATED", 4)
    for way in ("embedded", "flight"):
        sent.clear()
        with raises(memwal.UnknownOutcome):
            entered(way, owner, ends).update(values_sql={"price": "price + 1"})
        assert len(sent) == 2
    assert sum(price for (price,) in stored(owner, "price").values()) == 50 + 2 * 4


def test_an_update_waits_for_a_load(open_small: Callable[..., Any]) -> None:
    with open_small() as table:
        table.put(rows(range(4), 5))
        store, base = wal.open_store(table.base.uri), BaseTable.open(table.base.uri)
        attempt = flush.begin_load(store, base, load_id("t"), wal.SystemClock(), wal.SystemIds())
        with raises(memwal.Unavailable):
            table.update(values={"price": 1}, timeout=0.2)
        attempt.withdraw(store)
        assert table.update(values={"price": 1}).rows == 4


def test_what_cannot_be_updated_is_refused_and_nothing_changes(open_small: Callable[..., Any], ends: ExitStack) -> None:
    owner = open_small()
    owner.put(rows(range(4), 5))
    before = stored(owner, "price", "name")
    for table in (owner, entered("flight", owner, ends)):
        for where, values, computed in (
            (None, None, None),
            (None, {"prize": 1}, None),
            (None, {"id": 1}, None),
            (None, None, {"id": "id + 1"}),
            (None, {"price": 1}, {"price": "price + 1"}),
            (None, {"price": "much"}, None),
            (None, {"vector": [1.0]}, None),
            (None, None, {"price": "prise + 1"}),
            (None, None, {"price": "random()"}),
            (None, None, {"price": 5}),
            (None, None, {"price": "name"}),
            ("prise = 1", {"price": 1}, None),
            (5, {"price": 1}, None),
            (None, [1], None),
        ):
            with raises(memwal.Invalid):
                table.update(where, values, values_sql=computed)
    assert stored(owner, "price", "name") == before
    with memwal.open(owner.base.uri, read_only=True) as reader, raises(memwal.Invalid):
        reader.update(values={"price": 1})


def test_a_table_without_a_key_has_no_updates(tmp_path: Any) -> None:
    with memwal.open(tmp_path / "t.lance", schema={"a": "int64"}, key=()) as table:
        table.put([{"a": 1}])
        with raises(memwal.Invalid):
            table.update(values={"a": 2})


def test_the_version_of_a_row_is_not_updated(tmp_path: Any) -> None:
    """Otherwise an update could let an older row replace a newer one."""
    schema = {"id": "int64", "at": "int64", "n": "int64"}
    settings = {"table": {"version": "at"}}
    with memwal.open(tmp_path / "t.lance", schema=schema, key="id", settings=settings) as table:
        table.put([{"id": 1, "at": 5, "n": 1}])
        for values, computed in (({"at": 1}, None), (None, {"at": "at - 4"})):
            with raises(memwal.Invalid):
                table.update(None, values, values_sql=computed)
        assert table.update(values={"n": 2}).rows == 1
        table.put([{"id": 1, "at": 4, "n": 9}])
        assert stored(table, "at", "n") == {1: (5, 2)}
