"""Maintain an open table: flush, commit, detect other processes' commits, collect garbage; decide when a commit is due.

Several processes may share the table, each with some of its regions. The owner of the first region leads: it commits
the SSTs of all, using the backlogs that the others report, and removes files that belong to no region. Each process
flushes its own memtables and collects its own regions' garbage.

`commit.interval` bounds how long a durable row stays out of the base table, so `decide` takes the oldest waiting row,
whether it is in an SST or still in a memtable. Many waiting SSTs or bytes are committed earlier. If no row waits,
nothing is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal
from uuid import UUID

from memwal import flush, wal
from memwal.flush import BaseTable, CommitReport
from memwal.flush.commits.load_notes import is_asked_to_wait
from memwal.flush.commits.report import HeldBack
from memwal.ingest import tracing
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.region.writer import RegionWriter
from memwal.ingest.engine.table.garbage import Ages
from memwal.ingest.engine.table.maintenance import BaseUpkeep, maintenance_rules
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.errors import MemWalError, classify
from memwal.ingest.log_limit import LogLimit, log_of
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import CommitSettings

Decision = Literal["nothing", "commit", "flush"]
"""`flush`: publish the memtables, then commit; `commit`: commit the published SSTs."""


def flush_due(regions: Sequence[Backlog], limits: CommitSettings) -> bool:
    """Return whether to publish the memtables when another process commits; never with an interval of 0.

    The flush is due after half of the interval, so that the other process finds the rows in an SST before they are due.
    """
    oldest = Backlog.of_all(regions).unflushed
    return oldest is not None and limits.interval > 0 and oldest >= limits.interval / 2


def decide(regions: Sequence[Backlog], limits: CommitSettings, lead: float) -> Decision:
    """Return the action to take now. `lead`: seconds that flush and commit will take, plus those until the next
    decision.

    A lead above half the interval counts as half: back-to-back commits would slow down slow storage further.
    """
    if limits.interval <= 0:
        return "nothing"
    together = Backlog.of_all(regions)
    if together.age is not None and together.age + min(lead, limits.interval / 2) >= limits.interval:
        return "flush"
    return "commit" if together.ssts >= limits.ssts_max or together.size >= limits.size_max else "nothing"


_LOG = logging.getLogger("memwal.table")


class TableUpkeep:
    """The steps of `table.commit_loop`, and the collection.

    Thread safety. `commit`, `maintain` and `expire` one at a time (the loop ensures it), `collect` too; the rest any
    thread.
    """

    def __init__(self, regions: RegionSet, reader: Reader, settings: Settings, take_over: Callable[[], object]) -> None:
        """`take_over`: converts the regions to the columns of the newest base version."""
        self._regions, self._reader, self._take_over = regions, reader, take_over
        self._settings, self._ages = settings.commit, Ages.of(settings.gc)
        base, context = reader.opened, regions.context
        self._uri, self._warnings = base.uri, LogLimit(context.clock.monotonic)
        self._log = log_of(_LOG, context.name)
        self._committer = context.ids.entry_id()
        self._maintenance = BaseUpkeep(base, context.clock, maintenance_rules(settings), context.meters.commits.expired)
        self.caught_up, self.rows = base.version, base.dataset.count_rows()
        """The newest base version whose commits this process has adopted, and its number of rows."""
        self.space: flush.Space | None = None
        """The bytes on storage as of the last measurement by this process; None before, and if it does not lead."""
        self.held = HeldBack()
        """The regions that the last commit of this process left out, with the errors; `catch_up` resets it."""
        self.left_out = HeldBack()
        """The same, without the reset by `catch_up`."""
        self._failed: BaseException | None = None
        self._try_again: Mapping[UUID, float] = {}
        self._led_by: int | None = 0
        self.others: Callable[[], Sequence[Backlog]] = lambda: ()
        """Returns the backlogs of other processes' regions, which this one commits if it leads."""

    def leads(self) -> bool:
        """Return whether this process does the work for the whole table.

        The leader owns the first region that any process serves, as far as is known here. A region whose writer has
        ended has no owner until it is claimed again.
        """
        alive = {writer.region for writer in self._regions.alive}
        for bucket, region in enumerate(self._regions.order):
            if region in alive:
                if bucket and bucket != self._led_by and self._regions.claim is None:
                    why = "regions before it have no serving writer here, and no other process is known to own them"
                    _LOG.warning("%s: this process commits for all from region %d on: %s", self._uri, bucket, why)
                self._led_by = bucket
                return True
            owner = None if self._regions.ended(region) else self._regions.hint(region)
            if owner is not None and (owner[1] or self._regions.claim is None):
                break  # a region that is claimed at its first use may have no owner
        self._led_by = None
        return False

    def waiting(self) -> Sequence[Backlog]:
        """Return the backlogs of the regions here.

        A region that was left out of a commit counts again only after `commit.interval`, so that it does not cause a
        flush of all others at every check.
        """
        now, later = self._regions.context.clock.monotonic(), self._try_again
        return [writer.waiting() for writer in self._regions.alive if later.get(writer.region, now) <= now]

    @property
    def held_back_elsewhere(self) -> bool:
        """Whether a commit left out another process's region less than `commit.interval` ago.

        Backlogs of other processes do not count then, because they would cause a flush of all regions at every check.
        """
        now = self._regions.context.clock.monotonic()
        here = {writer.region for writer in self._regions.writers}
        return any(now < again for region, again in self._try_again.items() if region not in here)

    @property
    def commit_interval(self) -> float:
        """`commit.interval` in seconds; 0: commits run on demand only."""
        return self._settings.interval

    @property
    def leading(self) -> bool:
        """Whether this process commits for all, as of the last `leads`."""
        return self._led_by is not None

    @property
    def failures(self) -> list[dict[str, str]]:
        """The regions that the last commit of this process left out: `{"region", "error"}`, by region.

        The region is "" if the commit failed as a whole.
        """
        found = {str(region): str(classify(error)) for region, error in self.held.regions.items()}
        if (whole := self._failed) is not None:
            found[""] = str(classify(whole))
        return [{"region": region, "error": found[region]} for region in sorted(found)]

    def flush(self, writers: Sequence[RegionWriter] | None = None, *, every: bool = False) -> None:
        """Publish the memtables of `writers`; None: of every region here that has not failed.

        `every`: raise Unavailable (`not_owner`) if one of them was released during the call; otherwise its next owner
        publishes them later.
        """
        waits: list[tuple[RegionWriter, Callable[[], None]]] = []
        flushed = self._regions.alive if writers is None else writers
        for writer in flushed:  # all freeze before the first wait
            with self._unless_gone(writer):
                waits.append((writer, writer.freeze()))
        for writer, published in waits:
            with self._unless_gone(writer):
                published()
        for writer in flushed if every else ():
            if not self._regions.has(writer) and writer.rested is None:
                raise self._regions.missing(writer.region)

    def commit(self) -> CommitReport:
        """Commit all published SSTs of the table, of every process.

        Raises: flush and wal errors, but not those of single regions, which are in `held`, in `failures` and in the
        log.
        """
        context, held = self._regions.context, self.held
        before = dict(held.regions)
        try:
            report = traced_commit(lambda: self._committed(held))
        except BaseException as error:
            self._failed = error
            for writer in self._regions.writers:
                context.meters.of(writer.region).erred("commit", error, context.clock.now())
            raise
        self._failed = None
        # `catch_up` may have replaced `self.held` during the commit
        self.held, self.left_out = held, HeldBack(held.regions)
        self._tell_held_back(before)
        for writer in self._regions.writers:
            with self._unless_gone(writer):
                writer.refresh()
        if report.ssts:
            context.models.read(self._reader.base())
        try:
            self._see(self._reader.base())
        except (wal.WalError, MemWalError) as error:  # the commit is done; the next read or commit tries again
            _LOG.warning("%s: cannot take over changed columns yet: %s", self._uri, error)
        return report

    def maintain(self) -> None:
        """Maintain the base table, after a commit. Never raises."""
        self._maintenance.run(self._reader.opened)

    def expire(self, paused: Callable[[], bool]) -> None:
        """Delete expired base rows if that is due and no commit runs, unless commits are `paused` or a load asks them
        to wait.

        Raises: as `paused`.
        """
        self._maintenance.expire(self._reader.opened, unless=lambda: paused() or self.asked_to_wait())

    def _committed(self, held: HeldBack) -> CommitReport:
        context = self._regions.context
        return context.meters.commits.counted(
            lambda: flush.commit(
                self._uri,
                context.store.storage_options,
                context.store,
                clock=context.clock,
                ids=context.ids,
                retries=self._settings.retries,
                memory_max=self._settings.memory_max,
                committer=self._committer,
                caches=self._reader.opened.caches,
                held=held,
                options=context.wal_options,
            ),
            context.clock,
        )

    def asked_to_wait(self) -> bool:
        """Return whether a load asks that no commit is made now; one listing. False if storage does not answer."""
        context = self._regions.context
        try:
            return is_asked_to_wait(context.store, context.clock, self._reader.opened)
        except wal.WalError:
            return False

    def catch_up(self) -> None:
        """Adopt what another process has committed: pruned manifests, new vector models, changed columns.

        Raises: as a read.
        """
        # the leader keeps this state now
        self.held, self._failed, self._try_again = HeldBack(doubled=self.held.doubled), None, {}
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
        if not any(_committed(writer, base) for writer in having):  # the committer prunes after its commit
            self._see(base)

    def collect(self, ages: Ages | None = None) -> None:
        """Collect the garbage of the regions here; renew their owner's notes. `ages`: None: those of the settings."""
        self._regions.renew_notes()
        base, leads = self._reader.base(), self.leads()
        regions = [writer.region for writer in self._regions.writers]
        if leads:
            store = self._regions.context.store  # no writer collects regions that fell out of the routing
            regions += [region for region in wal.regions(store) if region not in base.regions]
        found = self._regions.collector.collect(
            base,
            ages or self._ages,
            plans_min=flush.PLANS_MIN,
            regions=regions,
            orphans=leads,
        )
        self.space = (found.space or self.space) if leads else None
        if found.bytes:
            self._log.info("%s", found.summary())
        if found.unreadable or found.unaccounted:
            self._log.warning(
                "%d WAL entries cannot be read, %d SSTs are neither published nor committed; all were kept: "
                "see `memwal gc --dry-run`",
                found.unreadable,
                found.unaccounted,
            )

    # ---- inside --------------------------------------------------------------------------------------------------

    def _tell_held_back(self, before: Mapping[UUID, BaseException]) -> None:
        """Log once each region that was left out, or is committed again; record when to retry it."""
        context, held = self._regions.context, self.held.regions
        for region, error in held.items():
            context.meters.of(region).erred("commit", error, context.clock.now())
            text = f"{self._uri}: {wal.named(region)} cannot be committed, others are: {classify(error)}"
            changed = str(before.get(region)) != str(error)
            if changed and (line := self._warnings.text(str(region), text)) is not None:
                _LOG.warning("%s", line, extra={"event": "commit_held_back", "region": str(region)})
        for region in before.keys() - held.keys():
            self._log.warning("%s is committed again", wal.named(region))
        again = context.clock.monotonic() + self._settings.interval
        self._try_again = dict.fromkeys(held, again)
        context.meters.commits.held_back = len(held)
        for text in sorted({str(classify(error)) for error in held.values()}):
            context.meters.commits.failed(text, context.clock.now())

    def _see(self, base: BaseTable) -> None:
        self.caught_up, self.rows = base.version, base.dataset.count_rows()
        if base.shape != self._regions.context.shape:  # rare; adopting columns stops the regions for a moment
            self._take_over()

    @contextmanager
    def _unless_gone(self, writer: RegionWriter) -> Iterator[None]:
        """Ignore errors of a step on a region that was released during the step: its next owner takes the step."""
        try:
            yield
        except (wal.WalError, MemWalError):
            if self._regions.has(writer):
                raise


def traced_commit(commit: Callable[[], CommitReport]) -> CommitReport:
    """Return the result of `commit`, in a span while tracing is on."""
    with tracing.span("memwal.table.commit") if tracing.on else tracing.OFF as span:
        report = commit()
        rows = report.rows_inserted + report.rows_updated + report.rows_deleted
        tracing.note(span, ssts=report.ssts, rows=rows, bytes=report.bytes_written)
        return report


def _committed(writer: RegionWriter, base: BaseTable) -> bool:
    """Return whether the oldest SST that `writer` lists is in `base`."""
    published = writer.published
    return bool(published) and published[0] <= base.committed.get(writer.region, 0)
