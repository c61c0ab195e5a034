"""Which marker says that a load has landed (flush.commits.load): that of a region of its own, which never exists.

The id is made of the load's token: `load` in ASCII, then 12 bytes of the SHA-256 of the token, as a UUID of version 8,
which is for ids of one's own (RFC 9562). Regions have ids of version 5 or 4, so the id tells a load from a region.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from uuid import UUID

LANDED = 1
"""The only generation of a load."""
_BEGINS, _VERSION, _VARIANT = b"load", 0x80, 0x80


def load_id(token: str) -> UUID:
    """Return the id of the load with `token`. Pure."""
    data = bytearray(_BEGINS + hashlib.sha256(token.encode()).digest()[:12])
    data[6] = data[6] & 0x0F | _VERSION
    data[8] = data[8] & 0x3F | _VARIANT
    return UUID(bytes=bytes(data))


def is_load(id: UUID) -> bool:
    """Return whether `id` is of a load, and not of a region. Pure."""
    return id.bytes.startswith(_BEGINS) and id.version == _VERSION >> 4


def loads_in(committed: Mapping[UUID, int]) -> frozenset[UUID]:
    """Return the loads among committed generations. Pure."""
    return frozenset(id for id in committed if is_load(id))
