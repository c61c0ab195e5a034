"""The change feed: which changes it returns, after everything that can happen to a table, and to which callers."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush.commits.merge_passes import delete_pass
from tests.change_world import QUIET, SCHEMA, ChangeWorld, row
from tests.messages import raises
from tests.support.garbage import collect
from tests.ways import entered

Told = list[tuple[Any, ...]]


def opened(uri: str, regions: int = 1, **new: Any) -> Any:
    """Open the table of these tests; create it if it does not exist."""
    options = {"schema": SCHEMA, "key": "id", "regions": regions} | new
    return memwal.open(uri, settings=QUIET, **options)


def again(uri: str) -> Any:
    return memwal.open(uri, settings=QUIET, take_over=True)


def told(changes: Any, *columns: str) -> Told:
    """Return the kind and the columns of each change."""
    rows = changes.read_all() if not isinstance(changes, pa.Table) else changes
    return [tuple(each[name] for name in ("_change", *columns)) for each in rows.to_pylist()]


def entries(uri: str) -> list[int]:
    keys = map(wal.layout.parse_entry_key, wal.open_store(uri).list("_mem_wal/"))
    return sorted(key.position for key in keys if key is not None)


def test_kinds_and_images(uri: str) -> None:
    with opened(uri) as table:
        table.put([row(1, 1), row(2, 1)])
        table.put([row(1, 2), row(3, 2)])
        table.delete([2, 9])
        after = table.changes()
        assert after.schema.names == ["_change", "_region", "_position", "_row", "id", "name", "n"]
        assert all(field.nullable for field in after.schema)
        assert told(after, "_position", "_row", "id", "n") == [
            ("insert", 1, 0, 1, 1),
            ("insert", 1, 1, 2, 1),
            ("update", 2, 0, 1, 2),
            ("insert", 2, 1, 3, 2),
            ("delete", 3, 0, 2, None),
        ]
        assert told(table.changes(images="both", columns=["n"]), "_row", "id", "n") == [
            ("insert", 0, 1, 1),
            ("insert", 1, 2, 1),
            ("update_preimage", 0, 1, 1),
            ("update_postimage", 0, 1, 2),
            ("insert", 1, 3, 2),
            ("delete", 0, 2, 1),
        ]
        assert told(table.changes("latest")) == []


def test_a_position_that_is_no_longer_kept_is_one_error_that_names_the_oldest(uri: str) -> None:
    with opened(uri) as table:
        first = table.changes_position()
        for n in range(5):
            table.put([row(1, n), row(n, n)])
            table.flush()
            table.commit()
        collect(uri)  # gc.changes_age_min is 0
        with raises(memwal.Invalid) as refused:
            table.changes(first).read_all()
        assert refused.value.details["reason"] == "changes_gone"
        oldest = refused.value.details["oldest"]
        assert oldest == table.changes_position("earliest")
        table.put([row(1, 9)])
        assert told(table.changes(oldest, images="both"), "id", "n")[-2:] == [
            ("update_preimage", 1, 4),
            ("update_postimage", 1, 9),
        ]


def test_a_collection_keeps_what_changes_need_and_nothing_else(uri: str) -> None:
    with opened(uri) as table:
        for n in range(4):
            table.put([row(1, n)])
            table.flush()
            table.commit()
        position = table.changes_position()
        collect(uri, changes=1e-6)
        kept = entries(uri)
        assert max(kept) == 4
        assert len(kept) < 4
        table.put([row(1, 9)])
        assert told(table.changes(position), "id", "n") == [("update", 1, 9)]
        collect(uri, changes=3600.0)
        assert entries(uri) == [*kept, 5]


def test_an_entry_that_was_collected_under_a_reader_is_noticed(uri: str) -> None:
    with opened(uri) as table:
        table.put([row(1, 1)])
        changes = iter(table.changes("latest", follow=True))
        table.put([row(2, 1)])
        assert next(changes).column("id").to_pylist() == [2]
        for n in range(3):
            table.put([row(3, n)])
            table.flush()
            table.commit()
        collect(uri)
        with raises(memwal.Invalid):
            next(changes)


def test_a_commit_that_crashed_between_its_passes_hides_no_change(uri: str) -> None:
    """The base already lacks the deleted row, and still has the earlier progress."""
    with opened(uri) as table:
        table.put([row(1, 1), row(2, 1)])
        table.flush()
        table.commit()
        position = table.changes_position()
        table.put([row(1, 2)])
        table.delete([1])
        table.flush()
        delete_pass(lance.dataset(uri), pa.table({"id": [1]}, schema=pa.schema([SCHEMA.field("id")])))
        expected = [("update_preimage", 1, 1), ("update_postimage", 1, 2), ("delete", 1, 2)]
        assert told(table.changes(position, images="both"), "id", "n") == expected
        table.commit()
        assert told(table.changes(position, images="both"), "id", "n") == expected


def test_a_reader_that_follows_goes_over_to_the_new_regions(uri: str) -> None:
    table = opened(uri, regions=2)
    stored = memwal.open(uri, read_only=True)
    changes = iter(stored.changes("latest", follow=True))
    table.put([row(1, 1)])
    assert next(changes).column("id").to_pylist() == [1]
    table.close()
    flush.resize(uri, None, wal.open_store(uri), 3, clock=wal.SystemClock(), ids=wal.SystemIds())
    with again(uri) as table:
        table.put([row(1, 2)])
        batch = next(changes)
        assert batch.column("_change").to_pylist() == ["update"]


def test_a_batch_that_is_not_closed_is_never_told(uri: str) -> None:
    with opened(uri) as table:
        table.put([row(1, 1)])
    base, store, region = flush.BaseTable.open(uri), wal.open_store(uri), wal.bucket_region(0)
    ids, clock, codec = wal.SystemIds(), wal.SystemClock(), base.codec

    def append(log: Any, key: int, closes: bool, attempt: str) -> None:
        rows = pa.table({"id": [key], "name": ["x"], "n": [5], "_tombstone": [False]}).cast(codec.no_rows.schema)
        part = wal.BatchPart("q", 1, attempt, closes=closes)
        log.append(rows, generation=claimed.manifest.current_generation, applied={}, part=part)

    claimed = wal.claim(store, region, spec_id=1, codec=codec, ids=ids, clock=clock)
    log = wal.WalAppender(store, region, claimed.guard, codec, claimed.next_position, ids, clock)
    stored = memwal.open(uri, read_only=True)
    begin = stored.changes_position()
    append(log, 11, False, "a")
    append(log, 12, False, "b")
    middle = stored.changes_position()
    assert told(stored.changes(begin)) == []
    append(log, 13, True, "b")
    closing = stored.changes_position()["regions"][str(region)]
    for since in (begin, middle):  # the rows below `middle` are delivered with the entry that closes their batch
        assert told(stored.changes(since), "id", "_position", "_row") == [
            ("insert", 12, closing, 0),
            ("insert", 13, closing, 1),
        ]
    append(log, 14, False, "c")
    with again(uri) as table:
        table.put([row(15, 1)])
        assert told(table.changes(begin), "id") == [("insert", 12), ("insert", 13), ("insert", 15)]


@pytest.mark.parametrize("upsert", ["insert", "merge"])
def test_write_rules_are_seen_as_what_they_did(uri: str, upsert: str) -> None:
    settings = QUIET | {"table": {"upsert": upsert}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings=settings) as table:
        table.put(pa.table({"id": [1], "name": ["a"], "n": [1]}))
        table.put(pa.table({"id": [1, 2], "n": [2, 2]}))
        changes = told(table.changes(images="both"), "id", "name", "n")
    if upsert == "insert":  # the stored row stays, so nothing changed
        assert changes == [("insert", 1, "a", 1), ("insert", 2, None, 2)]
    else:
        assert changes == [
            ("insert", 1, "a", 1),
            ("update_preimage", 1, "a", 1),
            ("update_postimage", 1, "a", 2),
            ("insert", 2, None, 2),
        ]


def test_a_row_with_an_older_version_is_no_change(uri: str) -> None:
    settings = QUIET | {"table": {"version": "n"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings=settings) as table:
        table.put([row(1, 5), row(2, 5)])
        table.put([row(1, 4), row(2, 6)])
        assert told(table.changes(), "id", "n") == [("insert", 1, 5), ("insert", 2, 5), ("update", 2, 6)]


def test_a_table_without_a_key_has_inserts_only(uri: str) -> None:
    with opened(uri, regions=2, key=()) as table:
        table.put([row(1, 1)] * 3)
        position = table.changes_position()
        table.put([row(1, 1), row(2, 1)])
        table.flush()
        table.commit()
        collect(uri, changes=3600.0)
        assert sorted(told(table.changes(position, images="both"), "id")) == [("insert", 1), ("insert", 2)]
        assert told(table.changes(), "id").count(("insert", 1)) == 4
        collect(uri)
        with raises(memwal.Invalid):
            table.changes(position).read_all()
        table.put([row(3, 1)])
        assert ("insert", 3) in told(table.changes("earliest"), "id")
        assert len(told(table.changes("earliest"))) < 6  # each region keeps its newest entry, with the applied map


def test_a_log_in_arrow_format(uri: str) -> None:
    settings = QUIET | {"wal": {"format": "arrow"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings=settings) as table:
        table.put([row(1, 1)])
        table.flush()
        table.commit()
        position = table.changes_position()
        table.put([row(1, 2)])
        table.delete([1])
    stored = memwal.open(uri, read_only=True)
    assert told(stored.changes(position), "id", "n") == [("update", 1, 2), ("delete", 1, None)]
    assert told(stored.changes(), "id", "n")[0] == ("insert", 1, 1)


def test_columns_that_change_are_seen_from_the_next_batch_on(uri: str) -> None:
    with opened(uri) as table:
        table.put([row(1, 1)])
        table.flush()
        table.commit()
        changes = table.changes("latest", follow=True, images="both")
        batches, position = iter(changes), changes.position
        table.put([row(1, 2)])
        assert next(batches).schema.names[4:] == ["id", "name", "n"]
        table.flush()
        table.commit()
        dataset = lance.dataset(uri)
        dataset.add_columns(pa.field("grade", pa.int64()))
        dataset.alter_columns({"path": "n", "name": "number"})
        table.put(pa.table({"id": [1], "name": ["a"], "number": [3], "grade": [4]}))
        batch = next(batches)
        assert [(each["number"], each["grade"]) for each in batch.to_pylist()] == [(2, None), (3, 4)]
        # The position was taken before the change, with an older base version: the feed finds the values by field id.
        assert told(table.changes(position, images="both"), "number", "grade") == [
            ("update_preimage", 1, None),
            ("update_postimage", 2, None),
            ("update_preimage", 2, None),
            ("update_postimage", 3, 4),
        ]
        with raises(memwal.Invalid):
            table.changes(position, columns=["n"]).read_all()


def test_ranges_meet(uri: str) -> None:
    with opened(uri, regions=2) as table:
        ends = [table.changes_position()]
        for n in range(4):
            table.put([row(key, n) for key in range(n, n + 5)])
            ends.append(table.changes_position())
        whole = told(table.changes(), "_region", "_position", "_row")
        parts = [told(table.changes(a, until=b), "_region", "_position", "_row") for a, b in pairwise(ends)]
        assert sorted(chain.from_iterable(parts)) == sorted(whole)
        assert all(parts)
        assert told(table.changes(ends[3], until=ends[1])) == []


def test_rows_that_are_not_durable_yet_are_told_when_they_are(uri: str) -> None:
    settings = QUIET | {"wal": {"linger_max": "1h"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=1, settings=settings) as table:
        table.put([row(1, 1)], durable=False)
        assert table.count() == 1
        assert told(table.changes()) == []
        table.put([row(2, 1)])
        assert told(table.changes(), "id") == [("insert", 1), ("insert", 2)]


def test_a_position_of_another_table_is_refused(uri: str, tmp_path: Path) -> None:
    with opened(uri) as table, opened(str(tmp_path / "other.lance")) as other:
        table.put([row(1, 1)])
        with raises(memwal.Invalid):
            other.changes(table.changes_position()).read_all()
        position = table.changes_position()
        region = str(wal.bucket_region(0))
        position["regions"][region] = 99
        for follow in (True, False):
            with raises(memwal.Invalid):
                table.changes(position, follow=follow).schema  # noqa: B018
        position["regions"][region] = 1
        table.changes(position).read_all()  # a reader stands at these numbers now
        until = table.changes_position()
        for since, end in (
            (position | {"routing": 2}, None),
            (position | {"table": "another"}, None),
            (position, until | {"table": "another"}),
            (position, until | {"routing": 2}),
        ):
            with raises(memwal.Invalid):
                table.changes(since, until=end).read_all()


def test_a_poll_behind_the_log_of_a_table_that_was_put_back_is_refused(uri: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with opened(uri, regions=2) as table:
        table.put([row(each, 1) for each in range(8)])
    shutil.copytree(uri, copy)
    with opened(uri, regions=2) as table:
        table.put([row(each, 2) for each in range(8)])
        position = table.changes_position()
    shutil.rmtree(uri)
    shutil.copytree(copy, uri)
    with memwal.open(uri, read_only=True) as stored:
        with raises(memwal.Invalid):
            stored.changes(position).read_all()
        earlier = stored.changes_position()
        later = dict(earlier["regions"]) | {str(wal.bucket_region(0)): position["regions"][str(wal.bucket_region(0))]}
        with raises(memwal.Invalid):
            stored.changes(earlier | {"regions": later}).read_all()


def test_a_feed_does_not_go_on_in_a_table_that_was_made_anew(uri: str) -> None:
    """Neither the base version nor the position distinguishes the two tables."""
    with opened(uri) as table:
        table.put([row(1, 1)])
    stored = memwal.open(uri, read_only=True)
    feed = iter(stored.changes("earliest", follow=True))
    assert next(feed).num_rows == 1
    shutil.rmtree(uri)
    with opened(uri) as table, stored:
        for number in range(5):
            table.put([row(number, 2)])
        with raises(memwal.Invalid):
            next(feed)


def test_through_a_daemon(open_small: Callable[..., Any], made: Any, uri: str, ends: ExitStack) -> None:
    with entered("flight", open_small(gc={"interval": "0s"}), ends) as table:
        begin = table.changes_position()
        table.put(made.rows(range(30)))
        changes = table.changes(begin, columns=["name"])
        assert sorted(told(changes, "id")) == [("insert", id) for id in range(30)]
        table.put(made.rows(range(5), 1))
        table.delete([0])
        table.flush()
        table.commit()
        both = told(table.changes(changes.position, images="both", columns=["name"]), "id", "name")
        assert ("update_preimage", 3, "row 3 v0") in both
        assert ("delete", 0, "row 0 v1") in both
        assert len(both) == 11
        stored = memwal.open(uri, read_only=True).changes(changes.position, images="both", columns=["name"])
        assert told(stored, "id", "name") == both
        follower = iter(table.changes("latest", follow=True, columns=["name"]))
        putting = threading.Timer(0.5, table.put, [made.rows([99])])
        putting.start()
        assert next(follower).column("id").to_pylist() == [99]
        putting.join()
        collect(uri)
        with raises(memwal.Invalid) as refused:
            table.changes(begin).read_all()
        assert refused.value.details["reason"] == "changes_gone"


def test_on_s3(s3_table: Any) -> None:
    at, options = s3_table
    world = ChangeWorld(at, 3, options)
    try:
        world.live(25)
        world.resize()
        world.live(10)
        world.check()
        assert world.copy
    finally:
        world.close()
