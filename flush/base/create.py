"""Create a base table, or set up an existing Lance table for ingestion, once its definition is checked.

In steps, each safe to repeat after a crash:

 1. Create the dataset, empty, with key and set-up in its schema, in one version; a table without a set-up was therefore
    never begun by this module. Lance makes it in a temporary directory, so that a definition that it rejects leaves no
    files. Its manifest is then created at the table's path, as a slot of the log is (`wal.slot`): of two processes that
    create the table, Lance (14.0) lets one overwrite the other's version, and the table's id. An existing table gets
    key and set-up by metadata edits.
 2. Create the missing scalar and full-text indexes. A vector index needs rows; see flush.commits.index_catchup.
 3. Create Lance's MemWAL index last: if it exists, the set-up is complete.
 4. Fsync all files, on a local disk. *Crash or power cut before this step: no region was claimed.* Another process may
    find the table complete before it is synced. Every process therefore does this step itself before it writes, unless
    the newest version is known to be synced (`sync_newest`). This also puts columns and rows of another program's
    version on disk before a row relies on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lance
import pyarrow as pa

from memwal.flush.base.adoptable import expect_fit, expect_key
from memwal.flush.base.existing_indexes import all_existing_indexes
from memwal.flush.base.fsync import local_root, sync_new_table, synced_version
from memwal.flush.base.manifest import COMMITTED
from memwal.flush.base.open import Session, open_dataset
from memwal.flush.base.row_hash import is_hashed
from memwal.flush.base.setup import Setup, setup_metadata
from memwal.flush.base.shape import column_ids, field_id, first_ids
from memwal.flush.base.sharding import published_regions
from memwal.flush.base.state import versions
from memwal.flush.base.torn import TORN
from memwal.flush.base.ttl import check_ttl
from memwal.flush.errors import NotALanceTable, TableExists, UnsupportedTable
from memwal.memtable import IndexSpec, InvalidRows, MemTable, check_indexes, row_schema
from memwal.memtable.index_spec import nearest
from memwal.memtable.schema import PRIMARY_KEY, PRIMARY_KEY_POSITION, key_columns
from memwal.wal import ObjectStore, SystemClock, WalFormat, WalOptions, regions
from memwal.wal.errors import first_line
from memwal.wal.panics import panics_as_errors
from memwal.wal.slot import put_until_known

SCALAR_KINDS: Mapping[str, Any] = {"btree": "BTREE", "fts": "INVERTED"}
"""Lance's names for the index kinds that need no training."""
_LEFTOVERS = {"_mem_wal", "_transactions", "_versions"}
"""Directories that a creation that crashed in step 1 may leave; without a version or a region they are overwritten."""
RESTORING = "restore-unfinished.json"
"""Key of the marker of a restore that is running or was killed (flush.backup.restore)."""
_BEGUN = 0.5
"""Seconds to wait for a creation begun by another process."""


def create(store: ObjectStore, uri: str, schema: pa.Schema, key: Sequence[str], setup: Setup) -> None:
    """Create an empty table at `uri`, the root of `store`. Raises as `BaseTable.create`."""
    keyed = _keyed_schema(schema, key)
    check_definition(keyed, key, setup)
    keyed = keyed.with_metadata(setup_metadata(setup, first_ids(schema), key))
    if existing(store, uri) is not None:
        raise TableExists(f"{uri}: a Lance table exists here already; open it, or choose another uri")
    files = _first_version(uri, keyed, key, setup)
    _refuse_unfinished_restore(store, uri)  # one begun since the path was found vacant
    for name, data in files:
        if put_until_known(store, name, data, clock=SystemClock(), options=WalOptions()) is not None:
            raise TableExists(f"{uri}: another process created the table just now; open it")
    if (dataset := open_dataset(store, uri)) is not None:  # else it was deleted meanwhile
        complete(dataset, setup)


