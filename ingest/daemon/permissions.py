"""Which role a call needs, and whether a caller's token allows it; what is refused, and what admins do, is logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow.flight as flight

from memwal.ingest.api.reads import READS
from memwal.ingest.errors import Invalid
from memwal.ingest.rpc.access_log import AccessLog
from memwal.ingest.rpc.guard import Guard, role_of
from memwal.ingest.rpc.roles import Role
from memwal.ingest.rpc.wire import explained
from memwal.wal import Clock

_CALL_SHOWN = 60
AUDITED = frozenset({"flush", "commit", "create_index", "drop_index", "release"})
"""Actions of admins that are logged; the others are looks of peers, several a second."""
UNCOUNTED = frozenset({"regions", "look", "release", "flush", "commit"})
"""Actions that are taken however many calls are under way: a daemon that does not answer its peers looks dead, and what
ends the waiting of puts must not wait for them."""
COUNTS = frozenset(name for read, kind in READS.items() if kind.counts for name in (read, explained(read)))
"""Actions that read rows; the other reads are no actions."""
READ_ACTIONS = COUNTS | {"applied", "changes_position", "base_version", "status", "indexes", "schema", "regions"}


class Permissions:
    """The permissions of a daemon's callers.

    Thread safety. Any thread.
    """

    def __init__(self, guard: Guard, clock: Clock) -> None:
        self._guard, self._log = guard, AccessLog(clock)

    def expect(self, context: flight.ServerCallContext, wanted: Role, call: str) -> None:
        """Raises: Invalid if the caller's token does not allow `call`. What admins do is logged."""
        role, named = role_of(context, self._guard), repr(call)[:_CALL_SHOWN]  # the caller's own words
        if (refused := self._log.refusal(role, wanted, named, context.peer())) is not None:
            raise Invalid(refused, {"reason": "role", "role": role, "needs": wanted})
        if wanted == "admin" and call in AUDITED:
            self._log.admin(call, context.peer())


def role_for(action: str, request: Mapping[str, Any]) -> Role:
    """Return the role that an action needs. An action that is not known is refused later, to admins only."""
    if action == "regions" and "from" in request:
        return "admin"  # a peer, whose word counts for who serves what
    if action == "schema" and request.get("look"):
        return "write"
    return "read" if action in READ_ACTIONS else "write" if action == "record" else "admin"
