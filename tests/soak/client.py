"""Run one client of the soak in its own process: `python -m tests.soak.client KIND CONFIG ENDPOINTS JOURNAL SEED`.

- `writer`: puts and deletes with tokens, one after the other, each until it is acked; then gets the rows it wrote.
- `reader`: every kind of read, through the daemons and from storage; no key twice, none older than it was before.
- `feed`: follows the changes, alternately from storage and through the daemons, and notes each with its position.

A restarted client continues from its journal. It notes problems in the journal, and continues. SIGTERM ends it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

os.environ.setdefault("LANCE_LOG", "critical")

import memwal
from tests.conftest import WIDTH, WORDS, Made
from tests.soak.journal import Journal, last, lines
from tests.soak.stream import KEYS, Plan, State, mismatch, version_of

AGAIN = (memwal.Unavailable, memwal.UnknownOutcome, memwal.FencedError)
"""Errors after which a client repeats the call."""
_PAUSE = 0.5
"""Seconds between two steps of a client."""


class Client:
    """Common part of the kinds: the table through its daemons and from storage, and the journal."""

    def __init__(self, config: Path, endpoints: list[str], journal: Path, seed: int) -> None:
        self.config, self.endpoints, self.path, self.seed = config, endpoints, journal, seed
        self.journal, self.over = Journal(journal), threading.Event()
        self.chance = random.Random(f"{seed}/{os.getpid()}")

    def connected(self) -> Any:
        """Connect to the table through its daemons, as soon as one answers."""
        return self.again(memwal.connect, self.endpoints)

    def stored(self) -> Any:
        """Open the table from storage."""
        return self.again(memwal.open, _uri(self.config), settings=self.config, read_only=True)

    def again(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Return what a call returns; repeat it while the daemons or storage do not answer."""
        while True:
            try:
                return call(*given, **named)
            except AGAIN as error:
                self.journal.note(again=str(error)[:200])
                time.sleep(_PAUSE)

    def wrong(self, text: str) -> None:
        """Note a problem."""
        self.journal.note(wrong=f"{self.path.stem}: {text}", at=time.time())


def write(client: Client) -> None:
    """Run a writer; see the module. A step in progress is finished before it ends."""
    number = int(client.path.stem.rpartition("-")[2])
    plan, made, table = Plan(number, client.seed), Made(), client.connected()
    n = (last(client.path, "acked") or 0) + 1
    state = plan.state(n - 1)
    while not client.over.wait(_PAUSE):
        step, token = plan.step(n), f"writer-{number}:{n}"
        client.journal.note(begun=n)
        if step.deletes:
            client.again(table.delete, list(step.ids), token=token, timeout=30.0)
        else:
            client.again(table.put, made.table(step.ids, n), token=token, timeout=30.0)
        client.journal.note(acked=n)
        plan.apply(state, n)
        found = client.again(table.get, list(step.ids), columns=["id", "name"])
        if said := mismatch(_versions(found), {id: state[id] for id in step.ids if id in state}):
            client.wrong(f"a get after step {n}: {said}")
        n += 1


def read(client: Client) -> None:
    """Run a reader; see the module."""
    through, stored = client.connected(), client.stored()
    seen: dict[str, State] = {"latest": {}, "durable": {}}
    while not client.over.wait(_PAUSE):
        for table, level in ((through, "latest"), (stored, "durable")):
            ids = client.chance.sample(range(KEYS), 20)
            found = _versions(client.again(table.get, ids, columns=["id", "name"], level=level))
            for id, version in found.items():
                if version < seen[level].get(id, 0):
                    client.wrong(f"{level}: key {id} has version {version} after {seen[level][id]}")
            seen[level].update(found)
            kind = client.chance.choice(sorted(READS))
            rows = client.again(READS[kind], table, level, client.chance)
            ids_read = rows.column("id").to_pylist()
            if len(set(ids_read)) != len(ids_read):
                client.wrong(f"{kind} at {level} has a key twice")
            client.journal.note(read=kind, level=level, rows=len(ids_read))


def _vector(chance: random.Random) -> list[float]:
    return [chance.gauss(0.0, 1.0) for _ in range(WIDTH)]


READS: dict[str, Callable[[Any, str, random.Random], Any]] = {
    "scan": lambda table, level, _: table.scan(["id"], level=level).read_all(),
    "filter": lambda table, level, chance: table.scan(
        ["id"], f"price < {chance.randrange(1000)}", limit=100, level=level
    ).read_all(),
    "search": lambda table, level, chance: table.search("vector", _vector(chance), k=5, columns=["id"], level=level),
    "match": lambda table, level, chance: table.match("body", chance.choice(WORDS), k=5, columns=["id"], level=level),
    "sql": lambda table, level, chance: table.sql(
        f"select id from table where price >= {chance.randrange(1000)} order by id limit 50", level=level
    ).read_all(),
}


def follow(client: Client) -> None:
    """Run a feed; see the module."""
    position = last(client.path, "position")
    lives = sum("life" in line for line in lines(client.path))
    client.journal.note(life=lives + 1)
    table = client.stored() if lives % 2 else client.connected()
    if position is None:
        position = client.again(table.changes_position, "earliest")  # the writers may have begun already
        client.journal.note(changes=[], position=position)
    changes = table.changes(position, columns=["id", "name"], follow=True)
    while True:
        client.again(_note_all, client.journal, changes)


def _note_all(journal: Journal, changes: Any) -> NoReturn:
    for batch in changes:
        kinds, ids, names = (batch.column(name).to_pylist() for name in ("_change", "id", "name"))
        versions = [None if name is None else version_of(name) for name in names]
        journal.note(changes=list(zip(kinds, ids, versions, strict=True)), position=changes.position)
    raise AssertionError("a feed that follows has ended")


def _versions(rows: Any) -> State:
    return {row["id"]: version_of(row["name"]) for row in rows.to_pylist()}


def _uri(config: Path) -> str:
    return str(tomllib.loads(config.read_text(encoding="utf-8"))["table"]["uri"])


def main(kind: str, config: str, endpoints: str, journal: str, seed: str) -> None:
    """Run a client; see the module."""
    client = Client(Path(config), endpoints.split(","), Path(journal), int(seed))

    def end(number: int, frame: FrameType | None) -> None:
        client.over.set()
        if kind != "writer":
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    {"writer": write, "reader": read, "feed": follow}[kind](client)


if __name__ == "__main__":
    main(*sys.argv[1:])
