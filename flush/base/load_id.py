"""The ids of a load's two markers (flush.commits.load), under which its outcome is recorded. Neither id is a region.

Each attempt at a load has a generation, one above the committed generation. If it lands, its generation is committed
with the rows, for `load_id`. If another process ends it before it lands (flush.commits.load_notes), its generation is
committed for `load_id` and `ended_id`. Lance commits no generation that is not above the committed one, so only one of
the two happens to each generation.

The ids are derived from the load's token: `load` or `void` in ASCII, then 12 bytes of the SHA-256 of the token, as a
UUID of version 8, which is reserved for custom ids (RFC 9562). Regions have ids of version 5 or 4, so the version
distinguishes the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from uuid import UUID

_LOAD, _ENDED = b"load", b"void"
_VERSION, _VARIANT = 0x80, 0x80


def load_id(token: str) -> UUID:
    """Return the id of the load with `token`. Pure."""
    data = bytearray(_LOAD + hashlib.sha256(token.encode()).digest()[:12])
    data[6] = data[6] & 0x0F | _VERSION
    data[8] = data[8] & 0x3F | _VARIANT
    return UUID(bytes=bytes(data))


def ended_id(load: UUID) -> UUID:
    """Return the id of a load's ended attempts. Pure."""
    return UUID(bytes=_ENDED + load.bytes[len(_ENDED) :])


def is_load(id: UUID) -> bool:
    """Return whether `id` belongs to a load or its ended attempts, and not to a region. Pure."""
    return id.bytes.startswith((_LOAD, _ENDED)) and id.version == _VERSION >> 4


def is_ended(id: UUID) -> bool:
    """Return whether `id` belongs to the ended attempts at a load. Pure."""
    return is_load(id) and id.bytes.startswith(_ENDED)


def loads_in(committed: Iterable[UUID]) -> frozenset[UUID]:
    """Return the ids of loads, and of their ended attempts, among committed generations. Pure."""
    return frozenset(id for id in committed if is_load(id))


def has_landed(committed: Mapping[UUID, int], load: UUID) -> bool:
    """Return whether a load has landed in a base table with the generations `committed`. Pure."""
    return committed.get(load, 0) > committed.get(ended_id(load), 0)


def next_attempt(committed: Mapping[UUID, int], load: UUID) -> int:
    """Return the generation of an attempt at a load that has not landed. Pure."""
    return committed.get(load, 0) + 1
