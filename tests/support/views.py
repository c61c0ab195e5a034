"""The views that reads hold."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest


def within(seconds: float, met: Callable[[], bool]) -> bool:
    """Return whether `met` returns True within `seconds`. Unreachable objects are collected before each call."""
    until = time.monotonic() + seconds
    while not met() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return met()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Collect weak references to the views that reads hold."""
    from memwal.ingest.engine.read.base import BaseReads

    references: list[weakref.ref[Any]] = []
    through = BaseReads.__init__

    def remembered(self: BaseReads, *args: Any) -> None:
        through(self, *args)
        references.append(weakref.ref(self))

    monkeypatch.setattr(BaseReads, "__init__", remembered)
    return references
