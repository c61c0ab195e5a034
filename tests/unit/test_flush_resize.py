"""A resize: every row once and as new as acknowledged, whatever it is killed at; nobody writes by the old routing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import ingest
import wal
from flush import BaseTable, ResizeReport, resize
from tests.clean import assert_clean, assert_collected
from wal import FakeClock, LocalStore, ManifestStore, RegionStatus, SystemIds

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
QUIET: dict[str, Any] = {"commit": {"interval": 0}, "gc": {"interval": 0}, "wal": {"retry_budget": "10s"}}


@dataclass
class Resized:
    """A table beside what must be in it, resized from outside."""

    uri: str
    wal_format: str = "lance"
    append: bool = False
    oracle: dict[int, int] = field(default_factory=dict)

    def open(self, regions: int | None = None) -> ingest.Table:
        new: dict[str, Any] = {"schema": SCHEMA, "key": () if self.append else "id"} if regions else {}
        settings = QUIET | {"wal": QUIET["wal"] | ({"format": self.wal_format} if regions else {})}
        return ingest.open(self.uri, regions=regions, settings=settings, **new)

    def put(self, table: ingest.Table, ids: range, n: int, token: str | None = None) -> bool:
        self.oracle |= dict.fromkeys(ids, n)
        return table.put([{"id": id, "n": n} for id in ids], token=token).applied

    def resize(
        self, buckets: int, store: wal.ObjectStore | None = None, clock: wal.Clock | None = None
    ) -> ResizeReport:
        store, clock = store or self.store, clock or FakeClock()
        return resize(self.uri, {}, store, buckets, clock=clock, ids=SystemIds())

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.uri)

    @property
    def base(self) -> BaseTable:
        return BaseTable.open(self.uri)

    def manifests(self) -> list[wal.RegionManifest]:
        found = (ManifestStore(self.store, region).latest() for region in wal.regions(self.store))
        return [each for each in found if each is not None]

    def expect(self, table: ingest.Table | None = None) -> None:
        """The rows are there, each once: in the base table, or as `table` shows them."""
        rows = (lance.dataset(self.uri).to_table() if table is None else table.scan()).to_pylist()
        assert sorted((row["id"], row["n"]) for row in rows) == sorted(self.oracle.items())


def copied(world: Resized, to: Path) -> Resized:
    shutil.copytree(world.uri, to)
    return Resized(str(to), world.wal_format, world.append, dict(world.oracle))


@pytest.fixture(params=["lance", "arrow", "append"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Resized:
    if request.param == "append":
        return Resized(str(tmp_path / "table"), append=True)
    return Resized(str(tmp_path / "table"), request.param)


def test_grown_shrunk_and_grown_again(world: Resized) -> None:
    with world.open(2) as table:
        world.put(table, range(50), 1, "a:1")
    n = 1
    for version, buckets in enumerate((5, 3, 1, 4), 2):
        before = world.base.buckets
        report = world.resize(buckets)
        assert (report.routing, report.before, report.regions) == (version, before, buckets)
        world.expect()
        assert (world.base.routing, world.base.buckets) == (version, buckets)
        assert_clean(world.store, world.uri)
        n += 1
        with world.open() as table:
            assert table.status()["routing"] == version
            assert len(table.status()["regions"]) == buckets
            assert not world.append or not world.put(table, range(50), 1, "a:1")
            world.put(table, range(100 * n, 100 * n + 40) if world.append else range(30 * n), n, f"a:{n}")
            world.expect(table)
            table.flush()
            table.commit()
        world.expect()
    sealed = {each.region_id for each in world.manifests() if each.status is RegionStatus.SEALED}
    assert sealed == {wal.bucket_region(4)}
    assert_collected(world.store, world.uri)


def test_the_sharding_spec_that_lance_reads_is_the_new_one(tmp_path: Path) -> None:
    world = Resized(str(tmp_path / "table"), "arrow")
    with world.open(2) as table:
        world.put(table, range(50), 1)
    world.resize(3)
    dataset = lance.dataset(world.uri)
    (spec,) = dataset.mem_wal_index_details()["sharding_specs"]
    assert (spec["spec_id"], spec["fields"][0]["parameters"]) == (2, {"num_buckets": "3"})
    region = world.base.regions[2]
    with dataset.mem_wal_writer(str(region)) as writer:  # Lance's own writer goes on where we left off
        keys = [id for id in range(500, 600) if world.base.route(pa.table({"id": [id]}))[0] == 2]
        writer.put(pa.table({"id": keys, "n": [7] * len(keys)}, schema=dataset.schema))
    world.oracle |= dict.fromkeys(keys, 7)
    with world.open() as table:
        world.expect(table)
    world.resize(2)
    with pytest.raises(OSError, match=r"(?i)sealed"):
        lance.dataset(world.uri).mem_wal_writer(str(region))
    world.expect()
