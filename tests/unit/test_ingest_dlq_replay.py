"""A replay puts each dead letter into the table once, wherever it is killed and however many replays run at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.service.client.target import opened
from memwal.ingest.settings.load import load
from memwal.ingest.spark.dlq.replay import Outcome, Replaying
from memwal.ingest.spark.dlq.sources import by_source
from memwal.ingest.spark.dlq.table import SCHEMA, DeadLetters
from memwal.wal import SystemIds
from tests.support.clock import FakeClock

COLUMNS = pa.schema([pa.field("id", pa.int64(), nullable=False), ("n", pa.int64())])


class World:
    """A table and its dead letters. `given`: more arguments of `memwal.open`. A table without a key (`key=()`) shows a
    row that is put twice."""

    def __init__(self, at: Path, **given: Any) -> None:
        self.uri = str(at / "t.lance")
        self.table = memwal.open(self.uri, schema=COLUMNS, settings={"commit": {"interval": "0s"}}, regions=2, **given)
        self.letters = self.opened()

    def opened(self) -> DeadLetters:
        return DeadLetters.create(f"{self.uri}.dlq", {}, FakeClock(), SystemIds())

    def write(
        self, *raws: Any, topic: str | None = None, headers: list[dict[str, Any]] | None = None, batch: int = 0
    ) -> None:
        """Write letters of a file, or with `topic` of records with the keys 0, 1, ….

        `headers`: the headers of each record, None if they were not kept.
        """
        rows = [
            {
                "id": f"{batch * 1000 + number * 977 + 1:020x}",
                "time": number,
                "stage": "fit",
                "reason": "none",
                "query_id": "q",
                "batch_id": batch,
                **({"file": "f"} if topic is None else {"topic": topic, "partition": 0, "offset": number}),
                "row": number,
                "raw_headers": headers,
                "raw_key": str(number).encode(),
                "raw_value": raw if isinstance(raw, bytes | None) else json.dumps(raw).encode(),
            }
            for number, raw in enumerate(raws)
        ]
        self.letters.append(pa.Table.from_pylist(rows, schema=SCHEMA).to_batches(), "q", batch)

    def replay(self, table: Any = None, condition: str | None = None, source: dict[str, Any] | None = None) -> Outcome:
        target = opened(self.uri, ())
        settings = load({"table": {"uri": self.uri}, "source": source or {}}, {})
        mapping = by_source(settings, target.base.schema, target.base.key)
        return Replaying(self.opened(), target, table or self.table, mapping, lambda: ("q", 0, 0)).replay(
            condition, None
        )

    def ids(self) -> list[int]:
        return sorted(self.table.scan(["id"]).read_all()["id"].to_pylist())

    def left(self) -> list[int]:
        return sorted(self.opened().dataset.to_table(["row"])["row"].to_pylist())


@pytest.fixture
def world(tmp_path: Path) -> Any:
    made: list[World] = []

    def make(**given: Any) -> World:
        made.append(World(tmp_path, **given))
        return made[-1]

    yield make
    for each in made:
        each.table.close()


class Putting:
    """A table whose put is `put`, which gets the rows and the table's own put of them."""

    def __init__(self, table: Any, put: Callable[[pa.Table, Callable[[], Any]], Any]) -> None:
        self._table, self._put, self.applied = table, put, table.applied

    def put(self, rows: pa.Table, **given: Any) -> Any:
        return self._put(rows, lambda: self._table.put(rows, **given))


def dying(table: Any, *, after: bool) -> Putting:
    """Return a table whose put ends the process, before or after the rows are written."""

    def put(_: pa.Table, done: Callable[[], Any]) -> Any:
        if after:
            done()
        raise KeyboardInterrupt

    return Putting(table, put)


def test_letters_that_fit_go_into_the_table_and_the_others_stay(world: Callable[..., World]) -> None:
    at = world(key=())
    at.write({"id": 1, "n": 1}, b"{", {"n": 3}, {"id": 4, "n": 4, "more": 1}, {"id": 5})
    outcome = at.replay()
    assert outcome.replayed == 3
    assert sorted(reason.partition(":")[0] for reason in outcome.stay) == ["fit", "parse"]
    assert any("'id' is null" in reason for reason in outcome.stay)
    assert at.ids() == [1, 4, 5]
    assert at.left() == [1, 2]


def test_a_fraction_is_not_cut_off_to_another_row_s_key(world: Callable[..., World]) -> None:
    at = world(key="id")
    at.table.put([{"id": 5, "n": 50}])
    at.write({"id": 5.5, "n": 1}, {"id": 6, "n": 3.9}, {"id": 7, "n": 7})
    outcome = at.replay()
    assert outcome.replayed == 1
    assert all("cannot become int64" in reason for reason in outcome.stay)
    assert at.table.get([5, 6, 7]).to_pylist() == [{"id": 5, "n": 50}, {"id": 7, "n": 7}]
    assert at.left() == [0, 1]


