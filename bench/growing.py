"""Measure how times grow with rows of the memtable, SSTs, rows of the base, regions, and entries of the log.

Each function creates its own tables below a directory on local disk, and records medians in milliseconds. Sizes rise;
where possible, a larger table is built from the smaller one.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lance
import numpy as np
import psutil
import pyarrow as pa

import memwal
from bench.commit_path import base_rows, linked
from bench.latencies import timed_each
from bench.parts import Points
from bench.source_data import NARROW, NARROW_KEY, SEED, narrow_rows
from memwal.flush import BaseTable
from memwal.flush.base.fsync import sync_tree
from memwal.memtable import row_schema, with_tombstone
from memwal.wal import LanceCodec, LocalStore, bucket_region, find_tip, replay
from memwal.wal.layout import entry_key

STILL: Mapping[str, Mapping[str, Any]] = {
    "memtable": {
        "age_max": "1h",
        "size_max": "8GiB",
        "unflushed_max": "16GiB",
        "rows_max": 10_000_000,
        "entries_max": 1_000_000,
    },
    "commit": {
        "interval": "0s",
        "pending_max": 0,
        "optimize_interval": "0s",
        "compact_interval": "0s",
    },
    "gc": {"interval": "0s", "versions_interval": "0s"},
}
"""Rows stay at the level that they were put to, and nothing runs in the background during a measurement."""
PUT, FILL = 1_000, 50_000
"""Rows of a timed put, and of an untimed one."""
SST_ROWS = 64_000
"""Rows of all SSTs together, so that only the number of SSTs differs."""
UPSERT = 10_000
"""Rows that are committed to the base."""
ENTRY = 10
"""Rows of an entry of the log."""
WIDTH = 32
VECTORS = pa.schema(
    [pa.field(NARROW_KEY, pa.int64(), nullable=False), pa.field("vector", pa.list_(pa.float32(), WIDTH))]
)
_FRESH = 1.2
"""Keys of upserts are drawn from this many times the base, so one in six is new."""
_ROWS_OF_A_FRAGMENT = 1_000_000
_GETS, _PUTS, _COMMITS = 30, 20, 3


def median_ms(work: Callable[[Any], object], items: Iterable[Any]) -> float:
    """Return the median milliseconds of `work` for an item, without the first item, which fills caches."""
    first, *rest = timed_each(work, items)
    return float(np.median(rest or [first])) * 1e3


def opened(at: Path, schema: pa.Schema = NARROW, regions: int = 1, **more: Any) -> Any:
    """Open a table for a measurement; create it if it does not exist."""
    return memwal.open(at, schema=schema, key=NARROW_KEY, regions=regions, settings=STILL, **more)


def keys_of(rows: int, count: int) -> list[int]:
    """Return `count` keys of a table with the keys 0 … rows."""
    return [int(key) for key in np.random.default_rng(SEED).integers(0, rows, count)]


def _get(table: Any, **more: Any) -> Callable[[int], object]:
    return lambda key: table.get([key], **more)


# ---- rows of the memtable ------------------------------------------------------------------------------------------


def memtable(at: Path, sizes: Sequence[int], found: Points) -> None:
    """Measure a put of 1,000 rows, a get of one key, and a search of the nearest ten of 32-d vectors."""
    with opened(at / "narrow") as table:
        held = 0
        for size in sizes:
            held = _filled(table, held, size, lambda first, count: narrow_rows(range(first, first + count), 1))
            found.note("get of 1 key", size, median_ms(_get(table), keys_of(held, _GETS)))
            puts = [narrow_rows(range(held + n * PUT, held + (n + 1) * PUT), 2) for n in range(_PUTS)]
            os.sync()
            found.note("put of 1,000 rows, durable", size, median_ms(table.put, puts))
            held += _PUTS * PUT
    with opened(at / "vectors", VECTORS, indexes={"vector": "ivf_pq"}) as table:
        held, rng = 0, np.random.default_rng(SEED)
        queries = rng.random((_GETS, WIDTH), dtype=np.float32)
        for size in sizes[:-1]:
            held = _filled(table, held, size, lambda first, count: _vectors(first, count, rng))
            table.search("vector", queries[0], k=10)  # indexes the rows that were put
            found.note("search, k = 10", size, median_ms(lambda each: table.search("vector", each, k=10), queries))


def _filled(table: Any, held: int, size: int, made: Callable[[int, int], pa.Table]) -> int:
    """Put new rows until the table has `size`; return its number of rows."""
    while held < size:
        count = min(FILL, size - held)
        table.put(made(held, count))
        held += count
    return held


def _vectors(first: int, count: int, rng: np.random.Generator) -> pa.Table:
    values = pa.array(rng.random(count * WIDTH, dtype=np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(values, WIDTH)
    return pa.table([pa.array(np.arange(first, first + count)), vectors], schema=VECTORS)


# ---- SSTs of a region ----------------------------------------------------------------------------------------------


def ssts(at: Path, sizes: Sequence[int], found: Points) -> None:
    """Measure a get of one key, a count and a scan of the same rows in a rising number of SSTs."""
    rows = narrow_rows(range(SST_ROWS), 1)
    for size in sizes:
        with opened(at / f"of-{size}") as table:
            each = SST_ROWS // size
            for number in range(size):
                table.put(rows.slice(number * each, each))
                table.flush()
            found.note("get of 1 key", size, median_ms(_get(table), keys_of(SST_ROWS, _GETS)))
            found.note("count", size, median_ms(lambda _: table.count(), range(6)))
            found.note("scan of all 64,000 rows", size, median_ms(lambda _: table.scan().read_all(), range(6)))


# ---- rows of the base table ----------------------------------------------------------------------------------------


def base(at: Path, sizes: Sequence[int], found: Points) -> None:
    """Measure a get of one key, a commit of 10,000 rows, and a bare `merge_insert`; without and with a B-tree."""
    for size in sizes:
        plain, indexed = tables_of(at, size)
        upserts = upserts_of(size, UPSERT, _COMMITS + 1)
        for path, tree in ((plain, ""), (indexed, ", B-tree")):
            copied = at / "memwal"
            linked(path, copied)
            with opened(copied) as table:
                for level in ("latest", "committed") if not tree else ("latest",):
                    asked = median_ms(_get(table, level=level), keys_of(size, _GETS if tree else 10))
                    found.note(f"get of 1 key, {level}{tree}", size, asked, panel="Rows of the base table: gets")
                if not tree:
                    found.note("commit of 10,000 rows", size, _commits(table, upserts))
            linked(path, at / "bare")
            os.sync()
            taken = median_ms(partial(merge, at / "bare"), upserts)
            found.note(f"merge_insert of 10,000 rows{tree}", size, taken)
            shutil.rmtree(at / "memwal")
            shutil.rmtree(at / "bare")
        shutil.rmtree(plain)
        shutil.rmtree(indexed)


def tables_of(at: Path, rows: int) -> tuple[Path, Path]:
    """Create two tables of the same narrow rows in the same files: without an index, and with a B-tree on the key."""
    plain, indexed = at / f"plain-{rows}", at / f"indexed-{rows}"
    BaseTable.create(str(plain), NARROW, [NARROW_KEY], 1, [])
    source = pa.RecordBatchReader.from_batches(NARROW, base_rows(rows))
    lance.write_dataset(source, str(plain), mode="append", max_rows_per_file=_ROWS_OF_A_FRAGMENT)
    linked(plain, indexed)
    lance.dataset(str(indexed)).create_scalar_index(NARROW_KEY, "BTREE", name="key_idx")
    for path in (plain, indexed):
        sync_tree(str(path))
    return plain, indexed


def upserts_of(rows: int, count: int, batches: int) -> list[pa.Table]:
    """Return batches of `count` rows, one row in six new, for a base with the keys 0 … rows.

    A batch has no duplicate keys.
    """
    rng = np.random.default_rng(SEED)
    made = []
    for number in range(batches):
        keys = rng.choice(max(int(rows * _FRESH), count), count, replace=False)
        made.append(narrow_rows(range(count), number + 1).set_column(0, NARROW.field(0), pa.array(keys)))
    return made


def merge(path: Path, rows: pa.Table) -> None:
    """Run a bare upsert without a sync."""
    dataset = lance.dataset(str(path))
    dataset.merge_insert(NARROW_KEY).when_matched_update_all().when_not_matched_insert_all().execute(rows)


def _commits(table: Any, upserts: Sequence[pa.Table]) -> float:
    """Return the median of the commits alone, without the first one, which checks all rows of the base once."""
    taken = []
    for rows in upserts:
        table.put(rows)
        table.flush()
        os.sync()
        taken += timed_each(lambda _: table.commit(), [0])
    return float(np.median(taken[1:])) * 1e3


# ---- regions -------------------------------------------------------------------------------------------------------


def regions(at: Path, sizes: Sequence[int], found: Points) -> None:
    """Measure a put of 1,000 rows over all regions, a get, table creation, and memory.

    Each number of regions is measured in a process of its own.
    """
    spawn = multiprocessing.get_context("spawn")
    for size in sizes:
        with spawn.Pool(1) as pool:
            for (name, unit), value in pool.apply(of_regions, (str(at), size)).items():
                found.note(name, size, value, unit)


def of_regions(at: str, count: int) -> dict[tuple[str, str], float]:
    """Return the figures of a table with `count` regions by name and unit.

    Memory is relative to a table with one region.
    """
    with opened(Path(at) / f"first-{count}") as first:  # loads what a process loads once
        first.put(narrow_rows(range(PUT), 1))
        first.get([1])
    process, path = psutil.Process(), Path(at) / f"of-{count}"
    before, puts = process.memory_info().rss, [narrow_rows(range(n * PUT, (n + 1) * PUT), 1) for n in range(5)]
    began = time.perf_counter()
    with opened(path, regions=count) as table:
        open_ms = (time.perf_counter() - began) * 1e3
        files = _files(path)
        os.sync()
        put_ms = median_ms(table.put, puts)
        files = _files(path) - files
        get_ms = median_ms(_get(table), keys_of(len(puts) * PUT, _GETS))
        memory = (process.memory_info().rss - before) / 2**20
    return {
        ("put of 1,000 rows, durable", "ms"): put_ms,
        ("get of 1 key", "ms"): get_ms,
        ("making the table", "ms"): open_ms,
        ("memory", "MiB"): max(memory, 1.0),
        ("files written by a put", "files"): files / len(puts),
    }


def _files(path: Path) -> int:
    return sum(each.is_file() for each in path.rglob("*"))


# ---- entries of the log --------------------------------------------------------------------------------------------


def log(at: Path, sizes: Sequence[int], found: Points) -> None:
    """Measure opening a region (claim and replay) whose log has the given number of entries of ten rows."""
    path, written = at / "table", 1
    with opened(path) as table:
        table.put(narrow_rows(range(ENTRY), 1))
    for size in sizes:
        _lengthen(path, written, size)
        written = size
        copies = [at / f"copy-{number}" for number in range(3 if size <= 1_000 else 2)]
        for copied in copies:
            linked(path, copied)
        os.sync()
        found.note("opening again", size, median_ms(lambda each: opened(each).close(), copies))
        for copied in copies:
            shutil.rmtree(copied)


def _lengthen(path: Path, written: int, size: int) -> None:
    """Write further entries in the form of one writer's durable puts, without a sync after each."""
    store, region, rows = LocalStore(path), bucket_region(0), row_schema(NARROW, [NARROW_KEY])
    codec = LanceCodec(rows)
    tip = find_tip(store, region, codec.suffix, 0)
    (last,) = replay(store, region, codec, tip - 1, tip)
    for number in range(written, size):
        header = replace(last.header, entry_id=f"{number:032x}")
        entry = with_tombstone(narrow_rows(range(number * ENTRY, (number + 1) * ENTRY), 1), rows)
        (path / entry_key(region, tip + 1 + number - written, codec.suffix)).write_bytes(codec.encode(header, entry))
