"""`memwal load` as a user runs it: beside daemons and writers, twice at once, on S3; and what other readers see
afterwards.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import lance
import lancedb
import pyarrow as pa
import pyarrow.parquet
import pytest

import memwal
from memwal import flush, wal
from memwal.flush import BaseTable
from memwal.flush.commits.load_notes import load_id
from tests.clean import assert_clean
from tests.conftest import Cli, Made, OpenSmall, Script, Serve, SmallConfig, Start, wait_until
from tests.lance_scan import scanned
from tests.s3_fixtures import S3Table
from tests.support.rows import names


def written(path: Path, rows: pa.Table) -> Path:
    pa.parquet.write_table(rows, path)
    return path


def clean(uri: str) -> None:
    assert_clean(wal.open_store(uri), uri)


# ---- the command ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """A table whose rows were in the log, in an SST and in the base, with two files loaded over them."""

    config: Path
    uri: str
    one: Path
    """The first of the two files."""
    dry: Any
    """The dry run before the load."""
    done: Any

    @property
    def version(self) -> int:
        """Return the version that the load reports."""
        return int(self.done.out.partition("as version ")[2].partition(" ")[0])


@pytest.fixture
def loaded(cli: Cli, small_config: SmallConfig, open_small: OpenSmall, uri: str, made: Made, tmp_path: Path) -> Loaded:
    """Fill every level, then run the load, whose token is "books 1"."""
    config = small_config()
    with open_small() as table:
        table.put(made.rows(range(20)))
        table.flush()
        table.commit()
        table.put(made.rows(range(10, 30), 1))
        table.flush()
        table.put(made.rows(range(20, 40), 2))
        table.delete([0, 45])
    one = written(tmp_path / "1.parquet", made.table(range(35, 400), 3))
    two = written(tmp_path / "2.parquet", made.table([0, 1, 399], 4))
    dry = cli("load", config, one, two, "--dry-run")
    assert lance.dataset(uri).count_rows() == 20
    return Loaded(config, uri, one, dry, cli("load", config, tmp_path / "[12].parquet", "--token", "books 1"))


def test_a_load_tells_what_it_does_and_replaces_rows_of_every_level(loaded: Loaded, made: Made) -> None:
    dry, done = loaded.dry, loaded.done
    assert (dry.code, done.code) == (0, 0)
    assert dry.out.startswith(
        f"would load 367 rows into {loaded.uri}, 1 row left out, whose keys other rows of the files have (token sha256:"
    )
    assert done.out.startswith(
        "loaded 361 rows inserted, 6 rows replaced, 1 row left out, whose keys other rows of the files have as version "
    )
    assert done.out.endswith(" s (token books 1)\n")
    steps = ["checked 368 rows of 2 files", "committing what was put before", "merging", "indexes"]
    assert done.err.splitlines() == steps
    wanted = {
        id: f"row {id} v{version}"
        for first, last, version in ((2, 10, 0), (10, 20, 1), (20, 35, 2), (35, 399, 3))
        for id in range(first, last)
    } | {id: f"row {id} v4" for id in (0, 1, 399)}
    with memwal.open(loaded.uri, read_only=True) as table:
        assert names(table) == names(table, "committed") == wanted
        assert table.get([0]).to_pylist()[0]["name"] == "row 0 v4"
        row = made.row(200, 3)
        assert table.search("vector", row["vector"], k=1, columns=["id"])["id"].to_pylist() == [200]
        assert 200 in table.match("body", row["body"], k=400, columns=["id"])["id"].to_pylist()
        assert table.count(f"price = {row['price']}") >= 1


def test_a_load_is_done_once_per_token_and_what_a_killed_one_left_is_done(loaded: Loaded, cli: Cli) -> None:
    version, arguments = lance.dataset(loaded.uri).version, ("load", loaded.config, loaded.one, "--token", "books 1")
    again = cli(*arguments)
    assert (again.code, again.err) == (0, "")
    assert again.out == (
        f"already loaded in version {loaded.version} of {loaded.uri} (token books 1); nothing was done. To load the "
        "files again, give another --token\n"
    )
    assert lance.dataset(loaded.uri).version == version
    told = json.loads(cli(*arguments, "--json").out)
    assert told == {"token": "books 1", "already": True, "loaded_in": loaded.version}
    with (
        patch.object(flush, "load", side_effect=AssertionError("reads the files")),
        patch.object(flush, "finish_load", wraps=flush.finish_load) as finished,
    ):
        cli(*arguments)
    finished.assert_called_once()
    report = json.loads(cli(*arguments[:3], "--json").out)
    counts = {"rows_inserted": 0, "rows_replaced": 365, "rows_read": 365, "rows_duplicate": 0, "already": False}
    assert {name: report[name] for name in counts} == counts


def test_a_load_that_a_restore_takes_back_while_it_is_repeated_is_loaded_again(
    cli: Cli, small_config: SmallConfig, open_small: OpenSmall, made: Made, uri: str
) -> None:
    with open_small() as table:
        table.put(made.rows([1]))
        table.flush()
        table.commit()
    before = lance.dataset(uri).version
    arguments = ("load", small_config(), written(Path(uri).parent / "a.parquet", made.table([2, 3])), "--token", "t")
    assert cli(*arguments).out.startswith("loaded 2 rows inserted")
    finish = flush.finish_load

    def restored(*given: Any, **options: Any) -> bool:
        lance.dataset(uri, version=before).restore()
        return finish(*given, **options)

    with patch.object(flush, "finish_load", restored):
        again = cli(*arguments)
    assert again.out.startswith("loaded 2 rows inserted")
    assert cli(*arguments).out.startswith("already loaded")
    with memwal.open(uri, read_only=True) as table:
        assert sorted(names(table)) == [1, 2, 3]


def test_the_log_names_a_load_and_verify_is_clean(loaded: Loaded, cli: Cli) -> None:
    log = json.loads(cli("log", loaded.config, "--json").out)["versions"]
    (actions,) = [each["actions"] for each in log if each["version"] == loaded.version]
    assert [action["action"] for action in actions] == ["insert", "update", "load"]
    assert (actions[-1]["token"], actions[-1]["load"]) == ("books 1", str(load_id("books 1")))
    assert "load 'books 1'" in cli("log", loaded.config, env={"COLUMNS": "200"}).out
    assert cli("verify", loaded.config, "--deep").code == 0


def test_wrong_input_is_one_line_and_exit_code_2(
    cli: Cli, small_config: SmallConfig, open_small: OpenSmall, uri: str, tmp_path: Path
) -> None:
    config = small_config()
    (tmp_path / "a.csv").write_text("id,price\n1,2\n2,x\n")
    missing = cli("load", config, tmp_path / "a.csv", "--dry-run")
    assert (missing.code, missing.err.splitlines()[-1]) == (
        2,
        f"memwal: {uri}: the table does not exist; `memwal init`, `memwal load` or `memwal run` creates it",
    )
    open_small().close()
    version, formats = lance.dataset(uri).version, "Parquet, CSV, NDJSON, Arrow files, Lance tables"
    for arguments, said in (
        ((tmp_path / "a.csv",), f"memwal: {tmp_path}/a.csv: row 2, column 'price': 'x' is not a valid int64"),
        ((tmp_path / "b.csv",), f"memwal: {tmp_path}/b.csv: the file does not exist"),
        (
            (tmp_path / "a.csv", "--token", " "),
            "memwal: --token ' ': write 1 to 200 printable characters, such as books-2026-11-25",
        ),
        ((), f"memwal: Missing argument 'FILES...': {formats}; globs; local or s3:// (see memwal load --help)"),
    ):
        ran = cli("load", config, *arguments)
        assert (ran.code, ran.err.splitlines()[-1], ran.out) == (2, said, "")
    assert lance.dataset(uri).version == version


def test_a_program_that_has_rows_in_memory_is_not_fenced(
    cli: Cli,
    small_config: SmallConfig,
    serve: Serve,
    script: Script,
    open_small: OpenSmall,
    made: Made,
    uri: str,
    tmp_path: Path,
    start: Start,
) -> None:
    import sys

    open_small().close()
    program = (
        f"import memwal\nt = memwal.open({uri!r}, settings={{'commit': {{'interval': '0s'}}}})\n"
        "t.put([{'id': 1, 'name': 'mine'}], missing='null')\nprint('open', flush=True)\ninput()\n"
        "t.put([{'id': 2}], missing='null')\nprint('done', flush=True)\ninput()\n"
    )
    running = start([sys.executable, "-c", program])
    running.line_with("open")
    ran = cli("load", small_config(), written(tmp_path / "a.parquet", made.table([1])), "--token", "t")
    assert ran.code == 1
    assert f"{uri}: opened by " in ran.err.splitlines()[-1]
    running.tell("go on\n")
    running.line_with("done")  # the load did not fence the daemon
    assert load_id("t") not in BaseTable.open(uri).committed


def test_without_a_key(cli: Cli, tmp_path: Path) -> None:
    config, uri = tmp_path / "c.toml", str(tmp_path / "events.lance")
    config.write_text(f'[table]\nuri = "{uri}"\nappend_only = true\ncolumns = {{ n = "int64" }}\n')
    (tmp_path / "a.csv").write_text("n\n1\n1\n")
    assert cli("init", config).code == 0
    with memwal.open(uri, settings={"commit": {"interval": "0s"}}) as table:
        table.put([{"n": 1}])
    assert cli("load", config, tmp_path / "a.csv").out.startswith("loaded 2 rows inserted as version ")
    assert cli("load", config, tmp_path / "a.csv").out.startswith("already loaded in version ")
    with memwal.open(uri, read_only=True) as table:
        assert table.scan().read_all().column("n").to_pylist() == [1, 1, 1]
    assert cli("verify", config, "--deep").code == 0


# ---- at the same time ----------------------------------------------------------------------------------------------


class Writers:
    """Puts and deletes keys of a table continuously, and records each acknowledged write in order."""

    def __init__(self, table: Any, made: Made, keys: int) -> None:
        self._table, self._made, self._keys = table, made, keys
        self.acked: list[tuple[int, int | None]] = []
        """(key, version) of each acknowledged write, in order; version None is a delete."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        version = 100
        while not self._stop.is_set():
            version += 1
            ids = [(version * 7 + step * 3) % self._keys for step in range(5)]
            if version % 4:
                self._table.put(self._made.rows(sorted(set(ids)), version))
                self.acked += [(id, version) for id in sorted(set(ids))]
            else:
                self._table.delete(sorted(set(ids)))
                self.acked += [(id, None) for id in sorted(set(ids))]


