"""The table of dead letters holds each letter once, however often it is written, and a write reads no old letters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.dlq.table import SCHEMA, DeadLetters, Note, Replay, digest, sql_time
from memwal.wal import SystemIds
from tests.messages import raises
from tests.support.clock import FakeClock


def letters(numbers: Sequence[int], batch_id: int = 0, query_id: str = "q", time: int = 0) -> list[pa.RecordBatch]:
    rows = [
        {
            "id": f"{number * 2_654_435_761 + 1:020x}",
            "time": time,
            "stage": "fit",
            "reason": "no reason",
            "query_id": query_id,
            "batch_id": batch_id,
            "raw_value": b"\xff%d" % number,
        }
        for number in numbers
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA).to_batches(max_chunksize=3)


@pytest.fixture
def at(tmp_path: Path) -> str:
    return str(tmp_path / "t.lance.dlq")


def opened(at: str) -> DeadLetters:
    return DeadLetters.create(at, {}, FakeClock(), SystemIds())


def there(at: str) -> list[int]:
    """Return the numbers of the letters, as plain Lance reads them."""
    return sorted(int(value[1:]) for value in lance.dataset(at).to_table(["raw_value"])["raw_value"].to_pylist())


def test_a_replayed_micro_batch_writes_no_letter_twice(at: str) -> None:
    assert opened(at).append(letters(range(10)), "q", 0) == 10
    assert opened(at).append(letters(range(9, -1, -1)), "q", 0) == 0
    assert opened(at).append(letters(range(10, 12), 1), "q", 1) == 2
    assert opened(at).append(letters(range(10)), "q", 0) == 0  # an old task that still runs
    assert there(at) == list(range(12))


def test_letters_that_a_replay_has_more_are_added_alone(at: str) -> None:
    opened(at).append(letters(range(10)), "q", 0)
    assert opened(at).append(letters(range(5, 13)), "q", 0) == 3
    assert opened(at).append(letters(range(10)), "q", 0) == 0
    assert there(at) == list(range(13))


def test_what_was_purged_or_replayed_does_not_come_back_with_its_micro_batch(at: str) -> None:
    table = opened(at)
    table.append(letters(range(10)), "q", 0)
    assert table.delete("raw_value IS NOT NULL") == 10
    assert opened(at).append(letters(range(10)), "q", 0) == 0
    assert there(at) == []


def test_two_attempts_at_once_write_the_letters_once(at: str) -> None:
    first, second = opened(at), opened(at)

    def while_the_other_writes(batches: list[pa.RecordBatch]) -> Any:
        yield from batches
        second.append(iter(batches), "q", 0)

    assert first.append(while_the_other_writes(letters(range(10))), "q", 0) == 0
    assert there(at) == list(range(10))


def test_an_attempt_that_meets_other_letters_of_its_micro_batch_is_made_again(at: str) -> None:
    first, second = opened(at), opened(at)

    def while_the_other_writes() -> Any:
        yield from letters(range(10))
        second.append(letters(range(3)), "q", 0)

    with raises(Unavailable):
        first.append(while_the_other_writes(), "q", 0)
    assert opened(at).append(letters(range(10)), "q", 0) == 7
    assert there(at) == list(range(10))


def test_queries_do_not_know_each_other(at: str) -> None:
    one, other = opened(at), opened(at)
    for batch in range(4):
        one.append(letters(range(batch * 10, batch * 10 + 5), batch, "one"), "one", batch)
        other.append(letters(range(batch * 10 + 5, batch * 10 + 10), batch, "other"), "other", batch)
    assert there(at) == list(range(40))


def test_a_reader_that_fails_leaves_no_letter_and_no_note(at: str) -> None:
    def breaks() -> Any:
        yield from letters(range(10))
        raise Unavailable("the shuffle was lost")

    with raises(Unavailable):
        opened(at).append(breaks(), "q", 0)
    assert there(at) == []
    assert opened(at).append(letters(range(10)), "q", 0) == 10


def test_many_micro_batches_leave_few_fragments_and_none_is_looked_through(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(at)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("letters were read")

    monkeypatch.setattr(lance.LanceDataset, "to_table", refuse)
    for batch in range(60):
        table.append(letters(range(batch * 3, batch * 3 + 3), batch), "q", batch)
    monkeypatch.undo()
    assert len(lance.dataset(at).get_fragments()) < 30
    assert there(at) == list(range(180))


def test_one_of_two_replays_gets_the_number(at: str) -> None:
    one, other = opened(at), opened(at)
    nothing = one.replay()
    assert nothing == Replay(0, ())
    assert one.reserve(["a", "b"], nothing) == Replay(1, ("a", "b"))
    assert other.reserve(["c"], nothing) is None
    assert other.replay() == Replay(1, ("a", "b"))
    assert other.reserve((), other.replay()) == Replay(1, ())
    assert one.reserve(["c"], one.replay()) is None
    assert opened(at).reserve(["c"], Replay(1, ())) == Replay(2, ("c",))


def test_letters_are_deleted_by_age(at: str) -> None:
    table = opened(at)
    table.append(letters(range(3), 0, time=1_000_000), "q", 0)
    table.append(letters(range(3, 5), 1, time=9_000_000), "q", 1)
    assert table.delete(f"time <= {sql_time(5.0)}") == 3
    assert there(at) == [3, 4]


def test_another_table_at_that_place_is_refused(at: str) -> None:
    lance.write_dataset(pa.table({"id": [1]}), at)
    with raises(Invalid):
        opened(at)


def test_a_table_made_anew_has_another_name(at: str, tmp_path: Path) -> None:
    assert opened(at).name == opened(at).name != opened(str(tmp_path / "other.dlq")).name


def test_the_digest_is_of_a_set() -> None:
    assert digest(["0a", "0b"]) == digest(["0b", "0a"]) == digest(["0a"]) ^ digest(["0b"])


def test_a_table_that_is_older_than_headers_gets_their_column(tmp_path: Path) -> None:
    at = str(tmp_path / "old.dlq")
    old = SCHEMA.remove(SCHEMA.get_field_index("raw_headers"))
    name = {"memwal:letters-id": "same", "memwal:letters": '{"q": [3, "0"]}'}
    old = old.with_metadata(name)
    lance.write_dataset(old.empty_table(), at, schema=old)
    found = DeadLetters.create(at, {}, FakeClock(), SystemIds())
    assert (found.name, found.note("q"), found.dataset.schema.names) == ("same", Note(3, 0), SCHEMA.names)
    row = {"id": "a" * 20, "time": 1, "stage": "fit", "reason": "none", "query_id": "q", "batch_id": 4}
    row |= {"raw_headers": [{"key": "k", "value": b"\xff"}]}
    assert found.append(pa.Table.from_pylist([row], schema=SCHEMA).to_batches(), "q", 4) == 1
    assert lance.dataset(at).to_table()["raw_headers"].to_pylist() == [row["raw_headers"]]
    assert DeadLetters.create(at, {}, FakeClock(), SystemIds()).dataset.version == lance.dataset(at).version
