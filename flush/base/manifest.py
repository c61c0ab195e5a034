"""Read the commit progress from a base-table manifest file, and write the base's field ids into an SST's manifest.

pylance shows the MemWAL index of a table but not the generations that it has compacted, and numbers the fields of files
it writes from 0. This module therefore parses and rewrites the manifest file:

    ... | u32 length | IndexSection | ... | u32 length | Manifest | u64 its position | u16 0 | u16 2 | LANC

    Manifest.fields = 1, .fragments = 2, .schema_metadata = 5, .index_section = 6 (u64 position)
    Field.id = 3, .parent_id = 4 (-1 at the top); DataFragment.files = 2; DataFile.fields = 2 (packed int32)
    IndexSection.indices = 1; IndexMetadata.name = 3, .index_details = 6 (google.protobuf.Any)
    MemWalIndexDetails.compacted_sstables = 9, .index_catchup = 10; CompactedSsTable: 1 UUID{1 bytes(16)}, 2 u64
    generation; IndexCatchupProgress: 1 index_name, 2 repeated CompactedSsTable
    A map is read in its wire form: repeated entries of key = 1, value = 2

A commit into a table without a key cannot set Lance's marker in the version that appends the rows. It writes the
progress into that version's schema metadata (flush.commits.append_pass): `memwal:committed` = JSON {region uuid:
generation}. The committed generation is the higher of the two.

The file is `_versions/{2**64-1 - version, 20 digits}.manifest`, or `_versions/{version}.manifest` in older tables.
Source: table.proto and index.proto of Lance, checked against pylance 14.0.2. The classes are in a separate descriptor
pool, so that they never collide with another library's copy of Lance's messages.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import UUID

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from memwal.wal import Corrupt, ObjectStore
from memwal.wal.region_manifest import MessageFields, message_classes

MEM_WAL_INDEX = "__lance_mem_wal"
COMMITTED = "memwal:committed"

_FOOTER = struct.Struct("<QHH4s")
_MAGIC = b"LANC"
_MANIFEST_KEY = re.compile(r"_versions/(?P<number>[0-9]{1,20})\.manifest")
_REVERSED_DIGITS = 20
_Field = descriptor_pb2.FieldDescriptorProto

_FIELDS: MessageFields = {
    "UUID": ((1, "uuid", _Field.TYPE_BYTES),),
    "CompactedSsTable": ((1, "shard_id", "UUID"), (2, "generation", _Field.TYPE_UINT64)),
    "IndexCatchupProgress": ((1, "index_name", _Field.TYPE_STRING), (2, "caught_up_sstables", "CompactedSsTable[]")),
    "MemWalIndexDetails": (
        (9, "compacted_sstables", "CompactedSsTable[]"),
        (10, "index_catchup", "IndexCatchupProgress[]"),
    ),
    "Any": ((1, "type_url", _Field.TYPE_STRING), (2, "value", _Field.TYPE_BYTES)),
    "IndexMetadata": ((3, "name", _Field.TYPE_STRING), (6, "index_details", "Any")),
    "IndexSection": ((1, "indices", "IndexMetadata[]"),),
    "Field": ((3, "id", _Field.TYPE_INT32), (4, "parent_id", _Field.TYPE_INT32)),
    "DataFile": ((2, "fields", "int32[]"),),
    "DataFragment": ((2, "files", "DataFile[]"),),
    "Entry": ((1, "key", _Field.TYPE_STRING), (2, "value", _Field.TYPE_BYTES)),
    "Manifest": (
        (1, "fields", "Field[]"),
        (2, "fragments", "DataFragment[]"),
        (5, "schema_metadata", "Entry[]"),
        (6, "index_section", "optional u64"),
    ),
}


class Progress(NamedTuple):
    """Per region, the highest generation whose rows a version holds; regions never committed are absent."""

    committed: dict[UUID, int]
    marked: dict[UUID, int]
    """By Lance's own marker alone, which may lag in a table without a key."""


def read_progress(store: ObjectStore, version: int) -> Progress:
    """Return the progress of base-table version `version`. The root of `store` is the table's directory.

    Raises Corrupt if the manifest is missing or cannot be parsed; StoreUnavailable, StoreRefused.
    """
    key, data = manifest_file(store, "", version)
    with named_errors(key):
        return progress(data)


def set_up_generations(store: ObjectStore, version: int) -> dict[UUID, int] | None:
    """Return the highest generation of each region in a version; None for one from before the set-up for ingestion."""
    key, data = manifest_file(store, "", version)
    with named_errors(key):
        details = _mem_wal_details(data)
        return None if details is None else _generations(details.compacted_sstables)


def indexed_generations(store: ObjectStore, version: int) -> dict[str, dict[UUID, int]]:
    """Return, per index and region, the highest generation whose rows the index covers, as recorded by Lance.

    An index that was rebuilt and not extended since is absent. Raises as `read_progress`.
    """
    key, data = manifest_file(store, "", version)
    with named_errors(key):
        details = _mem_wal_details(data)
        progress = () if details is None else details.index_catchup
        return {entry.index_name: _generations(entry.caught_up_sstables) for entry in progress}


def mem_wal_details(store: ObjectStore, version: int) -> tuple[str, bytes]:
    """Return type and bytes of the details of Lance's MemWAL index. Requires: the version has one.

    Raises as `read_progress`.
    """
    key, data = manifest_file(store, "", version)
    with named_errors(key):
        details = _mem_wal_index(data)
        if details is None:
            raise ValueError("it has no MemWAL index")
        return str(details.type_url), bytes(details.value)


