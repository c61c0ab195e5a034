"""The rows of the benchmarks: generated from fixed seeds, or the real packages of the quickstart.

All functions are pure, so two runs, and both sides of one run, get the same rows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

SEED = 20_240_607
QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart"
VECTOR_WIDTH = 384
REPEATS = 0.1
"""Share of a later batch whose keys were put before; the stream consists of upserts, not only of inserts."""

NARROW_KEY = "id"
NARROW = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.float64()), pa.field("label", pa.string())]
)
PACKAGES_KEY = "package"


def narrow_batches(batches: int, rows: int) -> list[pa.Table]:
    """Return `batches` tables of `rows` rows of NARROW, without duplicate keys in a table.

    REPEATS of the keys of each table but the first are keys of earlier tables.
    """
    rng = np.random.default_rng(SEED)
    ids = rng.permutation(batches * rows).reshape(batches, rows)
    again = int(rows * REPEATS)
    made = [_narrow(ids[0], rng)]
    for n in range(1, batches):
        put_before = ids[:n, again:].ravel()
        made.append(_narrow(np.concatenate([rng.choice(put_before, again, replace=False), ids[n, again:]]), rng))
    return made


def narrow_rows(ids: range, seed: int) -> pa.Table:
    """Return one row of NARROW per id, in random order. Values depend on `seed`, so that a later version differs."""
    rng = np.random.default_rng((SEED, seed))
    return _narrow(rng.permutation(np.arange(ids.start, ids.stop, ids.step)), rng)


def _narrow(ids: npt.NDArray[np.int64], rng: np.random.Generator) -> pa.Table:
    labels = pa.array([f"label {n:03d}" for n in range(1000)]).take(pa.array(rng.integers(0, 1000, len(ids))))
    return pa.table([pa.array(ids, pa.int64()), pa.array(rng.random(len(ids))), labels], schema=NARROW)


@cache
def packages() -> pa.Table:
    """Return the 4,000 Debian packages, in stream order."""
    return _read("01-packages-*.parquet")


@cache
def package_updates() -> pa.Table:
    """Return 900 of the packages again, 581 of them at a newer version."""
    return _read("02-updates-*.parquet")


def _read(pattern: str) -> pa.Table:
    table = pa.concat_tables([pq.read_table(file) for file in sorted(QUICKSTART.glob(pattern))])
    vector = pa.list_(pa.float32(), VECTOR_WIDTH)  # has the name of the list's field that Lance's writer requires
    fields = [
        pa.field(each.name, vector if each.name == "embedding" else each.type, nullable=each.name != PACKAGES_KEY)
        for each in table.schema
    ]
    return table.cast(pa.schema(fields)).combine_chunks()


def newest(tables: list[pa.Table], key: str) -> pa.Table:
    """Return the last row of each key, if `tables` are put in order."""
    rows = pa.concat_tables(tables)
    last = pa.table({"key": rows.column(key), "at": pa.array(np.arange(rows.num_rows))})
    return rows.take(last.group_by("key").aggregate([("at", "max")]).column("at_max"))
