"""Indexes that are added, adopted and dropped while a table is written and read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.flush.commits import committer, index_changes
from memwal.ingest.engine.table.embedded import Table
from tests.messages import raises
from tests.support.interpose import Once
from tests.ways import entered

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), False), ("v", pa.list_(pa.float32(), 8)), ("text", pa.string()), ("n", pa.int64())]
)
QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
LEVELS = ("committed", "flushed", "durable", "latest")


def rows(ids: range, version: int = 0) -> pa.Table:
    draw = np.random.default_rng([ids.start, version])
    words = np.array(["harbor", "violet", "zebra", "copper"])
    vectors = draw.normal(size=(len(ids), 8)).astype(np.float32)
    return pa.table(
        [
            pa.array(ids, pa.int64()),
            pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 8),
            pa.array([" ".join(draw.choice(words, 3)) for _ in ids]),
            pa.array(draw.integers(0, 100, len(ids))),
        ],
        schema=SCHEMA,
    )


@pytest.fixture
def opened(uri: str) -> Any:
    with memwal.open(uri, schema=SCHEMA, key="id", regions=2, settings=QUIET) as table:
        yield table


def fill(table: Any) -> None:
    """Fill every level with rows, and put updates above older versions."""
    table.put(rows(range(400)))
    table.flush()
    table.commit()
    table.put(rows(range(200, 500), 1))
    table.flush()
    table.put(rows(range(450, 600), 2))


def matching(table: Any, level: str, word: str) -> set[int]:
    return {
        row["id"]
        for row in table.scan(["id", "text"], level=level).read_all().to_pylist()
        if word in row["text"].split()
    }


def check_reads(table: Any) -> None:
    """Check that search and match agree with an exact answer from a scan, at every level."""
    query = np.full(8, 0.25, np.float32)
    for level in LEVELS:
        found = table.match("text", "zebra", 10_000, level=level)
        assert set(found["id"].to_pylist()) == matching(table, level, "zebra"), level
        every = table.scan(["id", "v"], level=level).read_all()
        distances = ((np.stack(every["v"].to_numpy()) - query) ** 2).sum(axis=1)
        nearest = every["id"].to_numpy()[np.argsort(distances)[:10]]
        assert table.search("v", query, 10, level=level)["id"].to_pylist() == nearest.tolist(), level


def built(uri: str) -> dict[str, str]:
    found = lance.dataset(uri).describe_indices()
    return {index.name: index.index_type for index in found if not index.name.startswith("__")}


@pytest.mark.parametrize("entries", ["lance", "arrow"])
@pytest.mark.parametrize("way", ["embedded", "flight"])
def test_indexes_come_and_go_while_rows_are_at_every_level(uri: str, way: str, entries: str) -> None:
    settings = QUIET | {"wal": {"format": entries}}
    opening = memwal.open(uri, schema=SCHEMA, key="id", regions=2, settings=settings)
    with opening as owner, ExitStack() as ends:
        table = entered(way, owner, ends)
        fill(table)
        with raises(memwal.Invalid):
            table.match("text", "zebra")
        assert table.create_index("text", "fts", with_position=True) == "text_idx"
        assert table.create_index("v", "ivf_pq", num_partitions=2) == "v_idx"
        assert table.create_index("n", "btree") == "n_idx"
        assert table.create_index("n", "btree") == "n_idx"  # again: nothing changes
        check_reads(table)
        assert built(uri) == {"text_idx": "Inverted", "v_idx": "IVF_PQ", "n_idx": "BTree"}
        listed = {each["name"]: each for each in table.list_indexes()}
        assert {name: (each["column"], each["kind"], each["rows"]) for name, each in listed.items()} == {
            "text_idx": ("text", "fts", 400),
            "v_idx": ("v", "ivf_pq", 400),
            "n_idx": ("n", "btree", 400),
        }
        assert listed["v_idx"]["parameters"] == {"num_partitions": 2}
        table.put(rows(range(590, 650), 3))
        check_reads(table)
        table.flush()
        table.commit()
        check_reads(table)
        assert all(each["rows_waiting"] == 0 for each in table.list_indexes())
        table.drop_index("text_idx")
        table.drop_index("v_idx")
        assert set(built(uri)) == {"n_idx"}
        with raises(memwal.Invalid):
            table.match("text", "zebra")
        table.put(rows(range(640, 700), 4))
        table.flush()
        table.commit()
        assert set(built(uri)) == {"n_idx"}, "a commit built a dropped index again"
        assert table.count() == 700
        table.create_index("text", "fts")
        check_reads(table)
    with memwal.open(uri, settings=QUIET) as again:
        assert {each["name"] for each in again.list_indexes()} == {"n_idx", "text_idx"}
        check_reads(again)


def test_vectors_that_no_index_takes_stay_readable_when_one_comes(opened: Any, uri: str) -> None:
    odd = [[np.nan] * 8, [np.inf] + [0.0] * 7, None]

    def put(first: int) -> None:
        opened.put([{"id": first + at, "v": vector, "text": "odd", "n": 1} for at, vector in enumerate(odd)])

    put(1000)
    opened.put(rows(range(300)))
    opened.flush()
    opened.commit()
    put(2000)
    opened.flush()
    put(3000)
    opened.create_index("v", "ivf_pq")
    for level in LEVELS:
        found = opened.search("v", [0.0] * 8, 10_000, level=level)
        assert set(found["id"].to_pylist()) == set(range(300)), level
    with raises(memwal.Invalid):
        put(4000)
    assert opened.count("text = 'odd'") == 9
    opened.close()
    with memwal.open(uri, settings=QUIET) as again:  # replays rows that a put would reject now
        assert again.count("text = 'odd'") == 9
        again.flush()
        again.commit()
        assert again.search("v", [0.0] * 8, 10_000, level="committed").num_rows == 300
        assert again.count("text = 'odd'", level="committed") == 9


def test_an_index_is_built_and_dropped_while_others_put_read_and_commit(opened: Any) -> None:
    fill(opened)
    stop, failures, puts = threading.Event(), list[BaseException](), list[int]()

    def put() -> None:
        opened.put(rows(range(300, 340), 5 + len(puts)))
        puts.append(1)

    def read() -> None:
        assert opened.search("v", [0.1] * 8, 5).num_rows == 5
        assert opened.count() == 600

    def commit() -> None:
        opened.flush()
        opened.commit()

    def repeated(work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=repeated, args=(work,)) for work in (put, read, commit)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        opened.create_index("v", "ivf_pq")
        opened.create_index("text", "fts")
        assert opened.match("text", "zebra", 5).num_rows == 5
        opened.drop_index("v_idx")
        opened.drop_index("text_idx")
    opened.create_index("text", "fts")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert puts
    assert opened.count() == 600
    check_reads(opened)
    assert set(built(opened.base.uri)) == {"text_idx"}


def test_another_owner_follows_at_its_next_read(opened: Any, uri: str) -> None:
    fill(opened)
    with memwal.open(uri, read_only=True) as stored:
        flush.add_index(stored.base, memwal.memtable.IndexSpec("text", "fts"), wal.SystemClock())
        assert set(opened.match("text", "zebra", 1000)["id"].to_pylist()) == matching(opened, "latest", "zebra")
        assert set(stored.match("text", "zebra", 1000)["id"].to_pylist()) == matching(opened, "durable", "zebra")


def test_two_that_change_the_indexes_at_once_lose_neither_change(opened: Any, once: Once) -> None:
    fill(opened)
    once(index_changes, "create_scalar_indexes", lambda: opened.create_index("n", "btree"), after=True)
    opened.create_index("text", "fts")
    assert {each["name"] for each in opened.list_indexes()} == {"n_idx", "text_idx"}
    check_reads(opened)


def test_what_lance_cannot_index_is_refused_and_changes_nothing(opened: Any, uri: str) -> None:
    opened.put([{"id": 1, "v": [1e30] * 8, "text": "far away", "n": 1}])
    opened.put(rows(range(2, 400)))
    opened.flush()
    opened.commit()
    with raises(memwal.Invalid):
        opened.create_index("v", "ivf_pq")
    assert (opened.list_indexes(), built(uri)) == ([], {})
    assert opened.search("v", [0.0] * 8, 1000).num_rows == 398


# ---- crashes -------------------------------------------------------------------------------------------------------


class _Crash(BaseException):
    pass


def crash(*_: Any) -> None:
    raise _Crash


def test_a_crash_between_building_and_naming_leaves_what_the_next_call_takes_over(
    opened: Any, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(opened)
    monkeypatch.setattr(index_changes, "_declare", crash)
    with pytest.raises(_Crash):
        flush.add_index(opened.base, memwal.memtable.IndexSpec("text", "fts"), wal.SystemClock())
    monkeypatch.undo()
    assert set(built(uri)) == {"text_idx"}
    assert flush.undeclared(opened.base.latest()) == {"text_idx": ""}
    assert opened.list_indexes() == []
    opened.put(rows(range(600, 610)))
    opened.flush()
    opened.commit()
    assert opened.create_index("text", "fts") == "text_idx"
    check_reads(opened)
    assert flush.undeclared(opened.base.latest()) == {}
    # Repeat the crash, and drop the index this time.
    opened.drop_index("text_idx")
    monkeypatch.setattr(index_changes, "_declare", crash)
    with pytest.raises(_Crash):
        flush.add_index(opened.base, memwal.memtable.IndexSpec("text", "fts"), wal.SystemClock())
    monkeypatch.undo()
    opened.drop_index("text_idx")
    assert built(uri) == {}


def test_a_commit_that_read_the_set_up_before_a_drop_builds_nothing_that_stays(
    opened: Any, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.create_index("text", "fts")
    fill(opened)
    opened.flush()
    catch_up = committer.catch_up

    def late(dataset: lance.LanceDataset, specs: Any) -> bool:
        monkeypatch.undo()
        flush.drop_index(opened.base, "text_idx", wal.SystemClock())
        dataset.checkout_latest()
        return catch_up(dataset, specs)

    monkeypatch.setattr(committer, "catch_up", late)
    opened.commit()
    assert built(uri) == {}
    assert opened.count() == 600


def test_an_index_that_is_dropped_as_the_table_is_resized_is_dropped(
    opened: Any, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resize interrupts a step after the drop; the client must not send the drop again."""
    follow = Table.follow

    def refused(_: Table) -> None:
        monkeypatch.setattr(Table, "follow", follow)
        raise memwal.Unavailable("the table was resized", {"reason": "not_owner"})

    opened.create_index("text", "fts")
    remote = entered("flight", opened, ends)
    for change in (lambda: remote.drop_index("text_idx"), lambda: remote.create_index("text", "fts")):
        monkeypatch.setattr(Table, "follow", refused)
        change()
    assert [each["name"] for each in remote.list_indexes()] == ["text_idx"]


