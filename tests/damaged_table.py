"""A table with everything that `flush.verification.runner` checks, and copies of it for tests to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable

import memwal
from memwal.flush import BaseTable, bloom_bytes, write_key_sidecar
from memwal.flush.sst.key_sidecar import page_data
from memwal.flush.verification.runner import Verified, verify_table
from memwal.wal import (
    ManifestStore,
    RegionManifest,
    SsTable,
    open_store,
)
from memwal.wal.layout import (
    entry_key,
    manifest_key,
    manifest_prefix,
    parse_entry_key,
    parse_manifest_key,
    sst_key,
    wal_prefix,
)

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
    ]
)
INDEXES = {"name": "btree"}
SETTINGS = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def rows(ids: range | list[int], version: int) -> list[dict[str, Any]]:
    """Return rows that depend on these arguments only."""
    return [{"id": n, "name": f"name of {n} v{version}", "vector": [n, version, 0.5, 1.0]} for n in ids]


def opened(uri: str) -> Any:
    """Open the table and claim its regions."""
    new = {} if Path(uri).exists() else {"schema": SCHEMA, "key": "id", "regions": 2, "indexes": INDEXES}
    return memwal.open(uri, settings=SETTINGS, **new)


def grow(uri: str) -> Iterator[str]:
    """Build a table stage by stage."""
    table = opened(uri)
    yield "created"
    table.put(rows(range(40), 1))
    yield "put"
    table.flush()
    yield "flushed"
    table.commit()
    yield "committed"
    table.put(rows(range(20, 60), 2))
    table.delete([1, 2, 3])
    table.flush()
    table.put(rows([5, 6, 7, 100, 101], 3))
    table.flush()
    yield "flushed twice"
    table.put(rows(range(200, 210), 4))
    table.close()
    table = opened(uri)
    yield "opened again"
    for number in range(3):
        table.put(rows(range(300 + 10 * number, 305 + 10 * number), 5), durable=number != 1)
    table.close()
    yield "closed"


def verify(uri: str, deep: bool = True) -> Verified:
    """Return the findings of `memwal verify`."""
    return verify_table(open_store(uri), uri, deep=deep)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table with one committed generation, two published ones, and a log tail written by two claims."""
    path = tmp_path_factory.mktemp("verify") / "table"
    for _ in grow(str(path)):
        pass
    return path


class Damaged:
    """A copy of the grown table, to be damaged. `region` is that of bucket 0."""

    def __init__(self, uri: str) -> None:
        self.uri, self.store = uri, open_store(uri)
        self.base = BaseTable.open(uri)
        self.region, self.other = self.base.regions
        self.suffix = self.base.codec.suffix

    @property
    def manifest(self) -> RegionManifest:
        found = ManifestStore(self.store, self.region).latest()
        assert found is not None
        return found

    @property
    def sst(self) -> SsTable:
        return self.manifest.ssts[0]

    def file(self, key: str) -> Path:
        return Path(self.uri) / key

    def sst_file(self, name: str) -> Path:
        """Return a file of the first SST; a pattern must match exactly one file."""
        (found,) = self.file(sst_key(self.region, self.sst.path)).glob(name)
        return found

    def entry(self, position: int) -> Path:
        return self.file(entry_key(self.region, position, self.suffix))

    @property
    def positions(self) -> list[int]:
        keys = map(parse_entry_key, self.store.list(wal_prefix(self.region)))
        return sorted(key.position for key in keys if key)

    @property
    def sentinel(self) -> int:
        """Position of the second claim's sentinel."""
        (found,) = (p for p in self.positions if self.base.codec.header(self.entry(p).read_bytes()).sentinel)
        return found

    def reentry(self, position: int, rows: Callable[[pa.Table], pa.Table] = lambda rows: rows, **changes: Any) -> None:
        """Rewrite an entry with a changed header or changed rows, and a valid checksum."""
        found = self.base.codec.decode(position, self.entry(position).read_bytes())
        header = replace(found.header, **changes)
        self.entry(position).write_bytes(self.base.codec.encode(header, rows(found.rows)))

    def rewrite_manifests(self, change: Callable[[RegionManifest], RegionManifest], newest: bool = False) -> None:
        """Rewrite manifest versions, every one or the newest, with valid checksums."""
        keys = map(parse_manifest_key, self.store.list(manifest_prefix(self.region)))
        for version in [self.manifest.version] if newest else [key.version for key in keys if key]:
            file = self.file(manifest_key(self.region, version))
            file.write_bytes(change(RegionManifest.decode(file.read_bytes())).encode())

    def collect(self) -> None:
        """Delete what the collector would delete of the log."""
        for position in self.positions:
            if position <= self.manifest.replay_after and position != self.sentinel:
                self.entry(position).unlink()

    def rewrite_sst(self, change: Callable[[pa.Table], pa.Table]) -> None:
        """Rewrite the first SST from changed rows, with all its parts consistent, and collect its part of the log."""
        directory = self.file(sst_key(self.region, self.sst.path))
        changed = change(lance.dataset(str(directory)).to_table())
        shutil.rmtree(directory)
        lance.write_dataset(changed, str(directory), data_storage_version=self.base.storage_version)
        keys = changed.select(["id"])
        (directory / "bloom_filter.bin").write_bytes(bloom_bytes(keys))
        write_key_sidecar(str(directory), page_data(keys.select(["id"])))
        self.recount(changed.num_rows)
        self.collect()

    def recount(self, rows: int) -> None:
        """Record in every manifest that the first SST has `rows` rows."""
        generation = self.sst.generation

        def recounted(manifest: RegionManifest) -> RegionManifest:
            ssts = (replace(s, physical_rows=rows) if s.generation == generation else s for s in manifest.ssts)
            return replace(manifest, ssts=tuple(ssts))

        self.rewrite_manifests(recounted)

    def base_file(self, pattern: str) -> Path:
        return next(Path(self.uri).glob(pattern))

    def mark(self, region: UUID, generation: int) -> None:
        """Record progress without a commit."""
        merge = self.base.dataset.merge_insert("id").when_not_matched_insert_all()
        done = [CompactedSsTable(str(region), generation)]
        merge.mark_sstables_as_compacted(done).execute(self.base.schema.empty_table())


@pytest.fixture
def damaged(grown: Path, tmp_path: Path) -> Damaged:
    shutil.copytree(grown, tmp_path / "table")
    return Damaged(str(tmp_path / "table"))


def flip(file: Path, at: int) -> None:
    """Flip one bit of the byte at `at`; it makes a capital of a small letter."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x20
    file.write_bytes(data)


def cut(file: Path, to: int = -5) -> None:
    """Truncate `file` to its first bytes."""
    file.write_bytes(file.read_bytes()[:to])


def found_in(damaged: Damaged, deep: bool = True) -> list[tuple[str, str]]:
    """Return check and place of every finding; each must be one line with a remedy."""
    findings = verify(damaged.uri, deep=deep).findings
    for each in findings:
        assert "\n" not in str(each)
        assert each.remedy
    return [(each.check, each.where) for each in findings]