def test_letters_of_a_micro_batch_that_comes_again_stay(world: Callable[..., World]) -> None:
    at = world(key=())
    at.write({"id": 1}, {"id": 2})
    target = opened(at.uri, ())
    mapping = by_source(load({"table": {"uri": at.uri}}, {}), target.base.schema, target.base.key)
    for begun, replayed in ((0, 0), (1, 2)):
        replaying = Replaying(
            at.opened(), target, at.table, mapping, lambda begun=begun: ("q", begun, begun - 1), force=True
        )
        outcome = replaying.replay(None, None)
        assert outcome.replayed == replayed
        assert [reason for reason in outcome.stay if "not finished" not in reason] == []
    assert at.ids() == [1, 2]


def test_letters_of_another_query_stay_until_the_table_shows_that_their_micro_batch_is_finished(
    world: Callable[..., World],
) -> None:
    """A second pipeline into the table is killed after one of two regions has applied its micro-batch 0."""
    at = world(key=())
    at.write({"id": 1}, {"id": 2})
    one, other = at.table.base.regions
    target = opened(at.uri, ())
    mapping = by_source(load({"table": {"uri": at.uri}}, {}), target.base.schema, target.base.key)
    row = next(
        pa.table({"id": [n], "n": [n]})
        for n in range(100)
        if target.base.route(pa.table({"id": [n], "n": [n]}))[0] == 0
    )

    def replayed(**given: Any) -> tuple[int, list[str]]:
        replaying = Replaying(at.opened(), target, at.table, mapping, lambda: ("mine", 4, 4), **given)
        outcome = replaying.replay(None, None)
        return outcome.replayed, list(outcome.stay)

    def stays() -> bool:
        number, (reason,) = replayed()
        return number == 0 and "may not be finished" in reason and "--force" in reason

    assert stays()
    at.table.put_region(one, row, Token("q", 0))
    assert stays()
    assert len(at.left()) == 2
    at.table.put_region(one, row, Token("q", 1))
    assert replayed() == (2, [])
    at.write({"id": 3}, batch=2)
    at.table.put_region(one, row, Token("q", 2))
    assert stays()
    at.table.put_region(other, row.slice(0, 0), Token("q", 2))
    assert replayed() == (1, [])
    at.write({"id": 4}, batch=3)
    at.write({"id": 5}, batch=4)
    number, (_,) = replayed()
    assert number == 1, "micro-batch 3 was finished before 4 began"
    assert replayed(force=True) == (1, [])


@pytest.mark.parametrize("after", [False, True], ids=["before the put", "after the put"])
def test_a_replay_that_was_cut_off_is_finished_by_the_next_one(world: Callable[..., World], after: bool) -> None:
    at = world(key=())
    at.write(*({"id": n, "n": n} for n in range(20)))
    with pytest.raises(KeyboardInterrupt):
        at.replay(dying(at.table, after=after))
    assert at.left() == list(range(20))
    assert at.replay().replayed == 20
    assert at.ids() == list(range(20))
    assert at.left() == []
    assert at.replay().replayed == 0


@pytest.mark.parametrize("fit", [0, 4], ids=["none fits now", "some fit now"])
def test_what_was_applied_before_is_gone_though_less_of_it_fits_now(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, fit: int
) -> None:
    """The put of the second replay reports that it applied the rows, since an earlier attempt got no answer."""
    at = world(key=())
    at.write(*({"id": n, "n": n} for n in range(20)))
    with pytest.raises(KeyboardInterrupt):
        at.replay(dying(at.table, after=True))

    fitting = Replaying._fitting

    def fewer(replaying: Replaying, ids: Any, *, tell: bool = True) -> Any:
        names, rows = fitting(replaying, ids, tell=tell)
        return names[:fit], rows.slice(0, fit)

    monkeypatch.setattr(Replaying, "_fitting", fewer)
    at.replay(Putting(at.table, lambda _, put: replace(put(), applied=True)))
    monkeypatch.undo()
    at.replay()
    assert at.left() == []
    assert at.ids() == list(range(20))


def test_a_replay_that_dies_before_it_deletes_leaves_letters_that_are_not_put_again(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = world(key=())
    at.write(*({"id": n, "n": n} for n in range(20)))

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DeadLetters, "delete", dies)
    with pytest.raises(KeyboardInterrupt):
        at.replay()
    monkeypatch.undo()
    assert at.replay(condition="row = 1000").replayed > 0, "what was begun is finished, whatever is asked for now"
    at.replay()
    assert at.ids() == list(range(20))
    assert at.left() == []


