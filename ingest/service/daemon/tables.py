"""The tables of a daemon, as its calls see them: one table without a name, or a fleet (`daemon.fleet`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import Invalid
from memwal.ingest.refusals import wrong_table


class Tables(Protocol):
    """The tables that a daemon serves.

    Thread safety. Any thread.
    """

    def using(
        self, name: str | None, id: str | None, covers: Callable[[str], bool] = bool
    ) -> AbstractContextManager[Table]:
        """Return the context of a call to the table that the caller names, which stays open meanwhile.

        `name`: None if the caller gives none. `id`: of the table that the caller expects; None for any. `covers`:
        returns whether an error may show the name of a table.
        Raises: Invalid for a name that is missing or unknown; Unavailable for another `id`; errors of opening it.
        """
        ...

    def open(self) -> Mapping[str, Table]:
        """Return the open tables by name; a table without a name is ""."""
        ...

    def create(self, name: str) -> None:
        """Create a table, unless it exists. Raises: Invalid if it cannot be created; errors of creating it."""
        ...

    def listed(self, *, fresh: bool = True) -> list[dict[str, Any]]:
        """Return the answer to "tables"; see `memwal.tables`. `fresh`: list a prefix before. Raises: its errors."""
        ...

    def known(self, name: str) -> dict[str, Any]:
        """Return the entry of a table in `listed`. Raises: Invalid for an unknown name, or without names."""
        ...


class OneTable:
    """The only table of a daemon."""

    def __init__(self, table: Table, name: str | None = None) -> None:
        """`name`: of the table in its configuration; callers may leave it out."""
        self.table, self._name = table, name

    @contextmanager
    def using(self, name: str | None, id: str | None, covers: Callable[[str], bool] = bool) -> Iterator[Table]:
        """See `Tables.using`."""
        del covers  # an error has no other name
        table = self.table
        if name not in (None, self._name):
            raise Invalid(self._another(str(name)))
        if id not in (None, table.id):
            raise wrong_table(table.base.uri)
        yield table

    def _another(self, name: str) -> str:
        identity = "has no name" if self._name is None else f"is called {self._name!r}"
        return f"this daemon serves one table, {self.table.base.uri}, which {identity}; leave out table={name!r:.60}"

    def open(self) -> Mapping[str, Table]:
        """See `Tables.open`."""
        return {"": self.table}

    def create(self, name: str) -> None:
        """See `Tables.create`."""
        raise Invalid(
            f"this daemon serves one table, {self.table.base.uri}; it creates no others, such as {name!r:.60}"
        )

    def known(self, name: str) -> dict[str, Any]:
        """See `Tables.known`."""
        raise Invalid(self._another(name))

    def listed(self, *, fresh: bool = True) -> list[dict[str, Any]]:
        """See `Tables.listed`."""
        del fresh
        return [described(self._name, self.table.base.uri, self.table)]


def described(name: str | None, address: str, table: Table | None, problem: str | None = None) -> dict[str, Any]:
    """Return what one daemon knows of a table. `table`: None if it is not open here. `problem`: why it cannot be."""
    if table is None:
        state = "idle" if problem is None else "broken"
        return {"name": name, "address": address, "rows": None, "regions": {}, "state": state, "error": problem}
    failed = [str(writer.failure) for writer in table.regions.writers if writer.failure is not None]
    return {
        "name": name,
        "address": address,
        "rows": table.upkeep.rows,
        "regions": table.regions.epochs,
        "count": len(table.regions.order),
        "state": "broken" if failed else "serving",
        "error": failed[0] if failed else None,
    }
