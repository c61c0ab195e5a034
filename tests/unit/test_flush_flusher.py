"""A flush runs strictly in order, publishes an SST whole or not at all, and stops when it is fenced."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from memwal import flush
from memwal.flush import FlushAttempts, FlushOutOfOrder, read_sst
from memwal.flush.sst.files import discard
from memwal.memtable import MemTable, row_schema, with_tombstone
from memwal.wal import (
    Claim,
    Fenced,
    LanceCodec,
    LocalStore,
    ManifestStore,
    OutcomeUnknown,
    PutOutcome,
    RegionManifest,
    SsTable,
    StoreRefused,
    StoreUnavailable,
    SystemClock,
    WalError,
    bucket_region,
    claim,
)
from memwal.wal.layout import sst_key
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds

REGION = bucket_region(0)
BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
ROWS = row_schema(BASE, ["id"])


class Region:
    """A claimed region whose memtables are flushed by hand."""

    def __init__(self, store: LocalStore) -> None:
        self.store, self.ids, self.clock = store, SeededIds(3), FakeClock()
        self.claim = self.claim_again()
        self.manifests = ManifestStore(store, REGION, ids=self.ids, clock=self.clock)

    def claim_again(self) -> Claim:
        return claim(self.store, REGION, spec_id=1, codec=LanceCodec(ROWS), ids=self.ids, clock=SystemClock())

    def flush(
        self, generation: int, covers: int, ids: list[int], attempts: FlushAttempts | None = None
    ) -> RegionManifest:
        table = MemTable(ROWS, ["id"], [], generation)
        if ids:
            table.apply(with_tombstone(pa.table({"id": ids, "name": ["x"] * len(ids)}), ROWS))
        table.freeze()
        return flush.flush(
            self.store,
            self.manifests,
            self.claim.guard,
            table.snapshot(),
            flush.SstFormat(["id"], None),
            generation=generation,
            covers_position=covers,
            ids=self.ids,
            attempts=attempts,
        )

    def rows(self) -> list[list[int]]:
        """Return the ids in each published SST."""
        manifest = self.manifests.latest()
        assert manifest is not None
        return [read_sst(self.store, REGION, sst)["id"].to_pylist() for sst in manifest.ssts]

    def directories(self) -> int:
        return sum("_gen_" in name for name in self.store.children(f"_mem_wal/{REGION}/"))


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
    with raises(FlushOutOfOrder):
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
    with raises(Fenced):
        region.flush(1, 7, [1])
    latest = region.manifests.latest()
    assert latest is not None
    assert (latest.ssts, latest.replay_after) == ((), 0)


# ---- errors after the effect: what is written stays until the manifest says so ---------------------------------------


class AnsweredStore(LocalStore):
    """A store that answers every conditional create of a key with `at` by `answer`. The first `lands` of these puts
    land nevertheless; `late` keeps the others."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.at, self.lands = "", 0
        self.answer: PutOutcome | WalError = PutOutcome.OUTCOME_UNKNOWN
        self.late: list[tuple[str, bytes]] = []
        self.deletes = True

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        if not self.at or self.at not in key:
            return super().put_if_absent(key, data)
        if self.lands:
            self.lands -= 1
            super().put_if_absent(key, data)
        else:
            self.late.append((key, data))
        if isinstance(self.answer, WalError):
            raise type(self.answer)(*self.answer.args)
        return self.answer

    def delete(self, key: str) -> None:
        if not self.deletes:
            raise StoreUnavailable("storage is away")
        super().delete(key)

    def let_the_first_land(self) -> None:
        super().put_if_absent(*self.late[0])


@pytest.fixture
def answered(tmp_path: Path) -> Region:
    return Region(AnsweredStore(str(tmp_path / "table")))


def faults(region: Region) -> AnsweredStore:
    assert isinstance(region.store, AnsweredStore)
    return region.store


def attempt_without_an_answer(region: Region, attempts: FlushAttempts | None = None) -> AnsweredStore:
    """Flush generation 1; no edit of the manifest gets an answer or lands. Return the store, where they still may."""
    store = faults(region)
    store.at = "/manifest/"
    with pytest.raises(OutcomeUnknown):
        region.flush(1, 7, [1, 2], attempts)
    return store


@pytest.mark.parametrize("answer", [StoreRefused("no permission"), StoreUnavailable("full")])
def test_nothing_is_discarded_on_the_word_of_an_error(answered: Region, answer: WalError) -> None:
    """The store reports an error for a manifest that it has written."""
    store = faults(answered)
    store.at, store.lands, store.answer = "/manifest/", 1, answer
    with suppress(StoreRefused, StoreUnavailable):
        answered.flush(1, 7, [1, 2])
    store.at = ""
    assert answered.rows() == [[1, 2]]
    assert answered.flush(1, 7, [1, 2]).current_generation == 2
    assert answered.directories() == 1