def test_letters_of_a_table_that_was_put_back_are_put_and_not_only_removed(world: Callable[..., World]) -> None:
    """Lance's restore also sets the counter of replays back, so the table has already applied its next numbers."""
    at = world(key=())
    at.write({"id": 1})
    before = at.opened().dataset.version
    assert at.replay().replayed == 1
    lance.dataset(f"{at.uri}.dlq").checkout_version(before).restore()
    at.write({"id": 2}, batch=1)
    assert at.replay().replayed == 2
    assert at.ids() == [1, 1, 2], "who brings a letter back has its row put again"
    assert at.left() == []


def test_a_replay_that_was_under_way_in_a_table_that_was_put_back_begins_anew(world: Callable[..., World]) -> None:
    """The table cannot show whether the replay's number was applied, or its rows were refused and a later number was
    applied."""
    at = world(key="id")
    at.table.put([{"id": 1, "n": 1}])
    at.write({"id": 1, "n": 2})
    with pytest.raises(KeyboardInterrupt):
        at.replay(dying(at.table, after=False))
    reserved = at.opened().dataset.version
    assert at.replay().replayed == 1
    at.write({"id": 2, "n": 2}, batch=1)
    assert at.replay().replayed == 1
    at.table.put([{"id": 1, "n": 3}])
    lance.dataset(f"{at.uri}.dlq").checkout_version(reserved).restore()
    assert at.replay().replayed == 1
    assert at.table.get([1]).to_pylist() == [{"id": 1, "n": 2}], "it is put, under a new number"
    assert at.left() == []


def test_two_replays_at_once_put_each_letter_once(world: Callable[..., World]) -> None:
    at = world(key=())
    at.write(*({"id": n, "n": n} for n in range(20)))

    def after_another(_: pa.Table, put: Callable[[], Any]) -> Any:
        at.replay()  # from its beginning to its end
        return put()

    assert at.replay(Putting(at.table, after_another)).replayed == 0
    assert at.ids() == list(range(20))
    assert at.left() == []


def test_rows_that_their_region_refuses_are_found_and_the_others_are_put(world: Callable[..., World]) -> None:
    at = world(key="id")
    at.write(*({"id": n, "n": n} for n in range(16)))

    def refuse(rows: pa.Table, put: Callable[[], Any]) -> Any:
        if not {3, 11}.isdisjoint(rows["id"].to_pylist()):
            raise memwal.Invalid("neither 3 nor 11")
        return put()

    outcome = at.replay(Putting(at.table, refuse))
    assert (outcome.replayed, outcome.stay) == (14, {"refused: neither 3 nor 11": 2})
    assert at.left() == [3, 11]
    assert at.ids() == [n for n in range(16) if n not in (3, 11)]


def test_the_newest_letter_of_a_key_counts(world: Callable[..., World]) -> None:
    at = world(key="id")
    at.write(*({"id": n % 4, "n": n} for n in range(12)))
    at.replay()
    assert sorted(at.table.scan().read_all()["n"].to_pylist()) == [8, 9, 10, 11]


KAFKA = {"format": "kafka", "brokers": "127.0.0.1:1", "topics": ["orders"]}


def test_records_go_through_the_mapping_of_the_source(world: Callable[..., World]) -> None:
    at = world(key="id")
    at.table.put([{"id": 2, "n": 20}, {"id": 9, "n": 90}])
    at.write({"id": 0, "m": 5}, {"id": 0, "m": 6}, None, b"{", {"m": 1}, {"id": 5, "m": "x"}, topic="orders")
    outcome = at.replay(source=KAFKA | {"columns": {"n": "value.m"}})
    assert outcome.replayed == 3
    assert sorted(reason.partition(":")[0] for reason in outcome.stay) == ["map", "map", "parse"]
    assert sorted((row["id"], row["n"]) for row in at.table.scan().read_all().to_pylist()) == [(0, 6), (9, 90)], (
        "2 was deleted"
    )
    assert at.left() == [3, 4, 5]


@pytest.mark.parametrize(
    ("topic", "source", "says"),
    [
        ("orders", {}, "it came from a Kafka topic"),
        (None, KAFKA, "it came from a file"),
        ("orders", KAFKA | {"columns": {"n": "headers.n"}}, "headers"),
    ],
)
def test_letters_that_cannot_be_mapped_stay(
    world: Callable[..., World], topic: str | None, source: dict[str, Any], says: str
) -> None:
    at = world(key="id")
    at.write({"id": 0, "n": 5}, topic=topic)
    (reason,) = at.replay(source=source).stay
    assert says in reason
    assert at.left() == [0]


def test_headers_are_replayed_where_letters_have_them(world: Callable[..., World]) -> None:
    at = world(key="id")
    at.write({"id": 0}, {"id": 1}, topic="orders", headers=[{"key": "n", "value": b"4"}, {"key": "n", "value": b"5"}])
    outcome = at.replay(source=KAFKA | {"columns": {"n": "headers.n"}})
    assert (outcome.replayed, list(outcome.stay)) == (2, [])
    assert sorted((row["id"], row["n"]) for row in at.table.scan().read_all().to_pylist()) == [(0, 5), (1, 5)]
