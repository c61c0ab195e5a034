"""Read the composition of one version of a Lance table from its manifest file and its transaction, without its rows.

    _versions/….manifest                                      layout: flush.base.manifest
    _transactions/{read version}-{uuid}.txn                   Transaction: the operation that made the version

    Manifest.fields = 1, .fragments = 2, .schema_metadata = 5, .index_section = 6, .timestamp = 7,
        .transaction_file = 12, .config = 16, .base_paths = 18, .table_metadata = 19
    Field.name = 2, .id = 3, .parent_id = 4, .logical_type = 5
    DataFragment.id = 1, .files = 2, .deletion_file = 3, .physical_rows = 4
    DataFile.path = 1, .file_size_bytes = 6, .base_id = 7
    DeletionFile.file_type = 1, .read_version = 2, .id = 3, .num_deleted_rows = 4, .base_id = 7
    IndexMetadata.uuid = 1, .fields = 2, .name = 3
    Transaction.read_version = 1, .transaction_properties = 4; its operation is one of the fields 100 to 114

pylance shows most of this, but its `read_transaction` fails for some operations (a compaction with an index, 14.0.2). A
map field is read in its wire form: repeated entries of key = 1, value = 2. Source: table.proto and transaction.proto of
Lance, checked against pylance 14.0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from google.protobuf import descriptor_pb2

from memwal.flush.base.manifest import (
    manifest_file,
    manifest_position,
    manifest_version,
    message_at,
    named_errors,
    progress,
    with_manifest,
)
from memwal.wal import ObjectStore
from memwal.wal.region_manifest import MessageFields, message_classes

_Field = descriptor_pb2.FieldDescriptorProto
_TEXT, _BYTES, _U64, _I32 = _Field.TYPE_STRING, _Field.TYPE_BYTES, _Field.TYPE_UINT64, _Field.TYPE_INT32
_OPERATIONS: Mapping[int, str] = {
    100: "append",
    101: "delete",
    102: "overwrite",
    103: "create_index",
    104: "rewrite",
    105: "merge",
    106: "restore",
    107: "reserve_fragments",
    108: "update",
    109: "project",
    110: "update_config",
    111: "data_replacement",
    112: "update_mem_wal_state",
    113: "clone",
    114: "update_bases",
}
_FIELDS: MessageFields = {
    "UUID": ((1, "uuid", _BYTES),),
    "Entry": ((1, "key", _TEXT), (2, "value", _BYTES)),
    "Timestamp": ((1, "seconds", _Field.TYPE_INT64), (2, "nanos", _I32)),
    "Field": ((2, "name", _TEXT), (3, "id", _I32), (4, "parent_id", _I32), (5, "logical_type", _TEXT)),
    "DataFile": ((1, "path", _TEXT), (6, "file_size_bytes", _U64), (7, "base_id", "optional u64")),
    "DeletionFile": (
        (1, "file_type", _I32),
        (2, "read_version", _U64),
        (3, "id", _U64),
        (4, "num_deleted_rows", _U64),
        (7, "base_id", "optional u64"),
    ),
    "DataFragment": (
        (1, "id", _U64),
        (2, "files", "DataFile[]"),
        (3, "deletion_file", "DeletionFile"),
        (4, "physical_rows", _U64),
    ),
    "Manifest": (
        (1, "fields", "Field[]"),
        (2, "fragments", "DataFragment[]"),
        (5, "schema_metadata", "Entry[]"),
        (6, "index_section", "optional u64"),
        (7, "timestamp", "Timestamp"),
        (12, "transaction_file", _TEXT),
        (16, "config", "Entry[]"),
        (18, "base_paths", "Any[]"),
        (19, "table_metadata", "Entry[]"),
    ),
    "IndexMetadata": ((1, "uuid", "UUID"), (2, "fields", "int32[]"), (3, "name", _TEXT)),
    "IndexSection": ((1, "indices", "IndexMetadata[]"),),
    "Any": (),
    "Restore": ((1, "version", _U64),),
    "Transaction": (
        (1, "read_version", _U64),
        (4, "properties", "Entry[]"),
        *((number, name, "Restore" if name == "restore" else "Any") for number, name in _OPERATIONS.items()),
    ),
}


@dataclass(frozen=True)
class Fragment:
    """One fragment of a version. Keys are below the table's root."""

    id: int
    rows: int
    """Rows in its files, including deleted ones."""
    deleted: int
    files: Mapping[str, int]
    """Key of each data file -> its size in bytes, 0 if not recorded; files of other tables are omitted."""
    deletion_file: str | None
    """Key of the file that lists the deleted rows."""

    @property
    def live(self) -> int:
        """Rows that a reader sees."""
        return self.rows - self.deleted


@dataclass(frozen=True)
class Transaction:
    """The operation that made a version, as recorded by its writer."""

    operation: str
    """Lance's name for it, such as "update" or "rewrite"; "unknown" if this version of memwal does not know it."""
    read_version: int
    """The version on which the operation was planned."""
    restored: int | None = None
    """The version that a "restore" restores."""
    message: str = ""
    """The commit message of its writer."""


