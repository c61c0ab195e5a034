"""`memwal.open`: open a table in this process.

It is beside `connect`, because it asks the daemons that the owner notes name whether they still serve the table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from memwal import flush
from memwal.ingest import tracing
from memwal.ingest.engine.api import arguments
from memwal.ingest.engine.api.rows import as_table, inferred
from memwal.ingest.engine.table.live_owners import Ask, Claimant
from memwal.ingest.engine.table.open import open_stored, open_table
from memwal.ingest.engine.table.public import Table
from memwal.ingest.errors import Invalid, MemWalError, translate_errors
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.settings.values import AUTO

ANSWER_WITHIN = 1.0
"""Seconds within which a daemon must answer what it owns; a live one answers in milliseconds."""


@translate_errors
def open_embedded(
    uri: str | os.PathLike[str],
    *,
    schema: pa.Schema | None = None,
    data: Any = None,
    key: str | Sequence[str] | None = None,
    regions: int | Literal["auto"] | None = None,
    indexes: Mapping[str, str | dict[str, Any]] | None = None,
    storage_options: Mapping[str, str] | None = None,
    settings: str | Path | Mapping[str, Any] | None = None,
    read_only: bool = False,
    take_over: bool = False,
) -> Table:
    """Open a table and claim its regions for this process; create it from `schema` and `key` if it does not exist.

    - `data`: rows to put, in any form that `put` accepts; without `schema`, a new table has their columns. A list of
      numbers that is as long in every row becomes a vector of float32.
    - `key`: its columns; () for a table without a key, which keeps every row (`append_only`).
    - `indexes`: column -> "ivf_pq" | "fts" | "btree", or a dict with "type" and parameters.
    - `storage_options`: Lance's own.
    - `settings`: a TOML path or a dict of its sections; arguments override them.
    - `take_over`: fence a live owner.
    - `read_only`: read an existing table from storage, whoever serves it; nothing is claimed or written, and `latest`
      means `durable`.

    Raises: Invalid for errors in the arguments, with all errors in the settings at once; Unavailable (reason "served")
    if another process serves the table, or another handle of this process has it open.
    """
    schema = arguments.arrow_schema(schema)
    rows = None if data is None else as_table(data, schema or pa.schema([]))
    if rows is not None and schema is None:
        rows = inferred(rows)
    read_only = arguments.yes_or_no("read_only", read_only)
    take_over = arguments.yes_or_no("take_over", take_over)
    overrides = _overrides(uri, key, regions, indexes, storage_options)
    if not isinstance(settings, str | Path | Mapping | None):
        raise Invalid(f"settings is a {type(settings).__name__}; write the path of a TOML file, or a dict of sections")
    loaded = load(settings, os.environ, overrides)
    _check_arguments(loaded, schema, regions, indexes is not None, read_only=read_only)
    if schema is None and rows is not None:
        schema = rows.schema.remove_metadata()
    tracing.join()
    tracing.begin("memwal", loaded.tracing)
    if not read_only:
        table = Table(
            open_table(loaded, os.environ, schema, ask=asking(loaded, os.environ), claimant=Claimant(take_over))
        )
        with ExitStack() as failed:
            failed.callback(table.close)
            if rows is not None:
                table.put(rows)
            failed.pop_all()
        return table
    if rows is not None:
        raise Invalid("read_only = True writes nothing, so it takes no data; remove one of the two")
    if take_over:
        raise Invalid("read_only = True claims nothing, so take_over = True has no effect; remove one of the two")
    return Table(open_stored(loaded, os.environ))


def _overrides(
    uri: str | os.PathLike[str],
    key: str | Sequence[str] | None,
    regions: int | Literal["auto"] | None,
    indexes: Mapping[str, str | dict[str, Any]] | None,
    storage_options: Mapping[str, str] | None,
) -> dict[str, dict[str, Any]]:
    """Return the arguments of `open_embedded` as settings. Raises: Invalid."""
    given: dict[str, Any] = {"uri": arguments.address(uri)}
    # Only the empty tuple: an empty list is probably a computed key that went wrong.
    if isinstance(key, tuple) and not key:
        given["append_only"] = True
    elif key is not None:
        given["key"] = arguments.key_columns(key)
    if indexes is not None:
        given["indexes"] = arguments.mapping("indexes", indexes, '{"embedding": "ivf_pq", "body": "fts"}')
    if storage_options is not None:
        given["storage_options"] = arguments.mapping("storage_options", storage_options, '{"region": "eu-west-1"}')
    return {"table": given} | ({} if regions is None else {"regions": {"count": regions}})


def _check_arguments(
    settings: Settings, schema: pa.Schema | None, regions: int | str | None, indexes: bool, *, read_only: bool
) -> None:
    """Raise Invalid for arguments that contradict an existing table, which would otherwise be ignored."""
    uri, options = settings.table.uri, settings.storage_options(os.environ)
    base = flush.BaseTable.open(uri, options) if read_only else flush.BaseTable.find(uri, options, to_write=True)
    if base is None:
        return
    if regions not in (None, AUTO, base.buckets):
        raise Invalid(f"regions = {regions}, but the table at {base.uri} has {base.buckets}; leave the argument out")
    kinds = {spec.column: spec.kind for spec in base.indexes}
    wanted = {spec.column: spec.kind for spec in settings.index_specs()} if indexes else {}
    for column, kind in wanted.items():
        if kinds.get(column) != kind:
            there = ", ".join(f"{column} ({kind})" for column, kind in kinds.items()) or "none"
            raise Invalid(
                f"indexes: the table at {base.uri} has no {kind} index on {column}, but {there}; use "
                f"create_index({column!r}, {kind!r}), or leave the argument out"
            )
    if schema is not None and [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in base.schema]:
        columns = ", ".join(f"{field.name} {field.type}" for field in base.schema)
        raise Invalid(f"schema: the table at {base.uri} has another one ({columns}); leave the argument out")


def asking(settings: Settings, environ: Mapping[str, str]) -> Ask:
    """Return the function that asks a daemon what it owns, with the credentials in `settings`."""
    access = Access.of(settings)

    def ask(endpoint: str) -> Mapping[str, Any] | MemWalError:
        shown = access.options(environ)  # outside the try: an error in this process's own files is not the daemon's
        try:
            with closing(Connection(endpoint, **shown)) as connection:
                told: Mapping[str, Any] = connection.act("regions", None, ANSWER_WITHIN)
                return told
        except MemWalError as error:
            return error

    return ask
