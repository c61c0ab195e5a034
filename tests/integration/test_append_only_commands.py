"""Tables without a key as a user sees them: commands, adoption, the daemon, Spark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.api.tokens import Token
from memwal.wal import open_store
from tests.append_rows import QUIET, clean, configured, counted, opened, rows
from tests.conftest import Ran
from tests.messages import raises
from tests.ways import served


def test_collected_garbage_loses_no_row(uri: str, cli: Callable[..., Ran], tmp_path: Path) -> None:
    oracle: Counter[int | None] = Counter()
    with opened(uri, 3) as table:
        for n in range(4):
            put = [1, *range(n, n + 30)]
            table.put(rows(put))
            oracle.update(put)
            table.flush()
            table.commit()
        table.put(rows([1]))
        oracle.update([1])
    config = configured(tmp_path, uri, gc={"sst_age_min": "0s", "wal_age_min": "0s"})
    assert len(list(Path(uri).glob("_mem_wal/*/*_gen_*"))) == 12
    assert cli("gc", config).code == 0
    assert not list(Path(uri).glob("_mem_wal/*/*_gen_*"))
    with opened(uri) as table:
        assert counted(table) == oracle
    clean(uri)


# ---- existing tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.0", "2.2"])
def test_a_table_is_adopted_with_its_rows_and_its_files_format(
    uri: str, cli: Callable[..., Ran], tmp_path: Path, version: Any
) -> None:
    found = lance.write_dataset(rows([1, 1, 2]), uri, data_storage_version=version).data_storage_version
    config = configured(tmp_path, uri)
    ran = cli("init", config)
    assert (ran.code, "adopted" in ran.out, "none (append only)" in ran.out) == (0, True, True)
    with opened(uri) as table:
        table.put(rows([1]))
        table.flush()
        table.commit()
        assert counted(table) == counted(table, "committed") == {1: 3, 2: 1}
    files = [file for fragment in lance.dataset(uri).get_fragments() for file in fragment.metadata.files]
    assert len({(file.file_major_version, file.file_minor_version) for file in files}) == 1
    assert lance.dataset(uri).data_storage_version == found
    clean(uri)


@pytest.mark.parametrize("key", [(), "n"], ids=["no key", "a key"])
def test_rows_copied_into_a_new_table_bring_no_progress_along(uri: str, tmp_path: Path, key: Any) -> None:
    """Lance copies the schema's metadata with the rows, including the source's record of committed generations."""
    schema, copy = pa.schema([pa.field("n", pa.int64(), nullable=not key)]), str(tmp_path / "copy")
    with memwal.open(uri, schema=schema, key=key, regions=1, settings=QUIET) as table:
        for n in range(3):
            table.put(pa.table({"n": [n]}))
            table.flush()
            table.commit()
    lance.write_dataset(lance.dataset(uri).to_table(), copy)
    with memwal.open(copy, settings=QUIET) as table:
        table.put(pa.table({"n": [9]}))
        for step in (table.flush, table.commit, lambda: None):
            assert counted(table) == Counter([0, 1, 2, 9])
            step()
        assert counted(table, "committed") == Counter([0, 1, 2, 9])


@pytest.mark.parametrize("key", [(), "n"], ids=["no key", "a key"])
@pytest.mark.parametrize("clone", ["shallow_clone", "deep_clone"])
def test_a_clone_takes_rows_of_its_own(uri: str, tmp_path: Path, key: Any, clone: str) -> None:
    """The clone's metadata records committed generations without a log: its own generations begin above them."""
    schema, copy = pa.schema([pa.field("n", pa.int64(), nullable=not key)]), str(tmp_path / "copy")
    with memwal.open(uri, schema=schema, key=key, regions=1, settings=QUIET) as table:
        table.put(pa.table({"n": [1]}))
        table.flush()
        table.commit()
    dataset = lance.dataset(uri)
    getattr(dataset, clone)(copy, dataset.version)
    for value in (2, 3):
        with memwal.open(copy, settings=QUIET) as table:
            table.put(pa.table({"n": [value]}))
            table.flush()
            table.commit()
            expected = list(range(1, value + 1))
            assert sorted(table.scan(level="committed").read_all()["n"].to_pylist()) == expected
            assert sorted(lance.dataset(copy).to_table()["n"].to_pylist()) == expected
    clean(copy)
    assert lance.dataset(uri).to_table()["n"].to_pylist() == [1]


def test_stable_row_ids_stay(uri: str, cli: Callable[..., Ran], tmp_path: Path) -> None:
    lance.write_dataset(rows([1, 1, 2]), uri, enable_stable_row_ids=True)
    assert cli("init", configured(tmp_path, uri)).code == 0
    with opened(uri) as table:
        for n in (3, 3, 4):
            table.put(rows([n]))
            table.flush()
            table.commit()
        assert counted(table, "committed") == {1: 2, 2: 1, 3: 2, 4: 1}
    ids = lance.dataset(uri).scanner(with_row_id=True).to_table().column("_rowid").to_pylist()
    assert ids == list(range(6))