# ---- other programs' indexes ---------------------------------------------------------------------------------------


def test_adopting_takes_over_the_indexes_that_there_are(tmp_path: Path, uri: str, cli: Any, config: Any) -> None:
    lance.write_dataset(rows(range(400)), uri)
    dataset = lance.dataset(uri)
    dataset.create_scalar_index("text", "INVERTED", name="words", stem=False)
    dataset.create_scalar_index("n", "BITMAP", name="few")
    dataset.create_index("v", "IVF_PQ", name="near", metric="cosine", num_partitions=2, num_sub_vectors=4)
    path = config(uri)
    ran = cli("init", path)
    assert ran.code == 0
    assert "indexes: v (ivf_pq), text (fts)" in ran.out
    assert "not kept by memwal: few: memwal keeps no indexes of the kind Bitmap" in ran.out
    with memwal.open(uri, settings=QUIET) as table:
        listed = {each["name"]: each for each in table.list_indexes()}
        assert listed["near"]["parameters"]["metric"] == "cosine"
        assert listed["words"]["parameters"] == {"stem": False}
        table.put(rows(range(400, 420)))
        found = table.search("v", rows(range(400, 401))["v"][0].as_py(), 1)
        assert (found["id"].to_pylist(), round(found["_distance"][0].as_py(), 5)) == ([400], 0.0)
        assert table.match("text", "zebra", 1000).num_rows == len(matching(table, "latest", "zebra"))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    def write(uri: str, indexes: str = "") -> Path:
        path = tmp_path / "memwal.toml"
        path.write_text(f'[table]\nuri = "{uri}"\nkey = ["id"]\n{indexes}\n[regions]\ncount = 2\n')
        return path

    return write


