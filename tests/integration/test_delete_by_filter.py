"""`delete(filter=…)`: it deletes every row that passes when its region processes it, and no row that changed meanwhile,
whatever happens between the scan and the regions' turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush import resize
from memwal.ingest.engine.api import filter_writes
from memwal.ingest.engine.api.filter_writes import Where
from memwal.ingest.engine.region.resolve import Conditions
from memwal.ingest.engine.region.writer import RegionWriter
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.writes import TableWrites
from tests.messages import raises
from tests.support.together import together
from tests.ways import entered

DEAR = "price >= 500"


def rows(ids: Sequence[int], price: int, name: str = "") -> list[dict[str, Any]]:
    return [{"id": id, "price": price, "name": name, "body": None, "vector": None} for id in ids]


def prices(table: Any) -> dict[int, int]:
    found = table.scan(["id", "price"]).read_all().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["price"] for row in found}


@pytest.fixture
def before_piece(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Call a function after the scan and before the piece with that number (default: the first); the returned list
    collects the pieces.
    """

    def call(act: Callable[[], object], number: int = 0) -> list[int]:
        piece, sent = TableWrites.piece, list[int]()

        def sending(self: TableWrites, keys: pa.Table, *given: Any, **options: Any) -> Any:
            sent.append(keys.num_rows)
            if len(sent) == number + 1:
                act()
            return piece(self, keys, *given, **options)

        monkeypatch.setattr(TableWrites, "piece", sending)
        return sent

    return call


def of_regions(table: Any, ids: range) -> list[list[int]]:
    """Return the ids by bucket."""
    buckets = table.base.route(pa.table({"id": pa.array(ids, pa.int64())}))
    return [[id for id, at in zip(ids, buckets, strict=True) if at == bucket] for bucket in range(len(set(buckets)))]


# ---- changes between the scan and the regions' turns ---------------------------------------------------------------


@pytest.mark.parametrize("at", ["in memory", "in the base"])
@pytest.mark.parametrize("committed", [False, True])
def test_a_row_that_no_longer_passes_at_its_turn_stays(
    at: str, committed: bool, open_small: Callable[..., Any], before_piece: Callable[..., Any]
) -> None:
    table = open_small()
    table.put(rows(range(10), 700))
    if at == "in the base":
        table.flush()
        table.commit()

    def change() -> None:
        table.put(rows([1, 2], 3, "kept"))
        table.put(rows([3], 900, "dear still"))
        table.delete([4])
        table.put(rows([5], 1), durable=False)
        table.put(rows([20], 999, "later"))
        if committed:
            table.flush()
            table.commit()

    before_piece(change)
    receipt = table.delete(filter=DEAR)
    assert (receipt.rows, receipt.skipped) == (6, 4)
    assert prices(table) == {1: 3, 2: 3, 5: 1, 20: 999}
    table.flush()
    table.commit()
    assert prices(table) == {1: 3, 2: 3, 5: 1, 20: 999}


def test_a_filter_that_lance_reads_the_beginning_of_is_refused(open_small: Callable[..., Any]) -> None:
    with open_small() as table:
        table.put(rows(range(4), 1))
        for step in (lambda: None, table.flush, table.commit):
            step()
            for filter in (
                "price ISNULL AND id = 1",
                "price = 1 adn id = 1",
                "price = 1 LIMIT 1",
                "price = 1) OR (id = 1",
                "price = 1;",
            ):
                for call in (table.scan, table.count, table.delete):
                    with raises(memwal.Invalid):
                        call(filter=filter)
        assert table.count() == 4


def test_what_another_program_commits_meanwhile_counts(
    open_small: Callable[..., Any], before_piece: Callable[..., Any], uri: str
) -> None:
    table = open_small(regions=1)
    table.put(rows(range(10), 700))
    table.flush()
    table.commit()
    before_piece(lambda: lance.dataset(uri).update({"price": "5"}, where="id < 4"))
    assert table.delete(filter=DEAR).rows == 6
    assert prices(table) == dict.fromkeys(range(4), 5)


def test_the_scan_leaves_no_row_to_be_lost_with_its_owner(
    open_small: Callable[..., Any], before_piece: Callable[..., Any]
) -> None:
    """Otherwise the next owner would take the older row, which does not pass, for the row that the scan read."""
    older = open_small(regions=1, wal={"linger_max": "1h"})
    older.put(rows([1], 3))
    older.flush()
    older.commit()
    older.put(rows([1], 700), durable=False)
    taken: list[Any] = []
    before_piece(lambda: taken.append(open_small(take_over=True)))
    with pytest.raises(memwal.FencedError):
        older.delete(filter=DEAR)
    assert prices(taken[0]) == {1: 700}


