"""`memwal.connect_async`: the table of `memwal.connect`, with methods to await.

Each method calls the synchronous method in a thread of its own (`ingest.threads`), for a caller who may leave
(`ingest.caller`). So there is one client implementation, and one line here for each method.
"""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from weakref import WeakSet

import pyarrow as pa

from memwal.ingest.caller import Caller, carried
from memwal.ingest.engine.api.lancedb_forms import ELSEWHERE, LanceDBForms
from memwal.ingest.engine.api.reads import SQL_MEMORY, Reads
from memwal.ingest.engine.api.versions import checked_out, newest
from memwal.ingest.engine.table.public import method_of
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.service.client.async_streams import AsyncChanges, AsyncRowStream, Calls, Opening
from memwal.ingest.service.client.connect import connect
from memwal.ingest.service.client.remote import IN_FLIGHT_MAX
from memwal.ingest.suggest import no_attribute
from memwal.ingest.threads import CallThreads

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound=AsyncRowStream | AsyncChanges)
T = TypeVar("T")

AT_ONCE = 32
"""Threads of a table for reads, and as many for writes and steps, so that reads do not wait behind puts that wait for
room. A call holds one thread while it runs; group commit combines the puts that wait together into one request."""
_CLOSED = "the table is closed; connect again"


def _awaited(
    method: Callable[Concatenate[Any, P], R], result: Callable[[R, Calls], S], *, writes: bool = False
) -> Callable[Concatenate[AsyncTable, P], Coroutine[Any, Any, S]]:
    """Return a method of `AsyncTable` with the parameters and the docstring of the synchronous `method`."""
    name = method.__name__

    @wraps(method)
    async def awaited(table: AsyncTable, /, *args: P.args, **kwargs: P.kwargs) -> S:
        answer = await table._call(lambda of: method_of(of, name)(*args, **kwargs), writes=writes)  # noqa: SLF001
        return result(answer, table._read)  # noqa: SLF001

    return awaited


def _streamed(
    method: Callable[Concatenate[Any, P], R], result: Callable[[R, Calls], M]
) -> Callable[Concatenate[AsyncTable, P], Opening[M]]:
    """As `_awaited`, for a method whose result is a stream."""
    awaited = _awaited(method, result)

    @wraps(method)
    def opening(table: AsyncTable, /, *args: P.args, **kwargs: P.kwargs) -> Opening[M]:
        return Opening(awaited(table, *args, **kwargs))

    return opening


def _reading(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[AsyncTable, P], Coroutine[Any, Any, R]]:
    return _awaited(method, _as_it_is)


def _writing(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[AsyncTable, P], Coroutine[Any, Any, R]]:
    return _awaited(method, _as_it_is, writes=True)


def _as_it_is(answer: R, _: Calls) -> R:
    return answer


