"""The region manifest: the epoch that owns the region, its SSTs, and where replay begins.

One object per version, `manifest/{rev(version)}.binpb`, is created with put-if-absent and never changed; the newest
version is authoritative. The bytes are Lance's `ShardManifest` (proto3):

    1 version u64 | 2 writer_epoch u64 | 3 replay_after_wal_entry_position u64 |
    4 wal_entry_position_last_seen u64 | 6 current_generation u64 | 8 repeated SsTable | 10 shard_spec_id u32 |
    11 UUID{1 bytes(16)} | 15 status enum
    memwal's fields, which Lance ignores: 50001 memwal_edit_id string, at the front | 50003 memwal_claim_id string |
    50004 memwal_read_lease u32, milliseconds | 50005 memwal_log_id string | 50006 memwal_released u64 |
    50002 memwal_crc32 fixed32, the last 7 bytes
    SsTable: 1 generation u64 | 2 path string | optional u64 3 in_memory_bytes, 4 physical_rows, 5 primary_key_bytes

Source: "MemTable & WAL Specification", Lance documentation. Unknown fields survive a read-modify-write. The checksum
covers all bytes before it: protobuf parses most damaged bytes without an error, and a replay that begins one position
too late loses rows silently.

The protobuf classes are built here and not generated, so that installation needs no compiler; the table below *is* the
format. The classes have their own descriptor pool, so that they never collide with another library's copy of Lance's
messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from uuid import UUID

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from memwal.wal.errors import Corrupt

_Field = descriptor_pb2.FieldDescriptorProto
_U64, _U32 = _Field.TYPE_UINT64, _Field.TYPE_UINT32
_STRING = _Field.TYPE_STRING

EDIT_ID_FIELD = 50001
"""A memwal field, with a number far above Lance's; Lance's parser ignores it and drops it when it writes the next
version.
"""
EDIT_ID_TAG = bytes.fromhex("8ab518")
"""The field's tag, 50001 << 3 | 2 (length-delimited), as protobuf writes it."""
CHECKSUM_FIELD = 50002
"""A memwal field: CRC-32 of all bytes before this field, which is the last one of the object."""
CHECKSUM_TAG = bytes.fromhex("95b518")
"""The field's tag, 50002 << 3 | 5 (fixed 32 bits), as protobuf writes it."""
READ_LEASE_FIELD = 50004
"""A memwal field: how long, in milliseconds, the owner answers reads after a proof of ownership (`wal.lease`)."""

CLAIM_ID_FIELD = 50003
"""A memwal field: the edit id of the version that claimed the writer epoch. Every later version of the epoch carries
it.
"""
LOG_ID_FIELD = 50005
"""A memwal field: the edit id of version 1. Every later version and every entry of the region's log carries it."""
RELEASED_FIELD = 50006
"""A memwal field: the writer epoch that released the region while every row was in the base table (`wal.lease`)."""


_OPTIONAL = ("in_memory_bytes", "physical_rows", "primary_key_bytes")
"""Fields 3 to 5 of an SsTable."""
MessageFields = Mapping[str, tuple[tuple[int, str, int | str], ...]]
_FIELDS: MessageFields = {
    "UUID": ((1, "uuid", _Field.TYPE_BYTES),),
    "SsTable": (
        (1, "generation", _U64),
        (2, "path", _STRING),
        *((number, name, "optional u64") for number, name in enumerate(_OPTIONAL, 3)),
    ),
    "ShardManifest": (
        (1, "version", _U64),
        (2, "writer_epoch", _U64),
        (3, "replay_after_wal_entry_position", _U64),
        (4, "wal_entry_position_last_seen", _U64),
        (6, "current_generation", _U64),
        (8, "sstables", "SsTable[]"),
        (10, "shard_spec_id", _U32),
        (11, "shard_id", "UUID"),
        # An enum and an int32 have the same bytes; an int32 lets the error name an unknown status.
        (15, "status", _Field.TYPE_INT32),
        (EDIT_ID_FIELD, "memwal_edit_id", _STRING),
        (CLAIM_ID_FIELD, "memwal_claim_id", _STRING),
        (CHECKSUM_FIELD, "memwal_crc32", _Field.TYPE_FIXED32),
        (READ_LEASE_FIELD, "memwal_read_lease", _U32),
        (LOG_ID_FIELD, "memwal_log_id", _STRING),
        (RELEASED_FIELD, "memwal_released", _U64),
    ),
}


