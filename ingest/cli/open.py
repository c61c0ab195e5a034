"""Opening a table for a command that reads: at its owner, or from storage where no owner answers."""

from __future__ import annotations

from collections.abc import Mapping

from memwal import flush, wal
from memwal.ingest.client.connect import served_table
from memwal.ingest.client.remote import RemoteTable
from memwal.ingest.errors import Invalid
from memwal.ingest.rpc.credentials import Access
from memwal.ingest.settings.endpoints import expanded
from memwal.ingest.settings.load import Settings
from memwal.ingest.table.stored import StoredTable

NO_TABLE = "the table does not exist; `memwal init` or `memwal run` creates it"
Readable = StoredTable | RemoteTable


def open_for_reading(settings: Settings, environ: Mapping[str, str]) -> Readable:
    """A client of the daemons that own the table's regions, or the table as it is on storage where not all are owned.

    Raises: Invalid when there is no table, or an owner refuses the token.
    """
    options = settings.storage_options(environ)
    base = flush.BaseTable.find(settings.table.uri, options)
    if base is None:
        raise Invalid(f"{settings.table.uri}: {NO_TABLE}")
    store = wal.open_store(settings.table.uri, options)
    configured = expanded(settings.daemon.endpoints, settings.daemon.workers)
    access = Access.of(settings)
    return served_table(base, store, lambda: access.options(environ), configured) or StoredTable(base, store)