def test_the_command_lists_adds_and_drops(opened: Any, uri: str, cli: Any, config: Any) -> None:
    fill(opened)
    path = config(uri)
    assert "the table has no index" in cli("index", "list", path).out
    added = cli("index", "add", path, "v", "ivf_pq", "--set", "metric=cosine", "--set", "num_partitions=2")
    assert (added.code, added.out) == (0, f"index v_idx (ivf_pq on v) of {uri} covers 400 rows of the base table\n")
    assert opened.search("v", [1.0] * 8, 1)["_distance"][0].as_py() < 1  # the owner follows the change
    listed = cli("index", "list", path)
    assert "metric = cosine, num_partitions = 2" in " ".join(listed.out.split())
    assert json.loads(cli("index", "list", path, "--json").out)["indexes"][0]["name"] == "v_idx"
    named = config(uri, 'indexes = { v = "ivf_pq" }')
    dropped = cli("index", "drop", named, "v_idx")
    assert dropped.out.splitlines() == [
        f"dropped the index v_idx of {uri}",
        "[table] indexes still names v: remove it there, or the next start will refuse the setting",
    ]
    refused = cli("init", named)
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "indexes.v is ivf_pq, but the table at" in refused.err
    assert cli("index", "add", named, "v", "ivf_pq").code == 0
    assert cli("init", named).code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("vv", "ivf_pq"), "index ivf_pq on column 'vv': no such column; did you mean 'v'?"),
        (("text", "ivf_pq"), "its type is string, it must be a fixed_size_list"),
        (("v", "ivfpq"), "kind 'ivfpq' is unknown; did you mean 'ivf_pq'?"),
        (("v", "ivf_pq", "--set", "metrik=l2"), "unknown parameter 'metrik'; did you mean 'metric'?"),
        (("v", "ivf_pq", "--set", "metric"), "--set 'metric': write NAME=VALUE"),
        (("n", "fts"), "it must be string or large_string"),
    ],
)
def test_an_index_that_cannot_be_is_refused_in_one_line(
    opened: Any, uri: str, cli: Any, config: Any, words: tuple[str, ...], said: str
) -> None:
    opened.put(rows(range(5)))
    ran = cli("index", "add", config(uri), *words)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert said in ran.err
    assert opened.list_indexes() == []


def test_other_calls_that_cannot_be_are_refused(opened: Any, uri: str) -> None:
    opened.create_index("n", "btree")
    with raises(memwal.Invalid):
        opened.drop_index("n_id")
    opened.create_index("text", "fts")
    with raises(memwal.Invalid):
        opened.create_index("text", "btree")
    with raises(memwal.Invalid):
        opened.create_index("text", "fts", stem=False)
    with memwal.open(uri, read_only=True) as stored:
        for call in (lambda: stored.create_index("v", "ivf_pq"), lambda: stored.drop_index("n_idx")):
            with raises(memwal.Invalid):
                call()
        assert {each["name"] for each in stored.list_indexes()} == {"n_idx", "text_idx"}
