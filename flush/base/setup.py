"""The set-up of a table, stored as schema metadata of the base table.

    memwal:table       random id of the table, 32 hex digits: another table at the same path has another one
    memwal:regions     number of buckets, decimal; in arrow format the sharding spec of Lance's MemWAL index counts
    memwal:routing     version of the routing, decimal; absent in tables that were never resized: 1; in arrow format the
                       id of the sharding spec (flush.resizing.routing)
    memwal:indexes     JSON list of {"column", "kind", "parameters"}, and "called" if an index has another name
    memwal:index_ids   JSON {"column": field id}: finds the column of an index that is not built yet after a rename
    memwal:wal_format  "lance" or "arrow"; absent in tables made before there was a choice: lance
    memwal:append_by   only if rows have no key and are appended: JSON {"columns": those that `regions.by` names,
                       [] = all columns at the set-up, "ids": their field ids, which stay valid after a rename}
    memwal:routed_by   only if rows are routed by a key of several columns: JSON list of their field ids; absent in a
                       table with a key: the first key column (storage version 2)
    memwal:upsert      "replace", "insert" or "merge"; absent: replace
    memwal:on_duplicate  "last", "first" or "fail"; absent: last
    memwal:storage     version of what memwal writes on storage, decimal (`STORAGE`); absent: 1
    memwal:version     only if late rows are left out: JSON {"id": field id of the version column}
    memwal:ttl         only if rows expire, or did: JSON {"id": field id of the time column, "seconds": ttl}, or null
    memwal:restored    only in a table that was restored from a backup: JSON, see `Restored`

Later changes are written to the table's config: added or dropped indexes to `memwal:indexes` and `memwal:index_ids`, a
new ttl to `memwal:ttl`, a restore to `memwal:table` and `memwal:restored`. The config takes precedence over the schema
metadata, which stays unchanged: entries of a log in arrow format carry the schema metadata of their time. Of
`memwal:storage`, the newer value counts.

If another program initialised Lance's MemWAL index first, the same keys are in the table's config instead. Lance's
ShardWriter rejects WAL entries whose schema metadata differs from the table's, so a new key in the schema metadata
would make its own entries unreadable for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import lance

from memwal.flush.base.ttl import Ttl
from memwal.flush.errors import UnsupportedTable
from memwal.memtable import IndexSpec
from memwal.wal import WAL_FORMATS, ObjectStore, SystemIds, WalFormat, regions
from memwal.wal.layout import ROOT, manifest_prefix

TABLE, REGIONS, INDEXES, FORMAT = b"memwal:table", b"memwal:regions", b"memwal:indexes", b"memwal:wal_format"
INDEX_IDS, APPEND_BY, ROUTED_BY = b"memwal:index_ids", b"memwal:append_by", b"memwal:routed_by"
UPSERT, ON_DUPLICATE, VERSION = b"memwal:upsert", b"memwal:on_duplicate", b"memwal:version"
ROUTING, TTL = b"memwal:routing", b"memwal:ttl"
STORAGE_KEY = b"memwal:storage"
STORAGE = 2
"""Version of what memwal writes on storage: this set-up, entries, region manifests, SSTs, plans and notes. A process
reads and writes tables of its own version and lower ones, and rejects a table of a higher version before it writes
anything. Raise it with a change that processes of the previous version cannot read; see README.md, "When a byte format
changes". 2: `memwal:routed_by`; tables without it have version 1, which older processes can still write.
"""
_LONGEST_VERSION = 9
"""Digits of a storage version."""
RESTORED = b"memwal:restored"
_IN_CONFIG = (TABLE, INDEXES, INDEX_IDS, TTL, RESTORED)
"""Keys whose value in the table's config takes precedence over the schema metadata."""
Upsert = Literal["replace", "insert", "merge"]
OnDuplicate = Literal["last", "first", "fail"]


class WriteRules(NamedTuple):
    """What a put does to an existing key, and to a key that occurs twice in the put."""

    upsert: Upsert = "replace"
    """What a put to an existing key does. replace: replace the row. insert: keep the stored row. merge: update only the
    columns in the put.
    """
    on_duplicate: OnDuplicate = "last"
    """For rows of one put with the same key: the last or the first counts, or the put is rejected."""
    version: str = ""
    """Version column: a row with a lower value than the newest row of its key is left out; "": no version column."""

    def chosen(self) -> dict[str, str]:
        """Return the rules that differ from the default, by setting name."""
        return {name: rule for name, rule in self._asdict().items() if rule != self._field_defaults[name]}


