"""`flush.verification.runner` with all data finds the damage that only rows show; without it, it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader, LanceFileWriter

from memwal.flush.verification.sst import check_keys
from memwal.wal.layout import (
    sst_key,
    wal_prefix,
)
from tests.damaged_table import Damaged, flip, found_in


def sidecar_out_of_order(d: Damaged) -> tuple[str, str]:
    file = d.sst_file("_pk_index/page_data.lance")
    _rewrite(file, lambda table: table.set_column(1, table.schema.field(1), table["ids"][::-1]))
    return "sidecar", str(file.relative_to(d.uri))


def lookup_wrong(d: Damaged) -> tuple[str, str]:
    file = d.sst_file("_pk_index/page_lookup.lance")
    _rewrite(file, lambda table: table.set_column(0, table.schema.field(0), pa.array([12345])))
    return "sidecar", str(file.relative_to(d.uri))


def _rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = change(LanceFileReader(str(file)).read_all().to_table())
    with LanceFileWriter(str(file), table.schema, version="2.0") as writer:
        writer.write_batch(table)


def _zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def bloom_denies(d: Damaged) -> tuple[str, str]:
    file = d.sst_file("bloom_filter.bin")
    _zeroed(file)
    return "bloom", str(file.relative_to(d.uri))


def key_twice_in_an_sst(d: Damaged) -> tuple[str, str]:
    d.rewrite_sst(lambda table: pa.concat_tables([table, table.slice(0, 1)]))
    return "double key", f"{sst_key(d.region, d.sst.path)}/"


def _stranger(d: Damaged) -> Callable[[pa.Table], pa.Table]:
    """Return a function that replaces the first key by one that belongs to the other region."""
    stranger = next(n for n in range(1000, 2000) if d.base.route(pa.table({"id": [n]}))[0] == 1)

    def moved(table: pa.Table) -> pa.Table:
        ids = pa.array([stranger, *table["id"].to_pylist()[1:]], pa.int64())
        return table.set_column(0, table.schema.field(0), ids)

    return moved


def row_in_the_wrong_region(d: Damaged) -> tuple[str, str]:
    d.rewrite_sst(_stranger(d))
    return "route", f"{sst_key(d.region, d.sst.path)}/"


def row_in_the_wrong_log(d: Damaged) -> tuple[str, str]:
    d.reentry(d.positions[-1], _stranger(d))
    return "route", wal_prefix(d.region)


def key_twice_in_the_base(d: Damaged) -> tuple[str, str]:
    again = d.base.dataset.to_table().slice(0, 1)
    lance.write_dataset(again, d.uri, mode="append")
    return "double key", "data/ (base table)"


def base_that_cannot_be_read(d: Damaged) -> tuple[str, str]:
    _zeroed(d.base_file("data/*.lance"))
    return "base rows", "data/ (base table)"


def sst_that_cannot_be_read(d: Damaged) -> tuple[str, str]:
    _zeroed(d.sst_file("data/*.lance"))
    return "data", sst_key(d.region, d.sst.path, "data")


def another_value_in_an_sst(d: Damaged) -> tuple[str, str]:
    """Flip one bit of a value; Lance has no checksum of values."""
    file = d.sst_file("data/*.lance")
    flip(file, file.read_bytes().index(b"name of"))
    return "fingerprint", sst_key(d.region, d.sst.path)


def another_value_in_the_log(d: Damaged) -> tuple[str, str]:
    def renamed(table: pa.Table) -> pa.Table:
        return table.set_column(1, table.schema.field(1), pa.array(["?"] * table.num_rows))

    before = d.sst.generation
    covered = next(p for p in d.positions if d.base.codec.header(d.entry(p).read_bytes()).generation == before)
    d.reentry(covered, renamed)
    return "fingerprint", sst_key(d.region, d.sst.path)


DEEP = [
    sidecar_out_of_order,
    lookup_wrong,
    bloom_denies,
    key_twice_in_an_sst,
    row_in_the_wrong_region,
    row_in_the_wrong_log,
    key_twice_in_the_base,
    base_that_cannot_be_read,
    sst_that_cannot_be_read,
    another_value_in_an_sst,
    another_value_in_the_log,
]


@pytest.mark.parametrize("damage", DEEP, ids=lambda damage: damage.__name__)
def test_damage_that_only_rows_show_is_found_by_deep(
    damaged: Damaged, damage: Callable[[Damaged], tuple[str, str]]
) -> None:
    expected = damage(damaged)
    assert found_in(damaged, deep=False) == []
    assert found_in(damaged, deep=True) == [expected]


def test_a_null_key_is_found() -> None:
    keys = pa.table({"a": [1, None, 2], "b": ["x", "x", None]})
    assert [each.what for each in check_keys("here", keys, "mend")] == ["2 values of its key columns are null"]
