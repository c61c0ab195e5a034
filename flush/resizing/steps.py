"""Resize: change the number of regions of a table, so that no key is ever in two regions that take writes.

Routing version k with n regions becomes version k+1 with m. Every region manifest has the routing version of its region
(the spec id), and the base table has the current version.

 1. **Finish** an earlier resize: switch to a decided version and open its regions (`flush.resizing.routing`).
    (model: Resize!Begin)
 2. **Seal** all of the m and of the n, region by region, those of the n last: a claim raises the epoch and seals in one
    manifest write. It fences the region's writer, and from then on only another resize may claim the region. A missing
    region is created sealed. *Crash here: some regions are sealed, the routing is k. The next resize continues; to stay
    with n, resize to n.* (model: Resize!Seal)
 3. **Drain** each of the n as it is sealed: replay its log, and flush it generation by generation. First wait until no
    older owner answers reads from memory (`wal.lease`), because a key may move to a region where it never was before.
    *Crash here: as in 2. The log, or an SST, has the rows.* (model: Resize!Drain)
 4. **Commit** until no manifest lists an SST. *Crash here: as in 2.* (model: Resize!Commit)
 5. **Prove** the following from storage, for all n under the claims of step 2: still owned, still sealed, no SST
    listed, no row above `replay_after`. Read the applied map of each (`flush.resizing.applied_maps`). Wait until no
    owner of the m answers reads from memory, as in 3. (model: Resize!Prove)
 6. **Decide** k+1, m and the applied map that all regions begin with, by one conditional create. *Before it nothing has
    changed; after it the resize cannot be undone.* If another resize has decided first, its decision is valid.
    (model: Resize!Decide)
 7. **Switch** the base table to k+1 and m, in one version. No commit can come in between, because no region publishes.
    *Crash here: the regions are sealed, and any process that opens the table, or resizes it again, does 7 and 8.*
    (model: Resize!Switch)
 8. **Open** each of the m, once the switch is on disk: a claim whose sentinel carries the map, then the manifest edit
    that makes it ACTIVE and of version k+1. *Crash here: as in 7.* Unused regions stay sealed, empty, and of their old
    version; a later resize to more regions opens them like the others. (model: Resize!Sync, Resize!Open)

Invariants.

 (1) A region that takes writes has the routing version of the base table, or an older version that all regions still
     have to be sealed for: between 6 and 8 every region is sealed or of k+1.
 (2) Sealed and drained, once true, stays true until k+1 is decided: only 8 breaks a seal.
 (3) A writer that routes by k can no longer write: its claims are fenced by 2, and later claims find SEALED or a newer
     version (`Sealed`, `Resized`). So the moment when the writer notices does not matter.
 (4) Acknowledged rows are in the base table before 6, and an applied token is in the map of 6.

Two concurrent resizes: the later seal fences the earlier resize, which stops; if both have reached 6, one decides. A
writer that opens the table in the meantime is rejected; its rows acknowledged earlier are below the sentinel of 2, and
are drained. No clock decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from memwal import wal
from memwal.flush.base.sharding import bucket_regions
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.committer import MEMORY_MAX, commit
from memwal.flush.errors import CommitConflict, InvalidResize
from memwal.flush.resizing.applied_maps import initial_map
from memwal.flush.resizing.routing import Decision, decide, finish
from memwal.flush.sst.files import SstFormat
from memwal.flush.sst.flusher import flush
from memwal.memtable import MemTable, row_schema
from memwal.wal.applied import AppliedMap
from memwal.wal.layout import UNSHARDED_REGION, parse_entry_key, wal_prefix
from memwal.wal.parallel_map import AT_ONCE, Budget, each

Step = Callable[[str], None]
"""Called with a short description of the next step."""


@dataclass(frozen=True)
class ResizeReport:
    """The result of one resize."""

    routing: int
    """Version of the routing afterwards."""
    before: int
    """Number of regions when it began."""
    regions: int
    """Number of regions afterwards."""
    version: int
    """Base-table version afterwards."""
    rows_drained: int
    """Rows that were only in the log."""
    ssts_committed: int
    seconds: float
    """From the first seal to the last region opened: the pause in writes."""
    resumed: bool = False
    """Whether it only finished an earlier resize."""


def is_being_resized(base: BaseTable, store: wal.ObjectStore, *, clock: wal.Clock) -> bool:
    """Return whether a region of the table is sealed: a resize is running, or was interrupted."""
    manifests = (wal.ManifestStore(store, region, clock=clock).latest() for region in base.regions)
    return any(manifest is not None and manifest.status is wal.RegionStatus.SEALED for manifest in manifests)


def resize(
    uri: str,
    storage_options: Mapping[str, str] | None,
    store: wal.ObjectStore,
    buckets: int,
    *,
    clock: wal.Clock,
    ids: wal.Ids,
    retries: int = 10,
    memory_max: int = MEMORY_MAX,
    options: wal.WalOptions | None = None,
    on_step: Step = lambda _: None,
    stop_writers: Callable[[], object] = lambda: None,
    ended: dict[UUID, wal.Released] | None = None,
    at_once: int = AT_ONCE,
) -> ResizeReport:
    """Change the table at `uri`, the root of `store`, to `buckets` regions. Steps: see the module docstring.

    - `retries`, `memory_max`: as for `commit`; `memory_max` also limits the bytes of logs drained at once, but at least
      one region's.
    - `on_step`: called before each step, in this thread.
    - `stop_writers`: called before the first seal of a region in use, so that its owner may end the writers in order.
    - `ended`: gets the notes for the next claims, as `finish`.
    - `at_once`: regions sealed, drained and opened in parallel.

    Thread safety. Any number of threads and processes; one wins.
    Durability. When it returns, every row acknowledged before is in the base table, and the regions may be claimed by
    the new routing.
    Raises InvalidResize (nothing was written); CommitConflict (another resize came in between: check, and resize
    again); what `commit` and `wal.claim` raise. After any of them, resize again.
    """
    options = options or wal.WalOptions()
    begun = BaseTable.open(uri, storage_options)
    broken_off = is_being_resized(begun, store, clock=clock)
    _check(begun, buckets, broken_off)
    base = finish(begun, store, clock=clock, ids=ids, options=options, at_once=at_once)
    if base.buckets == buckets and not is_being_resized(base, store, clock=clock):
        if base is begun and not broken_off:
            raise InvalidResize(f"{uri}: the table has {buckets} regions already; give another number")
        return ResizeReport(base.routing_version, begun.buckets, buckets, base.version, 0, 0, 0.0, resumed=True)
    run = _Run(base, store, clock, ids, options, on_step, at_once, Budget(memory_max))
    try:
        rows = run.seal_and_drain([region for region in bucket_regions(buckets) if region not in base.regions])
        stop_writers()
        began = clock.monotonic()
        rows += run.seal_and_drain(base.regions)
        on_step("committing")
        limits: dict[str, Any] = {"retries": retries, "memory_max": memory_max, "courtesy": 0.0}
        report = commit(uri, storage_options, store, clock=clock, ids=ids, options=options, **limits)
        base = run.switch(buckets, {} if ended is None else ended)
    except (wal.Fenced, wal.Resized) as error:
        raise CommitConflict(f"{uri}: another resize took the regions over ({error})") from error
    seconds = clock.monotonic() - began
    return ResizeReport(base.routing_version, begun.buckets, base.buckets, base.version, rows, report.ssts, seconds)


def _check(base: BaseTable, buckets: int, broken_off: bool) -> None:
    if not 1 <= buckets <= wal.BUCKETS_MAX:
        raise InvalidResize(f"{buckets} regions: give a number from 1 to {wal.BUCKETS_MAX}")
    if base.regions == (UNSHARDED_REGION,):
        raise InvalidResize(
            f"{base.uri}: another program set it up without sharding, which is final; copy the rows into a new table"
        )
    if not base.routing_is_stable and not (broken_off and buckets == base.buckets):  # going back moves no row
        way = f"go back to {base.buckets} regions, or " if broken_off else ""
        raise InvalidResize(
            f"{base.uri}: a column by which its rows are routed was dropped, so the region of a row is unknown; {way}"
            "copy the rows into a new table"
        )


@dataclass
class _Run:
    """Steps 2 to 8 of one resize.

    Thread safety. One thread only; it works on several regions at once.
    """

    base: BaseTable
    store: wal.ObjectStore
    clock: wal.Clock
    ids: wal.Ids
    options: wal.WalOptions
    on_step: Step
    at_once: int
    budget: Budget
    _claims: dict[UUID, wal.Claim] = field(default_factory=dict)

    def seal_and_drain(self, regions: Sequence[UUID]) -> int:
        """Run steps 2 and 3; return the number of rows that were only in the log."""
        rows = 0
        for number, drained in enumerate(each(self._sealed_and_drained, regions, self.at_once), 1):
            rows += drained
            self.on_step(f"{number} of {len(regions)} regions sealed and drained")
        return rows

    def switch(self, buckets: int, ended: dict[UUID, wal.Released]) -> BaseTable:
        """Run steps 5 to 8. `ended`: as for `finish`. Raises CommitConflict if another number was decided."""
        self.on_step("switching")
        maps = list(each(self._proved, self.base.regions, self.at_once))
        owned = each(self._owned, self._claims, self.at_once)  # all claims again, after the last region was sealed
        tips = {region: claimed.next_position - 1 for region, claimed in self._claims.items()}
        ended |= {manifest.region_id: wal.Released(manifest, tips[manifest.region_id]) for manifest in owned}
        self._wait_for_readers(self._claims.values())
        proposed = Decision(self.base.routing_version + 1, buckets, initial_map(maps), self.ids.entry_id())
        outcome = decide(self.store, proposed, clock=self.clock, options=self.options)
        base = finish(
            self.base.latest(),
            self.store,
            clock=self.clock,
            ids=self.ids,
            options=self.options,
            at_once=self.at_once,
            ended=ended,
        )
        if outcome.buckets != buckets:
            raise CommitConflict(f"{base.uri}: another resize, to {outcome.buckets} regions, was decided first")
        return base

    def _sealed_and_drained(self, region: UUID) -> int:
        logged = 0  # bytes of the log that a claim replays, as listed before the seal
        manifest = self._manifests(region).latest()
        rests = manifest is not None and manifest.at_rest  # a log that was released at rest need not be listed
        if self.at_once > 1 and not rests:
            after = 0 if manifest is None else manifest.replay_after
            entries = ((parse_entry_key(info.key), info.size) for info in self.store.describe(wal_prefix(region)))
            logged = sum(size for key, size in entries if key is not None and key.position > after)
        with self.budget.of(logged):
            claimed = self.seal(region, wal.Released(manifest, manifest.last_seen) if manifest and rests else None)
            rows = self.drain(claimed)
            claimed.entries.clear()
        self._claims[region] = claimed
        return rows

    def seal(self, region: UUID, released: wal.Released | None) -> wal.Claim:
        """Claim `region`, and seal it with the claim. `released`: the note of its former owner."""
        return wal.claim(
            self.store,
            region,
            spec_id=self.base.routing_version,
            codec=self.base.codec,
            ids=self.ids,
            clock=self.clock,
            known=wal.Known(self.base.committed.get(region, 0), released),
            seal=True,
            options=self.options,
        )

    def drain(self, claimed: wal.Claim) -> int:
        """Flush generations as in the log: one that Lance's own writer may have published has all its rows in it."""
        rows, generation, covers, done = list[wal.Entry](), claimed.manifest.current_generation, 0, 0
        for entry in claimed.entries:
            if entry.header.generation > generation and rows:
                done += self._flush(claimed, rows, generation, covers)
                rows, generation = [], generation + 1
            rows.append(entry)
            covers = entry.position
        return done + self._flush(claimed, rows, generation, covers)

    def _flush(self, claimed: wal.Claim, entries: list[wal.Entry], generation: int, covers: int) -> int:
        base = self.base
        table = MemTable(row_schema(base.schema, base.key), base.key, (), generation)
        for entry in entries:
            if entry.rows.num_rows:
                table.restore(entry.rows)
        if not table.rows:
            return 0
        self._wait_for_readers([claimed])
        table.freeze()
        flush(
            self.store,
            self._manifests(claimed.guard.region_id),
            claimed.guard,
            table.snapshot(),
            SstFormat.of(base),
            generation=generation,
            covers_position=covers,
            ids=self.ids,
        )
        return table.rows

    def _proved(self, region: UUID) -> AppliedMap:
        """Run step 5 for one region; return its applied map."""
        manifest = self._owned(region)
        entries, applied = wal.read_tail(
            self.store,
            region,
            self.base.codec,
            manifest.replay_after,
            clock=self.clock,
            options=self.options,
            log_id=manifest.log_id,
        )
        left = sum(entry.rows.num_rows for entry in entries)
        if left or manifest.ssts:
            raise CommitConflict(
                f"{wal.named(region)}: {left} rows of its log and {len(manifest.ssts)} SSTs are not in the base table"
            )
        return applied

    def _wait_for_readers(self, claims: Iterable[wal.Claim]) -> None:
        until = max(claimed.others_read_until for claimed in claims)
        self.clock.sleep(max(0.0, until - self.clock.monotonic()))

    def _owned(self, region: UUID) -> wal.RegionManifest:
        """Return the newest manifest of `region`; it must be owned and sealed. Raises Fenced, Corrupt."""
        manifest = self._manifests(region).owned(self._claims[region].guard)
        if manifest.status is not wal.RegionStatus.SEALED:
            raise wal.Corrupt(
                f"{wal.named(region)}: it was opened while writer epoch {manifest.writer_epoch} had it sealed"
            )
        return manifest

    def _manifests(self, region: UUID) -> wal.ManifestStore:
        return wal.ManifestStore(self.store, region, ids=self.ids, clock=self.clock, options=self.options)
