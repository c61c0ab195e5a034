"""Golden files: bytes and texts that must not change without a decision."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str, found: bytes | str) -> bytes:
    """Return the golden file `name`; with MEMWAL_REWRITE_GOLDEN=1, write `found` into it first. Read the difference
    before you commit it."""
    path = GOLDEN / name
    if os.environ.get("MEMWAL_REWRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(found.encode() if isinstance(found, str) else found)
    return path.read_bytes()
