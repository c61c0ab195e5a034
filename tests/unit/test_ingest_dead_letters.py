"""Dead letters: which rows of a batch are bad, when there are too many, and a table that holds each letter once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.dlq.bad_rows import BadRate, BadRow, as_json, problems_of, readable_row, unfit_of
from memwal.ingest.spark.dlq.sources import rows_of_json
from memwal.ingest.spark.dlq.table import SCHEMA, DeadLetters, Note, Replay, sql_time
from memwal.ingest.spark.source.columns import PROBLEM
from memwal.memtable import InvalidRows
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


def refuse_negative(rows: pa.RecordBatch) -> None:
    for row, value in enumerate(rows["n"].to_pylist()):
        if value < 0:
            raise InvalidRows(f"column 'n' is {value} in row {row}", column="n", row=row)


@given(st.lists(st.integers(-3, 20), max_size=40))
def test_exactly_the_rows_at_fault_are_found(values: list[int]) -> None:
    found, _ = unfit_of(pa.record_batch({"n": pa.array(values, pa.int64())}), refuse_negative)
    wrong = {row: value for row, value in enumerate(values) if value < 0}
    assert found == {row: BadRow("fit", "n", f"column 'n' is {value}") for row, value in wrong.items()}


def test_few_checks_find_few_rows() -> None:
    checks = 0

    def counted(rows: pa.RecordBatch) -> None:
        nonlocal checks
        checks += 1
        refuse_negative(rows)

    values = [-1 if row % 1000 == 500 else row for row in range(4000)]
    assert len(unfit_of(pa.record_batch({"n": values}), counted)[0]) == 4
    assert checks < 4 * 2 * 13
    checks = 0
    assert unfit_of(pa.record_batch({"n": range(4000)}), counted)[0] == {}
    assert checks == 1


def test_columns_that_fit_no_row_are_no_bad_row() -> None:
    def refuse(rows: pa.RecordBatch) -> None:
        raise InvalidRows("column 'x' is not in the table", column="x")

    with raises(InvalidRows):
        unfit_of(pa.record_batch({"x": [1, 2]}), refuse)


def test_what_the_mapping_says_keeps_its_stage() -> None:
    batch = pa.record_batch({PROBLEM: ["parse: no JSON: x", None, "map: no such field", "strange: thing"]})
    assert problems_of(batch) == {
        0: BadRow("parse", None, "no JSON: x"),
        2: BadRow("map", None, "no such field"),
        3: BadRow("map", None, "strange: thing"),
    }
    assert problems_of(pa.record_batch({"x": [1]})) == {}


def test_a_row_as_json_is_read_back_as_the_same_row() -> None:
    row = {
        "id": 2**63,
        "text": 'quote " and \u2028 é',
        "bytes": b"\x00\xff",
        "at": datetime(2026, 1, 2, 3, 4, 5, 678, UTC),
        "local": datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001 - a column without a zone
        "day": date(2026, 1, 2),
        "vector": [0.5, -1.0],
        "flag": False,
        "price": Decimal("1.50"),
        "nested": [{"raw": b"\xff", "day": date(2026, 1, 2), "price": Decimal(2)}, None],
        "nothing": None,
    }
    nested = pa.struct([("raw", pa.binary()), ("day", pa.date32()), ("price", pa.decimal128(10, 2))])
    schema = pa.schema(
        [
            ("id", pa.uint64()),
            ("text", pa.string()),
            ("bytes", pa.binary()),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("day", pa.date32()),
            ("vector", pa.list_(pa.float32(), 2)),
            ("flag", pa.bool_()),
            ("price", pa.decimal128(10, 2)),
            ("nested", pa.list_(nested)),
            ("nothing", pa.int64()),
        ]
    )
    raw = as_json(row | {"id": Decimal(2**63)})  # Spark's type for it
    assert "nothing" not in json.loads(raw)
    mapped = rows_of_json(pa.table({"raw_value": [raw]}), schema)
    assert mapped.rows.to_pylist() == [row]


def test_letters_that_are_no_rows_say_why_and_the_others_pass() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    raw = [b'{"id": 1, "more": 2}', b"{", b'{"id": "x"}', b"[1]", None, b'{"id": 2, "name": "b"}', b'{"name": "c"}']
    mapped = rows_of_json(pa.table({"raw_value": pa.array(raw, pa.binary())}), schema)
    assert mapped.rows["id"].to_pylist() == [1, 2, None]
    assert mapped.of == [0, 5, 6]
    assert sorted(mapped.failed) == [1, 2, 3, 4]
    assert "'id' cannot become int64" in mapped.failed[2].reason


@pytest.mark.parametrize(
    ("kind", "fits", "misfits"),
    [
        (pa.int64(), 5, 5.5),
        (pa.int8(), 5, 300),
        (pa.int64(), 5, True),
        (pa.int64(), 5, "5"),
        (pa.float32(), 1.5, 1e300),
        (pa.timestamp("us"), "2026-01-02T03:04:05", 1_700_000_000),
        (pa.timestamp("us", "UTC"), "2026-01-02T03:04:05Z", "2026-01-02T03:04:05"),
        (pa.timestamp("us"), "2026-01-02T03:04:05", "2026-01-02T03:04:05Z"),
        (pa.date32(), "2026-01-02", "2026-01-02T03:04:05"),
        (pa.date32(), "2026-01-02", 5),
        (pa.decimal128(10, 2), 0.5, 0.125),
        (pa.list_(pa.int32()), [5], [5, 5.5]),
        (pa.list_(pa.float32(), 2), [1, 2], [1, 2, 3]),
        (pa.struct([("n", pa.int64())]), {"n": 5}, {"n": 5.5}),
        (pa.struct([("n", pa.int64())]), {"n": 5}, {"n": 5, "m": 6}),
        (pa.bool_(), True, 1),
    ],
)
def test_a_letter_of_a_file_is_read_as_strictly_as_one_of_kafka(kind: pa.DataType, fits: Any, misfits: Any) -> None:
    raw = [json.dumps({"c": value}).encode() for value in (fits, misfits, None)]
    mapped = rows_of_json(pa.table({"raw_value": raw}), pa.schema([("c", kind)]))
    assert mapped.of == [0, 2]
    assert mapped.failed[1].column == "c"
    assert "column 'c' cannot become" in mapped.failed[1].reason


def test_a_time_with_an_offset_says_which_type_to_declare() -> None:
    raw = [json.dumps({"c": value}).encode() for value in ("2026-01-02T03:04:05Z", 1.5)]
    mapped = rows_of_json(pa.table({"raw_value": raw}), pa.schema([("c", pa.timestamp("ms"))]))
    assert "declare the column timestamp[ms, UTC]" in mapped.failed[0].reason
    assert "numbers need a unit" in mapped.failed[1].reason


def test_a_float_that_is_no_number_is_one_of_a_row_as_json() -> None:
    raw = as_json({"c": float("nan"), "d": float("inf")})
    schema = pa.schema([("c", pa.float64()), ("d", pa.float32())])
    assert str(rows_of_json(pa.table({"raw_value": [raw]}), schema).rows.to_pylist()) == "[{'c': nan, 'd': inf}]"


def test_text_that_is_not_utf8_is_not_replayed_as_other_text() -> None:
    damaged = pa.record_batch([pa.array([b"caf\xe9"]).view(pa.string())], ["c"])
    raw = as_json(readable_row(damaged, 0))
    assert b"caf\xe9" in raw
    assert rows_of_json(pa.table({"raw_value": [raw]}), pa.schema([("c", pa.string())])).failed[0].stage == "parse"


def test_a_time_that_python_does_not_have_does_not_end_the_task() -> None:
    far = pa.record_batch([pa.array([2**60]).view(pa.timestamp("us"))], ["c"])
    assert b"38504-" in as_json(readable_row(far, 0))


def test_too_many_bad_rows_are_told_with_their_share() -> None:
    rate = BadRate(max_percent=10, window=100)
    assert rate.with_more(50, 50) is None, "too few rows to tell"
    said = rate.with_more(60, 0)
    assert said is not None
    assert "50 of the last 110 rows (45.5 %)" in said
    assert rate.with_more(100, 10) is None, "exactly the share that is allowed; older rows are no longer counted"
    assert rate.with_more(100, 11) is not None


def test_all_may_be_bad_or_none() -> None:
    assert BadRate(100, 1).with_more(5, 5) is None
    assert BadRate(0, 1).with_more(5, 0) is None
    assert BadRate(0, 1).with_more(5, 1) is not None
    assert BadRate(0, 1).with_more(0, 0) is None
