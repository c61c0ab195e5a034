"""Bad input gives one line on standard error that names the field and the fix, exit code 2, and writes nothing.

`unit/test_ingest_settings` has the mistakes in a configuration, `unit/test_ingest_source` the files that do not fit,
`integration/test_pipeline` what only a run finds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

COMMANDS = ("run", "serve", "init", "query", "status")


@pytest.fixture
def refused(cli: Callable[..., Any], tmp_path: Path, tree: Callable[[Path], dict[str, int]]) -> Callable[..., str]:
    """Return a function that runs a command, asserts that it is refused, and returns its line of output."""

    def run(*arguments: str | Path) -> str:
        before = tree(tmp_path)
        ran = cli(*arguments, cwd=tmp_path)
        assert (ran.code, ran.out) == (2, ""), ran.err
        (line,) = ran.error_lines
        assert line.startswith("memwal: ")
        assert tree(tmp_path) == before
        return str(line)

    return run


def test_a_bad_configuration_stops_every_command(
    small_config: Callable[..., Path], refused: Callable[..., str]
) -> None:
    path = small_config(table={"key": ["naem"]})
    for command in COMMANDS:
        line = refused(command, path)
        for name in (str(path), "[table]", "key", "'naem'", "'name'"):
            assert name in line


def test_a_table_path_that_is_no_lance_table(
    small_config: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    photos, notes, source = tmp_path / "photos", tmp_path / "notes.txt", tmp_path / "in"
    photos.mkdir()
    source.mkdir()
    (photos / "cat.jpg").write_bytes(b"meow")
    notes.write_text("buy milk")
    for path in (photos, notes):
        written = small_config(table={"uri": str(path)}, source={"format": "json", "path": str(source)})
        for command in COMMANDS:
            line = refused(command, written)
            assert str(path) in line
            assert "uri" in line or "table" in line


def test_a_configuration_that_contradicts_the_table(
    small_config: Callable[..., Path], cli: Callable[..., Any], refused: Callable[..., str], uri: str
) -> None:
    assert cli("init", small_config()).code == 0
    line = refused("init", small_config(table={"key": ["name"]}))
    for name in ("key", "name", "id"):
        assert name in line
    columns = {"id": "int64", "price": "string"}
    assert "columns.price" in refused("init", small_config(table={"columns": columns, "indexes": {}}))
    assert lance.dataset(uri).count_rows() == 0


@pytest.mark.parametrize("setting", ["port", "http_port"])
def test_a_port_in_use(small_config: Callable[..., Path], refused: Callable[..., str], setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("serve", small_config(daemon={setting: port}))
    assert setting in line
    assert str(port) in line
