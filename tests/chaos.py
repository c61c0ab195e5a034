"""Stream flights from Kafka through two daemons into a table while processes are killed, then compare the table.

`python -m tests.chaos --kills 20` runs a broker, two daemons with four regions between them, and `memwal run` on Spark
with two executor processes, and kills one of these processes every few seconds; killed processes are restarted, as by a
supervisor. Beside the flights, clients put, delete and read rows of their own, and Porcupine judges their history
(`tests/histories`). `--append` uses a table that keeps every event, without these clients; `--flights FILE` other
flights than those of the first week; `--part` sets how many records a micro-batch reads. `--s3` puts the table on an S3
server, where each request takes `--s3-latency` milliseconds longer and `--s3-faults` per cent of them fail; Spark's
checkpoint stays on local disk, since Spark keeps none on S3 (`wal/store/README.md`). Exit code 1: a row is missing,
doubled or older than it should be, or the history is not linearizable.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import psutil

from memwal.flush import BaseTable, FlushError
from tests.cluster import spread
from tests.conftest import ROOT, environment, toml
from tests.flights import KEY, WEEK, Flights, in_order
from tests.histories.clients import Orders, keys_of
from tests.histories.judge import Judgement, expect_linearizable
from tests.kafka_server import KafkaServer, Record, jars
from tests.s3_place import Place, on_s3
from tests.spark_cluster import quick

Sections = dict[str, dict[str, Any]]
TOPIC, PARTITIONS, REGIONS = "topic", 4, 4
CLUSTER = "local-cluster[2,1,1024]"
"""Spark's master: two executors, each a separate process with one core."""
PART = 2000
"""Records that are produced at once, and read by one micro-batch."""
CLIENTS = {"year": 1, "month": 1, "day": 1, "carrier": "ZZ", "origin": "ZZZ"}
"""The key of the rows that clients put beside the flights, without the flight number."""
LONGEST = 1800.0
"""Seconds within which the whole run must end."""
_SHORTLY = 10.0
"""Seconds after the end of a process within which the processes that it started must end."""


@dataclass
class Kept:
    """A process that is restarted whenever it ends, until `close`."""

    command: Sequence[str]
    env: dict[str, str]
    log: Path
    starts: int = 0
    left: list[str] = field(default_factory=list)
    """Names of child processes that were still running `_SHORTLY` after it was closed."""
    ends: list[int] = field(default_factory=list)
    """Exit codes of lives that ended by other causes than `kill` and `close`."""
    process: subprocess.Popen[bytes] | None = None
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> None:
        """Start the process if it is not running, unless it was closed."""
        with self.lock:
            if self.process is not None and self.process.poll() is not None:
                self.ends.append(self.process.returncode)
                self.process = None
            if self.process is None and not self.closed:
                with self.log.open("ab") as out:
                    self.process = subprocess.Popen(
                        self.command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                    )
                self.starts += 1

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, also after a `close`."""
        self.closed = False
        self.look()
        assert self.process is not None
        return self.process

    def kill(self) -> None:
        """Kill the process only, not its children, which must detect it themselves."""
        with self.lock:
            if self.process is not None:
                self.process.kill()
                self.process.wait()
                self.process = None

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        with self.lock:
            if self.process is not None:
                self.process.send_signal(number)

    def executors(self) -> list[psutil.Process]:
        """Return Spark's executors below the process."""
        found = []
        for each in self.below():
            with suppress(psutil.NoSuchProcess):
                if any("CoarseGrainedExecutorBackend" in word for word in each.cmdline()):
                    found.append(each)
        return found

    def below(self) -> list[psutil.Process]:
        """Return all descendants of the process."""
        process = self.process
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(process.pid).children(recursive=True) if process is not None else []
        return []

    def close(self, patience: float = 60.0) -> int:
        """End the process by SIGTERM, and kill what is left of it; return its exit code, which is negative if it was
        killed after `patience` seconds.
        """
        with self.lock:
            self.closed = True
            if self.process is None:
                return 0
            below = self.below()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(patience)
                self.left += _ended(below, _SHORTLY)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                _ended(below, 0.0)
            code, self.process = self.process.returncode, None
            return code


def _ended(processes: Sequence[psutil.Process], within: float) -> list[str]:
    """Kill processes that do not end within some seconds; return their names."""
    ends, left = time.monotonic() + within, list[str]()
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            while each.status() != psutil.STATUS_ZOMBIE:  # not reaped if its parent has ended
                if time.monotonic() > ends:
                    left.append(each.name())
                    each.kill()
                    break
                time.sleep(0.05)
    return left


