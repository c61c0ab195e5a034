"""Processes of memwal can start without standard streams, and end at once although threads still run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

RUNS_ON = """
import atexit, threading
threading.Thread(target=threading.Event().wait).start()  # not a daemon thread: Python waits for it at its end
atexit.register(print, "handlers ran", flush=False)
"""


def ended(arguments: list[str], cwd: Path) -> tuple[int, str]:
    """Run Python with a thread that never ends; return the exit code and the output."""
    (cwd / "sitecustomize.py").write_text(RUNS_ON)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, env=environ, input="", capture_output=True, text=True, timeout=PATIENCE, check=False)
    return ran.returncode, ran.stdout


def test_with_handlers_and_output(tmp_path: Path) -> None:
    program = "from memwal.ingest.own_process import own_process; own_process(lambda: print('said') or 3)"
    code, out = ended(["-c", program], tmp_path)
    assert (code, out.splitlines()) == (3, ["said", "handlers ran"])


def test_an_output_that_was_closed_hides_no_exit_code(tmp_path: Path) -> None:
    program = "from memwal.ingest.own_process import own_process, sys; own_process(lambda: sys.stdout.close() or 3)"
    assert ended(["-c", program], tmp_path) == (3, "")


def test_a_command_imports_no_pandas(small_config: Callable[..., Path]) -> None:
    """It takes a third of the processor time of a short command."""
    command = [sys.executable, "-X", "importtime", "-m", "memwal.ingest.cli.app", "init", str(small_config())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert {"pyarrow.dataset", "lance"} <= imported
    assert "pandas.core" not in imported


@pytest.mark.parametrize(
    ("closed", "words", "expected"),
    [
        ("<&-", "--version", 0),
        (">&-", "config show no-file.toml", 2),
        ("2>&-", "config show no-file.toml", 2),
        ("<&- >&- 2>&-", "--version", 0),
    ],
)
def test_standard_streams_that_the_parent_closed(closed: str, words: str, expected: int, tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m memwal.ingest.cli.app {words} {closed}"
    ran = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == expected
    assert bool(ran.stdout) == (expected == 0 and closed in {"<&-", "2>&-"})
    assert bool(ran.stderr) == (expected == 2 and closed in {"<&-", ">&-"})


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["cli.app", "--version"], 0), (["cli.app", "no-command"], 2), (["service.daemon"], 1)]
)
def test_the_command_and_a_child_daemon(arguments: list[str], expected: int, tmp_path: Path) -> None:
    code, out = ended(["-m", f"memwal.ingest.{arguments[0]}", *arguments[1:]], tmp_path)
    assert (code, out.splitlines()[-1]) == (expected, "handlers ran")