@pytest.mark.parametrize(("scans", "scanned"), [(50, 2), (1, 1)])
def test_after_a_commit_the_rest_comes_from_a_new_scan(
    scans: int,
    scanned: int,
    open_small: Callable[..., Any],
    before_piece: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filter_writes, "PIECE", 4)
    monkeypatch.setattr(filter_writes, "SCANS", scans)
    table = open_small()
    table.put(rows(range(30), 700))
    scan, asked = Table.scan, list[str]()
    monkeypatch.setattr(
        Table, "scan", lambda self, *given, **how: asked.append(how.get("level", "")) or scan(self, *given, **how)
    )

    def change() -> None:
        table.put(rows([0, 29], 3))
        table.flush()
        table.commit()

    sent = before_piece(change, 1)
    receipt = table.delete(filter=DEAR)
    assert asked == ["durable"] * scanned, "not at latest: a row that lingers could be lost with its owner"
    assert receipt.rows + receipt.skipped == sum(sent)
    assert receipt.skipped <= 2
    assert prices(table) == {0: 3, 29: 3}


@pytest.mark.parametrize("change", ["dropped", "renamed"])
def test_a_column_of_the_filter_that_goes_meanwhile_is_told_and_nothing_is_deleted(
    change: str, open_small: Callable[..., Any], before_piece: Callable[..., Any], uri: str
) -> None:
    table = open_small()
    table.put(rows(range(10), 700))
    dataset = lance.dataset(uri)
    if change == "dropped":
        before_piece(lambda: dataset.drop_columns(["price"]))
    else:
        before_piece(lambda: dataset.alter_columns({"path": "price", "name": "cost"}))
    with raises(memwal.Invalid):
        table.delete(filter=DEAR)
    assert table.count() == 10
    with raises(memwal.Invalid):
        table.delete(filter=DEAR)
    assert table.delete(filter="id < 4").rows == 4


