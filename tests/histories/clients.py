"""Run clients that record what they do to a table: `python -m tests.histories.clients ORDERS`, until SIGTERM.

Each client is a thread that does one operation after the other, on few keys that all clients share. There are three
kinds: `Writer` puts, deletes and reads through the daemons; `Prober` reads a region at `latest` from one daemon after
the other, whether it owns the region or not, so that deposed owners are read too; `StorageReader` reads `durable` from
storage. With the tables of a fleet, each of one region, a client chooses one of them for each operation, and the
history has the number of the table in place of that of the region.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

import memwal
from memwal.flush import BaseTable
from memwal.ingest.errors import Internal
from tests.histories.record import Operation, Recorder
from tests.raw_calls import rows_from

T = TypeVar("T")
Keys = Mapping[int, Sequence[int]]
"""The keys of each region, by the number of the region."""
REPEATS = 3
"""Maximum number of calls with one token."""
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]


@dataclass(frozen=True)
class Orders:
    """Arguments of a process of clients.

    `rule`: of the table, `replace`, `insert` or `version`. `kinds`: of its clients. `pause`: longest pause of a client
    between two operations, in seconds. `column`, `key`: names of two integer columns. `fixed`: values of the other
    columns of the key, which distinguish the clients' rows from other rows. `tables`: names, below `uri`; empty for one
    table.
    """

    history: str
    uri: str
    endpoints: list[str]
    regions: list[str]
    keys: dict[int, list[int]]
    kinds: list[str]
    first: int
    seed: int
    rule: str = "replace"
    pause: float = 0.02
    options: dict[str, str] = field(default_factory=dict)
    key: str = "id"
    column: str = "v"
    fixed: dict[str, Any] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Orders:
        """Parse the text that `str` returns."""
        given = json.loads(text)
        return cls(**given | {"keys": {int(region): keys for region, keys in given["keys"].items()}})

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def named(self, keys: Iterable[int]) -> list[Any]:
        """Return keys in the form that a table takes."""
        return [{**self.fixed, self.key: key} if self.fixed else key for key in keys]

    def among(self, region: int) -> list[int]:
        """Return the regions that an operation on `region` may concern: those of its table."""
        return [region] if self.tables else sorted(self.keys)

    def named_table(self, region: int) -> str | None:
        """Return the name of the table of `region`; None if the table has no name."""
        return self.tables[region] if self.tables else None

    @property
    def filter(self) -> str | None:
        """A filter that selects exactly the clients' rows; None if the table has only their rows."""
        return " AND ".join(f"{name} = {value!r}" for name, value in self.fixed.items()) or None


class Process:
    """State shared by the clients of one process."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.stop = orders, threading.Event()
        self.recorder = Recorder.to_file(Path(orders.history))
        self.values = count(orders.first)
        """Values to put. No value is put twice, by any process."""
        self.errors: list[BaseException] = []

    def run(self) -> int:
        """Run the clients until `stop`; return the exit code: 1 if a client met an unexpected error."""
        kinds = {"writer": Writer, "prober": Prober, "reader": StorageReader}
        name = Path(self.orders.history).stem
        clients = [kinds[kind](self, f"{name}.{number}") for number, kind in enumerate(self.orders.kinds)]
        threads = [threading.Thread(target=each.live, name=each.name) for each in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # not forever: another thread may receive the signal, and this one must handle it
        return 1 if self.errors else 0


def by_key(rows: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the value of each key. Raises: AssertionError if a key occurs twice."""
    found = list(rows)
    if len(one := dict(found)) < len(found):
        raise AssertionError(f"a read showed a key twice: {sorted(found)}")
    return one


