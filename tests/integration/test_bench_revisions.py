"""The benchmark of two revisions runs; a tree and its newest commit find the same rows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a repository with one commit of the current package."""
    at = tmp_path / "checkout"
    at.mkdir()
    shutil.copytree(ROOT / "memwal", at / "memwal", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("ingest", "memtable", "wal", "flush", "bench"):
        shutil.copytree(ROOT / package, at / package, ignore=shutil.ignore_patterns("__pycache__"))
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for command in (["init", "--quiet"], ["add", "--all"], [*who, "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *command], cwd=at, check=True, capture_output=True)
    return at


def measured(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.revisions", *arguments, "--workdir", str(checkout / "build")]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_a_tree_beside_its_newest_commit(checkout: Path) -> None:
    ran = measured(checkout, "HEAD", "put_durable", "--smoke", "--rounds", "2")
    assert ran.returncode == 0, ran.stderr
    names = [line.split("  ")[0] for line in ran.stdout.splitlines()]
    assert names == ["put_durable, memwal, default", "put_durable, memwal, arrow format"]


def test_a_revision_that_is_not_there_is_told_in_one_line(checkout: Path) -> None:
    ran = measured(checkout, "no-such-revision")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.splitlines() == [
        "bench: no tree of revision 'no-such-revision': fatal: invalid reference: no-such-revision"
    ]
