"""Errors for calls that reach the wrong daemon: another owner, another routing of the table, or another table.

A region id is a function of the bucket only, so it identifies neither the routing nor the table.
"""

from __future__ import annotations

from uuid import UUID

from memwal.ingest.errors import NOT_OWNER, RESIZED, Invalid, Unavailable
from memwal.wal import named


def resized(uri: str, ours: int, theirs: int) -> Unavailable:
    """Return the error of a caller with routing version `ours` while `theirs` is current; nothing was written."""
    return Unavailable(
        f"{uri}: the table was resized: routing version {theirs} holds, not {ours}; open it again, and send the rows "
        "again with the same token",
        {"reason": RESIZED, "routing": theirs},
    )


def wrong_table(uri: str) -> Unavailable:
    """Return the error of a call for a table other than the one at `uri`, which this daemon serves."""
    return Unavailable(
        f"this daemon serves another table, {uri}: its port was reused, or daemon.endpoints lists daemons of that "
        "table; retry with the same token",
        {"reason": NOT_OWNER, "owner": None},
    )


def expect_routing(uri: str, ours: int | None, theirs: int) -> None:
    """Check a caller's routing version `ours` (None: not given) against `theirs`.

    Raises: Unavailable if they differ; Invalid if it is not a number.
    """
    if not isinstance(ours, int | None):
        raise Invalid(f"routing is a {type(ours).__name__}; send the number of the routing version")
    if ours is not None and ours != theirs:
        raise resized(uri, ours, theirs)


def not_owner(region: UUID, owner: tuple[str, int] | None, *, reason: str) -> Unavailable:
    """Return the error of a call for a region that this process does not own; nothing was written.

    `owner`: its endpoint and its epoch, 0 if it has yet to claim the region; None if unknown.
    """
    endpoint, epoch = owner or (None, 0)
    holder = f"the daemon at {endpoint} owns it" if owner else "another daemon owns it, or none yet"
    return Unavailable(
        f"{named(region)} is not owned by this daemon: {holder}; retry at its owner with the same token",
        {"reason": reason, "region": str(region), "owner": endpoint, "epoch": epoch},
    )


def being_resized(uri: str) -> Unavailable:
    """Return the error of a call during a resize, while regions change owners; nothing was applied."""
    return Unavailable(
        f"{uri}: the table is being resized; retry with the same token", {"reason": NOT_OWNER, "owner": None}
    )
