"""Only wal/panics.py names the exception type of a panic in a Rust library; all other modules call wal/panics.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAME, PLACE = '"PanicException"', "wal/panics.py"


def test_only_one_module_asks_for_a_panic_by_its_name(sources: Sequence[Any]) -> None:
    asking = {source.path for source in sources if NAME in source.text}
    assert {path for path in asking if not path.endswith(PLACE)} == set()
    assert any(path.endswith(PLACE) for path in asking)
