"""Creating a base table, or setting up a Lance table that is there, so that any crash leaves a step to
repeat.

 1. The dataset, empty, with key and set-up in its schema: one version, so a table without set-up is not ours.
    A table that is there gets them by metadata edits.
 2. The scalar and full-text indexes that are missing. A vector index needs rows; see flush.index_catchup.
 3. Lance's MemWAL index, last: where it exists the set-up is complete.

The set-up is schema metadata of the base table:

    memwal:table       random id of the table, 32 hex digits: another table at the same path has another one
    memwal:regions     number of buckets, decimal
    memwal:indexes     JSON list of {"column", "kind", "parameters"}
    memwal:index_ids   JSON {"column": field id}, by which an index that is not built yet finds a column renamed since
    memwal:wal_format  "lance" or "arrow"; absent in tables made before there was a choice: lance
    memwal:append_by   only where rows have no key and are appended: JSON {"columns": those to route by, [] = all that
                       there were, "ids": their field ids, by which they are found whatever is added or renamed}
    memwal:upsert      "replace", "insert" or "merge"; absent: replace
    memwal:on_duplicate  "last", "first" or "fail"; absent: last

Where Lance's MemWAL index was there first, initialised by another program, the same keys stand in the table's
config instead: Lance's ShardWriter refuses WAL entries whose schema metadata differs from the table's, so a new key
there would cut it off from the entries it wrote itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import lance
import pyarrow as pa

from flush.errors import UnsupportedTable
from flush.field_ids import column_ids
from flush.table_manifest import COMMITTED
from memtable import IndexSpec
from memtable.schema import PRIMARY_KEY, PRIMARY_KEY_POSITION, key_columns
from wal import WAL_FORMATS, ObjectStore, SystemIds, WalFormat, regions

TABLE, REGIONS, INDEXES, FORMAT = b"memwal:table", b"memwal:regions", b"memwal:indexes", b"memwal:wal_format"
INDEX_IDS, APPEND_BY = b"memwal:index_ids", b"memwal:append_by"
UPSERT, ON_DUPLICATE = b"memwal:upsert", b"memwal:on_duplicate"
Upsert = Literal["replace", "insert", "merge"]
OnDuplicate = Literal["last", "first", "fail"]
SCALAR_KINDS: Mapping[str, Any] = {"btree": "BTREE", "fts": "INVERTED"}
"""Lance's names of our kinds of index that need no training."""
_LEFTOVERS = {"_mem_wal", "_transactions", "_versions"}
"""What a creation that crashed in step 1 may leave; empty of anything that counts, it is overwritten."""


class WriteRules(NamedTuple):
    """What a put does to a key that is there already, and to a key that it names twice itself."""

    upsert: Upsert = "replace"
    """replace: the row takes the stored one's place. insert: the stored row stays as it is. merge: columns that the put
    does not have keep what is stored."""
    on_duplicate: OnDuplicate = "last"
    """Rows of one put with the same key: the last or the first of them counts, or the put is refused."""

    def chosen(self) -> dict[str, str]:
        """The rules that are not the default, by their settings' names."""
        return {name: rule for name, rule in self._asdict().items() if rule != self._field_defaults[name]}


class Setup(NamedTuple):
    """What a table is set up for."""

    buckets: int
    indexes: tuple[IndexSpec, ...]
    wal_format: WalFormat
    index_ids: Mapping[str, int] = MappingProxyType({})
    """Field id of each column in `indexes`, {} where they are not recorded."""
    append_by: tuple[str, ...] | None = None
    """None: rows have a key. Else they are only appended, and routed by these columns, () for all there were."""
    append_ids: tuple[int, ...] = ()
    """Field ids of the columns that rows are routed by, where there is no key; known once the table is there."""
    rules: WriteRules = WriteRules()


def setup_metadata(setup: Setup, ids: Mapping[str, int]) -> dict[str, str]:
    """The set-up of a new table, whose top-level fields have the ids `ids`, as metadata."""
    listed = [{"column": s.column, "kind": s.kind, "parameters": dict(s.parameters)} for s in setup.indexes]
    by = setup.append_by
    routed = {"columns": by, "ids": [ids[name] for name in by or ids]}
    append = {} if by is None else {APPEND_BY.decode(): json.dumps(routed)}
    return {
        **append,
        TABLE.decode(): SystemIds().entry_id(),
        REGIONS.decode(): str(setup.buckets),
        INDEXES.decode(): json.dumps(listed),
        INDEX_IDS.decode(): json.dumps({s.column: ids[s.column] for s in setup.indexes if s.column in ids}),
        FORMAT.decode(): setup.wal_format,
        UPSERT.decode(): setup.rules.upsert,
        ON_DUPLICATE.decode(): setup.rules.on_duplicate,
    }


def metadata_of(dataset: lance.LanceDataset) -> Mapping[bytes, bytes]:
    """The metadata that holds the table's set-up: that of its schema, else its config; without it in neither."""
    metadata: Mapping[bytes, bytes] = dataset.schema.metadata or {}
    if REGIONS in metadata:
        return metadata
    return {key.encode(): value.encode() for key, value in dataset.config().items()}