def message_classes(package: str, messages: MessageFields, names: Sequence[str]) -> list[Any]:
    """Return the protobuf classes `names` among `messages`, which give number, name and kind of each field.

    A kind is a protobuf type, "optional u64", "int32[]", the name of a message, or a name with "[]". `package`:
    name of the new descriptor pool's package.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for message_name, fields in messages.items():
        message = file.message_type.add(name=message_name)
        for number, name, kind in fields:
            field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
            _set_type(package, message, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in names]


def _set_type(package: str, message: Any, field: Any, kind: int | str) -> None:
    if isinstance(kind, int):
        field.type = kind
    elif kind == "optional u64":
        # Absence differs from zero; proto3 expresses this as a one-member oneof.
        field.type, field.proto3_optional = _Field.TYPE_UINT64, True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")
    elif kind == "int32[]":
        field.type, field.label = _Field.TYPE_INT32, _Field.LABEL_REPEATED
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind.removesuffix('[]')}"
        if kind.endswith("[]"):
            field.label = _Field.LABEL_REPEATED


SHARD_MANIFEST, SS_TABLE = message_classes("memwal.lance", _FIELDS, ("ShardManifest", "SsTable"))


class RegionStatus(IntEnum):
    """Whether a region takes new claims; Lance's numbers."""

    ACTIVE = 0
    SEALED = 1


@dataclass(frozen=True)
class SsTable:
    """A published SST. `path` is the directory's name inside the region; unrecorded counts are None."""

    generation: int
    path: str
    in_memory_bytes: int | None = None
    physical_rows: int | None = None
    primary_key_bytes: int | None = None
    foreign: bytes = field(default=b"", repr=False)
    """Protobuf fields that another writer added, preserved unread."""


