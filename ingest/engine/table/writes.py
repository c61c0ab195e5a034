"""Write one put or delete into the regions of this process: resolve equal keys, split by region, write, answer once.

No region may write its part before all parts are valid, so rows for several regions are first checked as a whole. A
caller that stops waiting withdraws the writes that no region has begun. A region finishes a write that it has begun,
and the caller gets an unknown outcome; the call returns only when the region has its own copy of the rows.

The steps of a delete or update by filter in these regions are here too; see `api.filter_writes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal import flush
from memwal.ingest.caller import LOOK_EVERY, Caller, expect_waiting, given_up, present
from memwal.ingest.engine.api.arguments import seconds, yes_or_no
from memwal.ingest.engine.api.filter_writes import Where
from memwal.ingest.engine.api.keys import normalise_keys
from memwal.ingest.engine.api.rows import Deletes, first_of_each_key, split_deletes
from memwal.ingest.engine.api.tokens import Ack, Receipt, Token, check_rises
from memwal.ingest.engine.read.levels import RegionView, Reshaped
from memwal.ingest.engine.read.reader import Captured, Reader
from memwal.ingest.engine.region.admission import Admission
from memwal.ingest.engine.region.quotas import PutRate
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.engine.region.writer import RegionWriter, Rested
from memwal.ingest.engine.table.columns import TableColumns
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.engine.table.resize import Gate
from memwal.ingest.errors import (
    FencedError,
    Invalid,
    MemWalError,
    Unavailable,
    UnknownOutcome,
    classify,
    translate_errors,
)
from memwal.memtable import TOMBSTONE, tombstones
from memwal.wal import Clock, OutcomeUnknown, WalError, named
from memwal.wal.panics import panics_as_errors

_LOOK_EVERY = 0.5
"""Seconds between two checks whether a load is still in progress."""
_COPYING = 0.001
"""Seconds between two checks whether a copy is made; most copies take less."""
_Parts = Sequence[tuple[RegionWriter, Write]]
COUNTED_MAX, SCANNED_MAX = 1_000, 1_000_000
"""Maximum keys of a delete whose rows are counted, and maximum rows of a base table without a B-tree on the key. A
delete takes 1 ms plus 0.3 us per key. Within these limits the lookup takes up to 15 ms; beyond them, 15 us per key,
or 5 ms per million rows.
"""


class TableWrites:
    """Write conforming rows of a table into its regions here. Thread safety. Any thread."""

    def __init__(
        self, columns: TableColumns, regions: RegionSet, reader: Reader, rate: PutRate | None, gate: Gate
    ) -> None:
        """`reader`: counts the rows that a delete finds. `rate`: limits the rate of puts; None: no limit."""
        self._columns, self._regions, self._reader, self._rate = columns, regions, reader, rate
        self._gate = gate

    def write(
        self,
        admission: Admission,
        rows: pa.Table,
        token: Token | None,
        *,
        durable: bool,
        timeout: float | None,
        deletes: bool = False,
        where: Where | None = None,
        found: FoundRows | None = None,
    ) -> Receipt:
        """Write rows that `admission` has converted to the table's columns.

        `where`: see `Write`. `found`: counts rows as they are before the write, while the regions write.
        Raises: as `Operations.put`.
        """
        timeout, durable = seconds("timeout", timeout), yes_or_no("durable", durable)
        if self._rate is not None and where is None:
            timeout = self._wait_for_rate(self._rate, rows, timeout)
        with self._gate.passing():
            split, shape = self._split(admission, rows, deletes), admission.context.shape
            if token is not None:
                check_rises(token, {to.name: to.applied(token.producer).newest for to, _ in split})
            parts = [(to, Write(part, durable, token, deletes, shape=shape, where=where)) for to, part in split]
            if found is not None:
                found.capture([to.view() for to, _ in parts])
            return _receipt(rows.num_rows, self.acks(parts, timeout, found))

    def delete(
        self, keys: Any, token: Token | None, *, durable: bool, timeout: float | None, where: Where | None = None
    ) -> Receipt:
        """Delete `keys`, in any form that `get` accepts. `where`: see `Write`. Raises: as `Operations.delete`."""
        admission, base = self._columns.admission, self._columns.base
        normalised = normalise_keys(keys, base.schema, base.key)
        deleting = tombstones(normalised, admission.context.schema).drop_columns(TOMBSTONE)
        found = None if where is not None or normalised.num_rows > COUNTED_MAX else FoundRows(self._reader, normalised)
        receipt = self.write(
            admission, deleting, token, durable=durable, timeout=timeout, deletes=True, where=where, found=found
        )
        return receipt if found is None else replace(receipt, rows=found.number if receipt.applied else 0)

    def put_region(self, region: UUID, rows: pa.Table, token: Token | None, nulls: Collection[str]) -> Ack:
        """See `Table.put_region`."""
        base = self._columns.base
        given, deletes = split_deletes(rows, base.key)
        admission, conforming = self._columns.conforming(self._columns.brought_up(given), deletes)
        conforming = admission.with_nulls(conforming, nulls)
        admission.check(conforming, deletes=deletes)
        writer = self._regions.serving(region)
        if np.any(base.route(conforming) != writer.bucket):
            raise Invalid(f"{named(region)}: the stream holds rows of other regions; route with BaseTable.route")
        once, deletes = self.once_per_key(admission, conforming, deletes)
        if self._rate is not None:
            self._wait_for_rate(self._rate, once, None)
        write = Write(once, token=token, deletes=deletes, shape=admission.context.shape)
        return replace(self.acks([(writer, write)])[writer.name], rows=conforming.num_rows)

    def once_per_key(self, admission: Admission, rows: pa.Table, deletes: Deletes = False) -> tuple[pa.Table, Deletes]:
        """Apply the table's rule for equal keys in one put; return rows and deletes. Raises: Invalid, InvalidRows."""
        rule = self._columns.base.rules.on_duplicate
        if rule == "last" or rows.num_rows < 2:
            return rows, deletes
        admission.check(rows, deletes=deletes)  # first, so that an error names the row by the caller's number
        once = first_of_each_key(rows, self._columns.base.key, deletes, refuse=rule == "fail")
        if once.all():
            return rows, deletes
        return rows.filter(pa.array(once)), deletes if isinstance(deletes, bool) else deletes[once]

    def acks(self, parts: _Parts, timeout: float | None = None, found: FoundRows | None = None) -> dict[str, Ack]:
        """Return the regions' acks, as `_written`; `found` counts in the meantime.

        If regions look up stored rows and find other columns than their own, they write nothing; the new columns are
        adopted, and their writes are submitted once more. So are writes to regions that came to rest before them.
        """
        try:
            return self._written(parts, timeout, found)
        except (Reshaped, Rested, UnknownOutcome):
            answered = [(to, each) for to, each in parts if each.done.done()]
            refused = [(to, each) for to, each in answered if isinstance(each.done.exception(), Reshaped | Rested)]
            if any(isinstance(each.done.exception(), Reshaped) for _, each in refused):
                for published in self._columns.take_over():
                    published()
            acked = {to.name: each.done.result() for to, each in parts if _is_acked(each)}
            if not refused or len(refused) + len(acked) < len(parts):
                raise
        try:
            again = [(self._regions.serving(to.region), each.again()) for to, each in refused]
            return acked | self._written(again, timeout)
        except (MemWalError, WalError) as error:
            if not acked:
                raise
            text = f"{len(acked)} of {len(parts)} regions applied their rows, the others maybe not: {error}"
            raise UnknownOutcome(text) from error

    def _written(self, parts: _Parts, within: float | None, found: FoundRows | None = None) -> dict[str, Ack]:
        """Submit each write to its region and return the regions' acks by region id. `found` counts in the meantime.

        If one region fails, the call still waits for the others, so that no write is in flight afterwards. `within`:
        seconds after which the call is abandoned, None for no limit.
        Raises: the error of a region if none applied its rows; UnknownOutcome if one did, or still may.
        """
        clock = self._regions.context.clock
        until = None if within is None else clock.monotonic() + within
        try:
            for writer, write in parts:
                writer.submit(write, None if until is None else max(0.0, until - clock.monotonic()))
            if found is not None:
                found.count()
            errors = [error for writer, write in parts if (error := _error(writer, write, until, clock)) is not None]
        except BaseException:  # an interrupt: the caller may change its memory afterwards
            for _, write in parts:
                _leave(write, clock)
            raise
        acks = {to.name: write.done.result() for to, write in parts if not errors or _is_acked(write)}
        if errors:
            error = _of_several(errors, acks)
            if isinstance(error, UnknownOutcome) and "positions" in error.details:
                # Needed to send the rest: the positions belong to this routing.
                error.details["routing"] = self._columns.base.routing_version
            raise error
        return acks

    def _wait_for_rate(self, rate: PutRate, rows: pa.Table, timeout: float | None) -> float | None:
        """Return when `rows` may be written, with the rest of `timeout`. Raises: as `PutRate.wait`."""
        longest = self._regions.context.wal_options.put_timeout
        waited = rate.wait(rows.nbytes, longest if timeout is None else min(timeout, longest))
        return None if timeout is None else max(0.0, timeout - waited)

    def _split(self, admission: Admission, rows: pa.Table, deletes: bool) -> list[tuple[RegionWriter, pa.Table]]:
        """Return the rows by region, in order. Raises: InvalidRows, Invalid for wrong rows of several regions."""
        if len(self._regions.order) == 1 or not rows.num_rows:
            return [(self._regions.serving(self._regions.order[0]), rows)] if rows.num_rows else []
        admission.check(rows, deletes=deletes)  # a single region checks its rows itself; routing reads the key
        buckets = self._columns.base.route(rows)
        order = np.argsort(buckets, kind="stable")
        present, starts = np.unique(buckets[order], return_index=True)
        sorted_rows = rows if len(present) == 1 else rows.take(pa.array(order))
        ends = [*starts[1:], rows.num_rows]
        writers = self._regions.of(self._regions.order[bucket] for bucket in present)
        slices = (sorted_rows.slice(start, end - start) for start, end in zip(starts, ends, strict=True))
        return list(zip(writers, slices, strict=True))

    # ---- steps of a delete or update by filter; see `api.filter_writes` --------------------------------------------

    @translate_errors
    def base_version(self) -> int:
        """Return the newest version of the base table."""
        return self._reader.base().version

    @translate_errors
    def piece(self, keys: Any, where: Where, *, durable: bool, token: Token | None, timeout: float | None) -> Receipt:
        """Delete or update those of `keys` (as for `get`) whose newest row passes `where`, unless their region has
        applied `token`.

        The token is not recorded. The receipt's `skipped` counts the rows that stay. The call waits for loads past the
        log. Raises: as `Operations.put`.
        """
        context = self._columns.admission.context
        clock, began = context.clock, context.clock.monotonic()
        patience = context.wal_options.put_timeout if timeout is None else timeout
        while flush.end_abandoned(context.store, self._reader.base, clock):
            expect_waiting()
            if clock.monotonic() - began >= patience:
                raise Unavailable("a load into the table is under way; call it again when it has ended")
            clock.sleep(min(_LOOK_EVERY, patience))
        left = None if timeout is None else max(0.001, timeout - (clock.monotonic() - began))
        return self.delete(keys, token, durable=durable, timeout=left, where=where)

    @translate_errors
    def record(
        self, token: Token, *, durable: bool, timeout: float | None, regions: Iterable[UUID] | None = None
    ) -> dict[str, int]:
        """Record `token` as applied in `regions` (None: all); return the WAL position of each, 0 if not durable yet.

        A region that has applied it is not changed. Raises: as `Operations.put`.
        """
        context = self._columns.admission.context
        nothing = context.schema.empty_table().drop_columns(TOMBSTONE)
        with self._gate.passing():
            writers = self._regions.of(self._regions.order if regions is None else regions)
            writes = [(to, Write(nothing, durable, token, shape=context.shape)) for to in writers]
            return {region: ack.position for region, ack in self.acks(writes, timeout).items()}


