"""The tables that daemons serve: `memwal.tables`, merged from the answers of all daemons, and all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from memwal.flush import CommitReport
from memwal.ingest.engine.api.tokens import Applied
from memwal.ingest.errors import MemWalError, translate_errors
from memwal.ingest.service.client.connect import tls_of
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.client.router import AT_ONCE, endpoints_of
from memwal.ingest.service.rpc.connection import Connection

TIMEOUT = 10.0
"""Seconds for a daemon's answer, which may list a prefix on storage."""
T = TypeVar("T")

_TABLES_AT_ONCE = 8
"""Tables that are flushed or committed at a time."""
_STATES = ("serving", "broken", "idle")
"""If daemons report different states of a table, the first of these counts."""


@translate_errors
def tables(
    location: str | Sequence[str],
    *,
    token: str | None = None,
    tls_ca: str | Path | bytes | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Return the tables that the daemons at `location` serve, by name. Arguments as for `memwal.connect`.

    Each table is `{"name", "address", "state", "rows", "regions", "owners", "error"}`. `name`: None if the daemons
    serve one table without a name. `state`: "serving" while a daemon has one of its regions, "idle", or "broken" with
    the reason in `error`. `rows`: of the base table, as last read; None if no daemon has the table open. `regions`:
    their number; None as well. `owners`: the endpoint of each region that has an owner, by region id.
    Raises: Unavailable if no daemon answers; Invalid if one rejects the credentials.
    """
    endpoints = endpoints_of(location)
    asked = partial(_asked, token=token, tls=tls_of(tls_ca, tls_cert, tls_key))
    with ThreadPoolExecutor(AT_ONCE, "tables") as pool:
        answers = dict(zip(endpoints, pool.map(asked, endpoints), strict=True))
        heard = [answer for answer in answers.values() if not isinstance(answer, MemWalError)]
        others = {other for answer in heard for other in answer["endpoints"]} - {each["endpoint"] for each in heard}
        rest = sorted(others - set(answers))
        heard += [answer for answer in pool.map(asked, rest) if not isinstance(answer, MemWalError)]
    if not heard:
        raise next(answer for answer in answers.values() if isinstance(answer, MemWalError))
    return merged(heard)


def merged(answers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the answers of daemons to "tables"."""
    found: dict[str | None, dict[str, Any]] = {}
    epochs: dict[tuple[str | None, str], int] = {}
    for answer in answers:
        for told in answer["tables"]:
            name = told["name"]
            fresh = {**{field: told[field] for field in ("name", "address", "state")}, "rows": None, "regions": None}
            table = found.setdefault(name, {**fresh, "owners": {}, "error": None})
            owners = table["owners"]
            table["state"] = min(table["state"], told["state"], key=_STATES.index)
            table["error"] = table["error"] or told["error"]
            if told["rows"] is not None:
                table |= {"rows": max(told["rows"], table["rows"] or 0), "regions": told["count"]}
            for region, epoch in told["regions"].items():
                if epoch > epochs.get((name, region), 0):
                    epochs[name, region], owners[region] = epoch, answer["endpoint"]
    return [found[name] for name in sorted(found, key=str)]


class RemoteFleet:
    """The daemons of a fleet, for a program that writes many of its tables.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds.
    """

    def __init__(self, endpoint: str, prefix: str, **access: Any) -> None:
        """`prefix`: the name of the fleet. `access`: of a `RemoteTable`. Raises: Unavailable if no daemon answers."""
        self.endpoint, self._prefix, self._access = endpoint, prefix, access
        self.written = set[str]()
        """Names of the tables that `flush` and `commit` include, besides those that are open in a daemon."""
        self.status()

    def status(self) -> dict[str, Any]:
        """Return the names of the tables that are in use, in the form of `RemoteTable.status`."""
        access = {name: self._access.get(name) for name in ("token", "tls")}
        answers = [_asked(each, "regions", **access) for each in endpoints_of(self.endpoint)]
        heard = [answer for answer in answers if not isinstance(answer, MemWalError)]
        if not heard:
            raise next(answer for answer in answers if isinstance(answer, MemWalError))
        tables = self.written.union(*(answer.get("tables", ()) for answer in heard))
        return {"table": self._prefix, "tables": sorted(tables), "base_version": "-", "rows": 0, "regions": []}

    def applied(self, producer: str) -> Applied:
        """Return which micro-batches the tables in use have applied. Tables that no daemon has open are not asked."""
        return Applied.together(self._each(lambda table: table.applied(producer)))

    def flush(self) -> None:
        """Flush every table in use. Raises: errors of `RemoteTable.flush`."""
        self._each(RemoteTable.flush)

    def commit(self) -> CommitReport:
        """Commit every table in use; return the sums. Raises: errors of `RemoteTable.commit`."""
        reports = self._each(RemoteTable.commit)
        names = ("rows_inserted", "rows_updated", "rows_deleted", "ssts", "seconds")
        return CommitReport(0, {}, **{name: sum(getattr(each, name) for each in reports) for name in names})

    def _each(self, act: Callable[[RemoteTable], T]) -> list[T]:
        def acted(name: str) -> T:
            with closing(RemoteTable(self.endpoint, name=name, **self._access)) as table:
                return act(table)

        with ThreadPoolExecutor(_TABLES_AT_ONCE, "fleet") as pool:
            return list(pool.map(acted, self.status()["tables"]))


def _asked(endpoint: str, op: str = "tables", **access: Any) -> Mapping[str, Any] | MemWalError:
    try:
        with closing(Connection(endpoint, **access)) as connection:
            told: Mapping[str, Any] = connection.act(op, None, TIMEOUT)
            return told
    except MemWalError as error:
        return error
