"""Processes of the soak: broker, S3 behind a proxy with faults, two daemons, `memwal run`, clients; tiny limits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight

from tests.chaos import Kept, Pipeline, Sections
from tests.cluster import ask
from tests.conftest import ROOT, environment, small_sections
from tests.kafka_server import KafkaServer
from tests.s3_place import BUCKET, Place
from tests.soak.samples import Sample, java_below, of_process
from tests.soak.stream import Stream

MASTER, PART, WRITERS = "local-cluster[1,1,1024]", 1000, 2
PATIENCE = 300.0
"""Seconds within which a command ends."""
KEPT = 90
"""Seconds for which changes can be read again. All retention times of the run are about as long."""
TINY: Sections = {
    "table": {"cache_max": "64MiB"},
    "memtable": {"rows_max": 400, "entries_max": 40, "age_max": "20s", "vector_train_rows": 256},
    "flush": {"cache_max": "32MiB"},
    "commit": {
        "interval": "10s",
        "ssts_max": 4,
        "optimize_interval": "5s",
        "optimize_segments": 4,
        "compact_interval": "5s",
        "compact_fragments": 4,
    },
    "gc": {
        "interval": "10s",
        "wal_age_min": "20s",
        "sst_age_min": "20s",
        "manifest_age_min": "20s",
        "changes_age_min": f"{KEPT}s",
        "versions_age_min": "60s",
        "versions_min": 3,
        "versions_interval": "10s",
    },
    "source": {"trigger": "1s"},
    "log": {"level": "info"},
}
"""Limits of a real table are a hundred times larger, or more. `versions_age_min` is longer than any stop of a
daemon."""


class Scene(Pipeline):
    """All processes of a run; `place` is on S3 behind a proxy."""

    PROGRAM = "tests.soak.command"

    def __init__(self, directory: Path, kafka: KafkaServer, place: Place, rate: float, seed: int) -> None:
        """`rate`: records per second."""
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        sections = small_sections(place.uri)
        del sections["table"]["uri"]
        sections = {name: {**sections.get(name, {}), **TINY.get(name, {})} for name in {**sections, **TINY}}
        super().__init__(directory, kafka, place, sections, master=MASTER, part=PART)
        self.stream, self.seed = Stream(kafka, self.topic, rate, seed), seed
        self.clients = {name: self._client(name) for name in (*self.writers, "reader", "feed")}

    def sections(self, sections: Sections, master: str) -> Sections:
        whole = super().sections(sections, master)
        # The default is 100: the checkpoint reaches its final size sooner.
        whole["source"]["spark"]["spark.sql.streaming.minBatchesToRetain"] = "10"
        return whole

    @property
    def writers(self) -> list[str]:
        """Names of the writing clients."""
        return [f"writer-{number}" for number in range(WRITERS)]

    @property
    def objects(self) -> Path:
        """The S3 server's directory with the objects of the table's bucket."""
        return self.directory / "s3" / "objects" / BUCKET

    def journal(self, client: str) -> Path:
        """Return the file of a client's notes."""
        return self.directory / f"{client}.jsonl"

    def kept(self) -> dict[str, Kept]:
        """Return all processes that are restarted when they end, by name."""
        return {"daemon 0": self.daemons[0], "daemon 1": self.daemons[1], "run": self.run, **self.clients}

    def look(self) -> None:
        """Start every process that is not running."""
        for each in self.kept().values():
            each.look()

    def close(self) -> None:
        """End every process."""
        for each in reversed(self.kept().values()):
            each.close(5.0)

    def samples(self, at: float) -> Iterator[Sample]:
        """Sample every process at time `at`."""
        for name, kept in self.kept().items():
            if (process := kept.process) is not None:
                yield from of_process(at, name, kept.starts, process.pid)
        for name, pid in java_below(self.run.below()):
            yield from of_process(at, name, pid, pid)

    def epochs(self) -> dict[str, int]:
        """Return the epoch of each region that a daemon reports."""
        found: dict[str, int] = {}
        for endpoint in self.endpoints:
            told: dict[str, int] = {}
            with suppress(flight.FlightError, pa.ArrowException):  # the daemon is dead, stopped or starting
                told = ask(endpoint, "regions", 2.0)["regions"]
            found.update({region: max(epoch, found.get(region, 0)) for region, epoch in told.items()})
        return found

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `memwal WORDS… CONFIG` as an operator does."""
        command = [sys.executable, "-m", self.PROGRAM, *words]
        return subprocess.run(command, env=self.run.env, capture_output=True, text=True, timeout=PATIENCE)

    def kept_process(self, command: str, name: str, port: str = "") -> Kept:
        kept = super().kept_process(command, name, port)
        kept.env |= {"TMPDIR": str(self.temporary), "SPARK_LOCAL_DIRS": str(self.temporary), "LANCE_LOG": "critical"}
        return kept

    def _client(self, name: str) -> Kept:
        kind, endpoints = name.partition("-")[0], ",".join(self.endpoints)
        words = (kind, self.config, endpoints, self.journal(name), self.seed)
        env = environment({**self.place.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)})
        command = [sys.executable, "-m", "tests.soak.client", *map(str, words)]
        return Kept(command, env, self.directory / f"{name}.log")
