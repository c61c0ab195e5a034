"""`memwal.open` in one process: creation, adoption, keys of every type, limits, threads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from tests.messages import raises
from tests.support.together import together

NARROW = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64()), ("s", pa.string())])
TINY: dict[str, Any] = {
    "memtable": {"rows_max": 20, "size_max": "1MiB", "unflushed_max": "8MiB"},
    "wal": {"entry_size_max": "2KiB", "linger_max": "5ms", "put_timeout": "3min", "retry_budget": "6min"},
    "commit": "100ms",
}
"""Limits so small that a few hundred rows exceed each of them."""


# ---- keys ----------------------------------------------------------------------------------------------------------

SOME = range(100)
KEYS: dict[str, tuple[list[pa.DataType], list[tuple[Any, ...]]]] = {
    "int64": ([pa.int64()], [(n,) for n in (-(2**63), -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1)]),
    "int32": ([pa.int32()], [(7919 * n - 3000,) for n in SOME]),
    "int8": ([pa.int8()], [(n - 60,) for n in SOME]),
    "uint64": ([pa.uint64()], [(0,), (1,), (2**63 - 1,), (2**63,), *((2**64 - 1 - n,) for n in SOME)]),
    "bool": ([pa.bool_()], [(False,), (True,)]),
    "string": ([pa.string()], [("",), ("\0",), ("\0\0",), ("a",), ("a\0",), ("é",), ("e\u0301",), ("k '\U0001f600'",)]),
    "long string": ([pa.string()], [("x" * 2**16,), ("x" * 2**16 + "y",)]),
    "large_string": ([pa.large_string()], [(f"k{n}",) for n in SOME]),
    "binary": ([pa.binary()], [(bytes([n, 0, 255]),) for n in SOME]),
    "two strings": (
        [pa.string()] * 2,
        [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("a\0", "b"), ("a", "\0b")],
    ),
    "string and int64": ([pa.string(), pa.int64()], [(text, n) for text in ("", "a") for n in (-(2**63), 0, 97)]),
    "three columns": ([pa.string(), pa.int32(), pa.uint16()], [("AB"[: n % 3], n % 4, n) for n in SOME]),
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_every_type_stay_apart_at_every_level(kind: str, uri: str) -> None:
    types, keys = KEYS[kind]
    names = [f"k{place}" for place in range(len(types))]
    fields = [pa.field(name, type_, nullable=False) for name, type_ in zip(names, types, strict=True)]
    schema, model = pa.schema([*fields, ("v", pa.int64())]), dict[tuple[Any, ...], int]()

    def rows(some: list[tuple[Any, ...]], value: int = 0) -> pa.Table:
        columns = [pa.array(column, type_) for column, type_ in zip(zip(*some, strict=True), types, strict=True)]
        return pa.table([*columns, pa.array([value] * len(some))], schema=schema)

    def found(read: pa.Table) -> dict[tuple[Any, ...], int]:
        by_key = {tuple(row[name] for name in names): row["v"] for row in read.to_pylist()}
        assert len(by_key) == read.num_rows
        return by_key

    with memwal.open(uri, schema=schema, key=names, regions=3, settings={"commit": {"interval": "0s"}}) as table:

        def put(some: list[tuple[Any, ...]], value: int) -> None:
            table.put(rows(some, value))
            model.update(dict.fromkeys(some, value))

        def check() -> None:
            assert found(table.scan().read_all()) == model
            assert found(table.get(rows(keys).select(names))) == model

        put(keys, 0)
        for value, step in enumerate((lambda: None, table.flush, table.commit), 1):
            put(keys[1::2], value)
            table.delete(rows(keys[::4]).select(names))
            for key in keys[::4]:
                model.pop(key, None)
            check()
            step()
            check()
            put(keys[::8], -value)
    with memwal.open(uri) as table:
        check()
        table.flush()
        table.commit()
        check()
    assert found(lance.dataset(uri).to_table()) == model


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


def keyed(kind: pa.DataType) -> dict[str, Any]:
    return {"schema": pa.schema([pa.field("k", kind, nullable=False), ("v", pa.int64())]), "key": "k"}


BAD_OPENS: dict[str, dict[str, Any]] = {
    "no schema": {"schema": None},
    "missing key column": {"key": "idd"},
    "duplicate key column": {"key": ["id", "id"]},
    "key of a wrong type": {"key": "vector"},
    "date key": keyed(pa.date32()),
    "float key": keyed(pa.float64()),
    "timestamp key": keyed(pa.timestamp("us")),
    "unknown index": {"key": "id", "indexes": {"vector": "ivf_pk"}},
    "index on a missing column": {"key": "id", "indexes": {"vektor": "ivf_pq"}},
    "index on a wrong type": {"key": "id", "indexes": {"price": "fts"}},
    "no regions": {"key": "id", "regions": 0},
    "unknown setting": {"key": "id", "settings": {"memtable": {"row_max": 5}}},
}


@pytest.mark.parametrize("case", BAD_OPENS)
def test_a_table_is_not_created_from_bad_arguments(case: str, uri: str, made: Any) -> None:
    with raises(memwal.Invalid):
        memwal.open(uri, **{"schema": made.schema, **BAD_OPENS[case]})
    assert not Path(uri).exists()


@pytest.mark.parametrize(
    "arguments",
    [{"regions": 5}, {"indexes": {"v": "btree"}}, {"schema": NARROW.remove(1)}],
    ids=["regions", "indexes", "schema"],
)
def test_an_argument_that_contradicts_the_table_is_refused(uri: str, arguments: dict[str, Any]) -> None:
    memwal.open(uri, schema=NARROW, key="id", regions=1).close()
    with raises(memwal.Invalid):
        memwal.open(uri, **arguments)


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
    table = open_small(**TINY)

    def work(thread: int) -> None:
        rng = np.random.default_rng(thread)
        mine = models[thread]
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
            assert found == {id: f"row {id} v{v}" for id, v in mine.items()}, (thread, version)

    together(*(partial(work, thread) for thread in range(threads)))
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


# ---- the end of a table --------------------------------------------------------------------------------------------


def test_a_close_that_loses_rows_says_so(
    open_small: Callable[..., Any], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_small(wal={"linger_max": "1min"})
    table.put(made.rows([1]), durable=False)

    def refuses(*_: Any) -> None:
        raise wal.StoreRefused("read-only")

    monkeypatch.setattr(wal.LocalStore, "put_if_absent", refuses)
    with raises(memwal.Invalid):
        table.close()


def test_a_table_removed_under_its_writer_acknowledges_nothing_more(
    open_small: Callable[..., Any], made: Any, uri: str
) -> None:
    table = open_small(regions=1)
    table.put(made.rows([1]))
    shutil.rmtree(uri)
    again = open_small(regions=1, take_over=True)
    for _ in range(2):
        with raises(memwal.Invalid):
            table.put(made.rows([2]))
    again.put(made.rows([3]))
    table.close()
    assert again.scan(["id"]).read_all()["id"].to_pylist() == [3]
    again.close()
    with memwal.open(uri) as reopened:
        assert reopened.scan(["id"]).read_all()["id"].to_pylist() == [3]