class Setup(NamedTuple):
    """The set-up of a table."""

    buckets: int
    indexes: tuple[IndexSpec, ...]
    wal_format: WalFormat
    index_ids: Mapping[str, int] = MappingProxyType({})
    """Field id of each column in `indexes`; {} if not recorded."""
    append_by: tuple[str, ...] | None = None
    """None: rows have a key. Else rows are only appended, and routed by these columns; () = all at the set-up."""
    append_ids: tuple[int, ...] = ()
    """Field ids of the columns that route rows without a key; known once the table exists."""
    rules: WriteRules = WriteRules()
    """Once the table exists, without the name of the version column: columns are renamed, ids stay."""
    version_id: int | None = None
    routing: int = 1
    """Version of the routing; raised by one with every resize."""
    ttl: Ttl | None = None
    """When rows expire; once the table exists, without the name of the time column."""
    ttl_id: int | None = None
    routed_ids: tuple[int, ...] = ()
    """Field ids of the key columns that route rows; (): the first key column, or the table has no key."""


def setup_metadata(setup: Setup, ids: Mapping[str, int], key: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a new table with the key `key`, whose top-level fields have the ids `ids`.

    Rows are routed by the whole key. In arrow format Lance routes too, by the first column, so memwal does the same.
    """
    by = setup.append_by
    routed = {"columns": by, "ids": [ids[name] for name in by or ids]}
    append = {} if by is None else {APPEND_BY.decode(): json.dumps(routed)}
    version, whole_key = setup.rules.version, len(key) > 1 and setup.wal_format == "lance"
    by_key = {ROUTED_BY.decode(): json.dumps([ids[name] for name in key]), STORAGE_KEY.decode(): "2"}
    return {
        **append,
        **(by_key if whole_key else {}),
        **({VERSION.decode(): json.dumps({"id": ids[version]})} if version else {}),
        **({} if setup.ttl is None else ttl_settings(setup.ttl, ids)),
        TABLE.decode(): SystemIds().entry_id(),
        REGIONS.decode(): str(setup.buckets),
        **index_settings(setup.indexes, ids),
        FORMAT.decode(): setup.wal_format,
        UPSERT.decode(): setup.rules.upsert,
        ON_DUPLICATE.decode(): setup.rules.on_duplicate,
    }


def index_settings(indexes: Sequence[IndexSpec], ids: Mapping[str, int]) -> dict[str, str]:
    """Return the part of the set-up with the indexes. `ids`: field ids by column."""
    return {
        INDEXES.decode(): json.dumps([_listed(spec) for spec in indexes]),
        INDEX_IDS.decode(): json.dumps({spec.column: ids[spec.column] for spec in indexes if spec.column in ids}),
    }


def ttl_settings(ttl: Ttl | None, ids: Mapping[str, int]) -> dict[str, str]:
    """Return the part of the set-up that defines when rows expire. `ids`: field ids by column."""
    return {TTL.decode(): json.dumps(None if ttl is None else {"id": ids[ttl.column], "seconds": ttl.seconds})}


def _listed(spec: IndexSpec) -> dict[str, Any]:
    called = {"called": spec.called} if spec.called else {}
    return {"column": spec.column, "kind": spec.kind, "parameters": dict(spec.parameters), **called}


def metadata_of(dataset: lance.LanceDataset) -> Mapping[bytes, bytes]:
    """Return the metadata with the table's set-up: the schema's, else the config (which may lack the set-up too).

    The storage version is the higher of both, because it may be raised in either.
    """
    metadata: Mapping[bytes, bytes] = dataset.schema.metadata or {}
    config = {key.encode(): value.encode() for key, value in dataset.config().items()}
    written = [each[STORAGE_KEY] for each in (metadata, config) if STORAGE_KEY in each]
    storage = {STORAGE_KEY: max(written, key=_storage_version)} if written else {}
    if REGIONS not in metadata:
        return {**config, **storage}
    return {**metadata, **{key: config[key] for key in _IN_CONFIG if key in config}, **storage}


def _storage_version(written: bytes) -> float:
    """Return the storage version in a text; an invalid text counts as higher than every version."""
    return int(written) if written.isdigit() and len(written) <= _LONGEST_VERSION else float("inf")


class Restored(NamedTuple):
    """The origin of a restored table."""

    table: str
    """Id of the table that was backed up."""
    began: float
    """Unix time at which the backup began."""
    backup: str = ""
    """Id of the backup."""

    def metadata(self) -> dict[str, str]:
        """Return it as an entry of the table's config."""
        return {RESTORED.decode(): json.dumps(self._asdict())}


def restored_from(metadata: Mapping[bytes, bytes]) -> Restored | None:
    """Return the origin recorded in `metadata`; None if the table was not restored."""
    if RESTORED not in metadata:
        return None
    said = json.loads(metadata[RESTORED])
    return Restored(said["table"], said["began"], said.get("backup", ""))


def read_setup(metadata: Mapping[bytes, bytes]) -> Setup:
    """Return the set-up in `metadata`. Raises UnsupportedTable if it cannot be parsed."""
    written = metadata.get(STORAGE_KEY, b"1")
    if _storage_version(written) > STORAGE:
        raise UnsupportedTable(
            f"the table has storage version {written.decode(errors='replace'):.40}, and this memwal reads and writes "
            f"{STORAGE} and below: upgrade memwal here first"
        )
    try:
        listed, wal_format = json.loads(metadata.get(INDEXES, b"[]")), metadata.get(FORMAT, b"lance").decode()
        if wal_format not in WAL_FORMATS:
            raise ValueError(f"{wal_format!r} is no WAL format")
        specs, ids = tuple(IndexSpec(**spec) for spec in listed), json.loads(metadata.get(INDEX_IDS, b"{}"))
        routed = json.loads(metadata.get(APPEND_BY, b"null"))
        by, by_ids = (None, ()) if routed is None else (tuple(routed["columns"]), tuple(routed["ids"]))
        ids = {str(name): int(id) for name, id in ids.items()}
        version = json.loads(metadata.get(VERSION, b"null"))
        version_id = None if version is None else int(version["id"])
        buckets, routing, rules = int(metadata[REGIONS]), int(metadata.get(ROUTING, b"1")), _read_rules(metadata)
        expires = json.loads(metadata.get(TTL, b"null"))
        ttl = None if expires is None else Ttl("", float(expires["seconds"]))
        ttl_id = None if expires is None else int(expires["id"])
        routed_ids = tuple(int(id) for id in json.loads(metadata.get(ROUTED_BY, b"[]")))
        return Setup(buckets, specs, wal_format, ids, by, by_ids, rules, version_id, routing, ttl, ttl_id, routed_ids)
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedTable(
            f"the table's metadata {REGIONS.decode()}, {INDEXES.decode()}, {FORMAT.decode()} or {TTL.decode()} cannot "
            f"be read ({error}); open it with the version of memwal that created it"
        ) from error


def _read_rules(metadata: Mapping[bytes, bytes]) -> WriteRules:
    """Return the rules.

    Raises ValueError for a rule unknown to this version of memwal: writing by another rule would lose rows.
    """
    upsert, on_duplicate = metadata.get(UPSERT, b"replace").decode(), metadata.get(ON_DUPLICATE, b"last").decode()
    for value, key, known in ((upsert, UPSERT, Upsert), (on_duplicate, ON_DUPLICATE, OnDuplicate)):
        if value not in get_args(known):
            raise ValueError(f"{value!r} is no {key.decode()}")
    return WriteRules(upsert, on_duplicate)  # type: ignore[arg-type]  # checked just now


_LOOK_BACK = 1_000
"""Number of newest versions searched for the set-up, if the newest one lacks it."""


def refuse_written_over(uri: str, dataset: lance.LanceDataset, store: ObjectStore) -> None:
    """Reject a table that lacks Lance's MemWAL index although its regions were claimed.

    No region is claimed before the index exists, so the index was dropped, and the committed generations with it: it is
    unknown which rows of the SSTs the table holds. If the index was made and a region claimed after `dataset` was
    opened, `dataset` moves to the newest version.
    """
    if not has_claims(store):
        return
    dataset.checkout_latest()  # type: ignore[no-untyped-call]
    if dataset.mem_wal_index_details() is not None:
        return
    raise UnsupportedTable(
        f"{uri}: version {dataset.version} was written over by another program, and the progress of its regions is "
        "lost; restore the version before that (LanceDataset.restore), or, to keep its rows as they are and give up "
        f"those that were not committed, move {store.url(ROOT.rstrip('/'))} away and run `memwal init`"
    )


def has_claims(store: ObjectStore) -> bool:
    """Return whether any region on storage was ever claimed."""
    return any(list(store.list(manifest_prefix(region))) for region in regions(store))


def refuse_wiped(uri: str, dataset: lance.LanceDataset, store: ObjectStore) -> None:
    """Reject a table whose set-up another program removed from the schema's metadata, while an older version has it.

    Its regions may hold acknowledged rows that are not committed; only the table with its set-up finds them. A table
    without regions was left on purpose (`flush/beside_lancedb.md`).
    """
    if not has_claims(store):
        return
    older = sorted((ref["version"] for ref in dataset.version_refs()), reverse=True)
    for version in older[:_LOOK_BACK]:
        try:
            had_setup = version < dataset.version and REGIONS in metadata_of(dataset.checkout_version(version))
        except (OSError, ValueError):  # cleaned up meanwhile
            continue
        if had_setup:
            raise UnsupportedTable(
                f"{uri}: another program wiped the metadata of the schema, and with it the table's set-up, in version "
                f"{version + 1}; restore version {version} (LanceDataset.restore) and open it again. Do not copy its "
                f"rows elsewhere: acknowledged rows that are not committed yet are below {uri}/{ROOT} only"
            )
