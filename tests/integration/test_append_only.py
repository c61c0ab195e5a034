"""Tables without a key, from the outside: every row exactly once, equal ones too, at every level, after every step."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flush
import ingest
from flush import BaseTable
from flush.history import read_history
from flush.verification import verify_table
from ingest.cli import main
from ingest.settings import load
from ingest.spark_sink import MemWalSink
from ingest.stored_table import StoredTable
from ingest.tokens import Token
from tests import fault_proxy as faults
from tests.conftest import toml
from wal import SystemClock, open_store

WIDTH = 4
SCHEMA = pa.schema([("n", pa.int64()), ("body", pa.string()), ("vector", pa.list_(pa.float32(), WIDTH))])
INDEXES = {"n": "btree", "body": "fts", "vector": "ivf_pq"}
QUIET: dict[str, Any] = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
LEVELS = ("committed", "flushed", "durable", "latest")


def rows(numbers: Sequence[int | None]) -> pa.Table:
    """Equal numbers are equal rows; None is a row of nulls."""
    vectors = [None if n is None else [float(n % 1000)] * WIDTH for n in numbers]
    bodies = [None if n is None else f"word{n} harbor" for n in numbers]
    return pa.Table.from_pydict({"n": numbers, "body": bodies, "vector": vectors}, schema=SCHEMA)


def counted(table: Any, level: str = "latest") -> Counter[int | None]:
    """What a table holds, how often each."""
    found = Counter(table.scan(["n"], level=level).column("n").to_pylist())
    assert table.count(level=level) == found.total()
    return found


def opened(uri: str, buckets: int | None = None, /, **sections: Any) -> Any:
    """The table at `uri`; a new one of `buckets` regions."""
    new = {} if buckets is None else {"schema": SCHEMA, "key": (), "regions": buckets, "indexes": INDEXES}
    return ingest.open(uri, settings=QUIET | sections, **new)


def clean(uri: str) -> None:
    assert verify_table(open_store(uri, None), uri, deep=True).findings == ()


@pytest.mark.parametrize("regions", [1, 4])
def test_every_row_once_at_every_level_after_every_step(regions: int, uri: str) -> None:
    oracle: Counter[int | None] = Counter()
    put: list[int | None] = [1, 1, 1, None, None, *range(40)]
    with opened(uri, regions) as table:
        for step in (table.flush, table.commit, table.flush, lambda: None):
            for _ in range(2):
                assert table.put(rows(put)).rows == len(put)
                oracle.update(put)
            assert counted(table) == counted(table, "durable") == oracle
            step()
            assert counted(table) == counted(table, "durable") == oracle
            clean(uri)
        sizes = [table.count(level=level) for level in LEVELS]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) == 3  # all but durable and latest differ
        stored = StoredTable(BaseTable.open(uri), open_store(uri, None))
        assert counted(stored, "durable") == oracle
    with opened(uri) as table:
        assert counted(table) == oracle
        table.flush()
        table.commit()
        assert counted(table, "committed") == oracle
        assert Counter(lance.dataset(uri).to_table().column("n").to_pylist()) == oracle
    clean(uri)


@pytest.mark.parametrize("level", LEVELS)
def test_reads_by_filter_vector_and_text_see_equal_rows_of_every_level(level: str, uri: str) -> None:
    with opened(uri, 2) as table:
        for step in (table.commit, table.flush, lambda: None):
            table.put(rows([7, 7, *range(300, 600)]))
            if step is not table.flush:
                table.flush()
            step()
        table.put(rows([7]))
        expected = {"committed": 2, "flushed": 6, "durable": 7, "latest": 7}[level]
        assert table.count("n = 7", level=level) == expected
        assert table.scan(["n"], "n = 7", level=level).num_rows == expected
        assert table.scan(["n"], limit=5, level=level).num_rows == 5
        near = table.search("vector", [7.0] * WIDTH, 10, columns=["n", "body"], level=level)
        assert near.column("n").to_pylist().count(7) == expected
        assert table.match("body", "word7", 50, level=level).num_rows == expected
        assert table.match("body", "harbor", 3, "n = 7", level=level).num_rows == min(3, expected)


def test_a_token_counts_once_whatever_comes_between(uri: str) -> None:
    with opened(uri, 3) as table:
        for sequence in (1, 1, 2, 2, 1):
            table.put(rows([1, 2, 3]), token=f"source:{sequence}")
        assert counted(table) == {1: 2, 2: 2, 3: 2}
        table.flush()
        table.commit()
    with opened(uri) as table:
        assert not table.put(rows([1, 2, 3]), token="source:2").applied
        assert table.put(rows([1, 2, 3]), token="source:3").applied
        assert counted(table) == {1: 3, 2: 3, 3: 3}


def test_rows_that_were_never_durable_are_there_and_survive_a_close(uri: str) -> None:
    with opened(uri, 2) as table:
        table.put(rows([1, 1, 2]), durable=False)
        assert counted(table) == {1: 2, 2: 1}
    with opened(uri) as table:
        assert counted(table) == {1: 2, 2: 1}


def test_a_newer_owner_takes_over_every_row(uri: str) -> None:
    first = opened(uri, 2)
    first.put(rows([1, 1, *range(50)]))
    first.flush()
    first.put(rows([1, *range(50)]))
    with opened(uri) as second:
        with pytest.raises(ingest.FencedError):
            first.put(rows([5]))
        second.put(rows([1]))
        second.flush()
        second.commit()
        assert counted(second) == Counter([1, 1, *range(50), 1, *range(50), 1])
    clean(uri)


def test_tiny_limits_and_many_threads(uri: str) -> None:
    """Every limit is crossed, commits run beside, and each put is sent twice."""
    tiny = {
        "memtable": {"rows_max": 40, "size_max": "1MiB", "unflushed_max": "64MiB"},
        "wal": {"entry_size_max": "2KiB", "linger_max": "5ms"},
        "commit": {"interval": "100ms"},
    }
    failures: list[BaseException] = []
    with opened(uri, 3, **tiny) as table:

        def puts(producer: int) -> None:
            try:
                for sequence in range(12):
                    part = rows([producer, *range(100, 110)])
                    for _ in range(2):
                        table.put(part, token=f"p{producer}:{sequence}", durable=bool(sequence % 3))
            except BaseException as error:  # noqa: BLE001 - told to the test
                failures.append(error)

        threads = [threading.Thread(target=puts, args=(producer,)) for producer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures
        expected = Counter({**dict.fromkeys(range(4), 12), **dict.fromkeys(range(100, 110), 48)})
        assert counted(table) == expected
    with opened(uri, commit={"interval": "0s"}) as table:
        assert counted(table) == expected
        table.flush()
        table.commit()
        assert counted(table, "committed") == expected
    clean(uri)


def test_rows_are_spread_by_the_columns_that_are_named(uri: str) -> None:
    with opened(uri, 4, regions={"by": ["body"]}) as table:
        table.put(rows([5] * 20))
        table.put(rows(range(40)))
        table.flush()
        filled = [region["ssts"] for region in table.status()["regions"]]
        assert sum(sst["rows"] for ssts in filled for sst in ssts) == 60
        assert all(filled)
        region = np.flatnonzero(np.bincount(table.base.route(rows([5] * 3)), minlength=4))
        assert len(region) == 1
    assert BaseTable.open(uri).append_by == ("body",)


def test_collected_garbage_loses_no_row(uri: str, run: Callable[..., Any], tmp_path: Path) -> None:
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
    assert run("gc", config)[0] == 0
    assert not list(Path(uri).glob("_mem_wal/*/*_gen_*"))
    with opened(uri) as table:
        assert counted(table) == oracle
    clean(uri)


# ---- asked for wrongly ---------------------------------------------------------------------------------------------


def test_keys_are_refused_in_one_line(uri: str) -> None:
    with opened(uri, 1) as table:
        table.put(rows([1]))
        for ask in (lambda: table.get([1]), lambda: table.delete([1]), lambda: table.get(pa.table({"n": [1]}))):
            with pytest.raises(ingest.Invalid, match="the table has no key") as raised:
                ask()
            assert "\n" not in str(raised.value)


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "forgotten": ({}, {}, "give its columns and its key.*append_only = true"),
    "empty list": ({"key": []}, {}, r"key is empty.*key=\(\)"),
    "both": ({"key": "n"}, {"table": {"append_only": True}}, "append_only = true"),
    "unknown column": ({"key": ()}, {"regions": {"by": ["boddy"]}}, "regions.by: column 'boddy'.*'body'"),
    "vector": ({"key": ()}, {"regions": {"by": ["vector"]}}, "regions.by: column 'vector'"),
    "twice": ({"key": ()}, {"regions": {"by": ["n", "n"]}}, "names 'n' 2 times"),
    "by with a key": ({"key": "n"}, {"regions": {"by": ["n"]}}, "by is for tables with append_only"),
    "arrow": ({"key": ()}, {"wal": {"format": "arrow"}}, "arrow.*needs a table with a key"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_nothing_is_made(name: str, uri: str) -> None:
    arguments, sections, said = MISTAKES[name]
    with pytest.raises(ingest.Invalid, match=said) as raised:
        ingest.open(uri, schema=SCHEMA, settings=sections, **arguments)
    assert "\n" not in str(raised.value)
    assert not Path(uri).exists() or not list(Path(uri).iterdir())


def test_a_table_keeps_what_it_was_made_as(uri: str, tmp_path: Path) -> None:
    opened(uri, 1).close()
    keyed = str(tmp_path / "keyed")
    ingest.open(keyed, schema=pa.schema([pa.field("n", pa.int64(), nullable=False)]), key="n").close()
    with pytest.raises(ingest.Invalid, match="has none: its rows are only appended"):
        ingest.open(uri, key="n")
    with pytest.raises(ingest.Invalid, match=r"append_only = true but .* has the key \['n'\]"):
        ingest.open(keyed, key=())
    with pytest.raises(ingest.Invalid, match="are spread by the whole row"):
        ingest.open(uri, key=(), settings={"regions": {"by": ["n"]}})
    ingest.open(uri, key=()).close()


def test_settings_name_both_ways(tmp_path: Path) -> None:
    with pytest.raises(ingest.Invalid) as raised:
        load({"table": {"uri": str(tmp_path), "columns": {"n": "int64"}}}, {})
    (line,) = str(raised.value).splitlines()
    assert 'key = ["n"]' in line
    assert "append_only = true" in line


# ---- a table that is there -----------------------------------------------------------------------------------------


def test_a_table_is_adopted_with_the_rows_it_has(uri: str, run: Callable[..., Any], tmp_path: Path) -> None:
    lance.write_dataset(rows([1, 1, 2]), uri)
    config = configured(tmp_path, uri)
    code, out, _ = run("init", config)
    assert (code, "adopted" in out, "none (append only)" in out) == (0, True, True)
    with opened(uri) as table:
        table.put(rows([1]))
        table.flush()
        table.commit()
        assert counted(table) == counted(table, "committed") == {1: 3, 2: 1}
    clean(uri)


def test_stable_row_ids_stay(uri: str, run: Callable[..., Any], tmp_path: Path) -> None:
    lance.write_dataset(rows([1, 1, 2]), uri, enable_stable_row_ids=True)
    assert run("init", configured(tmp_path, uri))[0] == 0
    with opened(uri) as table:
        for n in (3, 3, 4):
            table.put(rows([n]))
            table.flush()
            table.commit()
        assert counted(table, "committed") == {1: 2, 2: 1, 3: 2, 4: 1}
    ids = lance.dataset(uri).scanner(with_row_id=True).to_table().column("_rowid").to_pylist()
    assert ids == list(range(6))


def test_a_table_with_a_primary_key_is_not_adopted_without_it(
    uri: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    marked = pa.field("n", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    lance.write_dataset(pa.table({"n": [1]}, schema=pa.schema([marked])), uri)
    code, _, err = run("init", configured(tmp_path, uri, columns={"n": "int64"}))
    assert code == 2
    assert "declares the primary key n" in err


# ---- commands and the daemon ---------------------------------------------------------------------------------------


def configured(directory: Path, uri: str, **changes: Any) -> Path:
    columns = {"n": "int64", "body": "string", "vector": f"vector[{WIDTH}]"}
    sections: dict[str, Any] = {
        "table": {"uri": uri, "append_only": True, "columns": columns, **changes.pop("table", {})},
        "regions": {"count": 3},
        "commit": {"interval": "0s"},
    }
    sections["table"]["columns"] = changes.pop("columns", columns)
    path = directory / "config.toml"
    path.write_text(toml(sections | changes).replace("True", "true"))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process; its exit code, output and errors."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["memwal", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return command


def test_the_commands(uri: str, run: Callable[..., Any], tmp_path: Path) -> None:
    config = configured(tmp_path, uri)
    assert "none (append only)" in run("init", config)[1]
    with opened(uri) as table:
        table.put(rows([1, 1, *range(20)]))
        table.flush()
        table.commit()
        table.put(rows([1, *range(30)]))
        table.flush()
        table.put(rows([1]))
    code, out, _ = run("query", config, "--filter", "n = 1", "--columns", "n", "--format", "json")
    assert (code, [row["n"] for row in json.loads(out)]) == (0, [1] * 6)
    for refused in (("query", config, "--key", "1"), ("query", config, "--near", "vector=key:1")):
        code, _, err = run(*refused)
        assert (code, len(err.splitlines()), "the table has no key" in err) == (2, 1, True)
    code, out, _ = run("log", config)
    assert code == 0
    assert "insert 22 rows; commit generation 1 of buckets 0–2" in out
    assert "Lance's marker follows" in out
    code, _, err = run("log", config, "--diff", "1", "2")
    assert (code, len(err.splitlines()), "compares rows by key" in err) == (2, 1, True)
    assert run("verify", config, "--deep")[0] == 0
    assert run("status", config)[0] == 0
    assert run("inspect", uri)[0] == 0
    for path in (*Path(uri).glob("_mem_wal/*/*_gen_2"), *Path(uri).glob("_mem_wal/*/wal/*")):
        code, out, _ = run("inspect", path)
        assert code == 0
        assert "bloom" not in out
    assert run("gc", config, "--dry-run")[0] == 0
    assert run("flush", config)[0] == 0
    assert run("commit", config)[0] == 0
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


def test_the_daemon(serve: Callable[..., Any], uri: str, tmp_path: Path) -> None:
    _, endpoint = serve(configured(tmp_path, uri))
    with ingest.connect(endpoint) as table, ingest.connect(endpoint) as other:
        assert table.key == ()
        for _ in range(2):
            table.put(rows([1, 1, 2]), token="a:1")
        other.put(rows([1]))
        assert counted(other) == {1: 3, 2: 1}
        for ask in (lambda: table.get([1]), lambda: table.delete([1])):
            with pytest.raises(ingest.Invalid, match="the table has no key"):
                ask()
        base = BaseTable.open(uri)
        bucket = int(base.route(rows([1]))[0])
        for attempt in (True, False):
            stream = table.open_stream(base.regions[bucket], Token("spark", 1))
            stream.write(rows([1, 1]).combine_chunks().to_batches()[0])
            assert stream.finish().applied == attempt
        stream = table.open_stream(base.regions[bucket - 1], Token("spark", 2))
        stream.write(rows([1]).combine_chunks().to_batches()[0])
        with pytest.raises(ingest.Invalid, match="rows of other regions"):
            stream.finish()
        table.flush()
        table.commit()
        assert counted(table, "committed") == {1: 5, 2: 1}


def test_history_counts_every_commit(uri: str) -> None:
    with opened(uri, 1) as table:
        for n in range(3):
            table.put(rows([n] * (n + 1)))
            table.flush()
            table.commit()
    changes = read_history(open_store(uri, None)).changes
    inserted = [each.details["rows"] for change in changes for each in change.actions or () if each.kind == "insert"]
    assert inserted == [3, 2, 1]


# ---- Spark ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from ingest.spark_session import configuration, start_session

    settings = load({"table": {"uri": str(tmp_path_factory.mktemp("unused"))}}, {})
    session = start_session(configuration(settings, 2, once=True))
    yield session
    session.stop()


def test_a_replayed_micro_batch_adds_nothing(spark: Any, uri: str, tmp_path: Path) -> None:
    from ingest.source import read_stream

    landing, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    landing.mkdir()
    config = configured(tmp_path, uri, source={"path": str(landing), "files_per_trigger": 2})
    from ingest.opening import initialise

    initialise(load(config, {}), {})
    batches: list[Any] = []
    sink = MemWalSink(config, on_batch=batches.append)

    def process() -> None:
        frame = read_stream(spark, load(config, {}).source, BaseTable.open(uri).schema)
        query = (
            frame.writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()

    try:
        pq.write_table(rows([1, 1, None, *range(50)]), landing / "0.parquet")
        pq.write_table(rows([1, *range(50)]), landing / "1.parquet")
        process()
        expected = Counter([1, 1, None, *range(50), 1, *range(50)])
        for done in (checkpoint / "commits").iterdir():
            done.unlink()  # as a driver that was killed before it said so
        process()
        assert [region.applied for region in batches[0].regions] == [True] * 3
        assert [region.applied for region in batches[1].regions] == [False] * 3
        pq.write_table(rows([1, 1]), landing / "2.parquet")
        process()
        with ingest.connect(sink._owner()) as table:
            assert counted(table) == expected + Counter([1, 1])
    finally:
        sink.close()


def test_memwal_run_once_and_again(uri: str, tmp_path: Path, memwal: Callable[..., Any]) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    for number in range(3):
        pq.write_table(rows([1, 1, *range(30)]), feed / f"{number}.parquet")
    config = configured(tmp_path, uri, source={"feed": str(feed), "path": str(tmp_path / "in")})
    for _ in range(2):
        done = memwal("run", config, "--once")
        assert (done.code, done.error_lines) == (0, [])
        assert Counter(lance.dataset(uri).to_table().column("n").to_pylist()) == Counter([1, 1, *range(30)] * 3)
    clean(uri)


# ---- S3 ------------------------------------------------------------------------------------------------------------


def on_s3(at: Any) -> Any:
    uri, options = at
    return ingest.open(uri, schema=SCHEMA, key=(), regions=2, storage_options=options, settings=QUIET)


def test_on_s3_committers_at_once_append_once(s3_table: Any) -> None:
    with on_s3(s3_table) as table:
        for n in range(3):
            table.put(rows([1, *range(n, n + 20)]))
            table.flush()
        failures: list[BaseException] = []

        def commits() -> None:
            try:
                store = open_store(*s3_table)
                flush.commit(*s3_table, store, clock=SystemClock(), retries=40, courtesy=0.0, memory_max=1)
            except BaseException as error:  # noqa: BLE001 - told to the test
                failures.append(error)

        threads = [threading.Thread(target=commits) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures
        table.put(rows([1]))
        expected = Counter([1, *range(20), 1, *range(1, 21), 1, *range(2, 22)])
        assert counted(table, "committed") == expected
        assert counted(table) == expected + Counter([1])
    with on_s3(s3_table) as table:
        assert counted(table) == expected + Counter([1])
    uri, options = s3_table
    assert verify_table(open_store(uri, options), uri, deep=True).findings == ()


FAULTS = {
    "answer lost": faults.lands_then_resets(),
    "never arrived": faults.resets(),
    "refused": faults.answers(412, "PreconditionFailed"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_commit_whose_version_got_no_answer_is_there_once(
    s3_table_through_proxy: Any, fault_proxy: Any, fault: Any
) -> None:
    """Lost: the version is there, and the committer hears nothing of it."""
    with on_s3(s3_table_through_proxy) as table:
        table.put(rows([1, 1, 2]))
        table.flush()
        fault_proxy.inject(fault, method="PUT", key="_versions/", times=1)
        try:
            table.commit()
        except ingest.MemWalError:
            fault_proxy.heal()
            table.commit()
        assert counted(table, "committed") == counted(table) == {1: 2, 2: 1}
        assert table.base.latest().committed == table.base.latest().marked
