"""A table whose regions are flushed by hand and committed, with a dict of the rows to expect."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal import flush
from memwal.flush import BaseTable, CommitReport
from memwal.memtable import IndexSpec, MemTable, row_schema, tombstones, with_tombstone
from memwal.wal import (
    Claim,
    LanceCodec,
    LocalStore,
    ManifestStore,
    RegionManifest,
    SystemClock,
    SystemIds,
    WalAppender,
    bucket_region,
    claim,
)
from tests.failure_matrix import FAULTS, WRITES, FaultyStore, Killed, WatchedStore
from tests.support.clock import FakeClock

WIDTH = 8
SCHEMA = pa.schema(
    [
        pa.field("note", pa.string(), metadata={"about": "anything"}),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)


class World:
    """A table whose regions are flushed by hand, and a dict of the rows to expect."""

    def __init__(
        self, uri: str, buckets: int = 2, indexes: Sequence[IndexSpec] = (), key_type: pa.DataType | None = None
    ) -> None:
        self.key_type = key_type or pa.int64()
        schema = SCHEMA.set(1, pa.field("id", self.key_type, nullable=False))
        self.oracle: Any = {}
        self.begin(BaseTable.create(uri, schema, ["id"], buckets, indexes))

    def begin(self, base: BaseTable) -> None:
        """Claim the regions of a new table."""
        self.base, self.uri, self.buckets = base, base.uri, base.buckets
        self.rows = row_schema(base.schema, base.key)
        self.store: Any = LocalStore(base.uri)
        self.claims = [self._claim(bucket) for bucket in range(base.buckets)]

    def _claim(self, bucket: int) -> Claim:
        codec, ids = LanceCodec(self.rows), SystemIds()
        return claim(self.store, bucket_region(bucket), spec_id=1, codec=codec, ids=ids, clock=SystemClock())

    def copied(self, to: Path) -> Self:
        """Copy the table to another directory."""
        other = copy.copy(self)
        other.uri, other.oracle = str(to / "table"), self.oracle.copy()
        shutil.copytree(self.uri, other.uri)
        other.store = LocalStore(other.uri)
        return other

    def manifests(self, bucket: int) -> ManifestStore:
        return ManifestStore(self.store, bucket_region(bucket))

    def put(self, ids: Sequence[int], n: int) -> None:
        vectors = np.random.default_rng(n).random((len(ids), WIDTH), dtype=np.float32)
        rows = {
            "id": pa.array(ids, self.key_type),
            "n": [n] * len(ids),
            "vector": pa.array(list(vectors), pa.list_(pa.float32(), WIDTH)),
        }
        self.flush(with_tombstone(pa.table(rows), self.rows))
        self.oracle |= dict.fromkeys(ids, n)

    def delete(self, ids: Sequence[int]) -> None:
        self.flush(tombstones(pa.table({"id": pa.array(ids, self.key_type)}), self.rows))
        for id in ids:
            self.oracle.pop(id, None)

    def flush(self, rows: pa.Table) -> None:
        """Flush one generation in every region that gets rows."""
        routed = self.base.route(rows)
        for bucket, each in enumerate(self.claims):
            part = rows.filter(pa.array(routed == bucket))
            manifest = self.manifests(bucket).latest()
            assert manifest is not None
            table = MemTable(self.rows, self.base.key, [], manifest.current_generation)
            covers = manifest.replay_after + 1
            if part.num_rows:
                covers = self._append(each, part, covers, table.generation)
                table.apply(part)
            table.freeze()
            flush.flush(
                self.store,
                self.manifests(bucket),
                each.guard,
                table.snapshot(),
                flush.SstFormat.of(self.base),
                generation=table.generation,
                covers_position=covers,
                ids=SystemIds(),
            )

    def _append(self, claimed: Claim, rows: pa.Table, position: int, generation: int) -> int:
        """Append one entry, so that the log is complete; `position` follows the last flushed one."""
        codec, clock = LanceCodec(self.rows), SystemClock()
        region = claimed.guard.region_id
        appender = WalAppender(self.store, region, claimed.guard, codec, position, SystemIds(), clock)
        return appender.append(rows, generation=generation, applied={})

    def commit(self, retries: int = 10, **more: Any) -> CommitReport:
        return flush.commit(self.uri, {}, self.store, clock=FakeClock(), retries=retries, **more)

    def killed_at_each_call(self, at: Path, work: Callable[[Self], Any]) -> Iterator[Self]:
        """Yield a copy of the table after each end of a process that does `work`: before each call of the store and
        after each write, but once if several leave the same files."""
        whole = self.copied(at / "whole")
        whole.store = store = WatchedStore(whole.store, at / "whole")
        work(whole)
        kills = list(store.kills(lambda call: "_transactions" not in call.key))
        assert {call.method for call, _ in kills} & WRITES, kills
        for number, (call, comes_after) in enumerate(kills):
            world = self.copied(at / str(number))
            inner, world.store = world.store, FaultyStore(world.store, FakeClock())
            world.store.arm(FAULTS["killed after" if comes_after else "killed before"], call)
            with pytest.raises(Killed):
                work(world)
            world.store = inner
            yield world
            shutil.rmtree(at / str(number))

    def found(self) -> Any:
        rows = lance.dataset(self.uri).to_table(columns=["id", "n"]).to_pylist()
        found = {row["id"]: row["n"] for row in rows}
        assert len(found) == len(rows), "a row is there twice"
        return found

    def version(self) -> int:
        return int(lance.dataset(self.uri).version)

    def committed(self) -> dict[int, int]:
        done = BaseTable.open(self.uri).committed
        return {b: done[bucket_region(b)] for b in range(self.buckets) if bucket_region(b) in done}

    def latest(self) -> list[RegionManifest]:
        return [m for bucket in range(self.buckets) if (m := self.manifests(bucket).latest()) is not None]

    def generations(self) -> list[int]:
        """Return the highest published generation of each bucket."""
        return [manifest.current_generation - 1 for manifest in self.latest()]

    def listed(self) -> list[int]:
        """Return the number of SSTs in the manifest of each bucket."""
        return [len(manifest.ssts) for manifest in self.latest()]

    def stranger_row(self, id: int, n: int) -> None:
        """Append a row as another program."""
        lance.write_dataset(self._plain(id, n), self.uri, mode="append")

    def stranger_merge(self, id: int, n: int) -> None:
        """Merge a row as another program."""
        merge = lance.dataset(self.uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.use_index(False).execute(self._plain(id, n))

    def _plain(self, id: int, n: int) -> pa.Table:
        return pa.table({"note": [None], "id": [id], "n": [n], "vector": [None]}, schema=self.base.schema)


def crash(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
