"""Golden files of the bytes that outlive a release: a region manifest, Lance's manifest of the same content, a commit
plan, and the MemWAL state of a base table in each storage version.

The tests check two things for each golden file: this build still writes the same bytes, and this build and Lance still
read them. After an intended change, run this module with MEMWAL_REWRITE_GOLDEN=1 and read the difference before you
commit it. Section "When a byte format changes" in the README of flush lists the other steps of a format change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.flush.base.manifest import indexed_generations, manifest_file, manifest_names, progress
from memwal.flush.base.setup import metadata_of, read_setup
from memwal.flush.base.state import read_state
from memwal.flush.commits.plan import RegionPlan, agree, plan_key
from memwal.flush.resizing.routing import Decision, decide, decided, routing_key
from memwal.memtable import IndexSpec
from memwal.wal import (
    EntryHeader,
    LocalStore,
    ManifestStore,
    RegionManifest,
    RegionStatus,
    SsTable,
    WalFormat,
    WalOptions,
    bucket_region,
    codec_for,
)
from memwal.wal.applied import AppliedMap, Snapshot, encoded, hashes, read_snapshot
from memwal.wal.layout import manifest_key, snapshot_key, version_hint_key
from tests.support.clock import FakeClock, SeededIds
from tests.support.golden import GOLDEN, golden
from tests.support.memory_store import MemoryStore

REGION = bucket_region(0)
MANIFEST = RegionManifest(
    version=1,
    writer_epoch=4,
    region_id=REGION,
    spec_id=1,
    replay_after=0,
    last_seen=0,
    current_generation=8,
    ssts=(
        SsTable(5, "0a0b0c0d_gen_5", in_memory_bytes=51_200, physical_rows=1_000, primary_key_bytes=8_000),
        SsTable(6, "1a0b0c0d_gen_6", in_memory_bytes=0, physical_rows=1, primary_key_bytes=0),
        SsTable(7, "2a0b0c0d_gen_7"),  # of a writer that recorded no sizes
    ),
    edit_id="0123456789abcdef" * 2,
)
CLAIMED = RegionManifest(9, 5, REGION, 1, 300, 301, 8, edit_id="0123456789abcdef" * 2, claim_id="f" * 32)
OF_A_LOG = replace(CLAIMED, log_id="e" * 32)
RELEASED = replace(OF_A_LOG, released=5)
SEALED = RegionManifest(9, 5, REGION, 1, 300, 301, 8, (), RegionStatus.SEALED, edit_id="fedcba9876543210" * 2)
VERSIONS = ("2.0", "2.1", "2.2")
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
SPECS = (IndexSpec("n", "btree"),)


# ---- region manifests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("region_manifest", MANIFEST),
        ("region_manifest_claimed", CLAIMED),
        ("region_manifest_of_a_log", OF_A_LOG),
        ("region_manifest_released", RELEASED),
        ("region_manifest_sealed", SEALED),
    ],
)
def test_a_region_manifest_is_written_and_read_as_ever(name: str, manifest: RegionManifest) -> None:
    kept = golden(f"wal/{name}.binpb", manifest.encode())
    assert manifest.encode() == kept
    read = RegionManifest.decode(kept)
    assert (read, read.edit_id, read.foreign) == (manifest, manifest.edit_id, b"")
    assert (read.claim_id, read.log_id) == (manifest.claim_id, manifest.log_id)
    assert [sst.foreign for sst in read.ssts] == [b""] * len(manifest.ssts)


def test_lance_reads_our_manifest_and_writes_its_own_of_the_same_content(tmp_path: Path) -> None:
    """Lance's writer claims the region after memwal: its manifest has the next epoch, and the same SSTs with the same
    sizes."""
    base = BaseTable.create(str(tmp_path), SCHEMA, ["id"], 1, [], wal_format="arrow")
    store = LocalStore(base.uri)
    store.put(manifest_key(REGION, 1), (GOLDEN / "wal/region_manifest.binpb").read_bytes())
    writer = lance.dataset(base.uri).mem_wal_writer(str(REGION))
    found = store.get(manifest_key(REGION, 2))
    writer.close()
    assert found is not None
    kept = golden("wal/region_manifest_of_shard_writer.binpb", found)
    assert found == kept
    theirs = RegionManifest.decode(kept)
    assert (theirs.writer_epoch, theirs.edit_id, theirs.foreign) == (5, "", b"")
    assert theirs == RegionManifest(2, 5, REGION, current_generation=8, ssts=MANIFEST.ssts)


def test_a_claim_of_lances_writer_ends_the_rest(tmp_path: Path) -> None:
    """It drops memwal's fields."""
    base = BaseTable.create(str(tmp_path), SCHEMA, ["id"], 1, [], wal_format="arrow")
    store = LocalStore(base.uri)
    store.put(manifest_key(REGION, 1), replace(RELEASED, version=1).encode())
    lance.dataset(base.uri).mem_wal_writer(str(REGION)).close()
    claimed = ManifestStore(store, REGION).latest()
    assert claimed is not None
    assert (claimed.writer_epoch, claimed.released, claimed.at_rest) == (6, 0, False)


