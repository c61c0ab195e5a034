"""One region's rows of one micro-batch on their way to whoever owns the region by the time they arrive.

The rows are kept until the ack: they come from an iterator that gives them once, and an owner that is lost, or lets the
region go, must cost a second sending and not the whole micro-batch. The daemon holds as much at that moment. The token
makes it safe: what was applied before an answer was lost is not applied again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from memwal.ingest.api.tokens import StreamReceipt
from memwal.ingest.errors import Invalid, MemWalError, UnknownOutcome
from memwal.ingest.rpc.connection import OpenPut
from memwal.memtable import InvalidRows, convert
from memwal.wal import Clock

T = TypeVar("T")


class RegionStream:
    """Rows of one region under one token; applied whole by `finish`, not at all otherwise.

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
        """Use `RemoteTable.open_stream`. `open_put`: opens the stream at the owner of this moment. `again`: returns
        when another attempt may begin, or raises what it is given. `within`: returns what a call returns, which it may
        give up and leave to itself (`ingest.client.retry`).
        """
        self._region, self.schema = region, schema
        self._open_put, self._again, self._within, self._clock = open_put, again, within, clock
        self._kept: list[pa.RecordBatch] = []
        self._put: OpenPut | None = None
        self._unknown: UnknownOutcome | None = None
        self.rows = self.bytes = 0
        self._patiently(lambda _: None)

    def write(self, batch: pa.RecordBatch) -> None:
        """Send rows of the stream's columns, in the order of the schema. Raises also: Invalid for a value that does not
        fit its column exactly.
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
        acked = (answer["rows"], answer["applied"], answer["position"])
        repeated = answer.get("repeated", 0)
        return StreamReceipt(self._region, *acked, took, answer["skipped"], answer.get("newest"), repeated)

    def abort(self) -> None:
        """Drop the stream; the region applies nothing of it."""
        put, self._put, self._kept = self._put, None, []
        if put is not None:
            put.abort()

    def _patiently(self, act: Callable[[OpenPut], T]) -> T:
        """What `act` returns of the stream that is open, or of a new one that has all rows kept so far."""
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
                    # An attempt before this one may have been applied, whatever the last one met.
                    raise self._unknown or last from None

    def _step(
        self, put: OpenPut | None, kept: Sequence[pa.RecordBatch], act: Callable[[OpenPut], T]
    ) -> tuple[OpenPut, T]:
        """Touches nothing of this object: where it was given up, another attempt is under way."""
        opened = put or self._open_put()
        try:
            for batch in kept if put is None else ():
                opened.write(batch)
            return opened, act(opened)
        except BaseException:
            opened.abort()
            raise
