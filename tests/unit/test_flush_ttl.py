"""Expiry of rows: exact in every unit and zone, and equal by mask and by Lance's filter. The table stores the ttl."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal.flush import BaseTable, CommitConflict, Ttl, set_ttl
from memwal.flush.base.ttl import MAX_SECONDS, Expiry, check_ttl
from memwal.memtable import TOMBSTONE, InvalidRows
from tests.messages import raises
from tests.support.clock import FakeClock

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("t", pa.timestamp("us", "UTC")), ("x", pa.list_(pa.float32(), 2))]
)
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
ZONES = (None, "UTC", "America/New_York", "+05:30")
NOW = 1_750_000_000.123456
DAY = 86_400
KINDS = [
    *(pa.timestamp(unit, zone) for unit in UNITS for zone in ZONES),
    pa.date32(),
    pa.date64(),
]


def column(kind: pa.DataType, numbers: list[int | None]) -> pa.ChunkedArray:
    wide = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    return pa.chunked_array([pa.array(numbers, wide).cast(kind)])


def nanoseconds(kind: pa.DataType, number: int) -> int:
    if pa.types.is_date(kind):
        return number * (DAY * 10**9 if pa.types.is_date32(kind) else 10**6)
    return number * UNITS[kind.unit]


def around(kind: pa.DataType, least: int) -> list[int | None]:
    """Return the bound, its neighbours in the type, and a null. A date64 has no values within a day."""
    step = DAY * 10**3 if pa.types.is_date64(kind) else 1
    bound = -(-least // step) * step
    return [bound - step, bound, bound + step, None]


@pytest.mark.parametrize("indexed", [False, True], ids=["scanned", "B-tree"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_mask_and_lances_filter_agree_at_the_boundary(kind: pa.DataType, indexed: bool, tmp_path: Path) -> None:
    expiry = Expiry.at(Ttl("t", 3600.0), kind, NOW)
    values = around(kind, expiry.least)
    bound = round(NOW * 1e6) * 1000 - 3600 * 10**9
    wanted = [value is not None and nanoseconds(kind, value) < bound for value in values]
    assert wanted == [True, False, False, False]
    times = column(kind, values)
    assert expiry.mask(times).tolist() == wanted
    dataset = lance.write_dataset(pa.table({"id": range(4), "t": times}), str(tmp_path / "t"))
    if indexed:
        dataset.create_scalar_index("t", "BTREE")
    assert dataset.to_table(filter=expiry.live)["id"].to_pylist() == [1, 2, 3]
    assert dataset.to_table(filter=expiry.of_live("id < 3 -- and no more"))["id"].to_pylist() == [1, 2]
    assert dataset.count_rows(expiry.of_live(None)) == 3
    assert dataset.to_table(filter=expiry.expired)["id"].to_pylist() == [0]


@pytest.mark.parametrize(("late", "gone"), [(0, False), (1, True)], ids=["at the ttl", "a microsecond later"])
def test_a_row_expires_a_microsecond_after_its_ttl(late: int, gone: bool) -> None:
    at = round(NOW * 1e6)
    expiry = Expiry.at(Ttl("t", 0.5 + 3600), pa.timestamp("us"), (at + 3_600_500_000 + late) / 1e6)
    assert expiry.mask(column(pa.timestamp("us"), [at])).tolist() == [gone]


def test_the_longest_ttl_is_a_valid_time_in_every_unit() -> None:
    for kind in KINDS:
        expiry = Expiry.at(Ttl("t", MAX_SECONDS), kind, 0.0)
        assert expiry.mask(column(kind, [0, around(kind, expiry.least)[0]])).tolist() == [False, True]


def test_an_expired_row_is_as_if_deleted_by_its_key() -> None:
    kind = SCHEMA.field("t").type
    rows = pa.table(
        {
            "id": [1, 2, 3, 4],
            "t": column(kind, [0, None, 10**15 * 4, 0]),
            "x": pa.array([[1, 1], [2, 2], [3, 3], None], SCHEMA.field("x").type),
            TOMBSTONE: [False, False, False, True],
        }
    )
    seen = Expiry.at(Ttl("t", 60.0), kind, NOW).as_deleted(rows, ["id"])
    assert seen.schema == rows.schema
    assert seen["id"].to_pylist() == [1, 2, 3, 4]
    assert seen[TOMBSTONE].to_pylist() == [True, False, False, True]
    assert seen["x"].to_pylist() == [None, [2, 2], [3, 3], None]
    assert seen["t"].is_valid().to_pylist() == [False, False, True, False]


@pytest.mark.parametrize("ttl", [Ttl("tt", 60.0), Ttl("x", 60.0), Ttl("t", 0.5), Ttl("t", 1e12)])
def test_what_cannot_be_a_ttl_is_said_with_what_can(ttl: Ttl, tmp_path: Path) -> None:
    with raises(InvalidRows):
        check_ttl(SCHEMA, ttl)
    with raises(InvalidRows):
        BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"], 1, (), ttl=ttl)
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"], 1, ())
    with raises(InvalidRows):
        set_ttl(base, ttl, FakeClock())


def test_a_ttl_is_kept_with_the_table_changed_and_removed(tmp_path: Path) -> None:
    first, second = Ttl("t", 60.0), Ttl("t", 90.5)
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"], 1, (), ttl=first)
    versions = base.version
    assert set_ttl(base, first, FakeClock()).version == versions  # nothing to change
    assert set_ttl(base, second, FakeClock()).ttl == second == base.latest().ttl
    assert BaseTable.open(base.uri, version=versions).ttl == first
    assert set_ttl(base, None, FakeClock()).ttl is None
    assert BaseTable.open(base.uri).ttl is None
    assert BaseTable.open(base.uri).expiry(NOW) is None
    assert set_ttl(base, first, FakeClock()).ttl == first


def test_it_follows_a_renamed_column_and_ends_with_a_dropped_one(tmp_path: Path) -> None:
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"], 1, (), ttl=Ttl("t", 60.0))
    lance.dataset(base.uri).alter_columns({"path": "t", "name": "happened"})
    assert base.latest().ttl == Ttl("happened", 60.0)
    assert (expiry := base.latest().expiry(NOW)) is not None
    assert expiry.column == "happened"
    lance.dataset(base.uri).drop_columns(["happened"])
    assert base.latest().ttl == Ttl("", 60.0)
    assert base.latest().expiry(NOW) is None


def test_adopting_a_table_keeps_the_ttl_beside_its_own_metadata(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    lance.write_dataset(SCHEMA.empty_table(), uri, schema=SCHEMA)
    assert BaseTable.adopt(uri, ["id"], 1, (), ttl=Ttl("t", 60.0)).ttl == Ttl("t", 60.0)


def test_another_writers_version_does_not_keep_a_ttl_from_being_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseTable.create(str(tmp_path / "t"), SCHEMA, ["id"], 1, ())
    real = lance.LanceDataset.update_config
    conflicts = list(range(3))

    def conflicting(dataset: lance.LanceDataset, settings: dict[str, str]) -> None:
        if conflicts:
            conflicts.pop()
            real(lance.dataset(base.uri), {"other": str(len(conflicts))})
            raise OSError("a commit conflict")
        real(dataset, settings)

    monkeypatch.setattr(lance.LanceDataset, "update_config", conflicting)
    assert set_ttl(base, Ttl("t", 60.0), FakeClock()).ttl == Ttl("t", 60.0)
    conflicts.extend(range(100))
    with pytest.raises(CommitConflict):
        set_ttl(base, None, FakeClock())
