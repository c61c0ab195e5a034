"""Decide whether a read may be answered from a region's memory or storage must first confirm the owner.

A read that the lease covers proceeds at once (`wal.lease`). Any other read asks storage; reads that wait at the same
time share one answer. When half of the lease has passed, the next read starts its renewal in another thread, so reads
of a continuously read region never wait for storage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial

from memwal import wal
from memwal.ingest.engine.region.core import RegionCore


class Proofs:
    """Proofs, made for reads, that a core still owns its region. Thread safety. Any thread."""

    def __init__(self, core: RegionCore, thread: str, fenced: Callable[[BaseException], None]) -> None:
        """`thread`: name of the threads that renew the lease. `fenced`: called with the error when another owner was
        found.
        """
        self._core, self._thread, self._fenced = core, thread, fenced
        self._proving = threading.Lock()

    def unproven(self, *, anew: bool = False) -> Callable[[], None] | None:
        """Return None if the region is known to be owned for a read that begins now, else a call that asks storage.

        `anew`: ask storage even if the lease covers the read. The returned call raises: Fenced, which ends the region;
        Corrupt, StoreUnavailable, StoreRefused.
        """
        lease, alone = self._core.lease, self._core.alone
        if not anew and alone and lease.fresh:
            return None
        ticket = lease.ticket()
        if anew or not alone or not lease.covers(ticket):
            return partial(self._prove, lease.proven if anew else lease.covers, ticket)
        if not self._proving.locked():
            threading.Thread(target=self._renew, name=self._thread, daemon=True).start()
        return None

    def held(self) -> AbstractContextManager[object]:
        """Wait for the proof in progress; no proof is made inside the returned context."""
        return self._proving

    def _prove(self, enough: Callable[[int], bool], ticket: int) -> None:
        with self._proving:
            if self._core.alone and enough(ticket):
                return  # the proof of another read, which this one waited for, covers it
            try:
                self._core.prove()
            except wal.Fenced as error:
                self._fenced(self._core.failure or error)
                raise

    def _renew(self) -> None:
        with suppress(wal.WalError):  # the next read that needs the proof raises this error
            self._prove(lambda _: self._core.lease.fresh, 0)
