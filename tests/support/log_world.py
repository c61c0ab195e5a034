"""A region's log on a store in memory: claims, appends, flushes by hand, and collections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memwal.wal import (
    Claim,
    EntryCodec,
    ManifestStore,
    ObjectStore,
    RegionManifest,
    WalAppender,
    WalCollector,
    WalGarbage,
    bucket_region,
    claim,
)
from memwal.wal.layout import entry_key, parse_entry_key, wal_prefix
from tests.log_rows import CODEC, rows
from tests.support.clock import FakeClock, SeededIds
from tests.support.scripted_store import ScriptedStore

REGION = bucket_region(0)
AGE = 600.0
"""Age in seconds at which `LogWorld.collect` deletes an entry."""


class LogWorld:
    """A store, a clock, and the steps of the tests. The flushes write no SST."""

    def __init__(self, codec: EntryCodec = CODEC, store: Any = None) -> None:
        self.clock = FakeClock()
        self.store = ScriptedStore(self.clock.now) if store is None else store
        self.ids = SeededIds(7)
        self.codec = codec

    @property
    def manifests(self) -> ManifestStore:
        return ManifestStore(self.store, REGION, ids=self.ids, clock=self.clock)

    def claim(self, **changes: Any) -> Claim:
        """Claim the region; `changes` replace arguments of `claim`."""
        given: dict[str, Any] = {"spec_id": 1, "codec": self.codec, "ids": self.ids, "clock": self.clock}
        return claim(self.store, REGION, **(given | changes))

    def writer(self, claimed: Claim) -> WalAppender:
        return WalAppender(self.store, REGION, claimed.guard, self.codec, claimed.next_position, self.ids, self.clock)

    def open(self, **changes: Any) -> WalAppender:
        """Claim the region, and return the writer of the claim."""
        return self.writer(self.claim(**changes))

    def latest(self) -> RegionManifest:
        found = self.manifests.latest()
        assert found is not None
        return found

    def flushed_up_to(self, position: int) -> None:
        """Set the cursor as if every row up to `position` were in SSTs."""
        self.manifests.edit_unowned(lambda current: replace(current, replay_after=position))

    def collect(self, *, age: float = AGE, dry_run: bool = False, store: ObjectStore | None = None) -> WalGarbage:
        collector = WalCollector(store or self.store, REGION, self.codec, self.clock, workers=1)
        return collector.collect(age, dry_run=dry_run)

    def positions(self) -> list[int]:
        """Return the positions of the entries on storage, in order."""
        keys = map(parse_entry_key, self.store.list(wal_prefix(REGION)))
        return sorted(key.position for key in keys if key is not None)

    def entry(self, position: int) -> bytes:
        """Return the bytes of an entry."""
        data: bytes | None = self.store.get(entry_key(REGION, position, self.codec.suffix))
        assert data is not None
        return data

    def rewrite(self, position: int, data: bytes) -> None:
        """Replace the bytes of an entry."""
        self.store.put(entry_key(REGION, position, self.codec.suffix), data)

    def delete(self, *positions: int) -> None:
        """Delete entries, as a collector or an operator does."""
        for position in positions:
            self.store.delete(entry_key(REGION, position, self.codec.suffix))

    def contents(self) -> dict[str, bytes]:
        """Return the bytes of every object."""
        return {key: self.store.get(key) for key in self.store.list("")}


def put(log: WalAppender, *ids: int, applied: dict[str, int] | None = None) -> None:
    """Append an entry for each id."""
    for each in ids:
        log.append(rows(each), generation=1, applied=applied or {})


def found(claimed: Claim) -> list[int]:
    """Return the ids of the rows that a claim replayed, in order."""
    return [each for entry in claimed.entries for each in entry.rows["id"].to_pylist()]