@dataclass(frozen=True)
class TableState:
    """One version of a Lance table, without its rows.

    Thread safety. Immutable.
    """

    version: int
    seconds: float
    """Unix time of the commit, by the writer's clock."""
    columns: Mapping[int, tuple[str, str]]
    """Field id -> name and Lance's type, of the top-level columns."""
    fragments: Mapping[int, Fragment]
    indexes: Mapping[str, frozenset[UUID]]
    """Name -> its segments; includes Lance's own indexes (`__lance_…`)."""
    settings: Mapping[str, bytes]
    """The table's config and metadata, and the metadata of its schema."""
    committed: Mapping[UUID, int]
    """Per region, the highest generation whose rows it holds."""
    transaction: Transaction | None
    """None if its file is missing."""
    marked: Mapping[UUID, int] = field(default_factory=dict)
    """The same by Lance's own marker; a commit into a table without a key moves the marker in a separate version."""
    transaction_key: str = ""
    """Key of the file with the transaction; "" if the manifest names none."""
    is_shallow: bool = False
    """Whether some of its files are in other tables, as in a shallow clone."""

    @property
    def rows(self) -> int:
        """Rows that a reader sees."""
        return sum(fragment.live for fragment in self.fragments.values())

    @property
    def bytes(self) -> int:
        """Size of its data files; a file without a recorded size counts as 0."""
        return sum(size for fragment in self.fragments.values() for size in fragment.files.values())


def versions(store: ObjectStore) -> list[int]:
    """Return the existing version numbers of the table at the root of `store`, ascending.

    Raises StoreUnavailable, StoreRefused.
    """
    numbers = (manifest_version(key) for key in store.list("_versions/"))
    return sorted(version for version in numbers if version is not None)


def read_state(store: ObjectStore, version: int, *, transaction: bool = True) -> TableState:
    """Return `version` of the table at the root of `store`. Reads two or three small objects.

    `transaction`: False omits it and reads one object less. Raises Corrupt if its manifest is missing or cannot be
    parsed; StoreUnavailable, StoreRefused.
    """
    key, data = manifest_file(store, "", version)
    with named_errors(key):
        manifest = message_at(_MANIFEST, data, manifest_position(data))
        indexes, (committed, marked) = _indexes(manifest, data), progress(data)
    settings = (*manifest.config, *manifest.table_metadata, *manifest.schema_metadata)
    return TableState(
        version=version,
        seconds=manifest.timestamp.seconds + manifest.timestamp.nanos / 1e9,
        columns={column.id: (column.name, column.logical_type) for column in manifest.fields if column.parent_id < 0},
        fragments={fragment.id: _fragment(fragment) for fragment in manifest.fragments},
        indexes=indexes,
        settings={entry.key: entry.value for entry in settings},
        committed=committed,
        transaction=_transaction(store, manifest.transaction_file) if transaction else None,
        marked=marked,
        transaction_key=f"_transactions/{manifest.transaction_file}" if manifest.transaction_file else "",
        is_shallow=bool(manifest.base_paths),
    )


def with_config(data: bytes, config: Mapping[str, str]) -> bytes:
    """Return the manifest file `data` with the entries `config` set in the table's config. Pure.

    Raises ValueError, struct.error or DecodeError if it is not as pylance writes it.
    """
    position = manifest_position(data)
    manifest = message_at(_MANIFEST, data, position)
    kept = [entry for entry in manifest.config if entry.key not in config]
    del manifest.config[:]
    manifest.config.extend(kept)
    for key, value in config.items():
        manifest.config.add(key=key, value=value.encode())
    return with_manifest(data, position, manifest)


def _fragment(message: Any) -> Fragment:
    deletion, has_deletion = message.deletion_file, message.HasField("deletion_file")
    suffix = "bin" if deletion.file_type else "arrow"
    key = f"_deletions/{message.id}-{deletion.read_version}-{deletion.id}.{suffix}"
    return Fragment(
        id=message.id,
        rows=message.physical_rows,
        deleted=deletion.num_deleted_rows if has_deletion else 0,
        files={f"data/{file.path}": file.file_size_bytes for file in message.files if not file.HasField("base_id")},
        deletion_file=key if has_deletion and not deletion.HasField("base_id") else None,
    )


def _indexes(manifest: Any, data: bytes) -> dict[str, frozenset[UUID]]:
    if not manifest.HasField("index_section"):
        return {}
    indexes: dict[str, frozenset[UUID]] = {}
    for index in message_at(_INDEX_SECTION, data, manifest.index_section).indices:
        indexes[index.name] = indexes.get(index.name, frozenset()) | {UUID(bytes=index.uuid.uuid)}
    return indexes


def _transaction(store: ObjectStore, name: str) -> Transaction | None:
    key = f"_transactions/{name}"
    data = store.get(key) if name else None
    if data is None:
        return None
    with named_errors(key):
        message = _TRANSACTION.FromString(data)
    operation = next((name for name in _OPERATIONS.values() if message.HasField(name)), "unknown")
    properties = {entry.key: entry.value.decode(errors="replace") for entry in message.properties}
    restored = message.restore.version if operation == "restore" else None
    return Transaction(operation, message.read_version, restored, properties.get("__lance_commit_message", ""))


_MANIFEST, _INDEX_SECTION, _TRANSACTION = message_classes(
    "memwal.lance_state", _FIELDS, ("Manifest", "IndexSection", "Transaction")
)
