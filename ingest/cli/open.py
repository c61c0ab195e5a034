"""Open the table of a command: through its owner, or from storage."""

from __future__ import annotations

from collections.abc import Mapping

from memwal import flush, wal
from memwal.ingest.engine.region.context import OnReplay
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.open import open_table
from memwal.ingest.engine.table.stored import StoredTable
from memwal.ingest.errors import Invalid
from memwal.ingest.service.client.connect import served_table
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.open import asking
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.settings.endpoints import expanded
from memwal.ingest.settings.load import Settings

Readable = StoredTable | RemoteTable


def open_base(settings: Settings, environ: Mapping[str, str]) -> tuple[flush.BaseTable, wal.ObjectStore]:
    """Return the base table and the store of its files. Raises: Invalid if the table does not exist."""
    uri, options = settings.table.uri, settings.storage_options(environ)
    base = flush.BaseTable.find(uri, options)
    if base is None:
        raise Invalid(f"{uri}: the table does not exist; `memwal init` or `memwal run` creates it")
    return base, wal.open_store(uri, options)


def open_here(settings: Settings, environ: Mapping[str, str], on_replay: OnReplay | None) -> Table:
    """Claim the regions of the table for this command, without automatic commits and collections.

    Raises: errors of `open_table`; Unavailable if another process serves the table.
    """
    quiet = {name: getattr(settings, name).model_copy(update={"interval": 0.0}) for name in ("commit", "gc")}
    return open_table(settings.model_copy(update=quiet), environ, ask=asking(settings, environ), on_replay=on_replay)


def open_for_reading(settings: Settings, environ: Mapping[str, str]) -> Readable:
    """Return a client of the daemons that own the table's regions; if a region has no owner, the table on storage.

    Raises: Invalid if the table does not exist, or if an owner rejects the token.
    """
    base, store = open_base(settings, environ)
    configured = expanded(settings.daemon.endpoints, settings.daemon.workers)
    access = Access.of(settings)
    return served_table(base, store, lambda: access.options(environ), configured) or StoredTable(base, store)
