"""Every kind of read at every level, after each step of random schedules (`tests.reads_world`)."""

from __future__ import annotations

import pytest

from tests.conftest import extent
from tests.reads_world import run_seed


@pytest.mark.parametrize("seed", range(1, extent(4, 40)))
def test_every_read_equals_the_oracle_whatever_happened_before(seed: int) -> None:
    run_seed(seed, 20)
