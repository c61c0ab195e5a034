"""`memwal.connect`: a client of a table's daemons, by their addresses or by the table's owner notes.

For the address of a table, the owner notes on storage name daemons. Since notes may be stale, the client asks these
daemons for their regions. If they do not own all regions with claims at least as new as the notes, no daemon serves
the table, and `fallback` decides. The command line finds daemons the same way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from memwal import flush, wal
from memwal.ingest import tracing
from memwal.ingest.engine.api.arguments import brief, whole, yes_or_no
from memwal.ingest.engine.api.reads import SQL_MEMORY
from memwal.ingest.engine.table import owner_notes as owners
from memwal.ingest.engine.table.live_owners import noted_owners
from memwal.ingest.engine.table.public import Table
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import PROTOCOL, UNAUTHENTICATED, Invalid, MemWalError, Unavailable, translate_errors
from memwal.ingest.service.client.remote import IN_FLIGHT_MAX, RemoteTable
from memwal.ingest.service.client.router import endpoints_of
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.service.rpc.tls import ClientTls, authority, client_certificate

OWNER_PATIENCE = 2.0
"""Seconds for a daemon to describe its table; a serving daemon answers in milliseconds."""
CREATED_WITHIN = 60.0
"""Seconds for a daemon to create a table."""
FALLBACKS = ("error", "durable")
_ON_STORAGE = re.compile(r"file://|s3://|memory://|s3a://|gs://|az://")
_HOST_AND_PORT = re.compile(r"[\w.\-\[\]:]+:\d+(,.*)?")


@translate_errors
def connect(
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
) -> Table:
    """Connect to the daemons of a table.

    `location`: grpc://host:port or grpc+tls://host:port; or several, as a list or separated by commas. Some of them
    may be down, because the daemons name each other. Or the path or URL of the table: the owner notes on storage name
    its daemons (`storage_options`: Lance's own, for that storage), now and whenever a region has no owner. `table`: its
    name, if the daemons serve several tables (`memwal.tables` lists them). `create`: create it from the template of the
    daemons, unless it exists. `token`:
    sent as a bearer token. `tls_ca`: a PEM file, or its bytes. `in_flight_max`: maximum bytes of rows in flight; a
    put without room waits. `fallback`: for the address of a table without daemons: "error" raises, "durable" reads
    storage. `tls_cert`, `tls_key`: PEM files of the client's certificate and of its private key. `sql_memory_max`:
    `sql.memory_max` of this client, in bytes.
    Raises: Invalid for a wrong location or certificate, Unavailable if no daemon answers.
    """
    location = str(location) if isinstance(location, os.PathLike) else location
    if not isinstance(location, str | Sequence):
        raise Invalid(f"location = {brief(location)}: write grpc://host:port, or the address of the table")
    if str(fallback) not in FALLBACKS:
        raise Invalid(f"fallback = {brief(fallback)}; write one of {', '.join(map(repr, FALLBACKS))}")
    tracing.join()
    tls = tls_of(tls_ca, tls_cert, tls_key)
    memory = whole("sql_memory_max", sql_memory_max, 1 << 20, 1 << 50)
    shown: dict[str, Any] = {"token": token, "tls": tls, "in_flight_max": in_flight_max, "sql_memory": memory}
    if not is_table(location):
        if fallback != "error":
            raise Invalid("fallback needs the address of the table, not of a daemon")
        if table is not None or create:
            _find_or_create(location, table, create, token, tls)
        return Table(RemoteTable(location, name=table, **shown))
    if table is not None or create:
        raise Invalid(f"table and create are for the address of daemons; {location} is the address of one table")
    options = dict(storage_options or {})
    try:
        base, store = flush.BaseTable.open(str(location), options), wal.open_store(str(location), options)
    except flush.NotALanceTable as error:
        raise Invalid(f"{error}; write grpc://host:port for a daemon") from None

    def find() -> Iterable[str]:
        notes = owners.find(store, base.regions)
        return () if notes is None else notes.endpoints

    served = served_table(base, store, lambda: shown, find=find)
    if served is None and fallback == "error":
        raise Unavailable(nobody_serves(base, store))
    return Table(StoredTable(base, store, sql_memory=memory) if served is None else served)


def _find_or_create(
    location: str | Sequence[str], name: str | None, create: bool, token: str | None, tls: ClientTls
) -> None:
    """Check the name of a table; with `create`, create it at the first daemon that answers, unless it exists.

    Raises: Invalid; Unavailable if no daemon answers.
    """
    if not isinstance(name, str):
        raise Invalid(f"table = {brief(name)}: write the name of a table, such as 'orders'")
    if not yes_or_no("create", create):
        return
    *others, last = endpoints_of(location)
    for endpoint in (*others, last):
        with closing(Connection(endpoint, token=token, tls=tls, name=name)) as connection:
            try:
                connection.act("create", None, CREATED_WITHIN)
                return
            except Unavailable:
                if endpoint == last:
                    raise


def tls_of(ca: str | Path | bytes | None, certificate: str | Path | None, key: str | Path | None) -> ClientTls:
    """Return the TLS options of a client; arguments as those of `connect`. Raises: Invalid."""
    trusted = None if ca is None else authority(ca)
    if certificate is None and key is None:
        return ClientTls(trusted)
    if certificate is None or key is None:
        raise Invalid("tls_cert and tls_key: give both the certificate and its private key")
    return ClientTls(trusted, *client_certificate(certificate, key))


def is_table(location: str | Sequence[str]) -> bool:
    """Return whether `location` is the address of a table rather than of daemons."""
    if not isinstance(location, str):
        return False
    if "://" in location:
        return _ON_STORAGE.match(location) is not None
    return bool(location.strip()) and not _HOST_AND_PORT.fullmatch(location)


def served_table(
    base: flush.BaseTable,
    store: wal.ObjectStore,
    access: Callable[[], Mapping[str, Any]],
    also: Sequence[str] = (),
    find: Callable[[], Iterable[str]] | None = None,
    name: str | None = None,
) -> RemoteTable | None:
    """Return a client of the daemons that own every region of `base`; None if no daemons do.

    `access`: returns the credentials for `RemoteTable`; called only if notes name daemons. `also`: further daemons to
    ask. `find`: see `Router`. `name`: of the table in a fleet, if known.
    Raises: Invalid if a daemon rejects the token or cannot be trusted, since it may serve newer rows than storage
    has.
    """
    notes = owners.find(store, base.regions, also)
    if notes is None:
        return None
    shown, table, name = access(), store.url(""), name or notes.name
    try:
        owner = RemoteTable(notes.endpoints, patience=OWNER_PATIENCE, table=table, find=find, name=name, **shown)
        if name is not None or notes.are_of(owner.identity, table):  # a fleet claims regions when calls need them
            return owner
        owner.close()
    except MemWalError as error:  # stale notes: no daemon answers there
        reason = error.details.get("reason")
        if reason == UNAUTHENTICATED or (reason == PROTOCOL and error.details.get("table", table) == table):
            raise
        if error.details.get("untrusted"):
            raise Invalid(str(error)) from error  # the daemon is alive and must not count as ended
    return None


def nobody_serves(base: flush.BaseTable, store: wal.ObjectStore) -> str:
    """Return the error message for a table without daemons."""
    last = "; ".join(f"its notes say {owner}" for owner in noted_owners(owners.read(store, base.regions)))
    return (
        f"no daemon serves {base.uri}{f' ({last})' if last else ''}: start `memwal serve`, or read storage with "
        'fallback="durable"'
    )
