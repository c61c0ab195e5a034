"""Writes with a token are applied once per region, however often they are sent and whatever happens in between."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import memwal
from tests import ways
from tests.messages import raises
from tests.support.rows import names

COMMIT_ON_DEMAND = {"commit": {"interval": "0s"}}
SEED = 3
"""Seed of `tests/scripts/writer.py`: its first operation is a durable put of 60 rows, which takes three entries. They
are the changes 9 to 11 of storage."""


def by_region(table: Any, made: Any, ids: range) -> dict[str, list[int]]:
    """Return the ids by region, determined by putting and deleting each id."""
    found: dict[str, list[int]] = {}
    for id in ids:
        (region,) = table.put(made.rows([id]), durable=False).positions
        found.setdefault(region, []).append(id)
    table.delete(list(ids))
    return found


# ---- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(), ("flush",), ("flush", "commit")], ids=str)
def test_a_token_is_remembered_after_reopening(
    steps: tuple[str, ...], open_small: Callable[..., Any], made: Any
) -> None:
    """A token is remembered even if all its rows were flushed and committed, and after owners that wrote nothing."""
    table = open_small()
    assert table.put(made.rows(range(20)), token="loader:7").applied
    for step in steps:
        getattr(table, step)()
    for _ in range(3):
        table.close()
        table = open_small()
    again = table.put(made.rows(range(20), 1), token="loader:7")
    assert (again.rows, again.applied) == (20, False)
    assert table.put(made.rows(range(20), 1), token="loader:3").applied is False
    assert names(table) == {id: f"row {id} v0" for id in range(20)}
    assert table.put(made.rows(range(20), 2), token="loader:8").applied is True
    assert names(table) == {id: f"row {id} v2" for id in range(20)}


def test_a_token_of_a_put_that_was_not_durable_is_not_remembered_without_its_rows(
    open_small: Callable[..., Any], made: Any
) -> None:
    """The next owner has both the rows and the token, or neither."""
    older = open_small(regions=1, wal={"linger_max": "1h"})
    older.put(made.rows([1]), token="loader:1")
    older.put(made.rows([1, 2], 1), durable=False, token="loader:2")
    newer = open_small()
    assert names(newer) == {1: "row 1 v0"}
    assert newer.put(made.rows([1, 2], 1), token="loader:2").applied is True
    assert names(newer) == {1: "row 1 v1", 2: "row 2 v1"}


def test_a_token_sent_again_durably_makes_lingering_rows_durable(open_small: Callable[..., Any], made: Any) -> None:
    older = open_small(regions=1, wal={"linger_max": "1h"})
    older.put(made.rows([1, 2]), durable=False, token="loader:1")
    assert older.put(made.rows([1, 2]), durable=True, token="loader:1").applied is False
    newer = open_small()
    assert names(newer) == {1: "row 1 v0", 2: "row 2 v0"}


def test_of_attempts_at_once_one_is_applied(open_small: Callable[..., Any], made: Any) -> None:
    table = open_small(regions=1)
    for sequence in range(15):
        start = threading.Barrier(4)

        def attempt(version: int, sequence: int = sequence, start: threading.Barrier = start) -> bool:
            start.wait()
            return bool(table.put(made.rows(range(5), version), token=("p", sequence)).applied)

        with ThreadPoolExecutor(4) as threads:
            versions = range(sequence * 4, sequence * 4 + 4)
            applied = dict(zip(versions, threads.map(attempt, versions), strict=True))
        (winner,) = [version for version, was in applied.items() if was]
        assert names(table) == {id: f"row {id} v{winner}" for id in range(5)}


def test_a_receipt_says_what_became_of_the_rows_of_each_region(open_small: Callable[..., Any], made: Any) -> None:
    table = open_small(regions=2)
    parts = by_region(table, made, range(20))
    (one, first), (two, second) = parts.items()
    table.put(made.rows(first), token="loader:1")
    again = table.put(made.rows([*first, *second], 1), token="loader:1")
    assert {region: asdict(counts) for region, counts in again.regions.items()} == {
        one: {"applied": 0, "repeated": len(first), "skipped": 0},
        two: {"applied": len(second), "repeated": 0, "skipped": 0},
    }
    assert (again.rows, again.repeated, again.applied) == (20, len(first), True)
    assert names(table) == {id: f"row {id} v{id in second:d}" for id in range(20)}
    fresh = table.put(made.rows(range(20)))
    assert (fresh.repeated, sum(counts.applied for counts in fresh.regions.values())) == (0, 20)


def test_a_token_that_goes_down_and_is_no_retry_is_refused_whole(open_small: Callable[..., Any], made: Any) -> None:
    """When a caller uses a higher number, every region of the previous put has applied it. A retry with the lower
    number then finds it applied everywhere.
    """
    table = open_small(regions=2)
    first, second = by_region(table, made, range(20)).values()
    table.put(made.rows(first), token="loader:5")
    before = names(table)
    with raises(memwal.Invalid):
        table.put(made.rows([*first, *second], 1), token="loader:4")
    with raises(memwal.Invalid):
        table.delete([*first, *second], token="loader:4")
    assert names(table) == before, "a put is never dropped in part"
    table.put(made.rows(range(20), 2), token="loader:6")
    table.put(made.rows(first, 3), token="loader:7")
    replayed = table.put(made.rows(range(20), 9), token="loader:6")
    assert (replayed.applied, replayed.repeated) == (False, 20), "from a checkpoint, say: all of it was applied"


def test_a_receipt_of_a_daemon_has_the_counts_of_each_region(
    served: tuple[Any, str, str, list[int]], made: Any
) -> None:
    client, _, region, ids = served
    assert stream(client, made, region, ids, 0, memwal.Token("loader", 1)).finish().repeated == 0
    receipt = client.put(made.rows(range(20), 1), token="loader:1")
    assert asdict(receipt.regions[region]) == {"applied": 0, "repeated": len(ids), "skipped": 0}
    assert (receipt.repeated, sum(counts.applied for counts in receipt.regions.values())) == (len(ids), 20 - len(ids))
    assert stream(client, made, region, ids, 0, memwal.Token("loader", 1)).finish().repeated == len(ids)


def test_a_put_cut_short_by_a_crash_is_completed_once(tmp_path: Any, script: Callable[..., Any]) -> None:
    """The writer process dies at a change of storage during its only put. Sending the put again under the same token
    applies it exactly once, whether the first attempt had arrived or not.
    """
    outcomes = set()
    for kill_at in (11, 12):  # the last entry is missing; all entries are there
        uri = str(tmp_path / f"{kill_at}.lance")
        running = script("writer.py", uri, 1, SEED, 0, 1, kill_at, "before")
        operation = {}
        while (text := running.line()) is not None:
            operation = json.loads(text).get("try", operation)
        with memwal.open(uri, settings=COMMIT_ON_DEMAND) as table:
            arrived = table.count() > 0
            rows = [{"id": id, "name": "second attempt"} for id in operation["ids"]]
            outcomes.add(arrived)
            assert table.put(rows, missing="null", token=("writer", 0)).applied is not arrived
            expected = {id: f"row {id} v0" if arrived else "second attempt" for id in operation["ids"]}
            assert names(table) == expected
            assert table.put(rows, missing="null", token=("writer", 0)).applied is False
            assert names(table) == expected
    assert outcomes == {True, False}, "the kill points should lie on both sides"


def test_a_token_outlives_its_rows_in_no_crash(tmp_path: Any, script: Callable[..., Any]) -> None:
    """Rows acked without durability travel inside the next durable put, here one of several entries. Wherever a crash
    cuts it short, an applied token has its rows, and a token whose rows are lost may be sent again.
    """
    operations = [
        {"number": 1, "kind": "put", "ids": [500], "durable": False},
        {"number": 2, "kind": "put", "ids": list(range(60)), "durable": True},
    ]
    outcomes = set()
    for kill_at in (8, 9, 11):  # no entry, the first one, all of them
        uri = str(tmp_path / f"{kill_at}.lance")
        running = script("writer.py", uri, 1, json.dumps(operations), 0, 0, kill_at, "after")
        running.wait()
        with memwal.open(uri, settings=COMMIT_ON_DEMAND) as table:
            kept = 500 in names(table)
            outcomes.add(kept)
            again = table.put([{"id": 500, "name": "sent again"}], missing="null", token=("writer", 1))
            assert again.applied is not kept
            assert names(table)[500] == ("row 500 v1" if kept else "sent again")
    assert outcomes == {True, False}, "the kill points should lie on both sides"


# ---- streams of a micro-batch --------------------------------------------------------------------------------------


@pytest.fixture
def served(open_small: Callable[..., Any], made: Any, ends: ExitStack) -> tuple[Any, str, str, list[int]]:
    """Return a client of a daemon in this process, its endpoint, one region, and ids of that region."""
    endpoint = ways.served(open_small(), ends)
    client = ends.enter_context(memwal.connect(endpoint))
    region, ids = next(iter(by_region(client, made, range(20)).items()))
    return client, endpoint, region, ids


def stream(client: Any, made: Any, region: str, ids: list[int], version: int, token: memwal.Token) -> Any:
    """Send the rows of a stream without closing it."""
    opened = client.open_stream(UUID(region), token)
    for batch in made.table(ids, version).to_batches(max_chunksize=3):
        opened.write(batch)
    return opened


def test_a_stream_is_applied_whole_and_once(served: tuple[Any, str, str, list[int]], made: Any) -> None:
    client, _, region, ids = served
    token = memwal.Token("query", 0)
    receipt = stream(client, made, region, ids, 0, token).finish()
    assert (receipt.region, receipt.rows, receipt.applied) == (region, len(ids), True)
    assert receipt.position > 0
    assert names(client) == {id: f"row {id} v0" for id in ids}
    replayed = stream(client, made, region, ids, 1, token).finish()
    assert (replayed.rows, replayed.applied) == (len(ids), False)
    assert names(client) == {id: f"row {id} v0" for id in ids}
    assert stream(client, made, region, ids[:2], 2, memwal.Token("query", 1)).finish().applied is True
    assert stream(client, made, region, ids, 3, token).finish().applied is False
    assert stream(client, made, region, ids[:1], 4, memwal.Token("another query", 0)).finish().applied is True
    assert names(client)[ids[0]] == f"row {ids[0]} v4"
    assert names(client)[ids[1]] == f"row {ids[1]} v2"


def test_a_stream_that_is_not_closed_applies_nothing(
    served: tuple[Any, str, str, list[int]], made: Any, script: Callable[..., Any]
) -> None:
    client, endpoint, region, ids = served
    aborted = stream(client, made, region, ids, 0, memwal.Token("query", 0))
    assert client.count() == 0
    aborted.abort()
    client_that_dies = script("streamer.py", endpoint, region, "query", 0, "of the dead", *ids)
    client_that_dies.line_with("sent")
    assert client.count() == 0
    client_that_dies.tell("die")
    assert client_that_dies.wait() == -9
    assert client.count() == 0
    receipt = stream(client, made, region, ids, 5, memwal.Token("query", 0)).finish()
    assert receipt.applied is True, "what was not closed must not use up the token"
    assert names(client) == {id: f"row {id} v5" for id in ids}


def test_of_two_streams_at_once_the_first_to_close_wins(
    served: tuple[Any, str, str, list[int]], made: Any, script: Callable[..., Any]
) -> None:
    client, endpoint, region, ids = served
    token = memwal.Token("query", 3)
    slow = stream(client, made, region, ids, 0, token)
    other = script("streamer.py", endpoint, region, "query", 3, "by another", *ids)
    other.line_with("sent")
    other.tell("finish")
    assert json.loads(other.line())["applied"] is True
    assert slow.finish().applied is False
    assert names(client) == dict.fromkeys(ids, "by another")


def test_a_stream_of_rows_that_belong_elsewhere_is_refused(served: tuple[Any, str, str, list[int]], made: Any) -> None:
    client, _, region, ids = served
    elsewhere = next(id for id in range(20) if id not in ids)
    with raises(memwal.Invalid):
        stream(client, made, region, [*ids, elsewhere], 0, memwal.Token("query", 0)).finish()
    with raises(memwal.Invalid):
        stream(client, made, "00000000-0000-0000-0000-000000000001", ids, 0, memwal.Token("query", 0)).finish()
    assert client.count() == 0


def test_a_bad_row_anywhere_in_a_stream_keeps_all_of_it_out(served: tuple[Any, str, str, list[int]], made: Any) -> None:
    client, _, region, ids = served
    opened = client.open_stream(UUID(region), memwal.Token("query", 0))
    opened.write(made.table(ids).to_batches()[0])
    bad = made.row(ids[0]) | {"vector": [float("inf")] * 8}
    opened.write(pa.Table.from_pylist([bad], schema=made.schema).to_batches()[0])
    with raises(memwal.Invalid):
        opened.finish()
    assert client.count() == 0
    assert stream(client, made, region, ids, 1, memwal.Token("query", 0)).finish().applied is True


def test_a_stream_is_remembered_by_the_next_daemon(
    small_config: Callable[..., Any], serve: Callable[..., Any], made: Any
) -> None:
    config, token = small_config(), memwal.Token("query", 4)
    running, endpoint = serve(config)
    client = memwal.connect(endpoint)
    region, ids = next(iter(by_region(client, made, range(20)).items()))
    stream(client, made, region, ids, 0, token).finish()
    running.kill()
    _, endpoint = serve(config)
    client = memwal.connect(endpoint)
    assert stream(client, made, region, ids, 1, token).finish().applied is False
    assert names(client) == {id: f"row {id} v0" for id in ids}
