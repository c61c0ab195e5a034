"""The regions of a table that this process owns now; they come and go while the table is used.

A region comes (`acquire`):

1. Its SST directories are listed, then it is claimed and its log replayed. *Crash or failure: nobody owns it, or a
   claim that nobody uses; the next claim raises the epoch again.*
2. It joins the set, in the columns of that moment. From here on calls find it.
3. Where much was replayed it is flushed beside, so that owners which die one after the other do not each replay more.

A call for a region that is coming waits for it: whoever sends it here knows that nobody else has it.

A region goes (`release`), which is the first half of a planned hand-over:

1. Asked to, it is flushed while it still serves, so that the next owner has little to replay. *Failure: it stays here.*
2. It leaves the set: calls that come now are told `not_owner` and write nothing.
3. Its writer ends: what was queued is served and acked, rows that linger are appended, its threads end. The log stays.
4. Only then `release` returns. *Nothing is acked by this writer from here on, whoever claims the region next, and
   whenever; had it slept through all of this, the epoch of the next claim would refuse its append.*
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from uuid import UUID

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.errors import Invalid, MemWalError, Unavailable
from memwal.ingest.refusals import not_owner
from memwal.ingest.region.context import RegionContext
from memwal.ingest.region.writer import RegionWriter
from memwal.ingest.rpc import owner_notes as owners
from memwal.ingest.table.garbage import TableCollector

_LOG = logging.getLogger("memwal.regions")
REPLAYED_QUICKLY = 16 << 20
"""Bytes of memtables, indexes counted, that are less trouble to replay than to flush before a region changes hands."""
REPLAYED_ENTRIES, FLUSHED_ENTRIES = 50, 200
"""The same of entries, of which each takes half a millisecond to read, however small it is. And how many are flushed
beside, once they were replayed: an SST costs its own trouble."""
COMING_WITHIN = 2.0
"""Seconds that a call waits for a region that is coming; then its caller looks elsewhere."""


def _long_to_replay(writer: RegionWriter) -> bool:
    return writer.memtable_bytes > REPLAYED_QUICKLY or writer.unflushed_entries > REPLAYED_ENTRIES


@dataclass(frozen=True, slots=True)
class Before:
    """What there was of a region at some moment before a claim. It may be read while the region is still served."""

    ssts: tuple[str, ...]
    """Directories of SSTs, published or not."""
    committed: int
    """Generations of it that the base table had."""


class RegionSet:
    """The writers of the regions owned, by region.

    Thread safety. Every method from any thread; one region comes or goes at a time, others are not held up by it.
    Invariants. (1) A writer that left the set is never found again. (2) Whoever holds `changing` sees every writer that
    there is in the shape of `context`, and none joins meanwhile.
    """

    def __init__(self, base: BaseTable, context: RegionContext) -> None:
        """No region is owned at first. `base`: any version of the table."""
        self.context = context
        self.changing = threading.RLock()
        self._changed = threading.Condition(self.changing)
        self.order = base.regions
        self.hint: Callable[[UUID], str | None] = lambda _: None
        """Who owns a region that is not here, as far as anybody knows."""
        self.assure: Callable[[], None] = lambda: None
        """Asked before rows are read: lets go of what another has claimed, where this process may have slept since."""
        self.draining = False
        self.coming: frozenset[UUID] = frozenset()
        """Regions that are being claimed, or asked for."""
        self.collector = TableCollector(context.store, context.codec, context.clock, base.regions, context.wal_options)
        self._buckets = {region: bucket for bucket, region in enumerate(base.regions)}
        self._turns: defaultdict[UUID, threading.Lock] = defaultdict(threading.Lock)
        self._held: Mapping[UUID, RegionWriter] = {}
        self._endpoint = ""
        self._closed = False

    # ---- who is here ---------------------------------------------------------------------------------------------

    @property
    def writers(self) -> Sequence[RegionWriter]:
        """Those of the regions owned at this moment, by bucket."""
        return list(self._held.values())

    @property
    def alive(self) -> Sequence[RegionWriter]:
        """Those of them that have not failed."""
        return [writer for writer in self._held.values() if writer.failure is None]

    @property
    def epochs(self) -> dict[str, int]:
        """The epochs of our claims that are not known to be lost, by region id."""
        return {writer.name: writer.guard.epoch for writer in self.alive}

    @property
    def whole(self) -> bool:
        """Whether every region of the table is here."""
        return len(self._held) == len(self.order)

    def has(self, writer: RegionWriter) -> bool:
        """Whether `writer` is still one of the set."""
        return self._held.get(writer.region) is writer

    def ended(self, region: UUID) -> bool:
        """Whether `region` is here with a writer that has failed."""
        held = self._held.get(region)
        return held is not None and held.failure is not None

    def writer(self, region: UUID) -> RegionWriter:
        """The writer of `region`. Raises: Unavailable (`not_owner`); Invalid where the table has no such region."""
        found = self._held.get(region)
        if found is None:
            raise self.missing(region)
        return found

    def serving(self, region: UUID) -> RegionWriter:
        """The writer of `region`, waited for while it is coming. Raises: as `writer`."""
        if region not in self._held and region in self.coming:
            with self._changed:
                self._changed.wait_for(lambda: region in self._held or region not in self.coming, COMING_WITHIN)
        return self.writer(region)

    def of_bucket(self, bucket: int) -> RegionWriter:
        """As `serving`, of the region of `bucket`."""
        return self.serving(self.order[bucket])

    def of(self, regions: Iterable[UUID]) -> Sequence[RegionWriter]:
        """The writers of `regions`. Raises: as `serving`."""
        return [self.serving(region) for region in regions]

    def missing(self, region: UUID) -> Invalid | Unavailable:
        """What a call is told that names `region`, which is not here."""
        if region not in self._buckets:
            return Invalid(f"region {region} is not one of this table's {len(self.order)} regions")
        return not_owner(region, self.hint(region), reason="draining" if self.draining else "not_owner")

    # ---- coming and going ----------------------------------------------------------------------------------------

    def before(self, region: UUID, committed: Callable[[], Mapping[UUID, int]]) -> Before:
        """Look at what a claim of `region` wants to know from before it. `committed`: generations in the newest base
        version. Raises: Invalid where the table has no such region; wal and flush errors.
        """
        if region not in self._buckets:
            raise self.missing(region)
        with ThreadPoolExecutor(1, "before") as beside:  # each is a round trip
            generations = beside.submit(committed)
            return Before(self.collector.names(region), generations.result().get(region, 0))

    def acquire(self, region: UUID, before: Before) -> int:
        """Claim `region`, unless its claim is held already; returns the epoch.

        Raises: as `wal.claim`; Invalid once closed.
        """
        if region not in self._buckets:
            raise self.missing(region)
        with self._turns[region]:
            held = self._held.get(region)
            if held is not None and held.failure is None:
                return held.guard.epoch
            if held is not None:
                self._leave(held)
            with self.expecting(region):
                context = self.context
                writer = RegionWriter(context, region, self._buckets[region], before.committed)
                self.collector.outlived(region, before.ssts, writer.guard.epoch)
                self._join(writer, context)
            self._note(writer)
            if writer.unflushed_entries > FLUSHED_ENTRIES:
                with suppress(MemWalError, wal.WalError):  # whatever it is, the writer's own limits meet it again
                    writer.freeze()
            return writer.guard.epoch

    @contextmanager
    def expecting(self, region: UUID) -> Iterator[None]:
        """Within it `region` is coming."""
        with self.changing:
            known = region in self.coming
            self.coming |= {region}
        try:
            yield
        finally:
            if not known:
                with self._changed:
                    self.coming -= {region}
                    self._changed.notify_all()

    def release(self, region: UUID, *, flush: bool | None = None) -> int:
        """Let go of `region`; returns the epoch that was held.

        `flush`: publish first what its memtables hold, while it still serves; None: where that is much to replay.

        The note of the owner stays: the next one writes its own, and whoever follows a stale one is told.
        Raises: Unavailable where it is not here, or cannot be flushed (it stays then); what kept non-durable rows from
        the log, and the region is let go all the same.
        """
        with self._turns[region]:
            writer = self.writer(region)
            if writer.failure is None and (flush or (flush is None and _long_to_replay(writer))):
                writer.freeze()()
            self._leave(writer)
            return writer.guard.epoch

    def announce(self, endpoint: str) -> None:
        """Say in the notes of these regions' owner, also of those that come later, where it answers."""
        self._endpoint = endpoint
        for writer in self.writers:
            self._note(writer)

    def close(self) -> None:
        """End every writer and take the notes back. Raises: what a writer's `close` does; all are ended."""
        with self.changing:
            self._closed = True
        with ExitStack() as every:  # each is closed, whatever the others raise
            for writer in self.writers:
                every.callback(self._withdraw, writer)
                every.callback(writer.close)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _join(self, writer: RegionWriter, context: RegionContext) -> None:
        try:
            with self.changing:
                if self._closed:
                    raise Invalid("the table is closed; open it again")
                if self.context is not context:
                    writer.reshape(self.context)
                held = {**self._held, writer.region: writer}
                self._held = dict(sorted(held.items(), key=lambda item: self._buckets[item[0]]))
                self._changed.notify_all()
        except BaseException:
            writer.close()
            raise

    def _leave(self, writer: RegionWriter) -> None:
        with self.changing:
            self._held = {region: each for region, each in self._held.items() if each is not writer}
        missing = self.missing(writer.region)
        writer.close(missing)

    def _note(self, writer: RegionWriter) -> None:
        """Leave the note of `writer`. Nothing depends on it, so storage that refuses it fails nothing."""
        context = self.context
        try:
            owners.announce(context.store, writer.region, writer.guard.epoch, self._endpoint, daemon=context.daemon)
        except wal.WalError as error:
            _LOG.warning("region %s: the note of its owner is not written: %s", writer.region, error)

    def _withdraw(self, writer: RegionWriter) -> None:
        with suppress(wal.WalError):  # the note is a hint
            owners.withdraw(self.context.store, writer.region, writer.guard.epoch)