@dataclass(frozen=True)
class RegionManifest:
    """One version of a region's manifest. See `wal.invariants` for what may change between two versions."""

    version: int
    writer_epoch: int
    region_id: UUID
    spec_id: int = 1
    replay_after: int = 0
    """Newest WAL position whose rows are in a published SST; replay begins after it."""
    last_seen: int = 0
    """A WAL position known to exist; a hint for finding the tip."""
    current_generation: int = 1
    """Generation that the next published SST must have."""
    ssts: tuple[SsTable, ...] = ()
    """In ascending order of generations."""
    status: RegionStatus = RegionStatus.ACTIVE
    read_lease: int = 0
    """How long, in milliseconds, the owner answers reads from memory after a proof of ownership; see `wal.lease`."""
    released: int = 0
    """The writer epoch that released the region at rest; 0 if none did since the last claim. See `at_rest`."""
    edit_id: str = field(default="", compare=False)
    """Fresh per written version, so that two writers never propose the same bytes; "" if Lance wrote it."""
    claim_id: str = field(default="", compare=False)
    """Edit id of the version that claimed `writer_epoch`, in every version of that epoch. With it an owner
    distinguishes its epoch from the same epoch of a recreated table. "" if Lance or an earlier memwal claimed it.
    """
    log_id: str = field(default="", compare=False)
    """Edit id of version 1, in every version and in every entry of the log (`wal.entry_reader`). "" if an earlier
    memwal or Lance created the region, and permanently once Lance has claimed it.
    """
    foreign: bytes = field(default=b"", repr=False)
    """Protobuf fields that another writer added, preserved unread."""

    @property
    def at_rest(self) -> bool:
        """Whether the owner has released the region, and every acknowledged row is in the base table.

        A value of an older epoch proves nothing: another owner has claimed the region since. (model: Lease!LookAtRest)
        """
        return self.released == self.writer_epoch

    def encode(self) -> bytes:
        """Return the object's bytes. Equal manifests with equal edit ids give equal bytes."""
        message = SHARD_MANIFEST()
        message.ParseFromString(self.foreign)
        message.version = self.version
        message.writer_epoch = self.writer_epoch
        message.replay_after_wal_entry_position = self.replay_after
        message.wal_entry_position_last_seen = self.last_seen
        message.current_generation = self.current_generation
        message.sstables.extend(_sst_message(sst) for sst in self.ssts)
        message.shard_spec_id = self.spec_id
        message.shard_id.uuid = self.region_id.bytes
        message.status = int(self.status)
        message.memwal_claim_id = self.claim_id
        message.memwal_log_id = self.log_id
        message.memwal_read_lease = self.read_lease
        message.memwal_released = self.released
        # The edit id is first, so that a truncated object shows that memwal wrote it and that its checksum is missing.
        edit_id = SHARD_MANIFEST(memwal_edit_id=self.edit_id).SerializeToString()
        body = bytes(edit_id + message.SerializeToString(deterministic=True))
        return body + CHECKSUM_TAG + zlib.crc32(body).to_bytes(4, "little")

    @staticmethod
    def decode(data: bytes) -> RegionManifest:
        """Parse the object's bytes. Raises Corrupt if they are not a manifest."""
        message = _parsed(data)
        try:
            region_id = UUID(bytes=message.shard_id.uuid)
            status = RegionStatus(message.status)
        except ValueError as error:
            raise Corrupt(f"region manifest version {message.version}: {error}") from error
        return RegionManifest(
            version=message.version,
            writer_epoch=message.writer_epoch,
            region_id=region_id,
            spec_id=message.shard_spec_id,
            replay_after=message.replay_after_wal_entry_position,
            last_seen=message.wal_entry_position_last_seen,
            current_generation=message.current_generation,
            ssts=tuple(map(_sst_from, message.sstables)),
            status=status,
            read_lease=message.memwal_read_lease,
            released=message.memwal_released,
            edit_id=message.memwal_edit_id,
            claim_id=message.memwal_claim_id,
            log_id=message.memwal_log_id,
            foreign=_foreign(message),
        )


def _parsed(data: bytes) -> Any:
    message = SHARD_MANIFEST()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Corrupt(f"{len(data)} bytes are no region manifest: {error}") from error
    if not message.version or not message.writer_epoch:
        raise Corrupt(f"{len(data)} bytes are no region manifest: version or writer epoch is 0")
    # Any trace of memwal's fields is enough: one damaged length can hide both from the parser.
    if message.memwal_edit_id or message.memwal_crc32 or data[-7:-4] == CHECKSUM_TAG:
        _check_whole(data)
    return message


def _check_whole(data: bytes) -> None:
    """Raise Corrupt unless `data` is a result of `encode`; a version that Lance wrote has no checksum."""
    body, tag, recorded = data[:-7], data[-7:-4], int.from_bytes(data[-4:], "little")
    if tag != CHECKSUM_TAG and not data.startswith(EDIT_ID_TAG):
        raise Corrupt(
            "it has no checksum: an unreleased state of memwal wrote it; read the table's rows with that state and "
            "put them into a new table"
        )
    if tag != CHECKSUM_TAG or recorded != zlib.crc32(body):
        raise Corrupt(
            f"the checksum of its {len(data)} bytes does not match, it was damaged after writing: "
            "restore the object from a backup"
        )


def _sst_message(sst: SsTable) -> Any:
    message = SS_TABLE()
    message.ParseFromString(sst.foreign)
    message.generation = sst.generation
    message.path = sst.path
    for name in _OPTIONAL:
        if (value := getattr(sst, name)) is not None:
            setattr(message, name, value)
    return message


def _sst_from(message: Any) -> SsTable:
    recorded = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SsTable(message.generation, message.path, **recorded, foreign=_foreign(message))


def _foreign(message: Any) -> bytes:
    """Return the serialised fields of `message` that the descriptors do not name."""
    rest = type(message)()
    rest.CopyFrom(message)
    for name in message.DESCRIPTOR.fields_by_name:
        rest.ClearField(name)
    return bytes(rest.SerializeToString())
