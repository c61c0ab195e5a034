"""One SST: a write is verified, and damage is detected."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal.flush import SstFormat, SstInvalid, contains, read_sst, verify, write_sst
from memwal.flush.sst.files import sst_batches
from memwal.memtable import MemTable, Snapshot, row_schema, tombstones, with_tombstone
from memwal.wal import (
    Corrupt,
    LocalStore,
    SsTable,
    StoreRefused,
    StoreUnavailable,
    SystemClock,
    WalError,
    bucket_region,
)
from tests.messages import raises
from tests.support.clock import SeededIds

REGION = bucket_region(0)
BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string(), metadata={"a": "b"})])
ROWS = row_schema(BASE, ["id"])


def snapshot() -> Snapshot:
    """Return a snapshot with the keys 0 to 9: 3 is put twice, 5 is deleted, and 12 is deleted without a put."""
    table = MemTable(ROWS, ["id"], [], generation=4)
    table.apply(with_tombstone(pa.table({"id": range(10), "name": [f"first {i}" for i in range(10)]}), ROWS))
    table.apply(with_tombstone(pa.table({"id": [3], "name": ["second"]}), ROWS))
    table.apply(tombstones(pa.table({"id": [5, 12]}), ROWS))
    table.freeze()
    return table.snapshot()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "table"))


def written(store: LocalStore, rows: Snapshot, field_ids: tuple[int, ...] | None = None, **given: Any) -> SsTable:
    more = {"generation": 4, "ids": SeededIds(1)} | given
    return write_sst(store, REGION, rows, SstFormat(["id"], "2.2", field_ids=field_ids), **more)


@pytest.fixture
def sst(store: LocalStore) -> SsTable:
    return written(store, snapshot())


def directory(store: LocalStore, sst: SsTable) -> Path:
    return Path(store.url(f"_mem_wal/{REGION}/{sst.path}"))


def test_holds_the_newest_row_of_each_key_in_order_of_arrival(store: LocalStore, sst: SsTable) -> None:
    found = read_sst(store, REGION, sst)
    assert found.schema.equals(ROWS, check_metadata=True)
    assert found.column("id").to_pylist() == [0, 1, 2, 4, 6, 7, 8, 9, 3, 5, 12]
    assert found.column("name").to_pylist()[-3:] == ["second", None, None]
    assert found.column("_tombstone").to_pylist() == [False] * 9 + [True] * 2


def test_is_one_fragment_of_the_wanted_version_and_is_counted(store: LocalStore, sst: SsTable) -> None:
    dataset = lance.dataset(str(directory(store, sst)))
    assert (len(dataset.get_fragments()), dataset.data_storage_version) == (1, "2.2")
    assert (sst.generation, sst.physical_rows) == (4, 11)
    assert sst.path.endswith("_gen_4")
    assert (sst.in_memory_bytes or 0) > (sst.primary_key_bytes or 0) > 0


def test_bloom_filter_holds_the_keys_tombstones_too(store: LocalStore, sst: SsTable) -> None:
    data = (directory(store, sst) / "bloom_filter.bin").read_bytes()
    assert contains(data, pa.table({"id": [0, 3, 5, 12]})).all()
    assert not contains(data, pa.table({"id": [100, 200]})).any()


def test_reads_the_columns_asked_for(store: LocalStore, sst: SsTable) -> None:
    assert read_sst(store, REGION, sst, ["name"]).column_names == ["name"]


@pytest.mark.parametrize(
    "part",
    ["bloom_filter.bin", "_pk_index/page_data.lance", "_pk_index/page_lookup.lance", "_versions", "data"],
)
def test_verify_notices_a_missing_part(store: LocalStore, sst: SsTable, part: str) -> None:
    verify(store, REGION, sst)
    at = directory(store, sst) / part
    shutil.rmtree(at) if at.is_dir() else at.unlink()
    with raises(SstInvalid):
        verify(store, REGION, sst)


def test_verify_notices_a_wrong_count(store: LocalStore, sst: SsTable) -> None:
    with raises(SstInvalid):
        verify(store, REGION, replace(sst, physical_rows=10))


@pytest.mark.parametrize("part", [".", "data"])
def test_a_missing_sst_is_corruption(store: LocalStore, sst: SsTable, part: str) -> None:
    shutil.rmtree(directory(store, sst) / part)
    with raises(Corrupt):
        read_sst(store, REGION, sst)


def failing_reads(monkeypatch: pytest.MonkeyPatch, failures: int, error: Exception) -> None:
    """Make the first `failures` attempts to open a dataset raise `error`."""
    real, left = lance.dataset, iter(range(failures))

    def dataset(*args: Any, **more: Any) -> Any:
        if next(left, None) is not None:
            raise error
        return real(*args, **more)

    monkeypatch.setattr(lance, "dataset", dataset)
    monkeypatch.setattr(SystemClock, "sleep", lambda *_: None)


def streamed(store: LocalStore, sst: SsTable) -> list[int]:
    """Return the ids of the rows of an SST, read as a stream. The stream omits tombstones."""
    return [id for batch in sst_batches(store, REGION, sst, BASE, ROWS) for id in batch["id"].to_pylist()]


def read(store: LocalStore, sst: SsTable) -> list[int]:
    """Return the ids of the rows of an SST, read as a table."""
    return read_sst(store, REGION, sst)["id"].to_pylist()


@pytest.mark.parametrize("error", [ValueError("403 Forbidden"), OSError("error decoding response body")])
def test_an_answer_that_passes_is_no_corruption(
    store: LocalStore, sst: SsTable, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for way in (read, streamed):
        whole = way(store, sst)
        for failures in (1, 2, 3):
            with monkeypatch.context() as patch:
                failing_reads(patch, failures, error)
                assert way(store, sst) == whole


def test_a_stream_that_breaks_off_goes_on_where_it_was(
    store: LocalStore, sst: SsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = streamed(store, sst)
    real, offsets = lance.LanceDataset.scanner, list[int | None]()

    def breaks_off(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches)
        if len(offsets) < 6:
            raise OSError("error decoding response body")
        yield from batches

    def scanner(dataset: lance.LanceDataset, **options: Any) -> Any:
        offsets.append(options["offset"])
        found = real(dataset, **options | {"batch_size": 2})
        return SimpleNamespace(to_batches=lambda: breaks_off(found.to_batches()))

    monkeypatch.setattr(SystemClock, "sleep", lambda *_: None)
    monkeypatch.setattr(lance.LanceDataset, "scanner", scanner)
    assert streamed(store, sst) == whole
    assert offsets == [None, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("error", [StoreRefused("403"), StoreUnavailable("reset")])
def test_what_our_own_client_cannot_read_is_no_corruption(
    store: LocalStore, sst: SsTable, monkeypatch: pytest.MonkeyPatch, error: WalError
) -> None:
    failing_reads(monkeypatch, 100, ValueError("403 Forbidden"))

    def get(*_: Any) -> bytes:
        raise error

    monkeypatch.setattr(LocalStore, "get", get)
    for way in (read, streamed):
        with pytest.raises(type(error)):
            way(store, sst)


def test_an_sst_short_of_rows_is_corruption(store: LocalStore, sst: SsTable) -> None:
    with raises(Corrupt):
        read_sst(store, REGION, replace(sst, physical_rows=12))


def test_two_writes_of_one_memtable_never_meet(store: LocalStore) -> None:
    ids = SeededIds(2)
    first, second = (written(store, snapshot(), ids=ids) for _ in range(2))
    assert first.path != second.path


def test_fields_get_the_ids_of_the_base_table(store: LocalStore) -> None:
    """Lance numbers fields from 0 whatever ids it gets; a base table with dropped columns has other ids."""
    base = pa.schema(
        [BASE.field("id"), pa.field("both", pa.struct([("x", pa.int8()), ("y", pa.string())])), BASE.field("name")]
    )
    rows = row_schema(base, ["id"])
    table = MemTable(rows, ["id"], [], generation=1)
    values = [{"id": 1, "both": {"x": 1, "y": "a"}, "name": "b"}, {"id": 2, "both": None, "name": None}]
    table.apply(with_tombstone(pa.Table.from_pylist(values, schema=base), rows))
    ids = (2, 7, 8, 9, 4, 10)
    sst = written(store, table.snapshot(), ids, generation=1)
    dataset = lance.dataset(str(directory(store, sst)))
    fields = dataset.lance_schema.fields()
    assert [(f.name(), f.id(), [child.id() for child in f.children()]) for f in fields] == [
        ("id", 2, []),
        ("both", 7, [8, 9]),
        ("name", 4, []),
        ("_tombstone", 10, []),
    ]
    (fragment,) = dataset.get_fragments()
    assert set(fragment.metadata.files[0].fields) <= set(ids)
    assert read_sst(store, REGION, sst).drop_columns("_tombstone").to_pylist() == values
