"""Followers of the changes of a `ClusterWorld`'s table: each keeps a copy of the table by them.

The copy and the position are stored in one step, as in one transaction, so a restarted follower continues where it was.
What must hold:

 1. Each change fits the copy: only a missing key is inserted, only a present one is updated or deleted, and a
    row before a change equals the copy's. So no change is delivered twice, left out or altered.
 2. Whatever was durable when a read began is in the copy at the end of this read; the ledger judges it like a read at
    `durable` from storage.
 3. Changes are gone only if an actor may have collected them. The copy is then built anew.
 4. At the end the copy equals the table, except for rows of loads and other programs, which are not in the log.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal.ingest.engine.api.changes import CHANGES_GONE
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import Invalid, MemWalError
from tests.simulation.cluster_clients import Connected
from tests.simulation.oracle import Wrong
from tests.simulation.process import pairs

if TYPE_CHECKING:
    import pyarrow as pa

    from tests.simulation.world import World

_BREAKS_OFF = 0.1
"""Share of the batches of a read after which the read is abandoned."""
_FOLLOWED = 0.3
"""Share of the worlds with a follower."""
_COLLECTORS = ("collector0", "meddler0", "upkeep0")
"""Actors that delete entries and base versions even if readers of changes need them."""


@dataclass
class Copy:
    """The state of a follower that survives a kill."""

    position: dict[str, Any] | None = None
    """None before the first read, and after changes were gone."""
    rows: dict[int, int] = field(default_factory=dict)
    """The value of each key."""
    changes: int = 0

    def apply(self, batch: pa.RecordBatch, position: dict[str, Any], *, exact: bool = True) -> None:
        """Apply changes up to `position`. `exact`: each change must fit. Raises: Wrong."""
        columns = (batch.column(name).to_pylist() for name in ("_change", "_region", "_position", "id", "v"))
        for kind, region, at, key, value in zip(*columns, strict=True):
            told = f"{kind} of {key} = {value} at position {at} of region {region}"
            if exact and (kind == "insert") == (key in self.rows):
                raise Wrong(f"the feed tells {told}; the copy has {self.rows.get(key)}")
            if exact and kind in ("update_preimage", "delete") and value not in (None, self.rows[key]):
                raise Wrong(f"the feed tells {told}; the copy has {self.rows[key]}")
            if kind == "delete":
                self.rows.pop(key, None)
            elif kind != "update_preimage":
                self.rows[key] = value
            self.changes += 1
        self.position = position


@dataclass
class Feed:
    """The change feed of one world."""

    followed: bool
    """Whether the world has a follower."""
    age: str = "0s"
    """`gc.changes_age_min`; an hour exceeds the difference of any two clocks."""
    stays: bool = False
    """Whether collections keep everything that a reader needs."""
    copies: dict[str, Copy] = field(default_factory=dict)
    """The copy of each follower."""

    @classmethod
    def drawn(cls, seed: int, visitors: Sequence[str]) -> Feed:
        """Draw the feed from a random source of its own, so that all other draws of the world stay the same without
        it."""
        chance = random.Random(f"feed {seed}")
        age = chance.choice(("0s", "1h"))
        return cls(chance.random() < _FOLLOWED, age, age != "0s" and not set(visitors) & set(_COLLECTORS))


class Follower(Connected):
    """Reads changes from its last position on, from storage or through a daemon, mostly up to the end."""

    pace = (0.05, 0.3, 1.0)

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.copy = self.cluster.feed.copies.setdefault(name, Copy())
        self._stored = StoredTable(world.base, self.store, self.clock)

    def step(self) -> None:
        world = self.cluster
        began = world.ledger.moment()
        try:
            read = self.read_on(self._stored if world.random.random() < 0.6 else self.table)
        except MemWalError as error:
            world.say(f"changes: {type(error).__name__}")
            self._missed(error)
            return
        world.say(f"{self.copy.changes} changes read, {'all' if read else 'not all'} that there are")
        if read:
            self._judge(began)

    def read_on(self, table: Any) -> bool:
        """Read changes; return whether every change that existed when it began was read. Raises: Wrong; MemWalError."""
        if self.copy.position is None:
            self._copied(table)
            return True
        chance = self.world.random
        changes = table.changes(self.copy.position, images=chance.choice(("after", "both")))
        for batch in changes:
            self.copy.apply(batch, changes.position)
            if chance.random() < _BREAKS_OFF:
                return False
        self.copy.position = changes.position
        return True

    def _copied(self, table: Any) -> None:
        """Copy the table. The scan may already show changes after the position requested before it."""
        since = table.changes_position()
        copy = Copy(rows=self._told(table.scan(level="durable").read_all()))
        changes = table.changes(since)
        for batch in changes:
            copy.apply(batch, changes.position, exact=False)
        self.copy.rows, self.copy.position = copy.rows, changes.position

    def _missed(self, error: MemWalError) -> None:
        if not isinstance(error, Invalid) or error.details.get("reason") != CHANGES_GONE:
            self.expected(error)
        elif self.cluster.feed.stays:
            raise Wrong(f"{self.name}: nobody collects changes: {error}") from error
        else:
            self.copy.position = None

    def _judge(self, began: int) -> None:
        world = self.cluster
        ours = [row for row in self.copy.rows.items() if world.is_of_clients(row[0])]
        keys = world.keys_of_clients()
        world.ledger.read(f"the copy of {self.name}", began, ours, keys, level="durable", stored=True)

    def _told(self, rows: pa.Table) -> dict[int, int]:
        return {key: value for key, value in pairs(rows) if self.cluster.is_logged(key)}

    def check_end(self) -> None:
        """Check without faults that the copy equals the table. Raises: Wrong."""
        try:
            while not self.read_on(self._stored):
                pass
        except Invalid as error:
            self._missed(error)
            return
        found = self._told(self._stored.scan(level="durable").read_all())
        if found != self.copy.rows:
            wrong = sorted(found.items() ^ self.copy.rows.items())
            raise Wrong(f"the end: the copy of {self.name} differs from the table in {wrong[:5]}")