@panics_as_errors
def _first_version(uri: str, schema: pa.Schema, key: Sequence[str], setup: Setup) -> list[tuple[str, bytes]]:
    """Return names and bytes of the files of an empty table, the manifest last.

    Raises InvalidRows if Lance cannot make the table, or if it changes columns so that they do not fit.
    """
    with TemporaryDirectory(prefix="memwal-create-") as at:
        try:
            made = lance.write_dataset(schema.empty_table(), at, schema=schema)
            paths = [path for kind in ("_transactions/*", "_versions/*.manifest") for path in Path(at).glob(kind)]
            files = [(path.relative_to(at).as_posix(), path.read_bytes()) for path in paths]
            create_scalar_indexes(made, setup.indexes)
        except (OSError, ValueError, RuntimeError) as error:
            reason = first_line(error)
            text = f"{uri}: Lance cannot make such a table: {reason}; correct its columns or indexes"
            raise InvalidRows(text) from error
        check_definition(pa.schema(list(made.schema)), key, setup)
        return files


def adopt(uri: str, dataset: lance.LanceDataset, key: Sequence[str], setup: Setup, *, any_format: bool) -> None:
    """Run step 1 for an existing table that is not set up; `complete` does the other steps.

    If another program initialised the table's MemWAL, the table keeps its regions and the format of its log. That
    format must be the one of `setup`, unless `any_format`.
    Raises as `BaseTable.adopt`.
    """
    expect_fit(uri, dataset)
    key, schema = _key_of(uri, dataset, key, appends=setup.append_by is not None), dataset.schema
    setup = setup._replace(indexes=all_existing_indexes(uri, dataset, setup.indexes))
    details = dataset.mem_wal_index_details()
    if details is None:
        schema = _keyed_schema(schema, key)
    else:
        setup = _setup_beside(uri, dataset, details, key, setup, any_format=any_format)
    check_definition(schema, key, setup)
    if key:
        expect_key(uri, dataset, key)
    if details is None:
        _declare(dataset, key, setup)
    else:
        # Its schema declares the key already and stays unchanged.
        dataset.update_config(dict(setup_metadata(setup, column_ids(dataset), key)))


def existing(store: ObjectStore, uri: str, session: Session | None = None) -> lance.LanceDataset | None:
    """Return the Lance table at `uri`, the root of `store`, opened with `session`; None if a table may be created.

    Another process may be creating the table now, as daemons that start together do. Milliseconds pass between its
    first file and its first version, so opening an unfinished table is retried for up to _BEGUN seconds.
    Raises NotALanceTable if the path holds something else.
    """
    clock = SystemClock()
    until = clock.monotonic() + _BEGUN
    while True:
        last = clock.monotonic() > until  # read the clock before opening, which may take long
        if (dataset := open_dataset(store, uri, session=session)) is not None:
            return dataset
        if is_vacant(store, unfinished=last):
            return None
        if "_versions" not in store.children("") or last:
            _refuse_unfinished_restore(store, uri)
            raise NotALanceTable.at(uri)
        clock.sleep(0.02)


def _refuse_unfinished_restore(store: ObjectStore, uri: str) -> None:
    if store.exists(RESTORING):
        raise NotALanceTable(f"{uri}: a restore is not finished here; run `memwal restore` with --resume")


def is_vacant(store: ObjectStore, *, unfinished: bool = False) -> bool:
    """Return whether the table's path holds no version, region or foreign file, so that a table may be created.

    `unfinished`: also accept the files of an interrupted creation that do not form a version yet.
    """
    if set(store.children("")) - _LEFTOVERS or regions(store) or versions(store):
        return False
    top = {key.partition("/")[0] for key in store.list("") if not key.endswith(f".manifest{TORN}")}
    return not top - _LEFTOVERS and (unfinished or "_versions" not in top)


def complete(dataset: lance.LanceDataset, setup: Setup) -> None:
    """Run those of steps 2 to 4 that are not done.

    Other processes may do the same concurrently, as daemons that start together do. A conflict is recognised by a newer
    version: the missing steps are then repeated on that version.
    """
    while True:
        try:
            _complete(dataset, setup)
            break
        except (OSError, RuntimeError):
            newest = dataset.latest_version
            if newest <= dataset.version:
                raise
            dataset = dataset.checkout_version(newest)
    sync_new_table(dataset)  # outside of the loop: a retry after a failed fsync proves nothing


