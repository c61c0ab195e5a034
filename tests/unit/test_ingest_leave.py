"""How processes of memwal end: at once, whatever threads still run, with everything written and exit handlers run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

RUNS_ON = """
import atexit, threading
threading.Thread(target=threading.Event().wait).start()  # not a daemon thread: Python waits for it at its end
atexit.register(print, "handlers ran", flush=False)
"""


def ended(arguments: list[str], cwd: Path) -> tuple[int, str]:
    """Run Python beside a thread that never ends; its exit code and output."""
    (cwd / "sitecustomize.py").write_text(RUNS_ON)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, env=environ, input="", capture_output=True, text=True, timeout=PATIENCE, check=False)
    return ran.returncode, ran.stdout


def test_with_handlers_and_output(tmp_path: Path) -> None:
    code, out = ended(["-c", "from memwal.ingest.leave import leave; print('said'); leave(3)"], tmp_path)
    assert (code, out.splitlines()) == (3, ["said", "handlers ran"])


def test_a_closed_output_hides_no_exit_code(tmp_path: Path) -> None:
    program = "import sys; from memwal.ingest.leave import leave; sys.stdout.close(); leave(3)"
    code, out = ended(["-c", program], tmp_path)
    assert (code, out) == (3, "")


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["cli.app", "--version"], 0), (["cli.app", "no-command"], 2), (["daemon"], 1)]
)
def test_the_command_and_a_child_daemon(arguments: list[str], expected: int, tmp_path: Path) -> None:
    code, out = ended(["-m", f"memwal.ingest.{arguments[0]}", *arguments[1:]], tmp_path)
    assert (code, out.splitlines()[-1]) == (expected, "handlers ran")