def test_a_table_with_a_primary_key_is_not_adopted_without_it(
    uri: str, cli: Callable[..., Ran], tmp_path: Path
) -> None:
    marked = pa.field("n", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    lance.write_dataset(pa.table({"n": [1]}, schema=pa.schema([marked])), uri)
    ran = cli("init", configured(tmp_path, uri, columns={"n": "int64"}))
    assert ran.code == 2
    assert "declares the primary key n" in ran.err


# ---- commands and the daemon ---------------------------------------------------------------------------------------


def test_the_commands(uri: str, cli: Callable[..., Ran], tmp_path: Path) -> None:
    config = configured(tmp_path, uri)
    assert "none (append only)" in cli("init", config).out
    with opened(uri) as table:
        table.put(rows([1, 1, *range(20)]))
        table.flush()
        table.commit()
        table.put(rows([1, *range(30)]))
        table.flush()
        table.put(rows([1]))
    ran = cli("query", config, "--filter", "n = 1", "--columns", "n", "--format", "json")
    assert (ran.code, [row["n"] for row in json.loads(ran.out)]) == (0, [1] * 6)
    for words, says in (
        (("query", config, "--key", "1"), "the table has no key"),
        (("query", config, "--near", "vector=key:1"), "the table has no key"),
        (("log", config, "--diff", "1", "2"), "compares rows by key"),
    ):
        ran = cli(*words)
        assert (ran.code, len(ran.error_lines), says in ran.err) == (2, 1, True)
    log = cli("log", config).out
    assert "insert 22 rows; commit generation 1 of regions 0–2" in log
    assert "Lance's progress marker updated" in log
    for path in (*Path(uri).glob("_mem_wal/*/*_gen_2"), *Path(uri).glob("_mem_wal/*/wal/*")):
        ran = cli("inspect", path)
        assert (ran.code, "bloom" in ran.out) == (0, False)
    for words in (
        ("verify", config, "--deep"),
        ("status", config),
        ("inspect", uri),
        ("gc", config, "--dry-run"),
        ("flush", config),
        ("commit", config),
    ):
        assert cli(*words).code == 0, words
    assert lance.dataset(uri).count_rows() == 54


def test_verify_finds_a_row_in_the_wrong_region_and_one_that_is_not_in_the_log(uri: str) -> None:
    with opened(uri, 2) as table:
        table.put(rows(range(30)))
        table.flush()
    one, other = sorted(Path(uri).glob("_mem_wal/*/*_gen_1"))
    files = [next(each.glob("data/*.lance")) for each in (one, other)]
    store = open_store(uri, None)
    contents = [file.read_bytes() for file in files]
    for file, data in zip(files, reversed(contents), strict=True):
        file.write_bytes(data)
    checks = {each.check for each in verify_table(store, uri, deep=True).findings}
    assert checks & {"data", "route", "fingerprint", "sst"}


def test_the_daemon(uri: str, ends: ExitStack) -> None:
    endpoint = served(ends.enter_context(opened(uri, 3)), ends)
    with memwal.connect(endpoint) as table, memwal.connect(endpoint) as other:
        assert table.key == ()
        for _ in range(2):
            table.put(rows([1, 1, 2]), token="a:1")
        other.put(rows([1]))
        assert counted(other) == {1: 3, 2: 1}
        for ask in (lambda: table.get([1]), lambda: table.delete([1])):
            with raises(memwal.Invalid):
                ask()
        base = BaseTable.open(uri)
        bucket = int(base.route(rows([1]))[0])
        for attempt in (True, False):
            stream = table.open_stream(base.regions[bucket], Token("spark", 1))
            stream.write(rows([1, 1]).combine_chunks().to_batches()[0])
            assert stream.finish().applied == attempt
        stream = table.open_stream(base.regions[bucket - 1], Token("spark", 2))
        stream.write(rows([1]).combine_chunks().to_batches()[0])
        with raises(memwal.Invalid):
            stream.finish()
        table.flush()
        table.commit()
        assert counted(table, "committed") == {1: 5, 2: 1}


# ---- Spark ---------------------------------------------------------------------------------------------------------


def test_memwal_run_once_and_again(uri: str, tmp_path: Path, cli: Callable[..., Ran]) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    for number in range(3):
        pq.write_table(rows([1, 1, *range(30)]), feed / f"{number}.parquet")
    config = configured(tmp_path, uri, source={"feed": str(feed), "path": str(tmp_path / "in")})
    for _ in range(2):
        done = cli("run", config, "--once")
        assert (done.code, done.error_lines) == (0, [])
        assert Counter(lance.dataset(uri).to_table().column("n").to_pylist()) == Counter([1, 1, *range(30)] * 3)
    clean(uri)