def sync_newest(dataset: lance.LanceDataset) -> None:
    """Run step 4 for the newest version of a complete table, unless it was done. Raises OSError."""
    root = local_root(dataset)
    if root is not None and synced_version(root) < dataset.version:
        sync_new_table(dataset)


@panics_as_errors
def _complete(dataset: lance.LanceDataset, setup: Setup) -> None:
    create_scalar_indexes(dataset, setup.indexes)
    if dataset.mem_wal_index_details() is None:
        if COMMITTED.encode() in (dataset.schema.metadata or {}):
            # Rows copied from another table bring its metadata along, whose generations do not exist in this table.
            dataset.update_schema_metadata({COMMITTED: None})
        # lance format: no sharding spec, so that Lance's own writer never routes rows into memwal's regions. arrow
        # format: the spec that makes Lance compute the same regions as memwal. SSTs maintain all indexes, including
        # later ones. This is the default if no index is named; a vector index could not be named because it does not
        # exist yet.
        routes: dict[str, Any] = {}
        if setup.wal_format == "arrow":
            routes = {"bucket_column": key_columns(dataset.schema)[0], "num_buckets": setup.buckets}
        dataset.initialize_mem_wal(**routes)


def create_scalar_indexes(dataset: lance.LanceDataset, indexes: Sequence[IndexSpec]) -> None:
    """Create the missing B-tree and full-text indexes. An empty table can have them."""
    present = {index.name for index in dataset.describe_indices()}
    for spec in indexes:
        if spec.kind in SCALAR_KINDS and spec.name not in present:
            dataset.create_scalar_index(spec.column, SCALAR_KINDS[spec.kind], name=spec.name, **spec.parameters)


