"""Which role a call needs, and whether a caller's token allows it; what is refused, and what admins do, is logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pyarrow.flight as flight

from memwal.ingest.api.reads import READS
from memwal.ingest.errors import Invalid
from memwal.ingest.rpc.guard import Guard, role_of
from memwal.ingest.rpc.roles import Role, permits
from memwal.ingest.rpc.wire import explained
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.access")
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
        self._guard, self._clock = guard, clock
        self._refused = float("-inf")

    def expect(self, context: flight.ServerCallContext, wanted: Role, call: str) -> None:
        """Raises: Invalid if the caller's token does not allow `call`. What admins do is logged."""
        role = role_of(context, self._guard)
        if not permits(role, wanted):
            named = repr(call)[:_CALL_SHOWN]  # the caller's own words
            self._tell_refused(named, role, context.peer())
            raise Invalid(
                f"the token has the role {role!r}, and {named} needs {wanted!r}; use a token with that role",
                {"reason": "role", "role": role, "needs": wanted},
            )
        if wanted == "admin" and call in AUDITED:
            fields = {"event": "admin", "call": call, "peer": context.peer()}
            _LOG.info("admin: %s by %s", call, context.peer(), extra=fields)

    def _tell_refused(self, call: str, role: Role, peer: str) -> None:
        """Log a refusal, one a second at most: callers must not fill the log."""
        now = self._clock.monotonic()
        if now - self._refused >= 1.0:
            self._refused = now
            fields = {"event": "refused", "call": call, "role": role, "peer": peer}
            _LOG.warning("refused: %s by %s, whose token has the role %s", call, peer, role, extra=fields)


def role_for(action: str, request: Mapping[str, Any]) -> Role:
    """Return the role that an action needs. An action that is not known is refused later, to admins only."""
    if action == "regions" and "from" in request:
        return "admin"  # a peer, whose word counts for who serves what
    if action == "schema" and request.get("look"):
        return "write"
    return "read" if action in READ_ACTIONS else "write" if action == "record" else "admin"
