"""The key index, compared with a dict: every key type, equal codes, interrupted blocks, and concurrent readers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwal.memtable.key import column as key_column
from memwal.memtable.key import index as key_index
from memwal.memtable.key.code_table import EMPTY, CodeTable
from memwal.memtable.key.index import BLOCK_ROWS, MOST_BATCHES, MOST_WAITING, KeyIndex, Versions
from tests.support.together import together

Rows = Sequence[tuple[Any, ...]]

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int64": (pa.int64(), [0, -1, 1, -(2**63), 2**63 - 1, 7]),
    "int8": (pa.int8(), [-128, -1, 0, 127]),
    "uint64": (pa.uint64(), [0, 2**64 - 1, 2**63, 5]),
    "bool": (pa.bool_(), [True, False]),
    "text": (pa.string(), ["", "a", "a\0", "\0", "ab", "ba", "ä", "x" * 5000, "x" * 5001, "y" * 70_000]),
    "large text": (pa.large_string(), ["", "a", "aa", "z" * 100_000]),
    "bytes": (pa.binary(), [b"", b"\0", b"\0\0", b"\xff", b"a" * 4096, b"a" * 4097]),
    "large bytes": (pa.large_binary(), [b"", b"q", b"qq"]),
}


class Oracle:
    """The expected answers of a key index, from a dict of lists of rows."""

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        self.schema = pa.schema([pa.field(f"k{at}", kind) for at, kind in enumerate(types)])
        self.index = KeyIndex(self.schema, self.schema.names)
        self.versions: dict[tuple[Any, ...], list[int]] = {}
        self.rows = 0

    def columns(self, keys: Rows) -> list[pa.ChunkedArray]:
        # A slice of something longer, in two chunks: offsets that do not begin at 0.
        filled = [keys[0], *keys, keys[0]] if keys else []
        arrays = [pa.array([key[at] for key in filled], field.type) for at, field in enumerate(self.schema)]
        half = len(keys) // 2
        return [pa.chunked_array([a.slice(1, half), a.slice(1 + half, len(keys) - half)]) for a in arrays]

    def add(self, keys: Rows) -> None:
        self.index.add(pa.Table.from_arrays(self.columns(keys), schema=self.schema))
        for key in keys:
            self.versions.setdefault(key, []).append(self.rows)
            self.rows += 1

    def check(self, asked: Rows, n: int) -> None:
        found = self.index.lookup(self.columns(asked), n)
        below = [[row for row in self.versions.get(key, []) if row < n] for key in asked]
        assert found.tolist() == [rows[-1] if rows else -1 for rows in below]
        newest = np.zeros(n, dtype=bool)
        for rows in self.versions.values():
            newest[[row for row in rows if row < n][-1:]] = True
        assert (self.index.newest(n) == newest).all()


def drive(oracle: Oracle, data: st.DataObject, pools: Sequence[Sequence[Any]]) -> None:
    keys = st.tuples(*(st.sampled_from(list(pool)) for pool in pools))
    prefixes = [0]
    for _ in range(data.draw(st.integers(1, 5))):
        oracle.add(data.draw(st.lists(keys, min_size=1, max_size=12)))
        prefixes.append(oracle.rows)
        if data.draw(st.booleans()):
            oracle.check(data.draw(st.lists(keys, max_size=12)), data.draw(st.sampled_from(prefixes)))
    asked = data.draw(st.lists(keys, max_size=12))
    for n in prefixes:
        oracle.check(asked, n)


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_key_type_is_found_as_in_a_dict(name: str, data: st.DataObject) -> None:
    kind, pool = TYPES[name]
    drive(Oracle([kind]), data, [pool])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_composite_keys_are_found_as_in_a_dict(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(list(TYPES)), min_size=2, max_size=3))
    drive(Oracle([TYPES[name][0] for name in names]), data, [TYPES[name][1] for name in names])


@pytest.fixture(params=[1, 2, 7])
def weak_hash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the hash codes to a few, so that nearly every key shares its code; one is the code that the table cannot
    hold."""

    def weak(ends: Any, data: Any) -> Any:
        strong = key_column_hashes(ends, data).view(np.uint64) % np.uint64(request.param)
        return strong.view(np.int64) + EMPTY

    key_column_hashes = key_column.hashes
    monkeypatch.setattr(key_column, "hashes", weak)


@pytest.mark.usefixtures("weak_hash")
def test_keys_whose_codes_clash_are_told_apart() -> None:
    random = np.random.default_rng(5)
    oracle = Oracle([pa.string()])
    for _ in range(30):
        oracle.add([(f"k{number}",) for number in random.integers(0, 40, 10)])
        oracle.check([(f"k{number}",) for number in range(45)], int(random.integers(0, oracle.rows + 1)))
    oracle.check([(f"k{number}",) for number in range(45)], oracle.rows)


