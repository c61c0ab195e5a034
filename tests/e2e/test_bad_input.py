"""Bad input gives one line on standard error that names the field and the fix, exit code 2, and writes nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

COLUMNS = {"package": "string", "version": "string", "size": "int64", "vector": "vector[4]"}


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a directory of Parquet files with three good rows and some replaced columns."""

    def write(name: str = "source", /, **columns: Any) -> Path:
        good = {
            "package": pa.array(["a", "b", "c"]),
            "version": pa.array(["1", "2", "3"]),
            "size": pa.array([1, 2, 3]),
            "vector": pa.array([[0.0] * 4, [1.0] * 4, [2.0] * 4], pa.list_(pa.float32(), 4)),
        }
        directory = tmp_path / name
        directory.mkdir()
        kept = {each: column for each, column in (good | columns).items() if column is not None}
        pq.write_table(pa.table(kept), directory / "rows-1.parquet")
        return directory

    return write


@pytest.fixture
def config(tmp_path: Path, small_config: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a configuration of `memwal run` over `source` with changed sections."""

    def write(files: Path, /, name: str = "config.toml", **changes: Any) -> Path:
        table = {"key": ["package"], "columns": COLUMNS, "indexes": {"vector": "ivf_pq"}} | changes.pop("table", {})
        read = {"format": "parquet", "path": str(files)} | changes.pop("source", {})
        return small_config(name, table=table, source=read, **changes)

    return write


@pytest.fixture
def refused(cli: Callable[..., Any], tmp_path: Path, tree: Callable[[Path], dict[str, int]]) -> Callable[..., str]:
    """Return a function that runs a command, asserts that it is refused, and returns its line of output."""

    def run(*arguments: str | Path, env: dict[str, str | None] | None = None) -> str:
        before = tree(tmp_path)
        ran = cli(*arguments, cwd=tmp_path, env=env)
        assert (ran.code, ran.out) == (2, ""), ran.err
        assert len(ran.error_lines) == 1, ran.err
        assert ran.error_lines[0].startswith("memwal: ")
        assert tree(tmp_path) == before
        return str(ran.error_lines[0])

    return run


# ---- found in the configuration ------------------------------------------------------------------------------------

BAD_CONFIGURATIONS: dict[str, tuple[dict[str, dict[str, Any]], tuple[str, ...]]] = {
    "missing key column": ({"table": {"key": ["packge"]}}, ("[table]", "key", "'packge'", "'package'")),
    "duplicate key column": ({"table": {"key": ["package", "package"]}}, ("[table]", "key", "'package'", "once")),
    "no key": ({"table": {"key": []}}, ("[table]", "key")),
    "key of a wrong type": ({"table": {"key": ["vector"]}}, ("[table]", "key", "'vector'")),
    "unknown type": ({"table": {"columns": COLUMNS | {"size": "integer"}}}, ("columns.size", "integer")),
    "unknown index": ({"table": {"indexes": {"vector": "ivfpq"}}}, ("indexes.vector", "ivf_pq")),
    "index on a wrong type": ({"table": {"indexes": {"size": "ivf_pq"}}}, ("indexes.size", "int64")),
    "unknown setting": ({"source": {"pth": "x"}}, ("[source]", "'pth'", "did you mean 'path'")),
    "unknown section": ({"sauce": {"path": "x"}}, ("[sauce]", "[source]")),
    "wrong type of a setting": ({"regions": {"count": "two"}}, ("[regions]", "count", "'two'", "whole number")),
    "no unit": ({"wal": {"linger_max": 50}}, ("[wal]", "linger_max", "unit")),
}


@pytest.mark.parametrize("case", BAD_CONFIGURATIONS)
def test_a_bad_configuration_stops_every_command(
    case: str, source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str]
) -> None:
    changes, named = BAD_CONFIGURATIONS[case]
    path = config(source(), **changes)
    for command in ("run", "init") if case == "missing key column" else ("run",):
        line = refused(command, path, *(["--once"] if command == "run" else []))
        assert str(path) in line
        for name in named:
            assert name in line


def test_a_configuration_that_cannot_be_read(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "missing.toml" in refused("run", tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text('[table]\nuri = "x\n')
    line = refused("run", broken)
    assert "broken.toml" in line
    assert "line 2" in line


def test_an_unknown_environment_variable_is_a_mistake_too(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str]
) -> None:
    line = refused("run", config(source()), env={"MEMWAL__SOURCE__PATHS": "x"})
    assert "MEMWAL__SOURCE__PATHS" in line
    assert "'path'" in line


# ---- found before Spark starts -------------------------------------------------------------------------------------


def test_an_unreadable_source_path(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    line = refused("run", config(tmp_path / "nowhere"), "--once")
    assert "source.path" in line
    assert str(tmp_path / "nowhere") in line
    line = refused("run", config(source(), source={"feed": str(tmp_path / "nothing")}), "--once")
    assert "source.feed" in line
    assert str(tmp_path / "nothing") in line


def test_a_file_that_is_no_parquet(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str]
) -> None:
    directory = source()
    (directory / "rows-2.parquet").write_text("these are no rows")
    line = refused("run", config(directory), "--once")
    assert "source.path" in line
    assert "rows-2.parquet" in line


BAD_FILES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "missing key column": ({"package": None}, ("'package'", "rows-1.parquet")),
    "missing column": ({"version": None}, ("'version'", "rows-1.parquet")),
    "wrong type": ({"size": pa.array(["big", "bigger", "biggest"])}, ("'size'", "string", "int64")),
    "wrong key type": ({"package": pa.array([1, 2, 3])}, ("'package'", "int64", "string")),
    "wrong vector width": (
        {"vector": pa.array([[0.0] * 5] * 3, pa.list_(pa.float32(), 5))},
        ("'vector'", "5", "4"),
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_do_not_fit_the_table(
    case: str, source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str], uri: str
) -> None:
    columns, named = BAD_FILES[case]
    line = refused("run", config(source(**columns)), "--once")
    for name in named:
        assert name in line
    assert not Path(uri).exists()


def test_a_null_key_that_the_footer_of_a_file_tells(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str], uri: str
) -> None:
    """integration/test_pipeline.py tests the null keys that only the rows show."""
    line = refused("run", config(source(package=pa.array(["a", None, "c"]))), "--once")
    assert "'package'" in line
    assert "null" in line
    assert not Path(uri).exists()


def test_a_table_path_that_is_no_lance_table(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"meow")
    (tmp_path / "notes.txt").write_text("buy milk")
    directory = source()
    for path in (photos, tmp_path / "notes.txt"):
        written = config(directory, table={"uri": str(path)})
        for command in ("run", "serve", "init", "query", "status"):
            line = refused(command, written)
            assert str(path) in line
            assert "uri" in line or "table" in line


def test_a_configuration_that_contradicts_the_table(
    source: Callable[..., Path],
    config: Callable[..., Path],
    cli: Callable[..., Any],
    refused: Callable[..., str],
    uri: str,
) -> None:
    directory = source()
    assert cli("init", config(directory)).code == 0
    line = refused("run", config(directory, table={"key": ["version"]}), "--once")
    assert "key" in line
    assert "version" in line
    assert "package" in line
    line = refused("run", config(directory, table={"columns": COLUMNS | {"size": "string"}, "indexes": {}}), "--once")
    assert "columns.size" in line
    assert lance.dataset(uri).count_rows() == 0


def test_a_port_in_use(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str], uri: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("serve", config(source(), daemon={"port": port}))
        assert "daemon.port" in line
        assert str(port) in line
        assert not Path(uri).exists()
        line = refused("serve", config(Path("source"), daemon={"http_port": port}))
        assert "http_port" in line
        assert str(port) in line
        assert not Path(uri).exists()


# ---- Java ----------------------------------------------------------------------------------------------------------


def test_a_missing_java_names_the_package_to_install(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str], tmp_path: Path, uri: str
) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    for environ in ({"PATH": str(empty), "JAVA_HOME": None}, {"JAVA_HOME": str(empty)}):
        line = refused("run", config(tmp_path / "source" if (tmp_path / "source").exists() else source()), env=environ)
        assert "Java 17" in line
        assert "openjdk-17" in line
    assert not Path(uri).exists()


def test_a_java_that_is_too_old_names_the_package_to_install(
    source: Callable[..., Path], config: Callable[..., Path], refused: Callable[..., str], tmp_path: Path, uri: str
) -> None:
    home = tmp_path / "java-11"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.20\" 2023-07-18' >&2\n")
    java.chmod(0o755)
    directory = source()
    for environ in (
        {"PATH": f"{java.parent}{os.pathsep}{os.environ['PATH']}", "JAVA_HOME": None},
        {"JAVA_HOME": str(home)},
    ):
        line = refused("run", config(directory), env=environ)
        assert "Java 17" in line
        assert "11" in line
        assert "openjdk-17" in line
    assert not Path(uri).exists()
