"""`memwal gc`, and the collection that an open table does by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import lance
import pytest
from lance.fragment import LanceFragment

import memwal
from memwal import flush, wal
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.table.garbage import Ages, RegionGarbage, TableCollector, TableGarbage
from memwal.ingest.engine.table.stored import StoredTable
from memwal.wal.layout import parse_sst_dir, region_prefix
from tests.clean import assert_clean
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.garbage import collect
from tests.support.interpose import Once

REGION = wal.bucket_region(0)
ROUNDS = 7
BY_HAND = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def entries(uri: str) -> int:
    return len([key for key in wal.open_store(uri).list("_mem_wal/") if wal.layout.parse_entry_key(key)])


def ssts(uri: str, options: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the SST directories of the first region."""
    return [name for name in wal.open_store(uri, options).children(region_prefix(REGION)) if parse_sst_dir(name)]


def config(tmp_path: Path, uri: str, **gc: str) -> Path:
    path = tmp_path / "gc.toml"
    lines = [f'[table]\nuri = "{uri}"\n[gc]', *(f'{name} = "{value}"' for name, value in gc.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def filled(uri: str, made: Any) -> None:
    """Fill a table with ten entries in two SSTs, the first of them committed, and two entries that are not flushed."""
    with memwal.open(uri, schema=made.schema, key="id", regions=1, settings=BY_HAND) as table:
        for number in range(5):
            table.put(made.rows([number]))
        table.flush()
        table.commit()
        for number in range(5, 10):
            table.put(made.rows([number]))
        table.flush()
        for number in range(10, 12):
            table.put(made.rows([number]))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_first_and_deletes_then(
    uri: str, made: Any, tmp_path: Path, cli: Callable[..., Any], tree: Callable[[Path], dict[str, int]]
) -> None:
    filled(uri, made)
    orphan = Path(uri, "data", "0" * 40 + ".lance")
    orphan.write_bytes(b"0123456789")
    a_week_ago = time.time() - 8 * 86_400
    os.utime(orphan, (a_week_ago, a_week_ago))
    path = config(tmp_path, uri, wal_age_min="0s", sst_age_min="0s")
    before = tree(Path(uri))
    dry = cli("gc", str(path), "--dry-run")
    assert dry.code == 0
    assert "would delete 5 WAL entries, 1 SST, 0 abandoned SSTs, 1 orphan file: " in dry.out
    assert orphan.name in dry.out
    assert tree(Path(uri)) == before
    done = json.loads(cli("gc", str(path), "--json").out)
    assert sum(before.values()) - sum(tree(Path(uri)).values()) == done["bytes"] > 0
    assert done["orphans"] == {"files": [f"data/{orphan.name}"], "bytes": 10, "too_young": 0}
    (region,) = done["regions"]
    assert (region["wal"]["entries"], region["wal"]["boundary"]) == (5, 5)  # the other five are only in an SST
    assert (region["ssts"]["committed"], region["ssts"]["listed"]) == (1, 1)
    again = cli("gc", str(path))
    assert "deleted 0 WAL entries, 0 SSTs, 0 abandoned SSTs, 0 orphan files: 0 bytes" in again.out
    with memwal.open(uri, settings=BY_HAND) as table:
        assert table.count() == 12


def test_young_garbage_stays_by_default(uri: str, made: Any, tmp_path: Path, cli: Callable[..., Any]) -> None:
    filled(uri, made)
    cli("gc", str(config(tmp_path, uri)))
    assert (entries(uri), len(ssts(uri))) == (12, 2)


def test_an_open_table_collects_regions_that_fell_away_in_a_shrink(uri: str, made: Any) -> None:
    with memwal.open(uri, schema=made.schema, key="id", regions=4, settings=BY_HAND) as table:
        for number in range(5):
            table.put(made.rows(range(number, number + 20)))
        table.flush()
        table.commit()
    base, store, clock = flush.BaseTable.open(uri), wal.open_store(uri), wal.SystemClock()
    flush.resize(uri, {}, store, 2, clock=clock, ids=wal.SystemIds())
    gone = [str(region) for region in base.regions[2:]]
    before = [key for key in store.list("_mem_wal/") if any(region in key for region in gone)]
    assert any(parse_sst_dir(key.split("/")[2]) for key in before)
    with memwal.open(uri, settings=BY_HAND) as table:
        table.upkeep.collect(Ages(wal=0.0, sst=0.0, orphan=604_800.0))
        assert table.count() == 24
    left = [key for key in store.list("_mem_wal/") if any(region in key for region in gone)]
    assert not any(parse_sst_dir(key.split("/")[2]) for key in left)
    assert len([key for key in left if wal.layout.parse_entry_key(key)]) <= len(gone)  # the sentinel of each
    assert_clean(store, uri)


def test_no_table_is_one_line(uri: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    done = cli("gc", str(config(tmp_path, uri)))
    assert done.code == 2
    assert len(done.error_lines) == 1
    assert "the table does not exist" in done.err


def test_an_orphan_age_that_could_hit_a_commit_under_way_is_refused(uri: str, made: Any) -> None:
    with raises(memwal.Invalid):
        memwal.open(uri, schema=made.schema, key="id", settings={"gc": {"orphan_age_min": "23h"}})


def test_the_last_line_has_the_sum_of_everything() -> None:
    region = RegionGarbage(
        REGION,
        wal.WalGarbage(REGION, 9, entries=1_234, bytes=1_000),
        flush.SstGarbage(REGION, committed=1, abandoned=2, bytes=10_000, abandoned_bytes=4_000),
        flush.PlanGarbage(REGION, plans=3, bytes=50),
        wal.ManifestGarbage(REGION, versions=4, bytes=20),
    )
    found = TableGarbage((region, region), flush.OrphanGarbage(("data/x",), 500), dry_run=True)
    assert (
        found.summary()
        == "would delete 2,468 WAL entries, 2 SSTs, 4 abandoned SSTs, 1 orphan file, 6 commit plans, 8 old manifests: 22.6 kB"  # noqa: E501
    )


# ---- an open table ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, uri: str) -> tuple[str, dict[str, str]]:
    """Return a table's URI and its storage options."""
    return (uri, {}) if request.param == "local" else tuple(request.getfixturevalue("s3_table"))


def test_an_open_table_keeps_few_directories_and_reads_right_at_every_level(
    place: tuple[str, dict[str, str]], made: Any, wait_until: Callable[..., Any]
) -> None:
    """Rounds of put, flush and commit, with frequent collections and continuous readers."""
    uri, options = place
    settings = {"commit": {"interval": "0s"}, "gc": {"interval": "20ms", "wal_age_min": "0s", "sst_age_min": "0s"}}
    wrong: list[str] = []
    done = threading.Event()

    def look() -> None:
        beside = StoredTable(table.base, wal.open_store(uri, options))
        seen: dict[str, int] = {}
        while not done.is_set():
            for level, reader in (("committed", table), ("flushed", beside), ("durable", beside), ("latest", table)):
                found = reader.scan(["id", "name"], level=level).read_all()
                rows = found.num_rows
                if rows < seen.get(level, 0) or found["id"].unique() != found["id"].combine_chunks():
                    wrong.append(f"{level}: {rows} rows after {seen.get(level)}")
                seen[level] = rows

    with memwal.open(uri, schema=made.schema, key="id", regions=1, storage_options=options, settings=settings) as table:
        looking = threading.Thread(target=look)
        looking.start()
        try:
            for number in range(ROUNDS):
                table.put(made.rows([number, number + 1], version=number))
                table.flush()
                table.commit()
                wait_until(lambda: len(ssts(uri, options)) <= 1)
        finally:
            done.set()
            looking.join()
        assert wrong == []
        table.put(made.rows([0], version=99))
        expected = {number: f"row {number} v{min(number, ROUNDS - 1)}" for number in range(1, ROUNDS + 1)}
        expected[0] = "row 0 v99"
        for level in ("latest", "durable"):
            found = table.scan(["id", "name"], level=level).read_all()
            assert dict(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True)) == expected
    with memwal.open(uri, storage_options=options, settings=BY_HAND) as again:
        assert again.count() == ROUNDS + 1


# ---- readers ---------------------------------------------------------------------------------------------------------


def test_a_reader_that_holds_an_older_view_still_reads_within_the_grace_time(uri: str, made: Any) -> None:
    """The reader took the manifest and the base while the rows were only flushed; then they are committed, pruned and
    collected. The SST and the base version are older than the grace time: it counts from the moment when the version
    was superseded.
    """
    with memwal.open(uri, schema=made.schema, key="id", regions=1, settings=BY_HAND) as table:
        table.put(made.rows([1, 2]))
        table.flush()
        manifest = wal.ManifestStore(wal.open_store(uri), REGION).latest()
        assert manifest is not None
        a_day_ago = time.time() - 86_400
        for file in Path(uri).rglob("*"):
            os.utime(file, (a_day_ago, a_day_ago))
        table.commit()
        assert collect(uri, wal=600.0, manifest=86_400.0, sst=600.0).regions[0].ssts.needed == 1
        (sst,) = manifest.ssts
        assert flush.read_sst(wal.open_store(uri), REGION, sst).num_rows == 2
        assert collect(uri, wal=600.0, manifest=86_400.0, sst=0.0).committed == 1
        assert ssts(uri) == []


def test_a_reader_that_is_slower_than_the_grace_time_begins_again(
    uri: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader opens the base, then sleeps while the SST is committed and deleted, then reads the SST."""
    with memwal.open(uri, schema=made.schema, key="id", regions=1, settings=BY_HAND) as table:
        table.put(made.rows([1, 2]))
        table.flush()
        store = wal.open_store(uri)
        loads = []

        def sleepy(*arguments: Any) -> Any:
            loads.append(arguments)
            if len(loads) == 1:
                table.commit()
                assert collect(uri, wal=600.0, manifest=86_400.0, sst=0.0).committed == 1
            return load(*arguments)

        load = memwal.ingest.engine.read.reader.load_sst
        monkeypatch.setattr("memwal.ingest.engine.read.reader.load_sst", sleepy)
        stored = StoredTable(flush.BaseTable.open(uri), store)
        assert stored.scan(["id"], level="flushed").read_all()["id"].to_pylist() == [1, 2]
        assert len(loads) == 1


def test_an_sst_that_is_committed_while_a_read_begins_counts_once(uri: str, made: Any, once: Once) -> None:
    """If the list of SSTs were older than the base table, rows of both would count twice, or deletes be undone."""

    def commit() -> None:
        table.commit()
        table.upkeep.collect()

    with memwal.open(uri, schema=made.schema, key="id", regions=2, settings=BY_HAND) as table:
        stored = memwal.open(uri, read_only=True)
        for reader, level, counts in product((stored, table), ("flushed", "durable", "latest"), (True, False)):
            table.put(made.rows(range(21)))
            table.flush()
            table.delete([20])
            table.flush()
            once(Reader, "base", commit)
            found = reader.count(level=level) if counts else reader.scan(["id"], level=level).read_all().num_rows
            assert found == 20, (type(reader), level)


# ---- what a killed process leaves ------------------------------------------------------------------------------------

_KILLED_BEFORE_IT_PUBLISHES = """
import os, signal, sys
import memwal
from memwal.flush.sst import flusher
write = flusher.write_sst
flusher.write_sst = lambda *args, **rest: (write(*args, **rest), os.kill(os.getpid(), signal.SIGKILL))
table = memwal.open(sys.argv[1], settings={"commit": {"interval": "0s"}, "gc": {"interval": "0s"}})
table.flush()
"""


def test_an_owner_collects_what_its_killed_predecessor_left_though_it_never_flushes(
    uri: str, made: Any, wait_until: Callable[..., Any]
) -> None:
    """Otherwise a flush that always kills its process would fill the disk."""
    with memwal.open(uri, schema=made.schema, key="id", regions=1, settings=BY_HAND) as table:
        table.put(made.rows([1, 2]))
    command = [sys.executable, "-c", _KILLED_BEFORE_IT_PUBLISHES, uri]
    done = subprocess.run(command, timeout=300, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert_clean(wal.open_store(uri), uri)
    assert len(ssts(uri)) == 1
    settings = {"commit": {"interval": "0s"}, "gc": {"interval": "50ms", "sst_age_min": "0s"}}
    with memwal.open(uri, settings=settings) as table:
        wait_until(lambda: ssts(uri) == [])
        assert table.count() == 2
        table.flush()
        assert len(ssts(uri)) == 1
        assert_clean(wal.open_store(uri), uri)
        table.commit()
        wait_until(lambda: ssts(uri) == [])
        assert_clean(wal.open_store(uri), uri)
        assert table.count() == 2


# ---- orphans on an object store --------------------------------------------------------------------------------------


def test_orphan_files_on_s3(s3_table: tuple[str, dict[str, str]], made: Any) -> None:
    uri, options = s3_table
    with memwal.open(uri, schema=made.schema, key="id", regions=1, storage_options=options, settings=BY_HAND) as table:
        table.put(made.rows([1, 2]))
        table.flush()
        table.commit()
    store = wal.open_store(uri, options)
    before = set(store.list(""))
    dataset = lance.dataset(uri, storage_options=store.storage_options)
    rows = dataset.to_table().cast(dataset.schema)
    LanceFragment.create(uri, rows, mode="append", storage_options=store.storage_options)
    (orphan,) = set(store.list("")) - before
    assert flush.collect_orphans(store, dataset, wal.SystemClock(), 86_400.0).files == ()
    later = FakeClock(start=time.time() + 86_400.0)
    assert flush.collect_orphans(store, dataset, later, 86_400.0).files == (orphan,)
    assert set(store.list("")) == before


# ---- space -----------------------------------------------------------------------------------------------------------


def test_the_bytes_on_storage_are_told_by_kind(uri: str, tmp_path: Path, made: Any, cli: Any) -> None:
    """Each file of the table counts once, under its purpose."""
    with memwal.open(uri, schema=made.schema, key="id", regions=1, settings=BY_HAND) as table:
        assert table.status()["storage"] is None
        for version in range(3):
            table.put(made.rows(range(100), version))
            table.flush()
            table.commit()
        table.put(made.rows(range(50)))
        table.flush()
        stray = Path(uri, "data", f"{'a' * 32}.lance")
        stray.write_bytes(b"x" * 5_000)
        table.upkeep.collect()
        told = table.status()["storage"]
    sizes = told["bytes"]
    files = {file: file.stat().st_size for file in Path(uri).rglob("*") if file.is_file()}
    newest = flush.BaseTable.open(uri)
    data = {each.path for fragment in newest.dataset.get_fragments() for each in fragment.data_files()}
    assert sizes["newest"] > sum(size for file, size in files.items() if file.name in data)
    assert sizes["older"] > 0
    in_region = [
        (file.relative_to(Path(uri, region_prefix(REGION))), size)
        for file, size in files.items()
        if file.is_relative_to(Path(uri, region_prefix(REGION)))
    ]
    assert sizes["ssts"] == sum(size for name, size in in_region if parse_sst_dir(name.parts[0]))
    assert sizes["log"] >= sum(size for name, size in in_region if name.parts[0] == "wal")
    assert sizes["orphans"] == 5_000
    assert told["factor"] == pytest.approx(sum(sizes.values()) / sizes["newest"])
    shown = cli("status", config(tmp_path, uri)).out
    assert "on storage" not in shown, "nobody has measured it"
    collected = cli("gc", config(tmp_path, uri), "--dry-run").out
    assert " times the newest version (newest version " in collected
    assert "orphans 5.0 kB" in collected


def test_an_open_table_measures_once_an_hour_where_it_leads(
    uri: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    real = flush.measured
    monkeypatch.setattr(flush, "measured", lambda *given: measured.append(given) or real(*given))
    filled(uri, made)
    base, store, clock = flush.BaseTable.open(uri), wal.open_store(uri), FakeClock(time.time())
    collector = TableCollector(store, base.codec, clock, wal.regions(store))
    ages = Ages(wal=600.0, sst=600.0, orphan=604_800.0)
    for expected, leads, passed in ((1, True, 0), (1, True, 3_599), (1, False, 2), (2, True, 0)):
        clock.advance(passed)
        found = collector.collect(base, ages, orphans=leads)
        assert len(measured) == expected
    assert found.space is not None
