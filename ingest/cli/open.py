"""Open the table of a command: through its owner, or from storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from memwal import flush, wal
from memwal.ingest.cli.command import Call
from memwal.ingest.engine.loads.files import InputFile
from memwal.ingest.engine.loads.formats import columns_of
from memwal.ingest.engine.table.create import find_or_create
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.open import open_table
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import Invalid
from memwal.ingest.service.client.connect import served_table
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.open import asking
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.settings.endpoints import expanded
from memwal.ingest.settings.fleet import table_names
from memwal.ingest.suggest import near

Readable = StoredTable | RemoteTable


def open_base(call: Call, create_for: InputFile | None = None) -> tuple[flush.BaseTable, wal.ObjectStore]:
    """Return the base table and the store of its files.

    `create_for`: create a table that does not exist, for this file: with its columns, if the configuration names none.
    Raises: Invalid if the table does not exist and no file is given, or key or columns are unknown.
    """
    uri, options = call.uri, call.storage_options
    base = flush.BaseTable.find(uri, options)
    if base is None and create_for is not None:
        columns = None if call.settings.table.columns else columns_of(create_for)
        base, _ = find_or_create(call.settings, call.environ, columns)
        call.console.note(f"created {uri}")
    if base is None:
        others = table_names(call.fleet, call.environ) if call.fleet and call.fleet.fleet.prefix else ()
        hint = near(call.settings.name or "", others) or ";"
        raise Invalid(f"{uri}: the table does not exist{hint} `memwal init`, `memwal load` or `memwal run` creates it")
    return base, wal.open_store(uri, options)


def open_for_reading(call: Call, found: tuple[flush.BaseTable, wal.ObjectStore] | None = None) -> Readable:
    """Return a client of the daemons that own the table's regions; if a region has no owner, the table on storage.

    `found`: the result of `open_base`, if the caller has it.
    Raises: Invalid if the table does not exist, or if an owner rejects the token.
    """
    (base, store), daemon = found or open_base(call), call.settings.daemon
    configured, access = expanded(daemon.endpoints, daemon.workers), Access.of(call.settings)
    memory, name = call.settings.sql.memory_max, call.settings.name
    options = lambda: {**access.options(call.environ), "sql_memory": memory}  # noqa: E731
    served = served_table(base, store, options, configured, name=name)
    return served or StoredTable(base, store, sql_memory=memory)


@contextmanager
def writable(call: Call, table: Readable, *, upkeep: bool = False) -> Iterator[Table | RemoteTable]:
    """Yield the client `table`; if no daemon answers, claim the regions for this command and yield the table.

    `upkeep`: let the claimed table commit and collect garbage as configured, and not only on request.
    Raises: errors of `open_table`; Unavailable if another process serves the table.
    """
    if isinstance(table, RemoteTable):
        with table:
            yield table
        return
    asking_others = asking(call.settings, call.environ)
    manual = {name: getattr(call.settings, name).model_copy(update={"interval": 0.0}) for name in ("commit", "gc")}
    settings = call.settings.model_copy(update={} if upkeep else manual)
    with closing(open_table(settings, call.environ, ask=asking_others, on_replay=call.console.on_replay)) as claimed:
        yield claimed