class FoundRows:
    """Count the rows of some keys as they are before a write. Thread safety. One thread."""

    def __init__(self, reader: Reader, keys: pa.Table) -> None:
        self._reader, self._keys = reader, keys
        self._views: Sequence[RegionView] = ()
        self.number: int = keys.num_rows
        """Rows found; the number of keys if they cannot be looked up."""

    def capture(self, views: Sequence[RegionView]) -> None:
        """Store the levels above the base table, from before the write."""
        self._views = views

    def count(self) -> None:
        """Look the keys up, unless that takes long. A failure leaves `number` unchanged; only the receipt needs it."""
        base = self._reader.opened
        indexed = any(spec.kind == "btree" and spec.column in base.key for spec in base.indexes)
        with suppress(Exception), panics_as_errors:
            if not indexed and base.dataset.count_rows() > SCANNED_MAX:
                return
            self.number = self._reader.get(Captured(self._views), self._keys, self._keys.column_names).num_rows


def _is_acked(write: Write) -> bool:
    return write.done.done() and write.done.exception() is None


def _of_several(errors: Sequence[BaseException], acks: Mapping[str, Ack]) -> BaseException:
    """Return the error of a call if some regions failed. Unavailable would promise that nothing was applied.

    If the failed regions certainly applied nothing, the details hold the acks, so that a client can send the rest
    again.
    """
    unknown = next((error for error in errors if isinstance(error, UnknownOutcome | OutcomeUnknown)), None)
    if unknown is not None or not acks:
        return unknown or errors[0]
    kinds = [classify(error) for error in errors]
    surely = all(isinstance(kind, Unavailable | FencedError) for kind in kinds)
    partly = UnknownOutcome(
        f"{len(acks)} of {len(acks) + len(errors)} regions applied their rows, the others did not: {errors[0]}; "
        "retry with the same token",
        kinds[0].details | (asdict(_receipt(sum(ack.rows for ack in acks.values()), acks)) if surely else {}),
    )
    partly.__cause__ = errors[0]
    return partly


