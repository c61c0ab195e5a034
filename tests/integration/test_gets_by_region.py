"""A get verifies and reads only the regions of its keys, and is never older than any owner's acknowledged writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import lancedb
import pyarrow as pa
import pytest

import memwal
from memwal.flush import resize
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.settings.load import load
from memwal.wal import LocalStore, SystemClock, SystemIds, open_store
from tests.messages import raises
from tests.opened import open_table

REGIONS, KEYS = 8, range(24)
PROVING = ["latest", "durable"]


@pytest.fixture
def open_owner(small_config: Callable[..., Path]) -> Iterator[Callable[..., Table]]:
    """Open the small table with eight regions, claiming all or none of them; `read_lease` is a setting."""
    opened = list[Table]()

    def open_one(*, claim: bool = True, read_lease: str = "0s") -> Table:
        settings = load(small_config(regions={"count": REGIONS}, wal={"read_lease": read_lease}), {})
        opened.append(open_table(settings, {}, claim=claim))
        return opened[-1]

    yield open_one
    for table in opened:
        table.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collect the paths of all objects that are read from logs and manifests; a test may clear the set."""
    paths, get = set[str](), LocalStore.get

    def noted(self: LocalStore, path: str, *more: Any, **named: Any) -> Any:
        paths.add(path)
        return get(self, path, *more, **named)

    monkeypatch.setattr(LocalStore, "get", noted)
    return paths


def region_of(table: Table, key: int) -> UUID:
    (bucket,) = table.base.route(pa.table({"id": pa.array([key], pa.int64())}))
    return table.base.regions[bucket]


def names(rows: pa.Table) -> list[str]:
    return rows.column("name").to_pylist()


@pytest.mark.parametrize("level", PROVING)
def test_storage_is_asked_for_the_regions_of_the_keys_alone(
    level: str, open_owner: Callable[..., Table], made: Any, asked: set[str]
) -> None:
    table = open_owner()
    table.put(made.table(KEYS))

    def regions_asked(read: Callable[[], object]) -> set[UUID]:
        asked.clear()
        read()
        return {region for region in table.base.regions if any(str(region) in path for path in asked)}

    for key in KEYS:
        assert regions_asked(lambda key=key: table.get(key, level=level)) == {region_of(table, key)}
    few = [9, 2, 9, 10_000]
    assert regions_asked(lambda: table.get(few, level=level)) == {region_of(table, key) for key in few}
    assert names(table.get(few, level=level)) == ["row 9 v0", "row 2 v0"]
    assert regions_asked(lambda: table.get([], level=level)) == set()
    assert regions_asked(lambda: table.count(level=level)) == set(table.base.regions)
    assert regions_asked(lambda: table.get(list(range(1_000)), level=level)) == set(table.base.regions)


@pytest.mark.parametrize("read_lease", ["0s", "50ms"])
@pytest.mark.parametrize("level", PROVING)
def test_a_region_that_another_owner_took_fails_the_gets_of_its_keys_alone(
    level: str, read_lease: str, open_owner: Callable[..., Table], made: Any
) -> None:
    older = open_owner(read_lease=read_lease)
    older.put(made.table(KEYS))
    newer = open_owner(claim=False, read_lease=read_lease)
    taken = region_of(older, 5)
    newer.acquire(taken)
    lost = [key for key in KEYS if region_of(older, key) == taken]
    kept = [key for key in KEYS if key not in lost]
    newer.put(made.table(lost, 1))
    assert names(newer.get(lost, level=level)) == [f"row {key} v1" for key in lost]
    assert names(older.get(kept, level=level)) == [f"row {key} v0" for key in kept]
    for keys in (5, [kept[0], 5]):
        with raises(memwal.FencedError):
            older.get(keys, level=level)
    assert names(older.get(kept, level=level)) == [f"row {key} v0" for key in kept]
    with pytest.raises(memwal.FencedError):
        older.count(level=level)
    with pytest.raises(memwal.Unavailable) as refused:
        newer.get(kept[0], level=level)
    assert refused.value.details["reason"] == "not_owner"


@pytest.mark.parametrize(("to", "idle"), [(3, False), (13, False), (13, True)])
def test_no_get_around_a_resize_is_older_than_what_was_acknowledged(
    to: int, open_owner: Callable[..., Table], made: Any, uri: str, *, idle: bool
) -> None:
    """The keys change their regions, and some regions of both routings have the same ids. `idle`: the owner's first
    read after its puts follows the resize.
    """
    older = open_owner(read_lease="50ms")
    older.put(made.table(KEYS))

    def found(key: int, level: str) -> list[str]:
        try:
            return names(older.get(key, level=level))
        except (memwal.FencedError, memwal.Unavailable):
            return []

    def at_each_step(step: str) -> None:
        for key, level in product(() if idle else KEYS, PROVING):
            assert found(key, level) in ([], [f"row {key} v0"]), (step, level)

    resize(uri, {}, open_store(uri, {}), to, clock=SystemClock(), ids=SystemIds(), on_step=at_each_step)
    with memwal.open(uri, take_over=True) as newer:
        newer.put(made.table(KEYS, 1))
        for level in PROVING:
            assert [found(key, level) for key in KEYS] == [[]] * len(KEYS)
            assert names(newer.get(list(KEYS), level=level)) == [f"row {key} v1" for key in KEYS]


@pytest.mark.parametrize("level", ["committed", "flushed", *PROVING])
def test_keys_that_are_a_stream_are_read_once(level: str, open_owner: Callable[..., Table], made: Any) -> None:
    table = open_owner()
    table.put(made.table(KEYS))
    table.flush()
    table.commit()
    keys = pa.table({"id": pa.array([7, 3], pa.int64())})
    assert names(table.get(keys.to_reader(), level=level)) == ["row 7 v0", "row 3 v0"]
    assert table.get(table.scan(["id"]), level=level).num_rows == len(KEYS)


def test_keys_by_a_name_that_the_table_has_not_met_yet(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
    with memwal.open(tmp_path / "t.lance", schema=schema, key="id", regions=4) as table:
        table.put([{"id": key, "v": -key} for key in KEYS])
        lancedb.connect(str(tmp_path)).open_table("t").alter_columns({"path": "id", "rename": "key"})
        assert table.get({"key": 9}).to_pylist() == [{"key": 9, "v": -9}]
        with raises(memwal.Invalid):
            table.get({"id": 9})
