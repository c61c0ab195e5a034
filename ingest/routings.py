"""Who routes rows by an older routing of the table than the one that holds: a resize came in between."""

from __future__ import annotations

from ingest.errors import Unavailable


def resized(uri: str, ours: int, theirs: int) -> Unavailable:
    """The error of whoever routes by version `ours` of the routing where `theirs` holds: nothing was written."""
    return Unavailable(
        f"{uri}: the table was resized: routing version {theirs} holds, not {ours}; open it again, and send the rows "
        "again with the same token",
        {"reason": "resized", "routing": theirs},
    )


def expect_routing(uri: str, ours: int | None, theirs: int) -> None:
    """Raises: Unavailable where `ours`, None where nobody says, is another than `theirs`."""
    if ours is not None and ours != theirs:
        raise resized(uri, ours, theirs)
