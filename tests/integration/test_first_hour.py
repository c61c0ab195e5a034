"""What a new user types first: a configuration from a file, a table from rows, SQL in a shell, rows in a terminal."""

from __future__ import annotations

import datetime
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from rich.console import Console

import memwal
from memwal.ingest.cli.print import RowTables
from tests.conftest import Ran
from tests.messages import raises

Cli = Callable[..., Ran]
PRODUCTS = pa.table(
    {
        "sku": ["a1", "a2", "a3"],
        "title": ["a red bicycle for children", "a blue lamp with a cord", "a table made of green wood"],
        "price": [1.5, 2.5, 3.5],
        "made": pa.array([datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 2, 2)]),
    }
)


def written(at: Path, form: str) -> Path:
    """Write PRODUCTS in a format; return the file."""
    folder = at / "files"
    folder.mkdir()
    file = folder / f"products.{form}"
    match form:
        case "parquet":
            pyarrow.parquet.write_table(PRODUCTS, file)
        case "arrow":
            pyarrow.feather.write_feather(PRODUCTS, file, compression="uncompressed")
        case "csv":
            pyarrow.csv.write_csv(PRODUCTS, file)
        case "ndjson":
            file.write_text("".join(json.dumps(row, default=str) + "\n" for row in PRODUCTS.to_pylist()))
        case _:
            lance.write_dataset(PRODUCTS, file)
    return file


@pytest.mark.parametrize("form", ["parquet", "arrow", "csv", "ndjson", "lance"])
def test_a_proposed_configuration_fits_the_file(form: str, tmp_path: Path, cli: Cli) -> None:
    file, config = written(tmp_path, form), tmp_path / "products.toml"
    ran = cli("config", "new", config, "--from", file, cwd=tmp_path)
    assert ran.code == 0
    assert "4 columns, from 3 rows" in ran.out
    text = config.read_text()
    assert 'key = ["sku"]' in text
    assert 'title = "fts"' in text
    assert 'made = "btree"' in text
    assert cli("init", config, cwd=tmp_path).code == 0
    if form != "lance":
        assert cli("load", config, file, cwd=tmp_path).code == 0
    asked = cli("sql", config, "select count(*) as n, max(price) as most from table", "--format", "csv", cwd=tmp_path)
    assert asked.out.splitlines()[1] == "3,3.5"
    again = cli("config", "new", config, "--from", file, cwd=tmp_path)
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "the file exists" in again.err


def test_what_a_configuration_proposes(tmp_path: Path, cli: Cli) -> None:
    chance = np.random.default_rng(3)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(chance.normal(size=40).astype("f4")), 4)
    flights = {
        "carrier": ["UA", "UA", "AA", "AA"] * 2 + ["DL", "DL"],
        "flight": [1, 2] * 5,
        "day": [1, 1, 1, 1, 2, 2, 2, 2, 1, 1],
        "delay": [None, *range(9)],
        "embedding": vectors,
        "a name": ["x"] * 10,
        "tags": [["x"]] * 10,
        "nothing": pa.nulls(10),
    }
    pyarrow.parquet.write_table(pa.table(flights), tmp_path / "flights.parquet")
    assert cli("config", "new", tmp_path / "f.toml", "--from", tmp_path / "flights.parquet").code == 0
    text = (tmp_path / "f.toml").read_text()
    assert 'key = ["carrier", "flight", "day"]' in text
    assert 'embedding = "vector[4]"' in text
    assert 'embedding = { type = "ivf_pq", metric = "cosine" }' in text
    assert '"a name" = "string"' in text
    assert "# tags: its type list<element: string> has no name here" in text
    assert 'nothing = "string"' in text
    same = pa.table({"a": ["x", "x"], "b": [1.5, 2.5]})
    pyarrow.parquet.write_table(same, tmp_path / "same.parquet")
    assert cli("config", "new", tmp_path / "s.toml", "--from", tmp_path / "same.parquet").code == 0
    assert "append_only = true" in (tmp_path / "s.toml").read_text()