# ---- many at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["embedded", "flight"])
def test_no_acknowledged_change_is_lost_while_deletes_run(
    way: str, open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key has one writer, which knows the expected row after every ack: a cheap row, until its next write."""
    monkeypatch.setattr(filter_writes, "PIECE", 16)
    owner, keys, rounds = open_small(commit="200ms", memtable={"rows_max": 100}), 60, 120
    last: dict[int, tuple[int, str]] = {}
    wrong: list[Any] = []
    deleted: list[int] = []
    ends = threading.Event()

    def write(table: Any, first: int) -> None:
        rng = np.random.default_rng(first)
        for number in range(rounds):
            ids = rng.choice(np.arange(first, first + keys), 8, replace=False).tolist()
            price = int(rng.choice([3, 700]))
            table.put(rows(ids, price, str(number)), durable=bool(number % 3))
            last.update(dict.fromkeys(ids, (price, str(number))))
            found = {row["id"]: (row["price"], row["name"]) for row in table.get(ids).to_pylist()}
            wrong.extend((id, price, found.get(id)) for id in ids if price == 3 and found.get(id) != (3, str(number)))

    def clean(table: Any, name: str) -> None:
        number = 0
        while not ends.is_set():
            number += 1
            deleted.append(table.delete(filter=DEAR, token=f"{name}:{number}" if number % 2 else None).rows)

    with ExitStack() as stack:
        table = entered(way, owner, stack)

        def writers() -> None:
            try:
                together(*(partial(write, table, number * 1000) for number in range(3)))
            finally:
                ends.set()

        together(writers, *(partial(clean, table, name) for name in ("one", "two")))
        assert wrong == []
        assert sum(deleted) > 100, "the deletes met rows"
        table.delete(filter=DEAR)
        left = {row["id"]: (row["price"], row["name"]) for row in table.scan().read_all().to_pylist()}
        assert left == {id: row for id, row in last.items() if row[0] == 3}
    assert owner.status()["base_version"] > 3, "commits came between"


def test_every_row_is_counted_once_by_deletes_at_once(open_small: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(filter_writes, "PIECE", 32)
    table, counted = open_small(), list[int]()
    table.put(rows(range(1000), 700))
    together(*[lambda: counted.append(table.delete(filter=DEAR).rows)] * 4)
    assert (sum(counted), table.count()) == (1000, 0)


# ---- failures ------------------------------------------------------------------------------------------------------


def fail_once(monkeypatch: pytest.MonkeyPatch, bucket: int, error: Exception) -> None:
    """Make the region of `bucket` fail the next lookup of a condition, before it writes anything."""
    resolve, failed = Conditions.resolve, list[bool]()

    def failing(self: Conditions, writes: Any, checked: Any, view: Any) -> Any:
        if not failed and view().region == wal.bucket_region(bucket):
            failed.append(True)
            raise error
        return resolve(self, writes, checked, view)

    monkeypatch.setattr(Conditions, "resolve", failing)


@pytest.mark.parametrize("token", ["cleaner:1", None])
def test_one_that_fails_in_a_region_says_so_and_a_repeat_finds_what_is_left(
    token: str | None, open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_small()
    first, second = of_regions(table, range(20))
    table.put(rows(range(20), 700))
    fail_once(monkeypatch, 1, wal.StoreUnavailable("storage hangs"))
    with raises(memwal.UnknownOutcome):
        table.delete(filter=DEAR, token=token)
    assert set(prices(table)) == set(second)
    assert table.applied("cleaner").newest is None, "nothing is recorded before every row is deleted"
    again = table.delete(filter=DEAR, token=token)
    assert (again.rows, again.applied, prices(table)) == (len(second), True, {})
    table.put(rows(first, 700))
    assert table.delete(filter=DEAR, token=token).rows == (0 if token else len(first))


def test_one_that_deletes_nothing_before_it_fails_raises_the_error_itself(
    open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_small(regions=1)
    table.put(rows(range(20), 700))
    fail_once(monkeypatch, 0, wal.StoreUnavailable("storage hangs"))
    with raises(memwal.Unavailable):
        table.delete(filter=DEAR)
    assert table.count() == 20


@pytest.mark.parametrize("error", [memwal.Unavailable("busy"), memwal.Invalid("wrong")])
def test_a_piece_that_fails_after_others_is_an_unknown_outcome(
    error: Exception, open_small: Callable[..., Any], before_piece: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_writes, "PIECE", 8)
    table = open_small(regions=1)
    table.put(rows(range(20), 700))

    def fail() -> None:
        raise error

    before_piece(fail, 2)
    with raises(memwal.UnknownOutcome):
        table.delete(filter=DEAR)
    assert table.count() == 4


def test_a_crash_between_two_records_leaves_the_rest_to_a_repeat(
    open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_small()
    first, second = of_regions(table, range(20))
    table.put(rows(range(20), 700))
    submit = RegionWriter.submit

    def crash(writer: RegionWriter, write: Any, *given: Any) -> None:
        if not write.rows.num_rows and writer.bucket == 1:
            write.done.set_exception(wal.StoreUnavailable("storage hangs"))
        else:
            submit(writer, write, *given)

    monkeypatch.setattr(RegionWriter, "submit", crash)
    with pytest.raises(memwal.UnknownOutcome):
        table.delete(filter=DEAR, token="cleaner:1")
    monkeypatch.undo()
    table.close()
    table = open_small()
    table.put(rows(range(20), 700))
    again = table.delete(filter=DEAR, token="cleaner:1")
    assert again.rows == len(second)
    assert set(prices(table)) == set(first), "the first region had recorded the token"
    assert table.delete(filter=DEAR, token="cleaner:1").applied is False
    assert set(prices(table)) == set(first)


@pytest.mark.parametrize("way", ["embedded", "flight"])
@pytest.mark.parametrize("durable", [True, False])
def test_what_a_repeat_acknowledges_outlives_the_owner(way: str, durable: bool, open_small: Callable[..., Any]) -> None:
    """At first only the memory of the regions holds the token of a non-durable delete."""
    owner = open_small(wal={"linger_max": "1h"})
    owner.put(rows(range(10), 700))
    with ExitStack() as stack:
        table = entered(way, owner, stack)
        assert table.delete(filter=DEAR, token="cleaner:1", durable=False).rows == 10
        assert not table.delete(filter=DEAR, token="cleaner:1", durable=durable).applied
    taken = open_small(take_over=True)  # as after a kill: the owner no longer appends
    assert taken.count() == 0
    taken.put(rows([1], 800))
    assert not taken.delete(filter=DEAR, token="cleaner:1").applied
    assert prices(taken) == {1: 800}


def test_a_repeat_is_not_acknowledged_by_an_owner_that_was_deposed(open_small: Callable[..., Any]) -> None:
    older = open_small(wal={"linger_max": "1h"})
    older.put(rows(range(10), 700))
    older.delete(filter=DEAR, token="cleaner:1", durable=False)
    taken = open_small(take_over=True)
    with pytest.raises(memwal.FencedError):
        older.delete(filter=DEAR, token="cleaner:1", durable=False)
    assert taken.delete(filter=DEAR, token="cleaner:1").applied
    assert taken.count() == 0


def test_the_next_owner_records_no_token_whose_tombstones_it_lacks(
    open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that resends the record to the next owner may reach another owner than the pieces did."""
    older, record, taken = open_small(wal={"linger_max": "1h"}), TableWrites.record, list[Any]()
    older.put(rows(range(10), 700))

    def record_at_the_next_owner(_: TableWrites, token: memwal.Token, **options: Any) -> Any:
        taken.append(open_small(take_over=True))
        return record(taken[0].writes, token, **options)

    monkeypatch.setattr(TableWrites, "record", record_at_the_next_owner)
    older.delete(filter=DEAR, token="cleaner:1", durable=False)
    assert not taken[0].delete(filter=DEAR, token="cleaner:1").applied
    assert taken[0].count() == 0


def test_a_token_is_completed_after_a_resize_for_the_rows_of_the_regions_that_lack_it(
    open_small: Callable[..., Any], uri: str
) -> None:
    table = open_small()
    first, second = of_regions(table, range(40))
    region = table.base.regions[0]
    table.writes.record(memwal.Token("cleaner", 1), durable=True, timeout=None, regions=[region])
    table.close()
    resize(uri, None, wal.open_store(uri, None), 3, clock=wal.SystemClock(), ids=wal.SystemIds())
    table = open_small()
    table.put(rows(range(40), 700))
    assert table.delete(filter=DEAR, token="cleaner:1").rows == len(second)
    assert set(prices(table)) == set(first)
    assert table.delete(filter=DEAR, token="cleaner:1").applied is False
    table.close()
    assert open_small().delete(filter=DEAR, token="cleaner:1").applied is False


def test_a_piece_that_is_late_deletes_nothing(open_small: Callable[..., Any]) -> None:
    table, token = open_small(), memwal.Token("cleaner", 1)
    table.put(rows(range(10), 700))
    where = Where(DEAR, table.base_version)
    keys = table.scan(["id"]).read_all()
    table.delete(filter=DEAR, token=token)
    table.put(rows(range(10), 800))
    receipt = table.writes.piece(keys, where, durable=True, token=token, timeout=None)
    assert (receipt.applied, receipt.repeated, table.count()) == (False, 10, 10)


def test_a_timeout_ends_it_between_two_pieces(
    open_small: Callable[..., Any], before_piece: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_writes, "PIECE", 8)
    table = open_small()
    table.put(rows(range(20), 700))
    over, monotonic = threading.Event(), wal.SystemClock.monotonic
    monkeypatch.setattr(
        wal.SystemClock, "monotonic", lambda clock: monotonic(clock) + (100.0 if over.is_set() else 0.0)
    )
    before_piece(over.set, 1)
    with raises(memwal.UnknownOutcome):
        table.delete(filter=DEAR, timeout=60)
    assert table.count() == 4


# ---- kinds of tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["upsert = insert", "upsert = merge", "version"])
def test_rules_of_puts_change_nothing(rule: str, tmp_path: Any) -> None:
    """The version rule does not protect a row from a delete, and any version may follow, as after a delete by key."""
    options = {"version": "price"} if rule == "version" else {"upsert": rule.rsplit(" ", maxsplit=1)[-1]}
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("price", pa.int64()), ("name", pa.string())])
    settings = {"table": options, "commit": {"interval": "0s"}}
    with memwal.open(str(tmp_path / "t.lance"), schema=schema, key="id", settings=settings) as table:
        names = schema.names
        table.put([{name: row[name] for name in names} for row in rows(range(10), 700)])
        for step in (lambda: None, table.flush, table.commit):
            step()
            assert table.delete(filter=f"{DEAR} AND id < 5").rows == 5
            again = [{name: row[name] for name in names} for row in rows(range(5), 600, "again")]
            assert table.put(again).skipped == 0
            assert {row["name"] for row in table.get(range(5)).to_pylist()} == {"again"}
        assert table.delete(filter="true").rows == 10


def test_a_key_of_several_columns(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_writes, "PIECE", 7)
    schema = pa.schema(
        [pa.field("k", pa.string(), nullable=False), pa.field("n", pa.int32(), nullable=False), ("v", pa.float32())]
    )
    with memwal.open(str(tmp_path / "t.lance"), schema=schema, key=["k", "n"], regions=3) as table:
        table.put([{"k": str(n % 4), "n": n, "v": n / 10} for n in range(60)])
        table.flush()
        table.commit()
        table.put([{"k": "1", "n": n, "v": 0.0} for n in range(1, 60, 4)])
        assert table.delete(filter="v > 2.05 AND k <> '2'").rows == sum(n % 4 in (0, 3) for n in range(21, 60))
        left = {(row["k"], row["n"]) for row in table.scan().read_all().to_pylist()}
        assert left == {(str(n % 4), n) for n in range(60) if n < 21 or n % 4 in (1, 2)}
