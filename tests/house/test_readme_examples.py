"""The README's Python example is run as a reader would run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def test_the_embedded_example_prints_what_the_readme_says(texts: Mapping[str, str], root: Path, tmp_path: Path) -> None:
    example = texts["README.md"].partition("```python\n")[2].partition("```")[0]
    ran = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    prints = [line for line in example.splitlines() if line.strip().startswith("print(")]
    said = [line.rsplit("  # ", 1)[1] for line in prints]
    assert said
    assert ran.stdout.splitlines() == said
