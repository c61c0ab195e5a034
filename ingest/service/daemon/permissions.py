"""Determine the role that a call needs, check it against the caller's token, and log rejections and admin actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow.flight as flight

from memwal.ingest.engine.api.reads import READS
from memwal.ingest.errors import Invalid
from memwal.ingest.service.rpc.access_log import AccessLog
from memwal.ingest.service.rpc.guard import Guard, role_of
from memwal.ingest.service.rpc.roles import Role
from memwal.ingest.service.rpc.wire import explained
from memwal.wal import Clock

_CALL_SHOWN = 60
AUDITED = frozenset({"flush", "commit", "create_index", "drop_index", "release"})
"""Admin actions that are logged. The other admin actions are checks by peers, several a second."""
UNCOUNTED = frozenset({"regions", "look", "release", "flush", "commit"})
"""Actions that are not limited by the number of concurrent calls: peers consider a daemon that does not answer dead,
and the actions that make room for waiting puts must not wait for them."""
COUNTS = frozenset(name for read, kind in READS.items() if kind.counts for name in (read, explained(read)))
"""Actions that read rows; the other reads are not actions."""
READ_ACTIONS = COUNTS | {"applied", "changes_position", "base_version", "status", "indexes", "schema", "regions"}


class Permissions:
    """The permissions of a daemon's callers.

    Thread safety. Any thread.
    """

    def __init__(self, guard: Guard, clock: Clock) -> None:
        self._guard, self._log = guard, AccessLog(clock)

    def expect(self, context: flight.ServerCallContext, wanted: Role, call: str) -> None:
        """Check the role of the caller for `call`, and log admin actions. Raises: Invalid if the token does not
        permit it."""
        role, named = role_of(context, self._guard), repr(call)[:_CALL_SHOWN]  # the caller's own text
        if (refused := self._log.refusal(role, wanted, named, context.peer())) is not None:
            raise Invalid(refused, {"reason": "role", "role": role, "needs": wanted})
        if wanted == "admin" and call in AUDITED:
            self._log.admin(call, context.peer())


def role_for(action: str, request: Mapping[str, Any]) -> Role:
    """Return the role that an action needs. Unknown actions need admin; the service rejects them later."""
    if action == "regions" and "from" in request:
        return "admin"  # a peer, whose call counts as a sign of life
    if action == "schema" and request.get("look"):
        return "write"
    return "read" if action in READ_ACTIONS else "write" if action == "record" else "admin"
