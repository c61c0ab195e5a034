"""usage() against what the process really grew by, in a process of its own for each case: within 20 %.

It drives freeze and back-pressure: counting too little runs out of memory, too much freezes memtables too early. The
process is warmed up first with a memtable of the same shape, so that code, threads and allocator pools are there, but
without its text indexes: tantivy goes on using what an earlier writer left. The rows are made before the first reading
and copied into the memtable, as a region does.

Two readings: what the process has grown by, and what of it is left when the allocators give back what is free, since
they keep a share that the next rows use. What is counted is the second. tantivy frees most of what it takes, and malloc
keeps that while its writer lives: text is counted between the two.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHIN = 0.2
ROOT = Path(__file__).resolve().parent.parent.parent

CHILD = '''
import ctypes, gc, json, sys
import numpy as np
import pyarrow as pa
from memtable import IndexSpec, MemTable, row_schema, with_tombstone

case, rows = sys.argv[1], int(sys.argv[2])
WIDTH = 128
KEYS = {"string": ["name"], "composite": ["name", "id"]}.get(case, ["id"])
BATCH = {"single rows": 1, "large batches": 20_000}.get(case, 1_000)
INDEXES = {
    "vectors": {"vector": "ivf_pq"},
    "half vectors": {"half": "ivf_pq"},
    "texts": {"body": "fts"},
    "short texts": {"title": "fts"},
    "btree": {"price": "btree"},
    "everything": {"vector": "ivf_pq", "body": "fts", "price": "btree"},
}.get(case, {})
COLUMNS = {
    "vectors": ["vector"], "half vectors": ["half"], "texts": ["body"], "short texts": ["title"],
    "everything": ["vector", "body", "title"],
}.get(case, [])
WORDS = np.array(["w%d" % n for n in range(20_000)])
FIELDS = [pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string(), nullable=False),
          pa.field("price", pa.float64()), pa.field("body", pa.string()), pa.field("title", pa.string()),
          pa.field("vector", pa.list_(pa.float32(), WIDTH)), pa.field("half", pa.list_(pa.float16(), WIDTH))]
NAMES = [*(["id"] if case != "string" else []), *(["name"] if "name" in KEYS else []), "price", *COLUMNS]
SCHEMA = row_schema(pa.schema([field for field in FIELDS if field.name in NAMES]), KEYS)
SPECS = [IndexSpec(column, kind) for column, kind in INDEXES.items()]
rng = np.random.default_rng(1)


def texts(count, words):
    drawn = WORDS[(len(WORDS) * rng.random((count, words)) ** 2).astype(int)]
    return [" ".join(each) for each in drawn.tolist()]


def batch(first, count):
    ids = np.arange(first, first + count)
    if case == "updates":
        ids = ids % (rows // 10)
    columns = {"id": ids, "name": ["package-%012d" % n for n in ids], "price": rng.random(count)}
    if "body" in NAMES:
        columns["body"] = texts(count, 30)
    if "title" in NAMES:
        columns["title"] = texts(count, 5)
    for name, kind in (("vector", np.float32), ("half", np.float16)):
        if name in NAMES:
            numbers = rng.standard_normal((count, WIDTH)).astype(kind)
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), WIDTH)
    return with_tombstone(pa.table({name: columns[name] for name in NAMES}), SCHEMA)


def read(table):
    """What a read builds is held too, and counted."""
    snapshot = table.snapshot()
    live = snapshot.live()
    for spec in table.specs:
        if spec.kind == "ivf_pq":
            snapshot.search(spec.column, np.ones(WIDTH), 10, live)
        elif spec.kind == "fts":
            snapshot.match(spec.column, "w1 w2", 10, live)
    snapshot.where("price < 0.001", live)
    snapshot.take(snapshot.lookup(batch(0, 10).select(KEYS)))


def filled(batches, specs):
    table = MemTable(SCHEMA, KEYS, specs, 1)
    for rows in batches:
        copied = pa.concat_tables([SCHEMA.empty_table(), rows]).combine_chunks()
        table.apply(table.check(copied))
        table.index_step()
    while table.index_step():
        pass
    read(table)
    return table


def made(count):
    return [batch(first, min(BATCH, count - first)) for first in range(0, count, BATCH)]


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


few, many = made(min(rows // 10, 12_000)), made(rows)
filled(few, [spec for spec in SPECS if spec.kind != "fts"])
gc.collect()
pa.default_memory_pool().release_unused()
ctypes.CDLL(None).malloc_trim(0)
before = resident()
table = filled(many, SPECS)
usage, grown = table.usage(), resident() - before
pa.default_memory_pool().release_unused()
ctypes.CDLL(None).malloc_trim(0)
print(json.dumps({"grown": grown, "held": resident() - before, "usage": usage}))
'''

CASES = {
    "int64": 200_000,
    "string": 200_000,
    "composite": 200_000,
    "updates": 200_000,
    "single rows": 120_000,
    "large batches": 200_000,
    "btree": 200_000,
    "vectors": 60_000,
    "half vectors": 60_000,
    "texts": 60_000,
    "short texts": 100_000,
    "everything": 50_000,
}


def measure(case: str, rows: int) -> tuple[float, float, float, str]:
    """MiB counted, held and grown, and all of that in words."""
    command = [sys.executable, "-c", CHILD, case, str(rows)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    usage: dict[str, int] = told["usage"]
    counted, held, grown = (size / 2**20 for size in (sum(usage.values()), told["held"], told["grown"]))
    parts = ", ".join(f"{part} {size / 2**20:.1f}" for part, size in usage.items() if size > 2**18)
    said = f"{case:<14} {rows:>8,} rows: {counted:6.1f} MiB counted ({parts}), {held:6.1f} held, {grown:6.1f} grown"
    return counted, held, grown, f"{said}: {counted / held:.2f}, {counted / grown:.2f}"


@pytest.mark.parametrize("case", CASES)
def test_usage_is_what_the_process_grew_by(case: str) -> None:
    counted, held, grown, said = measure(case, CASES[case])
    has_text = case in ("texts", "short texts", "everything")
    assert (1 - WITHIN) * held <= counted <= (1 + WITHIN) * (grown if has_text else held), said


if __name__ == "__main__":  # the figures, for whoever mends them
    for name, rows in CASES.items():
        print(measure(name, rows)[-1])
