"""A journal of a client process: its lines survive the process, and the next process continues from them.

A line is one JSON object, written by one call: a killed process leaves complete lines, and at most a part of a last
one, which counts as not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Appends lines to a file. Thread safety. One thread."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            os.write(self._file, b"\n")

    def note(self, **line: Any) -> None:
        """Append a line."""
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file; nothing if it does not exist."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"}\n"):
                yield json.loads(line)


def last(path: Path, name: str) -> Any:
    """Return the value of `name` in the last line that has it; None if no line has it."""
    return next((line[name] for line in reversed(list(lines(path))) if name in line), None)