@pytest.mark.parametrize("same", [True, False], ids=["the same attempts", "another life of the flusher"])
def test_a_publication_that_lands_late_is_recognised(answered: Region, same: bool) -> None:
    """Attempt 1 gets no answer, and lands while attempt 2 runs."""
    attempts = FlushAttempts()
    store = attempt_without_an_answer(answered, attempts)
    latest = answered.manifests.owned

    def lands_behind_the_look(*args: Any) -> RegionManifest:
        manifest = latest(*args)
        if store.at:
            store.at = ""
            store.let_the_first_land()
        return manifest

    answered.manifests.owned = lands_behind_the_look  # type: ignore[method-assign]
    manifest = answered.flush(1, 7, [1, 2], attempts if same else None)
    assert (manifest.current_generation, manifest.replay_after) == (2, 7)
    assert answered.rows() == [[1, 2]]
    assert answered.flush(2, 8, [3]).current_generation == 3


def test_a_publication_that_landed_late_and_was_pruned_is_recognised(answered: Region) -> None:
    attempts = FlushAttempts()
    store = attempt_without_an_answer(answered, attempts)
    store.at = ""
    store.let_the_first_land()
    answered.manifests.edit_unowned(lambda current: replace(current, ssts=()))
    manifest = answered.flush(1, 7, [1, 2], attempts)
    assert (manifest.current_generation, manifest.ssts) == (2, ())


def test_a_flush_that_is_tried_again_uses_the_sst_that_is_written(answered: Region) -> None:
    store, attempts = faults(answered), FlushAttempts()
    store.at = "/manifest/"
    for _ in range(20):
        with pytest.raises(OutcomeUnknown):
            answered.flush(1, 7, [1, 2], attempts)
    assert answered.directories() == 1
    store.at = ""
    assert answered.flush(1, 7, [1, 2], attempts).current_generation == 2
    assert answered.rows() == [[1, 2]]
    assert answered.directories() == 1


def test_what_a_failed_attempt_could_not_remove_the_next_one_does(answered: Region) -> None:
    store, attempts = faults(answered), FlushAttempts()
    store.at, store.deletes = "bloom_filter", False
    for _ in range(3):
        with raises(StoreUnavailable):
            answered.flush(1, 7, [1, 2], attempts)
    assert answered.directories() == 3
    store.deletes = True
    with raises(StoreUnavailable):
        answered.flush(1, 7, [1, 2], attempts)
    assert answered.directories() == 0
    store.at = ""
    answered.flush(1, 7, [1, 2], attempts)
    assert answered.directories() == 1
    assert attempts.abandoned == []


def test_a_fenced_flush_removes_what_it_cannot_publish(answered: Region) -> None:
    attempts = FlushAttempts()
    store = attempt_without_an_answer(answered, attempts)
    assert answered.directories() == 1
    store.at = ""
    answered.claim_again()
    with pytest.raises(Fenced):
        answered.flush(1, 7, [1, 2], attempts)
    assert answered.directories() == 0


def test_a_fenced_flush_keeps_what_was_published_late(answered: Region) -> None:
    attempts = FlushAttempts()
    store = attempt_without_an_answer(answered, attempts)
    store.at = ""
    store.let_the_first_land()
    answered.claim_again()
    with pytest.raises(Fenced):
        answered.flush(1, 7, [1, 2], attempts)
    assert answered.rows() == [[1, 2]]


def test_an_sst_of_which_nothing_is_known_stays(answered: Region) -> None:
    """The edit of the manifest may still land, because its slot is free."""
    store = attempt_without_an_answer(answered)
    assert answered.directories() == 1
    store.at = ""
    store.let_the_first_land()
    assert answered.rows() == [[1, 2]]


def test_discarding_one_sst_leaves_those_whose_names_begin_with_its_own(region: Region) -> None:
    """…_gen_4 is a prefix of …_gen_41."""
    short, long = (SsTable(number, f"1f3a90cc_gen_{number}") for number in (4, 41))
    for sst in (short, long):
        region.store.put_if_absent(sst_key(REGION, sst.path, "data/x.lance"), b"rows")
    assert discard(region.store, REGION, short)
    assert region.store.children(f"_mem_wal/{REGION}/") == ["1f3a90cc_gen_41", "manifest"]
    assert region.store.exists(sst_key(REGION, long.path, "data/x.lance"))
