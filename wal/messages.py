"""Protobuf classes of the region manifest, built at import from a table of fields.

They are built here and not generated, so that installation needs no compiler; the table below *is* the format. The
classes have their own descriptor pool, so that they never collide with another library's copy of Lance's messages.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "memwal.lance"
_Field = descriptor_pb2.FieldDescriptorProto
_U64, _U32 = _Field.TYPE_UINT64, _Field.TYPE_UINT32
_STRING, _BYTES = _Field.TYPE_STRING, _Field.TYPE_BYTES

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


def _add(message: Any, number: int, name: str, kind: int) -> Any:
    return message.field.add(name=name, number=number, type=kind, label=_Field.LABEL_OPTIONAL)


def _add_message(message: Any, number: int, name: str, type_name: str) -> Any:
    field = _add(message, number, name, _Field.TYPE_MESSAGE)
    field.type_name = f".{_PACKAGE}.{type_name}"
    return field


def _add_optional(message: Any, number: int, name: str) -> None:
    """Add a u64 whose absence differs from zero: proto3 encodes that as a one-member oneof."""
    field = _add(message, number, name, _U64)
    field.proto3_optional = True
    field.oneof_index = len(message.oneof_decl)
    message.oneof_decl.add(name=f"_{name}")


def _describe() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="memwal/lance.proto", package=_PACKAGE, syntax="proto3")
    uuid = file.message_type.add(name="UUID")
    _add(uuid, 1, "uuid", _BYTES)

    sst = file.message_type.add(name="SsTable")
    _add(sst, 1, "generation", _U64)
    _add(sst, 2, "path", _STRING)
    _add_optional(sst, 3, "in_memory_bytes")
    _add_optional(sst, 4, "physical_rows")
    _add_optional(sst, 5, "primary_key_bytes")

    shard = file.message_type.add(name="ShardManifest")
    _add(shard, 1, "version", _U64)
    _add(shard, 2, "writer_epoch", _U64)
    _add(shard, 3, "replay_after_wal_entry_position", _U64)
    _add(shard, 4, "wal_entry_position_last_seen", _U64)
    _add(shard, 6, "current_generation", _U64)
    _add_message(shard, 8, "sstables", "SsTable").label = _Field.LABEL_REPEATED
    _add(shard, 10, "shard_spec_id", _U32)
    _add_message(shard, 11, "shard_id", "UUID")
    # An enum and an int32 have the same bytes; an int32 lets the error name an unknown status.
    _add(shard, 15, "status", _Field.TYPE_INT32)
    _add(shard, EDIT_ID_FIELD, "memwal_edit_id", _STRING)
    _add(shard, CLAIM_ID_FIELD, "memwal_claim_id", _STRING)
    _add(shard, CHECKSUM_FIELD, "memwal_crc32", _Field.TYPE_FIXED32)
    _add(shard, READ_LEASE_FIELD, "memwal_read_lease", _U32)
    _add(shard, LOG_ID_FIELD, "memwal_log_id", _STRING)
    return file


def _classes() -> tuple[Any, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_describe().SerializeToString())
    return tuple(
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in ("ShardManifest", "SsTable")
    )  # type: ignore[return-value]


SHARD_MANIFEST, SS_TABLE = _classes()
