"""Write to a table and print every acknowledgement, until something ends the process.

    writer.py URI REGIONS SEED FIRST OPERATIONS [KILL_AT before|after]
    writer.py URI REGIONS JSON_LIST_OF_OPERATIONS 0 0 [KILL_AT before|after]

Lines out, JSON: {"state": {id: name}} with the rows found, {"try": operation} before and {"ack": number} after each
one. KILL_AT is a kill point: the process ends with SIGKILL right before or after its n-th change of an object on
storage.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa

import memwal
from memwal import wal
from memwal.flush.commits.rounds import Rounds

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 8)),
    ]
)
SETTINGS = {
    "commit": {"interval": "0s"},
    "memtable": {"rows_max": 100},
    "wal": {"entry_size_max": "2KiB", "linger_max": "1h"},
}


class Mortal:
    """A store whose process dies at the n-th change."""

    def __init__(self, store: Any, kill_at: int, when: str) -> None:
        self._store, self._kill_at, self._when, self._changes = store, kill_at, when, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._dying(method) if name in ("put_if_absent", "put", "delete") else method

    def _dying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._changes += 1
            if self._changes == self._kill_at and self._when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            answer = method(*arguments)
            if self._changes == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call


def say(**line: Any) -> None:
    """Print one line for the process that started this one."""
    print(json.dumps(line), flush=True)


def rows(ids: list[int], number: int) -> pa.Table:
    """Return the rows of operation `number`."""
    return pa.Table.from_pylist(
        [
            {
                "id": id,
                "name": f"row {id} v{number}",
                "body": f"word{number} harbor",
                "vector": [float(id), number, *[0.0] * 6],
            }
            for id in ids
        ],
        schema=SCHEMA,
    )


def operation(seed: int, number: int, regions: int) -> dict[str, Any]:
    """Return operation `number` of the seed; with one region some puts are not durable."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(["put", "delete", "flush", "commit"], [12, 4, 2, 2])[0]
    many = rng.choice([1, 3, 60])
    ids = sorted(rng.sample(range(80), 1 if kind == "delete" else many))
    durable = regions > 1 or rng.random() < 0.7
    return {"number": number, "kind": kind, "ids": ids, "durable": durable}


def run(table: Any, op: dict[str, Any]) -> None:
    """Do one operation."""
    if op["kind"] == "put":
        table.put(rows(op["ids"], op["number"]), durable=op["durable"], token=("writer", op["number"]))
    elif op["kind"] == "delete":
        table.delete(op["ids"], durable=op["durable"])
    else:
        getattr(table, op["kind"])()


def main() -> None:
    """Run the program; see the module."""
    uri, regions, seed, first, operations = sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:6])
    numbers = range(first, first + operations)
    ops = json.loads(seed) if seed.startswith("[") else (operation(int(seed), number, regions) for number in numbers)
    if len(sys.argv) > 6:
        really_open, kill_at, when = wal.open_store, int(sys.argv[6]), sys.argv[7]
        wal.open_store = lambda *at, **named: Mortal(really_open(*at, **named), kill_at, when)
    Rounds._gave_way = lambda *_: False  # who planned the same commit was killed; by default a commit waits 3 s for it
    indexes = {"vector": "ivf_pq", "body": "fts"}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=regions, indexes=indexes, settings=SETTINGS) as table:
        say(
            state={row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()},
            rows=table.count(),
        )
        for op in ops:
            say(**{"try": op})
            run(table, op)
            say(ack=op["number"])
    say(closed=True)


if __name__ == "__main__":
    main()
