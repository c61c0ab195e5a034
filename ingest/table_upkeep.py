"""What an open table does beside its puts and reads: flush, commit, learn of others' commits, collect garbage.

Several processes may share the table, each with some of its regions. One of them leads, the owner of the first region:
it commits the SSTs of all, by what the others say that waits with them, and removes files that belong to no region.
Each flushes its own memtables and collects its own regions' garbage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import flush
import wal
from flush import BaseTable, CommitReport
from ingest.base_upkeep import BaseUpkeep
from ingest.commit_policy import Waiting
from ingest.errors import MemWalError
from ingest.garbage import Ages
from ingest.reader import Reader
from ingest.region_context import Upkeep
from ingest.region_set import RegionSet
from ingest.region_writer import RegionWriter

_LOG = logging.getLogger("memwal.table")


class TableUpkeep:
    """The steps of `ingest.commit_loop`, and the collection.

    Thread safety. `commit` and `maintain` one at a time (the loop sees to that), `collect` too; the rest any thread.
    """

    def __init__(self, regions: RegionSet, reader: Reader, upkeep: Upkeep, take_over: Callable[[], object]) -> None:
        """`take_over`: brings the regions to the columns of the newest base version."""
        self._regions, self._reader, self._upkeep, self._take_over = regions, reader, upkeep, take_over
        base, context = reader.opened, regions.context
        self._uri = base.uri
        self._committer = context.ids.entry_id()
        self.maintain = BaseUpkeep(base, context.clock, upkeep.maintenance).run
        self.caught_up = base.version
        """The newest base version of which everything that it has committed is known here."""
        self.others: Callable[[], Sequence[Waiting]] = lambda: ()
        """What regions of other processes hold, which this one is to commit where it leads."""

    def leads(self) -> bool:
        """Whether this process does what one does for the whole table."""
        return any(writer.bucket == 0 for writer in self._regions.alive)

    def waiting(self) -> Sequence[Waiting]:
        """What the regions here hold that is not in the base table."""
        return [writer.waiting() for writer in self._regions.alive]

    def flush(self, writers: Sequence[RegionWriter] | None = None) -> None:
        """Publish what memtables hold: those of `writers`, None: of every region here that has not failed."""
        waits: list[tuple[RegionWriter, Callable[[], None]]] = []
        for writer in self._regions.alive if writers is None else writers:  # side by side
            with self._unless_gone(writer):
                waits.append((writer, writer.freeze()))
        for writer, published in waits:
            with self._unless_gone(writer):
                published()

    def commit(self) -> CommitReport:
        """Commit all published SSTs of the table, whosever they are. Raises: flush and wal errors."""
        context = self._regions.context
        report = context.meters.commits.counted(
            lambda: flush.commit(
                self._uri,
                context.store.storage_options,
                context.store,
                clock=context.clock,
                ids=context.ids,
                retries=self._upkeep.commit_retries,
                memory_max=self._upkeep.commit_memory_max,
                committer=self._committer,
            ),
            context.clock,
        )
        for writer in self._regions.writers:
            with self._unless_gone(writer):
                writer.refresh()
        if report.ssts:
            context.models.read(self._reader.base())
        try:
            self._see(self._reader.base())
        except (wal.WalError, MemWalError) as error:  # the commit is done; who reads or commits next tries again
            _LOG.warning("%s: cannot take over changed columns yet: %s", self._uri, error)
        return report

    def catch_up(self) -> None:
        """Learn what another process has committed: pruned manifests, new vector models, changed columns.

        Raises: as a read.
        """
        having = [writer for writer in self._regions.alive if writer.published]
        if not having:
            return
        base = self._reader.base()
        for writer in having:
            if _committed(writer, base):
                with self._unless_gone(writer):
                    writer.refresh()
        if base.version != self.caught_up:
            self._regions.context.models.read(base)
        if not any(_committed(writer, base) for writer in having):  # the committer prunes after it has committed
            self._see(base)

    def collect(self, ages: Ages | None = None) -> None:
        """Delete what nobody can need again; `ages`: None for those of the settings."""
        regions = [writer.region for writer in self._regions.writers]
        found = self._regions.collector.collect(
            self._reader.base(),
            ages or self._upkeep.ages,
            plans_min=flush.PLANS_MIN,
            regions=regions,
            orphans=self.leads(),
        )
        if found.bytes:
            _LOG.info("%s", found.summary())
        if found.unreadable or found.unaccounted:
            _LOG.warning(
                "%d WAL entries cannot be read, %d SSTs are neither published nor committed; all were kept: "
                "see `memwal gc --dry-run`",
                found.unreadable,
                found.unaccounted,
            )

    # ---- inside --------------------------------------------------------------------------------------------------

    def _see(self, base: BaseTable) -> None:
        self.caught_up = base.version
        if base.shape != self._regions.context.shape:  # mostly not, and the regions have other work
            self._take_over()

    @contextmanager
    def _unless_gone(self, writer: RegionWriter) -> Iterator[None]:
        """Whatever stops a step on a region that was released meanwhile is nothing: its next owner takes the step."""
        try:
            yield
        except (wal.WalError, MemWalError):
            if self._regions.has(writer):
                raise


def _committed(writer: RegionWriter, base: BaseTable) -> bool:
    """Whether the oldest SST that `writer` lists is in `base`."""
    published = writer.published
    return bool(published) and published[0] <= base.committed.get(writer.region, 0)
