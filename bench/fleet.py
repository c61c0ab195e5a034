"""Measure a fleet: many tables in two daemons, at rest, under load, at the first put, and after a kill.

`python -m bench.fleet --kafka [--tables 500] [--rows 200000]` measures `memwal run` from a topic into many tables
instead, with two kills of daemons.

`python -m bench.fleet [--smoke] [--tables N] [--active N] [--seconds N] [--s3 [MS]]` prints a line for each figure,
with its bound.

* start: from the start of both processes until both report that they serve.
* rest: the processor time, threads and memory of a daemon while no table is used; with `--s3` also the requests to
  storage.
* known: the memory that a daemon has more after every table was used once and is idle again, divided by the tables.
* first put: the duration of a put to a table that is idle, by a client that is connected.
* active: tables with one durable put of 10 rows per second each; beside it one table alone with the same number of puts
  per second, in the same daemons, in alternating rounds.
* isolation: p99 of puts to tables beside one that writes as much as its rate limit allows and one whose storage fails,
  divided by p99 without these, in alternating rounds.
* kill: the longest wait of a put to each table after the SIGKILL of a daemon, while all have one put per second.
* split: with `--split` only this: the longest put while a table with `regions.count = "auto"` goes from 1 to 2 and from
  2 to 4 regions under four writers, in this process and through two daemons of a fleet.

At the end every acknowledged row must be in its table, once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa

import memwal
from bench.daemons import Daemons, until
from memwal.ingest.settings.load import load
from tests.conftest import toml
from tests.kafka_server import KafkaServer, Record, jars
from tests.s3_place import Place, on_s3

TABLES, ACTIVE, SECONDS = 1_000, 100, 20.0
ROUTED = 200_000
"""Records of the topic with `--kafka`."""
SMOKE = (20, 5, 2.0)
ROWS, LARGE = 10, 10_000
QUICK = {"fleet": {"idle_after": "3s"}, "commit": {"interval": "1s"}}
"""Shorter than the defaults, so that tables become idle within the measurement; under load the defaults apply."""
SPLITS = {"count": "auto", "count_max": 4, "split_rate": 1, "split_interval": "3s"}
"""Every load splits a table twice."""
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
PUT_RATE = "1MB"
"""Limit of each table per second; a put of `LARGE` rows takes a sixth of it."""
_CLIENTS = 32
"""Clients that are connected in parallel."""


@dataclass
class Written:
    """One table with its client, and what it has acknowledged: `(sent, acked)` in seconds for each put."""

    name: str
    client: Any
    acks: list[tuple[float, float]] = field(default_factory=list)
    rows: int = 0

    size: int = ROWS
    """Rows of a put."""

    def put(self) -> float:
        """Put rows with new keys, and return the seconds that it took."""
        keys = range(self.rows, self.rows + self.size)
        rows = pa.table({"id": list(keys), "value": ["a value"] * self.size}, schema=SCHEMA)
        sent = time.perf_counter()
        self.client.put(rows, token=f"bench{id(self)}:{self.rows}", timeout=60)
        self.acks.append((sent, time.perf_counter()))
        self.rows += self.size
        return self.acks[-1][1] - sent


@dataclass
class Broken(Written):
    """A table whose storage fails."""

    def put(self) -> float:
        """Put rows, which is refused, and return the seconds that it took."""
        began = time.perf_counter()
        with suppress(memwal.MemWalError):
            super().put()
            raise AssertionError(f"{self.name} has taken a put, but its storage fails")
        return time.perf_counter() - began


class Load:
    """Threads that put into tables at a steady rate, until the end of the context."""

    def __init__(self, tables: Sequence[Written], every: float) -> None:
        """Prepare. `every`: seconds between two puts into a table."""
        self._tables, self._every, self._stop = tables, every, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n, each)) for n, each in enumerate(tables)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, table: Written) -> None:
        due = time.perf_counter() + self._every * number / len(self._tables)  # spread over the interval
        while not self._stop.wait(max(0.0, due - time.perf_counter())):
            table.put()
            due = max(due + self._every, time.perf_counter() - self._every)


def waits(tables: Sequence[Written], since: float) -> list[float]:
    """Return the durations of the puts that were sent after `since`, in seconds."""
    return [acked - sent for each in tables for sent, acked in each.acks if sent >= since]


def said(what: str, value: float, unit: str, bound: float | None = None) -> None:
    """Print one figure. `bound`: its upper bound."""
    verdict = "" if bound is None else f"   at most {bound:g}{'' if value <= bound else '   MISSED'}"
    print(f"{what:<58} {value:10.2f} {unit}{verdict}", flush=True)


def names(count: int) -> list[str]:
    """Return the names of the tables."""
    return [f"t_{number:04d}" for number in range(count)]


def create(sections: dict[str, Any], prefix: str, count: int, environ: dict[str, str]) -> None:
    """Create the tables below `prefix`."""
    from memwal.ingest.engine.table.create import initialise

    for name in names(count):
        of_table = {**sections, "table": {**sections["table"], "uri": f"{prefix}/{name}.lance"}}
        initialise(load(of_table, environ, {}), environ)


def at_rest(daemons: Daemons, seconds: float, label: str) -> dict[str, float]:
    """Print and return what the daemons use while nothing is asked of them; memory in bytes, the most of a daemon."""
    processes = [psutil.Process(daemons.pid(endpoint)) for endpoint in daemons.endpoints]
    before, began = [sum(each.cpu_times()[:2]) for each in processes], time.perf_counter()
    time.sleep(seconds)
    took = time.perf_counter() - began
    used = [sum(each.cpu_times()[:2]) - cpu for each, cpu in zip(processes, before, strict=True)]
    memory = max(each.memory_info().rss for each in processes)
    said(f"{label}: processor, most of a daemon", 100 * max(used) / took, "%", 1.0)
    said(f"{label}: threads, most of a daemon", max(each.num_threads() for each in processes), "", 64)
    said(f"{label}: memory, most of a daemon", memory / 2**20, "MiB")
    return {"memory": float(memory)}


def idle(daemons: Daemons) -> None:
    """Return when no daemon has a table open. Raises: TimeoutError."""
    until(lambda: all(table["state"] == "idle" for table in memwal.tables(daemons.endpoints)))


def connected(daemons: Daemons, wanted: Sequence[str]) -> list[Written]:
    """Return a client of each table."""
    with ThreadPoolExecutor(_CLIENTS) as pool:
        return list(pool.map(lambda name: Written(name, memwal.connect(daemons.endpoints, table=name)), wanted))


def unused(given: argparse.Namespace, daemons: Daemons, place: Place | None, started: float) -> None:
    """Print the figures of tables that are not used, and of their first puts."""
    said("start: until both daemons serve", started, "s", 10.0)
    if place is not None and place.proxy is not None:
        place.proxy.forget()
    empty = at_rest(daemons, given.seconds, "rest")
    if place is not None and place.proxy is not None:
        said("rest: requests to storage of both daemons", len(place.proxy.requests) / given.seconds, "/s", 0.0)
    every = connected(daemons, names(given.tables))
    for table in every:
        table.client.count()
    idle(daemons)
    known = at_rest(daemons, given.seconds, "known")
    said("known: memory per table", (known["memory"] - empty["memory"]) / 2**20 / given.tables, "MiB", 1.0)

    firsts = [table.put() * 1e3 for table in every[-given.active :]]
    said("first put to an idle table: p50", float(np.percentile(firsts, 50)), "ms", 60.0)
    said("first put to an idle table: p99", float(np.percentile(firsts, 99)), "ms", 200.0)


def used(given: argparse.Namespace, daemons: Daemons) -> None:
    """Print the figures of tables that are written."""
    *active, alone = connected(daemons, names(given.tables)[: given.active + 1])
    for table in (*active, alone):
        table.put()
    many, one = list[float](), list[float]()
    for _ in range(3):  # alternating rounds
        for tables, every, found in (([alone], 1 / given.active, one), (active, 1.0, many)):
            with Load(tables, every):
                time.sleep(1.0)  # until each table has had a put
                since = time.perf_counter()
                time.sleep(max(1.0, given.seconds / 3))
            found.extend(waits(tables, since))
    p99, peer = float(np.percentile(many, 99)) * 1e3, float(np.percentile(one, 99)) * 1e3
    said("active: p50 of a put", float(np.percentile(many, 50)) * 1e3, "ms")
    said("active: p99 of a put", p99, "ms")
    said("one table with as many puts: p50", float(np.percentile(one, 50)) * 1e3, "ms")
    said("one table with as many puts: p99", peer, "ms")
    said("active: p99 by that of one table", p99 / peer, "x", 3.0)

    with Load(active, 1.0):
        time.sleep(2.0)
        processes = [psutil.Process(daemons.pid(endpoint)) for endpoint in daemons.endpoints]
        said("active: memory, most of a daemon", max(p.memory_info().rss for p in processes) / 2**30, "GiB", 1.5)
        killed = daemons.endpoints[0]
        owners = {table["name"]: table["owners"] for table in memwal.tables(daemons.endpoints)}
        at = time.perf_counter()
        daemons.kill(killed)
        until(lambda: all(sum(sent >= at for sent, _ in table.acks) >= 2 for table in active))
    waited = {table.name: max(acked - max(sent, at) for sent, acked in table.acks if acked >= at) for table in active}
    lost = [waited[table.name] for table in active if killed in owners[table.name].values()]
    others = [waited[table.name] for table in active if killed not in owners[table.name].values()]
    said("kill: tables with a region in the killed daemon", len(lost), "")
    for label, bound, found in (("these tables", 1.0, lost), ("the other tables", None, others)):
        if found:
            said(f"kill: p50 of the longest wait of a put to {label}", float(np.percentile(found, 50)), "s")
            said(f"kill: p99 of the longest wait of a put to {label}", float(np.percentile(found, 99)), "s", bound)
    for table in [*active, alone]:
        found = table.client.count()
        if found != table.rows:
            raise AssertionError(f"{table.name} has {found} rows, {table.rows} were acknowledged")
    print(f"{len(active) + 1} tables have every acknowledged row once")


def splits(directory: Path) -> None:
    """Print the longest put beside the splits of a table, and check its rows."""
    with memwal.open(directory / "here.lance", schema=SCHEMA, key="id", settings={"regions": SPLITS}) as table:
        split(table, "in this process")
    columns = {"id": "int64", "value": "string"}
    fleet: dict[str, Any] = {
        "fleet": {"prefix": str(directory)},
        "table": {"key": ["id"], "columns": columns},
        "regions": SPLITS,
    }
    with (
        Daemons(directory, toml(fleet), 0) as daemons,
        memwal.connect(daemons.endpoints, table="t", create=True) as table,
    ):
        split(table, "through two daemons")


def split_into(table: Any, regions: int) -> bool:
    """Return whether `table` has this number of regions."""
    return len(table.status()["regions"]) == regions


def split(table: Any, where: str) -> None:
    """Print the longest put into `table` until it has 2 and 4 regions."""
    stop, acks, number = threading.Event(), list[tuple[float, float]](), itertools.count()

    def put() -> None:
        while not stop.is_set():
            first = next(number) * ROWS
            rows = pa.table({"id": list(range(first, first + ROWS)), "value": ["a value"] * ROWS}, schema=SCHEMA)
            sent = time.perf_counter()
            table.put(rows)
            acks.append((sent, time.perf_counter()))

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for regions in (2, 4):
        since = time.perf_counter()
        until(partial(split_into, table, regions))
        time.sleep(1.0)
        longest = max(acked - sent for sent, acked in list(acks) if sent >= since)
        said(f"split to {regions} regions {where}: longest put", longest * 1e3, "ms", 200.0)
    stop.set()
    for thread in threads:
        thread.join()
    if (found := table.count()) != len(acks) * ROWS:
        raise AssertionError(f"{found} rows, {len(acks) * ROWS} were acknowledged")


def isolated(given: argparse.Namespace, daemons: Daemons, prefix: Path) -> None:
    """Print how much tables are slowed down by others. The last table is broken by this."""
    *quiet, hot, last = connected(daemons, names(given.tables)[-max(3, given.active // 2) :])
    hot.size = LARGE
    for table in (*quiet, hot, last):
        table.put()
    broken = Broken(last.name, last.client, rows=last.rows)
    log = prefix / f"{last.name}.lance" / "_mem_wal"
    shutil.rmtree(log)
    log.write_text("no directory")
    beside, alone = list[float](), list[float]()
    for number in range(8):
        with Load(quiet, 1.0), Load([hot] if number % 2 else [], 0.0), Load([broken] if number % 2 else [], 0.2):
            time.sleep(1.0)
            since = time.perf_counter()
            time.sleep(max(1.0, given.seconds / 2))
        (beside if number % 2 else alone).extend(waits(quiet, since))
    p50, p99 = (np.percentile(beside, at) / np.percentile(alone, at) for at in (50, 99))
    took = hot.acks[-1][1] - hot.acks[1][0]
    said("isolation: rows per second of the table at its limit", (hot.rows - 2 * hot.size) / took, "")
    said("isolation: p99 of a put to another table, without it", float(np.percentile(alone, 99)) * 1e3, "ms")
    said("isolation: p50 beside it and a broken table by that", float(p50), "x")
    said("isolation: p99 beside it and a broken table by that", float(p99), "x", 1.2)


def from_topic(tables: int, rows: int, directory: Path) -> None:
    """Write a topic into many tables, kill each daemon once meanwhile, print the seconds. Raises: AssertionError."""
    prefix = directory / "tables"
    prefix.mkdir()
    table = {"append_only": True, "columns": {"id": "int64", "tenant": "string"}}
    sections: dict[str, Any] = {"table": table, "regions": {"count": 1}, "fleet": {"prefix": str(prefix)}}
    with ExitStack() as stack:
        kafka = stack.enter_context(KafkaServer.started(directory))
        kafka.create_topic("tenants", partitions=4)
        kafka.produce("tenants", [Record(b'{"id": %d, "tenant": "%d"}' % (id, id % tables)) for id in range(rows)])
        daemons = stack.enter_context(Daemons(directory, toml(sections), 0))
        spark = {"spark.master": "local[2]", "spark.jars": ",".join(map(str, jars("connector")))}
        source = {"format": "kafka", "brokers": kafka.brokers, "topics": ["tenants"], "spark": spark}
        sections["source"] = {**source, "max_offsets_per_trigger": rows // 5}
        sections |= {"route": {"table": "concat('of_', tenant)"}, "daemon": {"endpoints": daemons.endpoints}}
        config = directory / "run.toml"
        config.write_text(toml(sections))
        began = time.perf_counter()
        command = [sys.executable, "-m", "memwal.ingest.cli.app", "run", str(config), "--once"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                print(f"{time.perf_counter() - began:6.1f} s  {line.rstrip()}", flush=True)
                for number, endpoint in enumerate(daemons.endpoints):
                    if f"micro-batch {1 + 2 * number}:" in line:
                        daemons.kill(endpoint)
                        daemons.start(endpoint)
        said("topic: until every table has its rows and is committed", time.perf_counter() - began, "s")
        assert run.returncode == 0
        for number in range(tables):
            with memwal.connect(daemons.endpoints, table=f"of_{number}") as table_of:
                found = table_of.scan(["id"]).read_all()["id"].to_pylist()
            assert sorted(found) == list(range(number, rows, tables)), f"of_{number}"
    print(f"{tables} tables have every row once")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few tables, for seconds")
    parser.add_argument("--tables", type=int, default=TABLES, help="known tables (%(default)s)")
    parser.add_argument("--active", type=int, default=ACTIVE, help="tables that are written (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each phase (%(default)s)")
    parser.add_argument("--s3", type=float, nargs="?", const=0.0, help="on an S3 server, with ms added to a request")
    parser.add_argument("--split", action="store_true", help="only the pause of a table that splits")
    parser.add_argument("--kafka", action="store_true", help="from a topic, by memwal run")
    parser.add_argument("--rows", type=int, default=ROUTED, help="of the topic (%(default)s)")
    given = parser.parse_args(arguments)
    if given.kafka:
        with tempfile.TemporaryDirectory() as at:
            from_topic(given.tables, given.rows, Path(at))
        return 0
    if given.smoke:
        given.tables, given.active, given.seconds = SMOKE
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if given.split:
            splits(directory)
            return 0
        place = None if given.s3 is None else stack.enter_context(on_s3(directory, given.s3 / 1e3))
        sections: dict[str, Any] = {
            "table": {"key": ["id"], "columns": {"id": "int64", "value": "string"}},
            "regions": {"count": 1},
        }
        prefix = str(directory / "tables")
        if place is not None:
            prefix = place.section["uri"].rpartition("/")[0] + "/tables"
            sections["table"]["storage_options"] = place.section["storage_options"]
        else:
            Path(prefix).mkdir()
        began = time.perf_counter()
        create(sections, prefix, given.tables, dict(os.environ if place is None else {**os.environ, **place.environ}))
        print(f"{given.tables} tables were created in {time.perf_counter() - began:.0f} s", flush=True)
        sections["fleet"] = {"prefix": prefix}
        environ = None if place is None else place.environ
        quick = {name: {**sections.get(name, {}), **QUICK.get(name, {})} for name in (*sections, "commit")}
        began = time.perf_counter()
        with Daemons(directory, toml(quick), 0, environ) as daemons:
            unused(given, daemons, place, time.perf_counter() - began)
        with Daemons(directory, toml(sections), 0, environ) as daemons:
            used(given, daemons)
        if place is None:
            sections["table"]["put_rate_max"] = PUT_RATE
            with Daemons(directory, toml(sections), 0, environ) as daemons:
                isolated(given, daemons, Path(prefix))
    return 0


if __name__ == "__main__":
    sys.exit(main())