def read_setup(metadata: Mapping[bytes, bytes]) -> Setup:
    """The set-up that `metadata` holds. Raises UnsupportedTable where unreadable."""
    try:
        listed, wal_format = json.loads(metadata.get(INDEXES, b"[]")), metadata.get(FORMAT, b"lance").decode()
        if wal_format not in WAL_FORMATS:
            raise ValueError(f"{wal_format!r} is no WAL format")
        specs, ids = tuple(IndexSpec(**each) for each in listed), json.loads(metadata.get(INDEX_IDS, b"{}"))
        routed = json.loads(metadata.get(APPEND_BY, b"null"))
        by, by_ids = (None, ()) if routed is None else (tuple(routed["columns"]), tuple(routed["ids"]))
        ids = {str(name): int(id) for name, id in ids.items()}
        return Setup(int(metadata[REGIONS]), specs, wal_format, ids, by, by_ids, _read_rules(metadata))
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedTable(
            f"the table's metadata {REGIONS.decode()}, {INDEXES.decode()}, {FORMAT.decode()} cannot be read ({error}); "
            "open it with the version of memwal that created it"
        ) from error


def _read_rules(metadata: Mapping[bytes, bytes]) -> WriteRules:
    """Raises: ValueError for a rule that this version does not know: writing by another one would lose rows."""
    upsert, on_duplicate = metadata.get(UPSERT, b"replace").decode(), metadata.get(ON_DUPLICATE, b"last").decode()
    for value, key, known in ((upsert, UPSERT, Upsert), (on_duplicate, ON_DUPLICATE, OnDuplicate)):
        if value not in get_args(known):
            raise ValueError(f"{value!r} is no {key.decode()}")
    return WriteRules(upsert, on_duplicate)  # type: ignore[arg-type]  # checked just now


def key_metadata(key: Sequence[str], name: str) -> dict[bytes, bytes]:
    """Field metadata of the key column `name`; the position says the key's order where there is more than one
    column.
    """
    position = {PRIMARY_KEY_POSITION: str(key.index(name) + 1).encode()} if len(key) > 1 else {}
    return {PRIMARY_KEY: b"true", **position}


def keyed_schema(schema: pa.Schema, key: Sequence[str], metadata: Mapping[str, str]) -> pa.Schema:
    """`schema` with its key, if it has one, declared as Lance's (unenforced) primary key, not null."""

    def keyed(field: pa.Field) -> pa.Field:
        if field.name not in key:
            return field
        return field.with_nullable(False).with_metadata({**(field.metadata or {}), **key_metadata(key, field.name)})

    return pa.schema([keyed(field) for field in schema], metadata=dict(metadata))


def is_vacant(store: ObjectStore) -> bool:
    """Whether nothing that counts is at the table's path, so that a table may be created there."""
    if set(store.children("")) - _LEFTOVERS:
        return False
    top = {key.partition("/")[0] for key in store.list("")}
    return not top - _LEFTOVERS and "_versions" not in top and not regions(store)


def declare(dataset: lance.LanceDataset, key: Sequence[str], setup: Setup) -> None:
    """Step 1 for a table that is there: not null and primary-key metadata on the key, then the set-up."""
    nullable = [name for name in key if dataset.schema.field(name).nullable]
    if nullable:
        alterations: list[Any] = [{"path": name, "nullable": False} for name in nullable]
        dataset.alter_columns(*alterations)
    if key and not key_columns(dataset.schema):  # Lance sets a primary key once, and refuses the same one again
        dataset.update_field_metadata(
            {name: {k.decode(): v.decode() for k, v in key_metadata(key, name).items()} for name in key}
        )
    dataset.update_schema_metadata(dict(setup_metadata(setup, column_ids(dataset))))


def declare_beside(dataset: lance.LanceDataset, setup: Setup) -> None:
    """Step 1 for a table whose MemWAL another program initialised: its schema, which declares the key, stays as it
    is."""
    dataset.update_config(dict(setup_metadata(setup, column_ids(dataset))))


def complete(dataset: lance.LanceDataset, setup: Setup) -> None:
    """Steps 2 and 3, whatever of them is left to do.

    Other processes may take the same steps at this moment, as daemons do that are started together. A conflict is known
    by the version that somebody made meanwhile: it is looked at, and what is left to do is done.
    """
    while True:
        try:
            return _complete(dataset, setup)
        except (OSError, RuntimeError):
            newest = dataset.latest_version
            if newest <= dataset.version:
                raise
            dataset = dataset.checkout_version(newest)


def _complete(dataset: lance.LanceDataset, setup: Setup) -> None:
    create_scalar_indexes(dataset, setup.indexes)
    if dataset.mem_wal_index_details() is None:
        if COMMITTED.encode() in (dataset.schema.metadata or {}):
            # Rows copied from another table bring its metadata along: its generations are none of this table's.
            dataset.update_schema_metadata({COMMITTED: None})
        # In lance format no sharding spec, so that nobody routes rows of Lance's own writer into our regions; in arrow
        # format the spec by which that writer computes the regions that we do. Maintained inside SSTs are all indexes,
        # those built later too: the default, which names none, since a vector index does not exist yet.
        routes: dict[str, Any] = {}
        if setup.wal_format == "arrow":
            routes = {"bucket_column": key_columns(dataset.schema)[0], "num_buckets": setup.buckets}
        dataset.initialize_mem_wal(**routes)


def create_scalar_indexes(dataset: lance.LanceDataset, indexes: Sequence[IndexSpec]) -> None:
    """Create the B-tree and full-text indexes that are missing; they work on an empty table."""
    present = {index.name for index in dataset.describe_indices()}
    for spec in indexes:
        if spec.kind in SCALAR_KINDS and spec.name not in present:
            dataset.create_scalar_index(spec.column, SCALAR_KINDS[spec.kind], name=spec.name, **spec.parameters)
