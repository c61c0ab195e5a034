"""Processes for seeds of the simulation, and the search for planted faults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.conftest import extent


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Run two processes. They are not forked, since a forked child would not have pylance's threads."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        yield processes


def expect_found(fault: str, search: Callable[[str, int], tuple[int, str] | None], found_by: Mapping[str, int]) -> None:
    """Assert that a seed finds a planted fault: the recorded one, or another one if a change has changed all runs.

    With `--long` the search begins at seed 1.
    """
    recorded = found_by.get(fault, 1)
    found = search(fault, extent(recorded, 1))
    assert found is not None, f"no seed finds {fault}"
    if extent(found[0] != recorded, False):
        warnings.warn(f"seed {recorded} does not find {fault} any more, seed {found[0]} does: FOUND_BY", stacklevel=2)
