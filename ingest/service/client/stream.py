"""Stream one region's rows of one micro-batch to the current owner of the region.

The client keeps the rows until the ack, because their iterator yields them only once. If the owner is lost, or
releases the region, it sends these rows again instead of the whole micro-batch. The daemon holds the same rows
meanwhile. The token makes the repetition safe: rows that were applied before an answer was lost are not applied
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from memwal.ingest.engine.api.tokens import StreamReceipt
from memwal.ingest.errors import Invalid, MemWalError, UnknownOutcome
from memwal.ingest.service.rpc.connection import OpenPut
from memwal.memtable import InvalidRows, convert
from memwal.wal import Clock

T = TypeVar("T")


class RegionStream:
    """Rows of one region under one token. `finish` applies all of them; otherwise none is applied.

    Thread safety. One thread at a time.
    """

    def __init__(
        self,
        region: str,
        schema: pa.Schema,
        open_put: Callable[[], OpenPut],
        again: Callable[[MemWalError], None],
        within: Callable[[Callable[[], Any]], Any],
        clock: Clock,
    ) -> None:
        """Use `RemoteTable.open_stream` instead.

        `open_put`: opens the stream at the current owner. `again`: returns when another attempt may begin, or raises
        the given error. `within`: runs a call and returns its result, or abandons it (`client.retry`).
        """
        self._region, self.schema = region, schema
        self._open_put, self._again, self._within, self._clock = open_put, again, within, clock
        self._kept: list[pa.RecordBatch] = []
        self._put: OpenPut | None = None
        self._unknown: UnknownOutcome | None = None
        self.rows = self.bytes = 0
        self._patiently(lambda _: None)

    def write(self, batch: pa.RecordBatch) -> None:
        """Send rows with the stream's columns, in the order of the schema.

        Raises also: Invalid for a value that does not fit its column exactly.
        """
        batch = batch if batch.schema == self.schema else self._cast(batch)
        self._patiently(lambda put: put.write(batch))
        self._kept.append(batch)
        self.rows, self.bytes = self.rows + batch.num_rows, self.bytes + batch.nbytes

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.names != self.schema.names:
            names = (", ".join(each.names) for each in (self.schema, batch.schema))
            raise Invalid("the stream has the columns {}, not {}; send those".format(*names))
        try:
            given = zip(batch.columns, self.schema, strict=True)
            columns = [convert(pa.chunked_array([column]), field).combine_chunks() for column, field in given]
        except InvalidRows as error:
            raise Invalid(str(error), {"column": error.column}) from None
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def finish(self) -> StreamReceipt:
        """Close the stream and wait for the region's answer. Raises: the region's error, UnknownOutcome."""
        started = self._clock.monotonic()
        answer = self._patiently(lambda put: put.finish())
        self._kept, took = [], self._clock.monotonic() - started
        acked = (answer["rows"], answer["applied"], answer["position"], answer["skipped"], answer.get("newest"))
        return StreamReceipt(*acked, answer.get("repeated", 0), self._region, took)

    def abort(self) -> None:
        """Drop the stream; the region applies nothing."""
        put, self._put, self._kept = self._put, None, []
        if put is not None:
            put.abort()

    def _patiently(self, act: Callable[[OpenPut], T]) -> T:
        """Return the result of `act` on the open stream, or on a new stream after all kept rows were sent to it."""
        while True:
            step = partial(self._step, self._put, tuple(self._kept), act)
            try:
                done: tuple[OpenPut, T] = self._within(step)
                self._put = done[0]
                return done[1]
            except MemWalError as error:
                self._put = None
                self._unknown = error if isinstance(error, UnknownOutcome) else self._unknown
                try:
                    self._again(error)
                except MemWalError as last:
                    # An earlier attempt may have been applied, whatever the last one raised.
                    raise self._unknown or last from None

    def _step(
        self, put: OpenPut | None, kept: Sequence[pa.RecordBatch], act: Callable[[OpenPut], T]
    ) -> tuple[OpenPut, T]:
        """Run one attempt. It does not change this object, because an abandoned attempt may still be running."""
        opened = put or self._open_put()
        try:
            for batch in kept if put is None else ():
                opened.write(batch)
            return opened, act(opened)
        except BaseException:
            opened.abort()
            raise
