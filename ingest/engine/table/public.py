"""Define the table that `memwal.open` and `memwal.connect` return: the public methods, and nothing else.

The tables behind it have more methods, which the daemon, the sink and the commands call.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from memwal.ingest import tracing
from memwal.ingest.engine.api.lancedb_forms import ELSEWHERE, LanceDBForms
from memwal.ingest.engine.api.reads import Reads
from memwal.ingest.engine.api.versions import TableVersion, Tags, checked_out, newest
from memwal.ingest.errors import Invalid, translate_errors
from memwal.ingest.suggest import no_attribute


def method_of(engine: Any, name: str) -> Callable[..., Any]:
    """Return a method of the table behind, in a span while tracing is on."""
    method: Callable[..., Any] = getattr(engine, name)
    return tracing.traced(name, method) if tracing.on and name != "close" else method


class _OfEngine:
    """A descriptor that returns the method of the table behind; the lookup costs 0.1 us, the call nothing."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method, self._name = method, method.__name__

    def __get__(self, table: Table | None, owner: Any) -> Callable[..., Any]:
        return self._method if table is None else method_of(table._engine, self._name)  # noqa: SLF001


class Table(LanceDBForms):
    """A table: rows in and rows out, in this process, through daemons, or read from storage.

    Any Arrow library accepts it as a stream of all rows (`__arrow_c_stream__`): DuckDB, Polars, DataFusion, pyarrow.
    `len(table)` counts the rows.
    Thread safety. Every method from any thread.
    Durability. `put` and `delete` return once every row is on storage (`durable=True`) or visible (`durable=False`).
    Errors. Every method raises only `ingest.errors` kinds.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: LanceDBForms) -> None:
        """Use `memwal.open` or `memwal.connect`."""
        self._engine = engine

    @property
    def schema(self) -> pa.Schema:
        """Base schema, as last seen."""
        return self._engine.schema

    @property
    def key(self) -> tuple[str, ...]:  # type: ignore[override]  # the engine sets it
        """Key columns; () for a table without a key."""
        return self._engine.key

    def __getattr__(self, name: str) -> Any:
        raise no_attribute("a table", type(self), name, ELSEWHERE)

    @property
    def tags(self) -> Tags:
        """The names of versions: `list()`, `create(tag, version)`, `update`, `delete`, `get_version(tag)`."""
        return Tags(self._engine)

    @property
    def version(self) -> int:
        """The version of the base table that reads show: the one checked out, or the newest."""
        engine = self._engine
        return engine.version if isinstance(engine, TableVersion) else int(engine.list_versions()[-1]["version"])

    @translate_errors
    def checkout(self, version: int | str | datetime.datetime) -> None:
        """Let all reads of this object show one version of the base table, until `checkout_latest`.

        Writes are rejected meanwhile.

        `version`: a number of `list_versions`, a tag, or a time: the newest version of that time, in UTC unless it has
        a zone. Raises: Invalid if it is not kept.
        """
        self._engine = checked_out(self._engine, version)

    def checkout_latest(self) -> None:
        """Let reads show the newest rows again."""
        self._engine = newest(self._engine)

    @translate_errors
    def restore(self, version: int | str | datetime.datetime | None = None) -> int:
        """Make the rows of a version (None: the one checked out) the newest; return how many rows change.

        Rows that differ are put, and rows that the version lacks are deleted, so that readers of `changes` see them.
        Rows written during the call may be replaced. Takes time in proportion to the table. Raises: as `put`; Invalid
        for a table without a key, and for a version with other columns.
        """
        shown = self._engine if version is None else checked_out(self._engine, version)
        if not isinstance(shown, TableVersion):
            raise Invalid("restore: name a version, or check one out first")
        self.checkout_latest()
        return shown.restored()

    @property
    def _described(self) -> str:
        return self._engine._described  # noqa: SLF001

    @property
    def _shows(self) -> str:
        return self._engine._shows  # noqa: SLF001

    def _answer(self, read: str, level: str, /, **request: Any) -> Any:
        return self._engine._answer(read, level, **request)  # noqa: SLF001


def operations() -> Mapping[str, Callable[..., Any]]:
    """Return the public methods by name: writes and steps, then reads, then LanceDB's names."""
    *forms, steps, reads = (kind for kind in LanceDBForms.__mro__ if issubclass(kind, Reads))
    return {
        name: getattr(LanceDBForms, name)
        for kind in (steps, reads, *forms)
        for name, each in vars(kind).items()
        if callable(each) and not name.startswith("_")
    }


for _name, _method in operations().items():
    setattr(Table, _name, _OfEngine(_method))
