"""The embedded table: regions claimed in this process, rows in and rows out, no Spark.

`open_table` is the whole of memwal as a library; the daemon is this class behind Arrow Flight.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self
from uuid import UUID
from weakref import WeakSet

import numpy as np
import pyarrow as pa

import flush
import wal
from flush import BaseTable, CommitReport
from ingest import owners
from ingest.admission import Admission
from ingest.base_upkeep import BaseUpkeep
from ingest.commit_loop import CommitLoop, CommitSteps
from ingest.edge import at_the_edge
from ingest.errors import Invalid, MemWalError
from ingest.garbage import Ages, TableCollector
from ingest.keys import normalise_keys
from ingest.level_reads import LevelReads
from ingest.levels import Level, RegionView
from ingest.periodic import Periodic
from ingest.reader import Reader
from ingest.receipts import Receipt
from ingest.region_context import RegionContext, Upkeep
from ingest.region_writer import RegionWriter
from ingest.rows import as_table
from ingest.tokens import Token, TokenLike
from ingest.waiting import written
from ingest.write_queue import Ack, Write
from memtable import TOMBSTONE, tombstones

_LOG = logging.getLogger("memwal.table")
_OPEN: WeakSet[Table] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends without `close`: append what lingers, and end the threads before the interpreter does."""
    for table in list(_OPEN):
        try:
            table.close()
        except MemWalError as error:  # the next table is closed all the same
            _LOG.warning("%s, at the end of the program: %s", table.base.uri, error)