def test_the_hint_beside_a_manifest() -> None:
    store = MemoryStore()
    manifests = ManifestStore(store, REGION, ids=SeededIds(), clock=FakeClock())
    manifests.create(None, RegionManifest(1, 1, REGION))
    written = manifests.read(1)
    assert written is not None
    assert store.get(version_hint_key(REGION)) == b'{"version":1,"edit":"%s"}' % written.edit_id.encode()


# ---- commit plans ----------------------------------------------------------------------------------------------------


def test_a_commit_plan_is_written_and_read_as_ever() -> None:
    store, plan = MemoryStore(), RegionPlan(REGION, MANIFEST.ssts)
    agree(store, plan, clock=FakeClock(), last=6, by="0123456789abcdef" * 2)
    written = store.get(plan_key(REGION, 5))
    assert written is not None
    kept = golden("flush/commit_plan.json", written)
    assert written == kept
    store.put(plan_key(REGION, 5), kept)
    read = agree(store, plan, clock=FakeClock(), by="another")
    assert (read.first, read.last, read.by_other) == (5, 6, True)
    assert read.ssts == MANIFEST.ssts[:2]


def test_the_decision_of_a_resize_is_written_and_read_as_ever() -> None:
    store, decision = (
        MemoryStore(),
        Decision(2, 8, {"loader": 17, "memwal:before:4/2:loader": 16}, "0123456789abcdef" * 2),
    )
    decide(store, decision, clock=FakeClock(), options=WalOptions())
    written = store.get(routing_key(2))
    assert written is not None
    kept = golden("flush/routing.json", written)
    assert written == kept
    store.put(routing_key(2), kept)
    other = Decision(2, 3, {}, "another")
    assert decide(store, other, clock=FakeClock(), options=WalOptions()) == decided(store, 2) == decision


# ---- base tables -----------------------------------------------------------------------------------------------------


