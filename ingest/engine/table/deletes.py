"""Run the steps of a delete by filter in the regions of this process; see `api.deletes`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from memwal import flush
from memwal.ingest.caller import expect_waiting
from memwal.ingest.engine.api.deletes import Where
from memwal.ingest.engine.api.tokens import Receipt, Token
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.engine.table.columns import TableColumns
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.engine.table.writes import TableWrites
from memwal.ingest.errors import Unavailable, translate_errors
from memwal.memtable import TOMBSTONE

_LOOK_EVERY = 0.5
"""Seconds between two checks whether a load is still in progress."""


class RegionDeletes:
    """Delete pieces of keys, and record tokens.

    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds.
    """

    def __init__(self, columns: TableColumns, regions: RegionSet, writes: TableWrites, reader: Reader) -> None:
        self._columns, self._regions, self._writes, self._reader = columns, regions, writes, reader

    @translate_errors
    def base_version(self) -> int:
        """Return the newest version of the base table."""
        return self._reader.base().version

    @translate_errors
    def piece(self, keys: Any, where: Where, *, durable: bool, token: Token | None, timeout: float | None) -> Receipt:
        """Delete those of `keys` (as for `get`) whose newest row passes `where`, unless their region has applied
        `token`.

        The token is not recorded. The receipt's `skipped` counts the rows that stay. The call waits for loads past the
        log. Raises: as `Operations.put`.
        """
        context = self._columns.admission.context
        clock, began = context.clock, context.clock.monotonic()
        patience = context.wal_options.put_timeout if timeout is None else timeout
        while flush.end_abandoned(context.store, self._reader.base, clock):
            expect_waiting()
            if clock.monotonic() - began >= patience:
                raise Unavailable("a load into the table is under way; call the delete again when it has ended")
            clock.sleep(min(_LOOK_EVERY, patience))
        left = None if timeout is None else max(0.001, timeout - (clock.monotonic() - began))
        return self._writes.delete(keys, token, durable=durable, timeout=left, where=where)

    @translate_errors
    def record(
        self, token: Token, *, durable: bool, timeout: float | None, regions: Iterable[UUID] | None = None
    ) -> dict[str, int]:
        """Record `token` as applied in `regions` (None: all); return the WAL position of each, 0 if not durable yet.

        A region that has applied it is not changed. Raises: as `Operations.put`.
        """
        context = self._columns.admission.context
        nothing = context.schema.empty_table().drop_columns(TOMBSTONE)
        writers = self._regions.of(self._regions.order if regions is None else regions)
        writes = [(to, Write(nothing, durable, token, shape=context.shape)) for to in writers]
        return {region: ack.position for region, ack in self._writes.acks(writes, timeout).items()}
