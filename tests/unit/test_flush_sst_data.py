"""Rows from a memtable to Lance: passed without a copy where possible, and never all copied at the same time."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
import memwal.flush.sst.data
from memwal.flush import FileOptions, SstFormat, read_sst, write_sst
from memwal.flush.commits.index_catchup import catch_up
from memwal.ingest.engine.table.embedded import Table
from memwal.memtable import IndexSpec, MemTable, row_schema, tombstones, with_tombstone
from memwal.wal import LocalStore, SsTable, bucket_region
from tests.messages import raises
from tests.support.clock import SeededIds
from tests.support.golden import golden

REGION, WIDTH = bucket_region(0), 64
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("vector", pa.list_(pa.float32(), WIDTH))])
ROWS = row_schema(SCHEMA, ["id"])


def rows(ids: list[int], version: int = 0) -> pa.Table:
    vectors = np.random.default_rng(version).random((len(ids), WIDTH), dtype=np.float32)
    return with_tombstone(pa.table({"id": ids, "vector": list(vectors)}, schema=SCHEMA), ROWS)


def written(at: Path, table: MemTable, **more: Any) -> tuple[LocalStore, SsTable]:
    store = LocalStore(str(at))
    table.freeze()
    format = SstFormat(["id"], "2.2", **more)
    return store, write_sst(store, REGION, table.snapshot(), format, generation=1, ids=SeededIds(1))


def test_batches_without_superseded_rows_are_not_copied() -> None:
    table = MemTable(ROWS, ["id"], [], 1)
    for start in (0, 5_000, 10_000):
        table.apply(rows(list(range(start, start + 5_000))))
    table.apply(rows(list(range(5_000)), version=1))
    snapshot = table.snapshot()
    kept = list(snapshot.batches(snapshot.newest()))
    lying = list(snapshot.batches(np.ones(snapshot.n, dtype=bool)))
    assert [batch.num_rows for batch in kept] == [5_000] * 3
    assert all(a is b for a, b in zip(kept, lying[1:], strict=True))


def test_rows_of_all_kinds_of_batches_come_out_newest_and_in_order(tmp_path: Path) -> None:
    """The memtable has batches large enough for several slices, partly superseded batches, a wholly superseded batch
    and tombstones."""
    table = MemTable(ROWS, ["id"], [], 1)
    table.apply(rows(list(range(40_000))))
    table.apply(rows(list(range(40_000, 45_000)), version=1))
    table.apply(rows(list(range(40_000, 45_000)), version=2))
    table.apply(rows(list(range(0, 40_000, 3)), version=3))
    table.apply(tombstones(pa.table({"id": [1, 2, 99_999]}), ROWS))
    snapshot = table.snapshot()
    expected = snapshot.take(np.flatnonzero(snapshot.newest()), ROWS.names)
    assert rows(list(range(40_000))).nbytes > 2 * memwal.flush.sst.data.SLICE_BYTES
    store, sst = written(tmp_path, table)
    found = read_sst(store, REGION, sst)
    assert found.combine_chunks().equals(expected.replace_schema_metadata(None).combine_chunks())
    assert (sst.physical_rows, sst.primary_key_bytes) == (expected.num_rows, expected.select(["id"]).nbytes)
    assert sst.in_memory_bytes == pytest.approx(expected.nbytes, rel=0.05)


def test_a_flush_of_upserts_needs_no_second_copy_of_its_rows() -> None:
    """Half of each batch is superseded, so all of them are copied, but one at a time."""
    table = MemTable(ROWS, ["id"], [], 1)
    for start in range(0, 100_000, 5_000):
        table.apply(rows(list(range(start, start + 5_000))))
    table.apply(rows(list(range(0, 100_000, 2)), version=1))
    snapshot = table.snapshot()
    mask, before, most = snapshot.newest(), pa.total_allocated_bytes(), 0
    for batch in snapshot.batches(mask):
        most = max(most, pa.total_allocated_bytes() - before)
        del batch
    assert 0 < most < 2 * 5_000 * WIDTH * 4


def test_a_file_is_synced_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("memwal.flush.sst.data.SYNC_EVERY", 0.001)
    monkeypatch.setattr("memwal.flush.sst.data.sync_files", lambda path: seen.append(len(list(Path(path).glob("*")))))
    table = MemTable(ROWS, ["id"], [], 1)
    for start in range(0, 40_000, 5_000):
        table.apply(rows(list(range(start, start + 5_000))))
    written(tmp_path, table)
    assert max(seen, default=0) == 1


def test_a_sync_that_fails_fails_the_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system reports a failed sync once; a second sync of the file would succeed although bytes are lost,
    so the flush must not retry."""

    def failing(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr("memwal.flush.sst.data.SYNC_EVERY", 0.0)
    monkeypatch.setattr("memwal.flush.sst.data.sync_files", failing)
    table = MemTable(ROWS, ["id"], [], 1)
    table.apply(rows(list(range(5_000))))
    with raises(OSError):
        written(tmp_path, table)
    assert not list(tmp_path.rglob("*.lance"))


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_more_memtables_are_flushed_at_once_than_is_set(
    open_small: Callable[..., Any], made: Any, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    real, inside, most, lock = memwal.flush.flush, 0, 0, threading.Lock()
    together = threading.Event()

    def watched(*args: Any, **named: Any) -> Any:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            if inside == 2:
                together.set()
        together.wait(10 if at_once > 1 else 0.05)
        try:
            return real(*args, **named)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr("memwal.ingest.engine.region.core.flush_package.flush", watched)
    table: Table = open_small(regions=4, flush={"at_once": at_once})
    table.put(made.rows(range(64)))
    table.flush()
    assert most == at_once
    assert table.count(level="flushed") == 64


# ---- the layout, kept ----------------------------------------------------------------------------------------------


def layout(directory: Path) -> str:
    """Return the layout of an SST as text: its files, storage version, fields and indexes."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    lines = sorted({_without_chance(name) for name in names if not name.startswith("_transactions/")})
    dataset = lance.dataset(str(directory))
    (fragment,) = dataset.get_fragments()
    (file,) = fragment.metadata.files
    lines += ["", f"version {dataset.version}, storage {dataset.data_storage_version}"]
    lines.append(f"1 fragment, {fragment.metadata.physical_rows} rows, fields {list(file.fields)}")
    for field in dataset.schema:
        null = "" if field.nullable else " not null"
        lines.append(f"field {field.name}: {field.type}{null} {sorted((field.metadata or {}).items())}")
    for index in sorted(dataset.describe_indices(), key=lambda each: each.name):
        lines.append(f"index {index.name}: {index.index_type} of fields {list(index.fields)}")
    return "\n".join(lines) + "\n"


def _without_chance(name: str) -> str:
    name = re.sub(r"_indices/[0-9a-f-]{36}/", "_indices/{uuid}/", name)
    name = re.sub(r"part_\d+_", "part_{n}_", name)
    return re.sub(r"data/[0-9a-f]+\.lance", "data/{file}.lance", name)


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_the_layout_of_an_sst_is_as_kept(tmp_path: Path, version: str) -> None:
    schema = pa.schema([*SCHEMA, pa.field("body", pa.string()), pa.field("n", pa.int64())])
    specs = (IndexSpec("vector", "ivf_pq", {"num_partitions": 2}), IndexSpec("body", "fts"), IndexSpec("n", "btree"))
    base = memwal.flush.BaseTable.create(str(tmp_path), schema, ["id"], 1, specs)
    ids = list(range(300))
    values = rows(ids).drop_columns("_tombstone").append_column("body", pa.array([f"text {i}" for i in ids]))
    dataset = lance.dataset(base.uri)
    dataset.insert(values.append_column("n", pa.array(ids)).cast(base.schema))
    catch_up(dataset, specs)
    models = base.latest().vector_models()
    table = MemTable(row_schema(base.schema, ["id"]), ["id"], [], 1)
    table.apply(with_tombstone(values.append_column("n", pa.array(ids)), table.schema))
    files, indexes = FileOptions(version), memwal.flush.SstIndexes(specs, lambda: models)
    store, sst = written(tmp_path, table, files=files, indexes=indexes, field_ids=(0, 4, 7, 9, 12))
    found = layout(Path(store.url(f"_mem_wal/{REGION}/{sst.path}")))
    assert found == golden(f"flush/sst_{version}.txt", found).decode()