def committed_table(uri: str, version: str, wal_format: WalFormat) -> BaseTable:
    """Create a table with one region and an index, and commit generations 1 and 2 in two commits."""
    lance.write_dataset(SCHEMA.empty_table(), uri, schema=SCHEMA, data_storage_version=version)
    BaseTable.adopt(uri, ["id"], 1, SPECS, wal_format=wal_format)
    with memwal.open(uri, settings={"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}) as table:
        for ids in ([1, 2, 3], [3, 4]):
            table.put([{"id": id, "n": id} for id in ids])
            table.flush()
            table.commit()
    return BaseTable.open(uri)


def wire(data: bytes, depth: int = 0) -> Iterator[str]:
    """Yield the fields of a protobuf message, one line each, in wire order. Needs no description of the message.

    Raises: IndexError, AssertionError if `data` is not a protobuf message.
    """
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind, line = tag & 7, f"{'  ' * depth}{tag >> 3}: "
        if kind == 0:
            value, at = varint(data, at)
            yield f"{line}{value}"
            continue
        assert kind in _FIXED or kind == 2, f"wire type {kind}"
        length, at = (_FIXED[kind], at) if kind in _FIXED else varint(data, at)
        inner, at = data[at : at + length], at + length
        assert len(inner) == length, "it is cut off"
        text = inner.isascii() and inner.decode().isprintable()
        yield line + (f'"{inner.decode()}"' if text else inner.hex())
        if kind == 2 and not text:
            yield from _nested(inner, depth + 1)


_FIXED = {1: 8, 5: 4}


def _nested(inner: bytes, depth: int) -> list[str]:
    """Return the fields of a nested message, or an empty list if `inner` is not a message."""
    try:
        return list(wire(inner, depth))
    except (AssertionError, IndexError):
        return []


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the position of the byte after it."""
    number = shift = 0
    while True:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return number, at


def state_of(base: BaseTable, data: bytes) -> str:
    """Return what memwal keeps in a base table: the MemWAL state in its manifest file and the set-up, without the
    table's random id."""
    lines = ["MemWAL state", *wire(mem_wal_state(data)), "", "set-up"]
    metadata = {name.decode(): value.decode() for name, value in metadata_of(base.dataset).items()}
    metadata["memwal:table"] = "{random}"
    lines += [f"{name} = {value}" for name, value in sorted(metadata.items()) if name.startswith("memwal:")]
    return "\n".join(lines) + "\n"


def mem_wal_state(data: bytes) -> bytes:
    """Return the bytes of MemWalIndexDetails in a manifest file, found by Lance's name of the type."""
    name = b"MemWalIndexDetails\x12"
    length, at = varint(data, data.index(name) + len(name))
    return data[at : at + length]


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_state_in_a_base_table_is_written_as_ever(version: str, wal_format: WalFormat, tmp_path: Path) -> None:
    base = committed_table(str(tmp_path / "table"), version, wal_format)
    assert base.storage_version == version
    _, data = manifest_file(LocalStore(base.uri), "", base.version)
    found = state_of(base, data)
    if wal_format == "lance" and os.environ.get("MEMWAL_REWRITE_GOLDEN"):
        (GOLDEN / f"flush/base_table_{version}.manifest").write_bytes(data)
    assert found == golden(f"flush/base_state_{version}_{wal_format}.txt", found.encode()).decode()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_state_in_a_base_table_of_an_earlier_build_is_read(version: str, tmp_path: Path) -> None:
    """The golden manifest file alone is enough for memwal's parser and for Lance, as long as they read no row."""
    data = (GOLDEN / f"flush/base_table_{version}.manifest").read_bytes()
    number = version_of(data)
    store = LocalStore(str(tmp_path))
    store.put(f"_versions/{manifest_names(number)[0]}", data)
    assert progress(data).marked == {REGION: 2}
    assert indexed_generations(store, number) == {"n_idx": {REGION: 2}}
    dataset = lance.dataset(str(tmp_path))
    assert (dataset.version, dataset.data_storage_version, dataset.count_rows()) == (number, version, 4)
    assert dataset.mem_wal_index_details() is not None
    setup = read_setup(metadata_of(dataset))
    assert (setup.buckets, setup.indexes, setup.wal_format) == (1, SPECS, "lance")
    state = read_state(store, number)
    assert (state.version, state.rows, dict(state.committed)) == (number, 4, {REGION: 2})
    assert all(isinstance(segment, UUID) for found in state.indexes.values() for segment in found)


def version_of(manifest: bytes) -> int:
    """Return the version number in a golden manifest file: field 3 of the message that the footer points to."""
    at = int.from_bytes(manifest[-16:-8], "little")
    return next(int(line[3:]) for line in wire(manifest[at + 4 : -16]) if line.startswith("3: "))


# ---- the applied map -------------------------------------------------------------------------------------------------


def test_a_snapshot_of_the_applied_map_is_written_and_read_as_ever() -> None:
    name = "21-" + "0123456789abcdef" * 2
    snapshot = Snapshot(name, {"loader": 17, "memwal:before:8/xfe:loader": 16}, np.sort(hashes(["old", "older"])))
    kept = golden("wal/applied_snapshot.json", encoded(snapshot))
    assert encoded(snapshot) == kept
    store = MemoryStore()
    store.put(snapshot_key(REGION, name), kept)
    read = read_snapshot(store, REGION, name)
    assert read is not None
    assert read.applied == snapshot.applied
    assert AppliedMap({}, read).is_retired("older")


@pytest.mark.parametrize("wal_format", ["lance", "arrow"])
def test_an_entry_that_names_a_snapshot_is_written_and_read_as_ever(wal_format: WalFormat) -> None:
    codec = codec_for(wal_format, pa.schema([*SCHEMA, pa.field("_tombstone", pa.bool_(), nullable=False)]))
    changes, name = {"loader": 18, "memwal:before:8/xfe:loader": -2}, "21-" + "0123456789abcdef" * 2
    header = EntryHeader(4, 8, "0123456789abcdef" * 2, changes, sentinel=True, snapshot=name)
    written = codec.encode(header, codec.no_rows)
    kept = golden(f"wal/entry_with_snapshot.{wal_format}", written)
    if wal_format == "arrow":  # Lance writes its metadata in any order
        assert written == kept
    assert codec.header(kept) == codec.header(written) == header