class Table(LevelReads):
    """A Lance table with its regions claimed by this process.

    Thread safety. Every method from any thread.
    Durability. `put` and `delete` return once every row is on storage (`durable=True`) or visible (`durable=False`).
    Errors. Every method raises only `ingest.errors` kinds.
    """

    def __init__(self, base: BaseTable, context: RegionContext, upkeep: Upkeep) -> None:
        """Claim every region of `base`. Use `ingest.open`, which also creates the table."""
        super().__init__(base, Reader(base, context.store))
        self._context = context
        self._admission = Admission(context)
        self._regions: list[RegionWriter] = []
        steps = CommitSteps(
            waiting=lambda: [writer.waiting() for writer in self._regions if writer.failure is None],
            flush=lambda: self._flush_now([writer for writer in self._regions if writer.failure is None]),
            commit=lambda: self._commit_now(upkeep),
            maintain=BaseUpkeep(base, context.clock, upkeep.maintenance).run,
        )
        self._commits = CommitLoop(steps, upkeep.commit, context.clock)
        self._collections = Periodic("collection", lambda: self._collect(upkeep.ages), upkeep.gc_interval)
        self._committer = context.ids.entry_id()
        self._process = os.getpid()
        self._owner = f"pid {self._process}"
        self._closed = self._ended = False
        self._collector = TableCollector(context.store, context.codec, context.clock, base.regions)
        left_behind = self._collector.names()
        try:
            for bucket, region in enumerate(base.regions):
                self._regions.append(RegionWriter(context, region, bucket))
                self._refuse_a_clone(self._regions[-1])
        except BaseException:
            self.close()
            raise
        self._by_id = {writer.region: writer for writer in self._regions}
        self._collector.outlived(left_behind, {writer.region: writer.guard.epoch for writer in self._regions})
        self._commits.start()
        self._collections.start()
        _OPEN.add(self)

    # ---- write ---------------------------------------------------------------------------------------------------

    @at_the_edge
    def put(self, rows: Any, *, durable: bool = True, token: TokenLike = None, timeout: float | None = None) -> Receipt:
        """Insert or replace rows by key; append them where the table has none.

        `rows`: Arrow table, batch or reader, pandas or polars frame, or list of dicts; any number of regions.
        `token`: a name and a rising number; the same token is applied once per region, however often it is sent. Few
        names, please: every region remembers every name for ever.
        `timeout`: seconds after which the call is given up; what no region has begun to write by then never will be.
        Raises: Invalid (nothing was written), Unavailable, UnknownOutcome, FencedError.
        """
        conforming = self._admission.conform(as_table(rows, self.base.schema))
        return self._write(conforming, Token.parse(token), durable=durable, timeout=timeout)

    @at_the_edge
    def delete(
        self, keys: Any, *, durable: bool = True, token: TokenLike = None, timeout: float | None = None
    ) -> Receipt:
        """Delete rows by key; keys that do not exist are no error. `keys`: as for `get`. Raises: as `put`; Invalid
        where the table has no key.
        """
        normalised = normalise_keys(keys, self.base.schema, self.base.key)
        deleting = tombstones(normalised, self._context.schema).drop_columns(TOMBSTONE)
        return self._write(deleting, Token.parse(token), durable=durable, timeout=timeout, deletes=True)

    @at_the_edge
    def put_region(self, region: UUID, rows: pa.Table, token: Token | None) -> Ack:
        """Put the rows of one region's stream (base columns), all or none, once per token; durable on return.

        Raises: Invalid also when a row belongs to another region.
        """
        self._refuse_if_closed()
        conforming = self._admission.conform(rows)
        self._admission.check(conforming, deletes=False)
        writer = self._writer(region)
        if np.any(self.base.route(conforming) != writer.bucket):
            raise Invalid(f"region {region}: the stream holds rows of other regions; route with BaseTable.route")
        return self._acks([(writer, Write(conforming, token=token))])[writer.name]

    # ---- steps and state -----------------------------------------------------------------------------------------

    @at_the_edge
    def flush(self) -> None:
        """Freeze every memtable and publish it as an SST; returns when all are published."""
        self._refuse_if_closed()
        self._flush_now(self._regions)

    @at_the_edge
    def commit(self) -> CommitReport:
        """Commit all published SSTs into the base table."""
        self._refuse_if_closed()
        return self._commits.commit()

    @at_the_edge
    def status(self) -> dict[str, Any]:
        """`{"table", "base_version", "rows", "regions": […]}`; the rows are those of the base table."""
        base = self._reader.base()
        regions = [writer.status() | {"owner": self._owner} for writer in self._regions]
        for region in regions:
            committed = base.committed.get(UUID(region["id"]), 0)
            for sst in region["ssts"]:
                sst["committed"] = sst["generation"] <= committed
        return {
            "table": self.base.uri,
            "base_version": base.version,
            "rows": base.dataset.count_rows(),
            "regions": regions,
        }

    @at_the_edge
    def close(self) -> None:
        """Stop; what is acknowledged as durable stays in the WAL and is there when the table is opened again.

        An interrupted call can be made again.
        Raises: what kept non-durable rows from the WAL at the last moment.
        """
        if self._ended or os.getpid() != self._process:
            return
        self._closed = True
        self._commits.stop()
        self._collections.stop()
        try:
            with ExitStack() as every:  # each is closed, whatever the others raise
                for writer in self._regions:
                    every.callback(self._withdraw, writer)
                    every.callback(writer.close)
        except Exception:
            self._ended = True
            raise
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this owner from any other: the table's address and the epoch of each region."""
        epochs = {str(writer.region): writer.guard.epoch for writer in self._regions}
        return {"table": self._context.store.url(""), "epochs": epochs}

    def broken(self) -> str | None:
        """Why a region has stopped itself, None while all serve or were only fenced by a newer writer."""
        failures = (writer.failure for writer in self._regions)
        return next((str(error) for error in failures if error and not isinstance(error, wal.Fenced)), None)

    def announce(self, endpoint: str) -> None:
        """Leave a note on storage where readers find the owner of these regions. A hint: nothing depends on it."""
        self._owner = endpoint
        for writer in self._regions:
            owners.announce(self._context.store, writer.region, writer.guard.epoch, endpoint)

    def _refuse_a_clone(self, writer: RegionWriter) -> None:
        """A clone made by Lance says that generations of the other table are committed; its own, from 1 on, would be
        taken for those, and their rows dropped. Raises: Corrupt.
        """
        done, generation = self.base.committed.get(writer.region, 0), writer.status()["generation"]
        if generation <= done:
            raise wal.Corrupt(
                f"{self.base.uri}: generation {done} of region {writer.region} is committed, but its log is at "
                f"{generation}: the table is a clone, or its _mem_wal directory was removed; put that back, or copy "
                "the rows into a new table"
            )

    def _withdraw(self, writer: RegionWriter) -> None:
        with suppress(wal.WalError):  # the note is a hint
            owners.withdraw(self._context.store, writer.region, writer.guard.epoch)

    def _write(
        self, rows: pa.Table, token: Token | None, *, durable: bool, timeout: float | None, deletes: bool = False
    ) -> Receipt:
        self._refuse_if_closed()
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):  # type: ignore[redundant-expr]
            raise Invalid(f"timeout = {timeout}: give seconds above 0, or None to wait for as long as it takes")
        acks = self._acks(
            [(writer, Write(part, durable, token, deletes)) for writer, part in self._split(rows, deletes)], timeout
        )
        return Receipt(
            rows.num_rows,
            any(ack.applied for ack in acks.values()) if acks else True,
            {region: ack.position for region, ack in acks.items()},
        )

    def _acks(self, waiting: Sequence[tuple[RegionWriter, Write]], timeout: float | None = None) -> dict[str, Ack]:
        return written(waiting, within=timeout, clock=self._context.clock)

    def _split(self, rows: pa.Table, deletes: bool) -> list[tuple[RegionWriter, pa.Table]]:
        """Rows by region, order within a region kept. Raises: InvalidRows, Invalid where rows go to several."""
        if len(self._regions) == 1 or not rows.num_rows:
            return [(self._regions[0], rows)] if rows.num_rows else []
        # One region checks what it is given. Of several none may write its part before all of them are fine, and
        # routing reads the key.
        self._admission.check(rows, deletes=deletes)
        buckets = self.base.route(rows)
        order = np.argsort(buckets, kind="stable")
        present, starts = np.unique(buckets[order], return_index=True)
        sorted_rows = rows if len(present) == 1 else rows.take(pa.array(order))
        ends = [*starts[1:], rows.num_rows]
        return [
            (self._regions[bucket], sorted_rows.slice(start, end - start))
            for bucket, start, end in zip(present, starts, ends, strict=True)
        ]

    def _views(self, level: Level) -> list[RegionView]:
        self._refuse_if_closed()
        if level == "committed":
            return []
        views = [writer.durable_view() if level == "durable" else writer.view() for writer in self._regions]
        return views if level != "flushed" else [RegionView(view.region, (), view.ssts) for view in views]

    def _flush_now(self, writers: Sequence[RegionWriter]) -> None:
        for published in [writer.freeze() for writer in writers]:  # side by side
            published()

    def _commit_now(self, upkeep: Upkeep) -> CommitReport:
        context = self._context
        report = flush.commit(
            self.base.uri,
            context.store.storage_options,
            context.store,
            clock=context.clock,
            ids=context.ids,
            retries=upkeep.commit_retries,
            memory_max=upkeep.commit_memory_max,
            committer=self._committer,
        )
        for writer in self._regions:
            writer.refresh()
        if report.ssts:
            context.models.read(self._reader.base())
        return report

    def _collect(self, ages: Ages) -> None:
        found = self._collector.collect(self._reader.base(), ages)
        if found.bytes:
            _LOG.info("%s", found.summary())
        if found.unreadable or found.unaccounted:
            _LOG.warning(
                "%d WAL entries cannot be read, %d SSTs are neither published nor committed; all were kept: "
                "see `memwal gc --dry-run`",
                found.unreadable,
                found.unaccounted,
            )

    def _writer(self, region: UUID) -> RegionWriter:
        try:
            return self._by_id[region]
        except KeyError:
            raise Invalid(f"region {region} is not one of this table's {len(self._regions)} regions") from None

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Invalid("the table is closed; open it again")
        if os.getpid() != self._process:
            raise Invalid("the table was opened in another process, whose threads a fork leaves behind; open it here")