def _keyed_schema(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """Return `schema` with the key columns not null and declared as Lance's (unenforced) primary key."""

    def keyed(field: pa.Field) -> pa.Field:
        if field.name not in key:
            return field
        return field.with_nullable(False).with_metadata({**(field.metadata or {}), **_key_metadata(key, field.name)})

    return pa.schema([keyed(field) for field in schema])


def _key_metadata(key: Sequence[str], name: str) -> dict[bytes, bytes]:
    """Return the field metadata of key column `name`; with several key columns it includes the column's position."""
    position = {PRIMARY_KEY_POSITION: str(key.index(name) + 1).encode()} if len(key) > 1 else {}
    return {PRIMARY_KEY: b"true", **position}


def _declare(dataset: lance.LanceDataset, key: Sequence[str], setup: Setup) -> None:
    """Run step 1 for an existing table: declare the key not null and as primary key, then write the set-up."""
    nullable = [name for name in key if dataset.schema.field(name).nullable]
    if nullable:
        alterations: list[Any] = [{"path": name, "nullable": False} for name in nullable]
        dataset.alter_columns(*alterations)
    if key and not key_columns(dataset.schema):  # Lance sets a primary key once, and rejects even the same one again
        dataset.update_field_metadata(
            {name: {k.decode(): v.decode() for k, v in _key_metadata(key, name).items()} for name in key}
        )
    dataset.update_schema_metadata(dict(setup_metadata(setup, column_ids(dataset), key)))


def _key_of(uri: str, dataset: lance.LanceDataset, key: Sequence[str], *, appends: bool) -> tuple[str, ...]:
    """Return the key of a table to adopt: the primary key it declares, which Lance never changes, else `key`."""
    declared = key_columns(dataset.schema)
    if declared and appends:
        raise InvalidRows(
            f"{uri}: it declares the primary key {', '.join(declared)}, so its rows cannot only be appended; leave "
            "append_only out, or copy the rows into a new table"
        )
    if declared and tuple(key) not in ((), declared):
        raise InvalidRows(f"{uri}: its primary key is {', '.join(declared)}, not {', '.join(key)}; name that one")
    return declared or tuple(key)


def _setup_beside(
    uri: str,
    dataset: lance.LanceDataset,
    details: Mapping[str, Any],
    key: Sequence[str],
    setup: Setup,
    *,
    any_format: bool,
) -> Setup:
    """Return `setup` with the regions and the format in `details` of a MemWAL that another program initialised."""
    if setup.wal_format == "lance" and not any_format:
        raise UnsupportedTable(
            f"{uri}: its MemWAL was initialised by another program, whose regions hold entries in arrow format; "
            "set wal.format = 'arrow', or copy the rows into a new table"
        )
    if not key_columns(dataset.schema):
        raise UnsupportedTable(
            f"{uri}: its MemWAL was initialised by another program, and it has no primary key; copy the rows into a "
            "new table"
        )
    published = published_regions(uri, details, key[0], field_id(dataset, key[0]))
    return setup._replace(buckets=len(published), wal_format="arrow")


def check_definition(schema: pa.Schema, key: Sequence[str], setup: Setup) -> None:
    """Raise InvalidRows, with the reason, if a table with the columns `schema` cannot have `key` and `setup`."""
    if setup.buckets < 1:
        raise InvalidRows(f"regions.count = {setup.buckets}: a table has at least 1 region")
    rows = row_schema(schema, key)
    check_indexes(schema, setup.indexes)
    MemTable(rows, key, setup.indexes, 0)  # rejects columns that no memtable can index
    _check_version(schema, key, setup)
    if setup.ttl is not None:
        check_ttl(schema, setup.ttl)
    if setup.append_by is not None:
        _check_append(schema, key, setup.append_by, setup.wal_format)
    else:
        _check_key(schema, key, setup.wal_format)


def is_version_type(kind: pa.DataType) -> bool:
    """Return whether values of this type order rows by age: any two of them compare, and none is NaN."""
    return bool(pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _check_key(schema: pa.Schema, key: Sequence[str], wal_format: WalFormat) -> None:
    if not key:
        raise InvalidRows(
            "the table has no key: name at least one key column, or choose append_only (in Python key=()): a table "
            "without a key keeps every row"
        )
    first = schema.field(key[0])
    if wal_format == "arrow" and (pa.types.is_binary(first.type) or pa.types.is_large_binary(first.type)):
        raise InvalidRows(
            f"key column {first.name!r} has the type {first.type}, and Lance cannot shard by it with "
            "wal.format = 'arrow': put another column first in the key, or choose wal.format = 'lance'",
            column=first.name,
        )


def _check_version(schema: pa.Schema, key: Sequence[str], setup: Setup) -> None:
    name = setup.rules.version
    if not name:
        return
    if name not in schema.names:
        raise InvalidRows(f"version column {name!r} is not in the table{nearest(name, schema.names)}", column=name)
    if not key or name in key:
        what = "is part of the key" if key else "needs a key, and the table has none"
        raise InvalidRows(f"version column {name!r} {what}: name a column outside the key, or none", column=name)
    if not is_version_type(kind := schema.field(name).type):
        raise InvalidRows(
            f"version column {name!r} has the type {kind}: name a column of integers, timestamps or dates", column=name
        )
    if setup.rules.upsert == "insert":
        raise InvalidRows(
            f"version column {name!r} decides which row replaces another, and upsert = 'insert' never replaces one: "
            "drop one of the two",
            column=name,
        )


def _check_append(schema: pa.Schema, key: Sequence[str], by: Sequence[str], wal_format: WalFormat) -> None:
    if key:
        raise InvalidRows(
            f"the key {', '.join(key)} is given for a table whose rows are only appended: drop one of the two"
        )
    if wal_format == "arrow":
        raise InvalidRows(
            "wal.format = 'arrow' needs a key: Lance's own writers refuse a log once the table's metadata changed, and "
            "every commit that appends changes it; choose wal.format = 'lance'"
        )
    for place, name in enumerate(by):
        if name not in schema.names:
            raise InvalidRows(
                f"regions.by: column {name!r} is not in the table{nearest(name, schema.names)}", column=name
            )
        if name in by[:place]:
            raise InvalidRows(f"regions.by names {name!r} twice: name it once", column=name)
        if not is_hashed(kind := schema.field(name).type):
            raise InvalidRows(
                f"regions.by: column {name!r} is of type {kind}; name columns of numbers, text, bytes or times",
                column=name,
            )
