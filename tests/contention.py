"""Let clients of several processes contend for few keys of a table while its daemons are killed, stopped and ended.

`python -m tests.contention --seconds 60 --seed 1` (`make histories`) runs two daemons, three processes of clients and a
reader of storage, records what each client observed, and lets Porcupine judge it. `--rule insert` and `--rule version`
use tables whose puts have a condition, `--s3` a table on an S3 server that fails `--s3-faults` per cent of the
requests, `--tables 50 --kills 20` a fleet of 50 tables whose daemons are killed 20 times. Exit code 1: the history is
not linearizable; its files and pictures stay.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

import memwal
from memwal.flush import BaseTable
from memwal.wal import bucket_region
from tests.chaos import Kept
from tests.cluster import Cluster, ask, spread
from tests.conftest import ROOT, environment, toml
from tests.histories.clients import Orders, keys_of
from tests.histories.judge import Judgement, NotLinearizable, expect_linearizable
from tests.s3_place import Place, on_s3

REGIONS, KEYS = 3, 3
"""Number of regions, and of keys in each."""
CLIENTS = 3
"""Processes of clients, without the one that reads storage."""
MEANWHILE = 20_000
"""Bytes of history recorded while a deposed daemon is stopped: some 100 operations."""
PATIENCE = 90.0
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64()), ("version", pa.int64())])
RULES: dict[str, dict[str, Any]] = {"replace": {}, "insert": {"upsert": "insert"}, "version": {"version": "version"}}
STEPS = ("kill", "stop", "pause", "drain", "kill a client")
OF_FLEETS = ("kill", "pause", "drain", "kill a client")
IDLE_AFTER = "1s"
"""Of a fleet, so that regions also come to rest."""


class Contention:
    """Daemons, clients and the faults applied to them, in files below `directory`."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        rule: str = "replace",
        place: Place | None = None,
        serve: Sequence[str] = ("memwal.ingest.cli.app", "serve"),
        commit: str = "1s",
        clients: int = CLIENTS,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`serve`: the module that a daemon runs, and its arguments before the configuration. `commit`: interval of
        commits, "0s" for no commits. `clients`: processes of clients, without the one that reads storage."""
        self.directory, self.seed, self.rule, self.say = directory, seed, rule, say
        self.commit, self.processes = commit, clients
        self.chance = random.Random(f"contention {seed}")
        self.place = place or Place(str(directory / "table.lance"))
        self.tables: list[str] = []
        """Of a fleet."""
        self.endpoints = spread(2, REGIONS)
        self.regions: list[str] = []
        self.keys: dict[int, list[int]] = {}
        self._create()
        config = directory / "table.toml"
        config.write_text(toml(self.sections()))
        self.daemons = [self._daemon(serve, config, each) for each in self.endpoints]
        self.clients: list[Kept] = []
        self.histories: list[Path] = []
        self.done: Counter[str] = Counter()
        self._cluster = Cluster(self.place.uri, self.endpoints)

    def run(self, seconds: float, steps: Sequence[str] = STEPS) -> None:
        """Run the clients for `seconds`, and take each of `steps` at least once."""
        self.begin()
        ends, waiting = time.monotonic() + seconds, list(steps)
        self.chance.shuffle(waiting)
        while waiting or time.monotonic() < ends:
            self._rest(self.chance.uniform(0.5, 1.5))
            self.take(waiting.pop() if waiting else self.chance.choice(list(steps)))
        self._rest(1.0)
        self.end()

    def begin(self) -> None:
        """Start the daemons, then the clients."""
        for daemon in self.daemons:
            daemon.look()
        self._wait(self._served, "the regions are served")
        self._client(["reader", "reader"])
        for _ in range(self.processes):
            self._client(["writer", "writer", "prober"])

    def take(self, step: str) -> None:
        """Take one of STEPS, and wait until all regions are served again."""
        self.say(step)
        self._take(step)
        self.done[step] += 1
        self._wait(self._served, f"the regions are served after {step!r}")

    def judged(self) -> Judgement:
        """Judge the history. Raises: NotLinearizable."""
        return expect_linearizable(self.histories, pictures=self.directory)

    def close(self) -> None:
        """End every process."""
        for each in (*self.clients, *self.daemons):
            if each.process is not None:
                with suppress(ProcessLookupError):
                    each.process.send_signal(signal.SIGCONT)
            each.close(5.0)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def _take(self, step: str) -> None:
        daemon = self.chance.choice(self.daemons)
        if step == "kill":
            daemon.kill()
            self._rest(self.chance.uniform(0.0, 1.5))
            daemon.look()
        elif step == "drain":
            daemon.close()
            daemon.start()
        elif step == "kill a client":
            alive = [each for each in self.clients[1:] if each.process is not None and each.process.poll() is None]
            self.chance.choice(alive).kill()
            self._client(["writer", "writer", "prober"])
        else:
            self._stop(daemon, deposed=step == "stop")

    def _stop(self, daemon: Kept, *, deposed: bool) -> None:
        """Stop a daemon for a while or, if `deposed`, until the other has its regions and acknowledges writes there."""
        assert daemon.process is not None
        other = next(each for each, kept in zip(self.endpoints, self.daemons, strict=True) if kept is not daemon)
        daemon.process.send_signal(signal.SIGSTOP)
        if deposed:
            alone = Cluster(self.place.uri, [other])
            self._wait(lambda: len(alone.owners()) == REGIONS, "the other daemon has all regions")
            before = self._recorded()
            self._wait(lambda: self._recorded() > before + MEANWHILE, "the clients go on at the other daemon")
        self._rest(self.chance.uniform(0.3, 1.5))
        daemon.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End the clients, each after its operation, then the daemons. Raises: AssertionError if a client met an
        error."""
        running = [each for each in self.clients if each.process is not None and each.process.poll() is None]
        for each in running:
            assert each.process is not None
            each.process.send_signal(signal.SIGTERM)
        for each in running:
            assert each.process is not None
            each.process.wait(PATIENCE)
        wrong = [
            each.log.read_text() for each in self.clients if each.process and each.process.returncode not in (0, -9)
        ]
        if wrong:
            raise AssertionError("\n".join(wrong))
        for daemon in self.daemons:
            daemon.close()

    # ---- processes -------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        """Create what clients use, and set `regions` and `keys`."""
        self._create_table(self.place.uri, REGIONS)
        base = BaseTable.open(self.place.uri, dict(self.place.options))
        self.regions = [str(region) for region in base.regions]
        self.keys = keys_of(base, KEYS)

    def _create_table(self, uri: str, regions: int) -> None:
        options, settings = dict(self.place.options) or None, {"table": RULES[self.rule]}
        memwal.open(uri, schema=SCHEMA, key="id", regions=regions, storage_options=options, settings=settings).close()

    def sections(self) -> dict[str, dict[str, Any]]:
        columns = {field.name: str(field.type) for field in SCHEMA}
        return {
            "table": {"key": ["id"], **self.place.section, "columns": columns, **RULES[self.rule]},
            "regions": {"count": REGIONS},
            "memtable": {"rows_max": 100},
            "commit": {"interval": self.commit},
            "gc": {"interval": "2s", "wal_age_min": "5s", "sst_age_min": "5s", "manifest_age_min": "5s"},
            "daemon": {"endpoints": self.endpoints},
        }

    def _daemon(self, serve: Sequence[str], config: Path, endpoint: str) -> Kept:
        port = endpoint.rpartition(":")[2]
        words = [sys.executable, "-m", *serve, str(config)]
        environ = environment({**self.place.environ, "MEMWAL__DAEMON__PORT": port, "MEMWAL__LOG__LEVEL": "info"})
        return Kept(words, environ, self.directory / f"daemon-{port}.log")

    def _client(self, kinds: list[str]) -> None:
        """Start a process of clients."""
        number = len(self.clients)
        path = self.directory / f"p{number}.jsonl"
        orders = Orders(
            history=str(path),
            uri=self.place.uri,
            endpoints=self.endpoints,
            regions=self.regions,
            keys=self.keys,
            kinds=kinds,
            first=1 + number * 1_000_000,
            seed=self.seed,
            rule=self.rule,
            options=dict(self.place.options),
            tables=self.tables,
        )
        words = [sys.executable, "-m", "tests.histories.clients", str(orders)]
        self.histories.append(path)
        self.clients.append(Kept(words, environment(), path.with_suffix(".log")))
        self.clients[-1].look()
        self._wait(path.exists, "the clients have begun")

    def _recorded(self) -> int:
        """Return the bytes of history recorded so far."""
        return sum(each.stat().st_size for each in self.histories)

    def _served(self) -> bool:
        return len(self._cluster.owners()) == REGIONS

    def _rest(self, seconds: float) -> None:
        """Pause; restart daemons that ended on their own, as a supervisor would."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for each in self.daemons:
                each.look()
            time.sleep(0.05)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > ends:
                raise AssertionError(f"not within {PATIENCE} s: {what}")
            self._rest(0.05)


class FleetContention(Contention):
    """The same for a fleet whose tables have one region each, which comes to rest when it is idle."""

    def __init__(self, directory: Path, seed: int, *, tables: int, **given: Any) -> None:
        """`tables`: their number."""
        self._names = [f"t_{number:02d}" for number in range(tables)]
        super().__init__(directory, seed, **given)

    def _create(self) -> None:
        self.place = Place(str(self.directory / "tables"))
        Path(self.place.uri).mkdir()
        self.tables = self._names
        for number, name in enumerate(self.tables):
            self._create_table(f"{self.place.uri}/{name}.lance", 1)
            self.regions.append(str(bucket_region(0)))
            self.keys[number] = list(range(1, KEYS + 1))

    def sections(self) -> dict[str, dict[str, Any]]:
        fleet = {"prefix": self.place.uri, "idle_after": IDLE_AFTER}
        sections = super().sections()
        del sections["table"]["uri"]
        return {**sections, "fleet": fleet, "regions": {"count": 1}}

    def _served(self) -> bool:
        """Return whether every daemon answers, and every table can be used."""
        with suppress(flight.FlightError):
            return all(ask(each, "tables") for each in self.endpoints)
        return False


def main() -> int:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rule", choices=sorted(RULES), default="replace")
    parser.add_argument("--tables", type=int, help="use a fleet, with this number of tables")
    parser.add_argument("--kills", type=int, default=0, help="number of times that a daemon is killed first")
    parser.add_argument("--s3", action="store_true", help="the table is on an S3 server")
    parser.add_argument("--s3-faults", type=float, default=0.0, help="per cent of the requests that fail")
    given = parser.parse_args()
    os.chdir(ROOT)
    directory = Path(tempfile.mkdtemp(prefix="memwal-contention-"))
    with ExitStack() as stack:
        place = stack.enter_context(on_s3(directory)) if given.s3 or given.s3_faults else None
        options: dict[str, Any] = {"rule": given.rule, "place": place, "say": lambda step: print(step, flush=True)}
        if given.tables:
            run: Contention = FleetContention(directory, given.seed, tables=given.tables, **options)
        else:
            run = Contention(directory, given.seed, **options)
        stack.callback(run.close)
        if place is not None and given.s3_faults:
            place.hurt(given.s3_faults / 100)
        run.run(given.seconds, ["kill"] * given.kills + list(OF_FLEETS if given.tables else STEPS))
        print(f"seed {given.seed}, {dict(run.done)}")
    try:
        print(run.judged())
    except NotLinearizable as error:
        print(f"{error}\nthe history: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