class AsyncTable:
    """A table for asynchronous programs: the methods of the table that `memwal.connect` returns, to await.

    Cancelling. A cancelled call returns to its task at once, and work that has not begun is not done. A put or delete
    that a daemon has begun may be applied, as after UnknownOutcome: repeat it with its token. `flush`, `commit` and the
    building of an index continue at the daemon once begun. A read ends at the daemon with its current step. A cancelled
    call holds its thread only until a running step in this process ends.
    Threads. At most 32 reads and 32 other calls run at a time; further ones wait. The `timeout` of a put begins with
    the call; `asyncio.timeout` includes the wait. `rerank` of `hybrid` runs in one of these threads.
    Thread safety. Any task, of any event loop, of the process that connected.
    Errors. Only `ingest.errors` kinds, raised by the await; a call after `close`: Invalid.
    """

    def __init__(self, table: LanceDBForms) -> None:
        """Use `memwal.connect_async` instead."""
        self._table = table
        self._reads, self._writes = CallThreads("async-read", AT_ONCE), CallThreads("async-write", AT_ONCE)
        self._callers: WeakSet[Caller] = WeakSet()
        self._process, self._closed = os.getpid(), False

    put = _writing(LanceDBForms.put)
    delete = _writing(LanceDBForms.delete)
    update = _writing(LanceDBForms.update)
    get = _reading(LanceDBForms.get)
    scan = _streamed(LanceDBForms.scan, AsyncRowStream)
    count = _reading(LanceDBForms.count)
    facets = _reading(LanceDBForms.facets)
    search = _reading(Reads.search)
    match = _reading(LanceDBForms.match)
    hybrid = _reading(LanceDBForms.hybrid)
    candidates = _reading(LanceDBForms.candidates)
    sql = _streamed(LanceDBForms.sql, AsyncRowStream)
    changes = _streamed(LanceDBForms.changes, AsyncChanges)
    changes_position = _reading(LanceDBForms.changes_position)
    create_index = _writing(LanceDBForms.create_index)
    drop_index = _writing(LanceDBForms.drop_index)
    list_indexes = _reading(LanceDBForms.list_indexes)
    list_versions = _reading(LanceDBForms.list_versions)
    list_tags = _reading(LanceDBForms.list_tags)
    create_tag = _writing(LanceDBForms.create_tag)
    drop_tag = _writing(LanceDBForms.drop_tag)
    flush = _writing(LanceDBForms.flush)
    commit = _writing(LanceDBForms.commit)
    status = _reading(LanceDBForms.status)
    add = _writing(LanceDBForms.add)
    head = _reading(LanceDBForms.head)
    to_arrow = _reading(LanceDBForms.to_arrow)
    to_pandas = _reading(LanceDBForms.to_pandas)
    to_polars = _reading(LanceDBForms.to_polars)
    count_rows = _reading(LanceDBForms.count_rows)
    create_fts_index = _writing(LanceDBForms.create_fts_index)
    create_scalar_index = _writing(LanceDBForms.create_scalar_index)
    list_indices = _reading(LanceDBForms.list_indices)
    optimize = _writing(LanceDBForms.optimize)

    @property
    def schema(self) -> pa.Schema:
        """Base schema."""
        return self._table.schema

    @property
    def key(self) -> tuple[str, ...]:
        """Key columns; () for a table without a key."""
        return self._table.key

    async def checkout(self, version: int | str | datetime.datetime) -> None:
        """Let all reads of this object show one version of the base table; see `Table.checkout`."""
        self._table = await self._call(lambda table: checked_out(table, version))

    async def checkout_latest(self) -> None:
        """Let reads show the newest rows again."""
        self._table = newest(self._table)

    async def close(self) -> None:
        """Close the connections; the daemons keep running. Pending calls end with an error."""
        if self._closed:
            return
        self._closed = True
        for threads in (self._reads, self._writes):
            threads.close()
        for caller in list(self._callers):
            caller.leave()
        closing = CallThreads("async-close", 1)
        await answer_of(closing.submit(self._table.close), Caller())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __getattr__(self, name: str) -> Any:
        raise no_attribute("an asynchronous table", type(self), name, ELSEWHERE)

    def __repr__(self) -> str:
        return repr(self._table).replace(type(self._table).__name__, type(self).__name__, 1)

    # ---- inside --------------------------------------------------------------------------------------------------

    async def _call(self, call: Callable[[LanceDBForms], T], *, writes: bool = False) -> T:
        return await self._made(lambda: call(self._table), self._writes if writes else self._reads, Caller())

    async def _read(self, call: Callable[[], T], caller: Caller | None = None, /) -> T:
        return await self._made(call, self._reads, caller or Caller())

    async def _made(self, call: Callable[[], T], threads: CallThreads, caller: Caller) -> T:
        if self._closed:
            raise Invalid(_CLOSED)
        if os.getpid() != self._process:
            raise Invalid("the table was connected in another process, and a fork copies no threads; connect here")
        self._callers.add(caller)
        try:
            return await answer_of(threads.submit(carried(partial(caller.run, call))), caller)
        except CancelledError:
            raise Invalid(_CLOSED) from None
        finally:
            self._callers.discard(caller)


async def answer_of(job: Future[T], caller: Caller) -> T:
    """Return the result of `job`, which runs in a thread, or raise its error.

    If this coroutine is cancelled, `caller` leaves, a call that has not begun is cancelled, and a result that still
    arrives is closed. Works in any event loop.
    Raises: asyncio.CancelledError; concurrent.futures.CancelledError if the threads were closed.
    """
    loop = asyncio.get_running_loop()
    settled = loop.create_future()

    def wake() -> None:
        if not settled.done():
            settled.set_result(None)

    def tell(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop was closed: no task waits
            loop.call_soon_threadsafe(wake)

    job.add_done_callback(tell)
    try:
        await settled
    except BaseException:  # cancelled, or closed with its event loop
        caller.leave()
        if not job.cancel():
            job.add_done_callback(_dropped)
        raise
    return job.result()


def _dropped(job: Future[Any]) -> None:
    """Close an unused result: a stream holds a snapshot, a table holds connections."""
    if not job.cancelled() and job.exception() is None:
        close = getattr(job.result(), "close", None)
        if close is not None:
            close()


@translate_errors
async def connect_async(
    location: str | os.PathLike[str] | Sequence[str],
    *,
    table: str | None = None,
    create: bool = False,
    token: str | None = None,
    tls_ca: str | Path | bytes | None = None,
    fallback: str = "error",
    storage_options: Mapping[str, str] | None = None,
    in_flight_max: int = IN_FLIGHT_MAX,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    sql_memory_max: int = SQL_MEMORY,
) -> AsyncTable:
    """Connect as `connect` does, for asynchronous programs: await the table's methods; `async with` closes it.

    `table.scan` and `table.changes` return streams for `async for`. A cancelled call returns at once. A cancelled put
    may be applied: repeat it with its token. Raises: errors of `connect`.
    """
    shown: dict[str, Any] = {
        "table": table,
        "create": create,
        "token": token,
        "tls_ca": tls_ca,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
    }
    shown |= {"fallback": fallback, "storage_options": storage_options, "in_flight_max": in_flight_max}
    shown["sql_memory_max"] = sql_memory_max
    threads, caller = CallThreads("async-connect", 1), Caller()
    job = threads.submit(partial(caller.run, partial(connect, location, **shown)))
    try:
        return AsyncTable((await answer_of(job, caller))._engine)  # noqa: SLF001
    finally:
        threads.close()