class Client:
    """A thread that does one operation after the other."""

    slowness = 1.0
    """Length of its pauses, relative to other clients."""

    def __init__(self, process: Process, name: str) -> None:
        self.process, self.name, self.orders = process, name, process.orders
        self.chance = random.Random(f"{process.orders.seed} {name}")

    def live(self) -> None:
        """Run `step` until the process stops."""
        try:
            while not self.process.stop.wait(self.chance.random() * self.orders.pause * self.slowness):
                self.step()
        except BaseException as error:
            self.process.errors.append(error)
            self.process.stop.set()
            raise

    def step(self) -> None:
        """Do one operation."""
        raise AssertionError("every kind has its own")

    def begun(self, op: str, region: int, **given: Any) -> Operation:
        return self.process.recorder.invoke(self.name, op, region, **given)

    def region(self, table: int | None = None) -> int:
        """Return some region, of the table of the region `table` if given."""
        return self.chance.choice(sorted(self.orders.keys) if table is None else self.orders.among(table))

    def some(self, region: int, most: int) -> list[int]:
        """Return some keys of a region."""
        keys = self.orders.keys[region]
        return self.chance.sample(keys, self.chance.randint(1, min(most, len(keys))))

    def rows(self, found: pa.Table) -> dict[int, int]:
        """Return the value of each key. Raises: AssertionError if a key occurs twice."""
        keys, values = (found.column(name).to_pylist() for name in (self.orders.key, self.orders.column))
        return by_key(zip(keys, values, strict=True))

    def read(self, at: int, table: Any, levels: Sequence[tuple[str, str]]) -> None:
        """Get keys of some regions of the table of the region `at`, or scan all of them. Each region is read at a
        moment of its own."""
        level, told = self.chance.choice(levels)
        scans = self.chance.random() < 0.2
        regions = self.orders.among(at) if scans else {self.region(at), self.region(at)}
        keys = {region: self.orders.keys[region] if scans else self.some(region, 3) for region in regions}
        reads = {region: self.begun("read", region, keys=keys[region], level=told) for region in regions}
        columns = [self.orders.key, self.orders.column]
        try:
            if scans:
                found = self.rows(table.scan(columns, self.orders.filter, level=level).read_all())
            else:
                named = self.orders.named(key for some in keys.values() for key in some)
                found = self.rows(table.get(named, columns, level=level))
        except (memwal.Unavailable, memwal.UnknownOutcome, memwal.FencedError, Internal) as error:
            if isinstance(error, Internal) and "ended" not in error.details:
                raise  # else two daemons were killed while they answered
            for each in reads.values():
                each.failed(error)
            return
        for region, each in reads.items():
            each.ok({key: found[key] for key in keys[region] if key in found})


class Writer(Client):
    """Puts, deletes and reads through the daemons, with tokens and without."""

    def __init__(self, process: Process, name: str) -> None:
        super().__init__(process, name)
        self.table: Any = None
        self.at = 0
        """A region of `table`."""
        self._clients: dict[str | None, Any] = {}
        self._tokens = count(1)
        self._seen: dict[int, int] = {}

    def step(self) -> None:
        self.at = super().region()
        name = self.orders.named_table(self.at)
        if name not in self._clients:
            try:
                self._clients[name] = memwal.connect(self.orders.endpoints, table=name)
            except memwal.Unavailable:  # no daemon answers yet
                return
        self.table = self._clients[name]
        chosen = self.chance.random()
        if chosen < 0.45:
            self.read(self.at, self.table, [("latest", "latest")] * 3 + [("durable", "durable")])
        elif chosen < 0.8:
            self._put()
        elif chosen < 0.88:
            region = self.region()
            keys = self.some(region, 2)
            named = self.orders.named(keys)
            self._write([self.begun("delete", region, keys=keys)], lambda **given: self.table.delete(named, **given))
        elif chosen < 0.92:
            self._delete_all_of_some_keys()
        else:
            self._delete_as_expected()

    def region(self, table: int | None = None) -> int:
        return super().region(self.at if table is None else table)

    def _put(self) -> None:
        rule = self.orders.rule
        regions = (
            [self.region()] if rule != "replace" else sorted({self.region() for _ in range(self.chance.randint(1, 2))})
        )
        rows = {region: {key: next(self.process.values) for key in self.some(region, 3)} for region in regions}
        if rule != "replace":
            rows = {region: dict(list(some.items())[:1]) for region, some in rows.items()}
        more, version = dict(self.orders.fixed), None
        if rule == "version":
            version = time.monotonic_ns() // 30_000_000 + self.chance.randint(-3, 3)
            more["version"] = version
        op = {"replace": "put"}.get(rule, rule)
        sent = [
            {self.orders.key: key, self.orders.column: value, **more}
            for some in rows.values()
            for key, value in some.items()
        ]
        begun = [self.begun(op, region, rows=some, version=version) for region, some in rows.items()]
        missing = None if rule == "merge" else "null"
        self._write(
            begun,
            lambda **given: self.table.put(sent, missing=missing, **given),
            None if rule == "replace" else _verdict_of_put,
        )
        for some in rows.values():
            self._seen.update(some)

    def _delete_all_of_some_keys(self) -> None:
        """Delete some keys with a filter: each row at a moment of its own.

        It has no token: a region records the token at the end only, so a call that is repeated before then also deletes
        rows that were put meanwhile, and the operation would take effect twice.
        """
        region = self.region()
        keys = self.some(region, 2)
        begun = [self.begun("delete", region, keys=[key]) for key in keys]
        filter = self._where(f"{self.orders.key} IN ({', '.join(map(str, keys))})")
        self._write(begun, lambda **given: self.table.delete(filter=filter, **given), token=False)

    def _delete_as_expected(self) -> None:
        """Delete a row with a filter that matches only while the row is unchanged.

        A repeated call deletes nothing, since no value is put twice.
        """
        region = self.region()
        key = self.chance.choice(self.orders.keys[region])
        expected = self._seen.get(key, 1)
        begun = self.begun("compare", region, rows={key: expected})
        filter = self._where(f"{self.orders.key} = {key} AND {self.orders.column} = {expected}")
        self._write([begun], lambda **given: self.table.delete(filter=filter, **given), _verdict_of_delete)

    def _where(self, condition: str) -> str:
        return " AND ".join(filter(None, (self.orders.filter, condition)))

    def _write(
        self,
        begun: Sequence[Operation],
        call: Callable[..., Any],
        verdict: Callable[[Any, bool], int | None] | None = None,
        *,
        token: bool = True,
    ) -> None:
        """Make a call, sometimes repeat it with its token if the outcome is unknown, and record the outcome."""
        given: dict[str, Any] = {"timeout": self.chance.choice((None, None, 0.4, 3.0))}
        if token and self.chance.random() < 0.5:
            given["token"] = f"{self.name}:{next(self._tokens)}"
        unknown: BaseException | None = None
        for _ in range(self.chance.randint(1, REPEATS) if "token" in given else 1):
            try:
                receipt = call(**given)
            except memwal.UnknownOutcome as error:
                unknown = error
            except (memwal.Unavailable, memwal.FencedError) as error:
                for each in begun:
                    each.unknown(unknown) if unknown else each.failed(error)
                return
            else:
                for each in begun:
                    each.ok(applied=None if verdict is None else verdict(receipt, unknown is None))
                return
        for each in begun:
            each.unknown(unknown)


