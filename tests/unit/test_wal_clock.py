"""Clocks, and generators of ids."""

from __future__ import annotations

import re

from memwal.wal import Ids, SystemClock, SystemIds
from tests.support.clock import FakeClock, SeededIds


def test_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(start=1000.0)
    assert (clock.now(), clock.monotonic()) == (1000.0, 0.0)
    clock.sleep(2.5)
    clock.advance(1.0)
    assert (clock.now(), clock.monotonic()) == (1003.5, 3.5)
    assert clock.slept == [2.5]


def test_system_clock_goes_forward() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    clock.sleep(0.001)
    assert clock.monotonic() >= before + 0.001
    assert clock.now() > 1_700_000_000


def test_one_seed_gives_one_sequence() -> None:
    def draw(ids: Ids) -> list[str]:
        return [ids.entry_id(), ids.token(), str(ids.uuid()), ids.entry_id()]

    assert draw(SeededIds(7)) == draw(SeededIds(7))
    assert draw(SeededIds(7)) != draw(SeededIds(8))


def test_ids_have_their_form_and_differ() -> None:
    for ids in (SeededIds(), SystemIds()):
        assert re.fullmatch("[0-9a-f]{32}", ids.entry_id())
        assert re.fullmatch("[0-9a-f]{8}", ids.token())
        assert ids.uuid().version == 4
        assert len({ids.entry_id() for _ in range(100)}) == 100