class Pipeline:
    """Two daemons and a `memwal run` from a topic into one table, below `directory`; `look` restarts ended
    processes."""

    PROGRAM = "memwal.ingest.cli.app"
    """The module of memwal's command."""

    def __init__(
        self, directory: Path, kafka: KafkaServer, place: Place, sections: Sections, *, master: str, part: int = PART
    ) -> None:
        """`sections`: of the configuration, in addition to those of the place, the source and the daemons. `part`:
        maximum number of records of a micro-batch.
        """
        self.directory, self.kafka, self.place, self.part = directory, kafka, place, part
        self.config, self.checkpoint = directory / "memwal.toml", directory / "checkpoint"
        self.topic, self.clustered = f"{TOPIC}-{directory.name}", not master.startswith("local[")
        self.endpoints = spread(2, REGIONS)
        self.config.write_text(toml(self.sections(sections, master)))
        kafka.create_topic(self.topic, partitions=PARTITIONS)
        self.daemons = [
            self.kept_process("serve", str(number), port=each) for number, each in enumerate(self.endpoints)
        ]
        self.run = self.kept_process("run", "run")

    def sections(self, sections: Sections, master: str) -> Sections:
        source = {
            "format": "kafka",
            "brokers": self.kafka.brokers,
            "topics": [self.topic],
            "max_offsets_per_trigger": self.part,
            "spark": {**quick(master), "spark.jars": ",".join(map(str, jars("connector")))},
        }
        ours: Sections = {
            "table": self.place.section,
            "regions": {"count": REGIONS},
            "daemon": {"endpoints": self.endpoints},
            "sink": {"checkpoint": str(self.checkpoint)},
            "source": source,
        }
        return {name: {**ours.get(name, {}), **sections.get(name, {})} for name in {**ours, **sections}}

    def kept_process(self, command: str, name: str, port: str = "") -> Kept:
        ports = {"MEMWAL__DAEMON__PORT": port.rpartition(":")[2]} if port else {}
        env = environment({**self.place.environ, **ports})
        words = [sys.executable, "-m", self.PROGRAM, command, str(self.config)]
        return Kept(words, env, self.directory / f"{command}-{name}.log")

    def look(self) -> None:
        """Start every process that is not running."""
        for each in (*self.daemons, self.run):
            each.look()

    def finish(self) -> None:
        """End the run, and let a last `memwal run --once` read and commit the rest."""
        self.run.close()
        words = [*self.run.command, "--once"]
        ended = subprocess.run(words, env=self.run.env, capture_output=True, text=True, timeout=LONGEST)
        if ended.returncode:
            raise AssertionError(f"the last run: exit code {ended.returncode}: {ended.stderr.strip()}")

    def close(self) -> None:
        """End every process."""
        for each in (self.run, *self.daemons):
            each.close(5.0)


class Scene(Pipeline):
    """A pipeline of flights."""

    def __init__(
        self,
        directory: Path,
        kafka: KafkaServer,
        flights: Flights,
        *,
        append: bool,
        master: str,
        part: int = PART,
        place: Place | None = None,
    ) -> None:
        self.flights, self.append = flights, append
        self.clients: Kept | None = None
        columns = {each.name: str(each.type) for each in flights.schema}
        key = {"append_only": True} if append else {"key": KEY}
        sections: Sections = {"table": {**key, "columns": columns}, "commit": {"interval": "2s"}}
        place = place or Place(str(directory / "flights.lance"))
        super().__init__(directory, kafka, place, sections, master=master, part=part)

    def produce(self) -> None:
        """Produce every event, a part at a time."""
        events = [each for each in self.flights.events() if each.value is not None or not self.append]
        for at in range(0, len(events), self.part):
            part = [Record(event.value, event.key) for event in events[at : at + self.part]]
            self.kafka.produce(self.topic, part)

    @property
    def history(self) -> Path:
        """The file of the clients' history."""
        return self.directory / "clients.jsonl"

    @property
    def recorded(self) -> int:
        """Bytes of the history so far; an operation has some 200."""
        return self.history.stat().st_size if self.history.exists() else 0

    def begin_clients(self, seed: int = 1) -> None:
        """Start clients that put, delete and read rows of their own, once the table exists; return when they are
        running."""
        ends = time.monotonic() + LONGEST
        while True:
            self.look()
            try:
                base = BaseTable.open(self.place.uri, dict(self.place.options))
                break
            except (FlushError, OSError, ValueError):
                if time.monotonic() > ends:
                    raise
                time.sleep(0.2)
        orders = Orders(
            history=str(self.history),
            uri=self.place.uri,
            endpoints=self.endpoints,
            regions=[str(region) for region in base.regions],
            keys=keys_of(base, 3, "flight", CLIENTS),
            kinds=["writer", "writer", "prober", "reader"],
            first=1,
            seed=seed,
            pause=0.1,
            options=dict(self.place.options),
            key="flight",
            column="distance",
            fixed=CLIENTS,
        )
        words = [sys.executable, "-m", "tests.histories.clients", str(orders)]
        self.clients = Kept(words, environment(), self.directory / "clients.log")
        while self.recorded < 20_000:
            self.clients.look()
            if time.monotonic() > ends or self.clients.starts > 1:
                raise AssertionError(f"the clients do not begin: {self.clients.log.read_text()}")
            self.look()
            time.sleep(0.1)

    def judged(self) -> Judgement:
        """Judge the history of the clients. Raises: NotLinearizable."""
        return expect_linearizable([self.history], pictures=self.directory)

    def drain(self) -> None:
        """End the clients, let a last run read the rest, and end the daemons."""
        if self.clients is not None and (code := self.clients.close(300.0)):
            raise AssertionError(f"the clients: exit code {code}: {self.clients.log.read_text()}")
        self.finish()
        for each in self.daemons:
            each.close()

    def check(self) -> int:
        """Compare the base table with the flights; return its number of rows."""
        table = lance.dataset(self.place.uri, storage_options=dict(self.place.options)).to_table()
        found = in_order([row for row in table.to_pylist() if row["year"] != CLIENTS["year"]])
        expected = in_order(self.flights.appended() if self.append else self.flights.arrived())
        if found != expected:
            raise AssertionError(difference(found, expected))
        return len(found)

    def close(self) -> None:
        """End every process."""
        if self.clients is not None:
            self.clients.close(5.0)
        super().close()


def difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """Describe the difference of two tables in a line."""
    have, want = (
        Counter(str(sorted(row.items(), key=lambda each: each[0])) for row in rows) for rows in (found, expected)
    )
    missing, more = want - have, have - want
    lines = [f"{missing.total()} rows are missing, {more.total()} should not be there"]
    return "; ".join([*lines, *list(missing)[:2], *list(more)[:2]])


def victims(scene: Pipeline) -> dict[str, Callable[[], None]]:
    """Return the processes that can be killed now, by name.

    The driver is included only once it has executors: if it were killed at every start, it would read nothing and have
    no executors.
    """
    found = {f"daemon {number}": daemon.kill for number, daemon in enumerate(scene.daemons)}
    for number, executor in enumerate(scene.run.executors()):
        found[f"executor {number}"] = executor.kill
    if len(found) > len(scene.daemons) or not scene.clustered:
        found["driver"] = scene.run.kill
    return found


def wreck(scene: Scene, kills: int, every: float, chance: random.Random, say: Callable[[str], None]) -> Counter[str]:
    """Kill one process after the other, `every` seconds on average; return how often each kind was killed."""
    killed: Counter[str] = Counter()
    ends = time.monotonic() + LONGEST
    while killed.total() < kills and time.monotonic() < ends:
        wait = time.monotonic() + chance.uniform(0.5, 1.5) * every
        while time.monotonic() < wait:
            scene.look()
            time.sleep(0.1)
        names = victims(scene)
        sort = chance.choice(sorted({name.split()[0] for name in names}))
        name = chance.choice(sorted(each for each in names if each.startswith(sort)))
        with suppress(psutil.NoSuchProcess):
            names[name]()
            killed[sort] += 1
            say(f"kill {killed.total()} of {kills}: {name}")
    scene.look()
    return killed


def main() -> int:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills, on average")
    parser.add_argument("--append", action="store_true", help="a table without a key")
    parser.add_argument("--flights", type=Path, default=WEEK)
    parser.add_argument("--most", type=int, help="the first so many flights only")
    parser.add_argument("--part", type=int, default=PART, help="records of a micro-batch at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--master", default=CLUSTER)
    parser.add_argument("--s3", action="store_true", help="the table is on an S3 server")
    parser.add_argument("--s3-latency", type=float, default=0.0, help="milliseconds that each request takes longer")
    parser.add_argument("--s3-faults", type=float, default=0.0, help="per cent of the requests that fail")
    given = parser.parse_args()
    os.chdir(ROOT)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memwal-chaos-")))
        kafka = stack.enter_context(KafkaServer.started(directory / "kafka"))
        flights = Flights(given.flights, given.most)
        place = stack.enter_context(on_s3(directory, given.s3_latency / 1e3)) if given.s3 else None
        if place is not None and given.s3_faults:
            place.hurt(given.s3_faults / 100)
        scene = Scene(directory, kafka, flights, append=given.append, master=given.master, part=given.part, place=place)
        stack.callback(scene.close)
        began = time.monotonic()
        producing = threading.Thread(target=scene.produce, daemon=True)
        producing.start()
        if not given.append:
            scene.begin_clients(given.seed)
        killed = wreck(scene, given.kills, given.every, random.Random(given.seed), print)
        producing.join()
        scene.drain()
        rows = scene.check()
        if not given.append:
            print(scene.judged())
        starts = scene.run.starts + sum(each.starts for each in scene.daemons)
        print(f"{rows:,} rows as expected after {dict(killed)}, {starts} starts, {time.monotonic() - began:.0f} s")
        if place is not None:
            print(f"requests: {dict(place.counted())}, of which failed: {dict(place.failed())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
