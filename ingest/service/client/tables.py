"""`memwal.tables`: the tables that daemons serve, merged from the answers of all daemons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from memwal.ingest.errors import MemWalError, translate_errors
from memwal.ingest.service.client.connect import tls_of
from memwal.ingest.service.client.router import AT_ONCE, endpoints_of
from memwal.ingest.service.rpc.connection import Connection

TIMEOUT = 10.0
"""Seconds for a daemon's answer, which may list a prefix on storage."""
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


def _asked(endpoint: str, **access: Any) -> Mapping[str, Any] | MemWalError:
    try:
        with closing(Connection(endpoint, **access)) as connection:
            told: Mapping[str, Any] = connection.act("tables", None, TIMEOUT)
            return told
    except MemWalError as error:
        return error
