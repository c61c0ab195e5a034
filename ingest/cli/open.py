"""Open the table of a command: through its owner, or from storage."""

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

Readable = StoredTable | RemoteTable


def open_base(settings: Settings, environ: Mapping[str, str]) -> tuple[flush.BaseTable, wal.ObjectStore]:
    """Return the base table and the store of its files. Raises: Invalid if the table does not exist."""
    uri, options = settings.table.uri, settings.storage_options(environ)
    base = flush.BaseTable.find(uri, options)
    if base is None:
        raise Invalid(f"{uri}: the table does not exist; `memwal init` or `memwal run` creates it")
    return base, wal.open_store(uri, options)


def open_for_reading(settings: Settings, environ: Mapping[str, str]) -> Readable:
    """Return a client of the daemons that own the table's regions; if a region has no owner, the table on storage.

    Raises: Invalid if the table does not exist, or if an owner rejects the token.
    """
    base, store = open_base(settings, environ)
    configured = expanded(settings.daemon.endpoints, settings.daemon.workers)
    access = Access.of(settings)
    return served_table(base, store, lambda: access.options(environ), configured) or StoredTable(base, store)
