"""The edge of the program: every error that ends a command gives one line and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memwal.ingest.cli import app as cli


class PanicException(BaseException):
    """The exception that pylance raises when its Rust code panics."""


def test_a_panic_of_lance_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def panics(**_: object) -> int:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(cli, "app", panics)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memwal: PanicException: called `Option::unwrap()` on a `None` value; ")
    assert "MEMWAL_TRACEBACK=1" in line


def test_a_fault_of_many_lines_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(**_: object) -> int:
        raise RuntimeError("odd\n\tat one.place\n\tat.another")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memwal: RuntimeError: odd; ")


TWO = """
[pipelines.a.table]
uri = "a.lance"
key = ["id"]
columns = {{ id = "int64" }}
[pipelines.b.table]
uri = "b.lance"
{}
columns = {{ id = "{}" }}
"""


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `memwal ARGUMENTS` in this process on 80 columns; return the exit code."""
    monkeypatch.setattr(sys, "argv", ["memwal", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_check_looks_at_every_pipeline_of_a_file_and_names_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console must not print `:a:` in `FILE:a:` as an emoji."""
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO.format('key = ["id"]', "int64"))
    assert typed(monkeypatch, "config", "check", "two.toml") == 0
    assert capsys.readouterr().out.splitlines() == ["two.toml:a: ok", "two.toml:b: ok"]
    Path("two.toml").write_text(TWO.format("", "int65").replace("a.lance", ""))
    assert typed(monkeypatch, "config", "check", "two.toml") == 2
    said = capsys.readouterr().err
    assert "two.toml:a: [table] uri is not set" in said
    assert "two.toml:b: [table] columns.id = 'int65'" in said
    Path("two.toml").write_text(TWO.format('key = ["id"]', "int64").replace("b.lance", "a.lance"))
    assert typed(monkeypatch, "config", "check", "two.toml") == 2
    assert "the same sink.checkpoint" in capsys.readouterr().err


def test_the_version_says_what_lies_below_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "--version") == 0
    said = capsys.readouterr().out
    assert said.startswith("memwal ")
    assert all(name in said for name in ("pylance ", "pyspark ", "Python "))


@pytest.mark.parametrize("names", [["serve"], ["run"], ["dlq", "show"], ["inspect"]])
def test_help_loses_nothing_on_80_columns(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *names, "--help") == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert ("source.spark" in said) == (names == ["serve"])
    assert ("PATH" if names == ["inspect"] else "CONFIG") in said
