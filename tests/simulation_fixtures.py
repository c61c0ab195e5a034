"""Fixtures: processes for seeds of the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Run two processes. They are not forked, since a forked child would not have pylance's threads."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        yield processes
