"""Module tables: the README of each package and room names every module of it once, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGES = ("ingest", "flush", "wal", "memtable", "bench")
ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for package in PACKAGES[:4]
    for path in ROOT.glob(f"{package}/*/__init__.py")
)
_NAME = re.compile(r"`([a-z_0-9/]+)(?:\.py)?`")


def named_modules(text: str) -> list[str]:
    """The names in the column `module` or `modules` of the first table that has one."""
    names: list[str] = []
    column: int | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if column is not None and cells:
            names += _NAME.findall(cells[column])
        elif column is not None:
            break
        else:
            column = next((number for number, cell in enumerate(cells) if cell in ("module", "modules")), None)
    return names


@pytest.mark.parametrize("package", [*PACKAGES, *ROOMS])
def test_the_readme_of_a_package_names_each_of_its_modules_once(root: Path, package: str) -> None:
    paths = (path.relative_to(root / package) for path in (root / package).rglob("*.py"))
    modules = sorted(path.with_suffix("").as_posix() for path in paths if not path.stem.startswith("__"))
    assert sorted(named_modules((root / package / "README.md").read_text(encoding="utf-8"))) == modules


def test_the_rule_reads_the_column_of_modules_only() -> None:
    text = (
        "| error | what |\n|---|---|\n| `a` | |\n\n| | modules |\n|---|---|\n| `b` | `c.py`, `r/d` (`E`) |\n\n| `f` |\n"
    )
    assert named_modules(text) == ["c", "r/d"]