def renumber_fields(store: ObjectStore, directory: str, ids: Sequence[int]) -> None:
    """Set the field ids of version 1 of the dataset at the key `directory` to `ids`, depth first.

    Requires: no process has opened the dataset yet. Raises Corrupt if the file is not as pylance writes it;
    StoreUnavailable, StoreRefused.
    """
    key, data = manifest_file(store, f"{directory}/", 1)
    with named_errors(key):
        position, manifest = _manifest(data)
        new = dict(zip((field.id for field in manifest.fields), ids, strict=True))
        for field in manifest.fields:
            field.id, field.parent_id = new[field.id], new.get(field.parent_id, field.parent_id)
        for file in (file for fragment in manifest.fragments for file in fragment.files):
            file.fields[:] = [new[id] for id in file.fields]
        renumbered = with_manifest(data, position, manifest)
    if renumbered != data:
        store.put(key, renumbered)


def manifest_version(key: str) -> int | None:
    """Return the version whose manifest has this key below the table's directory; None for any other key."""
    match = _MANIFEST_KEY.fullmatch(key)
    if match is None:
        return None
    number = int(match["number"])
    return 2**64 - 1 - number if len(match["number"]) == _REVERSED_DIGITS else number


def manifest_names(version: int) -> tuple[str, str]:
    """Return the two possible names of the manifest file of `version`: in newer tables, in older ones."""
    return f"{2**64 - 1 - version:020}.manifest", f"{version}.manifest"


def manifest_file(store: ObjectStore, prefix: str, version: int) -> tuple[str, bytes]:
    """Return key and bytes of the manifest of `version` of the dataset below `prefix`, which is "" or ends in "/".

    Raises Corrupt if it does not exist.
    """
    keys = [f"{prefix}_versions/{name}" for name in manifest_names(version)]
    for key in keys:
        if (data := store.get(key)) is not None:
            return key, data
    raise Corrupt(f"{keys[0]}: table version {version} has no manifest; was it cleaned up meanwhile?")


@contextmanager
def named_errors(key: str) -> Iterator[None]:
    """Turn parse errors into Corrupt, naming `key`."""
    try:
        yield
    except (DecodeError, ValueError, KeyError, struct.error) as error:
        raise Corrupt(f"{key}: cannot be parsed as a Lance table manifest: {error}") from error


def with_manifest(data: bytes, position: int, manifest: Any) -> bytes:
    """Return the manifest file `data` with its manifest message, at `position`, replaced by `manifest`. Pure."""
    message = manifest.SerializeToString()
    return b"".join((data[:position], struct.pack("<I", len(message)), message, data[-_FOOTER.size :]))


def _manifest(data: bytes) -> tuple[int, Any]:
    """Return the position of the manifest message in the file, and the message."""
    position = manifest_position(data)
    return position, message_at(_MANIFEST, data, position)


def manifest_position(data: bytes) -> int:
    """Return the offset of the manifest message in a manifest file. It must be the last message, as Lance requires.

    Raises ValueError, struct.error.
    """
    position, _, _, magic = _FOOTER.unpack(data[-_FOOTER.size :])
    if magic != _MAGIC:
        raise ValueError(f"it ends in {magic!r}, not in {_MAGIC!r}")
    (length,) = struct.unpack_from("<I", data, position)
    if position + 4 + length + _FOOTER.size != len(data):  # zeros in its place would parse as an empty message
        raise ValueError(f"its message of {length} bytes at {position} does not end at the footer")
    return int(position)


def progress(data: bytes) -> Progress:
    """Return the progress in the bytes of a manifest file. Raises the errors that `named_errors` turns into Corrupt."""
    details, (_, manifest) = _mem_wal_details(data), _manifest(data)
    if details is None:
        return Progress({}, {})  # not set up: the metadata was copied with rows of another table
    marked = _generations(details.compacted_sstables)
    stored = next((entry.value for entry in manifest.schema_metadata if entry.key == COMMITTED), b"{}")
    appended = {UUID(region): int(generation) for region, generation in json.loads(stored).items()}
    return Progress(highest(marked, appended), marked)


def highest(one: Mapping[UUID, int], two: Mapping[UUID, int]) -> dict[UUID, int]:
    """Return the higher generation of each region. Pure."""
    return {region: max(one.get(region, 0), two.get(region, 0)) for region in (*one, *two)}


def _mem_wal_details(data: bytes) -> Any:
    """Return the message MemWalIndexDetails of a manifest file; None if it has none."""
    details = _mem_wal_index(data)
    return None if details is None else _DETAILS.FromString(details.value)


def _mem_wal_index(data: bytes) -> Any:
    """Return MemWalIndexDetails as stored: a message with type and bytes."""
    _, manifest = _manifest(data)
    # Position 0 is valid: the section usually comes first in the file.
    if manifest.HasField("index_section"):
        for index in message_at(_INDEX_SECTION, data, manifest.index_section).indices:
            if index.name == MEM_WAL_INDEX:
                return index.index_details
    return None


def _generations(sstables: Iterable[Any]) -> dict[UUID, int]:
    return {UUID(bytes=sst.shard_id.uuid): sst.generation for sst in sstables}


def message_at(kind: Any, data: bytes, position: int) -> Any:
    """Return the message of class `kind` at `position`. It is preceded by its length."""
    (length,) = struct.unpack_from("<I", data, position)
    message = kind()
    message.ParseFromString(data[position + 4 : position + 4 + length])
    return message


_MANIFEST, _INDEX_SECTION, _DETAILS = message_classes(
    "memwal.lance_table", _FIELDS, ("Manifest", "IndexSection", "MemWalIndexDetails")
)
