"""Streams of record batches for `async for`: the results of `scan` and `changes` of an asynchronous table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import pyarrow as pa

from memwal.ingest.caller import Caller
from memwal.ingest.engine.api.changes import Changes, resumed, steps_of
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.errors import Invalid, MemWalError

T = TypeVar("T")
S = TypeVar("S", bound="AsyncRowStream | AsyncChanges")


class Calls(Protocol):
    """Runs a blocking call in a thread of the table."""

    def __call__(self, call: Callable[[], T], caller: Caller | None = None, /) -> Awaitable[T]:
        """Return the call's result. The call is abandoned if the await is cancelled or `caller` leaves."""
        ...


class Opening(Coroutine[Any, Any, S], Generic[S]):
    """A stream that is requested when it is awaited: `await table.scan()`, or `async for batch in table.scan()`."""

    def __init__(self, opened: Coroutine[Any, Any, S]) -> None:
        self._opened = opened

    def __await__(self) -> Generator[Any, Any, S]:
        return self._opened.__await__()

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        return self._opened.send(value)

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        return self._opened.throw(*error)

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._opened.close()

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        async with await self as stream:
            async for batch in stream:
                yield batch


class AsyncRowStream:
    """The rows of one read as a `RowStream` for `async for`: batch by batch, each row once.

    A batch is read when it is requested, so only the rows that the daemon has sent (about 4 MB) are ahead of the
    caller, and a stream without a reader holds no thread. `close`, the last row, an error, a cancelled read, or
    dropping the stream releases the snapshot.

    Thread safety. One task at a time; `close` from any task, also while another one reads.
    Errors. As `RowStream`. After a cancelled read: Invalid, since a batch may be lost; start the read again.
    """

    def __init__(self, rows: RowStream, calls: Calls) -> None:
        """Use `AsyncTable.scan` instead."""
        self._rows, self._calls = rows, calls

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows."""
        return self._rows.schema

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        batch = await self._read(lambda: next(self._rows, None))
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def read_next_batch(self) -> pa.RecordBatch:
        """Return the next batch. Raises: StopAsyncIteration after the last one."""
        return await anext(self)

    async def read_all(self) -> pa.Table:
        """Return all remaining rows as a table in memory. Raises also: Invalid if every row was read before."""
        return await self._read(self._rows.read_all)

    async def to_table(self) -> pa.Table:
        """See `read_all`."""
        return await self._read(self._rows.read_all)

    async def read_pandas(self, **options: Any) -> Any:
        """See `to_pandas`. `options`: those of `pyarrow.Table.to_pandas`."""
        return await self._read(lambda: self._rows.read_pandas(**options))

    async def to_pandas(self) -> Any:
        """Return all remaining rows as a pandas frame. Raises: Invalid if pandas is not installed."""
        return await self._read(self._rows.to_pandas)

    async def to_polars(self) -> Any:
        """Return all remaining rows as a Polars frame. Raises: Invalid if Polars is not installed."""
        return await self._read(self._rows.to_polars)

    async def close(self) -> None:
        """Release the snapshot. Returns at once; another task that waits for rows gets Invalid."""
        self._rows.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._rows.close()

    def __repr__(self) -> str:
        return f"<memwal.Async{repr(self._rows).removeprefix('<memwal.')}"

    async def _read(self, call: Callable[[], T]) -> T:
        try:
            return await self._calls(call)
        except (asyncio.CancelledError, GeneratorExit):
            self._rows.close()
            raise


class AsyncChanges:
    """The changes of a table as `Changes` for `async for`.

    A feed that follows waits in the event loop, and holds a thread only while it reads. A cancelled read loses
    nothing: the next one continues from `position`. Each batch has its own schema; the feed has none, since the first
    schema is known only after the first read.

    Thread safety. One task at a time; `close` from any task.
    Errors. As `Changes`; Invalid after `close`.
    """

    def __init__(self, changes: Changes, calls: Calls) -> None:
        """Use `AsyncTable.changes` instead."""
        self._changes, self._calls = changes, calls
        self._position = changes.position
        self._steps: Iterator[pa.RecordBatch | float] | None = None
        self._caller, self._closed = Caller(), False

    @property
    def position(self) -> dict[str, Any]:
        """The position after the last returned batch, as a JSON value; `changes(since=position)` continues there."""
        return self._position

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        while True:
            steps = self._steps = self._steps or steps_of(self._changes)
            step = await self._read(partial(next, steps, None))
            if step is None:
                self._steps = None
                raise StopAsyncIteration
            if not isinstance(step, float):
                return step
            await asyncio.sleep(step)

    async def read_all(self) -> pa.Table:
        """Return all changes as one table. Raises: Invalid if the feed follows and so has no end."""
        return await self._read(self._changes.read_all)

    async def close(self) -> None:
        """End the feed; another task that waits for changes gets Invalid within a second."""
        self._closed = True
        self._caller.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise Invalid(_CLOSED)
        changes, self._caller = self._changes, Caller()
        try:
            result = await self._calls(call, self._caller)
        except BaseException as error:
            # After the cancellation, the thread may still add a piece to `changes`.
            self._changes, self._steps = resumed(changes, self._position), None
            if self._closed and isinstance(error, MemWalError):
                raise Invalid(_CLOSED) from None
            raise
        self._position = changes.position
        return result


_CLOSED = "the changes were closed; ask for them again after their position"
