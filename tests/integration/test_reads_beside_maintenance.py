"""Reads beside puts, deletes, flushes, commits, compactions and collections: no key is missing, doubled or older.

Every put writes a version into its rows, and the versions of a key only grow. Writers record a version before the put
and again when it is acknowledged; a reader reads the records before and after its read:

1. A read at `latest` or `durable` shows every write acknowledged before the read began, or a newer one.
2. A read shows no write that had not begun.
3. One reader never sees an older version than it saw before at the same level.
4. A key that is never deleted is never missing: at `flushed` and `committed`, once it was seen there.
5. No key occurs twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.engine.table.stored import StoredTable
from tests.conftest import extent, wait_until

SECONDS = extent(8.0, 60.0)
"""Minimum duration; a slower machine continues until every worker has made enough steps."""
LONGEST = 400.0
KEYS, WIDTH = 1_200, 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("version", pa.int64()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
AGE = "10s"
SETTINGS = {
    "memtable": {"rows_max": 1_000, "vector_train_rows": 256},
    "commit": {"interval": "400ms", "optimize_interval": "1s", "compact_interval": "1s", "compact_fragments": 4},
    "gc": {
        "wal_age_min": AGE,
        "sst_age_min": AGE,
        "versions_age_min": AGE,
        "interval": "1s",
        "versions_interval": "1s",
    },
}


def rows(ids: Any, versions: Any) -> pa.Table:
    vectors = np.random.default_rng([int(versions[0])]).random((len(ids), WIDTH), dtype=np.float32)
    vector = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), WIDTH)
    bodies = pa.array([f"harbor {version % 7}" for version in versions.tolist()])
    return pa.table([pa.array(ids), pa.array(versions), bodies, vector], schema=SCHEMA)


@dataclass
class Notes:
    """The writers' records, by key. A version belongs to a put or a delete; keys divisible by 10
    are sometimes deleted.
    """

    begun: np.ndarray = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    acked: np.ndarray = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    deleted: np.ndarray = field(default_factory=lambda: np.zeros(KEYS, bool))
    """Whether the last acknowledged write is a delete."""
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def fault(self, what: str, ids: np.ndarray, *more: np.ndarray) -> None:
        if len(ids):
            few = [tuple(int(each[at]) for each in (ids, *more)) for at in range(min(5, len(ids)))]
            self.faults.append(f"{what}: {len(ids)} keys, {few}")

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while not self.over.is_set() and not self.faults:
                    work()
                    self.counts[name] = self.counts.get(name, 0) + 1
            except Exception as error:  # noqa: BLE001 - reported by the test
                self.faults.append(f"{name}: {error!r}")

        return threading.Thread(target=run, name=name)


class Writer:
    """Puts and deletes the keys that leave `remainder` when divided by 2."""

    def __init__(self, table: Any, notes: Notes, remainder: int) -> None:
        self.table, self.notes, self.rng = table, notes, np.random.default_rng(remainder)
        self.keys = np.arange(remainder, KEYS, 2)
        self.put(self.keys)

    def put(self, ids: np.ndarray) -> None:
        versions = self.notes.begun[ids] + 1
        self.notes.begun[ids] = versions
        self.table.put(rows(ids, versions))
        self.notes.deleted[ids] = False
        self.notes.acked[ids] = versions

    def delete(self, ids: np.ndarray) -> None:
        versions = self.notes.begun[ids] + 1
        self.notes.begun[ids] = versions
        self.table.delete(pa.table({"id": ids}))
        self.notes.acked[ids] = versions
        self.notes.deleted[ids] = True

    def __call__(self) -> None:
        few = np.sort(self.rng.choice(self.keys, self.rng.integers(1, 120), replace=False))
        if self.rng.random() < 0.2 and (mortal := few[few % 10 == 0]).size:
            self.delete(mortal)
        else:
            self.put(few)
        time.sleep(0.005)


class Checker:
    """One reader: it reads, then compares the rows with the records from before and after."""

    def __init__(self, notes: Notes, level: str, read: Callable[[str], pa.Table], *, whole: bool = True) -> None:
        self.notes, self.level, self.read, self.whole = notes, level, read, whole
        self.seen = np.zeros(KEYS, np.int64)
        self.fresh = level in ("latest", "durable")

    def __call__(self) -> None:
        notes = self.notes
        # Read the versions first: a key deleted in between then counts as acknowledged and not deleted, a weaker
        # condition.
        deleted_before, acked = notes.deleted.copy(), notes.acked.copy()
        deleted = deleted_before & notes.deleted & (notes.acked == acked)
        found = self.read(self.level)
        begun = notes.begun.copy()
        ids, versions = (found.column(name).to_numpy() for name in ("id", "version"))
        values, times = np.unique(ids, return_counts=True)
        notes.fault(f"{self.level}: doubled", values[times > 1])
        late = versions > begun[ids]
        notes.fault(f"{self.level}: not begun", ids[late], versions[late], begun[ids][late])
        back = versions < self.seen[ids]
        notes.fault(f"{self.level}: went back", ids[back], versions[back], self.seen[ids][back])
        if self.fresh:
            old = (versions < acked[ids]) | (deleted[ids] & (versions == acked[ids]))
            notes.fault(f"{self.level}: older than acknowledged", ids[old], versions[old], acked[ids][old])
        if self.whole:
            missing = np.ones(KEYS, bool)
            missing[ids] = False
            missing &= np.arange(KEYS) % 10 > 0
            missing &= (acked if self.fresh else self.seen) > 0
            notes.fault(f"{self.level}: missing", np.flatnonzero(missing), acked[missing], self.seen[missing])
        self.seen[ids] = np.maximum(self.seen[ids], versions)


def work_on(table: Any, stored: StoredTable, notes: Notes) -> dict[str, Callable[[], None]]:
    """Return the workers by name; each is called repeatedly in a separate thread."""
    rng = np.random.default_rng(7)

    def flush() -> None:
        table.flush()
        time.sleep(0.3)

    def scanned(level: str) -> pa.Table:
        return table.scan(columns=["id", "version"], level=level).read_all()

    def scanned_from_storage(level: str) -> pa.Table:
        return stored.scan(columns=["id", "version"], level=level).read_all()

    def got(level: str) -> pa.Table:
        ids = rng.choice(KEYS, 50, replace=False)
        return table.get(pa.table({"id": ids}), columns=["id", "version"], level=level)

    def searched(level: str) -> pa.Table:
        near = rng.random(WIDTH, dtype=np.float32)
        return table.search("vector", near, k=40, columns=["id", "version"], level=level)

    def matched(level: str) -> pa.Table:
        return table.match("body", f"harbor {rng.integers(7)}", k=60, columns=["id", "version"], level=level)

    levels = ("latest", "durable", "flushed", "committed")
    return {
        **{f"writer {remainder}": Writer(table, notes, remainder) for remainder in (0, 1)},
        "flush": flush,
        **{f"scan {level}": Checker(notes, level, scanned) for level in levels},
        **{f"storage {level}": Checker(notes, level, scanned_from_storage) for level in levels[1:]},
        "get": Checker(notes, "latest", got, whole=False),
        "search": Checker(notes, "latest", searched, whole=False),
        "match": Checker(notes, "latest", matched, whole=False),
    }


def all_took_part(uri: str, table: Any, stored: StoredTable, notes: Notes, work: Any) -> bool:
    """Return whether every worker made some steps and collections deleted old data; otherwise a run proves nothing."""
    if notes.faults:
        return True
    version = table.status()["base_version"]
    return (
        all(notes.counts.get(name, 0) >= 5 for name in work)
        and version > 20
        and len(stored.base.latest().dataset.versions()) < 0.8 * version
        and not list(Path(uri).glob("_mem_wal/*/*_gen_1"))
    )


@pytest.mark.timeout(LONGEST + 200)
def test_no_read_misses_doubles_or_goes_back(tmp_path: Path) -> None:
    uri, notes = str(tmp_path / "t.lance"), Notes()
    indexes = {"vector": "ivf_pq", "body": "fts"}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=2, indexes=indexes, settings=SETTINGS) as table:
        stored = StoredTable(BaseTable.open(uri), wal.open_store(uri, {}))
        work = work_on(table, stored, notes)
        threads = [notes.thread(name, each) for name, each in work.items()]
        for thread in threads:
            thread.start()
        try:
            notes.over.wait(SECONDS)
            wait_until(lambda: all_took_part(uri, table, stored, notes, work), LONGEST - SECONDS, 1.0)
        finally:
            notes.over.set()
            for thread in threads:
                thread.join(60)
        assert not notes.faults, notes.faults
        assert not any(thread.is_alive() for thread in threads)
