"""End a `memwal run` by SIGTERM inside micro-batches and start it again, then compare the table.

`python -m tests.stops --stops 10 --records 600000` runs a broker with one topic and one plain `memwal run`
with its own child daemon. Whenever the run has begun a new micro-batch it is ended within a second, which stops the
query in the middle of it; a last `memwal run --once` reads the rest. `--append` uses a table without a key. Exit code
1: a record is missing, doubled or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import numpy as np

from tests.chaos import LONGEST, Kept
from tests.conftest import ROOT, environment, toml, wait_until
from tests.kafka_server import KafkaServer, Record, jars

PARTITIONS, REGIONS = 4, 4
COLUMNS = {"id": "int64", "name": "string", "price": "int64"}
_WITHIN = 1.0
"""Seconds after the start of a micro-batch within which the run is ended."""


def record(id: int) -> dict[str, Any]:
    """Return a record that is produced, and must be in the table."""
    return {"id": id, "name": f"row {id}", "price": 7 * id}


class Stops:
    """One topic with `records` records, and the pipeline into a table below `directory`."""

    def __init__(self, directory: Path, kafka: KafkaServer, records: int, *, append: bool, part: int) -> None:
        """`part`: records of a micro-batch."""
        self.directory, self.kafka, self.records = directory, kafka, records
        self.topic, self.uri = f"stops-{directory.name}", str(directory / "stops.lance")
        self.checkpoint, self.config = directory / "checkpoint", directory / "stops.toml"
        self.config.write_text(toml(self._sections(append, part)))
        kafka.create_topic(self.topic, partitions=PARTITIONS)
        words = [sys.executable, "-m", "memwal.ingest.cli.app", "run", str(self.config)]
        self.run = Kept(words, environment(), directory / "run.log")

    def _sections(self, append: bool, part: int) -> dict[str, dict[str, Any]]:
        key = {"append_only": True} if append else {"key": ["id"]}
        return {
            "table": {"uri": self.uri, "columns": COLUMNS, **key},
            "regions": {"count": REGIONS},
            "sink": {"checkpoint": str(self.checkpoint)},
            "source": {
                "format": "kafka",
                "brokers": self.kafka.brokers,
                "topics": [self.topic],
                "max_offsets_per_trigger": part,
                "spark": {"spark.jars": ",".join(map(str, jars("connector")))},
            },
        }

    def produce(self) -> None:
        """Produce every record."""
        rows = map(record, range(self.records))
        self.kafka.produce(self.topic, [Record(json.dumps(row).encode(), str(row["id"]).encode()) for row in rows])

    def stop(self, after: float) -> int:
        """Start the run, end it `after` seconds into a micro-batch that no run has begun before; return its number."""
        before, process = self._begun(), self.run.start()
        wait_until(lambda: self._begun() > before or process.poll() is not None, LONGEST, 0.005)
        time.sleep(after)
        begun = self._begun()
        self.run.close()
        assert process.returncode == 0, f"the run ended by itself: {self.run.log.read_text()[-2000:]}"
        return begun

    def finished(self) -> int:
        """Return the number of the newest micro-batch that Spark counts as done; -1 for none."""
        return self._newest("commits")

    def drain(self) -> None:
        """Let a last `memwal run --once` read the rest. Raises: AssertionError if it fails."""
        words = [*self.run.command, "--once"]
        ended = subprocess.run(words, env=self.run.env, capture_output=True, text=True, timeout=LONGEST)
        assert ended.returncode == 0, f"the last run: exit code {ended.returncode}: {ended.stderr.strip()}"

    def check(self) -> int:
        """Compare the base table with the produced records; return its number of rows. Raises: AssertionError."""
        stored = lance.dataset(self.uri).to_table(columns=list(COLUMNS))
        ids, counts = np.unique(stored["id"].to_numpy(), return_counts=True)
        missing, doubled = np.setdiff1d(np.arange(self.records), ids), ids[counts > 1]
        wrong = [row for row in stored.to_pylist() if row != record(row["id"])]
        if len(missing) or len(doubled) or wrong or stored.num_rows != self.records:
            raise AssertionError(
                f"of {self.records:,} records {len(missing):,} are missing, {len(doubled):,} doubled, {len(wrong):,} "
                f"wrong; such as {[*missing[:2].tolist(), *doubled[:2].tolist(), *wrong[:2]]}"
            )
        return self.records

    def close(self) -> None:
        """End the run."""
        self.run.close(5.0)

    def _begun(self) -> int:
        return self._newest("offsets")

    def _newest(self, notes: str) -> int:
        return max((int(each.name) for each in (self.checkpoint / notes).glob("[0-9]*")), default=-1)


def stopped(scene: Stops, stops: int, chance: random.Random, say: Callable[[str], None]) -> int:
    """Stop and start `stops` times; return how many stops fell into a micro-batch."""
    inside = 0
    for number in range(1, stops + 1):
        after = chance.uniform(0.0, _WITHIN)
        begun = scene.stop(after)
        unfinished = scene.finished() < begun
        inside += unfinished
        where = "inside" if unfinished else "behind"
        say(f"stop {number} of {stops}: {where} micro-batch {begun}, {after:.2f} s after its begin")
    return inside


def main() -> int:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--records", type=int, default=600_000)
    parser.add_argument("--part", type=int, help="records of a micro-batch; by default the stops take half of all")
    parser.add_argument("--append", action="store_true", help="a table without a key")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.chdir(ROOT)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memwal-stops-")))
        kafka = stack.enter_context(KafkaServer.started(directory / "kafka"))
        part = given.part or given.records // (2 * given.stops)
        scene = Stops(directory, kafka, given.records, append=given.append, part=part)
        stack.callback(scene.close)
        began = time.monotonic()
        scene.produce()
        inside = stopped(scene, given.stops, random.Random(given.seed), print)
        scene.drain()
        try:
            rows = scene.check()
        except AssertionError as error:
            print(error)
            return 1
        print(f"{rows:,} rows as expected, {inside} of {given.stops} stops inside, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
