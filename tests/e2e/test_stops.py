"""A run that is ended inside micro-batches and started again; `python -m tests.stops` is the long run."""

from __future__ import annotations

import random
from pathlib import Path

from tests.conftest import Cli, extent
from tests.kafka_server import KafkaServer
from tests.stops import Stops, stopped


def test_every_record_is_there_once_however_often_the_run_was_ended(
    kafka: KafkaServer, tmp_path: Path, cli: Cli
) -> None:
    scene = Stops(tmp_path, kafka, 40_000, append=True, part=10_000)
    try:
        scene.produce()
        stopped(scene, extent(1, 3), random.Random(3), print)
        ran = cli("run", scene.config, "--once")  # in this process, which is quicker than `scene.drain`
        assert ran.code == 0, ran.err
        assert scene.check() == 40_000
    finally:
        scene.close()
