"""The header of an entry as string metadata, which both file formats carry.

Lance's own keys, which its writer reads too:

    writer_epoch     decimal        generation  decimal; may be absent in entries of older writers
    fence_sentinel   "true"; only in a sentinel

memwal's keys:

    memwal:entry_id  32 hex digits
    memwal:log_id    32 hex digits; absent where the region's manifest has none
    memwal:applied   {"producer": sequence, …}  JSON; or, where the map is long,
                     {"snapshot": "{position}-{32 hex}", "changes": {"producer": sequence, …}}, see wal.applied
    memwal:part      {"producer", "sequence", "attempt", "closes"}  JSON; only in an entry of a batch of several
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memwal.wal.errors import Corrupt
from memwal.wal.records import BatchPart, EntryHeader

Metadata = Mapping[bytes, bytes]


def lances_keys(header: EntryHeader) -> dict[str, str]:
    """Return the keys that Lance's writer writes and reads."""
    metadata = {"writer_epoch": str(header.writer_epoch), "generation": str(header.generation)}
    if header.sentinel:
        metadata["fence_sentinel"] = "true"
    return metadata


def our_keys(header: EntryHeader) -> dict[str, str]:
    """Return the other keys of the header; an `applied` of None is omitted."""
    metadata = {"memwal:entry_id": header.entry_id}
    if header.log_id:
        metadata["memwal:log_id"] = header.log_id
    if header.applied is not None:
        changes = dict(header.applied)
        whole = {"snapshot": header.snapshot, "changes": changes} if header.snapshot else changes
        metadata["memwal:applied"] = json.dumps(whole)
    if header.part is not None:
        metadata["memwal:part"] = json.dumps(vars(header.part))
    return metadata


def parse_header(metadata: Metadata) -> EntryHeader:
    """Parse a header that memwal wrote as `lances_keys` and `our_keys`. Raises Corrupt."""
    try:
        said, part = metadata.get(b"memwal:applied"), metadata.get(b"memwal:part")
        applied, snapshot = (None, "") if said is None else _applied(json.loads(said))
        return EntryHeader(
            writer_epoch=_number(metadata[b"writer_epoch"]),
            generation=_number(metadata[b"generation"]),
            entry_id=metadata[b"memwal:entry_id"].decode(),
            applied=applied,
            part=None if part is None else BatchPart(**json.loads(part)),
            sentinel=metadata.get(b"fence_sentinel") == b"true",
            snapshot=snapshot,
            log_id=metadata.get(b"memwal:log_id", b"").decode(),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Corrupt(f"its metadata is not a memwal entry's: {error!r}") from error


def parse_foreign_header(metadata: Metadata) -> EntryHeader:
    """Parse the header of another program's entry: no id, no applied map, generation 0 if it names none.

    Raises Corrupt.
    """
    try:
        return EntryHeader(
            writer_epoch=_number(metadata[b"writer_epoch"]),
            generation=_number(metadata.get(b"generation", b"0")),
            entry_id="",
            applied=None,
            sentinel=metadata.get(b"fence_sentinel") == b"true",
        )
    except (KeyError, ValueError) as error:
        raise Corrupt(f"its metadata is not a WAL entry's: {error!r}") from error


def check_sum(found: int, recorded: bytes) -> None:
    """Raise Corrupt unless `recorded`, 8 hex digits, is the checksum `found`."""
    if recorded != b"%08x" % found:
        text = repr(recorded.decode("latin-1"))  # damaged bytes may be no digits
        raise Corrupt(f"checksum is {found:08x}, recorded is {text}; the object was damaged after writing")


def _number(text: bytes) -> int:
    if not text.isdigit():
        raise ValueError(f"{text!r} is no number")
    return int(text)


def _applied(found: Any) -> tuple[Mapping[str, int], str]:
    """Return the map, or the changes and the snapshot's name. A producer may be called "snapshot"; its value is a
    number.
    """
    snapshot = ""
    if isinstance(found, dict) and type(found.get("snapshot")) is str:
        found, snapshot = found["changes"], found["snapshot"]
    if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
        raise TypeError("memwal:applied is no map of numbers")
    return found, snapshot
