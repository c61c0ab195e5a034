"""Fixtures of the house rules: the files of the checkout and the syntax trees of the four packages."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("ingest", "memtable", "wal", "flush")


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the checkout, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]


def _parsed(pattern: str) -> list[Source]:
    paths = sorted(path for path in ROOT.glob(pattern) if "__pycache__" not in path.parts)
    texts = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]
    return [Source(name, text, ast.parse(text, name)) for name, text in texts]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Return every Python file of the four packages."""
    found = [source for package in PACKAGES for source in _parsed(f"{package}/**/*.py")]
    assert {source.package for source in found} == set(PACKAGES)
    return found


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Return every text file by name: those that git tracks or would add, and all files where git is not available."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    hidden = {".git", ".venv", "__pycache__", "data", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"}
    names = listed.stdout.splitlines() or [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if path.is_file() and not hidden & set(path.relative_to(ROOT).parts)
    ]
    found = {}
    for name in names:
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content and not name.endswith(".binpb"):  # a region manifest need not hold a zero byte
            found[name] = content.decode("utf-8")
    assert "pyproject.toml" in found
    return found
