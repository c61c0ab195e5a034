"""Implement the embedded table: regions claimed in this process, rows in and rows out, no Spark.

`Table` is memwal as a library; the daemon serves this class through Arrow Flight. Its parts do the work: `columns`,
`writes`, `upkeep` and `regions` of this package.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import Any
from uuid import UUID

import pyarrow as pa

from memwal import wal
from memwal.flush import BaseTable, CommitReport, ResizeReport, Upsert, finish_resize, resize
from memwal.ingest.engine.api.arguments import keys_or_filter
from memwal.ingest.engine.api.filter_writes import FilterWrite, Update, rows_of
from memwal.ingest.engine.api.lancedb_forms import LanceDBForms
from memwal.ingest.engine.api.missing import CallersColumns, Missing, missing_rule
from memwal.ingest.engine.api.reads import Level
from memwal.ingest.engine.api.rows import as_table
from memwal.ingest.engine.api.tokens import Ack, Applied, Receipt, Token, TokenLike
from memwal.ingest.engine.changes.reader import StoredChanges
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.read.local import LevelReads, regions_of
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.region.admission import Admission
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.quotas import PutRate, TableMemory
from memwal.ingest.engine.region.resolve import StoredRows
from memwal.ingest.engine.region.writer import RegionWriter, Rested
from memwal.ingest.engine.table import indexes
from memwal.ingest.engine.table.columns import TableColumns
from memwal.ingest.engine.table.commit_loop import CommitLoop
from memwal.ingest.engine.table.growth import Growth
from memwal.ingest.engine.table.open_here import close_at_exit
from memwal.ingest.engine.table.pauses import PauseWatch
from memwal.ingest.engine.table.regions import BeforeClaim, RegionSet, prove
from memwal.ingest.engine.table.resize import ADOPT_WITHIN, BROKEN_OFF, PASSES, Gate, Resizing
from memwal.ingest.engine.table.stored import base_status, space_status
from memwal.ingest.engine.table.upkeep import TableUpkeep
from memwal.ingest.engine.table.writes import TableWrites
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.protocol import build
from memwal.ingest.refusals import expect_routing
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.values import AUTO
from memwal.ingest.threads import Periodic, start
from memwal.wal.parallel_map import AT_ONCE, each

_LOG = logging.getLogger("memwal.table")


class Table(LevelReads, LanceDBForms):
    """A Lance table with its regions, or some of them, claimed by this process.

    Thread safety. Every method from any thread.
    Durability. `put` and `delete` return once every row is on storage (`durable=True`) or visible (`durable=False`).
    Errors. Every method raises only `ingest.errors` kinds.
    """

    def __init__(
        self, base: BaseTable, context: RegionContext, settings: Settings, claim: Iterable[UUID], *, lazy: bool = False
    ) -> None:
        """Claim the regions `claim` of `base`. Use `memwal.open`, which claims all and also creates the table.

        `lazy`: claim others at their first use, and let `RegionSet.rest_idle` release idle ones; see `table.regions`.
        """
        clock, self.gate = context.clock, Gate(base.uri, base.routing_version)
        rate, most = settings.table.put_rate_max, settings.table.memory_max
        cached = min(settings.flush.cache_max, most // 2 or settings.flush.cache_max)
        reader = Reader(base, context.store, cache_bytes=cached, clock=clock)
        self.memory = TableMemory(most, lambda: self.regions.alive, reader.cache)
        """The memory that the table's rows take in this process."""
        super().__init__(base, reader)
        self._sql_memory = settings.sql.memory_max
        stored = StoredRows(reader, context.store)
        context = replace(context, find=stored, any_expired=stored.any_expired, loads=stored.loads, keep=reader.keep)
        context = replace(context, memory=self.memory if most else None)
        self.regions = RegionSet(base, context)
        self.regions.claim = self._claimed_at_use if lazy else None
        self.stored_changes = StoredChanges(base, context.store, context.clock)
        self._columns = TableColumns(base, self.regions, self._reader, self._took)
        self._callers_columns = CallersColumns(base.schema.names)
        self._missing = missing_rule(None, base.key, base.rules.upsert)
        paced = PutRate(rate, clock, context.meters, context.store.url("")) if rate else None
        self.writes = TableWrites(self._columns, self.regions, self._reader, paced, self.gate)
        self.upkeep = steps = TableUpkeep(self.regions, self._reader, settings, self._columns.take_over)
        self.pauses = PauseWatch(context.store, context.clock, context.ids, context.wal_options, context.name)
        paused = lambda: "commits" in self.pauses.recent()  # noqa: E731
        runs = reader.opened.uri, context.committing, context.lanes, context.weight
        self._commits = CommitLoop(steps, settings.commit, context.clock, paused, *runs)
        self._growth = Growth(self.regions, steps, settings.regions) if settings.regions.count == AUTO else None
        self._commits.grow = self._grow
        self._collections = Periodic("collection", steps.collect, settings.gc.interval)
        self._process = os.getpid()
        self._owner = f"pid {self._process}"
        self.closed = self._ended = False
        self.resized: Callable[[], object] = lambda: None
        """Called, in its own thread, when this process has changed the number of regions, or has failed to."""
        self.id = base.table_id or context.store.url("")
        """Identifies the table, whichever process serves it."""
        self.resizing = Resizing(self.regions, self.gate, lambda: self._reader.opened.routing_version, steps.flush)
        self._at_once = AT_ONCE if context.store.remote else 1  # regions asked in parallel
        try:
            list(each(self._claimed, claim, self._at_once))
        except BaseException:
            self.close()
            raise
        self._commits.start()
        self._collections.start()
        close_at_exit(self)

    # ---- write ---------------------------------------------------------------------------------------------------

    @translate_errors
    def put(
        self,
        rows: Any,
        *,
        missing: Missing | None = None,
        durable: bool = True,
        token: TokenLike = None,
        timeout: float | None = None,
    ) -> Receipt:
        """See `Operations.put`."""
        rule = self._missing if missing is None else missing_rule(missing, self.key, self.upsert)
        given = as_table(rows, self.schema, rule)
        try:
            admission, whole = self._whole(given, rule)
        except Invalid:
            self._refuse_if_closed()
            self._columns.take_over()  # columns that the rows lack may have been dropped
            admission, whole = self._whole(given, rule)
        return self._put(admission, whole, Token.parse(token), durable=durable, timeout=timeout)

    def _whole(self, given: pa.Table, rule: Missing | None) -> tuple[Admission, pa.Table]:
        """Return rows in the table's columns, without the columns that keep stored values. Raises: as `put`."""
        admission, conforming = self._columns.conforming(given)
        if not admission.is_partial(conforming):
            self._callers_columns.know(admission.columns)
            return admission, conforming
        context, names = admission.context, conforming.column_names
        nulls = self._callers_columns.nulls(names, admission.columns, context.key, context.required, rule)
        return admission, admission.with_nulls(conforming, nulls)

    @translate_errors
    def put_of_client(
        self,
        rows: pa.Table,
        nulls: Collection[str] | None,
        *,
        durable: bool = True,
        token: Token | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """As `put`, for validated rows. `nulls`: missing columns to set to null, others are kept; None: not given."""
        admission, conforming = self._columns.conforming(rows)
        whole = admission.with_nulls(conforming, self._nulls_of_client(nulls))
        return self._put(admission, whole, token, durable=durable, timeout=timeout)

    def _put(
        self, admission: Admission, rows: pa.Table, token: Token | None, *, durable: bool, timeout: float | None
    ) -> Receipt:
        once, _ = self.writes.once_per_key(admission, rows)
        self._refuse_if_closed()
        receipt = self.writes.write(admission, once, token, durable=durable, timeout=timeout)
        return receipt if once is rows else replace(receipt, rows=rows.num_rows)

    def _nulls_of_client(self, nulls: Collection[str] | None) -> Collection[str]:
        """Return the columns that a client sets to null. None: those that its rows lack, unless upserts merge."""
        if nulls is None:
            return () if self.upsert == "merge" else self.base.schema.names
        return nulls

    @translate_errors
    def delete(
        self,
        keys: Any = None,
        *,
        filter: str | None = None,
        durable: bool = True,
        token: TokenLike = None,
        timeout: float | None = None,
    ) -> Receipt:
        """See `Operations.delete`."""
        self._refuse_if_closed()
        if (where := keys_or_filter(keys, filter)) is not None:
            delete = FilterWrite(self, self.writes, where, self._context.clock)
            return delete.run(token, durable=durable, timeout=timeout)
        return self.writes.delete(keys, Token.parse(token), durable=durable, timeout=timeout)

    @translate_errors
    def update(
        self,
        where: str | None = None,
        values: Mapping[str, Any] | None = None,
        *,
        values_sql: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """See `Operations.update`."""
        self._refuse_if_closed()
        update = Update.of(values, values_sql, self.schema, self.key)
        write = FilterWrite(self, self.writes, rows_of(where), self._context.clock, update)
        return write.run(None, durable=True, timeout=timeout)

    @translate_errors
    def put_region(
        self,
        region: UUID,
        rows: pa.Table,
        token: Token | None,
        routing: int | None = None,
        nulls: Collection[str] | None = None,
    ) -> Ack:
        """Put the rows of one region's stream (base columns), all or none, once per token; durable on return.

        With the column `_tombstone` (bool, null = false), rows where it is true delete their key, and need no other
        value. The last row of a key decides; by the table's rules each run of puts of a key between two of its deletes
        is a separate put.
        `routing`: version of the routing that the sender used to find the region, None for this table's. `nulls`: as in
        `put_of_client`.
        Raises: Unavailable (reason "resized") if the table has another routing; Invalid also if a row belongs to
        another region, or if the table's rule for equal keys in one put rejects rows, whatever other regions' streams
        of the same micro-batch hold.
        """
        self._refuse_if_closed()
        with self.gate.passing(routing):
            return self.writes.put_region(region, rows, token, self._nulls_of_client(nulls))

    # ---- steps and state -----------------------------------------------------------------------------------------

    @translate_errors
    def flush(self) -> None:
        """See `Operations.flush`."""
        self._refuse_if_closed()
        self.upkeep.flush(self.regions.writers)

    @translate_errors
    def commit(self) -> CommitReport:
        """See `Operations.commit`."""
        self._refuse_if_closed()
        report = self._commits.commit()
        self.upkeep.left_out.raise_first()
        return report

    @translate_errors
    def create_index(self, /, column: str, kind: str, **parameters: Any) -> str:
        """See `Operations.create_index`."""
        self._refuse_if_closed()
        name = indexes.added(self._reader.base(), column, kind, parameters, self._context.clock)
        indexes.followed(self.follow)
        return name

    @translate_errors
    def drop_index(self, name: str) -> None:
        """See `Operations.drop_index`."""
        self._refuse_if_closed()
        indexes.dropped(self._reader.base(), name, self._context.clock)
        indexes.followed(self.follow)

    @translate_errors
    def create_tag(self, name: str, version: int, *, replace: bool = False) -> None:
        """See `Operations.create_tag`."""
        self._refuse_if_closed()
        indexes.tagged(self._reader.base(), name, version, replace=replace)

    @translate_errors
    def drop_tag(self, name: str) -> None:
        """See `Operations.drop_tag`."""
        self._refuse_if_closed()
        indexes.tagged(self._reader.base(), name, None)

    @translate_errors
    def status(self) -> dict[str, Any]:
        """See `Operations.status`."""
        with self.gate.passing():
            base = self._reader.base()
            regions = [writer.status() | {"owner": self._owner} for writer in self.regions.writers]
        for region in regions:
            committed = base.committed.get(UUID(region["id"]), 0)
            for sst in region["ssts"]:
                sst["committed"] = sst["generation"] <= committed
        return base_status(base) | {
            "routing": self.base.routing_version,
            "regions_max": None if self._growth is None else self._growth.limits.count_max,
            "regions": regions,
            "commits": list(self.regions.context.meters.commits.recent),
            "commit_failures": self.upkeep.failures,
            "refused_puts": dict(self.regions.context.meters.refusals),
            "paused": self.pauses.recent(),
            "storage": space_status(self.upkeep.space),
            "versions": {self._owner: build()},
        }

    @translate_errors
    def close(self) -> None:
        """See `Operations.close`."""
        if self._ended or os.getpid() != self._process:
            return
        self.closed = True
        self._commits.stop()
        self._collections.stop()
        try:
            self.regions.close()
        except Exception:
            self._ended = True
            raise
        self._ended = True

    # ---- regions that come and go --------------------------------------------------------------------------------

    @translate_errors
    def acquire(self, region: UUID, before: BeforeClaim | None = None) -> int:
        """Claim `region` and serve it from now on; return its writer epoch. See `table.regions`.

        `before`: the result of `before_claim`, if already known.
        Raises: Invalid for a region that the table does not have; Unavailable, FencedError, Corrupted as when the table
        is opened.
        """
        self._refuse_if_closed()
        with self.gate.passing():
            return self.regions.acquire(region, before or self.before_claim(region))

    @translate_errors
    def before_claim(self, region: UUID) -> BeforeClaim:
        """Return the state before the claim that `acquire` needs; another process may still serve the region.

        Raises: as `acquire`.
        """
        return self.regions.before_claim(region, lambda: self._reader.base().committed)

    @translate_errors
    def release(self, region: UUID, *, flush: bool | None = None) -> int:
        """Stop serving `region` and release it; return its writer epoch. No write to it is acked after the return.

        Rows acked as durable are in the log for the next claim. `flush`: whether to flush them first; None: only if
        they would take long to replay.
        Raises: Unavailable if the region is not here, or cannot be flushed; then it stays here.
        """
        self._refuse_if_closed()
        with self.gate.passing():
            return self.regions.release(region, flush=flush)

    @translate_errors
    def give(self, region: UUID, read: int = 0) -> tuple[int, wal.Released | None]:
        """As `release`, for a process that claims the region next; see `RegionSet.give`."""
        self._refuse_if_closed()
        with self.gate.passing():
            return self.regions.give(region, read)

    def look_at_commits(self) -> None:
        """Make the commit loop check soon: another process may have committed or resized, or has SSTs to commit."""
        self.resizing.hurry()
        self._commits.look()

    @translate_errors
    def applied(self, producer: str, regions: Iterable[UUID] | None = None, *, logged: bool = False) -> Applied:
        """Return the sequences of `producer` that `regions` (None: all) have applied; with `logged` once they are in
        the logs.

        Raises: Unavailable (`not_owner`) if a region is not here; with `logged` also as a durable put.
        """
        self._refuse_if_closed()
        with self.gate.passing():
            writers = self.regions.of(self.base.regions if regions is None else regions)
            return Applied.together(writer.applied(producer, logged=logged) for writer in writers)

    def only(self, regions: Sequence[UUID]) -> LevelReads:
        """Return reads of these regions' rows only, including those in the base table.

        Raises, when read: Unavailable (`not_owner`) if a region is not here; Unavailable (reason "resized") if the
        table has another routing by then.
        """
        with self.gate.passing():
            buckets = [bucket for bucket, region in enumerate(self.regions.order) if region in set(regions)]
            if len(buckets) != len(set(regions)):
                raise next(self.regions.missing(region) for region in regions if region not in self.regions.order)
            every = len(buckets) == len(self.regions.order)
            return _RegionReads(self, self._reader, regions, None if every else buckets, self.gate.version)

    # ---- another number of regions -------------------------------------------------------------------------------

    @translate_errors
    def resize(self, buckets: int) -> ResizeReport:
        """Change the number of regions to `buckets`; calls wait meanwhile. `flush.resizing.steps` has the protocol.

        Regions that another process does not release in time are drained from their logs, which takes longer. Raises:
        Unavailable if the calls under way do not end in time (nothing has changed); flush and wal errors. After an
        error the regions may be sealed: call it again, with the present number to go back.
        """
        self._refuse_if_closed()
        for _ in range(PASSES):  # each leaves only the rows that were put during it
            self.resizing.flush()
            self._commits.commit()
        store, ended = self._context.store, dict[UUID, wal.Released]()
        with self._commits.alone, ExitStack() as paused:

            def stop_writers() -> None:
                paused.enter_context(self.gate.closed(self.resizing.close_within))
                self.resizing.flush(make_way=True)
                self.upkeep.commit()
                paused.callback(self._claim_routing, ended)
                paused.callback(start, "resized", self.resized)
                self.regions.leave_all()

            how = self._how | {"stop_writers": stop_writers, "ended": ended}
            report: ResizeReport = resize(self.base.uri, store.storage_options, store, buckets, **how)
        _LOG.info("%s: %d regions in place of %d", self.base.uri, report.regions, report.before)
        return report

    def _grow(self) -> None:
        """Change the number of regions if that is due, or if a change was broken off. Raises: as `resize`."""
        if self._growth is None:
            return
        sealed, number = self.regions.sealed, len(self.regions.order)
        if sealed is None or self._context.clock.monotonic() - sealed < BROKEN_OFF:
            self.adopt_routing()
            number = self._growth.due() or 0
        else:
            self.regions.sealed = None  # measured anew, whether or not the resize succeeds
        if number and "commits" not in self.pauses.recent() and not self.upkeep.asked_to_wait():
            self.resize(number)

    @translate_errors
    def adopt_routing(self) -> str | None:
        """Claim the regions of a routing that another process has decided; return its decision, None without one.

        Also claims regions that could not be claimed after the last change. Raises: as `resize`; call it again.
        """
        before, now, resizing = self.gate.version, self._context.clock.monotonic(), self.resizing
        if (decided := resizing.done()) is None and now < resizing.unclaimed:
            resizing.look()
            return None
        with self._commits.alone:
            if self.gate.version != before and now < resizing.unclaimed:
                return None
            self.regions.leave_all()  # ends the calls under way, whose regions are obsolete
            way, resizing.way = resizing.way, None
            with way or self.gate.closed(ADOPT_WITHIN):
                self.regions.leave_all()
                self._claim_routing({})
        if decided is not None:
            _LOG.warning("%s; this process takes its share of the new regions", decided.partition(";")[0])
        return decided

    def _claim_routing(self, ended: Mapping[UUID, wal.Released]) -> None:
        """Claim those regions of the newest routing that belong to this process. `ended`: notes of their claims by a
        resize. Requires: the gate is closed, and no region is here."""
        self.resizing.unclaimed = 0.0
        finish_resize(self._reader.base(), self._context.store, **self._how)
        base = self._reader.base()
        self._columns.adopt(base)
        self.gate.version = base.routing_version
        claim = lambda region: self._claimed_at_use(region, ended.get(region))  # noqa: E731
        list(each(claim, filter(self.regions.belongs, base.regions), AT_ONCE))
        self.resizing.unclaimed = inf

    @property
    def _how(self) -> dict[str, Any]:
        return {"clock": self._context.clock, "ids": self._context.ids, "options": self._context.wal_options}

    # ---- inside --------------------------------------------------------------------------------------------------

    @property
    def upsert(self) -> Upsert:
        """The effect of a put on an existing key."""
        return self.base.rules.upsert

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies this owner: the table's address and the epoch of each region."""
        epochs = {writer.name: writer.guard.epoch for writer in self.regions.writers}
        return {"table": self._context.store.url(""), "epochs": epochs}

    def broken(self) -> str | None:
        """Return why a region has stopped itself, None if every region serves or was fenced by a newer writer."""
        failures = (writer.failure for writer in self.regions.writers)
        return next((str(error) for error in failures if error and not isinstance(error, wal.Fenced)), None)

    def announce(self, endpoint: str, name: str = "") -> None:
        """Write notes on storage that name `endpoint` as the owner of these regions. A hint: nothing depends on it.

        `name`: of the table in a fleet.
        """
        self._owner = endpoint
        self.regions.announce(endpoint, name)

    @property
    def _context(self) -> RegionContext:
        return self.regions.context

    def _claimed(self, region: UUID) -> int:
        opened = self._reader.opened
        return self.regions.acquire(region, self.regions.before_claim(region, lambda: opened.committed))

    def _claimed_at_use(self, region: UUID, released: wal.Released | None) -> int:
        before = self.regions.before_claim(region, lambda: self._reader.base().committed)
        return self.regions.acquire(region, replace(before, released=released))

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        with self.gate.passing():
            return self.views(level, regions_of(self.base, keys), again=again)

    def views(self, level: Level, regions: Iterable[UUID], *, again: bool = False) -> list[RegionView]:
        """Return the levels of `regions` above the base table. `again`: a commit overtook the previously captured
        views. Requires: the gate is passed.

        Raises: Unavailable (`not_owner`) if a region is not here; Fenced if another process has claimed one;
        Unavailable (reason "resized") if another process has changed the routing.
        """
        self._refuse_if_closed()
        if level == "committed":
            return []
        if again:
            expect_routing(self.base.uri, self.gate.version, self._reader.opened.routing_version)
        self.regions.assure()
        wanted = list(regions)
        while True:
            sources = self.regions.sources(wanted, self._at_once, flushed=level == "flushed")
            writers = [source for source in sources if isinstance(source, RegionWriter)]
            try:
                if level != "flushed":
                    prove(writers, self._at_once, anew=again)
                return [_view(source, level) for source in sources]
            except wal.Corrupt:
                self._reader.base()  # raises a clearer error if another table was created at this address
                raise
            except (Rested, wal.Fenced):
                if self.regions.claim is None or all(map(self.regions.has, writers)):
                    raise  # else a region came to rest during this call, and may have been claimed since

    def _changes_source(self) -> StoredChanges:
        self._refuse_if_closed()
        return self.stored_changes

    # ---- changed columns -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Adopt the columns of the newest base version, if they changed. Raises: as a read."""
        self._refuse_if_closed()
        self._columns.take_over()

    def follow(self) -> None:
        """Wait, before a read is repeated, until no memtable has other columns than the base table."""
        for published in self._columns.take_over():
            published()

    def _took(self, base: BaseTable) -> None:
        self.base, self.schema, self.key = base, base.schema, base.key

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise Invalid("the table is closed; open it again")
        if os.getpid() != self._process:
            raise Invalid("the table was opened in another process, and a fork copies no threads; open it here")


def _view(source: RegionWriter | RegionView, level: Level) -> RegionView:
    if isinstance(source, RegionView):
        return source
    view = source.durable_view() if level == "durable" else source.view()
    return view if level != "flushed" else RegionView(view.region, (), view.ssts, routing=view.routing)


class _RegionReads(LevelReads):
    """Reads over the levels of some regions of a table in this process.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds; Unavailable (`not_owner`) if a region is not here.
    """

    def __init__(
        self, table: Table, reader: Reader, regions: Sequence[UUID], buckets: Collection[int] | None, routing: int
    ) -> None:
        """`buckets`: of the regions; None if these are all of the table's. `routing`: its version."""
        super().__init__(table.base, reader)
        self._table, self._regions, self._buckets, self._routing = table, regions, buckets, routing

    def _views(self, level: Level, keys: Any, *, again: bool) -> list[RegionView]:
        del keys  # the client has named their regions
        with self._table.gate.passing(self._routing):
            if again:
                expect_routing(self.base.uri, self._routing, self._reader.opened.routing_version)
            return self._table.views(level, self._regions, again=again)

    def follow(self) -> None:
        self._table.follow()
