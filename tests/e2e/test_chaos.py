"""Flights from Kafka through two daemons while processes are killed, and everything at once on S3, a minute each;
`python -m tests.chaos` and `python -m tests.soak` do so at length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import Scene, wreck
from tests.flights import Flights
from tests.kafka_server import KafkaServer
from tests.soak.__main__ import options_of, soaked


@pytest.fixture
def scene(kafka: KafkaServer, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """Makes a scene of the first flights; its processes end with the test."""
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
    wreck(flights, 4, 5.0, random.Random(1), print)
    flights.drain()
    assert flights.check() == 990


def test_every_event_is_there_once_in_a_table_without_a_key(scene: Callable[..., Scene]) -> None:
    events = scene(append=True, master="local[2]")
    events.produce()
    wreck(events, 3, 5.0, random.Random(2), print)
    events.drain()
    assert events.check() == 3000


def test_a_soak_on_s3_of_a_minute_loses_nothing_and_leaves_nothing(kafka: KafkaServer, tmp_path: Path) -> None:
    soak, wrong = soaked(tmp_path, kafka, options_of(["--minutes", "0.7", "--kills-every", "10", "--seed", "3"]))
    assert wrong == []
    assert soak.hand.log
    assert soak.failed.total() > 0
