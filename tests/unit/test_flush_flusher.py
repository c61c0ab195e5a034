"""Flush: strictly in order, published whole or not at all, fenced."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import flush
from flush import FlushOutOfOrder
from memtable import MemTable, row_schema, with_tombstone
from wal import (
    Claim,
    Fenced,
    LanceCodec,
    LocalStore,
    ManifestStore,
    OutcomeUnknown,
    PutOutcome,
    RegionManifest,
    SeededIds,
    StoreUnavailable,
    SystemClock,
    bucket_region,
    claim,
)

REGION = bucket_region(0)
BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
ROWS = row_schema(BASE, ["id"])


class Region:
    """A claimed region whose memtables are flushed by hand."""

    def __init__(self, store: LocalStore) -> None:
        self.store, self.ids = store, SeededIds(3)
        self.claim = self.claim_again()
        self.manifests = ManifestStore(store, REGION, ids=self.ids)

    def claim_again(self) -> Claim:
        return claim(self.store, REGION, spec_id=1, codec=LanceCodec(ROWS), ids=self.ids, clock=SystemClock())

    def flush(self, generation: int, covers: int, ids: list[int]) -> RegionManifest:
        table = MemTable(ROWS, ["id"], [], generation)
        if ids:
            table.apply(with_tombstone(pa.table({"id": ids, "name": ["x"] * len(ids)}), ROWS))
        table.freeze()
        return flush.flush(
            self.store,
            self.manifests,
            self.claim.guard,
            table.snapshot(),
            generation=generation,
            covers_position=covers,
            key=["id"],
            storage_version=None,
            ids=self.ids,
        )

    def directories(self) -> int:
        return sum("_gen_" in name for name in self.store.children(f"_mem_wal/{REGION}/"))


class FailingStore(LocalStore):
    """Fails once, after or before the put, at the first key that holds `at`."""

    def __init__(self, root: str, at: str, outcome: PutOutcome, lands: bool) -> None:
        super().__init__(root)
        self.at, self.outcome, self.lands = at, outcome, lands

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        if not self.at or self.at not in key:
            return super().put_if_absent(key, data)
        self.at = ""
        if self.lands:
            super().put_if_absent(key, data)
        return self.outcome


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region(LocalStore(str(tmp_path / "table")))


def test_publishes_and_moves_replay_in_one_edit(region: Region) -> None:
    before = region.claim.manifest
    manifest = region.flush(1, 7, [1, 2, 3])
    assert manifest.version == before.version + 1
    assert (manifest.replay_after, manifest.last_seen, manifest.current_generation) == (7, 7, 2)
    assert [(sst.generation, sst.physical_rows) for sst in manifest.ssts] == [(1, 3)]


def test_an_empty_memtable_publishes_nothing(region: Region) -> None:
    assert region.flush(1, 7, []) == region.claim.manifest
    assert region.directories() == 0


def test_a_generation_is_never_skipped(region: Region) -> None:
    with pytest.raises(FlushOutOfOrder, match="generation 2 was to be flushed, but the next one is 1"):
        region.flush(2, 9, [1])
    assert region.directories() == 0


def test_the_same_flush_again_changes_nothing(region: Region) -> None:
    first = region.flush(1, 7, [1])
    assert region.flush(1, 7, [1]) == first
    assert region.directories() == 1


def test_another_flush_of_a_published_generation_is_refused(region: Region) -> None:
    region.flush(1, 7, [1])
    with pytest.raises(FlushOutOfOrder):
        region.flush(1, 8, [1, 2])


def test_a_fenced_writer_publishes_nothing(region: Region) -> None:
    region.claim_again()
    with pytest.raises(Fenced, match="writer epoch 1 was fenced by epoch 2"):
        region.flush(1, 7, [1])
    latest = region.manifests.latest()
    assert latest is not None
    assert (latest.ssts, latest.replay_after) == ((), 0)


@pytest.mark.parametrize("outcome", [PutOutcome.UNAVAILABLE, PutOutcome.OUTCOME_UNKNOWN])
def test_a_failed_sst_is_not_published_and_the_next_try_is(tmp_path: Path, outcome: PutOutcome) -> None:
    region = Region(FailingStore(str(tmp_path / "table"), "bloom_filter", outcome, lands=False))
    with pytest.raises(StoreUnavailable, match="bloom_filter"):
        region.flush(1, 7, [1])
    assert region.manifests.latest() == region.claim.manifest
    assert region.flush(1, 7, [1]).current_generation == 2


def test_an_edit_without_an_answer_publishes_once(tmp_path: Path) -> None:
    store = FailingStore(str(tmp_path / "table"), "", PutOutcome.OUTCOME_UNKNOWN, lands=True)
    region = Region(store)
    store.at = "/manifest/"
    try:
        manifest = region.flush(1, 7, [1])
    except OutcomeUnknown:
        manifest = region.flush(1, 7, [1])
    assert [sst.generation for sst in manifest.ssts] == [1]
    assert manifest.current_generation == 2
