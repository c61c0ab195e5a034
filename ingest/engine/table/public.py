"""Define the table that `memwal.open` and `memwal.connect` return: the public methods, and nothing else.

The tables behind it have more methods, which the daemon, the sink and the commands call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

import pyarrow as pa

from memwal.ingest import tracing
from memwal.ingest.engine.api.reads import Reads
from memwal.ingest.engine.table import embedded

P = ParamSpec("P")
R = TypeVar("R")


class Engine(Protocol):
    """A table with all its parts: embedded, read from storage, or behind daemons."""

    schema: pa.Schema
    key: tuple[str, ...]

    def close(self) -> None:
        """See `Table.close`."""
        ...

    def count(self) -> int:
        """See `Table.count`."""
        ...

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


def method_of(engine: Any, name: str) -> Callable[..., Any]:
    """Return a method of the table behind, in a span while tracing is on."""
    method: Callable[..., Any] = getattr(engine, name)
    return tracing.traced(name, method) if tracing.on and name != "close" else method


class _Public(Generic[P, R]):
    """A descriptor that returns the method of the table behind; the lookup costs 0.1 us, the call nothing."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._method, self._name = method, method.__name__

    @overload
    def __get__(self, table: None, owner: Any) -> Callable[Concatenate[Any, P], R]: ...

    @overload
    def __get__(self, table: Table, owner: Any) -> Callable[P, R]: ...

    def __get__(self, table: Table | None, owner: Any) -> Any:
        return self._method if table is None else method_of(table._engine, self._name)  # noqa: SLF001


class Table:
    """A table: rows in and rows out, in this process, through daemons, or read from storage.

    Any Arrow library accepts it as a stream of all rows (`__arrow_c_stream__`): DuckDB, Polars, DataFusion, pyarrow.
    `len(table)` counts the rows.
    Thread safety. Every method from any thread.
    Durability. `put` and `delete` return once every row is on storage (`durable=True`) or visible (`durable=False`).
    Errors. Every method raises only `ingest.errors` kinds.
    """

    __slots__ = ("__weakref__", "_engine")

    def __init__(self, engine: Any) -> None:
        """Use `memwal.open` or `memwal.connect`. `engine`: an `Engine` with every method below."""
        self._engine: Engine = engine

    put = _Public(embedded.Table.put)
    delete = _Public(embedded.Table.delete)
    get = _Public(Reads.get)
    scan = _Public(Reads.scan)
    count = _Public(Reads.count)
    search = _Public(Reads.search)
    match = _Public(Reads.match)
    hybrid = _Public(Reads.hybrid)
    candidates = _Public(Reads.candidates)
    sql = _Public(Reads.sql)
    changes = _Public(Reads.changes)
    changes_position = _Public(Reads.changes_position)
    create_index = _Public(embedded.Table.create_index)
    drop_index = _Public(embedded.Table.drop_index)
    list_indexes = _Public(embedded.Table.list_indexes)
    flush = _Public(embedded.Table.flush)
    commit = _Public(embedded.Table.commit)
    status = _Public(embedded.Table.status)
    close = _Public(embedded.Table.close)

    @property
    def schema(self) -> pa.Schema:
        """Base schema, as last seen."""
        return self._engine.schema

    @property
    def key(self) -> tuple[str, ...]:
        """Key columns; () for a table without a key."""
        return self._engine.key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.close()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Stream all rows to another Arrow library; a `scan` at level `latest`."""
        return self._engine.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return self._engine.count()

    def __bool__(self) -> bool:
        return True  # as `Reads`

    def __repr__(self) -> str:
        return repr(self._engine).replace(type(self._engine).__name__, type(self).__name__, 1)
