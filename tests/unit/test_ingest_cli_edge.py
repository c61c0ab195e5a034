"""The edge of the program: whatever ends a command is one line and an exit code."""

from __future__ import annotations

import pytest

from ingest import cli


class PanicException(BaseException):
    """As pylance raises where its Rust code panics."""


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
