"""The change feed of a table with random operations, read in pieces, compared with a dict."""

from __future__ import annotations

import pytest

from tests.change_world import ChangeWorld
from tests.conftest import extent


@pytest.mark.parametrize("seed", range(extent(3, 30)))
def test_every_change_of_every_key_once_and_in_order(uri: str, seed: int) -> None:
    world = ChangeWorld(uri, seed)
    try:
        for _ in range(4):
            world.live(25)
            world.check()
    finally:
        world.close()