class Prober(Client):
    """Reads all rows of a region from one daemon or another, without checking which one owns it.

    A daemon that was stopped answers its last requests when it continues, so a prober soon sends the next one.
    """

    def __init__(self, process: Process, name: str) -> None:
        super().__init__(process, name)
        self._clients: dict[str, flight.FlightClient] = {}

    def step(self) -> None:
        region, endpoint = self.region(), self.chance.choice(self.orders.endpoints)
        if endpoint not in self._clients:
            self._clients[endpoint] = flight.FlightClient(endpoint, generic_options=_OPTIONS)
        columns = [self.orders.key, self.orders.column]
        asked = {"columns": columns, "level": "latest", "regions": [self.orders.regions[region]]}
        name = self.orders.named_table(region)
        asked |= {"table_name": name} if name else {}
        asked |= {"filter": self.orders.filter} if self.orders.filter else {}
        begun = self.begun("read", region, keys=self.orders.keys[region], level="latest")
        try:
            options = flight.FlightCallOptions(timeout=self.chance.choice((1.0, 3.0)))
            found = self.rows(rows_from(self._clients[endpoint], "scan", asked, options))
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            begun.failed(error)
            self._clients.pop(endpoint).close()
            return
        begun.ok({key: found[key] for key in self.orders.keys[region] if key in found})


class StorageReader(Client):
    """Reads `durable` from storage, without the owners."""

    slowness = 5.0

    def __init__(self, process: Process, name: str) -> None:
        super().__init__(process, name)
        self._tables: dict[str, Any] = {}

    def step(self) -> None:
        at, uri = self.region(), self.orders.uri
        if name := self.orders.named_table(at):
            uri = f"{uri}/{name}.lance"
        if uri not in self._tables:
            self._tables[uri] = memwal.open(uri, read_only=True, storage_options=self.orders.options or None)
        self.read(at, self._tables[uri], [("durable", "stored")])


def keys_of(
    base: BaseTable, each: int, key: str = "id", fixed: Mapping[str, Any] | None = None
) -> dict[int, list[int]]:
    """Return the first `each` keys of every region."""
    numbers = range(1, 100 * len(base.regions))
    schema = pa.schema([base.schema.field(name) for name in base.key])
    buckets = base.route(pa.Table.from_pylist([{**(fixed or {}), key: number} for number in numbers], schema)).tolist()
    of = {
        region: [number for number, bucket in zip(numbers, buckets, strict=True) if bucket == region]
        for region in set(buckets)
    }
    return {region: of[region][:each] for region in sorted(of)}


def _verdict_of_put(receipt: Any, first: bool) -> int | None:
    """Return whether a put of one row to a table with a rule stored it; None if an earlier call with its token
    decided."""
    return None if receipt.repeated else int(not receipt.skipped)


def _verdict_of_delete(receipt: Any, first: bool) -> int | None:
    """Return whether a delete by filter of one row deleted it; None if a call without an answer may have deleted it."""
    return 1 if receipt.rows else 0 if first and not receipt.skipped and not receipt.repeated else None


def main() -> int:
    """Run the clients that the argument describes; see the module."""
    process = Process(Orders.parse(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: process.stop.set())
    code = process.run()
    sys.stdout.flush()
    os._exit(code)  # abandoned calls may still wait for a daemon


if __name__ == "__main__":
    sys.exit(main())
