"""Read leases: an owner answers reads from memory without asking storage, and never with rows that are not the newest.

A read that begins after the acknowledgement of a write must see it, whichever owner acknowledged it. A claim deposes
the owner of a region without telling it, so memory alone proves nothing. A *proof* of ownership comes from storage: the
newest manifest has our epoch, or an entry was created in our next slot. A proof counts from the moment at which it was
*begun*.

1. **Promise.** A writer's manifest says how long its leases last (`read_lease`, milliseconds; it is in the same
   version as the claim). A claim raises the value where it is below its own, and never lowers it.
   (model: Lease!RaiseEpoch)
2. **Read.** A read that begins within `read_lease` of the newest proof is answered from memory. Any other proves
   ownership first: one request. Idle regions make no request; appends are proofs. A read that sees a committed
   generation which it still has in a memtable proves ownership anew, whatever its lease: another owner may have
   committed other rows under that number. (model: Lease!BeginRead, Lease!LookAtLease, Lease!Answer)
3. **Wait.** A new owner answers no read, makes no write visible and acknowledges none until the lease in the manifest
   before its own has passed since its sentinel was put. Replay runs meanwhile, so mostly there is no wait.
   (model: Lease!PutSentinel)
4. **Release.** An owner that closes in order stops giving leases, then writes a manifest whose `read_lease` is 0: the
   next owner need not wait. It must have waited itself; otherwise the lease of the owner before it stands.
   (model: Lease!EndReads, Lease!WriteRelease)
5. **Resize.** Keys change their region, so a resize waits the same way for every region before it decides.

Why no read is too old: let the old owner begin its last proof at time p, and the new owner put its sentinel at s. The
proof read a manifest with the old epoch, or created a slot of the old owner, before the sentinel: p < s. The old owner
answers reads that begin before p + lease; the new one acknowledges nothing before s + lease.

Clocks. Only lengths of time are compared, never the clocks of two machines. An owner takes the longer time of its two
clocks, since one stops in a suspended machine and the other may be set. A waiting owner waits `CLOCK_RATE` times as
long, so clocks may differ in speed by that factor. A machine whose clocks both stop unnoticed (a paused virtual machine
without a clock from outside) may answer old rows for as long as a lease after it wakes up.

Lance's own ShardWriter does not wait for leases. So a table of the arrow format, which it may own, has none: each read
proves ownership first.
"""

from __future__ import annotations

from memwal.wal.clock import NEVER, Clock, Instant, instant, since
from memwal.wal.epoch import EpochGuard
from memwal.wal.manifest import ManifestStore, RegionManifest


class ReadLease:
    """One claim's right to answer reads from memory.

    Thread safety. Any thread.
    Invariants. (1) `covers` is True only for a read that began within the lease of a proof, or before the proof was
    begun. (2) After `end` it is False for ever.
    """

    def __init__(self, guard: EpochGuard, manifests: ManifestStore, manifest: RegionManifest, clock: Clock) -> None:
        """`manifest`: the newest that `guard` has written, whose `read_lease` it is."""
        self._guard, self._manifests, self._clock = guard, manifests, clock
        self._known, self._seconds = manifest, manifest.read_lease / 1000
        self._begun = self._proven = 0
        self._since: Instant = NEVER
        self._ended = False

    def ticket(self) -> int:
        """A number that a read takes when it begins, for `covers`."""
        return self._begun

    def covers(self, ticket: int) -> bool:
        """Whether a read that took `ticket` may be answered from memory. Asks no storage."""
        return not self._ended and not self._guard.fenced and (self.proven(ticket) or self._age() < self._seconds)

    def proven(self, ticket: int) -> bool:
        """Whether a proof that was begun after `ticket` was taken has succeeded."""
        return self._proven > ticket

    @property
    def fresh(self) -> bool:
        """Whether a read that begins now is covered, and no proof is due yet, for reads that begin later."""
        return not self._ended and not self._guard.fenced and self._age() < self._seconds / 2

    def begin(self) -> Instant:
        """The moment at which a proof begins; call it before the request to storage."""
        return instant(self._clock)

    def confirm(self, begun: Instant) -> None:
        """Storage has confirmed that the region was ours at a moment after `begun`."""
        self._since = max(self._since, begun)

    def prove(self) -> None:
        """Ask storage whether the region is still ours. (model: Lease!BeginProof, Lease!EndProof)

        Raises: Fenced, Corrupt, StoreUnavailable, StoreRefused.
        """
        self._begun += 1
        number, begun = self._begun, self.begin()
        self._known = self._manifests.owned(self._guard, self._known)
        self.confirm(begun)
        self._proven = max(self._proven, number)

    def end(self) -> None:
        """Stop giving leases."""
        self._ended = True

    def _age(self) -> float:
        """Seconds since the newest proof was begun, by the clock that shows more."""
        return since(self._clock, self._since)
