"""Region manifests: Lance's bytes, versions that never change, and edits that survive races."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal.wal import (
    Corrupt,
    EpochGuard,
    Fenced,
    LocalStore,
    ManifestStore,
    RegionManifest,
    RegionStatus,
    SsTable,
    StoreRefused,
    bucket_region,
)
from memwal.wal.layout import manifest_key, version_hint_key
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds
from tests.support.scripted_store import ScriptedStore
from tests.support.together import together

REGION = bucket_region(0)
FIRST = RegionManifest(version=1, writer_epoch=1, region_id=REGION)
SST = SsTable(1, "d8e87734_gen_1", in_memory_bytes=0, physical_rows=1)

# Version 4 of a region as pylance 14.0.2's ShardWriter left it after one row and a close.
WRITTEN_BY_LANCE = bytes.fromhex(
    "0804100218022002300242180801120e64623865373733345f67656e5f3118352001280850015a120a104a388480a25b59a8b05824217f980256"
)
# memwal's manifest, byte by byte as described in region_manifest.py.
WRITTEN_BY_US = bytes.fromhex(
    "8ab518026162"
    "08041002180220033002"
    "42160801120e64386538373733345f67656e5f3118002001"
    "50015a120a104a388480a25b59a8b05824217f9802567801"
    "95b518bc58dfe4"
)


def test_reads_what_lance_wrote() -> None:
    assert RegionManifest.decode(WRITTEN_BY_LANCE) == RegionManifest(
        version=4,
        writer_epoch=2,
        region_id=REGION,
        spec_id=1,
        replay_after=2,
        last_seen=2,
        current_generation=2,
        ssts=(SsTable(1, "db8e7734_gen_1", in_memory_bytes=0x35, physical_rows=1, primary_key_bytes=8),),
    )
    assert RegionManifest.decode(WRITTEN_BY_LANCE).encode()[:-7] == WRITTEN_BY_LANCE


def test_golden_bytes() -> None:
    manifest = RegionManifest(4, 2, REGION, 1, 2, 3, 2, (SST,), RegionStatus.SEALED, edit_id="ab")
    assert manifest.encode() == WRITTEN_BY_US
    assert RegionManifest.decode(WRITTEN_BY_US) == manifest
    assert RegionManifest.decode(WRITTEN_BY_US).edit_id == "ab"


def test_absent_counts_are_not_zero() -> None:
    manifest = replace(FIRST, current_generation=3, ssts=(SsTable(1, "a", 0), SsTable(2, "b")))
    assert [sst.in_memory_bytes for sst in RegionManifest.decode(manifest.encode()).ssts] == [0, None]


def test_unknown_fields_survive_an_edit() -> None:
    shard_field = bytes.fromhex("7207") + b"\x0a\x01a\x12\x02xy"  # 14: ShardFieldEntry, which memwal does not read
    sst_with_more = bytes.fromhex("4208" + "0801" + "120161" + "a00107")  # generation 1, path "a", field 20 = 7
    by_lance = replace(FIRST, current_generation=2).encode()[:-7]
    manifest = RegionManifest.decode(by_lance + sst_with_more + shard_field)
    edited = replace(manifest, version=2, last_seen=9)
    assert shard_field in edited.encode()
    assert b"\xa0\x01\x07" in edited.encode()
    assert RegionManifest.decode(edited.encode()) == edited


def test_every_flipped_bit_and_every_missing_byte_is_noticed() -> None:
    good = replace(FIRST, current_generation=3, ssts=(SST, replace(SST, generation=2)), edit_id="ab" * 16).encode()
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            RegionManifest.decode(bytes(damaged))
    for length in range(len(good)):
        with pytest.raises(Corrupt):
            RegionManifest.decode(good[:length])


def test_a_manifest_from_before_the_checksum_is_said_to_be_one() -> None:
    before = FIRST.encode()[:-7] + bytes.fromhex("8ab518026162")  # the edit id stood at the end
    with raises(Corrupt):
        RegionManifest.decode(before)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, FIRST.encode()[:-3], b"\x08\x01\x10\x01", FIRST.encode() + b"\x78\x05"]
)
def test_what_is_no_manifest_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        RegionManifest.decode(data)


# ---- latest ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def manifests(store: ScriptedStore) -> ManifestStore:
    return ManifestStore(store, REGION, ids=SeededIds(), clock=FakeClock())


def grow(manifests: ManifestStore, versions: int) -> RegionManifest:
    """Write `versions` versions; last_seen is the number of the version."""
    current = manifests.create(None, FIRST)
    assert current is not None
    for number in range(2, versions + 1):
        current = manifests.edit_unowned(lambda found, seen=number: replace(found, last_seen=seen))
    return current


def test_no_version_yet(manifests: ManifestStore) -> None:
    assert manifests.latest() is None
    with raises(Corrupt):
        manifests.edit_unowned(lambda found: found)


def test_old_versions_may_be_gone(store: ScriptedStore, manifests: ManifestStore) -> None:
    newest = grow(manifests, 5)
    for version in (1, 2, 3):
        store.delete(manifest_key(REGION, version))
    store.put(version_hint_key(REGION), b'{"version":2}')
    assert manifests.latest() == newest


def test_a_manifest_under_the_wrong_name_is_corrupt(store: ScriptedStore, manifests: ManifestStore) -> None:
    store.put(manifest_key(REGION, 2), grow(manifests, 1).encode())
    with raises(Corrupt):
        manifests.latest()


# ---- create and edit ------------------------------------------------------------------------------------------------


def test_create_tells_that_another_writer_took_the_version(store: ScriptedStore, manifests: ManifestStore) -> None:
    current = grow(manifests, 1)
    proposed = replace(current, version=2, writer_epoch=2)
    assert manifests.create(current, proposed) is not None
    other = ManifestStore(store, REGION, ids=SeededIds(1), clock=FakeClock())
    assert other.create(current, proposed) is None


def test_a_hint_that_cannot_be_written_is_harmless(store: ScriptedStore, manifests: ManifestStore) -> None:
    def no_hints(call: str, key: str) -> None:
        if call == "put":
            raise StoreRefused(f"{key}: no hints today")

    store.before = no_hints
    assert manifests.latest() is None
    assert grow(manifests, 3) == manifests.latest()


def test_edits_from_many_threads_all_get_in(store: ScriptedStore, manifests: ManifestStore) -> None:
    grow(manifests, 1)
    guard = EpochGuard(REGION, 1)

    def edit() -> None:
        for _ in range(20):
            manifests.edit(guard, lambda found: replace(found, last_seen=found.last_seen + 1))

    together(*[edit] * 4)
    newest = manifests.latest()
    assert newest is not None
    assert (newest.version, newest.last_seen) == (81, 80)


def test_an_edit_that_changes_nothing_writes_nothing(store: ScriptedStore, manifests: ManifestStore) -> None:
    current = grow(manifests, 2)
    assert manifests.edit(EpochGuard(REGION, 1), lambda found: found) == current
    assert manifests.read(3) is None


def test_a_fenced_owner_cannot_edit(store: ScriptedStore, manifests: ManifestStore) -> None:
    current = grow(manifests, 1)
    assert manifests.create(current, replace(current, version=2, writer_epoch=2))
    guard = EpochGuard(REGION, 1)
    with raises(Fenced):
        manifests.edit(guard, lambda found: replace(found, last_seen=5))
    with pytest.raises(Fenced):
        guard.check()
    assert manifests.read(3) is None


def test_a_manifest_older_than_the_claim_is_corrupt(manifests: ManifestStore) -> None:
    grow(manifests, 1)
    with raises(Corrupt):
        manifests.owned(EpochGuard(REGION, 3))


# ---- with Lance's own writer -----------------------------------------------------------------------------------------


def lance_table(path: Path) -> lance.LanceDataset:
    key = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
    schema = pa.schema([key, pa.field("val", pa.float32())])
    dataset = lance.write_dataset(pa.table({"id": [1], "val": [0.5]}, schema=schema), str(path))
    dataset.initialize_mem_wal(bucket_column="id", num_buckets=1)
    return dataset


@pytest.mark.parametrize("versions", [1, 3])
def test_lance_opens_a_region_whose_manifests_we_wrote(tmp_path: Path, versions: int) -> None:
    dataset = lance_table(tmp_path / "t")
    manifests = ManifestStore(LocalStore(tmp_path / "t"), REGION)
    current = manifests.create(None, FIRST)
    for _ in range(versions - 1):
        assert current is not None
        current = manifests.create(
            current, replace(current, version=current.version + 1, writer_epoch=current.writer_epoch + 1)
        )
    with dataset.mem_wal_writer(str(REGION)) as writer:
        writer.put(pa.table({"id": [2], "val": [1.5]}, schema=dataset.schema))
    newest = manifests.latest()
    assert newest is not None
    assert newest.writer_epoch == versions + 1
    assert [sst.physical_rows for sst in newest.ssts] == [1]


def test_an_edit_id_is_fresh_in_every_version(manifests: ManifestStore) -> None:
    current = grow(manifests, 1)
    copies = {
        manifests.edit_unowned(lambda found: replace(found, last_seen=found.last_seen + 1)).edit_id for _ in range(9)
    }
    assert len(copies | {current.edit_id}) == 10
    assert all(uuid.UUID(each) for each in copies)