def test_beside_a_daemon_that_commits_all_the_time(
    cli: Cli, small_config: SmallConfig, serve: Serve, made: Made, tmp_path: Path, uri: str
) -> None:
    """Each key shows the loaded row, or a newer acknowledged write: never a write from before the load, and never the
    loaded row instead of a write that was acknowledged after the load.
    """
    running, endpoint = serve(small_config(commit={"interval": "100ms"}))
    table = memwal.connect(endpoint)
    keys = 600
    rows = written(tmp_path / "a.parquet", made.table(range(keys), 1))
    with Writers(table, made, keys // 2) as writers:
        table.put(made.rows(range(keys // 2, keys - 50), 50))
        wait_until(lambda: len(writers.acked) > 200)
        before = len(writers.acked)
        ran = cli("load", small_config(), rows, "--token", "t")
        assert ran.code == 0, ran.err
        returned = len(writers.acked)
        wait_until(lambda: len(writers.acked) > returned + 200)
    last: dict[int, int] = {id: place for place, (id, _) in enumerate(writers.acked)}

    def allowed(id: int) -> set[str | None]:
        """Return the allowed rows of a key. The five writes of one call may be acknowledged before the load ends, and
        recorded after it.
        """
        place = last.get(id, -1)
        if place < before:
            return {f"row {id} v1"}
        version = writers.acked[place][1]
        newest = None if version is None else f"row {id} v{version}"
        return {newest} if place >= returned + 5 else {newest, f"row {id} v1"}

    for level in ("latest", "committed"):
        if level == "committed":
            table.flush()
            table.commit()
        found = names(table, level)
        wrong = {id: found.get(id) for id in range(keys) if found.get(id) not in allowed(id)}
        assert not wrong
        assert set(found) <= set(range(keys))
    table.close()
    clean(uri)
    assert running.errors == []


def test_a_daemon_waits_for_a_load_and_goes_on(small_config: SmallConfig, serve: Serve, made: Made, uri: str) -> None:
    running, endpoint = serve(small_config(commit={"interval": "100ms"}, log={"level": "info"}))
    store, clock = wal.open_store(uri), wal.SystemClock()
    with memwal.connect(endpoint) as table:
        attempt = flush.begin_load(store, BaseTable.open(uri), load_id("t"), clock, wal.SystemIds())
        table.put(made.rows(range(10)))
        wait_until(lambda: any("a load asks commits to wait" in line for line in running.log))
        assert names(table, "committed") == {}
        assert len(names(table)) == 10
        table.flush()
        assert table.commit().rows_inserted == 10  # a commit on demand runs at once
        table.put(made.rows(range(10), 1))
        attempt.withdraw(store)
        wait_until(lambda: names(table, "committed").get(3) == "row 3 v1")


def test_two_processes_with_one_token(
    cli: Cli, small_config: SmallConfig, open_small: OpenSmall, made: Made, tmp_path: Path, uri: str
) -> None:
    config = small_config()
    open_small().close()
    rows = written(tmp_path / "a.parquet", made.table(range(3000)))
    with ThreadPoolExecutor(2) as pool:
        ran = list(pool.map(lambda _: cli("load", config, rows, process=True), range(2)))
    assert [each.code for each in ran] == [0, 0], [each.err for each in ran]
    assert sorted(each.out.split(" ")[0] for each in ran) == ["already", "loaded"]
    assert lance.dataset(uri).count_rows() == 3000
    clean(uri)


# ---- other readers -------------------------------------------------------------------------------------------------


def test_lances_own_reader_and_lancedb_read_a_loaded_table(
    cli: Cli, small_config: SmallConfig, open_small: OpenSmall, made: Made, tmp_path: Path, uri: str
) -> None:
    """The marker of a load names a region that does not exist; Lance's planners ignore it."""
    config = small_config()
    with open_small() as table:
        table.put(made.rows(range(10)))
        table.flush()
        table.commit()
    assert cli("load", config, written(tmp_path / "a.parquet", made.table(range(5, 300), 1))).code == 0
    with open_small() as table:
        table.put(made.rows(range(295, 310), 2))
        table.flush()
        wanted = names(table)
    found = lancedb.connect(tmp_path).open_table("table").to_arrow().to_pylist()
    assert {row["id"]: row["name"] for row in found} == wanted
    store = wal.open_store(uri)
    manifests = [wal.ManifestStore(store, region).latest() for region in BaseTable.open(uri).regions]
    found = scanned(uri, [manifest for manifest in manifests if manifest is not None]).to_pylist()
    assert {row["id"]: row["name"] for row in found} == wanted
    assert len(found) == len(wanted)
    rows = lance.dataset(uri)
    rows.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().use_index(False).execute(
        made.table([1000], 5)
    )
    assert cli("load", config, written(tmp_path / "b.parquet", made.table([1000], 6))).out.startswith(
        "loaded 1 row replaced as version "
    )
    clean(uri)


def test_on_s3(cli: Cli, s3_table: S3Table, made: Made, tmp_path: Path) -> None:
    """Table and files are on S3, with the same storage options."""
    uri, options = s3_table.uri, s3_table.storage_options
    place = uri.rpartition("/")[0]
    config = tmp_path / "c.toml"
    listed = "".join(f'"{name}" = "{value}"\n' for name, value in options.items())
    config.write_text(
        f'[table]\nuri = "{uri}"\nkey = ["id"]\ncolumns = {{ id = "int64", name = "string" }}\n'
        f"[table.storage_options]\n{listed}"
    )
    assert cli("init", config).code == 0
    store = wal.open_store(f"{place}/in", options)
    for number in range(3):
        store.put(f"part-{number}.csv", f"id,name\n{number},of {number}\n".encode())
    lance.write_dataset(pa.table({"id": [7, 8]}), f"{place}/more.lance", storage_options=options)
    lacking = cli("load", config, f"{place}/in/part-*.csv", f"{place}/more.lance")
    assert (lacking.code, "the column 'name' of the table is missing" in lacking.err) == (2, True)
    assert "a load replaces whole rows" in cli("load", config, f"{place}/more.lance", "--missing", "keep").err
    ran = cli("load", config, f"{place}/in/part-*.csv", f"{place}/more.lance", "--missing", "null")
    assert ran.out.startswith("loaded 5 rows inserted as version "), ran.err
    assert cli("load", config, f"{place}/in/part-*.csv", f"{place}/more.lance").out.startswith("already loaded")
    missing = cli("load", config, f"{place}/in/none-*.csv")
    assert (missing.code, missing.err) == (2, f"memwal: {place}/in/none-*.csv: no file has such a name\n")
    with memwal.open(uri, storage_options=options, read_only=True) as table:
        assert names(table) == {0: "of 0", 1: "of 1", 2: "of 2", 7: None, 8: None}
    assert cli("verify", config, "--deep").code == 0
