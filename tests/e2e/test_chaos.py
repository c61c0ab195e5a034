"""Flights from Kafka through two daemons while processes are killed; `python -m tests.chaos` is the long run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import Scene, wreck
from tests.conftest import extent
from tests.flights import Flights
from tests.kafka_server import KafkaServer
from tests.s3_place import on_s3


@pytest.fixture
def scene(kafka: KafkaServer, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """Return a function that creates a scene of the first flights; its processes end with the test."""
    made: list[Scene] = []

    def make(**options: Any) -> Scene:
        made.append(Scene(tmp_path, kafka, Flights(most=1000), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_every_flight_is_there_as_it_was_told_last_whoever_was_killed(scene: Callable[..., Scene]) -> None:
    flights = scene(append=False, master="local-cluster[2,1,1024]")
    flights.produce()
    flights.begin_clients()
    # The first three kills of this seed: an executor, a daemon, the driver.
    wreck(flights, extent(3, 6), 3.5, random.Random(89), print)
    flights.drain()
    assert flights.check() == 990
    judged = flights.judged()
    print(judged)
    assert judged.operations > 100


@pytest.mark.long
def test_every_event_is_there_once_in_a_table_without_a_key(scene: Callable[..., Scene]) -> None:
    events = scene(append=True, master="local[2]")
    events.produce()
    wreck(events, 3, 5.0, random.Random(2), print)
    events.drain()
    assert events.check() == 3000


@pytest.mark.long
def test_the_same_with_the_table_on_s3_while_one_request_in_thirty_fails(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    with on_s3(tmp_path) as place:
        flights = scene(append=False, master="local[2]", place=place)
        place.hurt(1 / 30)
        flights.produce()
        wreck(flights, 2, 4.0, random.Random(3), print)
        flights.drain()
        assert flights.check() == 990
        assert place.failed().total() > 0