def _receipt(rows: int, acks: Mapping[str, Ack]) -> Receipt:
    """Return the receipt of a write of `rows` rows to regions that answered with `acks`."""
    positions, counts, skipped, applied = {}, {}, 0, not acks
    for region, ack in acks.items():
        positions[region], counts[region] = ack.position, ack.counts
        skipped, applied = skipped + ack.skipped, applied or ack.applied
    return Receipt(rows, applied, positions, skipped, counts)


def _error(writer: RegionWriter, write: Write, until: float | None, clock: Clock) -> BaseException | None:
    caller = present()
    if until is None and caller is None:
        return write.done.exception()
    try:
        return _answered(write, until, clock, caller)
    except TimeoutError:
        if _leave(write, clock):
            if caller is not None and caller.left:
                return given_up()
            return Unavailable(
                f"{writer.place}: the write did not begin in time and was withdrawn; retry, or raise the timeout"
            )
        return UnknownOutcome(
            f"{writer.place}: the write began, but did not end in time; it may be applied now or later; "
            "retry with the same token"
        )


def _answered(write: Write, until: float | None, clock: Clock, caller: Caller | None) -> BaseException | None:
    """Return the error of `write`, None for its ack. Raises: TimeoutError after `until`, and if the caller leaves."""
    # The answer first: in a daemon, asking gRPC whether the caller is gone takes longer than everything else here.
    while caller is not None and (until is None or until - clock.monotonic() > LOOK_EVERY):
        with suppress(TimeoutError):
            return write.done.exception(LOOK_EVERY)
        if caller.left:
            raise TimeoutError
    return write.done.exception(None if until is None else until - clock.monotonic())


def _leave(write: Write, clock: Clock) -> bool:
    """Withdraw a write. Return False if its region has begun with it; the region then has its own copy."""
    if write.take():
        return True
    while not write.copied and not write.done.done():
        clock.sleep(_COPYING)
    return False
