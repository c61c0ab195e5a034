"""The stages of a small table after its rows are in the log: flush with its publication, commit, collection.

History of the one region, entry by entry (n is the version of a row):

    1  put 0…4 (n=1)             flushed as generation 1, committed
    2  delete 0, put 3, 5 (n=2)  flushed as generation 2
    3  put 3 (n=3)               flushed as generation 3
    4  put 6 (n=4)               in the log alone

A stage begins on a copy of the storage of that moment, claims the region, does its work, and may end at any call.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal import flush
from memwal.flush import BaseTable, read_sst
from memwal.memtable import TOMBSTONE, MemTable, row_schema, tombstones, with_tombstone
from memwal.wal import (
    Claim,
    Entry,
    Fenced,
    LocalStore,
    ManifestStore,
    ObjectStore,
    WalAppender,
    WalCollector,
    WalOptions,
    bucket_region,
    claim,
    open_store,
)
from memwal.wal.layout import parse_entry_key, wal_prefix
from tests.clean import assert_clean
from tests.log_life import check_chain
from tests.support.clock import FakeClock, SeededIds

REGION = bucket_region(0)
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
STAGES = ("flush", "commit", "collect")
EXPECTED = {
    "flush": {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    "commit": {1: 1, 2: 1, 3: 3, 4: 1, 5: 2, 6: 4},
    "collect": {1: 1, 2: 1, 3: 3, 4: 1, 5: 2, 6: 4},
}
"""The rows that a reader must find before and after a stage."""
_HISTORY: tuple[tuple[dict[int, int], tuple[int, ...]], ...] = (
    ({0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, ()),
    ({3: 2, 5: 2}, (0,)),
    ({3: 3}, ()),
    ({6: 4}, ()),
)
_WAY_OFF = 1e9
"""Seconds that a collector's clock is ahead, so that every entry is old enough."""


@dataclass
class Owner:
    """A claim of the region of the table at `uri`, and the operations of its owner."""

    uri: str
    options: Mapping[str, str]
    store: ObjectStore
    seed: int = 1
    clock: FakeClock | None = None
    limits: WalOptions | None = None

    def __post_init__(self) -> None:
        self.ids, self.clock = SeededIds(self.seed), self.clock or FakeClock()
        self.base = BaseTable.open(self.uri, self.options)
        self.rows = row_schema(self.base.schema, self.base.key)
        self.codec = self.base.codec

    def claim(self) -> Claim:
        """Claim the region."""
        self.claimed = claim(
            self.store,
            REGION,
            spec_id=1,
            codec=self.codec,
            ids=self.ids,
            clock=self._clock,
            options=self.limits,
        )
        self.appender = WalAppender(
            self.store,
            REGION,
            self.claimed.guard,
            self.codec,
            self.claimed.next_position,
            self.ids,
            self._clock,
            self.limits,
        )
        return self.claimed

    @property
    def _clock(self) -> FakeClock:
        assert self.clock is not None
        return self.clock

    def append(self, puts: Mapping[int, int], deletes: tuple[int, ...] = ()) -> Entry:
        """Append one durable entry."""
        table = pa.table({"id": list(puts), "n": list(puts.values())}, schema=SCHEMA)
        gone = pa.table({"id": pa.array(deletes, pa.int64())})
        rows = pa.concat_tables([with_tombstone(table, self.rows), tombstones(gone, self.rows)])
        generation = self.claimed.manifest.current_generation
        position = self.appender.append(rows, generation=generation, applied={})
        found = self.store.get(next(key for key in self.store.list(wal_prefix(REGION)) if _position(key) == position))
        assert found is not None
        return self.codec.decode(position, found)

    def flush(self, entries: list[Entry], generation: int | None = None) -> None:
        """Flush the rows of `entries` as `generation`, by default the next one."""
        manifests = ManifestStore(self.store, REGION, ids=self.ids, clock=self._clock, options=self.limits)
        current = manifests.latest()
        assert current is not None
        table = MemTable(self.rows, ["id"], [], generation or current.current_generation)
        for entry in entries:
            table.apply(entry.rows)
        table.freeze()
        flush.flush(
            self.store,
            manifests,
            self.claimed.guard,
            table.snapshot(),
            flush.SstFormat.of(self.base),
            generation=table.generation,
            covers_position=entries[-1].position,
            ids=self.ids,
        )

    def commit(self) -> None:
        """Commit everything that is published to the base table."""
        flush.commit(self.uri, self.options, self.store, clock=self._clock, ids=self.ids)

    def collect(self) -> None:
        """Collect all garbage: entries of the log, then SSTs."""
        clock = FakeClock()
        clock.advance(_WAY_OFF)
        WalCollector(self.store, REGION, self.codec, clock, workers=1).collect(0.0)
        ssts = flush.SstCollector(self.store, REGION, clock, workers=1)
        listing = ssts.list_region()
        needs = flush.base_needs(self.store, self.base.latest(), clock.now())
        self.collected = ssts.collect(listing, needs, 0.0)

    def do(self, stage: str) -> None:
        """Do one stage in the claimed region."""
        if stage == "flush":
            self.flush(self.claimed.entries)
        elif stage == "commit":
            self.commit()
        else:
            self.collect()


