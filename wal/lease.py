"""Read leases: an owner answers reads from memory without a request to storage, and never returns outdated rows.

A read that begins after the acknowledgement of a write must see it, whichever owner acknowledged it. A claim does not
notify the region's owner, so memory alone proves nothing. A *proof* of ownership comes from storage: the newest
manifest has the owner's epoch, or an entry was created in its next slot. A proof counts from the moment at which it
*began*.

 1. **Promise.** A writer's manifest states how long its leases last (`read_lease`, milliseconds), in the same version
    as the claim. A claim raises the value if it is below its own, and never lowers it. (model: Lease!RaiseEpoch)
 2. **Read.** A read that begins within `read_lease` of the newest proof is answered from memory. Any other read first
    proves ownership, with one request; if the writer was fenced, the read fails with both epochs. Idle regions make no
    requests; appends are proofs. A lookup by key proves only the regions of its keys, since no other owner acknowledges
    rows of those keys. A read that sees a committed generation which is still in a memtable proves ownership whatever
    its lease: another owner may have cut the log into other generations, and flushed and committed them. (model:
    Lease!BeginRead, Lease!LookAtLease, Lease!Answer)
 3. **Wait.** A new owner answers no read, and makes no write visible or acknowledged, until the lease in the manifest
    before its own has passed since its sentinel was put. Replay runs meanwhile, so usually the wait is zero. *Crash
    while it waits: the next claim finds the lease in the manifest and waits.* (model: Lease!PutSentinel)
 4. **Release.** An owner that closes in order stops giving leases, then writes a manifest whose `read_lease` is 0: the
    next owner need not wait. It must have waited itself; otherwise the lease of the owner before it stands. *Crash in
    between: the next owner waits.* An owner that releases a region on request only sends a message, which saves two
    requests while the region is not served (`wal.fence`). The requester need not wait if the manifest that its claim
    follows still has the former owner's epoch. *The requester crashes: the next owner waits. Another writer claims in
    between: its epoch is higher, and the requester waits for that lease.* (model: Lease!EndReads, Lease!WriteRelease)
 5. **Resize.** Keys change their region, so a resize waits in the same way for every region that it has sealed before
    it decides. The regions that it opens start without a lease.

Rest: a region whose rows are all in the base table needs no owner, no lease and no claim for a read.

 1. The owner has committed its rows (model: Lease!Commit) and has waited for older leases itself. It serves the writes
    that it has accepted, ends, and stops giving leases. *Crash: no mark exists; the next claim replays the log.*
 2. If no row lingers, no memtable has rows and no SST is published, it writes a manifest with `released` = its epoch,
    `read_lease` = 0, and `replay_after` and `last_seen` at the end of its log, whose later entries hold no rows. The
    put succeeds only if no version, thus no claim, follows the one that it knows. *Unknown outcome: the owner has
    ended, so the mark is true whether it landed, lands late in the same slot, or never.* (model: Lease!WriteRest)
 3. A claim sets `released` to 0. Only the value that equals the epoch of its manifest counts, so a claim of a program
    that keeps unknown fields ends the rest as well; Lance drops them. A committer's prune keeps the value. A claim that
    knows this manifest continues like one that its owner has notified (`wal.fence`): the newest entry, which has the
    applied map, is at `last_seen`, and is never collected.
 4. A read looks up the newest manifest *after* it begins. If the region is at rest, the read opens the base table
    afterwards. Otherwise an owner answers it. (model: Lease!BeginStoredRead, Lease!LookAtRest, Lease!AnswerStored)

Proof that such a read misses no acknowledged row. Let the lookup find epoch e at rest, and a row be acknowledged, or
shown by another read, before the read began.

 * By an owner of a higher epoch: its claim wrote a manifest before it acknowledged or showed anything, so the lookup
   would have found the higher epoch. This also holds for `ShardWriter`. A claim that comes after the lookup is
   concurrent with the read, whose answer counts as of the lookup. The read may show rows that a new owner has replayed
   and committed before it shows them itself (step 3 of the leases). Every later read opens that base version as well,
   also one of an owner whose lease still runs, which then proves its ownership anew.
 * By epoch e: a commit removes an SST from the manifest only after the base version with its rows is durable. Without
   SSTs and rows in memory, the row was in the base table before the mark. The owner acknowledges nothing afterwards.
 * By a lower epoch, also if its append was in flight during the claim of e: every acknowledged entry lies below the
   sentinel of e (`wal.fence`, step 4; model: Log!OneOwnerAcks), so e replayed and committed it. No such owner shows
   other rows any more, because e waited for its lease before the mark.
 * A resize and a hand-over claim the region, or leave it claimed, before they change anything: no manifest at rest is
   the newest any more. A resize that follows the lookup is detected by the routing of the base version.

Proof that no read is outdated. Let the old owner begin its last proof at time p, and the new owner put its sentinel at
s. The proof read a manifest with the old epoch, or created a slot of the old owner, before the sentinel: p < s. The old
owner answers reads that begin before p + lease; the new one acknowledges nothing before s + lease.

Clocks. Only durations are compared, never the clocks of two machines. An owner uses the longer duration of its two
clocks, since one stops in a suspended machine and the other may be set. A waiting owner waits `CLOCK_RATE` times as
long, so clocks may differ in speed by that factor. A machine whose clocks both stop without detection (a paused virtual
machine without an external clock) may answer old rows for one lease after it resumes.

Lance's own ShardWriter does not wait for leases. Therefore a table of the arrow format, which that writer may own, has
none: each read proves ownership first.
"""

