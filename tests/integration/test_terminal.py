"""What commands print on a terminal of 80 columns: golden pictures of a table with the 19 columns of real flights."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from tests.support.golden import golden

FLIGHTS = Path(__file__).parents[2] / "configs" / "tutorial" / "flights.parquet"
KEY = ["year", "month", "day", "carrier", "flight", "origin"]
WIDTH = 80
ROWS = ("--limit", "4")
COMMANDS = {
    "query": ("query", *ROWS),
    "query_times": ("query", *ROWS, "--columns", "time_hour,tailnum,carrier,flight,origin,distance,air_time,dest"),
    "query_none": ("query", "--filter", "month = 13"),
    "query_vertical": ("query", "--limit", "1", "-x"),
    "sql": ("sql", "select * from table order by flight, origin", *ROWS),
    "sql_none": ("sql", "select * from table where month = 13"),
    "status": ("status",),
    "tail": ("tail", *ROWS),
    "tail_none": ("tail", "--since", "latest"),
    "log": ("log",),
    "log_limited": ("log", "--limit", "1"),
}
CHANGING = (
    (re.compile(r"memwal-\w{8}"), "memwal-DIRECTRY"),
    (re.compile(r'(?<="table": ")[0-9a-f]{32}'), "0123456789abcdef" * 2),
    (re.compile(r"\d{4}-\d\d-\d\d(?=, )"), "2000-01-01"),
    (re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d(?!\+)"), "01-01 00:00:00"),
    (re.compile(r"\d\.\d kB"), "1.0 kB"),
)
"""Values that differ between two runs, with replacements of equal length."""


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    rows = pq.read_table(FLIGHTS).slice(0, 40)
    return rows.set_column(18, "time_hour", rows["time_hour"].cast(pa.timestamp("us", "UTC")))


@pytest.fixture(scope="module")
def config(flights: pa.Table) -> Iterator[Path]:
    """The configuration of a table in a directory whose name has always the same length."""
    place = Path(tempfile.mkdtemp(prefix="memwal-", dir="/tmp"))
    schema = pa.schema([field.with_nullable(field.name not in KEY) for field in flights.schema])
    with memwal.open(place / "t.lance", schema=schema, key=KEY, regions=2) as table:
        table.put(flights.slice(0, 30))
        table.flush()
        table.commit()
        table.put(flights.slice(20))
        table.flush()
    file = place / "t.toml"
    file.write_text(f'[table]\nuri = "{place}/t.lance"\nkey = {KEY}\n')
    yield file
    shutil.rmtree(place)


def screen(config: Path, *words: str, width: int = WIDTH) -> list[str]:
    """Run a command under a terminal of `width` columns; return the lines it prints, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-m", "memwal.ingest.cli.app", words[0], str(config), *words[1:]]
    streams = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, env=environ | {"TERM": "xterm"}, **streams) as process:  # type: ignore[call-overload]
        os.close(theirs)
        printed = b""
        while part := read(ours):
            printed += part
        os.close(ours)
        assert process.wait(60) == 0, printed
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode()).replace("\r\n", "\n")
    return [line.rstrip() for line in text.splitlines()]


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # Linux, when the last writer has closed the terminal
        return b""


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_broken_at_80_columns(name: str, config: Path, flights: pa.Table) -> None:
    lines = screen(config, *COMMANDS[name])
    assert max(map(len, lines)) <= WIDTH
    assert not any("…" in line for line in lines if not line.lstrip().startswith("…"))
    text = "\n".join(lines) + "\n"
    for pattern, constant in CHANGING:
        text = pattern.sub(lambda found, constant=constant: constant, text)
    assert text == golden(f"terminal/{name}.txt", text).decode()
    if name in ("query", "sql", "query_times", "query_none", "sql_none", "tail", "tail_none"):
        rows_are_whole(lines, flights, COMMANDS[name])
    if name == "log":
        assert words(lines) >= set(flights.column_names)


def words(lines: list[str]) -> set[str]:
    return {word.strip(",;()") for line in lines for word in line.split()}


def rows_are_whole(lines: list[str], flights: pa.Table, command: tuple[str, ...]) -> None:
    """Every column is printed or named, and every printed row is a row of the table."""
    rule = next(at for at, line in enumerate(lines) if "───" in line)
    header, end = lines[rule - 1].split(), lines.index("", rule)
    own = ["_change", "_position"] if command[0] == "tail" else []
    asked = command[-1].split(",") if "--columns" in command else flights.column_names
    note = " ".join(lines[end + 1 :])
    left_out = re.search(r"not shown: (.*?) \(", note)
    assert header + (left_out[1].split(", ") if left_out else []) == own + asked
    assert re.match(r"(\d+) rows?\b", note)[1] == str(end - rule - 1)  # type: ignore[index]
    shown = flights.select(header[len(own) :])
    values = [" ".join("null" if value is None else str(value) for value in row.values()) for row in shown.to_pylist()]
    for line in lines[rule + 1 : end]:
        assert " ".join(line.split()[len(own) :]) in values


@pytest.mark.parametrize("width", [20, 40, 60, 100, 200])
def test_nothing_is_broken_at_other_widths(width: int, config: Path, flights: pa.Table) -> None:
    lines = screen(config, "query", *ROWS, width=width)
    assert max(map(len, lines)) <= width
    rows_are_whole(lines, flights, ("query", *ROWS))
