"""`source.engine = "local"` and `memwal load --follow`: files of a directory are put once, without Spark.

Most tables are append-only, where a row that is put twice is there twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import memwal
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.spark.checkpoint_files import LocalFiles
from memwal.ingest.spark.pipeline.checkpoint import FILES
from tests.conftest import Cli, Serve, Start, extent, wait_until

KEYED = 'key = ["id"]'
APPENDED = "append_only = true"
MEMWAL = (sys.executable, "-c", "from memwal.ingest.cli.app import main; main()")


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    def write(table: str = APPENDED, source: str = "", more: str = "") -> Path:
        path = tmp_path / "c.toml"
        path.write_text(
            f'[table]\nuri = "{tmp_path}/t.lance"\n{table}\n[table.columns]\nid = "int64"\nname = "string"\n'
            f'[source]\nengine = "local"\npath = "{tmp_path}/in"\ntrigger = "20ms"\n{source}\n{more}\n'
        )
        (tmp_path / "in").mkdir(exist_ok=True)
        return path

    return write


def parquet(path: Path, ids: range, name: str = "x") -> Path:
    hidden = path.with_name(f".{path.name}")
    pa.parquet.write_table(pa.table({"id": ids, "name": [name] * len(ids)}), hidden)
    return hidden.rename(path)


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    with memwal.open(tmp_path / "t.lance", read_only=True) as table:
        return table.scan(order_by="id").read_all().to_pylist()


def ids_of(tmp_path: Path) -> list[int]:
    return [row["id"] for row in rows_of(tmp_path)]


def test_files_of_every_format_are_put_once_and_committed(
    cli: Cli, config: Callable[..., Path], tmp_path: Path
) -> None:
    path, into = config(KEYED), tmp_path / "in"
    (into / "a.csv").write_text("name,id,ignored\none,1,x\ntwo,2,y\n")
    (into / "b.ndjson").write_text('{"id": 2, "name": "newer", "ignored": 1}\n{"id": 3, "name": null}\n')
    parquet(into / "c.parquet", range(4, 6))
    pa.feather.write_feather(pa.table({"id": [6], "name": ["six"]}), into / "d.arrow")
    (into / "_hidden.csv").write_text("not,a,table\n")
    for at, name in enumerate(("a.csv", "b.ndjson", "c.parquet", "d.arrow")):
        os.utime(into / name, (at, at))
    done = cli("run", path, "--once")
    assert (done.code, done.out.splitlines()[-1]) == (0, f"7 rows of 4 files put into {tmp_path}/t.lance, all durable")
    names = {1: "one", 2: "newer", 3: None, 4: "x", 5: "x", 6: "six"}
    assert rows_of(tmp_path) == [{"id": id, "name": name} for id, name in names.items()]
    with memwal.open(tmp_path / "t.lance", read_only=True) as table:
        assert table.count(level="committed") == 6
    again = cli("run", path, "--once")
    assert again.out.splitlines()[-1].startswith("0 rows of 0 files")


def test_a_wrong_row_stops_the_run_before_any_row_of_its_file(
    cli: Cli, config: Callable[..., Path], tmp_path: Path
) -> None:
    path = config()
    (tmp_path / "in/a.csv").write_text("id,name\n" + "".join(f"{id},a\n" for id in range(20_000)) + "x,b\n")
    done = cli("run", path, "--once")
    assert done.code == 2
    assert f"{tmp_path}/in/a.csv: row 20,001, column 'id': 'x' is not a valid int64" in done.err
    assert ids_of(tmp_path) == []
    (tmp_path / "in/a.csv").write_text("id,name\n1,a\n")
    assert cli("run", path, "--once").code == 0
    assert ids_of(tmp_path) == [1]


@pytest.mark.parametrize("puts", range(4))
def test_a_file_that_was_begun_is_put_again_without_a_second_copy(
    cli: Cli, config: Callable[..., Path], tmp_path: Path, puts: int
) -> None:
    """Three parts of 8,192 rows: the process ends after 0 to 3 puts."""
    path = config()
    parquet(tmp_path / "in/a.parquet", range(20_000))
    put, done = Table.put, list[int]()

    def broken(table: Table, *args: Any, **how: Any) -> Any:
        if len(done) == puts:
            raise OSError("the process ends here")
        done.append(1)
        return put(table, *args, **how)

    write = LocalFiles.write

    def unfinished(files: LocalFiles, name: str, text: str) -> None:
        if '"next"' in text:
            raise OSError("the process ends here")
        write(files, name, text)

    with patch.object(Table, "put", broken), patch.object(LocalFiles, "write", unfinished):
        assert cli("run", path, "--once").code != 0
    parquet(tmp_path / "in/b.parquet", range(20_000, 20_010))
    assert cli("run", path, "--once").code == 0
    assert ids_of(tmp_path) == list(range(20_010))


def test_kills_lose_and_double_nothing(cli: Cli, config: Callable[..., Path], start: Start, tmp_path: Path) -> None:
    """Kills come while a file of 25 parts is being put; on a busy machine some come after it."""
    path, rng, rounds, within = config(), random.Random(5), extent(3, 20), 0
    (notes := tmp_path / "t.lance.checkpoint" / FILES).mkdir(parents=True)
    for number in range(rounds):
        parquet(tmp_path / f"in/{number:03}.parquet", range(number * 200_000, (number + 1) * 200_000))
        running = start([*MEMWAL, "run", path])
        wait_until(lambda number=number: (notes / str(number)).exists(), every=0.002)
        time.sleep(rng.uniform(0.01, 0.1))
        running.kill()
        within += "next" not in json.loads((notes / str(number)).read_text())
    assert within >= rounds // 2
    assert cli("run", path, "--once").code == 0
    assert ids_of(tmp_path) == list(range(rounds * 200_000))


def test_a_changed_file_and_a_checkpoint_that_was_set_back_are_refused(
    cli: Cli, config: Callable[..., Path], tmp_path: Path
) -> None:
    path, notes = config(), tmp_path / "t.lance.checkpoint" / FILES
    parquet(tmp_path / "in/a.parquet", range(5))
    assert cli("run", path, "--once").code == 0
    before = (notes / "0").read_text()
    parquet(tmp_path / "in/b.parquet", range(5, 9))
    assert cli("run", path, "--once").code == 0
    (notes / "1").rename(tmp_path / "kept")
    refused = cli("run", path, "--once")
    assert (refused.code, "is older than the table" in refused.err) == (2, True)
    begun = json.loads((tmp_path / "kept").read_text())
    del begun["next"]
    (notes / "1").write_text(json.dumps(begun))
    parquet(tmp_path / "in/b.parquet", range(100, 200))
    refused = cli("run", path, "--once")
    assert (refused.code, "b.parquet: the file was changed or removed after a part" in refused.err) == (2, True)
    (notes / "1").write_text((tmp_path / "kept").read_text())
    assert cli("run", path, "--once").code == 0
    assert (ids_of(tmp_path), json.loads(before)["next"]) == (list(range(9)), 1)


def test_a_checkpoint_of_spark_or_of_another_table_is_refused(
    cli: Cli, config: Callable[..., Path], tmp_path: Path
) -> None:
    path, checkpoint = config(), tmp_path / "t.lance.checkpoint"
    parquet(tmp_path / "in/a.parquet", range(5))
    assert cli("run", path, "--once").code == 0
    refused = cli("run", path, "--once", env={"MEMWAL__SOURCE__ENGINE": "spark"})
    assert (refused.code, 'was written with source.engine = "local"' in refused.err) == (2, True)
    (checkpoint / "memwal-table").write_text("0" * 32)
    refused = cli("run", path, "--once")
    assert (refused.code, "belongs to another table" in refused.err) == (2, True)
    (checkpoint / "offsets").mkdir()
    (checkpoint / "offsets/0").write_text("v1")
    refused = cli("run", path, "--once")
    assert (refused.code, "was written by Spark" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("source", "more", "said"),
    [
        ('format = "orc"', "", "format = 'orc': source.engine = \"local\" supports 'parquet', 'csv', 'json', 'arrow'"),
        ("options = {sep = ';'}", "", 'options is set: source.engine = "local" supports none'),
        ("", '[dlq]\nmode = "table"', "mode = 'table': source.engine = \"local\" supports 'fail'"),
        ("", "[sink]\nhttp_port = 0", 'http_port = 0: source.engine = "local" supports -1'),
        ("", '[sink]\nmissing = "keep"', "missing = 'keep': source.engine = \"local\" supports '', 'null'"),
    ],
)
def test_what_only_spark_does_is_refused(
    cli: Cli, config: Callable[..., Path], source: str, more: str, said: str
) -> None:
    refused = cli("run", config(source=source, more=more), "--once")
    assert refused.code == 2
    assert said in refused.err


def test_a_feed_is_landed_and_put(cli: Cli, config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "feed").mkdir()
    for number in range(3):
        parquet(tmp_path / f"feed/{number}.parquet", range(number * 10, number * 10 + 10))
    path = config(source=f'feed = "{tmp_path}/feed"\nfeed_every = "100ms"')
    assert cli("run", path, "--once").code == 0
    assert ids_of(tmp_path) == list(range(30))


def test_a_directory_is_followed_beside_a_daemon_and_while_paused(
    cli: Cli, config: Callable[..., Path], serve: Serve, start: Start, tmp_path: Path
) -> None:
    path = config()
    assert cli("init", path).code == 0
    _, endpoint = serve(path)
    parquet(tmp_path / "in/a.parquet", range(5))
    running = start([*MEMWAL, "load", path, tmp_path / "in", "--follow"])
    running.line_with("5 rows")
    with memwal.connect(endpoint) as table:
        assert table.count() == 5
        assert cli("pause", path).code == 0
        running.line_with("paused")
        parquet(tmp_path / "in/b.parquet", range(5, 9))
        time.sleep(1.5)
        assert table.count() == 5
        assert cli("resume", path).code == 0
        wait_until(lambda: table.count() == 9)
    second = cli("load", path, tmp_path / "in", "--follow")
    assert (second.code, "another run uses" in second.err) == (2, True)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    refused = cli("load", path, tmp_path / "in", "--follow", "--dry-run")
    assert (refused.code, "--follow takes one directory" in refused.err) == (2, True)


def test_neither_spark_nor_java_is_needed(config: Callable[..., Path], start: Start, tmp_path: Path) -> None:
    path = config()
    parquet(tmp_path / "in/a.parquet", range(5))
    code = (
        "import sys; sys.modules['pyspark'] = None; sys.argv = ['memwal', 'run', sys.argv[1], '--once']\n"
        "from memwal.ingest.cli.app import main; main()"
    )
    running = start([sys.executable, "-c", code, path], env={"PATH": "", "JAVA_HOME": ""})
    running.line_with("5 rows of 1 file put")
    assert running.wait() == 0
