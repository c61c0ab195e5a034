"""`memwal.open` in one process: creation, adoption, keys of every type, limits, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import flush, wal
from memwal.ingest.engine.table.stored import StoredTable
from tests.messages import raises

TINY: dict[str, Any] = {
    "memtable": {"rows_max": 20, "size_max": "1MiB", "unflushed_max": "8MiB"},
    "wal": {"entry_size_max": "2KiB", "linger_max": "5ms", "put_timeout": "3min", "retry_budget": "6min"},
    "commit": "100ms",
}
"""Limits so small that a few hundred rows exceed each of them."""


# ---- keys ----------------------------------------------------------------------------------------------------------

DAY = 366
KEYS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "int64": (pa.int64(), lambda n: n * 7919 - 3000),
    "int8": (pa.int8(), lambda n: n - 60),
    "uint64": (pa.uint64(), lambda n: 2**64 - 1 - n),
    "string": (pa.string(), lambda n: f"käy '{n}' \U0001f600"),
    "large_string": (pa.large_string(), lambda n: f"k{n}"),
    "binary": (pa.binary(), lambda n: bytes([n % 256, 0, 255])),
    "int32 below zero": (pa.int32(), lambda n: -n),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_of_every_type_lives_through_all_levels(kind: str, uri: str) -> None:
    type_, key_of = KEYS[kind]
    schema = pa.schema([pa.field("k", type_, nullable=False), pa.field("v", pa.int64())])
    keys = [key_of(n) for n in range(100)]
    model = dict.fromkeys(keys, 0)
    with memwal.open(uri, schema=schema, key="k", regions=3, settings={"commit": {"interval": "0s"}}) as table:

        def put(some: list[Any], value: int) -> None:
            table.put(pa.table({"k": pa.array(some, type_), "v": pa.array([value] * len(some))}))
            model.update(dict.fromkeys(some, value))

        def check() -> None:
            assert {row["k"]: row["v"] for row in table.scan().read_all().to_pylist()} == model
            assert table.scan().read_all().num_rows == len(model)
            some = [*keys[::9], key_of(110)]
            found = table.get(some)
            assert {row["k"]: row["v"] for row in found.to_pylist()} == {k: model[k] for k in some if k in model}

        put(keys, 0)
        check()
        for step in (table.flush, table.commit):
            put(keys[10:40], 1)
            table.delete(keys[20:25])
            for key in keys[20:25]:
                model.pop(key, None)
            check()
            step()
            check()
            put(keys[22:30], 2)
            check()
    with memwal.open(uri) as table:
        assert {row["k"]: row["v"] for row in table.scan().read_all().to_pylist()} == model
        table.flush()
        table.commit()
    committed = lance.dataset(uri).to_table().to_pylist()
    assert {row["k"]: row["v"] for row in committed} == model
    assert len(committed) == len(model)


@pytest.mark.parametrize("kind", [pa.date32(), pa.float64(), pa.timestamp("us"), pa.list_(pa.float32(), 4)])
def test_a_key_of_a_type_that_lance_cannot_have_in_a_key_is_refused(kind: pa.DataType, uri: str) -> None:
    with raises(memwal.Invalid):
        memwal.open(uri, schema=pa.schema([pa.field("k", kind, nullable=False), ("v", pa.int64())]), key="k")
    assert not Path(uri).exists()


def test_a_composite_key_is_all_of_its_columns(uri: str) -> None:
    schema = pa.schema([("flight", pa.int32()), ("day", pa.uint16()), ("carrier", pa.string()), ("delay", pa.int64())])
    model: dict[tuple[Any, ...], int] = {}
    settings = {"commit": {"interval": "0s"}}

    def rows(version: int, every: int) -> list[dict[str, Any]]:
        return [
            {"flight": f, "day": DAY + d, "carrier": c, "delay": version}
            for f in range(4)
            for d in range(5)
            for n, c in enumerate(("", "A", "AB", "a,b'"))
            if (f + d + n) % every == 0
        ]

    def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["carrier"], row["flight"], row["day"]

    key = ("carrier", "flight", "day")
    with memwal.open(uri, schema=schema, key=key, regions=2, settings=settings) as table:
        for version, every in enumerate((1, 2, 3)):
            table.put(rows(version, every))
            model.update((key_of(row), version) for row in rows(version, every))
            gone = [key_of(row) for row in rows(0, 5)][version::4]
            table.delete(gone)
            for each in gone:
                model.pop(each, None)
            assert {key_of(row): row["delay"] for row in table.scan().read_all().to_pylist()} == model
            asked = [("AB", 1, DAY), ("", 0, DAY), ("none", 1, DAY)]
            found = {key_of(row): row["delay"] for row in table.get(asked).to_pylist()}
            assert found == {each: model[each] for each in asked if each in model}
            (table.flush, table.commit, lambda: None)[version]()
            assert {key_of(row): row["delay"] for row in table.scan().read_all().to_pylist()} == model
    with memwal.open(uri) as table:
        assert table.key == key
        assert {key_of(row): row["delay"] for row in table.scan().read_all().to_pylist()} == model
        table.flush()
        table.commit()
    committed = lance.dataset(uri).to_table().to_pylist()
    assert {key_of(row): row["delay"] for row in committed} == model
    assert len(committed) == len(model)


# ---- creation and search of tables ---------------------------------------------------------------------------------


def test_a_table_that_is_there_brings_schema_key_indexes_and_regions(
    open_small: Callable[..., Any], uri: str, made: Any
) -> None:
    with open_small(regions=3) as table:
        table.put(made.rows(range(10)))
    with memwal.open(uri) as again:
        assert again.key == ("id",)
        assert again.schema.names == table.schema.names
        assert len(again.status()["regions"]) == 3
        assert again.match("body", made.row(3)["body"].split()[0])["id"].to_pylist().count(3) == 1


def test_the_base_table_is_plain_lance_with_its_indexes(open_small: Callable[..., Any], uri: str, made: Any) -> None:
    with open_small() as table:
        table.put(made.table(range(600)))
        table.flush()
        table.commit()
    dataset = lance.dataset(uri)
    assert dataset.count_rows() == 600
    assert "_tombstone" not in dataset.schema.names
    indexed = {field for index in dataset.describe_indices() for field in index.field_names}
    assert {"vector", "body", "price"} <= indexed
    nearest = {"column": "vector", "q": np.float32(made.row(17)["vector"]), "k": 1, "refine_factor": 10, "nprobes": 50}
    assert dataset.to_table(nearest=nearest)["id"].to_pylist() == [17]
    assert dataset.to_table(full_text_query="harbor", columns=["body"]).num_rows == sum(
        "harbor" in made.row(id)["body"] for id in range(600)
    )


BAD_OPENS: dict[str, dict[str, Any]] = {
    "no schema": {},
    "missing key column": {"key": "idd"},
    "duplicate key column": {"key": ["id", "id"]},
    "key of a wrong type": {"key": "vector"},
    "unknown index": {"key": "id", "indexes": {"vector": "ivf_pk"}},
    "index on a missing column": {"key": "id", "indexes": {"vektor": "ivf_pq"}},
    "index on a wrong type": {"key": "id", "indexes": {"price": "fts"}},
    "no regions": {"key": "id", "regions": 0},
    "unknown setting": {"key": "id", "settings": {"memtable": {"row_max": 5}}},
}


@pytest.mark.parametrize("case", BAD_OPENS)
def test_a_table_is_not_created_from_bad_arguments(
    case: str, uri: str, tmp_path: Path, tree: Callable[[Path], dict[str, int]], made: Any
) -> None:
    schema = made.schema if BAD_OPENS[case] else None
    with raises(memwal.Invalid):
        memwal.open(uri, schema=schema, **BAD_OPENS[case])
    assert tree(tmp_path) == {}
    assert not Path(uri).exists()


def test_a_path_that_is_no_table_is_left_alone(
    tmp_path: Path, tree: Callable[[Path], dict[str, int]], made: Any
) -> None:
    directory, file = tmp_path / "photos", tmp_path / "notes.txt"
    directory.mkdir()
    (directory / "cat.jpg").write_bytes(b"meow")
    file.write_text("buy milk")
    before = tree(tmp_path)
    for path in (directory, file):
        with raises(memwal.Invalid):
            memwal.open(path, schema=made.schema, key="id")
        assert tree(tmp_path) == before


def test_a_lance_table_without_memwal_says_how_to_adopt_it(
    uri: str, made: Any, tmp_path: Path, tree: Callable[[Path], dict[str, int]]
) -> None:
    lance.write_dataset(made.table(range(5)), uri)
    before = tree(tmp_path)
    with raises(memwal.Invalid):
        memwal.open(uri)
    assert tree(tmp_path) == before
    assert lance.dataset(uri).count_rows() == 5


def test_a_closed_table_says_so(open_small: Callable[..., Any], made: Any) -> None:
    table = open_small()
    table.put(made.rows([1]))
    table.close()
    table.close()
    for call in (lambda: table.put(made.rows([2])), lambda: table.delete([1]), table.scan, table.flush, table.commit):
        with raises(memwal.Invalid):
            call()


# ---- limits and threads --------------------------------------------------------------------------------------------


def test_rows_cross_every_limit_without_being_asked(
    open_small: Callable[..., Any], uri: str, made: Any, wait_until: Callable[..., Any]
) -> None:
    model: dict[int, int] = {}
    with open_small(**TINY) as table:
        for version in range(6):
            ids = [id for id in range(150) if (id * 7 + version) % 3]
            table.put(made.table(ids, version))
            model |= dict.fromkeys(ids, version)
            found = {row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()}
            assert found == {id: f"row {id} v{v}" for id, v in model.items()}
        regions = table.status()["regions"]
        assert all(region["wal_position"] > 6 for region in regions), "a large put makes several entries"
        wait_until(lambda: all(region["generation"] > 3 for region in table.status()["regions"]))
        wait_until(lambda: lance.dataset(uri).count_rows() == len(model))
        assert table.count() == len(model)


def test_an_old_memtable_is_flushed_though_nobody_writes(
    open_small: Callable[..., Any], made: Any, wait_until: Callable[..., Any]
) -> None:
    with open_small(memtable={"age_max": "200ms"}) as table:
        table.put(made.rows(range(4)))
        wait_until(lambda: table.count(level="flushed") == 4)
        assert table.count() == 4


def test_many_threads_put_and_read_at_once(open_small: Callable[..., Any], made: Any, uri: str) -> None:
    """Each thread puts its own keys, so the newest value of a key is the last one that its thread put."""
    threads, puts = 8, 25
    models: list[dict[int, int]] = [{} for _ in range(threads)]
    problems: list[str] = []
    table = open_small(**TINY)

    def work(thread: int) -> None:
        rng = np.random.default_rng(thread)
        mine = models[thread]
        try:
            for version in range(puts):
                ids = [thread * 1000 + int(n) for n in rng.choice(40, 6, replace=False)]
                if version % 5 == 4:
                    table.delete(ids[:2], durable=bool(version % 2))
                    for id in ids[:2]:
                        mine.pop(id, None)
                else:
                    table.put(made.table(ids, version), durable=bool(version % 3))
                    mine.update(dict.fromkeys(ids, version))
                asked = [thread * 1000 + n for n in range(40)]
                found = {row["id"]: row["name"] for row in table.get(asked, ["id", "name"]).to_pylist()}
                expected = {id: f"row {id} v{v}" for id, v in mine.items()}
                if found != expected:
                    problems.append(f"thread {thread}, put {version}: {found.items() ^ expected.items()}")
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            problems.append(f"thread {thread}: {error!r}")

    working = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join(120)
    assert problems == []
    expected = {id: f"row {id} v{v}" for mine in models for id, v in mine.items()}
    assert {row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()} == expected
    table.close()
    with memwal.open(uri, settings={"commit": {"interval": "0s"}}) as again:
        assert {row["id"]: row["name"] for row in again.scan(["id", "name"]).read_all().to_pylist()} == expected
        assert again.scan().read_all().num_rows == len(expected)
        again.flush()
        again.commit()
    committed = lance.dataset(uri).to_table(columns=["id", "name"]).to_pylist()
    assert {row["id"]: row["name"] for row in committed} == expected
    assert len(committed) == len(expected)


def test_a_reader_never_sees_a_key_twice_or_go_back(open_small: Callable[..., Any], made: Any) -> None:
    """One thread puts new versions of all keys repeatedly, with flushes and commits. Readers see each key once, and
    never an older version than before.
    """
    with open_small(**TINY) as table:
        table.put(made.table(range(30), 0))
        done, problems = threading.Event(), []

        def read() -> None:
            newest = dict.fromkeys(range(30), 0)
            while not done.is_set():
                rows = table.scan(["id", "name"]).read_all().to_pylist()
                versions = {row["id"]: int(row["name"].rsplit("v", 1)[1]) for row in rows}
                if len(rows) != 30 or len(versions) != 30:
                    problems.append(f"{len(rows)} rows, {len(versions)} keys")
                problems.extend(f"key {id} went back" for id, v in versions.items() if v < newest[id])
                newest = versions

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for version in range(1, 40):
            table.put(made.table(range(30), version))
        done.set()
        for reader in readers:
            reader.join(60)
        assert problems[:5] == []


def test_a_reader_of_storage_misses_nothing_that_was_acked(open_small: Callable[..., Any], made: Any, uri: str) -> None:
    """A reader of storage, like `memwal query` without a daemon, runs beside a writer that flushes and commits
    continuously.
    """
    with open_small(**TINY) as table:
        table.put(made.table(range(40), 0))
        reader = StoredTable(flush.BaseTable.open(uri), wal.open_store(uri))
        acked, done, problems = [0], threading.Event(), []

        def read() -> None:
            while not done.is_set():
                promised = acked[0]
                rows = reader.scan(["id", "name"]).read_all().to_pylist()
                versions = {row["id"]: int(row["name"].rsplit("v", 1)[1]) for row in rows}
                if len(rows) != 40 or len(versions) != 40:
                    problems.append(f"{len(rows)} rows, {len(versions)} keys")
                elif min(versions.values()) < promised:
                    problems.append(f"version {promised} was acked, {min(versions.values())} was read")

        readers = [threading.Thread(target=read) for _ in range(2)]
        for each in readers:
            each.start()
        for version in range(1, 40):
            table.put(made.table(range(40), version))
            acked[0] = version
        done.set()
        for each in readers:
            each.join(60)
        assert problems[:5] == []