@pytest.mark.parametrize("place", ["find", "link", "put", "after put", "exact"])
@pytest.mark.parametrize("codes", [3, 2**40])
def test_a_block_that_was_broken_off_is_indexed_again(place: str, codes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in a reader's thread has this effect."""
    strong = key_column.hashes
    monkeypatch.setattr(
        key_column, "hashes", lambda *given: (strong(*given).view(np.uint64) % np.uint64(codes)).view(np.int64)
    )
    oracle = Oracle([pa.string()])
    oracle.add([("a",), ("b",), ("a",)])
    oracle.check([("a",)], 3)
    oracle.add([("b",), ("c",), ("a",), ("c",), ("d",)])
    oracle.add([("e",), ("c",), ("a",), ("f",)])
    with monkeypatch.context() as broken:
        _break_once(broken, oracle.index, place)
        with pytest.raises(KeyboardInterrupt):
            oracle.index.newest(oracle.rows)
    oracle.add([("g",), ("a",)])
    for n in (14, 12, 8, 3):
        oracle.check([(letter,) for letter in "abcdefgh"], n)


def _break_once(patch: pytest.MonkeyPatch, index: KeyIndex, place: str) -> None:
    def breaking(*given: Any) -> Any:
        raise KeyboardInterrupt

    put = CodeTable.put

    def breaking_after(self: CodeTable, *given: Any) -> None:
        put(self, *given)
        raise KeyboardInterrupt

    if place == "find":
        patch.setattr(CodeTable, "find", breaking)
    elif place == "link":
        patch.setattr(Versions, "link", breaking)
    elif place == "exact":
        patch.setattr(index, "_link_exactly", breaking)
    else:
        patch.setattr(CodeTable, "put", breaking if place == "put" else breaking_after)


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of keys of each block that is indexed."""
    blocks, put = list[int](), CodeTable.put

    def counting(self: CodeTable, codes: Any, *given: Any) -> None:
        put(self, codes, *given)
        blocks.append(len(codes))

    monkeypatch.setattr(CodeTable, "put", counting)
    return blocks


def test_a_put_leaves_few_keys_to_index(indexed: list[int]) -> None:
    """No other thread calls `step`. A put must still bound the keys that wait, because the next reader indexes them."""
    index, keys = KeyIndex(pa.schema([("k", pa.int64())]), ["k"]), np.arange(3 * MOST_WAITING)
    for first in range(0, len(keys), 1024):
        index.add(pa.table({"k": keys[first : first + 1024]}))
        assert first + 1024 - sum(indexed) <= MOST_WAITING
    assert (index.lookup([pa.chunked_array([keys])], len(keys)) == keys).all()


def test_single_puts_leave_few_batches_to_index(indexed: list[int]) -> None:
    oracle = Oracle([pa.string()])
    for number in range(2 * MOST_BATCHES):
        oracle.add([(f"key-{number}",)])
        assert oracle.rows - sum(indexed) <= MOST_BATCHES
    oracle.check([("key-5",), ("key-99",), ("key",)], oracle.rows)


def test_steps_index_block_by_block_to_the_end(indexed: list[int]) -> None:
    oracle = Oracle([pa.int64()])
    assert not oracle.index.step()
    for first in range(0, 2 * BLOCK_ROWS, 1000):
        oracle.add([(key,) for key in range(first, first + 1000)])
    while oracle.index.step():
        pass
    assert indexed == [17_000, 16_000]
    oracle.check([(0,), (16_999,), (17_000,), (32_999,), (33_000,)], oracle.rows)


def test_a_reader_indexes_what_it_asks_about_and_no_more(indexed: list[int]) -> None:
    oracle = Oracle([pa.int64()])
    oracle.add([(key,) for key in range(BLOCK_ROWS)])
    oracle.add([(key,) for key in range(10)])
    oracle.check([(3,), (BLOCK_ROWS - 1,), (-5,)], BLOCK_ROWS)
    assert indexed == [BLOCK_ROWS]
    oracle.check([(3,), (11,)], oracle.rows)


def test_readers_beside_the_writer_see_their_prefix() -> None:
    """Every batch has every key: in a prefix of b batches the row of a key is in batch b, whatever follows."""
    keys, batches = 500, 60
    names = pa.array([f"key-{number}" for number in range(keys)])
    index = KeyIndex(pa.schema([("k", pa.string())]), ["k"])
    done = [0]

    def write() -> None:
        for number in range(batches):
            index.add(pa.table({"k": names}))
            done[0] = number + 1

    def read() -> None:
        random = np.random.default_rng(threading.get_ident() % 1000)
        while done[0] < batches:
            n = int(random.integers(0, done[0] + 1)) * keys
            if n:
                assert index.lookup([pa.chunked_array([names])], n).tolist() == list(range(n - keys, n))
                assert np.flatnonzero(index.newest(n)).tolist() == list(range(n - keys, n))

    together(write, *[read] * 3)


def test_a_key_with_very_many_versions_is_found_in_every_prefix() -> None:
    oracle = Oracle([pa.int64()])
    oracle.add([(1,), (2,)])
    for _ in range(4):
        oracle.add([(1,)] * 75 + [(2,)])
    for n in range(0, oracle.rows + 1, 19):
        oracle.check([(1,), (2,), (3,)], n)


def test_many_clashes_stay_exact_after_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "MOST_WAITING", 50)
    oracle = Oracle([pa.int32(), pa.string()])
    strong = key_column.hashes
    monkeypatch.setattr(key_column, "hashes", lambda *given: strong(*given) & 0xFF)
    for first in range(0, 3000, 100):
        oracle.add([(key % 7, f"{key // 3}") for key in range(first, first + 100)])
    oracle.check([(key % 7, f"{key // 3}") for key in range(0, 3500, 11)], oracle.rows)
