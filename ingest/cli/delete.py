"""`memwal delete`: delete rows by key or by filter, or count them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from memwal.ingest.cli.open import open_for_reading, open_here
from memwal.ingest.cli.print import count
from memwal.ingest.cli.quiet import CommandConsole
from memwal.ingest.engine.api.keys import parse_key
from memwal.ingest.errors import Invalid
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.settings.load import Settings


def delete(
    settings: Settings,
    environ: Mapping[str, str],
    console: CommandConsole,
    keys: tuple[str, ...],
    filter: str | None,
    *,
    dry_run: bool,
) -> int:
    """Delete the rows of `keys`, each as typed, or those that pass `filter`; print their number, and return the exit
    code.

    Uses the daemons that own the regions; if none answers, claims the regions.
    Raises: Invalid unless exactly one of `keys` and `filter` is given, or for a malformed one.
    """
    if bool(keys) == (filter is not None):
        raise Invalid("give --key or --filter, and not both: which rows are to be deleted?")
    table = open_for_reading(settings, environ)
    if not table.key:
        raise Invalid("the table has no key (append_only), so no row can be deleted")
    typed = list(dict.fromkeys(tuple(parse_key(text, table.key)) for text in keys))
    what: list[Any] | None = ([list(key) for key in typed] if len(table.key) > 1 else [key[0] for key in typed]) or None
    if dry_run:
        found = table.count(filter) if what is None else table.get(what, list(table.key)).num_rows
    elif isinstance(table, RemoteTable):
        found = table.delete(what, filter=filter).rows
    else:
        with (
            closing(open_here(settings, environ, console.on_replay)) as owned,
            console.status("deleting"),
        ):
            found = owned.delete(what, filter=filter).rows
    missing = "" if what is None or found == len(what) else f"; {count(len(what) - found, 'key')} had no row"
    verb = "would delete" if dry_run else "deleted"
    console.out(f"{verb} {count(found, 'row')} of {settings.table.uri}{missing}", highlight=False)
    return 0
