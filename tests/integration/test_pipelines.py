"""Several pipelines of one file in one `memwal run`: two tables, one of them fed by two queries."""

from __future__ import annotations

import json
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import Cli, Tree

FILE = """
[regions]
count = 2
[commit]
interval = "0s"
[source]
format = "parquet"
[table.columns]
id = "int64"
name = "string"
[pipelines.first.table]
uri = "{directory}/books.lance"
key = ["id"]
[pipelines.first.source]
path = "{directory}/first"
[pipelines.second.table]
uri = "{directory}/books.lance"
key = ["id"]
[pipelines.second.source]
path = "{directory}/second"
[pipelines.second.sink]
checkpoint = "{directory}/second.checkpoint"
[pipelines.events.table]
uri = "{directory}/events.lance"
append_only = true
[pipelines.events.source]
path = "{directory}/events"
"""


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Write the configuration file; return it and the contents of its sources."""
    for name, ids in (("first", range(50)), ("second", range(100, 150)), ("events", [1, 1, 2])):
        (tmp_path / name).mkdir()
        rows = pa.table({"id": pa.array(ids, pa.int64()), "name": [f"{name} {id}" for id in ids]})
        pq.write_table(rows, tmp_path / name / "0.parquet")
    path = tmp_path / "several.toml"
    path.write_text(FILE.format(directory=tmp_path))
    return path


def test_every_pipeline_of_a_file_runs_in_one_process(several: Path, tmp_path: Path, cli: Cli) -> None:
    ran = cli("run", several, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    books = lance.dataset(tmp_path / "books.lance").to_table().to_pylist()
    expected = {**{id: f"first {id}" for id in range(50)}, **{id: f"second {id}" for id in range(100, 150)}}
    assert {row["id"]: row["name"] for row in books} == expected
    assert len(books) == 100
    events = lance.dataset(tmp_path / "events.lance").to_table().column("id").to_pylist()
    assert sorted(events) == [1, 1, 2]
    assert all(f" query {several}:{name} --help" in ran.out for name in ("first", "second", "events"))
    asked = cli("query", f"{several}:second", "--key", "120", "--format", "json")
    assert [row["name"] for row in json.loads(asked.out)] == ["second 120"]
    again = cli("run", several, "--once")
    assert (again.code, again.out.count("0: the source holds nothing new")) == (0, 3)


def test_pipelines_that_get_in_each_others_way_are_refused_before_anything_is_written(
    several: Path, tmp_path: Path, cli: Cli, tree: Tree
) -> None:
    same = several.read_text().replace("second.checkpoint", "books.lance.checkpoint")
    several.write_text(same)
    before = tree(tmp_path)
    ran = cli("run", several, "--once")
    assert (ran.code, tree(tmp_path)) == (2, before)
    checkpoint = f"{tmp_path}/books.lance.checkpoint"
    assert ran.error_lines == [
        f"memwal: two pipelines have the same sink.checkpoint, {checkpoint}; give each pipeline its own"
    ]
    unnamed = cli("status", several)
    assert unnamed.code == 2
    assert f"choose one: {several}:first, {several}:second, {several}:events" in unnamed.error_lines[0]