from __future__ import annotations

from memwal.wal.clock import NEVER, Clock, Instant, instant, since
from memwal.wal.manifest import EpochGuard, ManifestStore, RegionManifest


class ReadLease:
    """One claim's right to answer reads from memory.

    Thread safety. Any thread.
    Invariants. (1) `covers` is True only for a read that began within the lease of a proof, or before the proof began.
    (2) After `end` it is always False.
    """

    def __init__(self, guard: EpochGuard, manifests: ManifestStore, manifest: RegionManifest, clock: Clock) -> None:
        """`manifest`: the newest that `guard` has written; its `read_lease` applies."""
        self.guard, self._manifests, self._clock = guard, manifests, clock
        self._known, self._seconds = manifest, manifest.read_lease / 1000
        self._begun = self._proven = 0
        self._since: Instant = NEVER
        self._ended = False

    def ticket(self) -> int:
        """Return a number that a read takes when it begins, for `covers`."""
        return self._begun

    def covers(self, ticket: int) -> bool:
        """Return whether a read that took `ticket` may be answered from memory. Makes no request."""
        return not self._ended and not self.guard.fenced and (self.proven(ticket) or self._age() < self._seconds)

    def proven(self, ticket: int) -> bool:
        """Return whether a proof that began after `ticket` was taken has succeeded."""
        return self._proven > ticket

    @property
    def fresh(self) -> bool:
        """Whether a read that begins now is covered and no new proof is due yet: less than half of the lease has
        passed.
        """
        return not self._ended and not self.guard.fenced and self._age() < self._seconds / 2

    def begin(self) -> Instant:
        """Return the start of a proof; call it before the request to storage."""
        return instant(self._clock)

    def confirm(self, begun: Instant) -> None:
        """Record that storage confirmed ownership at a moment after `begun`."""
        self._since = max(self._since, begun)

    def prove(self) -> None:
        """Read storage to prove that this writer still owns the region. (model: Lease!BeginProof, Lease!EndProof)

        Raises: Fenced, Corrupt, StoreUnavailable, StoreRefused.
        """
        self._begun += 1
        number, begun = self._begun, self.begin()
        self._known = self._manifests.owned(self.guard, self._known)
        self.confirm(begun)
        self._proven = max(self._proven, number)

    def end(self) -> None:
        """Stop giving leases."""
        self._ended = True

    def _age(self) -> float:
        """Return the seconds since the newest proof began, by the clock that shows more."""
        return since(self._clock, self._since)