@pytest.mark.parametrize("text", ["", "{]\n", None])
def test_a_file_that_shows_no_columns(text: str | None, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "x.ndjson"
    if text is not None:
        file.write_text(text)
    ran = cli("config", "new", tmp_path / "c.toml", "--from", file)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "x.ndjson" in ran.err
    assert not (tmp_path / "c.toml").exists()


# ---- a table from rows ---------------------------------------------------------------------------------------------


def test_rows_create_a_table(tmp_path: Path) -> None:
    rows = [{"id": 1, "text": "a", "v": [1, 2.5]}, {"id": 2, "text": None, "v": [3, 4]}]
    with memwal.open(tmp_path / "t.lance", data=rows, key="id") as table:
        assert table.schema.field("v").type == pa.list_(pa.float32(), 2)
        assert table.search([3, 4]).limit(1).to_list()[0]["id"] == 2
    with memwal.open(tmp_path / "t.lance", data=[{"id": 3, "text": "c", "v": [0, 0]}]) as table:
        assert table.count() == 3
    frame = pa.Table.from_pylist(rows).to_pandas()
    with memwal.open(tmp_path / "f.lance", data=frame, key="id", indexes={"text": "fts"}) as table:
        assert table.to_pandas()["id"].tolist() == [1, 2]


def test_rows_that_create_no_table(tmp_path: Path) -> None:
    for data, how in (
        ([{"id": 1, "n": None}], {"key": "id"}),
        ([{"id": 1}], {}),
        (5, {"key": "id"}),
        ([{"id": 1}], {"key": "id", "read_only": True}),
    ):
        with raises(memwal.Invalid):
            memwal.open(tmp_path / "t.lance", data=data, **how)
        assert not (tmp_path / "t.lance").exists()


# ---- rows in a terminal --------------------------------------------------------------------------------------------


def printed(rows: pa.Table, width: int, *, vertical: bool = False) -> tuple[list[str], RowTables]:
    screen = io.StringIO()
    tables = RowTables(Console(file=screen, width=width, emoji=False), vertical=vertical)
    tables.print(rows)
    return screen.getvalue().splitlines(), tables


@pytest.mark.parametrize("width", [30, 80, 120, 400])
def test_no_number_and_no_name_is_cut(width: int) -> None:
    rows = pa.table(
        {
            "identifier": [12345678901234567, 2],
            "text": ["word " * 20, "short"],
            **{f"measure_{n}": [n * 1234567.25, -1.0] for n in range(16)},
            "last": ["z", "y"],
        }
    )
    lines, tables = printed(rows, width)
    assert max(map(len, lines)) <= width
    shown = [name for name in rows.column_names if name not in tables.left_out]
    assert shown == rows.column_names[: len(shown)]
    assert (tables.left_out == []) == (width == 400)
    header, *body = [line.split() for line in lines if line.strip() and "─" not in line]
    assert header == shown
    for row, cells in zip(rows.drop_columns(["text"]).to_pylist(), body, strict=True):
        numbers = [f"{value:.10g}" if isinstance(value, float) else str(value) for value in row.values()]
        found = [cell for cell in cells if cell[-1].isdigit() or cell in ("z", "y")]
        assert found == numbers[: len(found)]
        assert len(found) == len([name for name in shown if name != "text"])


def test_a_row_as_a_block() -> None:
    lines, tables = printed(pa.table({"id": [1, 2], "long_name": ["x" * 200, None]}), 80, vertical=True)
    assert lines == [
        "-[ row 1 ]--",
        "id        | 1",
        "long_name | " + "x" * 200,
        "-[ row 2 ]--",
        "id        | 2",
        "long_name | null",
    ]
    assert tables.left_out == ()


# ---- the shell -----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    with memwal.open(tmp_path / "t.lance", data=PRODUCTS, key="sku"):
        pass
    file = tmp_path / "t.toml"
    file.write_text(f'[table]\nuri = "{tmp_path}/t.lance"\nkey = ["sku"]\n')
    return file


def typed(config: Path, *lines: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memwal.ingest.cli.app", "sql", str(config)]
    return subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, timeout=120, check=False, **how
    )


def test_queries_are_answered_and_a_mistake_ends_nothing(config: Path) -> None:
    done = typed(
        config,
        "select sku",
        "from table order by price desc limit 1;",
        "select nope from table;",
        "\\x",
        "select title from table where sku = 'a1'",
        "",
        "\\d",
        "\\z",
        "\\?",
        "\\q",
        "select 1;",
    )
    assert done.returncode == 0
    assert "a3" in done.stdout
    assert "title | a red bicycle for children" in done.stdout
    assert "price  double" in done.stdout
    assert "1 row in " in done.stdout
    assert "Ctrl-D" in done.stdout
    assert done.stderr.count("\n") == 2
    assert "column 'nope' does not exist" in done.stderr
    assert "the command \\z is unknown" in done.stderr


def test_a_terminal_has_a_prompt_completion_and_a_history(config: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "memwal.ingest.cli.app", "sql", str(config)]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, close_fds=True) as process:
        os.close(theirs)
        seen = ""

        def until(text: str) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(ours, 4096).decode(errors="replace")
            seen = seen.partition(text)[2]

        until("memwal> ")
        os.write(ours, b"select ti\t from table where price > 3;\n")
        until("a table made of")
        until("memwal> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    os.close(ours)
    assert "select title" in (tmp_path / "memwal" / "sql_history").read_text()
