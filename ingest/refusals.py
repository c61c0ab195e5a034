"""Refusing a call that means other regions under the same ids: those of another routing, or another table.

Ids of regions are a function of the bucket alone, so they tell neither the routing nor the table.
"""

from __future__ import annotations

from uuid import UUID

from memwal.ingest.errors import NOT_OWNER, RESIZED, Unavailable


def resized(uri: str, ours: int, theirs: int) -> Unavailable:
    """The error of whoever routes by version `ours` of the routing where `theirs` holds: nothing was written."""
    return Unavailable(
        f"{uri}: the table was resized: routing version {theirs} holds, not {ours}; open it again, and send the rows "
        "again with the same token",
        {"reason": RESIZED, "routing": theirs},
    )


def of_another_table(uri: str) -> Unavailable:
    """The error of a call that is meant for another table than the one at `uri`, which is served where it arrived."""
    return Unavailable(
        f"the daemon there serves another table, {uri}: its port is used again, or daemon.endpoints are those of that "
        "one; retry with the same token",
        {"reason": NOT_OWNER, "owner": None},
    )


def expect_routing(uri: str, ours: int | None, theirs: int) -> None:
    """Raises: Unavailable where `ours`, None where nobody says, is another than `theirs`."""
    if ours is not None and ours != theirs:
        raise resized(uri, ours, theirs)


def not_owner(region: UUID, owner: str | None = None, *, reason: str = "not_owner") -> Unavailable:
    """What a call is told that names a region which this process does not own; nothing was written."""
    there = f"the daemon at {owner} does" if owner else "another one does, or none yet"
    return Unavailable(
        f"region {region}: it is not this daemon's, {there}; ask its owner, with the same token",
        {"reason": reason, "region": str(region), "owner": owner},
    )


def coming_back(uri: str) -> Unavailable:
    """What a call is told while the regions change hands for a resize; nothing of it was applied."""
    return Unavailable(
        f"{uri}: the table is being resized; retry with the same token", {"reason": NOT_OWNER, "owner": None}
    )
