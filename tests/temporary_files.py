"""Put the tests' temporary files into memory if the machine has room.

A test of a local table waits longer for the disk than it computes, since memwal syncs what it acknowledges. No test
depends on the disk: tests of syncs watch the calls, and a killed process loses nothing that it wrote.
`TMPDIR`, `PYTEST_DEBUG_TEMPROOT` or pytest's `--basetemp` override the directory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_ROOM = 6 << 30
"""Bytes that must be free there. A test's files are deleted when it has passed; those of modules and of the session
stay, less than one GiB."""
_CHOSEN = "PYTEST_DEBUG_TEMPROOT", "TMPDIR"
_made = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the directory once: the processes of pytest-xdist inherit it."""
    if any(name in os.environ for name in _CHOSEN):
        return
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _ROOM:
        return
    config.stash[_made] = directory = tempfile.mkdtemp(prefix="memwal-tests-", dir=_MEMORY)
    os.environ.update(dict.fromkeys(_CHOSEN, directory))
    tempfile.tempdir = None  # computed again at the next use


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Delete the files, unless a test failed and its files may be inspected."""
    directory = session.config.stash.get(_made, None)
    if directory is not None and exitstatus != pytest.ExitCode.TESTS_FAILED:
        shutil.rmtree(directory, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the directory."""
    directory = config.stash.get(_made, None)
    if directory is not None and Path(directory).exists():
        terminalreporter.write_line(f"temporary files are in memory, remove them after a look: {directory}")
