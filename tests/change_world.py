"""A table with a random life, decided by a seed, and a dict of the changes that its feed must deliver for each key."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pyarrow as pa

import memwal
from memwal import flush, wal
from tests.support.garbage import collect

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), ("n", pa.int64())])
QUIET: dict[str, Any] = {
    "commit": {"interval": "0s"},
    "gc": {"interval": "0s"},
    "wal": {"entry_size_max": "4KiB", "read_lease": "0s"},
    "memtable": {"rows_max": 200},
}
KEYS = 60
Row = dict[str, Any]


def row(key: int, n: int) -> Row:
    """Return a row. Its name is long, so that a put of a hundred rows makes several entries."""
    return {"id": key, "name": f"row {key} of put {n} " + "x" * 60, "n": n}


def applied(held: dict[int, Row], changes: pa.Table) -> None:
    """Apply changes with after-images to `held`; each must fit the rows in it."""
    for change in changes.to_pylist():
        kind, key = change["_change"], change["id"]
        assert (kind == "insert") == (key not in held), (kind, key)
        if kind == "delete":
            assert (change["name"], change["n"]) == (None, None)
            del held[key]
        else:
            held[key] = {name: change[name] for name in SCHEMA.names}


class ChangeWorld:
    """One table, its writer, and a reader of its changes that continues from a stored position each time."""

    def __init__(self, uri: str, seed: int, options: dict[str, str] | None = None) -> None:
        self.random = random.Random(seed)
        self.uri, self.options = uri, options or {}
        self.table = memwal.open(uri, schema=SCHEMA, key="id", regions=3, settings=QUIET, storage_options=self.options)
        self.left: list[Any] = []
        self.puts = 0
        self.rows: dict[int, Row] = {}
        self.expected: dict[int, list[tuple[str, Row | None, Row | None]]] = defaultdict(list)
        """For each key: kind, row before, row after."""
        self.read: dict[int, list[tuple[str, Row | None, Row | None]]] = defaultdict(list)
        self.seen: set[tuple[str, int, int]] = set()
        self.copy: dict[int, Row] = {}
        """The rows that result from the changes with after-images."""
        self.position = json.dumps(self.table.changes_position("earliest"))

    # ---- writing -------------------------------------------------------------------------------------------------

    def put(self) -> None:
        """Put some rows; many of them make several entries."""
        self.puts += 1
        count = self.random.choice((1, 3, 10, 50))
        keys = self.random.sample(range(KEYS), count)
        self.table.put([row(key, self.puts) for key in keys])
        for key in keys:
            before, self.rows[key] = self.rows.get(key), row(key, self.puts)
            self.expected[key].append(("insert" if before is None else "update", before, self.rows[key]))

    def delete(self) -> None:
        """Delete some keys; some of them do not exist."""
        keys = self.random.sample(range(KEYS), self.random.choice((1, 4)))
        self.table.delete(keys)
        for key in keys:
            if (before := self.rows.pop(key, None)) is not None:
                self.expected[key].append(("delete", before, None))

    # ---- the table's life ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Flush all regions."""
        self.table.flush()

    def commit(self) -> None:
        """Commit what is flushed."""
        self.table.commit()

    def flush_and_commit(self) -> None:
        """Flush and commit everything."""
        self.table.flush()
        self.table.commit()

    def collect(self) -> None:
        """Read everything, then delete all garbage except what a reader of changes at the end needs."""
        self.read_on()
        self.read_on()
        collect(self.uri, self.options, changes=1e-6)

    def take_over(self) -> None:
        """Let another writer claim the regions, from an open writer or from a closed one."""
        if self.random.random() < 0.5:
            self.table.close()
        self.left.append(self.table)
        self.table = memwal.open(self.uri, settings=QUIET, take_over=True, storage_options=self.options)

    def resize(self) -> None:
        """Change the number of regions."""
        self.table.close()
        base = flush.BaseTable.open(self.uri, self.options)
        to = self.random.choice([count for count in (1, 2, 3, 5) if count != base.buckets])
        store = wal.open_store(self.uri, self.options)
        flush.resize(self.uri, self.options, store, to, clock=wal.SystemClock(), ids=wal.SystemIds())
        self.table = memwal.open(self.uri, settings=QUIET, take_over=True, storage_options=self.options)

    def close(self) -> None:
        """Close every writer."""
        for table in [*self.left, self.table]:
            with suppress(memwal.MemWalError):
                table.close()

    # ---- reading -------------------------------------------------------------------------------------------------

    def read_on(self) -> None:
        """Read changes from the stored position, from the writer or from storage, and stop anywhere."""
        table = self.table
        if self.random.random() < 0.6:
            table = memwal.open(self.uri, read_only=True, storage_options=self.options)
        since, images = json.loads(self.position), self.random.choice(("after", "both"))
        changes = table.changes(since, images=images)
        if images == "both":
            for batch in changes:
                self._take(pa.Table.from_batches([batch]))
                if self.random.random() < 0.3:
                    break
        else:  # check the other form against the dict, and read again with both images
            applied(dict(self.copy), changes.read_all())
            changes = table.changes(since, until=changes.position, images="both")
            self._take(changes.read_all())
        self.position = json.dumps(changes.position)

    def _take(self, changes: pa.Table) -> None:
        before: Row | None = None
        for change in changes.to_pylist():
            kind, key = change["_change"], change["id"]
            values = {name: change[name] for name in SCHEMA.names}
            if kind == "update_preimage":
                before = values
                continue
            place = (change["_region"], change["_position"], change["_row"])
            assert place not in self.seen
            self.seen.add(place)
            if kind == "update_postimage":
                self.read[key].append(("update", before, values))
                self.copy[key] = values
            elif kind == "delete":
                self.read[key].append((kind, values, None))
                del self.copy[key]
            else:
                self.read[key].append((kind, None, values))
                self.copy[key] = values

    def check(self) -> None:
        """Read to the end, and check that every change of every key was delivered, in order, and nothing else."""
        since = json.loads(self.position)
        changes = memwal.open(self.uri, read_only=True, storage_options=self.options).changes(since, images="both")
        self._take(changes.read_all())
        self.position = json.dumps(changes.position)
        assert dict(self.read) == dict(self.expected)
        assert self.copy == self.rows

    def live(self, steps: int) -> None:
        """Take `steps` random steps."""
        moves = {
            self.put: 10,
            self.delete: 5,
            self.read_on: 5,
            self.flush: 2,
            self.commit: 2,
            self.flush_and_commit: 2,
            self.collect: 2,
            self.take_over: 1,
            self.resize: 1,
        }
        for move in self.random.choices(list(moves), list(moves.values()), k=steps):
            move()