def prepare(directory: Path) -> dict[str, Path]:
    """Return a directory with the initial storage of each stage."""
    uri, taken = str(directory / "table.lance"), {}

    def keep(stage: str) -> None:
        taken[stage] = directory / stage
        shutil.copytree(uri, taken[stage])

    BaseTable.create(uri, SCHEMA, ["id"], 1, [])
    owner = Owner(uri, {}, LocalStore(uri))
    owner.claim()
    for number, (puts, deletes) in enumerate(_HISTORY, 1):
        entry = owner.append(puts, deletes)
        if number == 1:
            keep("flush")
        if number < len(_HISTORY):
            owner.flush([entry])
        if number == 1:
            owner.commit()
    keep("commit")
    owner.commit()
    keep("collect")
    return taken


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of `prepare`; a test copies what it uses."""
    return prepare(tmp_path_factory.mktemp("stages"))


def check_fenced(uri: str, options: Mapping[str, str], before: Owner) -> None:
    """Claim what a stage left. `before`, the owner of the stage, must then be fenced."""
    Owner(uri, options, open_store(uri, options), seed=3000).claim()
    with pytest.raises(Fenced):
        before.append({99: 99})


def check(uri: str, options: Mapping[str, str], stage: str) -> None:
    """Reopen what a stage left and check every row: its newest value, none twice. Then finish all pending work, and
    check again.
    """
    store = open_store(uri, options)
    owner = Owner(uri, options, store, seed=1000)
    claimed = owner.claim()
    assert read(owner, claimed) == EXPECTED[stage]
    check_chain(store)
    assert_clean(store, uri)
    if claimed.entries:
        owner.flush(claimed.entries)
    owner.commit()
    owner.collect()
    assert owner.collected.unaccounted == 0
    assert flush.SstCollector(store, REGION, FakeClock()).names() == (), "SST directories are left over"
    owner.append({7: 7})
    again = Owner(uri, options, store, seed=2000)
    claimed = again.claim()
    assert read(again, claimed) == EXPECTED[stage] | {7: 7}
    assert again.base.committed[REGION] == claimed.manifest.current_generation - 1
    assert claimed.manifest.ssts == ()
    check_chain(store)
    assert_clean(store, uri, deep=False)


def read(owner: Owner, claimed: Claim) -> dict[int, int]:
    """Read the table from storage: base, then published SSTs, then the log; the newest row of a key wins."""
    base = lance.dataset(owner.uri, storage_options=dict(owner.options)).to_table().to_pylist()
    found = {row["id"]: row["n"] for row in base}
    assert len(found) == len(base), "a row is in the base table twice"
    done = owner.base.committed.get(REGION, 0)
    generations = [sst.generation for sst in claimed.manifest.ssts if sst.generation > done]
    assert generations == list(range(done + 1, claimed.manifest.current_generation)), "generations are not contiguous"
    ssts = (read_sst(owner.store, REGION, sst) for sst in claimed.manifest.ssts if sst.generation > done)
    for row in _rows(itertools.chain(ssts, (entry.rows for entry in claimed.entries))):
        if row[TOMBSTONE]:
            found.pop(row["id"], None)
        else:
            found[row["id"]] = row["n"]
    return found


def _rows(tables: Iterator[pa.Table]) -> Iterator[dict[str, Any]]:
    return (row for table in tables for row in table.to_pylist())


def _position(key: str) -> int:
    parsed = parse_entry_key(key)
    return parsed.position if parsed else 0
